"""Structured output: what is allowed is what can still become valid, and nothing else."""

import itertools
import json
import random
import re
import time
from collections.abc import Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headrace.errors import RequestError
from headrace.text.grammar import MAX_CHOICES, Cursor, GrammarCompiler, json_source, validate
from headrace.text.tokenizer import Tokenizer
from tests.text.schemas import Maker

STRING = {"type": "string"}


@pytest.fixture(scope="module")
def compiler(tiny: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tiny)


@pytest.fixture(scope="module")
def real(smollm2: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(smollm2)


def allowed(cursor: Cursor, vocabulary: int) -> list[int]:
    row = np.full((vocabulary + 31) // 32 + 2, 0xFFFFFFFF, np.uint32)
    cursor.mask(row)
    return [int(i) for i in np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))]


def sample(
    cursor: Cursor, tokenizer: Tokenizer, seed: int, limit: int, jump: bool = True
) -> tuple[list[int], bool]:
    """Draw tokens under a grammar, those that close something often; whether a stop id ended it."""
    draw = random.Random(seed)
    closing = {i for text in '"]},1a' for i in tokenizer.encode(text)}
    ids: list[int] = []
    while len(ids) < limit:
        forced = cursor.forced() if jump else []
        if forced:
            assert cursor.accept(forced)
            ids += forced
            continue
        choice = allowed(cursor, tokenizer.vocabulary)
        assert choice, "nothing may follow"
        assert cursor.can_stop == bool(tokenizer.stop_ids & set(choice))
        preferred = [i for i in choice if i in closing or i in tokenizer.stop_ids]
        token = draw.choice(preferred if preferred and draw.random() < 0.6 else choice)
        assert cursor.accept([token])
        if token in tokenizer.stop_ids:
            assert cursor.finished
            assert not cursor.accept([token])
            return ids, True
        ids.append(token)
    return ids, False


def check(schema: Any, text: str) -> None:
    jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)


def test_random_schemas(compiler: GrammarCompiler, tiny: Tokenizer) -> None:
    finished = refused = 0
    for seed in range(500):
        schema = Maker(seed).schema()
        try:
            grammar = compiler.compile("json", json.dumps(schema))
        except RequestError:
            refused += 1
            continue
        ids, ended = sample(grammar.start(), tiny, seed, 200)
        finished += ended
        again = grammar.start()
        assert again.accept(ids)
        if ended:
            assert again.can_stop
            check(schema, tiny.decode(ids))
        else:
            assert again.forced() or allowed(again, tiny.vocabulary)
    assert refused < 25
    assert finished > 350


def test_random_schemas_on_the_real_vocabulary(real: GrammarCompiler, smollm2: Tokenizer) -> None:
    for seed in range(1000, 1020):
        schema = Maker(seed).schema()
        ids, ended = sample(real.compile("json", json.dumps(schema)).start(), smollm2, seed, 40)
        if ended:
            check(schema, smollm2.decode(ids))


def test_jumping_is_what_sampling_would_do(real: GrammarCompiler, smollm2: Tokenizer) -> None:
    jumped = 0
    for seed in range(2000, 2012):
        grammar = real.compile("json", json.dumps(Maker(seed).object_with_keys()))
        cursor = grammar.start()
        draw = random.Random(seed)
        for _ in range(25):
            forced = cursor.forced()
            slow = cursor.copy()
            for token in forced:
                assert allowed(slow, smollm2.vocabulary) == [token]
                assert slow.accept([token])
            jumped += len(forced)
            assert cursor.accept(forced)
            choice = allowed(cursor, smollm2.vocabulary)
            if cursor.finished:
                assert set(choice) == smollm2.stop_ids
                break
            cursor.accept([draw.choice(choice)])
    assert jumped > 100


