"""How well the cost model predicts this engine: step times, and whole runs.

    python benchmarks/estimate.py [--model MODEL] [--seconds 60] [--unseen 40]

Loads the model in this process and drives the engine with a mixed open-loop load while the
estimator learns; prints MAPE and bias of the last 512 steps (each predicted before it ran). Then
the fit is frozen, a workload of other lengths and rate runs live, and the same requests run in the
simulator: TTFT p90, TPOT p50 and goodput side by side. Run it on a quiet machine.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from headrace.config import DEFAULT_MODEL, EngineConfig
from headrace.cost.estimator import StepEstimator
from headrace.engine.engine import Engine
from headrace.engine.load import load
from headrace.engine.messages import SamplingSpec, Submit
from headrace.sim.cluster import Cluster, Setup
from headrace.sim.report import LogHistogram, Recorder, Report, Slo, report
from headrace.sim.workload import GeneratedSource, Job, Workload
from headrace.trace import replay


class Live:
    """The engine under a workload, with what its users see written into a recorder."""

    def __init__(self, model: str, trace: Path) -> None:
        self.engine = Engine(load(EngineConfig(model=model, max_num_seqs=32, trace=str(trace))))
        self.plan = self.engine.loaded.plan
        self.estimator = self.engine.estimator
        self._number = 0

    def run(self, workload: Workload, learn: bool) -> Recorder:
        """Serve all jobs of a workload in real time."""
        self.estimator.learning = learn
        jobs: Iterator[Job] = GeneratedSource(workload).arrivals()
        following = next(jobs, None)
        recorder = Recorder(replicas=1)
        began = time.monotonic()
        live: dict[str, list[float]] = {}
        held: dict[str, Job] = {}
        while following is not None or held:
            now = time.monotonic() - began
            while following is not None and following.arrival <= now:
                name = str(self._number)
                self._number += 1
                prompt = tuple(
                    1000 + (7919 * self._number + t) % 40000 for t in range(len(following.prompt))
                )
                self.engine.submit(
                    Submit(name, prompt, following.output, SamplingSpec(temperature=0.0))
                )
                held[name], live[name] = following, []
                following = next(jobs, None)
            if not held:
                time.sleep(min(0.001, max(0.0, (following.arrival if following else 0) - now)))
                continue
            started = time.monotonic()
            outputs = self.engine.step()
            ended = time.monotonic()
            recorder.steps += 1
            recorder.busy_seconds += ended - started
            for output in outputs.outputs if outputs else ():
                times = live[output.id]
                if output.tokens:
                    if times:
                        recorder.itl.counts[LogHistogram.bucket(ended - began - times[-1])] += 1
                    times.append(ended - began)
                if output.finish:
                    job = held.pop(output.id)
                    recorder.request(
                        job.arrival, times[0], times[-1], len(job.prompt), len(times),
                        output.cached_tokens,
                    )  # fmt: skip
        return recorder


def simulated(live: Live, workload: Workload) -> Recorder:
    """The same jobs in virtual time with the fit as it stands."""
    frozen = StepEstimator(live.estimator.model, live.estimator.coefficients)
    setup = Setup(live.plan.pool, live.plan.knobs)
    return Cluster(setup, frozen, GeneratedSource(workload)).run()


def compare(live: Report, virtual: Report) -> None:
    """Print both and the ratio."""
    rows = (
        ("TTFT p90, ms", live.ttft["p90"] * 1e3, virtual.ttft["p90"] * 1e3),
        ("TPOT p50, ms", live.tpot["p50"] * 1e3, virtual.tpot["p50"] * 1e3),
        ("ITL p99, ms", live.itl["p99"] * 1e3, virtual.itl["p99"] * 1e3),
        ("output tok/s", live.output_tokens_per_second, virtual.output_tokens_per_second),
        ("goodput tok/s", live.goodput_tokens, virtual.goodput_tokens),
        ("attainment, %", live.attainment * 100, virtual.attainment * 100),
    )
    print(f"{'':16}{'live':>10}{'simulated':>12}{'off by':>9}")
    for name, a, b in rows:
        print(f"{name:16}{a:10.1f}{b:12.1f}{(b / a - 1 if a else 0):9.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=2.0)
    parser.add_argument("--unseen", type=float, default=40.0, help="seconds of the second load")
    parser.add_argument("--trace", type=Path, default=Path("/tmp/headrace-estimate.jsonl"))
    arguments = parser.parse_args()
    live = Live(arguments.model, arguments.trace)
    seen = Workload(
        max(4, int(arguments.seconds * arguments.rate)), rate=arguments.rate, input_tokens=200,
        output_tokens=60, spread=0.8, limit=2048, seed=1,
    )  # fmt: skip
    live.run(seen, learn=True)
    stats = live.estimator.stats()
    print(
        f"step time after {stats['cost_observations']:.0f} steps: MAPE {stats['cost_mape']:.1%}, "
        f"bias {stats['cost_bias']:+.1%}"
    )
    print(
        "coefficients:",
        {
            k[5:]: round(v, 3)
            for k, v in stats.items()
            if k[5:] not in ("mape", "bias", "observations")
        },
    )
    unseen = replace(
        seen, requests=max(4, int(arguments.unseen * arguments.rate * 1.3)),
        rate=arguments.rate * 1.3, input_tokens=120, output_tokens=90, spread=0.4, seed=2,
    )  # fmt: skip
    real = live.run(unseen, learn=False)
    virtual = simulated(live, unseen)
    print(f"step time under the unseen load, fit frozen: MAPE {live.estimator.errors.mape:.1%}")
    slo = Slo(ttft=1.0, tpot=0.1)
    compare(report(real, slo), report(virtual, slo))
    live.engine.close()
    found = replay(arguments.trace)
    same = found.difference or "identical"
    print(f"replay of {found.requests} requests, {found.plans} plans: {same}")


if __name__ == "__main__":
    main()
