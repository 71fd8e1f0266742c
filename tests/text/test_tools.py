"""Tool calls and thinking are found in any text, however it is cut."""

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import RequestError
from headrace.text.grammar import GrammarCompiler
from headrace.text.reasoning import (
    ReasoningSplitter,
    ThinkMarks,
    think_marks,
    thinking_is_open,
    thinking_is_over,
)
from headrace.text.tokenizer import Tokenizer
from headrace.text.tools import (
    HERMES,
    JSON_LIST,
    LLAMA3_JSON,
    MISTRAL,
    CallArguments,
    CallBegin,
    Event,
    ToolFormat,
    ToolParser,
    collect,
    format_of,
)
from headrace.text.tooluse import plan_tools
from tests.text.test_grammar import sample

ARGUMENTS: list[dict[str, Any]] = [
    {"city": "Rome", "days": 3, "deep": {"list": [1, {"x": None}], "f": -1.5e3}},
    {"text": 'quoted " and \\ and } { ] [ , : "name": "x"', "emoji": "👩‍💻 é 日本", "": ""},
    {},
]
CALLS = [("get_weather", ARGUMENTS[0]), ("say", ARGUMENTS[1]), ("now", ARGUMENTS[2])]


def written(name: str, arguments: Any, key: str = "arguments", swapped: bool = False) -> str:
    pair = {"name": name, key: arguments}
    return json.dumps(dict(reversed(pair.items())) if swapped else pair, ensure_ascii=False)


def hermes(swapped: bool = False) -> str:
    calls = [f"<tool_call>\n{written(n, a, swapped=swapped)}\n</tool_call>" for n, a in CALLS]
    return "\n".join(calls)


MESSAGES: list[tuple[ToolFormat, str, str, int]] = [
    (HERMES, "Let me see < you.\n" + hermes(), "Let me see < you.", 3),
    (HERMES, hermes(swapped=True) + "\nDone. ", "Done. ", 3),
    (HERMES, "<tool_call>" + written(*CALLS[0]), "", 1),
    (HERMES, '<tool_call>{"name": "now"}</tool_call>', "", 1),
    (HERMES, "no call <tool_call but text \n ", "no call <tool_call but text \n ", 0),
    (HERMES, "a\n<tool_call>\nnot JSON</tool_call>", "a\n<tool_call>\nnot JSON</tool_call>", 0),
    (HERMES, '<tool_call>{"no": "name"}</tool_call>x', '<tool_call>{"no": "name"}</tool_call>x', 0),
    (HERMES, "text <tool_call> ", "text <tool_call> ", 0),
    (LLAMA3_JSON, written(*CALLS[1], key="parameters"), "", 1),
    (LLAMA3_JSON, "<|python_tag|>" + "; ".join(written(n, a) for n, a in CALLS), "", 3),
    (LLAMA3_JSON, ' {"a": 1} is JSON', ' {"a": 1} is JSON', 0),
    (LLAMA3_JSON, 'Say {"name": "x"}', 'Say {"name": "x"}', 0),
    (LLAMA3_JSON, "<|python", "<|python", 0),
    (MISTRAL, "Hm. [TOOL_CALLS] [" + ", ".join(written(n, a) for n, a in CALLS) + "]", "Hm.", 3),
    (MISTRAL, "".join(f"[TOOL_CALLS]{n}[ARGS]{json.dumps(a)}" for n, a in CALLS), "", 3),
    (MISTRAL, "[TOOL_CALLS]" + f"now{json.dumps(ARGUMENTS[0])}", "", 1),
    (JSON_LIST, "[" + ", ".join(written(n, a) for n, a in CALLS) + "]", "", 3),
]  # fmt: skip


