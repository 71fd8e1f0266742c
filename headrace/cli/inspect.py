"""`headrace inspect [MODEL]`: what is in a model file and how it will run here."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headrace.checkpoint import Checkpoint, open_configured
from headrace.cli import configure
from headrace.cli.flags import add_flags, add_model
from headrace.config import EngineConfig
from headrace.engine.load import usable_cores
from headrace.engine.memory import human, make_plan
from headrace.errors import HeadraceError
from headrace.models.inspect import Report, WeightRow, inspect_checkpoint
from headrace.ops.backends import open_backend
from headrace.ops.spec import Backend, KVType


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, the engine's flags, and the form of the answer."""
    add_model(parser)
    parser.add_argument("--config", metavar="FILE", help="YAML file with flags by name")
    parser.add_argument("--json", action="store_true", help="print the facts as JSON")
    add_flags(parser, EngineConfig, without=("model",))


def run(arguments: argparse.Namespace) -> int:
    """Print the report; returns the exit status, 1 where the model cannot run here."""
    (config,) = configure(arguments, EngineConfig)
    checkpoint = open_configured(config)
    threads = config.threads or usable_cores()
    backend = open_backend(config.backend, config.level, threads)
    kind: KVType = "f16" if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    report = inspect_checkpoint(checkpoint, backend, config.max_model_len, kind, config.block_size)
    if arguments.json:
        sys.stdout.write(json.dumps(asdict(report), indent=1) + "\n")
        return 0
    console = Console(highlight=False)
    show(console, report, backend, checkpoint)
    try:
        plan = make_plan(config, checkpoint.model(config.max_model_len), backend, threads)
    except HeadraceError as error:
        console.print(f"\n[bold]Cannot run here:[/bold] {escape(str(error))}")
        return 1
    parts = ", ".join(f"{name} {human(size)}" for name, size in plan.bytes.items())
    console.print(f"\n[bold]Memory[/bold]  {human(plan.total)}: {parts}")
    console.print(
        f"        up to {plan.max_model_len} positions, {plan.limits.slots} sequences at once, "
        f"{plan.pool.num_pages} KV pages"
    )
    for note in plan.notes:
        console.print(f"        {escape(note)}")
    return 0


def show(console: Console, report: Report, backend: Backend, checkpoint: Checkpoint) -> None:
    """Print the parts of a report as tables."""
    console.print(f"[bold]{escape(report.name)}[/bold]  {escape(str(checkpoint.path))}")
    for name, value in (*report.facts, *_text_facts(checkpoint)):
        console.print(f"  {name:<19}{escape(value)}")
    for note in report.notes:
        console.print(f"  {'note':<19}{escape(note)}")
    _table(
        console,
        f"Tensors in the file: {human(report.nbytes)}",
        ("type", "tensors", "values", "bytes", "bits a value"),
        [
            (row.format, str(row.tensors), f"{row.values:,}", human(row.nbytes),
             f"{8 * row.nbytes / row.values:.2f}")
            for row in report.formats
        ],
    )  # fmt: skip
    _table(
        console,
        f"How they run on {backend.name} {backend.level}",
        ("weight", "count", "shape", "types", "bytes", "layout", "op"),
        [
            (row.kind, str(row.count), " x ".join(map(str, row.shape)),
             " + ".join(dict.fromkeys(row.formats)), human(row.nbytes), _layout(backend, row),
             row.declined or ", ".join(row.ops))
            for row in report.weights
        ],
    )  # fmt: skip
    _table(
        console,
        "KV groups",
        ("group", "layers", "window", "pages a block", "bytes a token", "most of one sequence"),
        [
            (row.name, str(row.layers), str(row.window or "all"), str(row.pages_per_block),
             f"{row.token_bytes:,}", human(row.held_bytes))
            for row in report.groups
        ],
    )  # fmt: skip


def _layout(backend: Backend, row: WeightRow) -> str:
    """How a matrix lies in memory: nibbles (n4) or bytes (b8), values a scale (g), type of scales,
    and whether there are minima."""
    if backend.name != "cpu" or len(row.shape) < 2 or row.declined:
        return "f32" if row.declined is None else ""
    from headrace.ops.cpu import _native

    return " + ".join(dict.fromkeys(str(_native.layout(form)) for form in row.formats))


def _text_facts(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    try:
        tokenizer = checkpoint.tokenizer()
    except HeadraceError as error:
        return [("tokenizer", f"not usable: {error}")]
    stops = sorted(tokenizer.stop_ids)
    return [
        ("tokenizer", f"{tokenizer.vocabulary} tokens"
                      + (", begin token added" if tokenizer.add_bos else "")),
        ("ends a generation", ", ".join(f"{id} {tokenizer.token_text(id)!r}" for id in stops)),
        ("chat template", "none" if tokenizer.chat_template is None
         else f"{len(tokenizer.chat_template)} characters"),
    ]  # fmt: skip


def _table(
    console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2))
    for index, column in enumerate(columns):
        numeric = column not in ("type", "weight", "shape", "types", "layout", "op", "group")
        justify: Literal["right", "left"] = "right" if numeric and index else "left"
        table.add_column(column, justify=justify, no_wrap=index == 0)
    for row in rows:
        table.add_row(*map(escape, row))
    console.print()
    console.print(table)
