"""`headrace bench limits`: what this machine can do, to hold measurements against."""

import argparse

from headrace.cli.measure import common
from headrace.cli.measure.common import Limits, engine_config, report

SIZES = (1 << 18, 8 << 20, 100_000_000, 256 << 20)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the engine choose threads and level."""
    common.add_arguments(parser)
    parser.add_argument("--seconds", type=float, default=0.3, help="of each measurement")


def run(arguments: argparse.Namespace) -> int:
    """Print bandwidth by buffer size and multiply-add rates."""
    limits = Limits.of(engine_config(arguments))
    rows = [
        {
            "limit": f"read {size / 1e6:.0f} MB" if size >= 1e6 else f"read {size / 1e3:.0f} kB",
            "value": limits.read(size, arguments.seconds) / 1e9,
            "unit": "GB/s",
        }
        for size in SIZES
    ]
    rows += [
        {"limit": text, "value": limits.operations(what, arguments.seconds) / 1e9, "unit": "GOPS"}
        for what, text in (
            ("dot4", "4-bit by 8-bit products, as the linear kernels make them"),
            ("dot8", "8-bit by 8-bit products"),
            ("fma", "float32 multiply-add"),
        )
    ]
    report(rows, f"{limits.level}, {limits.threads} threads", arguments.json)
    return 0
