"""A plan in the making: its budgets, the slices in it, and how they are written down."""

from headrace.core.memory import Draft
from headrace.core.plan import Knobs, StepPlan
from headrace.core.sequence import Sequence


class Step(Draft):
    """A plan in the making or in flight, with the sequences behind its ids.

    tokens, rows, samples: what is left of the step's budgets. short: pages were not enough.
    steady: sequences with one sample each, the first of the plan. others: running ones beside them.
    slices: (sequence, start, end) of others. points: (carrier of the row, sequence) of each sample
    after those of `steady`.
    """

    def __init__(self, plan: StepPlan) -> None:
        super().__init__(plan)
        self.tokens = 0
        self.rows = 0
        self.samples = 0
        self.short = False
        self.steady: list[Sequence] = []
        self.others: list[Sequence] = []
        self.slices: list[tuple[Sequence, int, int]] = []
        self.points: list[tuple[Sequence, Sequence]] = []

    def renew(self, knobs: Knobs, slots: int) -> None:
        """Budgets of a step in which nobody has got anything."""
        self.tokens = knobs.max_tokens
        self.rows = knobs.max_logits
        self.samples = max(knobs.max_logits, slots)
        self.short = False
        self.plan.reasons.clear()

    def give(self, steady: int, mixed_prefill: int) -> None:
        """Spend a token, a row and a sample on each of so many steady sequences; beside them others
        get at most `mixed_prefill` tokens (0: what is left)."""
        self.tokens -= steady
        self.rows -= steady
        self.samples -= steady
        if steady and mixed_prefill:
            self.tokens = min(self.tokens, mixed_prefill)

    def skip(self, sequence: Sequence, reason: str) -> None:
        """Note why a sequence gets nothing."""
        self.plan.reasons.append((sequence.id, reason))

    def cut(self, sequence: Sequence, tokens: int) -> int:
        """Cut a slice so that its logits rows and samples fit what is left of the step."""
        start = sequence.scheduled
        if sequence.score < sequence.prompt:
            rows = min(self.rows, self.samples)
            tokens = min(tokens, max(0, sequence.score - 1 - start) + rows)
        end = start + tokens
        rows = logits_rows(sequence, start, end)
        samples = rows + max(0, len(sequence.owner.unborn) - 1)
        if rows and end == len(sequence.tokens) and (rows > self.rows or samples > self.samples):
            tokens -= 1
        return tokens

    def slice(self, sequence: Sequence, start: int, end: int) -> None:
        """Put a slice into the plan and pay for it."""
        self.slices.append((sequence, start, end))
        rows = logits_rows(sequence, start, end)
        self.tokens -= end - start
        self.rows -= rows
        self.samples -= rows
        if end == len(sequence.tokens):
            self.samples -= max(0, len(sequence.owner.unborn) - 1)

    def write(self, ids: list[int], slots: list[int]) -> None:
        """Write the plan: `ids` and `slots` are those of the steady sequences."""
        self._write_steady(ids, slots)
        for sequence, start, end in self.slices:
            self._write_slice(sequence, start, end)

    def _write_steady(self, ids: list[int], slots: list[int]) -> None:
        plan = self.plan
        count = len(ids)
        plan.sequences = ids
        plan.slots = slots
        plan.starts = [sequence.scheduled for sequence in self.steady]
        plan.tokens = [sequence.tokens[-1] for sequence in self.steady]
        plan.counts = [1] * count
        plan.logits = [1] * count
        plan.samples = [0] * (2 * count)
        plan.samples[::2] = range(count)
        plan.samples[1::2] = ids
        plan.num_logits = count

    def _write_slice(self, sequence: Sequence, start: int, end: int) -> None:
        plan = self.plan
        plan.sequences.append(sequence.id)
        plan.slots.append(sequence.slot)
        plan.starts.append(start)
        plan.counts.append(end - start)
        plan.tokens += sequence.tokens[start:end]
        rows = logits_rows(sequence, start, end)
        plan.logits.append(rows)
        first = end - rows
        row = plan.num_logits - first
        plan.num_logits += rows
        if sequence.score < sequence.prompt:
            for position in range(first, min(end, sequence.prompt - 1)):
                plan.scores += (row + position, sequence.id, position + 1)
        if end == len(sequence.tokens) and sequence.left > 0:
            for target in sequence.owner.unborn or (sequence,):
                plan.samples += (row + end - 1, target.id)
                self.points.append((sequence, target))


def logits_rows(sequence: Sequence, start: int, end: int) -> int:
    """Rows of logits of a slice: the last ones, from the first that scores or for the sample."""
    if sequence.score < sequence.prompt:
        return max(0, end - max(start, sequence.score - 1))
    return int(end == len(sequence.tokens) and sequence.left > 0)
