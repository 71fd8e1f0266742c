"""`headrace doctor [MODEL]`: what this set-up does not do well, with the predicted gain of mending
it."""

import argparse
import json
import os
import sys
from dataclasses import asdict
from math import prod

from rich.console import Console

from headrace.checkpoint import open_configured
from headrace.cli import configure
from headrace.cli.flags import add_flags, add_model
from headrace.config import EngineConfig
from headrace.cost import parse
from headrace.cost.findings import Finding, Running, findings
from headrace.cost.hardware import profile_path
from headrace.cost.local import local_device, recall
from headrace.cost.roofline import StepModel, compile_model
from headrace.engine.load import usable_cores
from headrace.engine.memory import MemoryPlan, make_plan
from headrace.models.spec import Model
from headrace.ops.backends import open_backend

_WIDE = ("F32", "F16", "BF16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, the engine's flags as for `serve`, the promise and the traffic."""
    add_model(parser)
    parser.add_argument("--config", metavar="FILE", help="YAML file with flags by name")
    parser.add_argument("--slo", default="ttft=1s,tpot=50ms", metavar="PROMISE", help="the promise")
    parser.add_argument(
        "--traffic", default="prompt=300,output=100", metavar="TRAFFIC", help="as in headrace plan"
    )
    parser.add_argument("--shared", type=int, default=0, metavar="N", help="common prompt tokens")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    add_flags(parser, EngineConfig, without=("model",))


def run(arguments: argparse.Namespace) -> int:
    """Look, predict, print; 0 when there is nothing to say."""
    (config,) = configure(arguments, EngineConfig)
    checkpoint = open_configured(config)
    model = checkpoint.model(config.max_model_len)
    threads = config.threads or usable_cores()
    backend = open_backend(config.backend, config.level, threads)
    plan = make_plan(config, model, backend, threads)
    tokens = plan.pool.num_pages // plan.layout.table_rows * plan.layout.block_size
    running = Running(
        recall(_priced(model, plan, threads)), plan.knobs.max_sequences, plan.knobs.max_tokens,
        plan.knobs.mixed_prefill or plan.knobs.max_tokens, tokens, plan.pool.prefix_caching,
        arguments.shared, _quantized(model, plan, threads),
    )  # fmt: skip
    traffic, promise = parse.traffic(arguments.traffic), parse.promise(arguments.slo)
    found = [*_machine(threads, backend.level), *findings(running, traffic, promise)]
    if arguments.json:
        sys.stdout.write(json.dumps([asdict(one) for one in found], indent=1) + "\n")
    else:
        show(Console(highlight=False), found)
    return 1 if found else 0


def _priced(model: Model, plan: MemoryPlan, threads: int) -> StepModel:
    sizes = {name: float(weight.nbytes) for name, weight in model.weights.items()}
    formats = {name: weight.formats for name, weight in model.weights.items()}
    return compile_model(model.program, plan.layout, sizes, local_device(threads), formats)


def _quantized(model: Model, plan: MemoryPlan, threads: int) -> StepModel | None:
    """The model with its wide matrices in 4 bits, or None where it has none."""
    sizes: dict[str, float] = {}
    formats: dict[str, tuple[str, ...]] = {}
    changed = False
    for name, weight in model.weights.items():
        wide = len(weight.shape) == 2 and weight.formats[0] in _WIDE and name != "embed"
        changed |= wide
        sizes[name] = prod(weight.shape) * 4.5 / 8 if wide else float(weight.nbytes)
        formats[name] = ("Q4_1",) if wide else weight.formats
    if not changed:
        return None
    return compile_model(model.program, plan.layout, sizes, local_device(threads), formats)


def _machine(threads: int, level: str) -> list[Finding]:
    """What is wrong before any model is."""
    found = []
    if not profile_path().exists():
        found.append(
            Finding(
                "this machine was never measured",
                "predictions begin from a guess",
                "headrace calibrate (5 seconds)",
            )
        )
    if level == "portable":
        found.append(
            Finding(
                "kernels run at the portable level",
                "no vector instructions are used",
                "use a CPU with AVX2 or AVX-512, or leave out --level",
            )
        )
    cores = usable_cores()
    if threads > cores:
        found.append(
            Finding(
                "more threads than cores",
                f"{threads} threads on {cores} cores take turns",
                f"--threads {cores}",
            )
        )
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > 1.5 * cores:
        found.append(
            Finding(
                "other work keeps the cores busy",
                f"load average {load:.1f} on {cores} cores",
                "stop it, or expect steps to take longer and to vary",
            )
        )
    return found


def show(console: Console, found: list[Finding]) -> None:
    """The findings as text."""
    if not found:
        console.print("nothing to mend: the promise can be kept, and no change gains 5 %")
    for one in found:
        gain = "" if one.gain is None else f" (gains {one.gain:.0%})"
        console.print(f"[bold]{one.what}[/bold]{gain}\n  {one.evidence}\n  -> {one.advice}")
