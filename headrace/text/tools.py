"""Tool calls in generated text: found as the text streams, each piece final.

A format says how a model writes calls. `ToolParser` turns text pieces into events: plain text, the
beginning of a call (index, id and name, once), and pieces of its arguments, whose join is the JSON
text that the model wrote. How the text is cut changes nothing else. What begins like a call and
turns out not to be one comes out as text. White space around calls belongs to them.
"""

import secrets
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.text.callreader import CallReader
from headrace.text.tokenizer import Tokenizer

WHITE = " \n\r\t"


@dataclass(frozen=True)
class Text:
    """Text outside of calls."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """A call begins; indexes count from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of the arguments of a call, as JSON text."""

    index: int
    text: str


Event = Text | CallBegin | CallArguments


@dataclass(frozen=True)
class Call:
    """One whole call; arguments: JSON text."""

    id: str
    name: str
    arguments: str


def _call_id() -> str:
    return f"chatcmpl-tool-{secrets.token_hex(16)}"


def _short_id() -> str:
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(frozen=True)
class ToolFormat:
    """How calls are written. opening: the mark before a call, empty where a call is the whole
    message. closing: the mark after a call. named: a call may be its name and then its arguments,
    with `separator` between. new_id: makes ids as the family's template wants them."""

    name: str
    opening: str = ""
    optional: str = ""
    closing: str = ""
    named: bool = False
    separator: str = ""
    new_id: Callable[[], str] = field(default=_call_id, compare=False)

    def marks(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Control tokens whose text the parser must see."""
        texts = (self.opening, self.closing, self.optional, self.separator)
        return frozenset(tokenizer.special_literals[t] for t in texts
                         if t in tokenizer.special_literals)  # fmt: skip


HERMES = ToolFormat("hermes", opening="<tool_call>", closing="</tool_call>")
LLAMA3_JSON = ToolFormat("llama3_json", optional="<|python_tag|>")
MISTRAL = ToolFormat(
    "mistral", opening="[TOOL_CALLS]", named=True, separator="[ARGS]", new_id=_short_id
)
JSON_LIST = ToolFormat("json_list")
TOOL_FORMATS = {known.name: known for known in (HERMES, LLAMA3_JSON, MISTRAL)}


def format_of(template: str) -> ToolFormat:
    """The format that a chat template shows; hermes where it shows none."""
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<tool_call>" not in template and (
        "<|python_tag|>" in template or '"parameters"' in template
    ):
        return LLAMA3_JSON
    return HERMES


class ToolParser:
    """Finds calls in streamed text. named: the text is nothing but the arguments of that function
    (a forced call). count: calls so far."""

    def __init__(self, form: ToolFormat, *, named: str | None = None) -> None:
        self._form = form
        self._named = named
        self._buffer = ""
        self._space = ""
        self._reader: CallReader | None = None
        self._step = self._text if form.opening else self._start
        self._opened = ""
        self.count = 0
        self._began = False
        self._silent = True

    def push(self, text: str) -> list[Event]:
        """Events of more text."""
        if self._named is not None:
            return self._forced(text)
        self._buffer += text
        events: list[Event] = []
        while self._step(events):
            pass
        return _joined(events)

    def flush(self) -> list[Event]:
        """The rest, at the end of the text."""
        events: list[Event] = []
        reader, self._reader = self._reader, None
        if reader is not None and reader.name is None:
            self._buffer = self._opened + reader.raw + self._buffer
        elif self._step == self._after:
            self._buffer = self._buffer.strip(WHITE + ",;]")
            if self._form.closing.startswith(self._buffer):  # a closing mark that is cut short
                self._buffer = ""
        elif self._step == self._call:
            self._buffer = self._opened + self._buffer
        events.append(Text(self._space + self._buffer))
        self._buffer = self._space = ""
        return _joined(events)

    def _forced(self, text: str) -> list[Event]:
        events: list[Event] = []
        if not self.count:
            events.append(self._begin(self._named or ""))
        events.append(CallArguments(self.count - 1, text))
        return _joined(events)

    def _begin(self, name: str) -> CallBegin:
        self.count += 1
        self._silent = True
        return CallBegin(self.count - 1, self._form.new_id(), name)

    def _start(self, events: list[Event]) -> bool:
        """At the beginning of a message that may be a call as a whole."""
        rest = self._buffer.lstrip(WHITE)
        mark = self._form.optional
        if not rest or (mark and mark.startswith(rest) and rest != mark):
            return False
        if mark and rest.startswith(mark):
            self._opened = self._buffer[: len(self._buffer) - len(rest) + len(mark)]
            self._buffer = rest[len(mark) :]
            self._step = self._call
        elif rest[0] in "{[":
            self._opened, self._buffer = self._buffer[: -len(rest)], rest
            self._step = self._call
        else:
            self._step = self._plain
        return True

    def _plain(self, events: list[Event]) -> bool:
        """Text to the end of the message."""
        events.append(Text(self._space + self._buffer))
        self._space = self._buffer = ""
        return False

    def _text(self, events: list[Event]) -> bool:
        """Text up to the opening mark; white space is kept back, it may belong to a call."""
        before, found, after = self._buffer.partition(self._form.opening)
        if not found:
            sure = len(self._buffer) - _begun(self._buffer, self._form.opening)
            before, after = self._buffer[:sure], self._buffer[sure:]
        shown = (self._space + before).rstrip(WHITE)
        if shown:
            events.append(Text(shown))
        self._space = (self._space + before)[len(shown) :]
        self._buffer = after
        if found:
            self._opened = self._space + self._form.opening
            self._space = ""
            self._step = self._call
        return bool(found)

    def _call(self, events: list[Event]) -> bool:
        """Right after an opening mark, or between calls of a list."""
        if self._reader is not None:
            return self._inside(events)
        skipped = len(self._buffer) - len(self._buffer.lstrip(WHITE + "["))
        rest = self._buffer[skipped:]
        if not rest:
            return False
        if rest[0] == "{":
            self._opened += self._buffer[:skipped]
            self._buffer, self._reader, self._began = rest, CallReader(), False
            return True
        if self._form.named:
            return self._name(events)
        return self._give_up(events)

    def _name(self, events: list[Event]) -> bool:
        """A call written as its name and its arguments."""
        name, brace, rest = self._buffer.partition("{")
        if not brace:
            return False
        name = name.replace(self._form.separator, " ").strip(WHITE)
        if not name or any(char in name for char in '"\n[]'):
            return self._give_up(events)
        events.append(self._begin(name))
        self._reader = CallReader(name)
        self._began = True
        self._opened = ""
        self._buffer = brace + rest
        return True

    def _inside(self, events: list[Event]) -> bool:
        reader = self._reader
        assert reader is not None
        used = reader.push(self._buffer)
        self._buffer = self._buffer[used:]
        if reader.name and not self._began:
            events.append(self._begin(reader.name))
            self._began = True
            self._opened = ""  # what came before it is no text, even if the call is cut short
        if self._began:
            arguments = reader.take()
            self._silent = self._silent and not arguments
            if reader.done and self._silent:
                arguments = "{}"
            events.append(CallArguments(self.count - 1, arguments))
        if not reader.done:
            return False
        self._reader = None
        if not self._began:
            self._buffer = reader.raw + self._buffer
            return self._give_up(events)
        self._opened = ""
        self._step = self._after
        return True

    def _after(self, events: list[Event]) -> bool:
        """After a call: its closing mark, another call, or text."""
        rest = self._buffer.lstrip(WHITE + ",;]")
        marks = [mark for mark in (self._form.closing, self._form.opening) if mark]
        if not rest or any(mark.startswith(rest) and mark != rest for mark in marks):
            return False
        for mark in marks:
            if rest.startswith(mark):
                self._buffer = rest[len(mark) :]
                self._step = self._call if mark == self._form.opening else self._between
                return True
        if rest[0] == "{":
            self._buffer, self._step = rest, self._call
            return True
        self._buffer = self._buffer.lstrip(WHITE)
        self._step = self._text if self._form.opening else self._plain
        return True

    def _between(self, events: list[Event]) -> bool:
        """White space after a closing mark belongs to the call."""
        self._buffer = self._buffer.lstrip(WHITE)
        if not self._buffer:
            return False
        self._step = self._text
        return True

    def _give_up(self, events: list[Event]) -> bool:
        """It was no call."""
        events.append(Text(self._opened))
        self._opened = ""
        self._step = self._plain if not self._form.opening else self._text
        return True


def _begun(text: str, mark: str) -> int:
    """Length of the longest end of a text with which a mark could begin."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0


def _joined(events: Sequence[Event]) -> list[Event]:
    """Events without empty ones, neighbours of one kind as one."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, Text) and isinstance(last, Text):
            result[-1] = Text(last.text + event.text)
        elif (
            isinstance(event, CallArguments)
            and isinstance(last, CallArguments)
            and last.index == event.index
        ):
            result[-1] = CallArguments(last.index, last.text + event.text)
        elif isinstance(event, CallBegin) or event.text:
            result.append(event)
    return result


def collect(events: Sequence[Event]) -> tuple[str, list[Call]]:
    """The text and the whole calls of all events of a message."""
    text = "".join(event.text for event in events if isinstance(event, Text))
    calls = [
        Call(
            begin.id,
            begin.name,
            "".join(
                event.text
                for event in events
                if isinstance(event, CallArguments) and event.index == begin.index
            ),
        )
        for begin in events
        if isinstance(begin, CallBegin)
    ]
    return text, calls
