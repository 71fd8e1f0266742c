"""What fits, as a page with a plot."""

from typing import TYPE_CHECKING

from headrace.cost.charts import Chart, Series
from headrace.cost.page import Section, Table, page
from headrace.engine.memory import human

if TYPE_CHECKING:
    from headrace.cli.fit import Fit


def page_of(model: str, memory: int, fits: "list[Fit]") -> str:
    """The fits as HTML."""
    held = [fit for fit in fits if fit.context]
    columns = ("at once", "longest context", *held[0].bytes, "total")
    rows = [
        (str(f.concurrency), f"{f.context:,}", *map(human, f.bytes.values()), human(f.total))
        for f in held
    ]
    chart = Chart(
        "Longest context by concurrency",
        "sequences at once",
        "longest context (tokens)",
        [Series("context", [(float(f.concurrency), float(f.context)) for f in held])],
        log_x=True,
        log_y=True,
    )
    sections = [Section("What fits", tables=[Table(columns, rows)], charts=[chart])]
    return page(f"Fit: {model}", f"In {human(memory)} of memory.", sections)
