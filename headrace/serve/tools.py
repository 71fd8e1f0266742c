"""What the tool fields of a request ask for, and how the model is told.

A named function, or `required` with one: the answer is held to the function's parameters.
`required` with several: the answer is held to a JSON array of calls. `auto`: the answer is free,
and calls in it are found. A template that knows tools shows them its own way; for one that does
not, a system message tells of them, and past calls are written as the model would write them.
"""

import json
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from headrace.errors import RequestError
from headrace.serve.calls import CLOSE, OPEN
from headrace.serve.fields import ChatRequest, StructuredOutputs, Tool, ToolChoice
from headrace.text.chat import ChatTemplate

ANY_OBJECT: dict[str, Any] = {"type": "object"}
MAX_CALLS = 16
"""Calls in one forced answer."""


@dataclass(frozen=True)
class ToolPlan:
    """How the answer is read. form: text (no tools), arguments (of `function`), array, or marks.
    first_only: calls after the first are left out."""

    form: Literal["text", "arguments", "array", "marks"] = "text"
    function: str | None = None
    first_only: bool = False


def plan_tools(request: ChatRequest) -> tuple[ChatRequest, ToolPlan]:
    """The request with the constraint that its tool choice means. Raises RequestError."""
    choice, tools = request.tool_choice, request.tools or []
    names = set()
    for place, tool in enumerate(tools):
        if tool.type != "function":
            name = f"tools[{place}].type"
            raise RequestError(name, f"{name}: only function exists")
        if tool.function.name in names:
            name = f"tools[{place}].function.name"
            raise RequestError(name, f"{name}: {tool.function.name!r} is there twice")
        names.add(tool.function.name)
    if request.parallel_tool_calls is not None and not tools:
        raise RequestError("parallel_tool_calls", "parallel_tool_calls: only with tools")
    if choice is None:
        choice = "auto" if tools else "none"
    if choice == "none":
        return msgspec.structs.replace(request, tools=None), ToolPlan()
    if not tools:
        raise RequestError("tool_choice", "tool_choice: only with tools")
    single = request.parallel_tool_calls is False
    if choice == "auto":
        return request, ToolPlan("marks", first_only=single)
    if isinstance(choice, ToolChoice):
        return _held(request, _named(tools, choice))
    if choice != "required":
        raise RequestError(
            "tool_choice", "tool_choice: none, auto, required, or a function by name"
        )
    if len(tools) == 1:
        return _held(request, tools[0])
    schema = _array_schema(tools, 1 if single else MAX_CALLS)
    return _constrained(request, schema), ToolPlan("array")


def _held(request: ChatRequest, tool: Tool) -> tuple[ChatRequest, ToolPlan]:
    """The answer is the arguments of this function."""
    schema = tool.function.parameters or ANY_OBJECT
    return _constrained(request, schema), ToolPlan("arguments", tool.function.name)


def _constrained(request: ChatRequest, schema: dict[str, Any]) -> ChatRequest:
    form = request.response_format
    others = (
        request.structured_outputs, request.guided_json, request.guided_regex,
        request.guided_choice, request.guided_grammar, request.regex, request.ebnf,
        request.json_schema,
    )  # fmt: skip
    if (form is not None and form.type != "text") or any(each is not None for each in others):
        raise RequestError(
            "tool_choice", "tool_choice: a forced call and another constraint on the answer"
        )
    return msgspec.structs.replace(request, structured_outputs=StructuredOutputs(json=schema))


def _named(tools: list[Tool], choice: ToolChoice) -> Tool:
    for tool in tools:
        if tool.function.name == choice.function.name:
            return tool
    name = choice.function.name[:128]
    raise RequestError("tool_choice", f"tool_choice: there is no tool {name!r}")


def _array_schema(tools: list[Tool], most: int) -> dict[str, Any]:
    """A list of calls of any of the tools; definitions move to the root, under new names."""
    definitions: dict[str, Any] = {}
    options = []
    for place, tool in enumerate(tools):
        schema = dict(tool.function.parameters or ANY_OBJECT)
        for keyword in ("$defs", "definitions"):
            for name, value in (schema.pop(keyword, None) or {}).items():
                definitions[f"{place}.{keyword}.{name}"] = _moved(value, place)
        options.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool.function.name},
                    "arguments": _moved(schema, place),
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    root: dict[str, Any] = {
        "type": "array", "minItems": 1, "maxItems": most, "items": {"anyOf": options}
    }  # fmt: skip
    return root | ({"$defs": definitions} if definitions else {})


def _moved(value: Any, place: int) -> Any:
    """A schema whose references point to where its definitions went."""
    if isinstance(value, list):
        return [_moved(item, place) for item in value]
    if not isinstance(value, dict):
        return value
    moved = {key: _moved(item, place) for key, item in value.items()}
    target = value.get("$ref")
    if isinstance(target, str):
        parts = target.split("/")
        if len(parts) != 3 or parts[0] != "#" or parts[1] not in ("$defs", "definitions"):
            name = f"tools[{place}].function.parameters"
            raise RequestError(
                name, f"{name}: $ref {target[:100]!r} with several tools: only #/$defs/NAME"
            )
        moved["$ref"] = f"#/$defs/{place}.{parts[1]}.{parts[2]}"
    return moved


def tell(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]], template: ChatTemplate
) -> list[dict[str, Any]]:
    """The messages with what the template does not show: the tools and the past calls."""
    told = messages
    if tools and "tools" not in template.source:
        text = _tools_text(tools)
        if messages and messages[0]["role"] in ("system", "developer"):
            first = dict(messages[0])
            content = first.get("content") or ""
            if isinstance(content, list):
                first["content"] = [*content, {"type": "text", "text": text}]
            else:
                first["content"] = f"{content}\n\n{text}"
            told = [first, *messages[1:]]
        else:
            told = [{"role": "system", "content": text}, *messages]
    if "tool_calls" not in template.source:
        told = [_calls_as_text(message) for message in told]
    return told


def _tools_text(tools: list[dict[str, Any]]) -> str:
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    example = f'{OPEN}\n{{"name": "...", "arguments": {{...}}}}\n{CLOSE}'
    return (
        f"You may call these functions:\n<tools>\n{listed}\n</tools>\n"
        f"To call one, answer with its name and arguments as JSON between marks:\n{example}"
    )


def _calls_as_text(message: dict[str, Any]) -> dict[str, Any]:
    """A message of past calls, with them in its content as the model would write them."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = []
    for call in calls:
        function = call["function"]
        arguments = function.get("arguments") or "{}"
        raw = arguments if isinstance(arguments, str) else json.dumps(arguments)
        name = json.dumps(function["name"], ensure_ascii=False)
        texts.append(f'{OPEN}\n{{"name": {name}, "arguments": {raw}}}\n{CLOSE}')
    content = message.get("content") or ""
    if isinstance(content, list):
        joined: Any = [*content, *({"type": "text", "text": text} for text in texts)]
    else:
        joined = "\n".join([*([content] if content else []), *texts])
    return message | {"content": joined}
