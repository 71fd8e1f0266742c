"""A simulated run as a table and as a page with plots."""

from collections.abc import Iterable

from rich.table import Table as RichTable

from headrace.cost.capacity import Promise
from headrace.cost.charts import Chart, Line, Series
from headrace.cost.page import Section, Table, page
from headrace.sim.report import Recorder, Report

_POINTS = 120


def rows_of(found: Report) -> list[tuple[str, str]]:
    """(what, how much) of a report."""

    def times(name: str, unit: float = 1e3) -> str:
        values = getattr(found, name)
        return " / ".join(f"{values[q] * unit:.1f}" for q in ("p50", "p90", "p99"))

    rows = [
        ("requests answered, refused", f"{found.requests:,}, {found.refused:,}"),
        ("simulated time, replicas", f"{found.seconds:,.1f} s, {found.replicas}"),
        ("TTFT p50 / p90 / p99, ms", times("ttft")),
        ("TPOT p50 / p90 / p99, ms", times("tpot")),
        ("ITL p50 / p90 / p99, ms", times("itl")),
        ("latency p50 / p90 / p99, s", times("latency", 1.0)),
        ("input, output tokens/s", f"{found.input_tokens_per_second:,.0f}, "
         f"{found.output_tokens_per_second:,.0f}"),
        ("goodput requests/s, tokens/s", f"{found.goodput_requests:,.2f}, "
         f"{found.goodput_tokens:,.0f}"),
        ("promise kept", f"{found.attainment:.1%} of requests"),
        ("prompt tokens from the cache", f"{found.cached_share:.1%}"),
        ("preemptions, steps", f"{found.preemptions:,}, {found.steps:,}"),
        ("mean batch, time in steps", f"{found.mean_running:.1f}, {found.utilisation:.0%}"),
        ("largest share of KV in use", f"{found.kv_peak:.0%}"),
    ]  # fmt: skip
    if found.cost_per_million_output is not None:
        good = found.cost_per_million_good
        rows.append(("$ per million output tokens", f"{found.cost_per_million_output:.3f}"))
        rows.append(("$ per million good ones", "-" if good is None else f"{good:.3f}"))
    return rows


def table_of(found: Report) -> RichTable:
    """The report for a terminal."""
    table = RichTable("simulated", "", box=None, padding=(0, 3, 0, 0))
    for name, value in rows_of(found):
        table.add_row(name, value)
    return table


def page_of(title: str, found: Report, recorder: Recorder, promise: Promise) -> str:
    """The report as HTML."""
    text = [
        "Each replica is the engine's own scheduler; steps take what the cost model predicts.",
    ]
    sections = [
        Section("Report", text, [Table(("", ""), rows_of(found))]),
        Section(
            "Latency",
            charts=[
                _distribution("Time to first token", recorder.ttft, promise.ttft, "TTFT"),
                _distribution("Time per output token", recorder.tpot, promise.tpot, "TPOT"),
            ],
        ),
        Section("Over time", charts=_timeline(found)),
    ]
    return page("Simulation", title, sections)


def _distribution(title: str, values: Iterable[float], promised: float | None, name: str) -> Chart:
    """Share of requests at or below each time."""
    ordered = sorted(values)
    last = max(1, len(ordered) - 1)
    ranks = sorted({round(i / _POINTS * last) for i in range(_POINTS + 1)})
    points = [(ordered[rank] * 1e3, 100.0 * (rank + 1) / len(ordered)) for rank in ranks]
    lines = [Line("90 % of requests", 90.0)]
    if promised is not None:
        lines.append(Line(f"{name} promise {promised * 1e3:g} ms", promised * 1e3, upright=True))
    return Chart(
        f"{title}, all requests",
        f"{title.lower()} (ms)",
        "share of requests (%)",
        [Series(name, points)],
        lines,
        log_x=True,
    )


def _timeline(found: Report) -> list[Chart]:
    """Tokens a second, sequences running and waiting, averaged over at most _POINTS stretches."""
    rows = found.timeline
    if not rows:
        return []
    stretch = max(1, -(-int(rows[-1][0] + 1) // _POINTS))
    columns = len(rows[0]) - 1
    sums = {index: [0.0] * columns for index in range(int(rows[-1][0]) // stretch + 1)}
    for second, *values in rows:
        held = sums[int(second) // stretch]
        for index, value in enumerate(values):
            held[index] += value
    tokens, running, waiting, used = [], [], [], []
    for index, (made, _, busy, queue, share, samples) in sorted(sums.items()):
        at = index * stretch
        tokens.append((float(at), made / stretch))
        running.append((float(at), busy / stretch))
        waiting.append((float(at), queue / max(samples, 1.0) * found.replicas))
        used.append((float(at), 100.0 * share / max(samples, 1.0)))
    axis = "simulated time (s)"
    return [
        Chart("Output", axis, "output tokens per second", [Series("tokens", tokens)]),
        Chart(
            "Sequences",
            axis,
            "sequences, all replicas",
            [Series("running", running), Series("waiting", waiting)],
        ),
        Chart("KV in use", axis, "share of pages (%)", [Series("KV", used)]),
    ]
