"""The beam searches of an engine: their rows in, forks and tokens of the core's sequences out."""

import numpy as np

from headrace.core.plan import StepPlan
from headrace.core.scheduler import Scheduler
from headrace.engine.beam import BeamSearch, log_softmax
from headrace.engine.books import Books
from headrace.engine.messages import Output
from headrace.engine.pack import biases
from headrace.engine.state import RequestState, SequenceState
from headrace.ops.batch import F32, RaggedBatch


class Beams:
    """Searches by request number. A beam's sequence gets no token in `done`: it waits where it is
    until all beams of its search have their row, then it is extended, forked or dropped."""

    def __init__(self, scheduler: Scheduler, books: Books, batch: RaggedBatch) -> None:
        self._scheduler = scheduler
        self._books = books
        self._batch = batch
        self._searches: dict[int, BeamSearch] = {}

    def __bool__(self) -> bool:
        return bool(self._searches)

    def __contains__(self, state: SequenceState) -> bool:
        return state.request.number in self._searches

    @property
    def width(self) -> int:
        """Beams of all searches together. While they fit the slots, no search can hold slots that
        another one waits for."""
        return sum(search.spec.width for search in self._searches.values())

    def open(self, request: RequestState) -> None:
        """Begin a search where the request asks for one."""
        submit = request.submit
        if submit.beam is not None:
            self._searches[request.number] = BeamSearch(
                submit.beam,
                frozenset(submit.stop_tokens),
                submit.max_tokens,
                submit.sampling.logprobs,
            )

    def offer(self, plan: StepPlan, states: list[SequenceState], logits: F32) -> list[int]:
        """Hand rows of logits [R, V] to the searches; returns the sample points they took."""
        taken = []
        for index, state in enumerate(states):
            search = self._searches.get(state.request.number)
            if search is not None:
                row = logits[plan.samples[2 * index], : self._batch.limits.vocabulary]
                raw = log_softmax(row)
                search.offer(state.sequence, raw, self._constrained(raw, index, state))
                taken.append(index)
        return taken

    def move(self, now: float) -> None:
        """Advance every search that has all its rows; tell those that are over."""
        for number in list(self._searches):
            request = self._books.by_number.get(number)
            if request is None:  # aborted or failed
                del self._searches[number]
            elif self._searches[number].complete:
                self._advance(request, self._searches[number], now)

    def _constrained(self, raw: F32, index: int, state: SequenceState) -> F32:
        """Log-probabilities under the request's biases and mask."""
        scores = raw.copy()
        for token, value in biases(state).items():
            scores[token] += value
        if self._batch.mask_index[index] >= 0:
            mask = self._batch.masks[self._batch.mask_index[index]]
            allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(scores)]
            scores[allowed == 0] = -np.inf
        return scores

    def _advance(self, request: RequestState, search: BeamSearch, now: float) -> None:
        chosen = search.choose()
        if not chosen:
            self._end(request, search, now)
            return
        parents = [beam.sequence for beam in search.live]
        if search.born:
            sequences = self._fork(parents, [candidate.place for candidate in chosen])
        else:
            sequences = parents[: len(chosen)]
        for sequence in parents:
            if sequence not in sequences:
                self._scheduler.drop(sequence)
                self._books.release(request, sequence)
        for candidate, sequence in zip(chosen, sequences, strict=True):
            self._scheduler.extend(sequence, (candidate.token,))
            self._books.account(self._books.sequence(sequence), candidate.token, None, now)
        search.move(chosen, sequences)

    def _fork(self, parents: list[int], places: list[int]) -> list[int]:
        """The sequence of each chosen candidate: its parent's own for the first child of a parent,
        a fork for the others."""
        taken: set[int] = set()
        sequences = []
        for place in places:
            parent = parents[place]
            if parent not in taken:
                taken.add(parent)
                sequences.append(parent)
                continue
            child = self._scheduler.fork(parent)
            source, state = self._books.sequence(parent), self._books.sequence(child)
            state.outputs = list(source.outputs)
            state.cursor = None if source.cursor is None else source.cursor.copy()
            sequences.append(child)
        return sequences

    def _end(self, request: RequestState, search: BeamSearch, now: float) -> None:
        """Tell the best beams and free the request."""
        submit = request.submit
        for index in range(submit.n):
            found = search.best[index] if index < len(search.best) else None
            self._books.pending.append(
                Output(
                    id=submit.id,
                    index=index,
                    tokens=found.tokens if found else (),
                    cached_tokens=request.cached_tokens,
                    finish="stop" if found and found.stop_token is not None else "length",
                    stop_token=found.stop_token if found else None,
                    logprobs=found.logprobs if found and search.alternatives is not None else None,
                    cumulative_logprob=found.total if found else None,
                )
            )
        del self._searches[request.number]
        self._scheduler.abort(request.number, now)
        self._books.forget(request, "stop")
