"""Tool calls that a request forces: the answer is the arguments, held to the function's schema."""

from typing import Any

import msgspec

from headrace.errors import RequestError
from headrace.serve.fields import ChatRequest, StructuredOutputs, Tool, ToolChoice

ANY_OBJECT: dict[str, Any] = {"type": "object"}


def forced_tool(request: ChatRequest) -> tuple[ChatRequest, str | None]:
    """The request as it is run, and the name of the function whose call is forced, if any.

    A named tool choice, and `required` with one tool, become a constraint on the answer. Raises
    RequestError for what cannot be done: free choice among tools needs the model's own format.
    """
    choice, tools = request.tool_choice, request.tools or []
    for place, tool in enumerate(tools):
        if tool.type != "function":
            name = f"tools[{place}].type"
            raise RequestError(name, f"{name}: only function exists")
    if request.parallel_tool_calls is not None and not tools:
        raise RequestError("parallel_tool_calls", "parallel_tool_calls: only with tools")
    if choice is None:
        choice = "auto" if tools else "none"
    if choice == "none":
        return msgspec.structs.replace(request, tools=None), None
    if not tools:
        raise RequestError("tool_choice", "tool_choice: only with tools")
    if isinstance(choice, ToolChoice):
        tool = _named(tools, choice)
    elif choice == "required" and len(tools) == 1:
        tool = tools[0]
    elif choice in ("required", "auto"):
        raise RequestError(
            "tool_choice",
            f"tool_choice: {choice} with this model: name the function to call, or send none",
        )
    else:
        raise RequestError(
            "tool_choice", "tool_choice: none, auto, required, or a function by name"
        )
    if _constrained(request):
        raise RequestError(
            "tool_choice", "tool_choice: a forced call and another constraint on the answer"
        )
    schema = tool.function.parameters or ANY_OBJECT
    constrained = msgspec.structs.replace(
        request, structured_outputs=StructuredOutputs(json=schema)
    )
    return constrained, tool.function.name


def _named(tools: list[Tool], choice: ToolChoice) -> Tool:
    for tool in tools:
        if tool.function.name == choice.function.name:
            return tool
    name = choice.function.name[:128]
    raise RequestError("tool_choice", f"tool_choice: there is no tool {name!r}")


def _constrained(request: ChatRequest) -> bool:
    form = request.response_format
    return request.structured_outputs is not None or (form is not None and form.type != "text")
