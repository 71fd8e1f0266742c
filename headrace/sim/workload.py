"""What users do: when they come, what they ask, what they share, when they come back.

A workload is data (`Workload`); `sessions` yields its sessions in order of arrival, each a stream
of turns. Prompts are real token tuples, since the prefix index verifies tokens, but only the first
two ids of a part are unique: the rest are slices of one shared tuple, so a million prompts stay
small.
All draws come from one seed; the stream is the same whichever part of the sessions is kept.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import log
from random import Random
from typing import Literal, Protocol

from headrace.errors import ConfigError

Shape = Literal["random", "chat", "rag", "agent", "long"]
Arrivals = Literal["poisson", "gamma", "closed"]

LONGEST = 1 << 20
_FILL = tuple(range(1, 257)) * (LONGEST // 256)
_FIRST_UNIQUE = 1 << 20


@dataclass(frozen=True)
class Workload:
    """requests: how many in all. rate: sessions/s (poisson, gamma). burstiness: shape of the gamma
    gaps, 1 = Poisson, less = burstier (vLLM's meaning). concurrency: users of a closed loop.

    input_tokens, output_tokens: means of what a turn adds and answers. spread: sigma of their
    log-normal, 0 = fixed. shared: tokens of the prefix common to a document or to all; documents:
    how many such prefixes, drawn by Zipf's law (exponent 1). turns: mean of a session (geometric);
    think: mean seconds between turns (exponential). limit: longest prompt plus output.
    """

    requests: int
    arrivals: Arrivals = "poisson"
    rate: float = 1.0
    burstiness: float = 1.0
    concurrency: int = 1
    input_tokens: float = 300.0
    output_tokens: float = 100.0
    spread: float = 0.5
    shared: int = 0
    documents: int = 1
    turns: float = 1.0
    think: float = 0.0
    limit: int = 8192
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ConfigError naming the field at fault."""
        for name, low in (
            ("requests", 1), ("rate", 1e-9), ("burstiness", 1e-6), ("concurrency", 1),
            ("input_tokens", 1), ("output_tokens", 1), ("spread", 0), ("shared", 0),
            ("documents", 1), ("turns", 1), ("think", 0), ("limit", 2),
        ):  # fmt: skip
            if getattr(self, name) < low:
                raise ConfigError(name, f"{getattr(self, name)} is below {low}")
        if self.shared + 2 > self.limit or self.limit > LONGEST:
            raise ConfigError("limit", f"{self.limit} leaves no room, or is over {LONGEST} tokens")


SHAPES: dict[Shape, Workload] = {
    "random": Workload(1000),
    "chat": Workload(1000, input_tokens=60, output_tokens=200, shared=500, turns=4, think=20),
    "rag": Workload(1000, input_tokens=50, output_tokens=150, shared=4000, documents=50),
    "agent": Workload(
        1000, input_tokens=400, output_tokens=80, shared=2000, turns=8, think=1, limit=32768
    ),
    "long": Workload(1000, input_tokens=16000, output_tokens=300, limit=131072),
}
"""Shapes of traffic by name. Means follow what public traces report (Azure 2023 code and chat,
Mooncake 2024, ShareGPT); replace any field."""


def shape(name: str, **fields: object) -> Workload:
    """A named shape with fields replaced. Raises ConfigError for an unknown name."""
    if name not in SHAPES:
        raise ConfigError("workload", f"unknown shape {name!r}; known: {', '.join(SHAPES)}")
    given = {key: value for key, value in fields.items() if value is not None}
    return replace(SHAPES[name], **given)  # type: ignore[arg-type]


@dataclass(slots=True)
class Job:
    """One request to make. arrival: seconds. session: sticky routing key; prefix: key of its shared
    prefix. turns_left: further turns of this session once it is answered."""

    arrival: float
    prompt: tuple[int, ...]
    output: int
    session: int
    prefix: int
    turns_left: int = 0


class Source(Protocol):
    """Where a simulation's jobs come from."""

    def arrivals(self) -> Iterator[Job]:
        """Jobs that come by themselves, in order of arrival."""

    def answered(self, job: Job, output: tuple[int, ...], now: float) -> Job | None:
        """The job that follows an answered (or refused: empty output) one, or None."""


class GeneratedSource:
    """Deals out the jobs of a workload: `arrivals` for those that come by themselves, `answered`
    for those that follow an answer. keep: (part, parts) deals only sessions with session % parts
    == part.
    """

    def __init__(self, workload: Workload, keep: tuple[int, int] = (0, 1)) -> None:
        self._workload = workload
        self._part, self._parts = keep
        self._random = Random(workload.seed)
        self._later: dict[int, Random] = {}
        self._budget = workload.requests
        self._popularity = _zipf(workload.documents)
        self._session = 0

    def arrivals(self) -> Iterator[Job]:
        """Sessions in order of arrival: all of an open loop, the first users of a closed one."""
        workload = self._workload
        now = 0.0
        closed = workload.arrivals == "closed"
        while self._budget > 0:
            if closed and self._session == workload.concurrency:
                return
            if not closed:
                now += self._gap()
            job = self._next_session(now)
            if job is not None:
                yield job

    def answered(self, job: Job, output: tuple[int, ...], now: float) -> Job | None:
        """The job that follows an answered one, or None: the next turn of its session, whose prompt
        is the last prompt and answer and something new; in a closed loop a new session."""
        workload = self._workload
        if job.turns_left > 0:
            draw = self._later.setdefault(job.session, Random(f"{workload.seed}/{job.session}"))
            think = draw.expovariate(1.0 / workload.think) if workload.think else 0.0
            new = _length(draw, workload.input_tokens, workload.spread)
            answer = _length(draw, workload.output_tokens, workload.spread)
            if len(job.prompt) + len(output) + new + answer <= workload.limit:
                turn = job.turns_left + 1
                prompt = job.prompt + output + unique_part(job.session + (turn << 32), new)
                return Job(now + think, prompt, answer, job.session, job.prefix, job.turns_left - 1)
        self._later.pop(job.session, None)
        if workload.arrivals == "closed":
            while self._budget > 0:
                following = self._next_session(now)
                if following is not None:
                    return following
        return None

    def _next_session(self, now: float) -> Job | None:
        """Draw a session, always the same draws; None where another part keeps it."""
        workload, draw = self._workload, self._random
        session = self._session
        self._session += 1
        turns = 1
        if workload.turns > 1:
            turns += int(log(1.0 - draw.random()) / log(1.0 - 1.0 / workload.turns))
        turns = min(turns, self._budget)
        self._budget -= turns
        document = 0
        if workload.documents > 1:
            document = _pick(self._popularity, draw.random())
        new = _length(draw, workload.input_tokens, workload.spread)
        output = _length(draw, workload.output_tokens, workload.spread)
        if session % self._parts != self._part:
            return None
        room = workload.limit - workload.shared
        new = min(new, room - 1)
        output = min(output, room - new)
        prompt = unique_part(session, new)
        if workload.shared:
            prompt = unique_part(-1 - document, workload.shared) + prompt
        return Job(now, prompt, output, session, document, turns - 1)

    def _gap(self) -> float:
        workload = self._workload
        if workload.arrivals == "poisson":
            return self._random.expovariate(workload.rate)
        shape_ = workload.burstiness
        return self._random.gammavariate(shape_, 1.0 / (workload.rate * shape_))


def _length(draw: Random, mean: float, spread: float) -> int:
    """A log-normal length with that mean, at least 1."""
    if spread == 0:
        return max(1, round(mean))
    return max(1, round(draw.lognormvariate(log(mean) - spread * spread / 2, spread)))


def unique_part(key: int, tokens: int) -> tuple[int, ...]:
    """`tokens` ids, the first two together unique to `key` (negative keys are shared prefixes).
    Ids stay below 2^31, the core's limit; the first is unique for keys below 2^29."""
    high, low = divmod(2 * key if key >= 0 else -2 * key - 1, 1 << 30)
    return (_FIRST_UNIQUE + low, high, *_FILL[: max(0, tokens - 2)])[:tokens]


def _zipf(count: int) -> list[float]:
    """Cumulative popularity of `count` documents, proportional to 1 / rank."""
    total, sums = 0.0, []
    for rank in range(1, count + 1):
        total += 1.0 / rank
        sums.append(total)
    return [value / total for value in sums]


def _pick(cumulative: list[float], draw: float) -> int:
    low, high = 0, len(cumulative) - 1
    while low < high:
        middle = (low + high) // 2
        if cumulative[middle] < draw:
            low = middle + 1
        else:
            high = middle
    return low
