"""A simulation over several processes.

Where requests find their replica by their session alone ('sticky'), replicas do not know of each
other: each process deals itself every session, keeps those of its replicas, and the recorders
merge. Any other routing, or a closed loop, runs in one process.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from headrace.core.plan import Estimator
from headrace.sim.cluster import Cluster, Setup
from headrace.sim.report import Recorder
from headrace.sim.workload import GeneratedSource, Workload


@dataclass(frozen=True)
class _Part:
    setup: Setup
    estimator: Estimator
    workload: Workload
    part: int
    parts: int


def processes_for(setup: Setup, workload: Workload, wanted: int) -> int:
    """How many processes can share the work: the largest divisor of the replicas up to `wanted`."""
    if setup.routing != "sticky" or workload.arrivals == "closed":
        return 1
    return max(n for n in range(1, wanted + 1) if setup.replicas % n == 0)


def simulate(
    setup: Setup, estimator: Estimator, workload: Workload, processes: int = 1
) -> Recorder:
    """The recorder of the whole run, the same whatever the number of processes (but for jitter,
    which each draws for itself)."""
    count = processes_for(setup, workload, processes)
    if count == 1:
        return Cluster(setup, estimator, GeneratedSource(workload)).run()
    parts = [_Part(setup, estimator, workload, part, count) for part in range(count)]
    whole = Recorder()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, mp_context=context) as pool:
        for recorder in pool.map(_run, parts):
            whole.merge(recorder)
    return whole


def _run(part: _Part) -> Recorder:
    source = GeneratedSource(part.workload, (part.part, part.parts))
    only = range(part.part, part.setup.replicas, part.parts)
    return Cluster(part.setup, part.estimator, source, only=only).run()
