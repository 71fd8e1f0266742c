"""The simulator by its invariants: nothing lost, Little's law, curves that bend the right way."""

import time
from statistics import fmean

import pytest

from headrace.core.estimate import LinearEstimator
from headrace.core.plan import Group, Knobs, PoolConfig
from headrace.sim.clock import RealClock
from headrace.sim.cluster import Cluster, Setup
from headrace.sim.report import LogHistogram, Recorder, Report, Slo, quantiles, report
from headrace.sim.workload import GeneratedSource, Workload, shape

STEP = LinearEstimator(step=0.004, token=2e-5, key=1e-8)
POOL = PoolConfig(3000, 16, (Group(),), 8192, 64)
KNOBS = Knobs(max_sequences=64, max_tokens=512, chunk=512, max_logits=64)
SLO = Slo(ttft=0.5, tpot=0.02)


def simulate(workload: Workload, setup: Setup | None = None) -> Report:
    setup = setup or Setup(POOL, KNOBS)
    return report(Cluster(setup, STEP, GeneratedSource(workload)).run(), SLO, setup.replicas * 1.0)


def test_every_request_is_answered_in_full() -> None:
    workload = Workload(300, rate=30.0, output_tokens=40)
    recorder = Cluster(Setup(POOL, KNOBS), STEP, GeneratedSource(workload)).run()
    wanted = sorted((len(j.prompt), j.output) for j in GeneratedSource(workload).arrivals())
    got = sorted(zip(recorder.input_tokens, recorder.output_tokens, strict=True))
    assert got == wanted
    assert sum(recorder.itl.counts) == sum(recorder.output_tokens) - 300
    assert (
        recorder.computed_tokens == sum(recorder.input_tokens) + sum(recorder.output_tokens) - 300
    )
    assert min(recorder.ttft) > 0
    assert all(a <= b for a, b in zip(recorder.ttft, recorder.latency, strict=True))


def test_littles_law() -> None:
    """Mean running = throughput x (latency - queueing), measured in two ways."""
    workload = Workload(1500, rate=20.0, output_tokens=50, spread=0.3)
    recorder = Cluster(Setup(POOL, KNOBS), STEP, GeneratedSource(workload)).run()
    seconds = recorder.last_answer - recorder.first_arrival
    in_system = len(recorder.latency) / seconds * fmean(recorder.latency)
    assert recorder.running_seconds / seconds == pytest.approx(in_system, rel=0.1)


def test_the_same_seed_gives_the_same_run() -> None:
    first, second, other = (simulate(Workload(100, rate=20, seed=s)) for s in (1, 1, 2))
    assert first == second
    assert first.ttft != other.ttft


def test_load_raises_latency_and_throughput_until_it_cannot() -> None:
    reports = [
        simulate(Workload(250, rate=rate, output_tokens=40)) for rate in (2.0, 20.0, 60.0, 240.0)
    ]
    tpot = [r.tpot["p50"] for r in reports]
    ttft = [r.ttft["p90"] for r in reports]
    throughput = [r.output_tokens_per_second for r in reports]
    assert tpot == sorted(tpot)
    assert ttft == sorted(ttft)
    assert throughput == sorted(throughput)
    assert reports[0].attainment == 1.0
    assert reports[-1].attainment < 0.5
    assert reports[-1].goodput_tokens < reports[2].goodput_tokens, "throughput up, goodput down"
    assert reports[-1].utilisation > 0.95 > reports[0].utilisation


def test_replicas_share_the_load_and_parts_join() -> None:
    workload = Workload(300, rate=80.0, output_tokens=40)
    one, four = (simulate(workload, Setup(POOL, KNOBS, n)) for n in (1, 4))
    assert four.ttft["p90"] < one.ttft["p90"]
    setup = Setup(POOL, KNOBS, 4)
    merged = Recorder()
    for part in (0, 1):
        cluster = Cluster(setup, STEP, GeneratedSource(workload, (part, 2)), only=range(part, 4, 2))
        merged.merge(cluster.run())
    joined = report(merged, SLO, 4.0)
    for name in ("ttft", "tpot", "itl", "latency"):
        assert getattr(joined, name) == pytest.approx(getattr(four, name))
    assert joined.mean_running == pytest.approx(four.mean_running)
    assert joined.utilisation == pytest.approx(four.utilisation)
    assert (joined.requests, joined.steps) == (four.requests, four.steps)
    assert [row[0] for row in joined.timeline] == [row[0] for row in four.timeline]


