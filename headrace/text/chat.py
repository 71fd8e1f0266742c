"""A conversation as token ids.

Rules. The content of a message is text; a list of text parts is joined with line breaks; no content
is empty text. Role `developer` is `system` where the template does not name it; a role that is
neither one of the API's nor named in the template is refused. Arguments of past tool calls are a
mapping that prints as its JSON text, so templates which iterate and templates which join both work.
Tools that a template does not know are put in words (`toolprompt`).
Control-token text inside the client's strings stays text: it never becomes the control token.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headrace.errors import RequestError
from headrace.text.template import OWN_VARIABLES, ChatTemplate
from headrace.text.tokenizer import Tokenizer
from headrace.text.toolprompt import as_text

__all__ = ["ChatTemplate", "chat_template", "normalize_messages", "render_chat", "render_text"]

FIELD = "messages"
ROLES = frozenset({"system", "user", "assistant", "tool", "function"})
TEXT_PARTS = {"text": "text", "refusal": "refusal"}
PRIVATE_USE = range(0xE000, 0xF8FF)


class Arguments(dict[str, Any]):
    """Arguments of a tool call: a mapping that reads as its JSON text in a string."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, other: Any) -> str:
        return str(self) + str(other)

    def __radd__(self, other: Any) -> str:
        return str(other) + str(self)


def chat_template(tokenizer: Tokenizer, source: str | None = None) -> ChatTemplate | None:
    """The tokenizer's own template, or another source for it; None where there is neither."""
    source = tokenizer.chat_template if source is None else source
    if source is None:
        return None
    bos, eos = tokenizer.bos, tokenizer.eos
    return ChatTemplate(
        source,
        bos_token=None if bos is None else tokenizer.token_text(bos),
        eos_token=None if eos is None else tokenizer.token_text(eos),
    )


def render_text(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    documents: Sequence[Mapping[str, Any]] | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The conversation as the template writes it. Raises RequestError ('messages')."""
    talk = normalize_messages(messages, template)
    talk = as_text(talk, tools or (), template.source, template.mentions("tool"))
    for name in kwargs or ():
        if name in OWN_VARIABLES:
            raise RequestError(
                "chat_template_kwargs", f"chat_template_kwargs: {name} is a field of the request"
            )
    variables = {
        **(kwargs or {}),
        "tools": list(tools) if tools else None,
        "documents": list(documents) if documents else None,
        "add_generation_prompt": add_generation_prompt,
    }
    if not continue_final_message:
        return template.render(talk, **variables)
    if add_generation_prompt:
        raise RequestError(
            "continue_final_message",
            "continue_final_message needs add_generation_prompt to be false",
        )
    return _unfinished(template, talk, variables)


def _unfinished(
    template: ChatTemplate, talk: list[dict[str, Any]], variables: dict[str, Any]
) -> str:
    """The conversation cut right after its last message's content."""
    mark = _unused_character(_strings([talk, variables]))
    content = talk[-1]["content"]
    talk[-1]["content"] = content + mark
    before, found, _ = template.render(talk, **variables).rpartition(mark)
    if not found:
        raise RequestError(
            "continue_final_message", "the chat template does not show the last message's content"
        )
    return before


def render_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    documents: Sequence[Mapping[str, Any]] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    limit: int | None = None,
) -> list[int]:
    """Token ids of the conversation (template text, no further begin token). limit: as in
    `Tokenizer.encode`. Raises RequestError naming the field."""
    given: list[Any] = [
        list(messages),
        list(tools or ()),
        list(documents or ()),
        dict(kwargs or {}),
    ]
    pattern = tokenizer.special_pattern
    hidden: list[str] = []
    mark = ""
    if pattern is not None and any(pattern.search(text) for text in _strings(given)):
        mark = _unused_character(_strings(given))
        given = _hide(given, pattern, mark, hidden)
    text = render_text(
        template,
        given[0],
        tools=given[1],
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        documents=given[2],
        kwargs=given[3],
    )
    if not hidden:
        return tokenizer.encode(text, add_special=False, limit=limit, field=FIELD)
    return _encode_hidden(tokenizer, text, mark, hidden, limit)


def _encode_hidden(
    tokenizer: Tokenizer, text: str, mark: str, hidden: list[str], limit: int | None
) -> list[int]:
    """Encode a rendered text in which the client's control-token literals are hidden.

    The control tokens still visible are the template's own. What lies between them is encoded as
    ordinary text, with the literals back in place.
    """
    assert tokenizer.special_pattern is not None
    marked = re.compile(f"(?:{mark}|{_escaped(mark)})([0-9]+)(?:{mark}|{_escaped(mark)})")
    ids: list[int] = []
    position = 0
    for match in [*tokenizer.special_pattern.finditer(text), None]:
        end = len(text) if match is None else match.start()
        plain = marked.sub(lambda found: hidden[int(found[1])], text[position:end])
        if plain:
            ids += tokenizer.encode(
                plain, specials=False, add_special=False, limit=limit, field=FIELD
            )
        if match is not None:
            ids.append(tokenizer.special_literals[match[0]])
            position = match.end()
            if ids[-1] in tokenizer.swallowing:
                position += len(text[position:]) - len(text[position:].lstrip())
    if limit is not None and len(ids) > limit:
        raise RequestError(FIELD, f"{FIELD} has {len(ids)} tokens, more than the limit of {limit}")
    return ids


