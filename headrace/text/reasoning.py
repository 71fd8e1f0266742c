"""Thinking and answer apart, for models that think in marked text before they answer."""

from dataclasses import dataclass

from headrace.text.tokenizer import Tokenizer

WHITE = " \n\r\t"


@dataclass(frozen=True)
class ThinkMarks:
    """The texts around a model's thinking, and the id of the closing one if it is one token."""

    opening: str
    closing: str
    closing_id: int | None


KNOWN = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
)


def think_marks(tokenizer: Tokenizer, template: str) -> ThinkMarks | None:
    """The marks of a model whose chat template knows about thinking; None for others."""
    for opening, closing in KNOWN:
        if closing in template or opening in template:
            ids = tokenizer.encode(closing, add_special=False)
            return ThinkMarks(opening, closing, ids[0] if len(ids) == 1 else None)
    return None


def thinking_is_open(marks: ThinkMarks, prompt: str) -> bool:
    """Whether a rendered prompt ends inside of thinking: the model goes on thinking at once."""
    return prompt.rfind(marks.opening) > prompt.rfind(marks.closing)


def thinking_is_over(marks: ThinkMarks, prompt: str) -> bool:
    """Whether a rendered prompt ends with thinking closed: the model answers at once."""
    return prompt.rstrip(WHITE).endswith(marks.closing)


class ReasoningSplitter:
    """Splits streamed text in (reasoning, answer). opened: the text begins inside of thinking;
    otherwise thinking begins where the text begins with the opening mark. White space next to the
    marks belongs to neither."""

    def __init__(self, marks: ThinkMarks, *, opened: bool = False) -> None:
        self._marks = marks
        self._buffer = ""
        self._state = "think" if opened else "start"
        self._fresh = opened

    def push(self, text: str) -> tuple[str, str]:
        """(reasoning, answer) that are final now."""
        self._buffer += text
        if self._state == "start":
            rest = self._buffer.lstrip(WHITE)
            if rest.startswith(self._marks.opening):
                self._buffer, self._state = rest[len(self._marks.opening) :], "think"
                self._fresh = True
            elif rest and not self._marks.opening.startswith(rest):
                self._state = "answer"
        reasoning = self._think() if self._state == "think" else ""
        return reasoning, self._answer() if self._state == "answer" else ""

    def _think(self) -> str:
        if self._fresh:
            self._buffer = self._buffer.lstrip(WHITE)
            self._fresh = not self._buffer
        before, found, after = self._buffer.partition(self._marks.closing)
        if found:
            self._buffer, self._state, self._fresh = after, "answer", True
            return before.rstrip(WHITE)
        sure = len(before)
        for length in range(min(sure, len(self._marks.closing) - 1), 0, -1):
            if self._marks.closing.startswith(before[-length:]):
                sure -= length
                break
        shown = before[:sure].rstrip(WHITE)
        self._buffer = before[len(shown) :]
        return shown

    def _answer(self) -> str:
        if self._fresh:
            self._buffer = self._buffer.lstrip(WHITE)
            self._fresh = not self._buffer
        text, self._buffer = self._buffer, ""
        return text

    def flush(self) -> tuple[str, str]:
        """The rest, at the end of the text."""
        text, self._buffer = self._buffer, ""
        return (text.rstrip(WHITE), "") if self._state == "think" else ("", text)
