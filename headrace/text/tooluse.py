"""The tool fields of a chat request: what is shown, what the answer may be, how it is read.

- `tool_choice` none: tools are not shown, nothing is read.
- auto: the model decides, in the format that its template shows. Where a function is `strict`, a
  call once begun must name a function and its arguments must follow that function's schema.
- required: the answer is a JSON list of calls, at least one.
- a named function: the answer is its arguments.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.errors import RequestError
from headrace.text.grammar import validate
from headrace.text.schema import read_json
from headrace.text.tools import HERMES, JSON_LIST, ToolFormat, ToolParser, format_of

FIELD = "tools"
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
ANY_OBJECT = {"type": "object"}
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
MAX_TOOLS = 128


@dataclass(frozen=True)
class ToolPlan:
    """tools: for `render_chat`. grammar: (kind, source) of the constraint on the answer. form: how
    calls are read, None where none are. named: the one function that is called."""

    tools: list[dict[str, Any]] | None = None
    grammar: tuple[str, str] | None = None
    form: ToolFormat | None = None
    named: str | None = None

    def parser(self) -> ToolParser | None:
        """A parser for one answer."""
        return None if self.form is None else ToolParser(self.form, named=self.named)


def plan_tools(
    tools: Sequence[Mapping[str, Any]] | None,
    choice: str | Mapping[str, Any] | None = None,
    *,
    parallel: bool = True,
    template: str = "",
) -> ToolPlan:
    """The plan of a request. template: source of the chat template, which shows the format. Raises
    RequestError ('tools', 'tool_choice')."""
    shown = _checked(tools or ())
    if not shown:
        if choice not in (None, "none", "auto"):
            raise RequestError("tool_choice", "tool_choice asks for a call but there are no tools")
        return ToolPlan()
    if choice == "none":
        return ToolPlan()
    if choice in (None, "auto"):
        form = format_of(template)
        return ToolPlan(shown, _strict_grammar(shown, form), form)
    if choice == "required":
        source = json.dumps(_list_of_calls(shown, parallel))
        validate("json", source, FIELD)
        return ToolPlan(shown, ("json", source), JSON_LIST)
    name = _chosen(choice)
    for tool in shown:
        if tool["function"]["name"] == name:
            source = json.dumps(_parameters(tool))
            return ToolPlan(shown, ("json", source), JSON_LIST, name)
    raise RequestError("tool_choice", f"tool_choice names {name!r}, which is not one of the tools")


def _checked(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(tools, (str, Mapping)) or len(tools) > MAX_TOOLS:
        raise RequestError(FIELD, f"tools must be a list of at most {MAX_TOOLS} tools")
    names = set()
    for index, tool in enumerate(tools):
        place = f"tools[{index}]"
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type") != "function":
            raise RequestError(FIELD, f"{place} must be of type function, with a function")
        name = function.get("name")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise RequestError(
                FIELD, f"{place}.function.name must be 1 to 64 letters, digits, '_', '.' or '-'"
            )
        if name in names:
            raise RequestError(FIELD, f"{place}.function.name {name!r} is there twice")
        names.add(name)
        if function.get("strict") or function.get("parameters") is not None:
            _parameters(dict(tool))
    return [dict(tool) for tool in tools]


def _chosen(choice: Any) -> str:
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or choice.get("type") != "function":
        raise RequestError(
            "tool_choice",
            "tool_choice must be none, auto, required or "
            '{"type": "function", "function": {"name": ...}}',
        )
    return name


def _parameters(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments; one without parameters takes none (an empty object), as
    in the OpenAI API. Raises RequestError where it has to be followed and can't be."""
    function = tool["function"]
    schema = function.get("parameters")
    if schema is None:
        return dict(NO_ARGUMENTS)
    field = f"{FIELD}: function {function['name']!r}: parameters"
    if not isinstance(schema, Mapping):
        raise RequestError(FIELD, f"{field} must be a JSON schema")
    try:
        source = json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(FIELD, f"{field} can't be read: {error}") from error
    value: dict[str, Any] = read_json(source, field)
    return value or dict(ANY_OBJECT)


def _list_of_calls(tools: list[dict[str, Any]], parallel: bool) -> dict[str, Any]:
    """The schema of an answer that is nothing but calls."""
    options = []
    for index, tool in enumerate(tools):
        place = f"#/items/anyOf/{index}/properties/arguments"
        properties = {
            "name": {"const": tool["function"]["name"]},
            "arguments": _moved(_parameters(tool), place),
        }
        options.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    schema = {"type": "array", "items": {"anyOf": options}, "minItems": 1}
    return schema if parallel else schema | {"maxItems": 1}


def _moved(value: Any, place: str) -> Any:
    """A schema whose local references hold when it stands at a place in another one."""
    if isinstance(value, dict):
        return {
            key: place + item[1:]
            if key == "$ref" and isinstance(item, str) and item.startswith("#")
            else _moved(item, place)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_moved(item, place) for item in value]
    return value


def _strict_grammar(tools: list[dict[str, Any]], form: ToolFormat) -> tuple[str, str] | None:
    """The constraint on calls that the model chooses to make, where a function asks for it."""
    if not any(tool["function"].get("strict") for tool in tools):
        return None
    if form != HERMES:
        raise RequestError(
            FIELD,
            f"tools: strict functions with tool_choice auto need calls in the form of hermes; this "
            f"model's are {form.name}: leave strict out, or use tool_choice required",
        )
    structures = [
        {
            "begin": f'{form.opening}\n{{"name": "{tool["function"]["name"]}", "arguments": ',
            "schema": _parameters(tool) if tool["function"].get("strict") else ANY_OBJECT,
            "end": f"}}\n{form.closing}",
        }
        for tool in tools
    ]
    source = json.dumps({"structures": structures, "triggers": [form.opening]})
    validate("structural_tag", source, FIELD)
    return ("structural_tag", source)
