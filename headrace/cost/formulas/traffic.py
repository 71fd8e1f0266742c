"""Queues, goodput and money."""

from collections.abc import Sequence
from dataclasses import dataclass


def in_flight(arrivals_per_second: float, seconds_in_system: float) -> float:
    """Requests in the system at once: L = lambda W (Little 1961)."""
    return arrivals_per_second * seconds_in_system


def cost_per_million(
    price_per_hour: float, tokens_per_second: float, utilisation: float = 1.0
) -> float:
    """Money per million tokens. utilisation: share of the hour at that rate; the biggest lever."""
    return price_per_hour / (tokens_per_second * utilisation * 3600.0) * 1e6


@dataclass(frozen=True)
class GoodputPoint:
    """One concurrency of a goodput curve. throughput, goodput: output tokens/s. itl: seconds."""

    batch: int
    throughput: float
    itl: float
    met: float
    goodput: float


def goodput_point(
    batch: int,
    prompts: Sequence[float],
    waits: Sequence[float],
    output: int,
    params: float,
    weight_bytes: float,
    bandwidth: float,
    rate: float,
    ttft: float,
    itl: float,
) -> GoodputPoint:
    """Closed-form goodput of one colocated device: a cycle is `batch` prefills, then `output`
    decode steps at that batch (seed 2, section 8; DistServe's goodput).

    prompts: prompt lengths. waits: place in the cycle of each, in [0, 1). ttft, itl: the promise,
    in seconds. Throughput grows with the batch; goodput peaks and falls to 0.
    """
    decode = output * max(weight_bytes / bandwidth, 2.0 * params * batch / rate)
    mean = sum(prompts) / len(prompts)
    cycle = decode + batch * 2.0 * params * mean / rate
    throughput = batch * output / cycle
    gap = cycle / output
    met = 0.0
    if gap <= itl:
        first = (w * cycle + 2.0 * params * n / rate for w, n in zip(waits, prompts, strict=True))
        met = sum(1 for seconds in first if seconds <= ttft) / len(prompts)
    return GoodputPoint(batch, throughput, gap, met, throughput * met)


def goodput_falls(before: GoodputPoint, after: GoodputPoint) -> bool:
    """Whether a change raised throughput and lowered goodput: the alarm of a cap past the knee."""
    return after.throughput > before.throughput and after.goodput < before.goodput
