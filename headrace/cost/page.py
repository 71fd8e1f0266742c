"""One self-contained HTML page: text, tables and charts, no script, nothing fetched."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from headrace.cost.charts import COLOURS, Chart, svg

_STYLE = """
:root { color-scheme: light dark; --paper: #fbfbf9; --ink: #1c1f24; --soft: #5b626d;
  --grid: #e3e4e0; --panel: #ffffff; --slo: #b3261e; --mark: #1c1f24;
  --c0: #1f6fb2; --c1: #c2631a; --c2: #2f8557; --c3: #7a4fb0; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171b; --ink: #e8e9ea; --soft: #a0a7b1;
  --grid: #2b3037; --panel: #1b1f24; --slo: #ff8a80; --mark: #f4f4f4;
  --c0: #6db3f2; --c1: #f0a35e; --c2: #7fce9f; --c3: #c3a2ee; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 860px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 24px; margin: 0 0 4px; text-wrap: balance; }
h2 { font-size: 17px; margin: 36px 0 8px; }
p { margin: 6px 0; color: var(--soft); max-width: 70ch; }
figure { margin: 12px 0 0; padding: 16px; background: var(--panel); border: 1px solid var(--grid);
  border-radius: 8px; }
figcaption { color: var(--soft); font-size: 13px; margin-top: 6px; }
.wide { overflow-x: auto; }
svg { width: 100%; height: auto; display: block; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 12px 6px 0; border-bottom: 1px solid var(--grid); text-align: right; }
th:first-child, td:first-child { text-align: left; }
th { font-weight: 600; color: var(--soft); font-size: 13px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 0 0 6px; font-size: 13px; }
.legend span::before { content: ""; display: inline-block; width: 18px; height: 3px;
  margin-right: 6px; vertical-align: middle; background: var(--c); }
.grid { stroke: var(--grid); stroke-width: 1; } .axis { stroke: var(--soft); stroke-width: 1; }
.tick, .label, .slotext, .marktext { font: 12px system-ui, "DejaVu Sans", sans-serif;
  fill: var(--soft); }
.label { fill: var(--ink); } .marktext { fill: var(--ink); font-weight: 600; }
.marktext, .slotext { paint-order: stroke; stroke: var(--panel); stroke-width: 4px; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.slo { stroke: var(--slo); stroke-width: 1.5; stroke-dasharray: 6 4; } .slotext { fill: var(--slo);
} .mark { fill: none; stroke: var(--mark); stroke-width: 2; }
"""


@dataclass(frozen=True)
class Table:
    """Rows of text; the first column is left-aligned."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Section:
    """A heading, lines of text, tables and charts, in that order."""

    title: str
    text: Sequence[str] = ()
    tables: Sequence[Table] = ()
    charts: Sequence[Chart] = ()


def page(title: str, lead: str, sections: Sequence[Section]) -> str:
    """The whole page as HTML."""
    colours = "".join(
        f".c{i} {{ stroke: var(--c{i}); }} .dot.c{i} {{ fill: var(--c{i}); }}"
        for i in range(COLOURS)
    )
    body = "".join(_section(section) for section in sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}{colours}</style></head>"
        f"<body><main><h1>{escape(title)}</h1><p>{escape(lead)}</p>{body}</main></body></html>\n"
    )


def _section(section: Section) -> str:
    parts = [f"<h2>{escape(section.title)}</h2>"]
    parts += [f"<p>{escape(line)}</p>" for line in section.text]
    parts += [_table(table) for table in section.tables]
    parts += [_figure(chart) for chart in section.charts]
    return "".join(parts)


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows
    )
    whole = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<div class="wide">{whole}</div>'


def _figure(chart: Chart) -> str:
    legend = ""
    if len(chart.series) > 1:
        names = "".join(
            f'<span style="--c: var(--c{i % COLOURS})">{escape(one.name)}</span>'
            for i, one in enumerate(chart.series)
        )
        legend = f'<div class="legend">{names}</div>'
    note = f" — {escape(chart.note)}" if chart.note else ""
    return (
        f"<figure>{legend}{svg(chart)}<figcaption>{escape(chart.title)}{note}</figcaption></figure>"
    )
