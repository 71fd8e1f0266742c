"""Prompts as token ids: text is tokenized, conversations go through the chat template.

Long texts are tokenized in a thread, so that streams and health checks keep their pace.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from headrace.errors import RequestError
from headrace.serve.fields import ChatRequest, CompletionRequest, Message, TokenizeRequest
from headrace.serve.resolve import Served
from headrace.text.chat import ChatTemplate, render_chat

T = TypeVar("T")

INLINE_CHARACTERS = 2048
"""Texts up to this long are tokenized on the event loop (well under a millisecond)."""
MAX_PROMPTS = 1024


async def _work(size: int, function: Callable[[], T]) -> T:
    """Run `function` here, or in a thread when its text is long."""
    if size <= INLINE_CHARACTERS:
        return function()
    return await asyncio.to_thread(function)


async def completion_prompts(
    request: CompletionRequest, served: Served
) -> tuple[list[list[int]], list[str | None]]:
    """Token ids of each prompt, and its text where it came as text. Raises RequestError."""
    given = request.prompt
    add_special = request.add_special_tokens is not False
    limit = None if request.truncate_prompt_tokens is not None else served.max_model_len
    items = [given] if isinstance(given, str) else _as_items(given, limit)

    def tokenize() -> list[list[int]]:
        return [
            served.tokenizer.encode(item, add_special=add_special, limit=limit)
            if isinstance(item, str)
            else item
            for item in items
        ]

    size = sum(len(item) for item in items if isinstance(item, str))
    ids = await _work(size, tokenize)
    return ids, [item if isinstance(item, str) else None for item in items]


def _as_items(given: list[str | int | list[int]], limit: int | None) -> list[str | list[int]]:
    """The prompts of a list: of texts, of token ids (one prompt), or of lists of them. limit: most
    tokens of one prompt; looked at before anything that takes time."""
    if not given:
        raise RequestError("prompt", "prompt: an empty list; at least one prompt is needed")
    single = isinstance(given[0], int)
    if not single and len(given) > MAX_PROMPTS:
        raise RequestError("prompt", f"prompt: {len(given)} prompts, the limit is {MAX_PROMPTS}")
    for item in [given] if single else given:
        if limit is not None and isinstance(item, list) and len(item) > limit:
            raise RequestError(
                "prompt",
                f"prompt has {len(item)} tokens, but the model's context is {limit} tokens",
            )
    if len({type(item) for item in given}) > 1:
        raise RequestError("prompt", "prompt: texts, token ids and lists of them don't mix")
    if single:
        return [[item for item in given if isinstance(item, int)]]
    return [item for item in given if not isinstance(item, int)]


def as_dicts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as the chat template takes them, without what is absent."""
    shown = []
    for message in messages:
        value: dict[str, Any] = msgspec.to_builtins(message)
        value = {key: item for key, item in value.items() if item is not None}
        reasoning = value.get("reasoning") or value.get("reasoning_content")
        if reasoning is not None:
            value |= {"reasoning": reasoning, "reasoning_content": reasoning}
        if "tool_calls" in value:
            value["tool_calls"] = [
                {key: item for key, item in call.items() if item is not None}
                for call in value["tool_calls"]
            ]
        if isinstance(value.get("content"), list):
            value["content"] = [
                {key: item for key, item in part.items() if item is not None}
                for part in value["content"]
            ]
        shown.append(value)
    return shown


async def chat_prompt(
    request: ChatRequest | TokenizeRequest,
    served: Served,
    template: ChatTemplate | None,
    tools: list[dict[str, Any]] | None = None,
) -> list[int]:
    """Token ids of a conversation. tools: those to show, where they are not the request's own.
    Raises RequestError, also when the template refuses the conversation."""
    if template is None:
        raise RequestError(
            "messages", "this model has no chat template; start the server with --chat-template"
        )
    messages = as_dicts(request.messages or [])
    for place, message in enumerate(messages):
        if "content" not in message and "tool_calls" not in message:
            name = f"messages[{place}].content"
            raise RequestError(name, f"{name}: required")
    proceed = bool(request.continue_final_message)
    opens = not proceed if request.add_generation_prompt is None else request.add_generation_prompt
    if tools is None and request.tools is not None:
        tools = [present(msgspec.to_builtins(tool)) for tool in request.tools]
    documents = request.documents if isinstance(request, ChatRequest) else None
    if documents and "documents" not in template.source:
        raise RequestError("documents", "documents: the model's chat template shows none")
    cuts = isinstance(request, ChatRequest) and request.truncate_prompt_tokens is not None

    def render() -> list[int]:
        return render_chat(
            served.tokenizer,
            template,
            messages,
            tools=tools or None,
            add_generation_prompt=opens,
            continue_final_message=proceed,
            documents=documents,
            kwargs=request.chat_template_kwargs,
            limit=None if cuts else served.max_model_len,
        )

    ids = await _work(_size(messages), render)
    if request.add_special_tokens:
        ids = [*served.tokenizer.encode("", add_special=True), *ids]
    return ids


def present(value: Any) -> Any:
    """Without the members that are null, as the client wrote it."""
    if isinstance(value, dict):
        return {key: present(item) for key, item in value.items() if item is not None}
    return value


def _size(messages: list[dict[str, Any]]) -> int:
    """About the number of characters of a conversation."""
    return sum(
        len(content) if isinstance(content := message.get("content"), str) else 4096
        for message in messages
    )