FINITE: list[tuple[Any, list[Any]]] = [
    (
        {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
         "required": ["a"], "patternProperties": {"^a$": {"multipleOf": 4}},
         "additionalProperties": False},
        [{"a": 0}, {"a": 4}, {"a": 8}],
    ),
    (
        {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a", "b"],
         "patternProperties": {"^(a|b)$": {"type": "integer", "maximum": 2, "minimum": 1}},
         "additionalProperties": False},
        [{"a": 1, "b": 1}, {"a": 1, "b": 2}],
    ),
    (
        {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"],
         "minProperties": 1, "additionalProperties": False},
        [{"a": 1}],
    ),
    ({"type": "boolean"}, [True, False]),
    ({"type": ["null", "boolean"]}, [None, True, False]),
    ({"enum": ["a", "ab", "héllo", 'q"\\/', 12, None]}, ["a", "ab", "héllo", 'q"\\/', 12, None]),
    ({"const": {"hello": [1, {"x": "/"}]}}, [{"hello": [1, {"x": "/"}]}]),
    ({"type": "integer", "minimum": 100, "maximum": 105}, list(range(100, 106))),
    ({"type": "integer", "minimum": -5, "maximum": -2}, list(range(-5, -1))),
    ({"type": "integer", "exclusiveMinimum": -13, "exclusiveMaximum": -1}, list(range(-12, -1))),
    ({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 12}, list(range(1, 12))),
    ({"type": "integer", "minimum": 9, "maximum": 10}, [9, 10]),
    ({"type": "integer", "minimum": 0, "maximum": 0}, [0]),
    ({"type": "integer", "minimum": 8, "maximum": 31, "multipleOf": 5}, [10, 15, 20, 25, 30]),
    ({**STRING, "pattern": "^[ab]{1,2}$"}, ["a", "b", "aa", "ab", "ba", "bb"]),
    ({**STRING, "pattern": "^[ab]+$", "maxLength": 2}, ["a", "b", "aa", "ab", "ba", "bb"]),
    ({**STRING, "pattern": "^(hello)?$"}, ["", "hello"]),
    (
        {"type": "array", "items": {"enum": ["a", 1]}, "minItems": 1, "maxItems": 2},
        [["a"], [1], ["a", "a"], ["a", 1], [1, "a"], [1, 1]],
    ),
    ({"prefixItems": [{"const": 1}, {"type": "null"}], "items": False, "type": "array"},
     [[], [1], [1, None]]),
    (
        {"type": "object", "properties": {"hello": {"type": "boolean"}, "or": {"const": 1}},
         "required": ["hello"], "additionalProperties": False},
        [{"hello": True}, {"hello": False}, {"hello": True, "or": 1}, {"hello": False, "or": 1}],
    ),
    (
        {"anyOf": [{"const": "hell"}, {"type": "object", "properties": {"a": {"const": 2}},
                                       "additionalProperties": False}]},
        ["hell", {}, {"a": 2}],
    ),
    (
        {"$ref": "#/$defs/t", "$defs": {"t": {"$ref": "#/$defs/w"}, "w": {"enum": ["A", "B"]}}},
        ["A", "B"],
    ),
    (
        {"oneOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}], "$defs": {
            name: {"type": "object", "properties": {"k": {"const": name}}, "required": ["k"],
                   "additionalProperties": False} for name in "xy"}},
        [{"k": "x"}, {"k": "y"}],
    ),
    ({"allOf": [{"enum": [1, 2, 3, "x"]}, {"type": "integer", "minimum": 2}]}, [2, 3]),
]  # fmt: skip


def spelled(values: Sequence[Any]) -> set[bytes]:
    return {json.dumps(value, ensure_ascii=False).encode() for value in values}


@pytest.mark.parametrize(("schema", "values"), FINITE, ids=lambda v: str(v)[:40])
def test_a_token_is_allowed_exactly_when_it_can_become_valid(
    compiler: GrammarCompiler, tiny: Tokenizer, schema: Any, values: list[Any]
) -> None:
    """Against brute force over all valid texts, in every state that can be reached. Where only one
    text can follow, its own tokenization is the only one allowed: the rule of the module."""
    for value in values:
        jsonschema.validate(value, schema)
    start = compiler.compile("json", json.dumps(schema)).start()
    texts = {walk(start.copy(), tiny, path) for path in paths(start, tiny)}
    assert texts == {value.decode() for value in spelled(values)}
    states = [(b"", start)]
    for prefix, cursor in states:
        rest = [text[len(prefix) :] for text in spelled(values) if text.startswith(prefix)]
        possible = {
            token
            for token in range(tiny.vocabulary)
            if token not in tiny.special_ids
            and any(text.startswith(tiny.token_bytes(token)) for text in rest)
        }
        if b"" in rest:
            possible |= tiny.stop_ids
        choice = set(allowed(cursor, tiny.vocabulary))
        if choice != possible:
            (token,) = choice
            assert choice < possible
            assert all(text.startswith(tiny.token_bytes(token)) for text in rest)
        for token in choice - tiny.stop_ids:
            after = cursor.copy()
            assert after.accept([token])
            states.append((prefix + tiny.token_bytes(token), after))
    assert len(states) > 1


