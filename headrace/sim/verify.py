"""A plan put to the test: the chosen replica simulated under its share of the traffic.

The closed form knows means. The simulation has arrivals that bunch, prompts that differ and a real
scheduler; where it shows that the promise is not kept often enough, replicas are added.
"""

from dataclasses import dataclass, replace

from headrace.core.plan import Group, Knobs, PoolConfig
from headrace.cost.capacity import Choice, Promise, Traffic
from headrace.cost.estimator import StepEstimator
from headrace.sim.cluster import Cluster, Setup
from headrace.sim.report import Report, Slo, report
from headrace.sim.workload import LONGEST, GeneratedSource, Workload

ATTAINMENT = 0.9
"""Share of requests that must keep the promise (DistServe's setting)."""


@dataclass(frozen=True)
class Verified:
    """report: of one replica (one rank, where experts are spread) under its share of the traffic.
    replicas: how many it takes, never fewer than planned. added: how many more than planned."""

    report: Report
    replicas: int
    added: int
    kept: bool


def setup_of(choice: Choice, traffic: Traffic) -> Setup:
    """The scheduler's sizes for a choice: its batch, its chunk, and KV for what the memory
    holds."""
    layout, batch = choice.replica.model.layout, choice.at.batch
    longest = min(LONGEST, max(traffic.longest, 4 * round(traffic.prompt + traffic.output)))
    groups = tuple(Group(g.window, g.pages_per_block, g.first) for g in layout.groups)
    pages = int(choice.replica.kv_bytes // layout.page_bytes)
    enough = (batch + 8) * -(-longest // layout.block_size) * layout.table_rows
    pool = PoolConfig(
        min(pages, enough), layout.block_size, groups, min(longest, _longest(pages, choice)), batch
    )
    knobs = Knobs(
        max_sequences=batch,
        max_tokens=choice.at.chunk + batch,
        chunk=choice.at.chunk,
        max_logits=batch + 8,
    )
    return Setup(pool, knobs)


def _longest(pages: int, choice: Choice) -> int:
    """Tokens of one sequence that certainly fits so many pages, with room for its windows."""
    layout = choice.replica.model.layout
    return max(layout.block_size, int(pages * 0.9 / layout.table_rows) * layout.block_size)


def workload_of(traffic: Traffic, rate: float, requests: int, limit: int, seed: int) -> Workload:
    """Poisson requests with the traffic's means; the cached share is one common prefix."""
    shared = round(traffic.prompt * traffic.cached)
    return Workload(
        requests,
        rate=rate,
        input_tokens=max(1.0, traffic.prompt - shared),
        output_tokens=traffic.output,
        shared=shared,
        limit=limit,
        seed=seed,
    )


def simulate_share(
    choice: Choice, traffic: Traffic, promise: Promise, rate: float, seed: int = 0
) -> Report:
    """One replica (or rank) at `rate` requests/s, for enough requests to fill its batch 3 times."""
    setup = setup_of(choice, traffic)
    requests = min(1200, max(240, 3 * choice.at.batch))
    workload = workload_of(traffic, rate, requests, setup.pool.max_positions, seed)
    estimator = StepEstimator(choice.replica.steps)
    recorder = Cluster(setup, estimator, GeneratedSource(workload)).run()
    price = choice.replica.price / choice.replica.model.ranks.expert
    return report(recorder, Slo(promise.ttft, promise.tpot), price)


def verify(choice: Choice, traffic: Traffic, promise: Promise, rounds: int = 5) -> Verified:
    """Simulate, adding about a fifth more replicas at a time, up to `rounds` times, until the
    promise is kept for ATTAINMENT of the requests."""
    replicas, ranks = choice.replicas, choice.replica.model.ranks.expert
    for _ in range(rounds):
        found = simulate_share(choice, traffic, promise, traffic.rate / replicas / ranks)
        if found.attainment >= ATTAINMENT:
            break
        replicas += max(1, replicas // 5)
    kept = found.attainment >= ATTAINMENT
    return Verified(found, replicas, replicas - choice.replicas, kept)


def load_curve(
    choice: Choice, traffic: Traffic, promise: Promise, shares: tuple[float, ...]
) -> list[tuple[float, Report]]:
    """(requests/s of one replica, its report) at shares of its closed-form capacity: throughput
    goes on rising where goodput already falls."""
    capacity = choice.at.requests / choice.replica.model.ranks.expert
    once = replace(traffic, rate=1.0)
    return [
        (share * capacity, simulate_share(choice, once, promise, share * capacity))
        for share in shares
    ]
