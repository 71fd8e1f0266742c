"""How well the cost model predicts this engine: step times, and whole runs.

    python benchmarks/estimate.py [--model MODEL] [--seconds 60] [--unseen 20] [--repeats 3]

Loads the model in this process and drives the engine with a mixed open-loop load while the
estimator learns; prints MAPE and bias of all its steps and of the last 512 (each predicted before
it ran). Then, `repeats` times, each of three workloads that the fit has not seen runs live with the
fit frozen, and the same requests run in the simulator: TTFT, TPOT, ITL and goodput side by side,
and the bias of the predictions by rows of a step. Before each of them it learns from `refresh`
seconds of the first load, since virtual machines change their speed from minute to minute. The
promise of goodput is the TTFT and the TPOT that 90 % of the live requests got each.

`at its speed` is a second simulation, told one number of the live run: measured over predicted
seconds, of all its steps in sum. What it is off by is the model and the simulator, what the first
one is off by beyond that is the machine, which was faster or slower than while the fit learned. Run
it on a quiet machine.
"""

import argparse
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from headrace.config import DEFAULT_MODEL, EngineConfig
from headrace.core.plan import StepPlan
from headrace.cost.estimator import StepEstimator
from headrace.cost.roofline import TERMS
from headrace.engine.engine import Engine
from headrace.engine.load import load
from headrace.engine.messages import SamplingSpec, Submit
from headrace.sim.cluster import Cluster, Setup
from headrace.sim.report import LogHistogram, Recorder, Slo, report
from headrace.sim.workload import GeneratedSource, Job, Workload
from headrace.trace import replay

SEEN = Workload(1, rate=2.0, input_tokens=200, output_tokens=60, spread=0.8, limit=2048, seed=1)
UNSEEN = {
    "short prompts, long answers": replace(
        SEEN, rate=2.4, input_tokens=100, output_tokens=90, spread=0.4
    ),
    "long prompts": replace(SEEN, rate=1.0, input_tokens=350, output_tokens=90, spread=0.5),
    "many small": replace(SEEN, rate=4.0, input_tokens=60, output_tokens=45, spread=0.6),
}
ROWS = ((1, 1), (2, 4), (5, 8), (9, 16), (17, 64), (65, 128), (129, 4096))


@dataclass(frozen=True)
class Step:
    """One live step: its rows, and seconds as predicted before it and as measured."""

    rows: int
    predicted: float
    seconds: float


class Live:
    """The engine under a workload, with what its users see written into a recorder.

    steps: of the last run. between: seconds from one step to the next while there was work, that no
    plan prices, as the mean of the last run.
    """

    def __init__(self, model: str, trace: Path) -> None:
        self.engine = Engine(load(EngineConfig(model=model, max_num_seqs=32, trace=str(trace))))
        self.plan = self.engine.loaded.plan
        self.estimator = self.engine.estimator
        self.steps: list[Step] = []
        self.between = 0.0
        self._number = 0
        self._observe = self.estimator.observe
        self.estimator.observe = self._observed  # type: ignore[method-assign]

    def _observed(self, plan: StepPlan, seconds: float) -> None:
        self.steps.append(Step(len(plan.tokens), plan.seconds, seconds))
        self._observe(plan, seconds)

    def run(self, workload: Workload, learn: bool) -> Recorder:
        """Serve all jobs of a workload in real time."""
        self.estimator.learning = learn
        self.steps = []
        idle = 0.0
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
                due = following.arrival if following else 0.0
                time.sleep(min(0.001, max(0.0, due - now)))
                idle += time.monotonic() - began - now
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
        spent = sum(step.seconds for step in self.steps)
        self.between = (time.monotonic() - began - idle - spent) / max(1, len(self.steps))
        return recorder


def simulated(live: Live, workload: Workload, between: float, speed: float = 1.0) -> Recorder:
    """The same jobs in virtual time with the fit as it stands, on a machine so much faster."""
    coefficients = [value / speed for value in live.estimator.coefficients]
    frozen = StepEstimator(live.estimator.model, coefficients)
    setup = Setup(live.plan.pool, live.plan.knobs, between=between)
    return Cluster(setup, frozen, GeneratedSource(workload)).run()


def errors(steps: list[Step]) -> str:
    """MAPE and bias of steps, and how far all their predictions together are off."""
    relative = [step.predicted / step.seconds - 1.0 for step in steps]
    total = sum(step.predicted for step in steps) / sum(step.seconds for step in steps) - 1.0
    mape = sum(map(abs, relative)) / len(steps)
    return f"MAPE {mape:5.1%}, bias {sum(relative) / len(steps):+6.1%}, in sum {total:+6.1%}"


