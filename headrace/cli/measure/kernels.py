"""`headrace bench kernels`: each op of a model at several batch shapes, beside the machine's
limits."""

import argparse
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.cli.measure import common
from headrace.cli.measure.common import Limits, engine_config, report
from headrace.engine.engine import Engine
from headrace.engine.load import load
from headrace.engine.messages import SamplingSpec, Submit
from headrace.errors import ConfigError
from headrace.ops.cpu import CpuExecutable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Shapes of the step, and the engine's flags."""
    common.add_arguments(parser)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32],
                        help="sequences that decode together, one row each")  # fmt: skip
    parser.add_argument("--prefill", type=int, nargs="+", default=[512],
                        help="rows of a prompt's step")  # fmt: skip
    parser.add_argument("--context", type=int, default=64, help="tokens before the decoded row")
    parser.add_argument("--repeat", type=int, default=15, help="times each step is measured")


@dataclass
class Sum:
    """Of one op in one step, over its instructions."""

    seconds: list[float] = field(default_factory=list)
    bytes: float = 0.0
    operations: float = 0.0


def run(arguments: argparse.Namespace) -> int:
    """Print one row per shape and op."""
    config = engine_config(arguments)
    budget = max(*arguments.prefill, *arguments.rows, config.max_num_batched_tokens or 0)
    config = replace(
        config,
        backend="cpu",
        max_num_batched_tokens=budget,
        max_num_seqs=max(config.max_num_seqs or 0, *arguments.rows),
        enable_prefix_caching=False,
    )
    limits = Limits.of(config)
    rows: list[dict[str, Any]] = []
    for count in arguments.rows:
        found = measure(config, count, arguments.context, 1, arguments.repeat)
        rows += lines(f"decode {count}", found, limits)
    for length in arguments.prefill:
        found = measure(config, 1, 0, length, max(3, arguments.repeat // 4))
        rows += lines(f"prefill {length}", found, limits)
    report(rows, f"{config.model}, {limits.level}, {limits.threads} threads", arguments.json)
    return 0


def measure(
    config: Any, sequences: int, context: int, rows: int, repeat: int
) -> dict[tuple[str, str], Sum]:
    """Profile one step again and again: `sequences` slices of `rows` rows after `context`
    tokens."""
    loaded = load(config)
    executable = loaded.executable
    if not isinstance(executable, CpuExecutable):
        raise ConfigError("backend", "only the CPU back-end has kernels to measure")
    if context + rows >= loaded.plan.max_model_len:
        raise ConfigError("context", f"{context + rows} tokens do not fit the model's context")
    engine = Engine(loaded)
    found: dict[tuple[str, str], Sum] = defaultdict(Sum)
    try:
        for index in range(sequences):
            prompt = tuple(100 + (7 * i + index) % 900 for i in range(context + rows))
            room = loaded.plan.max_model_len - len(prompt)
            engine.submit(Submit(str(index), prompt, room, SamplingSpec(temperature=0.0)))
        while engine.scheduler.stats().waiting or executable.batch.num_tokens != sequences * rows:
            engine.step()
        for _ in range(repeat):
            for op, path, seconds, size, operations in executable.profile():
                entry = found[op, path]
                entry.seconds.append(seconds)
                entry.bytes += size
                entry.operations += operations
        for entry in found.values():
            entry.seconds = [sum(entry.seconds) / repeat]
            entry.bytes /= repeat
            entry.operations /= repeat
    finally:
        engine.close()
    return found


def lines(shape: str, found: dict[tuple[str, str], Sum], limits: Limits) -> list[dict[str, Any]]:
    """Rows of one shape, the slowest op first; limits are measured now, beside the ops."""
    read = limits.read(100_000_000) / 1e9
    peak = {what: limits.operations(what) / 1e9 for what in ("dot4", "dot8", "fma")}
    rows = []
    for (op, path), entry in sorted(found.items(), key=lambda item: -sum(item[1].seconds)):
        seconds = sum(entry.seconds)
        rate, speed = entry.bytes / seconds / 1e9, entry.operations / seconds / 1e9
        rows.append(
            {
                "step": shape,
                "op": op,
                "kernel": path,
                "ms": 1e3 * seconds,
                "GB/s": rate,
                "of read": f"{rate / read:.0%}",
                "GOPS": speed,
                "of peak": f"{speed / peak[arithmetic(path)]:.0%}",
            }
        )
    total = sum(sum(entry.seconds) for entry in found.values())
    rows.append(
        {
            "step": shape,
            "op": "all",
            "kernel": "",
            "ms": 1e3 * total,
            "GB/s": None,
            "of read": f"{read:.1f} GB/s",
            "GOPS": None,
            "of peak": " ".join(f"{what} {rate:.0f}" for what, rate in peak.items()),
        }
    )
    return rows


def arithmetic(path: str) -> str:
    """The kind of multiply-add of a kernel: unsigned values of up to 4 bits, other quantized ones,
    or float32."""
    layout = path.split()[-1]
    narrow, wide = ("n2", "n3", "n4"), ("n5", "n6", "b8", "iq4", "fp4")
    return "dot4" if layout.startswith(narrow) else "dot8" if layout.startswith(wide) else "fma"