def test_prefix_routing_finds_caches() -> None:
    workload = shape("rag", requests=200, rate=20.0, output_tokens=20, documents=12)
    hits = {
        routing: simulate(workload, Setup(POOL, KNOBS, 4, routing)).cached_share
        for routing in ("sticky", "prefix", "least")
    }
    assert hits["prefix"] > hits["sticky"]
    assert hits["prefix"] > 0.6


def test_chat_turns_hit_their_own_history() -> None:
    found = simulate(shape("chat", requests=150, rate=1.0, think=2.0), Setup(POOL, KNOBS, 3))
    assert found.cached_share > 0.8
    assert found.requests == 150


def test_small_pools_preempt_and_full_queues_refuse() -> None:
    tight = PoolConfig(70, 16, (Group(),), 1024, 64)
    found = simulate(
        Workload(150, rate=200.0, input_tokens=60, output_tokens=120, limit=1024),
        Setup(tight, Knobs(64, 512, 512, 64, max_waiting=20)),
    )
    assert found.preemptions > 0
    assert found.refused > 0
    assert found.requests + found.refused == 150
    assert found.kv_peak > 0.9


def test_real_time_runs_the_same_code_at_its_pace() -> None:
    workload = Workload(20, rate=100.0, input_tokens=20, output_tokens=10, spread=0)
    clock = RealClock(speed=4.0)
    begun = time.monotonic()
    recorder = Cluster(Setup(POOL, KNOBS), STEP, GeneratedSource(workload), clock).run()
    assert len(recorder.ttft) == 20
    assert time.monotonic() - begun >= recorder.last_answer / 4.0 * 0.9
    assert clock.late >= 0.0


def test_it_stops_on_time() -> None:
    recorder = Cluster(Setup(POOL, KNOBS), STEP, GeneratedSource(Workload(1000, rate=50.0))).run(
        3.0
    )
    assert 0 < len(recorder.ttft) < 1000
    assert recorder.last_answer <= 3.0


def test_jitter_spreads_steps_without_moving_their_mean_much() -> None:
    workload = Workload(200, rate=5.0, input_tokens=20, output_tokens=40, spread=0)
    plain = Cluster(Setup(POOL, KNOBS), STEP, GeneratedSource(workload)).run()
    noisy = Cluster(Setup(POOL, KNOBS, jitter=0.3), STEP, GeneratedSource(workload)).run()
    assert noisy.itl.quantile(99) > 1.4 * plain.itl.quantile(99)
    assert fmean(noisy.tpot) == pytest.approx(fmean(plain.tpot), rel=0.2)


def test_histogram_quantiles_are_within_a_bucket() -> None:
    histogram = LogHistogram()
    values = [0.001 * 1.01**i for i in range(700)]
    for value in values:
        histogram.counts[LogHistogram.bucket(value)] += 1
    for percent in (1, 50, 90, 99):
        exact = values[int(len(values) * percent / 100)]
        assert histogram.quantile(percent) == pytest.approx(exact, rel=0.04)
    assert histogram.mean() == pytest.approx(fmean(values), rel=0.02)
    assert LogHistogram().quantile(50) == 0
    assert LogHistogram.bucket(0.0) == 0
    assert LogHistogram.bucket(1e12) == len(histogram.counts) - 1


def test_quantiles_by_nearest_rank() -> None:
    found = quantiles([5.0, 1.0, 4.0, 2.0, 3.0])
    assert (found["p50"], found["p90"], found["mean"]) == (3.0, 5.0, 3.0)
    assert quantiles([])["p99"] == 0


def test_an_empty_report_is_all_zeros() -> None:
    empty = report(Recorder(), SLO)
    assert (empty.requests, empty.goodput_tokens, empty.attainment) == (0, 0, 0)
    assert empty.cost_per_million_output is None


def test_time_between_steps_is_part_of_every_token() -> None:
    workload = Workload(5, rate=0.01, output_tokens=30, spread=0.0)
    plain = simulate(workload)
    slower = simulate(workload, Setup(POOL, KNOBS, between=0.001))
    assert slower.tpot["p50"] - plain.tpot["p50"] == pytest.approx(0.001, rel=1e-3)
    assert slower.ttft["p50"] - plain.ttft["p50"] == pytest.approx(0.001, rel=1e-3)