def by_rows(steps: list[Step]) -> None:
    """Print the errors of steps by their rows."""
    for low, high in ROWS:
        some = [step for step in steps if low <= step.rows <= high]
        if len(some) >= 5:
            middle = median(step.seconds for step in some) * 1e3
            print(f"    {low:4}-{high:<4} rows, {len(some):5} steps, median {middle:6.1f} ms: "
                  f"{errors(some)}")  # fmt: skip


def compare(live: Recorder, virtual: Recorder, matched: Recorder) -> list[dict[str, float]]:
    """Print what users saw and what both simulations said; returns relative differences by name, of
    each."""
    slo = Slo(quantile(live.ttft, 0.9), quantile(live.tpot, 0.9))
    columns = [figures(recorder, slo) for recorder in (live, virtual, matched)]
    print(f"    {'':16}{'live':>10}{'simulated':>12}{'off by':>9}{'at its speed':>15}{'off by':>9}")
    for name, real in columns[0].items():
        said, told = columns[1][name], columns[2][name]
        print(f"    {name:16}{real:10.1f}{said:12.1f}{said / real - 1:9.1%}"
              f"{told:15.1f}{told / real - 1:9.1%}")  # fmt: skip
    return [{name: one[name] / real - 1 for name, real in columns[0].items()}
            for one in columns[1:]]  # fmt: skip


def figures(recorder: Recorder, slo: Slo) -> dict[str, float]:
    """What is compared, by name."""
    found = report(recorder, slo)
    return {
        "TTFT p50, ms": found.ttft["p50"] * 1e3,
        "TTFT p90, ms": found.ttft["p90"] * 1e3,
        "TPOT p50, ms": found.tpot["p50"] * 1e3,
        "ITL p99, ms": found.itl["p99"] * 1e3,
        "output tok/s": found.output_tokens_per_second,
        "goodput tok/s": found.goodput_tokens,
        "attainment, %": found.attainment * 100,
    }


def quantile(values: Iterable[float], share: float) -> float:
    """The value that so large a share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--seconds", type=float, default=60.0, help="of the load it learns from")
    parser.add_argument("--unseen", type=float, default=40.0, help="of each load after that")
    parser.add_argument("--refresh", type=float, default=10.0, help="of the first load, each time")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--trace", type=Path, default=Path("/tmp/headrace-estimate.jsonl"))
    arguments = parser.parse_args()
    live = Live(arguments.model, arguments.trace)
    live.run(_lasting(SEEN, arguments.seconds, seed=1), learn=True)
    between = live.between
    print(f"the load it learns from, {len(live.steps)} steps: {errors(live.steps)}")
    print(f"the last 512 of them: {errors(live.steps[-512:])}")
    by_rows(live.steps)
    coefficients = zip(TERMS, live.estimator.coefficients, strict=True)
    print("coefficients:", ", ".join(f"{name} {value:.3f}" for name, value in coefficients))
    print(f"between steps: {between * 1e6:.0f} us")
    found: list[list[dict[str, float]]] = []
    for repeat in range(arguments.repeats):
        for number, (name, workload) in enumerate(UNSEEN.items()):
            if found:
                again = 1000 + len(found)
                live.run(_lasting(SEEN, arguments.refresh, again), learn=True)
                between = live.between
            load = _lasting(workload, arguments.unseen, 100 + 10 * repeat + number)
            real = live.run(load, learn=False)
            print(f"\nunseen: {name}, {load.requests} requests, fit frozen: {errors(live.steps)}")
            by_rows(live.steps)
            speed = sum(s.predicted for s in live.steps) / sum(s.seconds for s in live.steps)
            print(f"    the machine's speed, of that while the fit learned: {speed:.3f}")
            virtual, matched = (simulated(live, load, between, s) for s in (1.0, speed))
            found.append(compare(real, virtual, matched))
    for number, title in enumerate(("as simulated", "at the machine's speed")):
        print(f"\noff by, {title}, median and worst of all unseen runs:")
        runs = [pair[number] for pair in found]
        for name in runs[0]:
            middle, worst = (pick(abs(run[name]) for run in runs) for pick in (median, max))
            signed = median(run[name] for run in runs)
            print(f"    {name:16}{middle:7.1%}{worst:8.1%}   (signed median {signed:+.1%})")
    live.engine.close()
    replayed = replay(arguments.trace)
    same = replayed.difference or "identical"
    print(f"replay of {replayed.requests} requests, {replayed.plans} plans: {same}")


def _lasting(workload: Workload, seconds: float, seed: int) -> Workload:
    """A workload of that many seconds."""
    return replace(workload, requests=max(4, int(seconds * workload.rate)), seed=seed)


if __name__ == "__main__":
    main()
