"""`headrace replay TRACE`: does a recorded run make the same decisions again?"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from headrace.trace import ReplayReport, replay


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The trace, and how to print."""
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a file written by --trace")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Replay; 0 when every plan is as recorded, else 1."""
    found = replay(arguments.trace)
    if arguments.json:
        row = asdict(found) | {"identical": found.identical}
        sys.stdout.write(json.dumps(row, indent=1) + "\n")
    else:
        show(Console(), found)
    return 0 if found.identical else 1


def show(console: Console, found: ReplayReport) -> None:
    """The result in words."""
    console.print(
        f"{found.requests} requests ({found.refused} refused), {found.plans} plans over "
        f"{found.seconds:.1f} s"
    )
    if found.cut:
        console.print("the last line is incomplete, as after a crash; it was left out")
    if found.predicted > 0 and found.measured > 0:
        console.print(
            f"steps took {found.measured:.2f} s and were predicted to take {found.predicted:.2f} s"
        )
    if found.difference is None:
        console.print("every plan is as recorded")
    else:
        console.print(f"DIFFERENT at {found.difference}")
