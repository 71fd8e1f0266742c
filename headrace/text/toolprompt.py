"""Tools for chat templates that know nothing of them.

Where the template does not read `tools`, they are described in the system message; where it does
not read `tool_calls` or name the tool role, past calls and their results become text of the
conversation. The form is that of `tools.HERMES`, so that answers are read with it. Nothing of a
request is dropped.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.text.tools import HERMES

BEFORE = "You may call these functions:\n<tools>\n"
AFTER = (
    "\n</tools>\nTo call one, answer with its name and its arguments as JSON:\n"
    f'{HERMES.opening}\n{{"name": "...", "arguments": {{...}}}}\n{HERMES.closing}'
)


def as_text(
    talk: list[dict[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    source: str,
    knows_tool_role: bool,
) -> list[dict[str, Any]]:
    """The conversation with everything in words that a template with this source does not read."""
    if tools and "tools" not in source:
        described = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        talk = _with_system_text(talk, f"{BEFORE}{described}{AFTER}")
    if "tool_calls" not in source:
        talk = [_calls_as_text(message) for message in talk]
    if not knows_tool_role:
        talk = [_result_as_text(message) for message in talk]
    return talk


def _with_system_text(talk: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    first = talk[0]
    if first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{text}".lstrip("\n")}, *talk[1:]]
    return [{"role": "system", "content": text}, *talk]


def _calls_as_text(message: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    parts = [message["content"]] if message["content"] else []
    for call in message["tool_calls"]:
        function = call["function"]
        pair = {"name": function["name"], "arguments": function["arguments"]}
        written = json.dumps(pair, ensure_ascii=False)
        parts.append(f"{HERMES.opening}\n{written}\n{HERMES.closing}")
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(parts)}


def _result_as_text(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] != "tool":
        return message
    content = f"<tool_response>\n{message['content']}\n</tool_response>"
    return {**message, "role": "user", "content": content}
