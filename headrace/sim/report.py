"""What a simulated (or live) run was like for its users and its owner.

A `Recorder` is told of requests and tokens as they happen and keeps a few numbers a request; a
`Report` is what can be said of them. Recorders of independent parts merge.

TTFT: arrival to first token. TPOT: (end - first token) / (output tokens - 1), for requests with at
least 2. ITL: between consecutive tokens of a sequence. A request is good when it was answered in
full with TTFT and TPOT within the promise; goodput counts good requests, and their tokens, per
second.
"""

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from math import exp, log
from typing import Any

QUANTILES = (50, 90, 95, 99)
_LOW, _GROWTH = 1e-6, 1.03
_BUCKETS = 800
_SCALE = 1.0 / log(_GROWTH)


@dataclass(frozen=True)
class Slo:
    """A promise in seconds; None promises nothing."""

    ttft: float | None = None
    tpot: float | None = None

    def met(self, ttft: float, tpot: float) -> bool:
        """Whether a request kept the promise."""
        return (self.ttft is None or ttft <= self.ttft) and (self.tpot is None or tpot <= self.tpot)


class LogHistogram:
    """Counts of positive values in buckets 3 % wide, from a microsecond up."""

    def __init__(self) -> None:
        self.counts = array("q", bytes(8 * _BUCKETS))

    @staticmethod
    def bucket(value: float) -> int:
        """Index of the bucket of a value."""
        if value <= _LOW:
            return 0
        return min(_BUCKETS - 1, int(log(value / _LOW) * _SCALE) + 1)

    def merge(self, other: "LogHistogram") -> None:
        """Add another's counts."""
        for index, count in enumerate(other.counts):
            self.counts[index] += count

    def quantile(self, percent: float) -> float:
        """Value below which that share of the counts lies; 0 when empty. Within 3 %."""
        total = sum(self.counts)
        wanted, seen = total * percent / 100.0, 0
        for index, count in enumerate(self.counts):
            seen += count
            if count and seen >= wanted:
                return _LOW * exp((index - 0.5) / _SCALE)
        return 0.0

    def mean(self) -> float:
        """Mean of the bucket centres."""
        total = sum(self.counts)
        if not total:
            return 0.0
        parts = (c * _LOW * exp((i - 0.5) / _SCALE) for i, c in enumerate(self.counts) if c)
        return sum(parts) / total


@dataclass
class Recorder:
    """Raw results. One entry a finished request in each array: seconds, or tokens."""

    ttft: "array[float]" = field(default_factory=lambda: array("f"))
    tpot: "array[float]" = field(default_factory=lambda: array("f"))
    latency: "array[float]" = field(default_factory=lambda: array("f"))
    input_tokens: "array[int]" = field(default_factory=lambda: array("i"))
    output_tokens: "array[int]" = field(default_factory=lambda: array("i"))
    cached_tokens: "array[int]" = field(default_factory=lambda: array("i"))
    itl: LogHistogram = field(default_factory=LogHistogram)
    refused: int = 0
    preemptions: int = 0
    steps: int = 0
    computed_tokens: int = 0
    busy_seconds: float = 0.0
    first_arrival: float = float("inf")
    last_answer: float = 0.0
    replicas: int = 0
    kv_share: float = 0.0
    running_seconds: float = 0.0
    timeline: dict[int, list[float]] = field(default_factory=dict)

    def request(
        self, arrival: float, first: float, end: float, prompt: int, output: int, cached: int
    ) -> None:
        """A request was answered in full. Times in seconds on one clock."""
        self.ttft.append(first - arrival)
        self.tpot.append((end - first) / (output - 1) if output > 1 else 0.0)
        self.latency.append(end - arrival)
        self.input_tokens.append(prompt)
        self.output_tokens.append(output)
        self.cached_tokens.append(cached)
        self.first_arrival = min(self.first_arrival, arrival)
        self.last_answer = max(self.last_answer, end)

    def merge(self, other: "Recorder") -> None:
        """Add the results of an independent part of the same run."""
        for name in ("ttft", "tpot", "latency", "input_tokens", "output_tokens", "cached_tokens"):
            getattr(self, name).extend(getattr(other, name))
        self.itl.merge(other.itl)
        for name in (
            "refused", "preemptions", "steps", "computed_tokens", "busy_seconds", "replicas",
            "running_seconds",
        ):  # fmt: skip
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.kv_share = max(self.kv_share, other.kv_share)
        self.first_arrival = min(self.first_arrival, other.first_arrival)
        self.last_answer = max(self.last_answer, other.last_answer)
        for second, values in other.timeline.items():
            mine = self.timeline.setdefault(second, [0.0] * len(values))
            for index, value in enumerate(values):
                mine[index] += value


