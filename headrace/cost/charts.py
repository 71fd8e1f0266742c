"""Line charts as inline SVG, readable in dark and light: axes with units, promise lines, marks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from math import ceil, floor, log10

_WIDTH, _HEIGHT = 720.0, 340.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 72.0, 24.0, 18.0, 52.0
COLOURS = 4


@dataclass(frozen=True)
class Series:
    """A line. points: (x, y) in the units of the axes. dashed: for a second reading of a colour."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


@dataclass(frozen=True)
class Line:
    """A promise or a limit: across the chart at that value of y, or of x where upright."""

    name: str
    value: float
    upright: bool = False


@dataclass(frozen=True)
class Mark:
    """A point worth a name (the knee, the choice)."""

    name: str
    x: float
    y: float


@dataclass(frozen=True)
class Chart:
    """One chart. x_label and y_label carry the units. log_x, log_y: logarithmic axes."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    lines: Sequence[Line] = ()
    marks: Sequence[Mark] = ()
    log_x: bool = False
    log_y: bool = False
    note: str = ""


@dataclass(frozen=True)
class _Axis:
    """Maps values to pixels. ticks are values."""

    low: float
    high: float
    log: bool
    start: float
    end: float
    ticks: tuple[float, ...] = field(default=())

    def at(self, value: float) -> float:
        if self.log:
            value = log10(max(value, 1e-12))
            low, high = log10(self.low), log10(self.high)
        else:
            low, high = self.low, self.high
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start + min(max(share, 0.0), 1.0) * (self.end - self.start)


def _axis(values: Sequence[float], log: bool, start: float, end: float) -> _Axis:
    if log:
        positive = [value for value in values if value > 0] or [1.0]
        low, high = 10 ** floor(log10(min(positive))), 10 ** ceil(log10(max(positive)))
        if high <= low:
            high = low * 10
        # Keep to 1-2-5 steps so that a curve over one decade is not squeezed.
        steps = [
            m * 10**e for e in range(round(log10(low)), round(log10(high)) + 1) for m in (1, 2, 5)
        ]
        low = max(s for s in steps if s <= min(positive) * 1.0001)
        high = min((s for s in steps if s >= max(positive) * 0.9999), default=high)
        if high <= low:
            high = low * 10
        ticks = [s for s in steps if low <= s <= high]
        if len(ticks) > 10:
            ticks = [s for s in ticks if abs(log10(s) - round(log10(s))) < 1e-9]
        return _Axis(low, high, True, start, end, tuple(ticks))
    high = max([*values, 0.0]) or 1.0
    step = 10 ** floor(log10(high / 4))
    step *= next(m for m in (1, 2, 5, 10) if high / (step * m) <= 6)
    count = ceil(high / step - 1e-6)
    return _Axis(0.0, count * step, False, start, end, tuple(i * step for i in range(count + 1)))


def number(value: float) -> str:
    """A value for people: 3 digits, k and M above a thousand."""
    if value == 0:
        return "0"
    for scale, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.3g}{unit}"
    return f"{value:.3g}"


def svg(chart: Chart) -> str:
    """The chart as an SVG element; colours come from the page's style sheet."""
    xs = [x for one in chart.series for x, _ in one.points] + [m.x for m in chart.marks]
    xs += [line.value for line in chart.lines if line.upright]
    ys = [y for one in chart.series for _, y in one.points]
    ys += [line.value for line in chart.lines if not line.upright]
    x = _axis(xs, chart.log_x, _LEFT, _WIDTH - _RIGHT)
    y = _axis(ys, chart.log_y, _HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img" aria-label="{escape(chart.title)}">'
    ]
    parts += _grid(chart, x, y)
    for index, one in enumerate(chart.series):
        parts += _line(one, index % COLOURS, x, y)
    for line in chart.lines:
        parts += _promise(line, x, y)
    for index, mark in enumerate(chart.marks):
        parts += _mark(mark, x, y, below=index % 2 == 1)
    return "".join([*parts, "</svg>"])


def _grid(chart: Chart, x: _Axis, y: _Axis) -> list[str]:
    bottom, left, right = _HEIGHT - _BOTTOM, _LEFT, _WIDTH - _RIGHT
    parts = []
    for tick in y.ticks:
        at = y.at(tick)
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{left - 8}" y="{at + 4:.1f}" text-anchor="end">'
            f"{number(tick)}</text>"
        )
    for tick in x.ticks:
        at = x.at(tick)
        parts.append(
            f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="{bottom}" y2="{bottom + 5}"/>'
        )
        parts.append(
            f'<text class="tick" x="{at:.1f}" y="{bottom + 19}" text-anchor="middle">'
            f"{number(tick)}</text>"
        )
    parts.append(f'<line class="axis" x1="{left}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    middle = (left + right) / 2
    parts.append(
        f'<text class="label" x="{middle}" y="{_HEIGHT - 10}" text-anchor="middle">'
        f"{escape(chart.x_label)}</text>"
    )
    height = (_TOP + bottom) / 2
    parts.append(
        f'<text class="label" transform="rotate(-90 18 {height})" x="18" y="{height}" '
        f'text-anchor="middle">{escape(chart.y_label)}</text>'
    )
    return parts


def _line(one: Series, colour: int, x: _Axis, y: _Axis) -> list[str]:
    points = [(x.at(a), y.at(b), a, b) for a, b in one.points]
    if not points:
        return []
    path = " ".join(
        f"{'L' if i else 'M'}{px:.1f} {py:.1f}" for i, (px, py, _, _) in enumerate(points)
    )
    dash = ' stroke-dasharray="5 4"' if one.dashed else ""
    parts = [f'<path class="line c{colour}" d="{path}"{dash}/>']
    if len(points) <= 40:
        parts += [
            f'<circle class="dot c{colour}" cx="{px:.1f}" cy="{py:.1f}" r="3">'
            f"<title>{escape(one.name)}: {number(a)}, {number(b)}</title></circle>"
            for px, py, a, b in points
        ]
    return parts


def _promise(line: Line, x: _Axis, y: _Axis) -> list[str]:
    if line.upright:
        at = x.at(line.value)
        anchor = "end" if at > (_LEFT + _WIDTH) / 2 else "start"
        shift = -6 if anchor == "end" else 6
        return [
            f'<line class="slo" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>',
            f'<text class="slotext" x="{at + shift:.1f}" y="{_HEIGHT - _BOTTOM - 10}" '
            f'text-anchor="{anchor}">'
            f"{escape(line.name)}</text>",
        ]
    at = y.at(line.value)
    return [
        f'<line class="slo" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>',
        f'<text class="slotext" x="{_LEFT + 8}" y="{at - 6:.1f}">{escape(line.name)}</text>',
    ]


def _mark(mark: Mark, x: _Axis, y: _Axis, below: bool) -> list[str]:
    """A ring and its name; a second one goes below, so that neighbours stay legible."""
    px, py = x.at(mark.x), y.at(mark.y)
    right = px < (_LEFT + _WIDTH - _RIGHT) * 0.6
    shift, anchor = (10, "start") if right else (-10, "end")
    drop = 20 if below or py < _TOP + 40 else -10
    return [
        f'<circle class="mark" cx="{px:.1f}" cy="{py:.1f}" r="6"/>',
        f'<text class="marktext" x="{px + shift:.1f}" y="{py + drop:.1f}" text-anchor="{anchor}">'
        f"{escape(mark.name)}</text>",
    ]
