"""Beam search: which continuations of a request's sequences live on.

The rule is the one of `transformers` (`_beam_search`, do_sample off): candidates are ranked by
summed log-probability over all live beams; of the best `width`, those that end (a stop id, or the
last token that max_tokens allows) are kept as finished with score sum / length ** length_penalty;
the best `width` that do not end live on; the search is over when no live beam can beat the worst
finished one at its present length. Ties go to the earlier beam, then the lower id.

KV is shared: a beam that has several children is forked before its tokens are appended, so its full
blocks are held once and a partial one is copied on write.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from headrace.engine.messages import BeamSpec, Logprob
from headrace.ops.batch import F32


class Candidate(NamedTuple):
    """One continuation: `token` after the beam at `place` of the live ones, `score` summed."""

    score: float
    place: int
    token: int


@dataclass
class Beam:
    """A live beam: the core's sequence and the tokens it has produced, with their
    log-probabilities where asked. scores, raw: [V], of the next token, with and without the
    request's constraints."""

    sequence: int
    score: float = 0.0
    tokens: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    scores: F32 | None = None
    raw: F32 | None = None


class Finished(NamedTuple):
    """A finished beam, with its score after the length penalty."""

    score: float
    tokens: tuple[int, ...]
    logprobs: tuple[Logprob, ...]
    total: float
    stop_token: int | None


@dataclass
class BeamSearch:
    """The state of one request's search.

    stops: ids that end a beam. alternatives: log-probabilities to report, as in `SamplingSpec`.
    best: finished beams, best first, at most `width`. born: False until the first row, which all
    beams share.
    """

    spec: BeamSpec
    stops: frozenset[int]
    max_tokens: int
    alternatives: int | None = None
    live: list[Beam] = field(default_factory=list)
    best: list[Finished] = field(default_factory=list)
    born: bool = False

    def offer(self, sequence: int, raw: F32, scores: F32) -> None:
        """The log-probabilities [V] of the next token of one live beam: the model's, and those that
        the search goes by (-inf: not allowed)."""
        for beam in self.live:
            if beam.sequence == sequence:
                beam.raw, beam.scores = raw, scores
                return
        self.live.append(Beam(sequence, raw=raw, scores=scores))

    @property
    def complete(self) -> bool:
        """True when every live beam has offered its row."""
        count = len(self.live)
        return count >= (1 if self.born else self.spec.width) and all(
            beam.scores is not None for beam in self.live
        )

    def choose(self) -> list[Candidate]:
        """Advance by one token: updates `best` and returns the beams that live on, best first.

        None lives on when the search is over.
        """
        ranked = self._ranked()
        length = (len(self.live[0].tokens) if self.live else 0) + 1
        last = length >= self.max_tokens
        self._finish(ranked[: self.spec.width], length, last)
        if last:
            return []
        running = [c for c in ranked if c.token not in self.stops][: self.spec.width]
        if not running or self._over(running[0].score, length):
            return []
        return running

    def _ranked(self) -> list[Candidate]:
        """The best candidates over all live beams: enough that `width` of them do not end."""
        width = self.spec.width
        beams = self.live if self.born else self.live[:1]
        found: list[Candidate] = []
        for place, beam in enumerate(beams):
            assert beam.scores is not None
            scores = beam.scores
            found += [
                Candidate(beam.score + float(scores[token]), place, token)
                for token in highest(scores, width + len(self.stops))
                if scores[token] > -np.inf
            ]
        found.sort(key=lambda c: (-c.score, c.place, c.token))
        return found

    def _finish(self, top: list[Candidate], length: int, last: bool) -> None:
        for candidate in top:
            stop = candidate.token if candidate.token in self.stops else None
            if stop is None and not last:
                continue
            self.best.append(
                Finished(
                    candidate.score / length**self.spec.length_penalty,
                    (*self.live[candidate.place].tokens, candidate.token),
                    self._logprobs(candidate),
                    candidate.score,
                    stop,
                )
            )
        self.best.sort(key=lambda finished: -finished.score)
        del self.best[self.spec.width :]

    def _logprobs(self, candidate: Candidate) -> tuple[Logprob, ...]:
        """Those of a candidate's tokens, where they are asked for."""
        if self.alternatives is None:
            return ()
        beam = self.live[candidate.place]
        assert beam.raw is not None
        raw, own = beam.raw, beam.raw[candidate.token]
        best = highest(raw, self.alternatives)
        top = tuple((token, float(raw[token])) for token in best)
        entry = Logprob(candidate.token, float(own), int((raw > own).sum()) + 1, top)
        return (*beam.logprobs, entry)

    def _over(self, best_running: float, length: int) -> bool:
        if len(self.best) < self.spec.width:
            return False
        if self.spec.early_stopping:
            return True
        return bool(best_running / length**self.spec.length_penalty <= self.best[-1].score)

    def move(self, chosen: list[Candidate], sequences: list[int]) -> None:
        """The live beams are now `chosen`, candidate i in the core's sequence sequences[i]."""
        self.live = [
            Beam(
                sequence,
                candidate.score,
                (*self.live[candidate.place].tokens, candidate.token),
                self._logprobs(candidate),
            )
            for candidate, sequence in zip(chosen, sequences, strict=True)
        ]
        self.born = True


def highest(values: F32, count: int) -> list[int]:
    """The `count` ids of the highest values, best first, ties to the lowest id: what a stable sort
    of all would begin with, for less."""
    if count == 0:
        return []
    cut = np.partition(values, max(len(values) - count, 0))[max(len(values) - count, 0)]
    ids = np.flatnonzero(values >= cut)
    best: list[int] = ids[np.argsort(-values[ids], kind="stable")][:count].tolist()
    return best


def log_softmax(logits: F32) -> F32:
    """float32 [V] -> float32 [V], computed in float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max()
    result: F32 = (wide - np.log(np.exp(wide).sum())).astype(np.float32)
    return result