@dataclass(frozen=True)
class Report:
    """Seconds, tokens/s and shares in [0, 1]. Quantile maps hold 'mean', 'p50', 'p90', 'p95',
    'p99'.

    attainment: share of answered and refused requests that were good. utilisation: share of the
    replicas' time in steps. cost_*: dollars per million tokens where a price was given. kv_peak:
    largest share of a replica's pages in use.
    """

    requests: int
    refused: int
    seconds: float
    replicas: int
    ttft: Mapping[str, float]
    tpot: Mapping[str, float]
    itl: Mapping[str, float]
    latency: Mapping[str, float]
    input_tokens_per_second: float
    output_tokens_per_second: float
    requests_per_second: float
    goodput_requests: float
    goodput_tokens: float
    attainment: float
    cached_share: float
    preemptions: int
    steps: int
    mean_running: float
    utilisation: float
    kv_peak: float
    cost_per_million_output: float | None
    cost_per_million_good: float | None
    timeline: tuple[tuple[float, ...], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def quantiles(values: Iterable[float]) -> dict[str, float]:
    """Mean and percentiles (nearest rank) of values; zeros when there are none."""
    ordered = sorted(values)
    if not ordered:
        return {"mean": 0.0, **{f"p{q}": 0.0 for q in QUANTILES}}
    last = len(ordered) - 1
    ranks = {
        f"p{q}": ordered[max(0, min(last, -(-q * len(ordered) // 100) - 1))] for q in QUANTILES
    }
    return {"mean": sum(ordered) / len(ordered), **ranks}


def report(recorder: Recorder, slo: Slo, price_per_hour: float = 0.0) -> Report:
    """Sum up a run. price_per_hour: dollars of all replicas together."""
    done = len(recorder.ttft)
    seconds = max(recorder.last_answer - recorder.first_arrival, 1e-9) if done else 0.0
    good = [
        tokens
        for ttft, tpot, tokens in zip(
            recorder.ttft, recorder.tpot, recorder.output_tokens, strict=True
        )
        if slo.met(ttft, tpot)
    ]
    output, prompts = sum(recorder.output_tokens), sum(recorder.input_tokens)
    spent = price_per_hour * seconds / 3600.0

    def rate(count: float) -> float:
        return count / seconds if seconds else 0.0

    def dollars(tokens: int) -> float | None:
        return spent / tokens * 1e6 if price_per_hour and tokens else None

    asked = done + recorder.refused
    itl = {"mean": recorder.itl.mean(), **{f"p{q}": recorder.itl.quantile(q) for q in QUANTILES}}
    return Report(
        requests=done,
        refused=recorder.refused,
        seconds=seconds,
        replicas=recorder.replicas,
        ttft=quantiles(recorder.ttft),
        tpot=quantiles(
            t for t, n in zip(recorder.tpot, recorder.output_tokens, strict=True) if n > 1
        ),
        itl=itl,
        latency=quantiles(recorder.latency),
        input_tokens_per_second=rate(prompts),
        output_tokens_per_second=rate(output),
        requests_per_second=rate(done),
        goodput_requests=rate(len(good)),
        goodput_tokens=rate(sum(good)),
        attainment=len(good) / asked if asked else 0.0,
        cached_share=sum(recorder.cached_tokens) / prompts if prompts else 0.0,
        preemptions=recorder.preemptions,
        steps=recorder.steps,
        mean_running=recorder.running_seconds / recorder.busy_seconds
        if recorder.busy_seconds
        else 0.0,
        utilisation=recorder.busy_seconds / (seconds * recorder.replicas) if done else 0.0,
        kv_peak=recorder.kv_share,
        cost_per_million_output=dollars(output),
        cost_per_million_good=dollars(sum(good)),
        timeline=tuple((float(s), *recorder.timeline[s]) for s in sorted(recorder.timeline)),
    )