def paths(cursor: Cursor, tokenizer: Tokenizer) -> list[list[int]]:
    """Every way through a finite grammar to a place where it can stop."""
    found, waiting = [], [([], cursor)]
    for path, place in waiting:
        if place.can_stop:
            found.append(path)
        for token in set(allowed(place, tokenizer.vocabulary)) - tokenizer.stop_ids:
            after = place.copy()
            assert after.accept([token])
            waiting.append(([*path, token], after))
    return found


def walk(cursor: Cursor, tokenizer: Tokenizer, ids: list[int]) -> str:
    assert cursor.accept(ids)
    return tokenizer.decode(ids)


UNSUPPORTED: list[tuple[str, Any]] = [
    ("not", {"not": STRING}),
    ("if", {"if": STRING, "then": STRING}),
    ("contains", {"type": "array", "contains": STRING}),
    ("uniqueItems", {"type": "array", "uniqueItems": True}),
    ("propertyNames", {"type": "object", "propertyNames": {"pattern": "a"}}),
    ("dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}}),
    ("unevaluatedProperties", {"type": "object", "unevaluatedProperties": False}),
    ("additionalItems", {"type": "array", "additionalItems": False}),
    ("items", {"type": "array", "items": [STRING]}),
    ("nullable", {**STRING, "nullable": True}),
    ("contentEncoding", {**STRING, "contentEncoding": "base64"}),
    ("minLenght", {**STRING, "minLenght": 3}),
    ("x-guidance", {**STRING, "x-guidance": {"lenient": True}, "not": {}}),
    ("$dynamicRef", {"$dynamicRef": "#x"}),
    ("$ref", {"$ref": "https://example.org/schema"}),
    ("$ref", {"$ref": "#/$defs/missing"}),
    ("$ref", {"$ref": 3}),
    ("$id", {"properties": {"a": {"$id": "x"}}}),
    ("oneOf", {"oneOf": [{"type": "integer"}, {"type": "number"}]}),
    ("oneOf", {"oneOf": []}),
    ("anyOf", {"anyOf": []}),
    ("enum", {"enum": []}),
    ("type", {"type": "text"}),
    ("type", {"type": [3]}),
    ("format", {**STRING, "format": "postcode"}),
    ("pattern", {**STRING, "pattern": 3}),
    ("minLength", {**STRING, "minLength": -1}),
    ("minLength", {**STRING, "minLength": 10**9}),
    ("maxItems", {"type": "array", "maxItems": "2"}),
    ("exclusiveMinimum", {"type": "number", "minimum": 3, "exclusiveMinimum": True}),
    ("minimum", {"type": "integer", "minimum": 1e300}),
    ("minimum", {"type": "integer", "minimum": 5, "maximum": 3}),
    ("multipleOf", {"type": "integer", "multipleOf": 0}),
    ("properties", {"type": "object", "properties": [1]}),
    ("required", {"type": "object", "required": "a"}),
    ("required", {"type": "object", "required": ["a"], "additionalProperties": False}),
    ("Properties", {"properties": {"a": STRING}, "minProperties": 1}),
    ("minProperties", {"type": "object", "minProperties": 2}),
]


@pytest.mark.parametrize(("keyword", "schema"), UNSUPPORTED, ids=lambda v: str(v)[:50])
def test_what_cannot_be_honoured_is_named(keyword: str, schema: Any) -> None:
    # A root of its own for local references; an unsatisfiable item would leave the empty array.
    alone = "$ref" in schema or "maximum" in schema or "required" in schema
    for nested in (schema, schema if alone else {"type": "array", "items": schema}):
        with pytest.raises(RequestError, match=re.escape(keyword)) as caught:
            validate("json", json.dumps(nested), "response_format")
        assert (caught.value.field, caught.value.code) == ("response_format", 400)


def test_annotations_and_unreached_schemas_do_not_matter() -> None:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "T", "description": "d", "default": 1, "examples": [2], "deprecated": True,
        "x-order": 3, "type": "array", "items": {**STRING, "title": "not a keyword"},
        "uniqueItems": False, "$defs": {"unused": {"not": {}}},
    }  # fmt: skip
    validate("json", json.dumps(schema))
    validate("json", "true")


