"""The plan as a page with plots."""

from headrace.cost.capacity import Choice, Gain, Point
from headrace.cost.charts import Chart, Line, Mark, Series
from headrace.cost.formulas.rates import knee
from headrace.cost.options import Answer, describe
from headrace.cost.page import Section, Table, page
from headrace.sim.report import Report
from headrace.sim.verify import Verified


def page_of(
    found: Answer,
    helps: list[Gain],
    checked: Verified | None,
    loads: list[tuple[float, Report]],
) -> str:
    """HTML of a plan that has a best choice. loads: reports of one replica by requests/s."""
    best = found.best
    assert best is not None, "a page needs a choice"
    question = found.question
    traffic, promise = question.traffic, question.promise
    lead = (
        f"{question.device.title}; {traffic.rate:g} requests/s of {traffic.prompt:g} prompt and "
        f"{traffic.output:g} output tokens, {traffic.cached:.0%} of prompt tokens cached."
    )
    sections = [
        Section("Ways to run it", tables=[_choices(found)]),
        Section(
            "Latency against throughput",
            [
                "One point for each batch size of a replica, at the chunk that suits it. Left of "
                "the knee more batch is nearly free; right of it mostly latency grows."
            ],
            charts=[_latency(best, promise.tpot), _batches(best)],
        ),
    ]
    if loads:
        sections.append(
            Section(
                "Under load",
                [
                    "The chosen replica simulated with the engine's own scheduler at rising load. "
                    "Throughput goes on where goodput already falls."
                ],
                charts=[_goodput(best, loads), _first_token(best, loads, promise.ttft)],
            )
        )
    if checked is not None:
        sections.append(Section("At the planned load", tables=[_verified(checked)]))
    rows = [
        (gain.change, "keeps the promise" if gain.ratio is None else f"{gain.ratio - 1:+.0%}")
        for gain in helps
    ]
    sections.append(Section("What would help", tables=[Table(("change", "cost"), rows)]))
    return page(f"Plan: {question.model}", lead, sections)


def _choices(found: Answer) -> Table:
    columns = (
        "spread", "replicas", "devices", "batch", "chunk", "TPOT, ms", "TTFT, ms", "$/h", "$/M in",
        "$/M cached", "$/M out",
    )  # fmt: skip
    rows = [
        (
            describe(c.replica.model.ranks), str(c.replicas), str(c.devices), str(c.at.batch),
            str(c.at.chunk), f"{c.at.tpot * 1e3:.1f}", f"{c.at.ttft * 1e3:.0f}",
            f"{c.per_hour:.2f}", f"{c.input_price:.3f}", f"{c.cached_price:.3f}",
            f"{c.output_price:.3f}",
        )
        for c in found.choices
    ]  # fmt: skip
    return Table(columns, rows)


def _latency(best: Choice, tpot: float | None) -> Chart:
    points = [(p.throughput, p.tpot * 1e3) for p in best.curve]
    bend = best.curve[knee([(float(p.batch), p.throughput) for p in best.curve])]
    marks = [Mark(label, at.throughput, at.tpot * 1e3) for label, at in _marked(best, bend)]
    lines = [Line(f"TPOT promise {tpot * 1e3:g} ms", tpot * 1e3)] if tpot is not None else []
    return Chart(
        "Time per output token by throughput of a replica",
        "output tokens per second, one replica",
        "time per output token (ms)",
        [Series("TPOT", points)],
        lines,
        marks,
    )


def _marked(best: Choice, bend: Point) -> list[tuple[str, Point]]:
    """The points to mark, with their labels: one where the knee is what was chosen."""
    if best.at.batch == bend.batch:
        return [(f"knee, batch {bend.batch} (chosen)", bend)]
    return [(f"knee, batch {bend.batch}", bend), (f"chosen, batch {best.at.batch}", best.at)]


def _batches(best: Choice) -> Chart:
    points = [(float(p.batch), p.throughput) for p in best.curve]
    ranks = best.replica.model.ranks.expert
    bend = best.curve[knee(points)]
    return Chart(
        "Throughput by batch size",
        "sequences decoding at once" + (f", on each of {ranks} ranks" if ranks > 1 else ""),
        "output tokens per second, one replica",
        [Series("throughput", points)],
        [],
        [Mark(label, float(at.batch), at.throughput) for label, at in _marked(best, bend)],
        log_x=True,
    )


def _goodput(best: Choice, loads: list[tuple[float, Report]]) -> Chart:
    ranks = best.replica.model.ranks.expert  # the simulated rows are those of one of them
    throughput = [(ranks * rate, ranks * r.output_tokens_per_second) for rate, r in loads]
    good = [(ranks * rate, ranks * r.goodput_tokens) for rate, r in loads]
    peak = max(good, key=lambda point: point[1])
    return Chart(
        "Throughput and goodput by load",
        "requests per second offered to one replica",
        "output tokens per second",
        [Series("throughput", throughput), Series("goodput", good)],
        [],
        [Mark("goodput peak", *peak)],
    )


def _first_token(best: Choice, loads: list[tuple[float, Report]], ttft: float | None) -> Chart:
    ranks = best.replica.model.ranks.expert
    lines = [Line(f"TTFT promise {ttft * 1e3:g} ms", ttft * 1e3)] if ttft is not None else []
    return Chart(
        "Time to the first token by load",
        "requests per second offered to one replica",
        "time to first token (ms)",
        [
            Series("p50", [(ranks * rate, r.ttft["p50"] * 1e3) for rate, r in loads]),
            Series("p90", [(ranks * rate, r.ttft["p90"] * 1e3) for rate, r in loads]),
        ],
        lines,
        log_y=True,
    )


def _verified(checked: Verified) -> Table:
    r, levels = checked.report, ("p50", "p90", "p99")
    rows = [
        ("replicas", f"{checked.replicas}"),
        ("requests that kept the promise", f"{r.attainment:.1%}"),
        ("TTFT p50 / p90 / p99", " / ".join(f"{r.ttft[q] * 1e3:.0f} ms" for q in levels)),
        ("TPOT p50 / p90 / p99", " / ".join(f"{r.tpot[q] * 1e3:.1f} ms" for q in levels)),
        ("ITL p50 / p99", f"{r.itl['p50'] * 1e3:.1f} ms / {r.itl['p99'] * 1e3:.1f} ms"),
        ("mean batch", f"{r.mean_running:.1f}"),
        ("time in steps", f"{r.utilisation:.0%}"),
    ]  # fmt: skip
    return Table(("one replica, simulated", ""), rows)
