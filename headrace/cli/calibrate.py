"""`headrace calibrate`: measure this machine and store the profile that plans and engines use."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from headrace.cost import calibrate
from headrace.cost.hardware import save_profile
from headrace.cost.parse import at_least


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where to store it, how many threads, how to print it."""
    parser.add_argument("--threads", type=at_least(1), metavar="N", help="most threads to measure")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where to store the profile")
    parser.add_argument("--json", action="store_true", help="print the profile as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Measure, store, print."""
    console = Console(stderr=True)
    with console.status("measuring this machine") as status:
        found = calibrate.measure(
            arguments.threads, progress=lambda text: status.update(f"measuring: {text}")
        )
    device = calibrate.device(found)
    path = save_profile(device, arguments.output)
    if arguments.json:
        sys.stdout.write(json.dumps(asdict(device), indent=1) + "\n")
        return 0
    out = Console()
    for table in tables(found):
        out.print(table)
    out.print(f"stored in {path} after {found.seconds:.1f} s; planned with as --hardware local")
    if calibrate.disturbed(found):
        out.print("other work held the cores meanwhile: calibrate again when it is quiet")
    if found.source == "numpy":
        out.print("the C++ module is not built: rates are numpy's, with no integer path")
    return 0


def tables(found: calibrate.Measured) -> list[Table]:
    """What was measured, for people."""
    read = Table("reading", *(f"{t} threads, GB/s" for t in found.read), title_justify="left")
    for size in next(iter(found.read.values())):
        read.add_row(
            f"{int(size) >> 20} MiB", *(f"{row[size] / 1e9:.1f}" for row in found.read.values())
        )
    rates = Table("arithmetic", *(f"{t} threads, Gop/s" for t in found.read))
    for name, by_threads in found.rates.items():
        rates.add_row(name, *(f"{by_threads[t] / 1e9:.0f}" for t in found.read))
    other = Table("other", "GB/s")
    for name in ("copy", "disk_write", "disk_read", "loopback"):
        other.add_row(name.replace("_", " "), f"{getattr(found, name) / 1e9:.2f}")
    return [read, rates, other]
