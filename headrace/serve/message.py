"""The text of a chat answer as the parts of a message: reasoning, content, tool calls.

How calls and thinking are written is the business of `text.tools` and `text.reasoning`; here their
events become the deltas and messages of the API. The result does not depend on how the text is cut.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.errors import RequestError
from headrace.serve.fields import ChatRequest
from headrace.serve.resolve import Served
from headrace.text.chat import ChatTemplate
from headrace.text.reasoning import (
    ReasoningSplitter,
    ThinkMarks,
    think_marks,
    thinking_is_open,
    thinking_is_over,
)

if TYPE_CHECKING:
    from headrace.text.tools import Event
    from headrace.text.tooluse import ToolPlan

TAIL = 64
"""Tokens at the end of a prompt in which an open thinking mark is looked for."""


@dataclass(frozen=True)
class Reading:
    """How the answers of a request are read. tools: None where none are given. first_only: calls
    after the first are left out. marks: of thinking; opened: the prompt ends inside of it. keep:
    control tokens whose text is read. after: the token that ends thinking, where thinking is still
    to come: a constraint on the answer begins after it."""

    tools: "ToolPlan | None" = None
    first_only: bool = False
    marks: ThinkMarks | None = None
    opened: bool = False
    keep: frozenset[int] = frozenset()
    after: int | None = None

    @property
    def plain(self) -> bool:
        """True when the text is the content and nothing else."""
        return self.marks is None and (self.tools is None or self.tools.form is None)

    def reader(self) -> "MessageReader":
        """A reader for one answer."""
        return MessageReader(self)


def tool_plan(request: ChatRequest, template: ChatTemplate | None) -> "ToolPlan | None":
    """What the tool fields ask for. Raises RequestError ('tools', 'tool_choice', ...)."""
    if request.parallel_tool_calls is not None and not request.tools:
        raise RequestError("parallel_tool_calls", "parallel_tool_calls: only with tools")
    if not request.tools and request.tool_choice is None:
        return None
    import msgspec

    from headrace.serve.prompts import present
    from headrace.text.tooluse import plan_tools  # brings llguidance: only where it is needed

    choice = request.tool_choice
    return plan_tools(
        [present(msgspec.to_builtins(tool)) for tool in request.tools or []],
        choice if choice is None or isinstance(choice, str) else msgspec.to_builtins(choice),
        parallel=request.parallel_tool_calls is not False,
        template="" if template is None else template.source,
    )


def reading_of(
    request: ChatRequest,
    plan: "ToolPlan | None",
    served: Served,
    template: ChatTemplate | None,
    prompt: list[int],
) -> Reading:
    """How the answers to this prompt are read."""
    tokenizer = served.tokenizer
    marks = None if template is None else think_marks(tokenizer, template.source)
    keep = frozenset[int]()
    opened, after = False, None
    if marks is not None:
        tail = tokenizer.decode(prompt[-TAIL:], skip_special=False)
        opened = thinking_is_open(marks, tail)
        after = None if thinking_is_over(marks, tail) else marks.closing_id
        literals = tokenizer.special_literals
        keep |= {literals[m] for m in (marks.opening, marks.closing) if m in literals}
    if plan is not None and plan.form is not None:
        keep |= plan.form.marks(tokenizer)
    return Reading(plan, request.parallel_tool_calls is False, marks, opened, keep, after)


@dataclass
class Delta:
    """What a piece of text added. calls: as the API streams them."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    def shown(self) -> dict[str, Any]:
        """The members of a delta or a message that are not empty."""
        parts: dict[str, Any] = {}
        if self.content:
            parts["content"] = self.content
        if self.reasoning:
            parts |= {"reasoning": self.reasoning, "reasoning_content": self.reasoning}
        if self.calls:
            parts["tool_calls"] = self.calls
        return parts


class MessageReader:
    """Reads the text of one choice. called: it has a tool call. reasoning: all thinking so far."""

    def __init__(self, reading: Reading) -> None:
        self.called = False
        self.reasoning = ""
        self._first_only = reading.first_only
        self._parser = None if reading.tools is None else reading.tools.parser()
        self._splitter = None
        if reading.marks is not None:
            self._splitter = ReasoningSplitter(reading.marks, opened=reading.opened)

    def push(self, text: str, last: bool = False) -> Delta:
        """Read more text; last: nothing follows."""
        delta = Delta()
        answer = text
        if self._splitter is not None:
            delta.reasoning, answer = self._splitter.push(text)
            if last:
                reasoning, rest = self._splitter.flush()
                delta.reasoning += reasoning
                answer += rest
            self.reasoning += delta.reasoning
        if self._parser is None:
            delta.content = answer
            return delta
        events = self._parser.push(answer)
        if last:
            events = [*events, *self._parser.flush()]
        for event in events:
            self._add(delta, event)
        return delta

    def _add(self, delta: Delta, event: "Event") -> None:
        from headrace.text.tools import CallBegin, Text

        if isinstance(event, Text):
            delta.content += event.text
            return
        if self._first_only and event.index > 0:
            return
        if isinstance(event, CallBegin):
            self.called = True
            function = {"name": event.name, "arguments": ""}
            delta.calls.append(
                {"index": event.index, "id": event.id, "type": "function", "function": function}
            )
        elif delta.calls and delta.calls[-1]["index"] == event.index:
            delta.calls[-1]["function"]["arguments"] += event.text
        else:
            delta.calls.append({"index": event.index, "function": {"arguments": event.text}})
