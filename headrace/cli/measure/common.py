"""What the measuring commands share: flags, the machine's limits, tables."""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.cli import configure
from headrace.cli.flags import add_flags, add_model
from headrace.config import EngineConfig
from headrace.engine.load import usable_cores
from headrace.ops.cpu import _native

OPERATIONS = {"dot4": 2.0, "dot8": 2.0, "fma": 2.0}
"""Operations of one multiply-add, which `_native.measure` counts."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL and the engine's flags, and --json."""
    add_model(parser)
    add_flags(parser, EngineConfig, without=("model",))
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def engine_config(arguments: argparse.Namespace) -> EngineConfig:
    """The engine's configuration from flags and environment."""
    (config,) = configure(arguments, EngineConfig)
    assert isinstance(config, EngineConfig)
    return config


@dataclass(frozen=True)
class Limits:
    """What the machine can do with `threads` threads: bytes/s and operations/s."""

    level: str
    threads: int

    @classmethod
    def of(cls, config: EngineConfig) -> "Limits":
        """Those of the level and threads that an engine of this configuration uses."""
        level = _native.levels()[0] if config.level == "auto" else config.level
        return cls(level, config.threads or usable_cores())

    def read(self, size: int, seconds: float = 0.1) -> float:
        """Bytes a second of reading a buffer of `size` bytes again and again."""
        pool = _native.Pool(self.threads, [])
        return float(_native.measure_read(pool, self.level, size, seconds))

    def operations(self, what: str, seconds: float = 0.1) -> float:
        """Operations a second of a kind of multiply-add: dot4, dot8 (integers) or fma (float32)."""
        pool = _native.Pool(self.threads, [])
        rate = float(_native.measure(pool, self.level, what, seconds))
        return rate * OPERATIONS[what]


def report(rows: Sequence[dict[str, Any]], title: str, as_json: bool) -> None:
    """Print rows of equal keys as a table, or as JSON."""
    if as_json:
        json.dump({"title": title, "rows": list(rows)}, sys.stdout, indent=1)
        sys.stdout.write("\n")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name, value in rows[0].items():
        text = isinstance(value, str)
        table.add_column(name, justify="left" if text else "right", no_wrap=True)
    for row in rows:
        table.add_row(*[shown(value) for value in row.values()])
    console = Console()
    console.width = max(console.width, 110)  # when piped, too
    console.print(table)


def shown(value: Any) -> str:
    """A cell: three significant digits, empty for None."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}
