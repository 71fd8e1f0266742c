"""Tool calls in the text of an answer: found, read and streamed as they grow.

Two forms. Free choice: any number of `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`
after some text (the form of Hermes and Qwen). Forced choice: a JSON array of such objects and
nothing else. The result does not depend on how the text is cut.
"""

import json
import secrets
from dataclasses import dataclass, field
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass
class Call:
    """One call. arguments: the raw JSON text so far."""

    index: int
    name: str = ""
    arguments: str = ""
    id: str = field(default_factory=lambda: f"chatcmpl-tool-{secrets.token_hex(12)}")

    def whole(self) -> dict[str, Any]:
        """As in the message of a whole answer."""
        function = {"name": self.name, "arguments": self.arguments or "{}"}
        return {"id": self.id, "type": "function", "function": function}


class ObjectReader:
    """Reads one JSON object {"name": string, "arguments": value} character by character.

    The text of `arguments` passes on as it comes, once the name is known. done: the object is
    complete. bad: it is no such object.
    """

    def __init__(self, call: Call) -> None:
        self.call = call
        self.done = False
        self.bad = False
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._word = ""
        self._key: str | None = None
        self._value = False
        self._early = ""
        self.named = False

    def push(self, char: str) -> str:
        """Take one character; returns the text of the arguments that may be sent."""
        if self.done or self.bad:
            return ""
        if self._in_string:
            return self._string(char)
        return self._plain(char)

    def _string(self, char: str) -> str:
        self._word += char
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
            if self._depth == 1:
                self._string_ended()
        return self._argument(char)

    def _string_ended(self) -> None:
        try:
            word = json.loads(self._word, strict=False)
        except ValueError:
            self.bad = True
            return
        if not self._value:
            self._key = word
        elif self._key == "name":
            self.call.name = word
            self.named = True

    def _plain(self, char: str) -> str:
        if self._depth == 0:
            if char == "{":
                self._depth = 1
            elif not char.isspace():
                self.bad = True
            return ""
        if char == '"':
            self._in_string = True
            self._word = char
            return self._argument(char)
        if self._depth == 1 and char in ",}":
            self._value = False
            self._key = None
            if char == "}":
                self.done = True
                self.bad = not self.named
                return self._flush()
            return ""
        if self._depth == 1 and char == ":" and not self._value:
            self._value = True
            return ""
        if char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        return self._argument(char)

    def _argument(self, char: str) -> str:
        """A character of a value, if it is the arguments'."""
        if not self._value or self._key not in ("arguments", "parameters"):
            return ""
        if not self.call.arguments and not self._early and char.isspace():
            return ""
        self._early += char
        return self._flush()

    def _flush(self) -> str:
        if not self.named:
            return ""
        text, self._early = self._early, ""
        self.call.arguments += text
        return text


@dataclass
class Delta:
    """What a piece of text added: content, and calls as the API streams them."""

    content: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    def add(self, call: Call, arguments: str, first: bool) -> None:
        """A call's name, or more of its arguments."""
        if first:
            function = {"name": call.name, "arguments": arguments}
            self.calls.append(
                {"index": call.index, "id": call.id, "type": "function", "function": function}
            )
            return
        last = self.calls[-1] if self.calls else None
        if last is not None and last["index"] == call.index:
            last["function"]["arguments"] += arguments
        else:
            self.calls.append({"index": call.index, "function": {"arguments": arguments}})


class CallParser:
    """Splits the text of one choice into content and calls. array: the whole text is an array of
    calls (forced choice); else calls stand between marks. first_only: calls after the first are
    left out."""

    def __init__(self, array: bool, first_only: bool = False) -> None:
        self.calls: list[Call] = []
        self._first_only = first_only
        self._muted = False
        self._array = array
        self._reader: ObjectReader | None = None
        self._raw = ""
        self._held = ""
        self._told = False

    def push(self, text: str, last: bool = False) -> Delta:
        """Take more text; last: nothing follows, so nothing is held back."""
        delta = Delta()
        for char in text:
            if self._muted:
                break
            if self._reader is not None:
                self._read(char, delta)
            elif self._array:
                if char == "{":
                    self._begin()
                    self._read(char, delta)
            else:
                self._look(char, delta)
        if last:
            self._end(delta)
        return delta

    def _look(self, char: str, delta: Delta) -> None:
        """Outside of a call: find the mark that opens one, or what is left of one that closed."""
        self._held += char
        for mark in (OPEN, CLOSE) if self.calls else (OPEN,):
            if self._held == mark:
                self._held = ""
                if mark == OPEN:
                    self._begin()
                return
        while self._held and not any(m.startswith(self._held) for m in (OPEN, CLOSE)):
            out, self._held = self._held[0], self._held[1:]
            if self.calls and out.isspace():
                continue
            delta.content += out

    def _begin(self) -> None:
        self._reader = ObjectReader(Call(len(self.calls)))
        self._raw = ""
        self._told = False

    def _read(self, char: str, delta: Delta) -> None:
        reader = self._reader
        assert reader is not None
        self._raw += char
        text = reader.push(char)
        if reader.bad and not self._told:
            delta.content += ("" if self._array else OPEN) + self._raw
            self._reader = None
            return
        if reader.named and not self._told:
            self._told = True
            self.calls.append(reader.call)
            delta.add(reader.call, text, first=True)
        elif text:
            delta.add(reader.call, text, first=False)
        if reader.done or reader.bad:
            if not reader.call.arguments:
                reader.call.arguments = "{}"
                delta.add(reader.call, "{}", first=False)
            self._reader = None
            self._muted = self._first_only

    def _end(self, delta: Delta) -> None:
        if self._reader is not None and not self._told:
            delta.content += ("" if self._array else OPEN) + self._raw
        delta.content += self._held
        self._held, self._reader = "", None