CHAIN = 600


def chained(link: Any) -> str:
    """A chain of references through a wrapping."""
    definitions = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(CHAIN)}
    definitions[f"d{CHAIN}"] = STRING
    return json.dumps({"$ref": "#/$defs/d0", "$defs": definitions})


def nested(depth: int) -> str:
    return '{"type": "array", "items": ' * depth + '{"type": "string"}' + "}" * depth


HOSTILE: list[tuple[str, str, str | None]] = [
    ("json", nested(3000), "deeper than"),
    ("json", nested(50), None),
    ("json", json.dumps({**STRING, "pattern": "(" * 5000 + "a" + ")" * 5000}), "pattern"),
    ("json", '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, '
             '"b": {"$ref": "#/$defs/a"}}}', "no finite value"),
    ("json", '{"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}', "finite"),
    ("json", '{"type": "array", "items": {"$ref": "#"}, "minItems": 1}', "no finite value"),
    ("json", '{"anyOf": [{"$ref": "#"}, {"allOf": [{"$ref": "#"}, true]}]}', "no finite value"),
    ("json", '{"type": "array", "items": {"$ref": "#"}}', None),
    ("json", "false", "no finite value"),
    ("json", chained(lambda to: to), None),
    ("json", chained(lambda to: {"anyOf": [to, {"type": "null"}]}), None),
    ("json", chained(lambda to: {"properties": {"a": to}, "required": ["a"]}), None),
    ("json", chained(lambda to: {"allOf": [to, to]}), None),
    ("json", json.dumps({"properties": {f"p{i}": STRING for i in range(2500)}}), "subschemas"),
    ("json", json.dumps({"enum": [f"{i:06}" for i in range(40_000)]}), "limit of"),
    ("json", '{"a": ', "not valid JSON"),
    ("json", "3", "must be an object or a boolean"),
    ("regex", "(" * 1000 + "a" + ")" * 1000, "nests deeper"),
    ("regex", "(?=a)b", "look-around"),
    ("regex", r"(a)\1", "backreference"),
    ("regex", r"[^\s\S]", "can't be honoured"),
    ("regex", "(x+x+)+y" * 500, None),
    ("regex", "((a{1,1000}){1,1000}){1,1000}", None),
    ("regex", "[", "can't be honoured"),
    ("grammar", 'start: start "a"', "can't be honoured"),
    ("grammar", 'start: "a" missing', "missing"),
    ("grammar", 'root ::= "a" missing', "missing"),
    ("grammar", "root ::= " + "(" * 3000, "nests deeper"),
    ("grammar", "", "grammar"),
    ("grammar", "start: " + '"a" ' * 10_000, "more than 32768 characters"),
    ("grammar", "start: T0\n" + "".join(f"T{i}: (T{i + 1} | /b/)+\n" for i in range(1500)), "nest"),
    ("grammar", "start: T0\n" + "".join(f"T{i}: T{i + 1} /b/\n" for i in range(60)) + "T60: /c/",
     None),
    ("grammar", "start: A\nA: B\nB: A", "nest"),
    ("grammar", "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(2500)) + 'r2500: "x"',
     None),
    ("grammar", 'start: %json {"type": "string", "not": {}}', "'not'"),
    ("grammar", 'start: %json {"type": ', "%json"),
    ("regex", "a?" * 5000, "more than 4096"),
    ("json", json.dumps({"allOf": [{**STRING, "pattern": f"[a-{x}]"} for x in "bcdefgh"],
                         "pattern": "a"}), "meet on one string"),
    ("json", chained(lambda to: {**STRING, "pattern": "[a-z]x", **to}), "meet on one string"),
    ("json", json.dumps({"anyOf": [{**STRING, "pattern": f"^{x}"} for x in "bcdefgh"],
                         "pattern": "z"}), None),
    ("json", json.dumps({**STRING, "pattern": "a?" * 5000}), "more than 4096"),
    ("json", json.dumps({"prefixItems": [{**STRING, "pattern": "ab?" * 900}] * 9}), "patterns"),
    ("json", json.dumps({"const": "a" * 20_000}), "string of more than"),
    ("json", json.dumps({"properties": {"a": {}}, "patternProperties": {f"^{i}$": {} for i in
     range(300)}}), "patternProperties"),
    ("choice", "[]", "at least one"),
    ("choice", '["a", 3]', "strings"),
    ("choice", '["a", ""]', "non-empty"),
    ("choice", json.dumps([str(i) for i in range(6000)]), "more than"),
    ("structural_tag", "{}", "structural_tag"),
    ("structural_tag", '{"structures": [{"begin": "<f>", "schema": {"not": {}}}], '
                       '"triggers": ["<f"]}', "'not'"),
    ("structural_tag", '{"structures": [{"begin": "<f>", "schema": {}}], "triggers": ["[g"]}',
     "no trigger"),
    ("structural_tag", '{"type": "structural_tag", "format": {"type": "sequence"}}', "sequence"),
    ("yaml", "", "'yaml' is not one of"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "source", "words"), HOSTILE, ids=lambda v: str(v)[:40])
