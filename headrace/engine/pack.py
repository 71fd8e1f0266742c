"""Packing: a `StepPlan` and the sequences' sampling state into the arrays of the `RaggedBatch`."""

import numpy as np

from headrace.core.plan import StepPlan
from headrace.engine.messages import SamplingSpec, Submit
from headrace.engine.state import ParameterTable, SequenceState
from headrace.ops.batch import RaggedBatch

BAN = -np.inf


class Packer:
    """Writes steps into one batch. What equals the last step, as while the same sequences decode,
    is left as it stands there."""

    def __init__(self, batch: RaggedBatch) -> None:
        self._batch = batch
        rows = max(batch.limits.max_tokens, batch.limits.max_logits) + 1
        self._rows = np.arange(rows, dtype=np.int32)
        self._slots: list[int] | None = None
        self._samples: list[int] | None = None
        self._in_order = False

    def pack(self, plan: StepPlan) -> None:
        """Rows, slices, page tables, copies and logits rows of a plan."""
        batch = self._batch
        tokens, slices = len(plan.tokens), len(plan.sequences)
        batch.num_tokens, batch.num_slices = tokens, slices
        batch.num_logits = plan.num_logits
        batch.token[:tokens] = plan.tokens
        if tokens == slices == plan.num_logits:  # a row of each, with logits
            batch.position[:tokens] = plan.starts
            if plan.slots != self._slots:
                self._slots = plan.slots
                batch.slice_slot[:slices] = plan.slots
                batch.slice_row[: slices + 1] = self._rows[: slices + 1]
                batch.logits_row[:slices] = self._rows[:slices]
        else:
            self._slots = None
            batch.slice_slot[:slices] = plan.slots
            ends = batch.slice_row
            ends[0] = 0
            np.cumsum(plan.counts, out=ends[1 : slices + 1])
            offsets = np.asarray(plan.starts, np.int32) - ends[:slices]
            batch.position[:tokens] = self._rows[:tokens] + np.repeat(offsets, plan.counts)
            self._pack_logits(plan)
        if plan.table:
            entries = np.asarray(plan.table, np.int32).reshape(-1, 4)
            batch.table[entries[:, 0], entries[:, 1], entries[:, 2]] = entries[:, 3]
        batch.num_copies = len(plan.copies)
        if plan.copies:
            batch.reserve(copies=len(plan.copies))
            batch.copy[: len(plan.copies)] = plan.copies

    def _pack_logits(self, plan: StepPlan) -> None:
        batch, count = self._batch, plan.num_logits
        wanted = np.asarray(plan.logits, np.int32)
        starts = batch.slice_row[1 : len(wanted) + 1] - wanted
        before = np.cumsum(wanted) - wanted
        batch.logits_row[:count] = np.repeat(starts - before, wanted) + self._rows[:count]

    def pack_samples(
        self, plan: StepPlan, states: list[SequenceState], parameters: ParameterTable
    ) -> None:
        """Sample points (one per state, in plan order), then the scored positions of the plan."""
        batch = self._batch
        samples, scores = len(states), len(plan.scores) // 3
        total = samples + scores
        special = any(state.special for state in states)
        if scores or special or plan.samples != self._samples:
            batch.reserve(samples=total)
            batch.num_samples = total
            batch.sample_row[:samples] = plan.samples[0::2]
            if samples:
                parameters.gather(batch, [state.row for state in states])
            batch.forced[:samples] = -1
            batch.mask_index[:total] = -1
            if special:
                self._pack_special(states)
            else:
                batch.penalty_start[: total + 1] = 0
                batch.bias_start[: total + 1] = 0
            if scores:
                self._pack_scores(plan, samples, scores)
            self._samples = None if scores or special else plan.samples
            self._in_order = plan.samples[0::2] == list(range(samples))
        if self._in_order and batch.num_logits == batch.num_tokens:
            positions = batch.position[:samples]
        else:
            positions = batch.position[batch.logits_row[batch.sample_row[:samples]]]
        np.add(positions, 1, out=batch.sample_position[:samples])

    def _pack_special(self, states: list[SequenceState]) -> None:
        """Penalty and bias lists, for the sequences that have any."""
        batch = self._batch
        penalty_tokens: list[int] = []
        penalty_counts: list[int] = []
        bias_tokens: list[int] = []
        bias_values: list[float] = []
        for index, state in enumerate(states):
            batch.penalty_start[index] = len(penalty_tokens)
            batch.bias_start[index] = len(bias_tokens)
            if not state.special:
                continue
            if state.counts:
                penalty_tokens.extend(state.counts)
                penalty_counts.extend(state.counts.values())
            for token, value in biases(state).items():
                bias_tokens.append(token)
                bias_values.append(value)
        end = slice(len(states), batch.num_samples + 1)
        batch.penalty_start[end] = len(penalty_tokens)
        batch.bias_start[end] = len(bias_tokens)
        batch.reserve(penalties=len(penalty_tokens), biases=len(bias_tokens))
        batch.penalty_token[: len(penalty_tokens)] = penalty_tokens
        batch.penalty_count[: len(penalty_counts)] = penalty_counts
        batch.bias_token[: len(bias_tokens)] = bias_tokens
        batch.bias_value[: len(bias_values)] = bias_values

    def _pack_scores(self, plan: StepPlan, samples: int, scores: int) -> None:
        """Scored positions are sample points whose token is given."""
        batch = self._batch
        part = slice(samples, samples + scores)
        batch.sample_row[part] = plan.scores[0::3]
        batch.sample_position[part] = plan.scores[2::3]
        for name, value in (
            ("temperature", 0.0), ("top_k", 0), ("top_p", 1.0), ("min_p", 0.0),
            ("repetition", 1.0), ("presence", 0.0), ("frequency", 0.0), ("seed", 0), ("choice", 0),
        ):  # fmt: skip
            getattr(batch, name)[part] = value


def biases(state: SequenceState) -> dict[int, float]:
    """Additive logit biases of a sequence's next token; -inf bans an id.

    logit_bias, ids banned always or until min_tokens, and the last token of each bad word whose
    beginning the output ends with.
    """
    sampling = state.request.submit.sampling
    found = dict(sampling.logit_bias)
    found.update((token, BAN) for token in sampling.banned)
    ids, count = sampling.banned_until
    if len(state.outputs) < count:
        found.update((token, BAN) for token in ids)
    for word in sampling.bad_words:
        head = len(word) - 1
        if head == 0 or state.outputs[-head:] == list(word[:-1]):
            found[word[-1]] = BAN
    return found


def has_penalties(sampling: SamplingSpec) -> bool:
    """True when the sampling needs counts of the ids so far."""
    return (
        sampling.repetition_penalty != 1
        or sampling.presence_penalty != 0
        or sampling.frequency_penalty != 0
    )


def needs_lists(submit: Submit) -> bool:
    """True when sequences of this request need penalty, bias or mask lists at some step."""
    sampling = submit.sampling
    return bool(
        has_penalties(sampling)
        or sampling.logit_bias
        or sampling.banned
        or sampling.banned_until[1]
        or sampling.bad_words
        or sampling.allowed is not None
        or submit.grammar is not None
    )
