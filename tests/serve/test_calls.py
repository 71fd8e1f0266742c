"""The parser of tool calls: the same result however the text is cut."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.serve.calls import CallParser, Delta

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 10**6) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner,
                                                                max_size=3),
    max_leaves=5,
)  # fmt: skip
CALLS = st.lists(
    st.tuples(
        st.from_regex(r"[a-z_]{1,8}", fullmatch=True),
        st.dictionaries(st.text(), VALUES, max_size=3),
    ),
    min_size=1,
    max_size=3,
)


def read(text: str, cuts: list[int], array: bool) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls, from the streamed deltas; checked against the whole calls."""
    parser = CallParser(array)
    places = [0, *sorted({cut % (len(text) + 1) for cut in cuts}), len(text)]
    deltas = [
        parser.push(text[a:b], last=b == len(text) and i == len(places) - 2)
        for i, (a, b) in enumerate(itertools.pairwise(places))
    ]
    calls: dict[int, list[str]] = {}
    ids = set()
    for delta in deltas:
        for call in delta.calls:
            if "id" in call:
                assert call["index"] not in calls
                ids.add(call["id"])
                calls[call["index"]] = [call["function"]["name"], ""]
            calls[call["index"]][1] += call["function"]["arguments"]
    assert len(ids) == len(calls)
    found = [(name, arguments) for _, (name, arguments) in sorted(calls.items())]
    assert found == [(c.name, c.arguments) for c in parser.calls]
    return "".join(delta.content for delta in deltas), found


def written(calls, array: bool, swapped: bool, indent: int | None) -> str:
    objects = [
        json.dumps(
            {"arguments": a, "name": n} if swapped else {"name": n, "arguments": a},
            indent=indent, ensure_ascii=False,
        )
        for n, a in calls
    ]  # fmt: skip
    if array:
        return "[" + ", ".join(objects) + "]"
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in objects)


@given(CALLS, st.lists(st.integers(0, 500), max_size=60), st.booleans(), st.booleans(),
       st.sampled_from([None, 1]))  # fmt: skip
def test_calls_come_out_as_they_went_in(calls, cuts, array, swapped, indent):
    lead = "" if array else "Let me <look>: "
    content, found = read(lead + written(calls, array, swapped, indent), cuts, array)
    assert content == lead
    assert [(name, json.loads(text)) for name, text in found] == calls


@given(st.text(st.sampled_from('<tool_cal/>{}"name:,[] x\n\\'), max_size=60),
       st.lists(st.integers(0, 60), max_size=20), st.booleans())  # fmt: skip
def test_any_text_is_read_the_same_however_it_is_cut(text, cuts, array):
    assert read(text, cuts, array) == read(text, [], array)


@pytest.mark.parametrize(
    "text",
    ["no call at all", "a < b and <tool", "<tool_call>nothing</tool_call>", "<tool_call>{\"x\": 1}",
     "<tool_call>", "</tool_call>"],
)  # fmt: skip
def test_what_is_no_call_is_content(text: str) -> None:
    assert read(text, list(range(60)), False) == (text, [])


def test_an_answer_that_is_cut_keeps_what_came() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"city": "Ro'
    assert read(text, [], False) == ("", [("f", '{"city": "Ro')])


def test_a_call_without_arguments_has_empty_ones() -> None:
    parser = CallParser(False)
    delta = parser.push('<tool_call>{"name": "f"}</tool_call>', last=True)
    assert isinstance(delta, Delta)
    assert parser.calls[0].whole()["function"] == {"name": "f", "arguments": "{}"}
