"""`headrace fit MODEL --memory 8GiB`: what fits, byte by byte: the longest context by
concurrency."""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from headrace.checkpoint import open_checkpoint
from headrace.config import EngineConfig
from headrace.core.plan import Group
from headrace.cost import parse
from headrace.cost.calibrate import total_memory
from headrace.cost.capacity import workspace_bytes
from headrace.cost.catalog import BITS, KV_BYTES, Precision, PricedModel, configured, find_model
from headrace.cost.parse import at_least
from headrace.engine.load import usable_cores
from headrace.engine.memory import DEFAULT_STEP_TOKENS, blocks_of_sequence, human, make_plan
from headrace.errors import MemoryPlanError
from headrace.models.sketch import Ranks
from headrace.ops.backends import open_backend
from headrace.ops.spec import KVLayout

_ANY = 1 << 62
CONCURRENCY = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Fit:
    """The longest context at a concurrency, and the bytes it takes, part by part. context 0:
    none."""

    concurrency: int
    context: int
    bytes: dict[str, int]

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.bytes.values())


Sizes = Callable[[int, int], dict[str, int]]
"""(concurrency, context) -> bytes of each part."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, the memory, and the formats."""
    parser.add_argument("model", metavar="MODEL", help="as in headrace plan, or a checkpoint")
    parser.add_argument(
        "--memory", metavar="BYTES", help="8GiB, 24GB, ... (default: this machine's)"
    )
    parser.add_argument("--block-size", type=at_least(1), default=16, metavar="N")
    parser.add_argument("--max-num-batched-tokens", type=at_least(1), metavar="N")
    parser.add_argument("--threads", type=at_least(1), metavar="N")
    parser.add_argument("--backend", choices=("auto", "cpu", "reference"), default="auto")
    parser.add_argument("--weights", choices=list(BITS), help="format, for configurations")
    parser.add_argument("--kv", choices=list(KV_BYTES), default="f16", help="format of K and V")
    parser.add_argument(
        "--tensor", type=at_least(1), default=1, metavar="N", help="tensor parallel ranks"
    )
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with a plot")


def run(arguments: argparse.Namespace) -> int:
    """Work it out and print it."""
    memory = parse.size("memory", arguments.memory) if arguments.memory else total_memory()
    sizes, longest = _sizes(arguments)
    fits = [largest(sizes, count, longest, memory, arguments.block_size) for count in CONCURRENCY]
    if not fits[0].context:
        parts = ", ".join(f"{name} {human(size)}" for name, size in fits[0].bytes.items())
        raise MemoryPlanError(
            f"{arguments.model} does not fit {human(memory)}: one block of one sequence takes "
            f"{human(fits[0].total)} ({parts})"
        )
    if arguments.html:
        from headrace.cli.fit_page import page_of

        arguments.html.write_text(page_of(arguments.model, memory, fits), "utf-8")
    if arguments.json:
        rows = [{"concurrency": f.concurrency, "context": f.context, **f.bytes} for f in fits]
        sys.stdout.write(json.dumps({"memory": memory, "fits": rows}, indent=1) + "\n")
    else:
        Console().print(table_of(arguments.model, memory, fits))
    return 0


def largest(sizes: Sizes, concurrency: int, longest: int, memory: int, block: int) -> Fit:
    """The longest context in whole blocks at which `concurrency` sequences fit the memory."""
    low, high = 0, max(1, longest // block)
    while low < high:
        middle = (low + high + 1) // 2
        if sum(sizes(concurrency, middle * block).values()) <= memory:
            low = middle
        else:
            high = middle - 1
    return Fit(concurrency, low * block, sizes(concurrency, max(low, 1) * block))


def _sizes(arguments: argparse.Namespace) -> tuple[Sizes, int]:
    """What things take, by the configuration alone or by the engine's own planner."""
    if configured(arguments.model):
        precision = Precision(weights=arguments.weights, kv=arguments.kv)
        ranks = Ranks(tensor=arguments.tensor)
        priced = find_model(arguments.model, precision, ranks, arguments.block_size)
        return _priced_sizes(priced), priced.max_positions
    checkpoint = open_checkpoint(arguments.model)
    model = checkpoint.model()
    threads = arguments.threads or usable_cores()
    backend = open_backend(arguments.backend, "auto", threads)
    config = EngineConfig(
        model=arguments.model,
        block_size=arguments.block_size,
        kv_cache_dtype=arguments.kv,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
    )

    def sizes(concurrency: int, context: int) -> dict[str, int]:
        asked = replace(config, max_num_seqs=concurrency, max_model_len=context)
        blocks = KVLayout(
            model.groups, model.spec.kv_heads, model.spec.head_dim, config.block_size,
            arguments.kv,
        )  # fmt: skip
        step = asked.max_num_batched_tokens or DEFAULT_STEP_TOKENS
        pages = sum(
            blocks_of_sequence(Group(g.window, first=g.first), context, config.block_size, step)
            * g.pages_per_block
            for g in model.groups
        )
        asked = replace(asked, kv_cache_memory_bytes=concurrency * pages * blocks.page_bytes)
        return dict(make_plan(asked, model, backend, threads, available=_ANY).bytes)

    return sizes, model.spec.max_positions


def _priced_sizes(priced: PricedModel) -> Sizes:
    def sizes(concurrency: int, context: int) -> dict[str, int]:
        return {
            "weights": round(priced.rank_bytes),
            "kv": round(priced.kv_bytes(context) * concurrency),
            "workspace": round(workspace_bytes(priced)),
        }

    return sizes


def table_of(model: str, memory: int, fits: list[Fit]) -> Table:
    """For the terminal."""
    name, unit = ("GiB", 1 << 30) if memory >= 32 << 30 else ("MiB", 1 << 20)
    table = Table(
        "at once", "context", *fits[0].bytes, "total", box=None, padding=(0, 2, 0, 0),
        title=f"{model} in {human(memory)}: the longest context, sizes in {name}",
        title_justify="left",
    )  # fmt: skip
    for column in table.columns:
        column.justify = "right"
    for fit in fits:
        if fit.context:
            parts = [f"{size / unit:,.1f}" for size in (*fit.bytes.values(), fit.total)]
            table.add_row(str(fit.concurrency), f"{fit.context:,}", *parts)
        else:
            table.add_row(str(fit.concurrency), "does not fit")
    return table
