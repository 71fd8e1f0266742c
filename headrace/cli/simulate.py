"""`headrace simulate MODEL`: a workload over replicas, by the engine's own scheduler."""

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console

from headrace.cli.simulate_page import page_of, table_of
from headrace.core.plan import Group, Knobs, PoolConfig
from headrace.cost import parse
from headrace.cost.calibrate import usable_threads
from headrace.cost.capacity import MEMORY_SHARE
from headrace.cost.catalog import BITS, KV_BYTES, Precision, find_model, names
from headrace.cost.estimator import StepEstimator
from headrace.cost.hardware import find_device, find_link
from headrace.cost.parse import at_least
from headrace.errors import ConfigError, MemoryPlanError
from headrace.models.sketch import Ranks
from headrace.ops.spec import KVGroup
from headrace.sim.clock import RealClock
from headrace.sim.cluster import Cluster, Setup
from headrace.sim.parallel import simulate
from headrace.sim.recorded import RecordedSource
from headrace.sim.report import Recorder, Slo, report
from headrace.sim.workload import SHAPES, GeneratedSource, Source, Workload, shape
from headrace.trace import RecordingScheduler, TraceWriter

_WORKLOAD = (
    ("--requests", int, "requests in all"),
    ("--rate", float, "sessions a second (open loop)"),
    ("--burstiness", float, "shape of gamma arrivals: 1 Poisson, less = burstier"),
    ("--concurrency", int, "users of a closed loop; replaces --rate"),
    ("--input-tokens", float, "mean new tokens of a turn"),
    ("--output-tokens", float, "mean tokens of an answer"),
    ("--spread", float, "sigma of log-normal lengths, 0 = fixed"),
    ("--shared", int, "tokens of a shared prefix"),
    ("--documents", int, "different shared prefixes"),
    ("--turns", float, "mean turns of a session"),
    ("--think", float, "mean seconds between turns"),
    ("--seed", int, "of all draws"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Model, machine, workload, sizes, output."""
    parser.add_argument(
        "model", metavar="MODEL",
        help=f"{', '.join(names())}, a config.json, a .gguf file or a short name",
    )  # fmt: skip
    parser.add_argument("--hardware", default="local", metavar="NAME", help="as in headrace plan")
    parser.add_argument("--devices", type=Path, metavar="FILE", help="further devices, as TOML")
    parser.add_argument("--weights", choices=list(BITS), help="format of the weights")
    parser.add_argument("--kv", choices=list(KV_BYTES), default="f16", help="format of K and V")
    parser.add_argument(
        "--tensor", type=at_least(1), default=1, metavar="N", help="tensor parallel ranks"
    )
    parser.add_argument("--slo", default="ttft=1s,tpot=50ms", metavar="PROMISE", help="the promise")
    group = parser.add_argument_group("workload")
    group.add_argument("--shape", choices=list(SHAPES), default="random", help="of the traffic")
    group.add_argument(
        "--workload", type=Path, metavar="FILE", help="a traffic file (.csv or .jsonl) instead"
    )
    group.add_argument(
        "--speed", type=at_least(1e-6, float), default=1.0, help="of a traffic file, or real time"
    )
    for flag, kind, text in _WORKLOAD:
        group.add_argument(flag, type=kind, metavar="N", help=text)
    sizes = parser.add_argument_group("replicas")
    sizes.add_argument("--replicas", type=at_least(1), default=1, metavar="N", help="how many")
    sizes.add_argument("--routing", choices=("sticky", "least", "prefix"), default="sticky")
    sizes.add_argument("--max-num-seqs", type=at_least(1), default=128, metavar="N")
    sizes.add_argument("--max-num-batched-tokens", type=at_least(1), default=2048, metavar="N")
    sizes.add_argument("--mixed-prefill-tokens", type=at_least(0), default=0, metavar="N")
    sizes.add_argument("--max-num-queued-reqs", type=at_least(0), default=0, metavar="N")
    sizes.add_argument("--max-model-len", type=at_least(1), metavar="N")
    sizes.add_argument("--block-size", type=at_least(1), default=16, metavar="N")
    sizes.add_argument("--kv-cache-memory-bytes", metavar="BYTES", help="of one replica")
    sizes.add_argument("--no-enable-prefix-caching", action="store_true")
    sizes.add_argument("--jitter", type=at_least(0, float), default=0.0, help="sigma of step times")
    parser.add_argument("--real-time", action="store_true", help="run at the pace of the clock")
    parser.add_argument("--processes", type=at_least(1), default=usable_threads(), metavar="N")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="record one replica's scheduler")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots")


def run(arguments: argparse.Namespace) -> int:
    """Simulate and report."""
    device = find_device(arguments.hardware, arguments.devices)
    ranks = Ranks(tensor=arguments.tensor)
    precision = Precision(weights=arguments.weights, kv=arguments.kv)
    model = find_model(arguments.model, precision, ranks, arguments.block_size)
    link = find_link(device.link) if arguments.tensor > 1 else None
    estimator = StepEstimator(model.on(device, link))
    kv_bytes = (
        parse.size("kv_cache_memory_bytes", arguments.kv_cache_memory_bytes)
        if arguments.kv_cache_memory_bytes
        else device.memory * MEMORY_SHARE - model.rank_bytes
    )
    length = arguments.max_model_len or min(model.max_positions, 32768)
    if model.kv_bytes(length) > kv_bytes:
        raise MemoryPlanError(
            f"one sequence of {length} tokens needs {model.kv_bytes(length) / 1e9:.2f} GB of KV, "
            f"{kv_bytes / 1e9:.2f} GB is there: lower --max-model-len or use more devices"
        )
    setup = _setup(arguments, model.layout.groups, int(kv_bytes // model.layout.page_bytes), length)
    recorder = _run(arguments, setup, estimator, length)
    promise = parse.promise(arguments.slo)
    price = device.price_per_hour * arguments.tensor * arguments.replicas
    found = report(recorder, Slo(promise.ttft, promise.tpot), price)
    if arguments.html:
        title = f"{arguments.model} on {arguments.replicas} x {device.title}"
        arguments.html.write_text(page_of(title, found, recorder, promise), "utf-8")
    if arguments.json:
        sys.stdout.write(json.dumps(found.to_dict(), indent=1) + "\n")
    else:
        Console().print(table_of(found))
        for path in filter(None, (arguments.html, arguments.trace)):
            Console().print(f"written: {path}")
    return 0


def _setup(
    arguments: argparse.Namespace, groups: tuple[KVGroup, ...], pages: int, length: int
) -> Setup:
    kv_groups = tuple(Group(g.window, g.pages_per_block, g.first) for g in groups)
    sequences, budget = arguments.max_num_seqs, arguments.max_num_batched_tokens
    # A pool far larger than what can be in use only costs the simulation memory.
    rows = sum(group.pages_per_block for group in kv_groups)
    most = 4 * sequences * -(-length // arguments.block_size) * rows
    pool = PoolConfig(
        min(pages, most), arguments.block_size, kv_groups, length, sequences,
        not arguments.no_enable_prefix_caching,
    )  # fmt: skip
    knobs = Knobs(
        sequences, budget, budget, max(sequences, 64), max_waiting=arguments.max_num_queued_reqs,
        mixed_prefill=arguments.mixed_prefill_tokens,
    )  # fmt: skip
    return Setup(pool, knobs, arguments.replicas, arguments.routing, arguments.jitter)


def _workload(arguments: argparse.Namespace, length: int) -> Workload:
    given = {
        flag[2:].replace("-", "_"): getattr(arguments, flag[2:].replace("-", "_"))
        for flag, _, _ in _WORKLOAD
    }
    arrivals = "poisson"
    if given["concurrency"] is not None:
        arrivals = "closed"
    elif given["burstiness"] is not None:
        arrivals = "gamma"
    return shape(arguments.shape, arrivals=arrivals, limit=length, **given)


def _run(
    arguments: argparse.Namespace, setup: Setup, estimator: StepEstimator, length: int
) -> Recorder:
    source: Source
    if arguments.workload:
        source = RecordedSource(arguments.workload, arguments.speed, length, arguments.requests)
    else:
        workload = _workload(arguments, length)
        if not (arguments.real_time or arguments.trace):
            return simulate(setup, estimator, workload, arguments.processes)
        source = GeneratedSource(workload)
    clock = RealClock(arguments.speed) if arguments.real_time else None
    cluster = Cluster(setup, estimator, source, clock)
    if not arguments.trace:
        return cluster.run()
    if setup.replicas != 1:
        raise ConfigError("trace", "records one replica's scheduler: use --replicas 1")
    with TraceWriter(arguments.trace) as writer:
        cluster.replicas[0].scheduler = RecordingScheduler(
            setup.pool, setup.knobs, estimator, writer
        )
        return cluster.run()
