"""The choices of the scheduler, apart from their execution: order, victims, shares of a step."""

from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from headrace.core.plan import Knobs, Request
from headrace.core.sequence import Order, Sequence


def order(request: Request, arrival: int, sequence: int, policy: str) -> Order:
    """Who goes first: lower priority value, where the policy asks for it, then who came first."""
    return (request.priority if policy == "priority" else 0, arrival, sequence)


def victim(running: Iterable[Sequence], better: Sequence) -> Sequence | None:
    """The last in order of the running sequences that come after `better`, or None.

    So the first in order is never preempted, and since one sequence of any legal length fits the
    pool, it always advances.
    """
    last = max(running, key=lambda sequence: sequence.order)
    return last if last.order > better.order else None


def share(steady: int, others: list[Sequence], knobs: Knobs, max_samples: int, turn: int) -> int:
    """How many of the `steady` sequences (a token, a row and a sample each) get their token now,
    beside `others` that want something.

    All of them as a rule. Where the step is too small, the others keep a quarter of its tokens, a
    row (a quarter of the rows if one of them scores) and the samples of the largest birth; a step
    too small to be divided is given to both kinds in turn.
    """
    budget = min(knobs.max_tokens, knobs.max_logits)
    if not others:
        return min(steady, budget)
    scoring = any(sequence.score < sequence.prompt for sequence in others)
    tokens = max(1, min(knobs.chunk, knobs.max_tokens // 4))
    rows = max(1, knobs.max_logits // 4) if scoring else 1
    samples = max(len(sequence.owner.unborn) for sequence in others)
    left = min(knobs.max_tokens - tokens, knobs.max_logits - rows, max_samples - samples)
    return min(steady, left if left > 0 else (turn % 2) * budget)


class Queue:
    """Waiting sequences in order. A sequence that ended is skipped when it comes up."""

    def __init__(self) -> None:
        self.length = 0
        self._heap: list[tuple[Order, Sequence]] = []

    def push(self, sequence: Sequence) -> None:
        sequence.waiting = True
        self.length += 1
        heappush(self._heap, (sequence.order, sequence))

    def peek(self) -> Sequence | None:
        """The first in order."""
        while self._heap and not self._heap[0][1].waiting:
            heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Sequence:
        """Take out the first in order, which `peek` returned."""
        self.length -= 1
        sequence = heappop(self._heap)[1]
        sequence.waiting = False
        return sequence

    def discard(self, sequence: Sequence) -> None:
        """Take out a waiting sequence, wherever it stands."""
        sequence.waiting = False
        self.length -= 1

    def reorder(self) -> None:
        """The orders of the sequences have changed."""
        self._heap = [(s.order, s) for _, s in self._heap if s.waiting]
        heapify(self._heap)

    def sequences(self) -> list[Sequence]:
        """All waiting sequences, in no particular order."""
        return [sequence for _, sequence in self._heap if sequence.waiting]
