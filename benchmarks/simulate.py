"""How large and how fast the simulator is, and what a step of the scheduler costs.

    python benchmarks/simulate.py scheduler           time of step + done by running sequences
    python benchmarks/simulate.py scale [--requests]  100 replicas, mean 300 in and 100 out

Times are CPU seconds of the processes, beside the wall clock, since machines are shared.
"""

import argparse
import resource
import time
from statistics import median

from headrace.core.plan import Estimator, Group, Knobs, PoolConfig, Request
from headrace.core.scheduler import Scheduler
from headrace.cost.catalog import find_model
from headrace.cost.estimator import StepEstimator
from headrace.cost.hardware import find_device
from headrace.sim.cluster import Setup
from headrace.sim.parallel import simulate
from headrace.sim.report import Slo, report
from headrace.sim.workload import Workload


def scheduler(estimator: Estimator, sizes: tuple[int, ...]) -> None:
    """Print microseconds of step and done for so many sequences that all decode."""
    print("running   step us   done us   us a sequence")
    for running in sizes:
        pool = PoolConfig(running * 40 + 64, 16, (Group(),), 1024, running)
        knobs = Knobs(running, running * 8, 512, running)
        subject = Scheduler(pool, knobs, estimator)
        for number in range(running):
            prompt = (number + 1000, *range(1, 120))
            subject.add(Request(number, prompt, 400), 0.0)
        step_times, done_times, now = [], [], 0.0
        for _ in range(300):
            begun = time.thread_time()
            plan = subject.step(now)
            middle = time.thread_time()
            assert plan is not None, "all sequences run to the end"
            samples = len(plan.samples) // 2
            full = samples == running == len(plan.sequences)
            now += 0.01
            ended = time.thread_time()
            subject.done(plan.id, [(1,)] * samples, now)
            if full:
                step_times.append(middle - begun)
                done_times.append(time.thread_time() - ended)
        step, done = (median(times) * 1e6 for times in (step_times, done_times))
        print(f"{running:7d} {step:9.0f} {done:9.0f} {(step + done) / running:15.2f}")


def scale(estimator: StepEstimator, requests: int, replicas: int, processes: int) -> None:
    """Simulate a fleet and print what it took."""
    pool = PoolConfig(10_000, 16, (Group(),), 8192, 128)
    setup = Setup(pool, Knobs(128, 1024, 1024, 128), replicas)
    workload = Workload(requests, rate=60.0 * replicas, input_tokens=300, output_tokens=100)
    begun = time.monotonic()
    recorder = simulate(setup, estimator, workload, processes)
    wall = time.monotonic() - begun
    found = report(recorder, Slo(ttft=0.5, tpot=0.025), 2.5 * replicas)
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    peak = max(usages[0].ru_maxrss, usages[1].ru_maxrss * processes)
    print(
        f"{found.requests} requests, {recorder.steps} steps, {sum(recorder.output_tokens)} tokens"
    )
    print(
        f"wall {wall:.0f} s, CPU {cpu:.0f} s in {processes} processes, peak {peak / 1024:.0f} MiB"
    )
    print(f"{cpu / sum(recorder.output_tokens) * 1e6:.2f} us of CPU a token")
    print(
        f"simulated {found.seconds:.0f} s: TTFT p90 {found.ttft['p90'] * 1e3:.0f} ms, TPOT p50 "
        f"{found.tpot['p50'] * 1e3:.1f} ms, attainment {found.attainment:.1%}, mean batch "
        f"{found.mean_running:.0f}, utilisation {found.utilisation:.0%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("scheduler", "scale"))
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--replicas", type=int, default=100)
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    estimator = StepEstimator(find_model("llama-3.1-8b").on(find_device("h100")))
    if arguments.what == "scheduler":
        scheduler(estimator, (1, 16, 64, 128, 256, 512))
    else:
        scale(estimator, arguments.requests, arguments.replicas, arguments.processes)


if __name__ == "__main__":
    main()
