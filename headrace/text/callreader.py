"""Reads a tool call that is written as a JSON object, while it is being written."""

import json

ARGUMENTS = ("arguments", "parameters")


class CallReader:
    """Reads one JSON object `{"name": ..., "arguments": {...}}` character by character; where the
    name is given already, the object of the arguments alone."""

    def __init__(self, name: str | None = None) -> None:
        self.raw = ""
        self.name = name
        self.done = False
        self._fresh = ""
        self._alone = name is not None
        self._depth = 0 if name is None else 1
        self._in_string = self._escaped = False
        self._key = None if name is None else ARGUMENTS[0]
        self._value = ""
        self._live = False

    def push(self, text: str) -> int:
        """Read until the object ends; how many characters belong to it."""
        for index, char in enumerate(text):
            self._read(char)
            if self.done:
                self.raw += text[: index + 1]
                return index + 1
        self.raw += text
        return len(text)

    def take(self) -> str:
        """The arguments read since the last call; none before the name is known."""
        if self.name is None:
            return ""
        fresh, self._fresh = self._fresh, ""
        return fresh

    def _read(self, char: str) -> None:
        outside = not self._in_string
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
            if self._depth == 1:
                return
        elif char in "}]":
            self._depth -= 1
            if self._depth == 0:
                self._end_value()
                self.done = True
                return
        if outside and self._depth == 1 and char == ",":
            self._end_value()
        elif outside and self._depth == 1 and char == ":" and self._key is None:
            self._key, self._value = _string(self._value), ""
        else:
            self._add(char)

    def _add(self, char: str) -> None:
        """One character of a key or a value of the outermost object."""
        if not self._value.strip() and char == "{" and self._key in ARGUMENTS:
            self._live = True
        if self._live:
            self._fresh += char
            if self._depth == 1:
                self._live, self._key = False, ""
                self.done = self._alone
        self._value += char

    def _end_value(self) -> None:
        if self._key == "name":
            self.name = _string(self._value)
        elif self._key in ARGUMENTS:  # not an object: JSON inside a string, as some models write
            text = _string(self._value)
            self._fresh += (self._value if text is None else text).strip() or "{}"
        self._key, self._value, self._live = None, "", False


def _string(text: str) -> str | None:
    """The string that a JSON text is, None if it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None
