"""What the engine remembers of requests and their sequences, beside what the core knows."""

from dataclasses import dataclass, field

import numpy as np

from headrace.engine.messages import Logprob, Submit
from headrace.ops.batch import U32, RaggedBatch
from headrace.text.grammar import Cursor, Grammar

PARAMETERS = ("temperature", "top_k", "top_p", "min_p", "repetition", "presence", "frequency",
              "seed", "choice", "top_logprobs")  # fmt: skip
"""Arrays of the batch that are constant for a sequence; `ParameterTable` holds a row of each."""


@dataclass(slots=True)
class RequestState:
    """A request in the engine. times are on the engine's clock."""

    number: int
    submit: Submit
    arrived: float
    scheduled: float | None = None
    first_token: float | None = None
    grammar: Grammar | None = None
    mask: U32 | None = None
    open_sequences: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    generated: int = 0
    prompt_logprobs: list[Logprob | None] | None = None
    told_prompt: bool = False
    sequences: dict[int, "SequenceState"] = field(default_factory=dict)


@dataclass(slots=True)
class SequenceState:
    """One sequence of a request. row: its row in the parameter table.

    special: True when a step must build lists for it (penalties, biases, bans, masks).
    counts: occurrences of each distinct id: 0 for ids of the prompt only (penalties); None unless
    penalties are on. cursor: place in the request's grammar. mask: allowed ids that never change.
    fault: why the grammar gave up.
    """

    request: RequestState
    sequence: int
    choice: int
    row: int
    special: bool
    counts: dict[int, int] | None
    cursor: Cursor | None = None
    mask: U32 | None = None
    fault: str | None = None
    outputs: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    cumulative_logprob: float = 0.0


class ParameterTable:
    """Sampling parameters by row, so that a step gathers them for its samples with a few vectorised
    takes, whatever the mix of requests."""

    def __init__(self, batch: RaggedBatch) -> None:
        self._arrays = {name: np.zeros(64, getattr(batch, name).dtype) for name in PARAMETERS}
        self._free: list[int] = list(range(63, -1, -1))

    def add(self, submit: Submit, choice: int) -> int:
        """Store the parameters of one sequence; returns its row."""
        if not self._free:
            size = len(self._arrays["seed"])
            for name, array in self._arrays.items():
                self._arrays[name] = np.concatenate([array, np.zeros(size, array.dtype)])
            self._free.extend(range(2 * size - 1, size - 1, -1))
        row = self._free.pop()
        sampling = submit.sampling
        values = (
            sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p,
            sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty,
            sampling.seed, choice, -1 if sampling.logprobs is None else sampling.logprobs,
        )  # fmt: skip
        for name, value in zip(PARAMETERS, values, strict=True):
            self._arrays[name][row] = value
        return row

    def remove(self, row: int) -> None:
        """Give a row back."""
        self._free.append(row)

    def gather(self, batch: RaggedBatch, rows: list[int]) -> None:
        """Write the parameters of `rows` to the leading entries of the batch's arrays."""
        count = len(rows)
        if count == 1:
            row = rows[0]
            for name, array in self._arrays.items():
                getattr(batch, name)[0] = array[row]
            return
        index = np.asarray(rows)
        for name, array in self._arrays.items():
            np.take(array, index, out=getattr(batch, name)[:count])