def cuts(text: str) -> Iterator[list[str]]:
    yield [text]
    yield list(text)
    for at in range(1, len(text)):
        yield [text[:at], text[at:]]
    draw = random.Random(0)
    for _ in range(20):
        places = sorted(draw.sample(range(len(text) + 1), min(5, len(text))))
        yield [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def events_of(parser: ToolParser, pieces: list[str]) -> list[Event]:
    events = [event for piece in pieces for event in parser.push(piece)]
    return events + parser.flush()


@pytest.mark.parametrize(("form", "message", "text", "count"), MESSAGES, ids=lambda v: str(v)[:30])
def test_calls_however_cut(form: ToolFormat, message: str, text: str, count: int) -> None:
    whole = collect(ToolParser(form).push(message))
    for pieces in cuts(message):
        events = events_of(ToolParser(form), pieces)
        shown, calls = collect(events)
        assert shown == text
        assert [call.name for call in calls] == [c.name for c in whole[1]]
        assert [call.arguments for call in calls] == [c.arguments for c in whole[1]]
        assert len(calls) == count
        assert len({call.id for call in calls}) == count
        begins = [event for event in events if isinstance(event, CallBegin)]
        assert [begin.index for begin in begins] == list(range(count))
        order = [e.index for e in events if isinstance(e, CallBegin | CallArguments)]
        assert order == sorted(order)
    if count == 3:
        assert [(c.name, json.loads(c.arguments)) for c in whole[1]] == CALLS
    assert all(isinstance(json.loads(call.arguments), dict) for call in whole[1])


@pytest.mark.parametrize(("form", "message", "text", "count"), MESSAGES, ids=lambda v: str(v)[:30])
def test_a_call_that_is_cut_short_leaves_nothing_of_its_frame(
    form: ToolFormat, message: str, text: str, count: int
) -> None:
    for end in range(1, len(message) if count else 0):
        shown, calls = collect(events_of(ToolParser(form), [message[:end]]))
        if calls and len(calls) == count:
            assert text.startswith(shown)


def test_arguments_stream_as_they_come() -> None:
    parser = ToolParser(HERMES)
    start = '<tool_call>{"name": "f", "arguments": {"te'
    assert parser.push(start)[-1] == CallArguments(0, '{"te')
    assert parser.push('xt": "a') == [CallArguments(0, 'xt": "a')]
    assert parser.push('"}}') == [CallArguments(0, '"}')]
    assert parser.push("</tool_call>") == []


def test_arguments_inside_a_string_are_unpacked() -> None:
    call = json.dumps({"name": "f", "arguments": json.dumps(ARGUMENTS[1])})
    _, calls = collect(events_of(ToolParser(LLAMA3_JSON), [call]))
    assert json.loads(calls[0].arguments) == ARGUMENTS[1]


@given(st.text('<tool_ca>l/{}":, \nnme', max_size=60), st.integers(0, 1000))
def test_nothing_is_lost_and_nothing_crashes(text: str, seed: int) -> None:
    draw = random.Random(seed)
    for form in (HERMES, LLAMA3_JSON, MISTRAL):
        at = draw.randint(0, len(text))
        one = collect(events_of(ToolParser(form), [text]))
        two = collect(events_of(ToolParser(form), [text[:at], text[at:]]))
        assert (one[0], len(one[1])) == (two[0], len(two[1]))
        if not one[1]:
            assert one[0] == text


def test_formats_are_seen_in_templates() -> None:
    assert format_of("... <tool_call> ...") is HERMES
    assert format_of("... [TOOL_CALLS] ...") is MISTRAL
    assert format_of('... {"name": x, "parameters": y} ...') is LLAMA3_JSON
    assert format_of("") is HERMES


def tool(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    function = {"name": name, **more}
    if parameters is not None:
        function["parameters"] = parameters
    return {"type": "function", "function": function}


COLOR = {
    "type": "object",
    "properties": {"color": {"$ref": "#/$defs/c"}, "n": {"type": "integer", "maximum": 9}},
    "required": ["color"],
    "additionalProperties": False,
    "$defs": {"c": {"enum": ["red", "blue"]}},
}
TOOLS = [tool("paint", COLOR, strict=True), tool("stop")]


@pytest.fixture(scope="module")
def compiler(tiny: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tiny)


@pytest.mark.parametrize("parallel", [True, False])
def test_required_calls_are_valid(
    compiler: GrammarCompiler, tiny: Tokenizer, parallel: bool
) -> None:
    plan = plan_tools(TOOLS, "required", parallel=parallel)
    assert plan.grammar is not None
    finished = 0
    for seed in range(60):
        ids, done = sample(compiler.compile(*plan.grammar).start(), tiny, seed, 150)
        if done:
            finished += 1
            parser = plan.parser()
            assert parser is not None
            text, calls = collect(events_of(parser, list(tiny.decode(ids))))
            assert text == ""
            assert len(calls) >= 1
            assert parallel or len(calls) == 1
            for call in calls:
                schema = {"paint": COLOR, "stop": {"type": "object", "maxProperties": 0}}[call.name]
                jsonschema.validate(json.loads(call.arguments), schema)
    assert finished > 20


def test_a_named_call_is_its_arguments(compiler: GrammarCompiler, tiny: Tokenizer) -> None:
    plan = plan_tools(TOOLS, {"type": "function", "function": {"name": "paint"}})
    assert plan.grammar is not None
    parser = plan.parser()
    assert parser is not None
    ids, done = sample(compiler.compile(*plan.grammar).start(), tiny, 3, 100)
    assert done
    text, calls = collect(events_of(parser, list(tiny.decode(ids))))
    assert (text, [call.name for call in calls]) == ("", ["paint"])
    jsonschema.validate(json.loads(calls[0].arguments), COLOR)


def test_strict_calls_are_held_to_their_schema(compiler: GrammarCompiler, tiny: Tokenizer) -> None:
    plan = plan_tools(TOOLS, "auto", template="<tool_call>")
    assert plan.grammar is not None
    start = compiler.compile(*plan.grammar).start()
    good = '<tool_call>\n{"name": "paint", "arguments": {"color": "red"}}\n</tool_call>'
    assert start.copy().accept(tiny.encode("Sure. " + good))
    assert not start.copy().accept(tiny.encode(good.replace("red", "green")))
    assert not start.copy().accept(tiny.encode(good.replace("paint", "other")))
    assert start.copy().accept(tiny.encode("no call at all <b>"))


def test_free_choice_without_strict_is_not_constrained() -> None:
    plan = plan_tools([tool("f")], None)
    assert (plan.grammar, plan.form) == (None, HERMES)
    assert plan_tools([tool("f")], "none").parser() is None
    assert plan_tools(None).tools is None


BAD: list[tuple[Callable[[], object], str, str]] = [
    (lambda: plan_tools([{"type": "code"}]), "tools", r"tools\[0\] must be of type function"),
    (lambda: plan_tools([tool("a b")]), "tools", "1 to 64 letters"),
    (lambda: plan_tools([tool("a"), tool("a")]), "tools", "twice"),
    (lambda: plan_tools([tool("a", 3)]), "tools", "must be a JSON schema"),
    (lambda: plan_tools([tool("a", {"not": {}})], "required"), "tools", "'not'"),
    (lambda: plan_tools([tool("a", {"not": {}}, strict=True)]), "tools", "'not'"),
    (lambda: plan_tools([tool("a", strict=True)], template="[TOOL_CALLS]"), "tools", "mistral"),
    (lambda: plan_tools([tool("a")], "sometimes"), "tool_choice", "must be none, auto"),
    (lambda: plan_tools([], "required"), "tool_choice", "there are no tools"),
    (
        lambda: plan_tools([tool("a")], {"type": "function", "function": {"name": "b"}}),
        "tool_choice",
        "'b', which is not one",
    ),
]


@pytest.mark.parametrize(("call", "field", "words"), BAD, ids=[words for *_, words in BAD])
def test_bad_tools_are_named(call: Callable[[], object], field: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        call()
    assert (caught.value.field, caught.value.code) == (field, 400)


MARKS = ThinkMarks("<think>", "</think>", None)


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "answer"),
    [
        ("<think>\nhm, <b> </th\n</think>\n\nYes. ", False, "hm, <b> </th", "Yes. "),
        ("hm\n</think>Yes", True, "hm", "Yes"),
        ("never closed \n", True, "never closed", ""),
        ("No thinking. <think> </think>", False, "", "No thinking. <think> </think>"),
        (" <thin", False, "", " <thin"),
        ("<think></think>", False, "", ""),
    ],
)
def test_thinking_however_cut(text: str, opened: bool, reasoning: str, answer: str) -> None:
    for pieces in cuts(text):
        splitter = ReasoningSplitter(MARKS, opened=opened)
        parts = [*map(splitter.push, pieces), splitter.flush()]
        assert "".join(part[0] for part in parts) == reasoning
        assert "".join(part[1] for part in parts) == answer


def test_marks_of_thinking(tiny: Tokenizer) -> None:
    assert think_marks(tiny, "plain") is None
    marks = think_marks(tiny, "{{ '<think>' }}")
    assert marks == ThinkMarks("<think>", "</think>", None)
    assert thinking_is_open(MARKS, "...<think>\n")
    assert not thinking_is_open(MARKS, "<think></think>")
    assert thinking_is_over(MARKS, "<think>\n\n</think>\n\n")
    assert not thinking_is_over(MARKS, "<think></think> so")
