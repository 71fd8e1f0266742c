"""`headrace replay TRACE`: does a recorded run make the same decisions again?"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from headrace.cost.charts import Chart, Series
from headrace.cost.page import Section, Table, page
from headrace.trace import ReplayReport, replay

Step = tuple[float, float, float, int, int]
"""When it began, seconds it took, seconds predicted, sequences, tokens."""

_POINTS = 160


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The trace, and how to print."""
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a file written by --trace")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots")


def run(arguments: argparse.Namespace) -> int:
    """Replay; 0 when every plan is as recorded, else 1."""
    steps: list[Step] = []
    found = replay(
        arguments.trace,
        lambda at, took, predicted, plan: steps.append(
            (at, took, predicted, len(plan.sequences), len(plan.tokens))
        ),
    )
    if arguments.html:
        arguments.html.write_text(page_of(arguments.trace.name, found, steps), "utf-8")
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


def page_of(name: str, found: ReplayReport, steps: list[Step]) -> str:
    """The result as HTML: what each stretch of the run took and was predicted to take."""
    verdict = found.difference or "every plan is as recorded"
    rows = [
        ("requests, refused", f"{found.requests:,}, {found.refused:,}"),
        ("plans", f"{found.plans:,}"),
        ("seconds in steps, measured", f"{found.measured:.2f}"),
        ("seconds in steps, predicted", f"{found.predicted:.2f}"),
        ("mean absolute error of a step", f"{_error(steps):.1%}"),
    ]
    sections = [Section("Decisions", [verdict], [Table(("", ""), rows)])]
    if steps:
        sections.append(Section("Steps", charts=_charts(steps)))
    return page(f"Replay: {name}", f"{found.seconds:.1f} s of a live run.", sections)


def _error(steps: list[Step]) -> float:
    errors = [abs(predicted / took - 1) for _, took, predicted, _, _ in steps if took > 0]
    return sum(errors) / len(errors) if errors else 0.0


def _charts(steps: list[Step]) -> list[Chart]:
    first, last = steps[0][0], steps[-1][0]
    width = max((last - first) / _POINTS, 1e-9)
    stretches: dict[int, list[Step]] = {}
    for step in steps:
        stretches.setdefault(int((step[0] - first) / width), []).append(step)

    def means(column: int, scale: float = 1.0) -> list[tuple[float, float]]:
        return [
            (index * width, scale * sum(step[column] for step in group) / len(group))
            for index, group in sorted(stretches.items())
        ]

    axis = "time of the run (s)"
    return [
        Chart(
            "Seconds of a step, mean of each stretch", axis, "step (ms)",
            [Series("measured", means(1, 1e3)), Series("predicted", means(2, 1e3))],
        ),
        Chart("Sequences in a step", axis, "sequences", [Series("sequences", means(3))]),
        Chart("Rows in a step", axis, "tokens", [Series("tokens", means(4))]),
    ]  # fmt: skip