def test_hostile_constraints_meet_limits(
    compiler: GrammarCompiler, tiny: Tokenizer, kind: str, source: str, words: str | None
) -> None:
    start = time.process_time()
    if words is not None:
        with pytest.raises(RequestError, match=re.escape(words)):
            validate(kind, source)
        with pytest.raises(RequestError, match=re.escape(words)):
            compiler.compile(kind, source)
    else:
        validate(kind, source)
        sample(compiler.compile(kind, source).start(), tiny, 0, 20)
    assert time.process_time() - start < 10


@pytest.mark.parametrize("name", ["tiny", "smollm2"])
@pytest.mark.parametrize(
    ("kind", "source", "valid"),
    [
        ("regex", "[a-z]{2,6} [a-z]{2,6}", r"[a-z]{2,6} [a-z]{2,6}"),
        ("regex", "(né|日本){1,3} [0-9]+", r"(né|日本){1,3} [0-9]+"),
        ("regex", "^[a-c]+$", r"[a-c]+"),
        ("choice", '["a", "ab", "héé/\\"\\n"]', 'a|ab|héé/"\n'),
        ("grammar", 'root ::= "a" [0-9]+ ("b" | "é")', "a[0-9]+[bé]"),
        ("grammar", 'start: "(" start ")" | /x+/', r"\(*x+\)*"),
    ],
)
def test_other_kinds(
    name: str, kind: str, source: str, valid: str, request: pytest.FixtureRequest
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    grammar = GrammarCompiler(tokenizer).compile(kind, source)
    ended = 0
    for seed in range(10):
        ids, done = sample(grammar.start(), tokenizer, seed, 12)
        ended += done
        if done:
            assert re.fullmatch(valid, tokenizer.decode(ids))
    assert ended or "x+" in source


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=6, unique=True), st.data())
def test_a_choice_is_one_of_the_strings_whatever_they_hold(
    smollm2: Tokenizer, real: GrammarCompiler, choices: list[str], data: st.DataObject
) -> None:
    written = [smollm2.encode(choice, specials=False, add_special=False) for choice in choices]
    assume(all(smollm2.decode(ids) == each for ids, each in zip(written, choices, strict=True)))
    grammar = real.compile("choice", json.dumps(choices))
    for ids in written:
        cursor = grammar.start()
        assert cursor.accept(ids)
        assert cursor.can_stop
    other = data.draw(st.text(max_size=6).filter(lambda text: text not in choices))
    cursor = grammar.start()
    taken = cursor.accept(smollm2.encode(other, specials=False, add_special=False))
    assert not (taken and cursor.can_stop)


def test_as_many_choices_as_are_allowed(compiler: GrammarCompiler, tiny: Tokenizer) -> None:
    choices = [f"word {number} of many (a|b)" for number in range(MAX_CHOICES)]
    start = compiler.compile("choice", json.dumps(choices)).start()
    for choice in choices[::977]:
        cursor = start.copy()
        for token in tiny.encode(choice, add_special=False):
            mask = np.zeros((tiny.vocabulary + 31) // 32, np.uint32)
            cursor.mask(mask)
            assert mask[token // 32] >> token % 32 & 1
            assert cursor.accept((token,))
        assert cursor.finished


def test_white_space_is_as_asked(compiler: GrammarCompiler, tiny: Tokenizer) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}, "b": STRING}}
    plain = compiler.compile("json", json_source(schema)).start()
    loose = compiler.compile("json", json_source(schema, r"[ \n]{0,3}")).start()
    for text, in_plain in (('{"a": 1, "b": ""}', True), ('{ "a":\n\n1 ,"b" : ""\n}', False)):
        assert plain.copy().accept(tiny.encode(text)) == in_plain
        assert loose.copy().accept(tiny.encode(text))
    assert not loose.copy().accept(tiny.encode('{    "a"'))
    with pytest.raises(RequestError, match="can't be honoured"):
        validate("json", json_source(schema, "["))


