"""Constraints on what may be sampled: grammars and allowed ids, as bit masks over the vocabulary.

Grammars compile in a thread of their own, so that a large schema delays its own request only. Masks
are computed in another while the forward pass runs, and joined before sampling.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from headrace.engine.messages import Submit
from headrace.engine.state import SequenceState
from headrace.errors import RequestError
from headrace.ops.batch import U32, RaggedBatch
from headrace.text.grammar import Grammar, GrammarCompiler
from headrace.text.tokenizer import Tokenizer

DEAD_END = (
    "structured_outputs: no token may follow: the constraint and allowed_token_ids, bad_words or"
    " min_tokens exclude each other"
)


@dataclass
class MaskTimes:
    """Seconds spent computing masks, how much of it passed behind the forward pass, and how many
    masks it were."""

    total: float = 0.0
    hidden: float = 0.0
    count: int = 0


class Constraints:
    """Grammars and masks of one engine."""

    def __init__(self, tokenizer: Callable[[], Tokenizer], vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._compiler: GrammarCompiler | None = None
        self._workers: dict[str, ThreadPoolExecutor] = {}
        self._compiling: list[tuple[Submit, Future[Grammar]]] = []
        self.times = MaskTimes()

    @property
    def compiling(self) -> bool:
        """True while a grammar is being compiled."""
        return bool(self._compiling)

    def compile(self, submit: Submit) -> None:
        """Begin to compile the grammar of a request; `compiled` returns it when it is there."""
        self._compiling.append((submit, self._worker("compile").submit(self._compile, submit)))

    def cancel(self, request_id: str) -> bool:
        """Forget a request that is being compiled; True when it was."""
        kept = [entry for entry in self._compiling if entry[0].id != request_id]
        found = len(kept) < len(self._compiling)
        self._compiling = kept
        return found

    def compiled(self) -> list[tuple[Submit, Grammar | RequestError]]:
        """Requests whose grammar is ready, or refused, since the last call."""
        ready: list[tuple[Submit, Future[Grammar]]] = []
        waiting: list[tuple[Submit, Future[Grammar]]] = []
        for entry in self._compiling:  # each is asked once: it may be done a moment later
            (ready if entry[1].done() else waiting).append(entry)
        self._compiling = waiting
        results: list[tuple[Submit, Grammar | RequestError]] = []
        for submit, future in ready:
            error = future.exception()
            if error is None:
                results.append((submit, future.result()))
            elif isinstance(error, RequestError):
                results.append((submit, error))
            else:
                message = f"the grammar could not be compiled: {error}"
                results.append((submit, RequestError("structured_outputs", message)))
        return results

    def allowed_mask(self, allowed: tuple[int, ...]) -> U32:
        """uint32 [ceil(V / 32)] with the bits of these ids set."""
        bits = np.zeros((self._vocabulary + 31) // 32 * 32, np.uint8)
        bits[list(allowed)] = 1
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def start_masks(
        self, batch: RaggedBatch, states: list[SequenceState]
    ) -> "Future[float] | None":
        """Give each constrained sample point its mask row and begin to fill the rows.

        Returns None when no sample point has a grammar. The batch's masks may be replaced here (and
        a back-end bind them) but not later in the step.
        """
        rows = [index for index, state in enumerate(states) if constrained(state)]
        if not rows:
            return None
        batch.reserve(masks=len(rows))
        jobs: list[tuple[SequenceState, U32]] = []
        for row, index in enumerate(rows):
            batch.mask_index[index] = row
            state = states[index]
            if state.cursor is not None:
                jobs.append((state, batch.masks[row]))
            elif state.mask is not None:
                batch.masks[row] = state.mask
        self.times.count += len(jobs)
        return self._worker("masks").submit(_fill, jobs) if jobs else None

    def join_masks(self, masks: "Future[float]") -> None:
        """Wait for the masks of `start_masks`; counts what was hidden behind the forward pass."""
        began = time.perf_counter()
        seconds = masks.result()
        waited = time.perf_counter() - began
        self.times.total += seconds
        self.times.hidden += max(0.0, seconds - waited)

    def close(self) -> None:
        """End the worker threads."""
        for worker in self._workers.values():
            worker.shutdown(wait=True, cancel_futures=True)

    def _worker(self, job: str) -> ThreadPoolExecutor:
        """The thread of a job, begun when it is first needed."""
        if job not in self._workers:
            self._workers[job] = ThreadPoolExecutor(1, thread_name_prefix=job)
        return self._workers[job]

    def _compile(self, submit: Submit) -> Grammar:
        assert submit.grammar is not None
        if self._compiler is None:
            self._compiler = GrammarCompiler(self._tokenizer())
        return self._compiler.compile(submit.grammar.kind, submit.grammar.source)


def constrained(state: SequenceState) -> bool:
    """True when the sequence samples under a mask."""
    return state.cursor is not None or state.mask is not None


def _fill(jobs: list[tuple[SequenceState, U32]]) -> float:
    """Compute masks; returns the seconds it took."""
    started = time.perf_counter()
    for state, row in jobs:
        assert state.cursor is not None
        try:
            state.cursor.mask(row)
        except RequestError as error:  # beyond its limits: this request alone ends
            state.fault = str(error)
            row[:] = 0xFFFFFFFF
        if state.mask is not None:
            row &= state.mask
            if not row.any():
                state.fault = DEAD_END
    return time.perf_counter() - started
