"""Charts and pages: well-formed, self-contained, everything drawn inside the frame."""

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.cost.charts import Chart, Line, Mark, Series, number, svg
from headrace.cost.page import Section, Table, page

values = st.floats(1e-6, 1e9, allow_nan=False)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(values, values), min_size=1, max_size=8),
    st.booleans(),
    st.booleans(),
    values,
)
def test_points_and_promises_lie_inside(
    points: list[tuple[float, float]], log_x: bool, log_y: bool, promise: float
) -> None:
    chart = Chart(
        "t", "x (s)", "y (ms)", [Series("a & b", sorted(points))],
        [Line("promise", promise), Line("limit", points[0][0], upright=True)],
        [Mark("knee", *points[0])], log_x, log_y,
    )  # fmt: skip
    root = ElementTree.fromstring(svg(chart))
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for element in root:
        for name in ("x", "x1", "x2", "cx"):
            assert 0 <= float(element.attrib.get(name, 0)) <= width
        for name in ("y", "y1", "y2", "cy"):
            assert 0 <= float(element.attrib.get(name, 0)) <= height
    circles = [e for e in root if e.attrib.get("class", "").startswith("dot")]
    order = [float(e.attrib["cx"]) for e in circles]
    assert order == sorted(order), "larger x is further right"
    text = "".join(root.itertext())
    assert "x (s)" in text
    assert "y (ms)" in text


def test_larger_values_are_higher_and_the_promise_is_where_it_says() -> None:
    chart = Chart("t", "x", "y", [Series("a", [(1, 10), (2, 20), (3, 30)])], [Line("p", 20)])
    root = ElementTree.fromstring(svg(chart))
    dots = [float(e.attrib["cy"]) for e in root if e.attrib.get("class", "").startswith("dot")]
    assert dots[0] > dots[1] > dots[2]
    slo = next(e for e in root if e.attrib.get("class") == "slo")
    assert float(slo.attrib["y1"]) == pytest.approx(dots[1], abs=0.1)


def test_a_page_is_self_contained_and_escapes() -> None:
    chart = Chart("t", "x", "y", [Series("one", [(1, 1)]), Series("two", [(1, 2)])])
    html = page(
        "A <b>", "lead & more", [Section("S", ["text"], [Table(("a",), [("<1>",)])], [chart])]
    )
    assert "<b>" not in html
    assert "&lt;1&gt;" in html
    assert "prefers-color-scheme: dark" in html
    assert not re.search(r"(src|href)=|url\(|@import|<script", html)
    assert html.count("<svg") == 1
    assert 'class="legend"' in html


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.25, "0.25"), (1500, "1.5k"), (2e6, "2M"), (3e9, "3G")]
)
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text