def test_thinking_is_free_until_it_ends(compiler: GrammarCompiler, tiny: Tokenizer) -> None:
    grammar = compiler.compile("choice", '["hello"]')
    (after,) = tiny.encode("<tool>")
    cursor = grammar.start(after=after)
    assert len(allowed(cursor, tiny.vocabulary)) == tiny.vocabulary
    assert cursor.forced() == []
    assert cursor.accept(tiny.encode("let me think"))
    copy = cursor.copy()
    assert cursor.accept([after])
    assert cursor.forced() == tiny.encode("hello")
    assert not cursor.accept(tiny.encode("x"))
    assert copy.can_stop
    assert copy.accept([0])
    assert copy.finished


def test_json_object_is_an_object(compiler: GrammarCompiler, tiny: Tokenizer) -> None:
    cursor = compiler.compile("json_object", "").start()
    assert not cursor.copy().accept(tiny.encode("[1]"))
    assert cursor.accept(tiny.encode('{"a": [1, {"b": null}]}'))
    assert cursor.finished


def test_structural_tag_constrains_inside_the_tag_only(
    compiler: GrammarCompiler, tiny: Tokenizer
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    old = {"structures": [{"begin": "<f=g>", "schema": schema, "end": "</f>"}], "triggers": ["<f="]}
    tag = {"begin": "<f=g>", "content": {"type": "json_schema", "json_schema": schema},
           "end": "</f>"}  # fmt: skip
    new = {"type": "structural_tag",
           "format": {"type": "triggered_tags", "triggers": ["<f="], "tags": [tag]}}  # fmt: skip
    for form in (old, new):
        start = compiler.compile("structural_tag", json.dumps(form)).start()
        assert start.can_stop
        good = start.copy()
        assert good.accept(tiny.encode('any < text <f=g>{"a": 12}</f> more'))
        assert good.can_stop
        assert not start.copy().accept(tiny.encode('text <f=g>{"b'))
        assert not start.copy().accept(tiny.encode("text <f=h"))


def test_copies_do_not_disturb_each_other(compiler: GrammarCompiler, tiny: Tokenizer) -> None:
    cursor = compiler.compile("regex", "(ab|cd)+").start()
    one, other = cursor.copy(), cursor.copy()
    assert one.accept(tiny.encode("ab"))
    assert other.accept(tiny.encode("cdcd"))
    assert not cursor.can_stop
    assert one.can_stop
    assert one.accept(tiny.encode("cd"))
    assert not cursor.accept(tiny.encode("b"))


def test_refused_token_leaves_the_cursor_in_place(
    compiler: GrammarCompiler, tiny: Tokenizer
) -> None:
    cursor = compiler.compile("regex", "ab*").start()
    assert not cursor.accept(tiny.encode("ax"))
    assert cursor.accept(tiny.encode("b"))
    assert not cursor.accept([*tiny.stop_ids, 5])
    assert cursor.finished


def test_mask_covers_padded_rows(compiler: GrammarCompiler, tiny: Tokenizer) -> None:
    row = np.full(40, 0xFFFFFFFF, np.uint32)
    cursor = compiler.compile("choice", '["a"]').start()
    cursor.mask(row)
    assert int(np.bitwise_count(row).sum()) == 1
    cursor.accept(tiny.encode("a"))
    row[:] = 0xFFFFFFFF
    cursor.mask(row)
    assert int(np.bitwise_count(row).sum()) == len(tiny.stop_ids)


def test_equal_constraints_are_compiled_once(compiler: GrammarCompiler) -> None:
    first = compiler.compile("regex", "abc")
    assert compiler.compile("regex", "abc") is first
    assert compiler.compile("choice", '["abc"]') is not first


def test_ways_through_a_grammar_are_all_found(compiler: GrammarCompiler, tiny: Tokenizer) -> None:
    source = json.dumps([a + b for a, b in itertools.product("ab", repeat=2)])
    start = compiler.compile("choice", source).start()
    assert {tiny.decode(path) for path in paths(start, tiny)} == {"aa", "ab", "ba", "bb"}