def _escaped(mark: str) -> str:
    return re.escape(json.dumps(mark)[1:-1])


def _strings(value: Any) -> Iterator[str]:
    """All strings inside a JSON value, names included."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, (list, tuple)):
            stack.extend(item)


def _hide(value: Any, pattern: re.Pattern[str], mark: str, hidden: list[str]) -> Any:
    """The value with each control-token literal replaced by a numbered mark."""

    def number(match: re.Match[str]) -> str:
        hidden.append(match[0])
        return f"{mark}{len(hidden) - 1}{mark}"

    if isinstance(value, str):
        return pattern.sub(number, value)
    if isinstance(value, Mapping):
        return {
            _hide(key, pattern, mark, hidden): _hide(item, pattern, mark, hidden)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_hide(item, pattern, mark, hidden) for item in value]
    return value


def _unused_character(strings: Iterator[str]) -> str:
    """A private-use character that no string holds."""
    used = {char for text in strings if not text.isascii() for char in text}
    for code in PRIVATE_USE:
        if chr(code) not in used:
            return chr(code)
    raise RequestError(FIELD, "messages use every private-use character of Unicode")


def normalize_messages(
    messages: Sequence[Mapping[str, Any]], template: ChatTemplate
) -> list[dict[str, Any]]:
    """The messages as templates expect them (see the module's rules). Raises RequestError."""
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError(FIELD, "messages must be a list of messages")
    if not messages:
        raise RequestError(FIELD, "messages must hold at least one message")
    return [_message(index, message, template) for index, message in enumerate(messages)]


def _message(index: int, message: Any, template: ChatTemplate) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise RequestError(FIELD, f"{where} must be an object")
    role = message.get("role")
    if not isinstance(role, str):
        raise RequestError(FIELD, f"{where}.role must be a string")
    result = {key: value for key, value in message.items() if value is not None}
    if role == "developer" and not template.mentions(role):
        result["role"] = "system"
    elif role not in ROLES and not template.mentions(role):
        raise RequestError(FIELD, f"{where}.role {role!r} is not a role of this model")
    if not isinstance(result.get("name", ""), str):
        raise RequestError(FIELD, f"{where}.name must be a string")
    result["content"] = _content(where, message.get("content"), role)
    if result.get("tool_calls") and role != "assistant":
        raise RequestError(FIELD, f"{where}.tool_calls: only an assistant makes calls")
    if result.get("tool_calls"):
        result["tool_calls"] = _tool_calls(where, result["tool_calls"])
    else:
        result.pop("tool_calls", None)
    return result


def _content(where: str, content: Any, role: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise RequestError(FIELD, f"{where}.content must be text or a list of text parts")
    texts = []
    for number, part in enumerate(content):
        place = f"{where}.content[{number}]"
        if not isinstance(part, Mapping):
            raise RequestError(FIELD, f"{place} must be an object with a type")
        key = TEXT_PARTS.get(str(part.get("type")))
        if key is None:
            raise RequestError(
                FIELD, f"{place}.type {part.get('type')!r} is not supported: this model reads text"
            )
        if key == "refusal" and role != "assistant":
            raise RequestError(FIELD, f"{place}: only an assistant refuses")
        if not isinstance(part.get(key), str):
            raise RequestError(FIELD, f"{place}.{key} must be a string")
        texts.append(part[key])
    return "\n".join(texts)


def _tool_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, (list, tuple)):
        raise RequestError(FIELD, f"{where}.tool_calls must be a list")
    result = []
    for number, call in enumerate(calls):
        place = f"{where}.tool_calls[{number}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(FIELD, f"{place}.function must be an object with a name")
        if call.get("type", "function") != "function":
            raise RequestError(FIELD, f"{place}.type {call['type']!r} is not function")
        arguments = _arguments(f"{place}.function.arguments", function.get("arguments"))
        result.append({**call, "function": {**function, "arguments": arguments}})
    return result


def _arguments(place: str, value: Any) -> Arguments:
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else {}
        except (ValueError, RecursionError) as error:
            raise RequestError(FIELD, f"{place} is not valid JSON: {error}") from error
    if value is None:
        value = {}
    if not isinstance(value, Mapping):
        raise RequestError(FIELD, f"{place} must be a JSON object")
    return Arguments(value)
