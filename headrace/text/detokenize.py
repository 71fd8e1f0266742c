"""Text out of a stream of token ids: UTF-8 never split, stop strings never leaked."""

import codecs
from collections.abc import Sequence

from headrace.errors import RequestError
from headrace.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns ids into text as they come. The pieces joined equal `Tokenizer.decode` of all ids.

    skip_special leaves control tokens out, save those to keep. continued: the text goes on from
    other text, so that a leading space that the tokenizer's own decoding drops is kept.
    spaces_between is accepted for the API's sake: no supported tokenizer puts spaces between
    control tokens, so both values give the same text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special: bool = True,
        spaces_between: bool = True,
        continued: bool = False,
        keep: frozenset[int] = frozenset(),
    ) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids - keep if skip_special else frozenset[int]()
        self._strip_next = tokenizer.strips_leading_space and not continued
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        """New text that is final. Bytes of an unfinished character are held back."""
        get, skipped = self._token_bytes, self._skipped
        joined = b"".join([get(token) for token in ids if token not in skipped])
        if self._strip_next and joined:
            self._strip_next = False
            joined = joined.removeprefix(b" ")
        return self._utf8.decode(joined)

    def flush(self) -> str:
        """The rest: an unfinished character reads U+FFFD. Starts afresh."""
        return self._utf8.decode(b"", final=True)


class StopStrings:
    """Finds the first of several strings in streamed text, and holds back what could begin one.

    The stop string that is complete first wins; of those complete at the same character the
    longest: so the result does not depend on how the text was cut. One automaton (Aho and
    Corasick, 1975) reads each character once, whatever the number of stop strings. include: the
    stop string is part of the text.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        if not all(stops):
            raise RequestError("stop", "stop: an empty string can't be a stop string")
        self._include = include
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._match: list[str | None] = [None]
        for stop in stops:
            self._add(stop)
        self._link()
        self._state = 0
        self._held = ""
        self.found: str | None = None

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._match.append(None)
            state = self._next[state][char]
        self._match[state] = stop

    def _link(self) -> None:
        """Give each state, breadth first, the transitions and the match of its longest suffix."""
        queue = list(self._next[0].values())
        suffix = dict.fromkeys(queue, 0)
        for state in queue:
            fallback = suffix[state]
            self._match[state] = self._match[state] or self._match[fallback]
            for char, after in self._next[state].items():
                suffix[after] = self._next[fallback].get(char, 0)
                queue.append(after)
            self._next[state] = self._next[fallback] | self._next[state]

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that is safe to send, and the stop string if one is complete now. After a match
        nothing more comes out."""
        if self.found is not None:
            return "", self.found
        state, table = self._state, self._next
        for index, char in enumerate(text):
            state = table[state].get(char, 0)
            if self._match[state] is not None:
                return self._stop(self._held + text[: index + 1], self._match[state] or "")
        self._state = state
        waiting = self._held + text
        cut = len(waiting) - self._depth[state]
        self._held = waiting[cut:]
        return waiting[:cut], None

    def _stop(self, text: str, stop: str) -> tuple[str, str]:
        self.found = stop
        self._held = ""
        return (text if self._include else text[: len(text) - len(stop)]), stop

    def flush(self) -> str:
        """What was held back, at the end of a stream in which no stop string came."""
        held, self._held, self._state = self._held, "", 0
        return held
