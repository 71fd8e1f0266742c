"""The table behind `headrace plan --break-even`."""

from rich.console import Console
from rich.table import Table

from headrace.cost.breakeven import BreakEven, break_even
from headrace.cost.catalog import find_model
from headrace.cost.options import Question


def show(console: Console, question: Question) -> None:
    """Print W* and what each link would do. One rank, or the ranks that were asked for."""
    model = find_model(question.model, question.precision, question.ranks)
    found = break_even(model, question.device, model.on(question.device))
    console.print(
        f"prefill {found.prefill:,.0f} tokens/s, KV {found.kv_bytes / 1024:.1f} KiB a token: "
        f"W* = {found.bandwidth / 1e9:.3g} GB/s"
    )
    console.print(_table(found))
    split = [verdict for verdict in found.verdicts if verdict.share < 0.1]
    console.print(
        f"a prefill/decode split costs under 10 % of the prefill over: "
        f"{', '.join(verdict.link for verdict in split) or 'none of these'}"
    )


def _table(found: BreakEven) -> Table:
    table = Table(
        "link", "GB/s", "transfer / prefill", "cached prefix", "active KV across it",
        box=None, padding=(0, 2, 0, 0),
    )  # fmt: skip
    for verdict in found.verdicts:
        better = "fetch" if verdict.pays else "recompute"
        table.add_row(
            verdict.link, f"{verdict.bandwidth / 1e9:.2f}", f"{verdict.share:.1%}",
            f"{better}, saves {abs(verdict.saved) * 1e3:.0f} ms of 4k",
            f"{verdict.slowdown:.0f}x slower reads",
        )  # fmt: skip
    return table
