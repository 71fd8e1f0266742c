"""What a request means, seen on the real model: text, sampling, log-probabilities, structure."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest

from tests.e2e.conftest import Server

ASK = [{"role": "user", "content": "Reply with one short JSON object."}]
PROMPT = "The three primary colours are"


def stream(server: Server, path: str, **body: Any) -> tuple[str, list[Any]]:
    """The joined text of choice 0 and all events."""
    answer = server.post(path, stream=True, **{"temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    lines = [line[6:] for line in answer.text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    assert not [event for event in events if "error" in event], events
    parts = [c for event in events for c in event["choices"] if c["index"] == 0]
    text = "".join(p.get("text") or p.get("delta", {}).get("content") or "" for p in parts)
    assert sum(part["finish_reason"] is not None for part in parts) == 1
    return text, events


def constrained(server: Server, schema: Any, **body: Any) -> tuple[Any, str]:
    """The parsed answer under a schema, and its finish reason."""
    form = {"type": "json_schema", "json_schema": {"name": "c", "schema": schema}}
    answer = server.post(
        "/v1/chat/completions", messages=ASK, response_format=form,
        **{"max_tokens": 80, "temperature": 0, **body},
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    text = choice["message"]["content"]
    return (json.loads(text) if choice["finish_reason"] == "stop" else text), choice[
        "finish_reason"
    ]


def test_a_stop_string_at_any_place_cuts_the_text_there(server: Server) -> None:
    text = server.complete(PROMPT, max_tokens=24)["choices"][0]["text"]
    for start in range(0, len(text) - 8, 7):
        stop = text[start : start + 8]
        right = text[: text.index(stop)]
        got, events = stream(server, "/v1/completions", prompt=PROMPT, max_tokens=24, stop=[stop])
        assert got == right
        assert events[-1]["choices"][0]["stop_reason"] == stop


def test_stop_strings_inside_of_forced_text(server: Server) -> None:
    """Nothing of it is sent, also where it ends inside of tokens that a grammar forces."""
    for value, stop, right in (
        ("alpha beta gamma", "beta gam", '"alpha '),
        ("internationalization", "ationaliz", '"intern'),
    ):
        schema = {"type": "object", "properties": {"v": {"enum": [value]}}, "required": ["v"],
                  "additionalProperties": False}  # fmt: skip
        form = {"type": "json_schema", "json_schema": {"schema": schema}}
        text, events = stream(
            server, "/v1/chat/completions", messages=ASK, max_tokens=64, stop=stop,
            response_format=form, stream_options={"include_usage": True},
        )  # fmt: skip
        assert text.endswith(right)
        assert events[-1]["usage"]["completion_tokens"] >= 1
        assert events[-2]["choices"][0]["finish_reason"] == "stop"


def test_a_seeded_answer_is_the_same_cold_warm_and_together(server: Server) -> None:
    body = {"prompt": PROMPT * 4, "max_tokens": 16, "temperature": 0.9, "seed": 7, "logprobs": 1}

    def ask(salt: str | None) -> Any:
        answer = server.post("/v1/completions", **body, cache_salt=salt).json()
        return answer["choices"][0]["text"], answer["choices"][0]["logprobs"], answer["usage"]

    cold, warm = ask("one"), ask("one")
    other = ask("two")
    assert warm[2]["prompt_tokens_details"]["cached_tokens"] > 0
    assert other[2]["prompt_tokens_details"]["cached_tokens"] == 0
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda _: ask(None), range(8)))
    assert {result[0] for result in [cold, warm, other, *together]} == {cold[0]}
    assert all(result[1] == cold[1] for result in [warm, other, *together])


def test_prompt_logprobs_do_not_depend_on_the_cache(server: Server) -> None:
    first = "one two three four five six seven eight nine ten " * 5
    second = first + "and then some more words that differ"

    def ask(prompt: str, salt: str) -> Any:
        answer = server.complete(prompt, max_tokens=1, prompt_logprobs=1, cache_salt=salt)
        scores = answer["choices"][0]["prompt_logprobs"]
        assert len(scores) == answer["usage"]["prompt_tokens"]
        assert scores[0] is None
        return scores

    cold = ask(first, "a")
    assert ask(first, "a") == cold
    long = ask(second, "a")
    assert long[: len(cold) - 1] == cold[:-1]
    assert ask(second, "b") == long
    assert ask(first, "b") == cold


def test_echo_and_logprobs_line_up(server: Server) -> None:
    for prompt, count in (
        ("\n1. Carol has 20", 1),
        ("Warsaw ist schön 🙂", 8),
        ("Your answer:", 0),
    ):
        body = server.complete(prompt, max_tokens=count, echo=True, logprobs=1)
        choice = body["choices"][0]
        shown = choice["logprobs"]
        assert choice["text"].startswith(prompt)
        assert "".join(shown["tokens"]) == choice["text"]
        assert len(shown["tokens"]) == body["usage"]["total_tokens"]
        assert shown["token_logprobs"][0] is None
        assert all(value <= 0 for value in shown["token_logprobs"][1:])
        text, events = stream(
            server, "/v1/completions", prompt=prompt, max_tokens=count, echo=True, logprobs=1
        )
        assert text == choice["text"]
        tokens = [t for e in events for t in e["choices"][0]["logprobs"]["tokens"]]
        assert tokens == shown["tokens"]


def test_token_counts_of_a_prompt_in_several_pieces(server: Server) -> None:
    _, events = stream(
        server, "/v1/completions", prompt="test " * 1000, max_tokens=4, ignore_eos=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    usage = [event for event in events if event.get("usage")]
    assert usage == [events[-1]]
    counts = usage[0]["usage"]
    assert counts["completion_tokens"] == 4
    assert counts["prompt_tokens"] > 900
    assert counts["total_tokens"] == counts["prompt_tokens"] + 4


def test_biases_reach_the_sampler(server: Server) -> None:
    chat = {"messages": [{"role": "user", "content": "Say hello."}], "temperature": 0}
    never = server.post("/v1/chat/completions", **chat, max_tokens=30,
                        logit_bias={"0": -100, "2": -100}).json()  # fmt: skip
    assert never["choices"][0]["finish_reason"] == "length"
    assert never["usage"]["completion_tokens"] == 30
    at_once = server.post("/v1/chat/completions", **chat, logit_bias={"2": 100}).json()
    assert at_once["choices"][0]["message"]["content"] == ""
    assert at_once["choices"][0]["finish_reason"] == "stop"
    repeated = "very " * 30
    plain = server.complete(repeated, max_tokens=8)["choices"][0]["text"]
    changed = server.complete(repeated, max_tokens=8, repetition_penalty=2.0)
    assert changed["choices"][0]["text"] != plain
    only = server.complete("A", max_tokens=5, allowed_token_ids=[260, 28], ignore_eos=True,
                           return_token_ids=True)  # fmt: skip
    assert set(only["choices"][0]["token_ids"]) <= {260, 28}
    word = plain.split()[0]
    banned = server.complete(repeated, max_tokens=8, bad_words=[word])["choices"][0]["text"]
    assert not re.search(rf"(^| ){re.escape(word)}\b", banned)


def test_the_best_are_ranked(server: Server) -> None:
    body = {"max_tokens": 6, "temperature": 1, "seed": 3, "logprobs": 0}
    every = server.complete(PROMPT, n=6, **body)["choices"]
    best = server.complete(PROMPT, n=2, best_of=6, **body)["choices"]

    def mean(choice: Any) -> float:
        values = choice["logprobs"]["token_logprobs"]
        return float(sum(values) / len(values))

    ranked = sorted(every, key=lambda choice: (-mean(choice), choice["index"]))
    assert [choice["text"] for choice in best] == [choice["text"] for choice in ranked[:2]]
    beams = server.complete(PROMPT, use_beam_search=True, n=3, max_tokens=6, logprobs=0)["choices"]
    scores = [sum(choice["logprobs"]["token_logprobs"]) for choice in beams]
    assert scores == sorted(scores, reverse=True)
    assert len({choice["text"] for choice in beams}) == 3
    greedy = server.complete(PROMPT, max_tokens=6, logprobs=0)["choices"][0]
    assert scores[0] >= sum(greedy["logprobs"]["token_logprobs"]) - 1e-4


NODE = {
    "$ref": "#/$defs/node",
    "$defs": {"node": {
        "type": "object", "required": ["k", "kids"], "additionalProperties": False,
        "properties": {"k": {"type": "integer", "minimum": 0, "maximum": 9},
                       "kids": {"type": "array", "items": {"$ref": "#/$defs/node"},
                                "maxItems": 2}},
    }},
}  # fmt: skip


def one(value: Any) -> dict[str, Any]:
    """A schema of an object with one required member."""
    return {"type": "object", "properties": {"v": value}, "required": ["v"],
            "additionalProperties": False}  # fmt: skip


@pytest.mark.parametrize(
    "value",
    [
        {"type": "string", "pattern": "^[a-z]+$", "maxLength": 3},
        {"type": "string", "minLength": 2, "maxLength": 4},
        {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2, "maxItems": 2},
        {"type": "integer", "minimum": 100, "maximum": 105},
        {"type": "integer", "minimum": -5, "maximum": -2},
        {"type": "integer", "exclusiveMinimum": 8, "exclusiveMaximum": 11},
        {"const": 'http://a.example/b?c="d"\\eé\n'},
        {"enum": ["a b  c"]},
        {"type": "object", "properties": {'a "b" c/d': {"type": "boolean"}},
         "required": ['a "b" c/d'], "additionalProperties": False},
    ],
    ids=lambda value: json.dumps(value)[:40],
)  # fmt: skip
def test_answers_obey_their_schema(server: Server, value: Any) -> None:
    schema = one(value)
    for seed in range(4):
        answer, finish = constrained(server, schema, temperature=1.5, seed=seed)
        assert finish == "stop"
        jsonschema.validate(answer, schema)


def test_references_and_recursion(server: Server) -> None:
    answer, finish = constrained(server, NODE, max_tokens=100)
    if finish == "stop":
        jsonschema.validate(answer, NODE)
    schema = {**one({"$ref": "#/$defs/T"}), "$defs": {
        "T": one({"$ref": "#/$defs/W"}), "W": {"enum": ["Alice", "Biff"]},
    }}  # fmt: skip
    answer, finish = constrained(server, schema)
    assert finish == "stop"
    jsonschema.validate(answer, schema)


def test_hostile_constraints_are_refused_quickly(server: Server) -> None:
    deep: Any = {"type": "string"}
    for _ in range(300):
        deep = {"type": "array", "items": deep}
    cycle = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    nested = one({"type": "string", "pattern": "(" * 5000 + "a" + ")" * 5000})
    for schema in (deep, cycle, nested):
        form = {"type": "json_schema", "json_schema": {"schema": schema}}
        answer = server.post("/v1/chat/completions", messages=ASK, response_format=form,
                             max_tokens=4)  # fmt: skip
        assert answer.status_code == 400, answer.text
        assert "response_format" in answer.json()["error"]["message"]
        assert answer.elapsed.total_seconds() < 10
    assert server.complete("Hello", max_tokens=2)


def test_patterns_and_choices(server: Server) -> None:
    for fields, pattern in (
        ({"guided_regex": "[a-z]{2,6} [a-z]{2,6}"}, "[a-z]{2,6} [a-z]{2,6}"),
        ({"structured_outputs": {"regex": "é{1,3}ß ü"}}, "é{1,3}ß ü"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"guided_grammar": 'root ::= "ab" [0-9] "c"'}, "ab[0-9]c"),
    ):
        text, events = stream(
            server, "/v1/chat/completions", messages=ASK, max_tokens=30, logprobs=True, **fields
        )
        assert re.fullmatch(pattern, text), (fields, text)
        assert events[-1]["choices"][0]["finish_reason"] == "stop"
        shown = [e["choices"][0]["logprobs"] for e in events if e["choices"][0]["logprobs"]]
        entries = [entry for logprobs in shown for entry in logprobs["content"]]
        assert "".join(entry["token"] for entry in entries) == text
        assert all(-9999 <= entry["logprob"] <= 0 for entry in entries)


def test_control_tokens_of_a_conversation(server: Server) -> None:
    """The end mark of a turn ends the answer, and is never text; a user cannot write one."""
    talk = [{"role": "user", "content": "Hi, please introduce yourself in one line."}]
    answer = server.post("/v1/chat/completions", messages=talk, temperature=0, max_tokens=80).json()
    assert "<|im_" not in answer["choices"][0]["message"]["content"]
    counts = []
    for content in ("a<|im_end|>b", "ab"):
        body = {"messages": [{"role": "user", "content": content}]}
        ids = server.post("/tokenize", **body).json()["tokens"]
        counts.append((ids.count(1), ids.count(2)))
    assert counts[0] == counts[1]


def test_a_forced_call_streams_its_arguments(server: Server) -> None:
    function = {"name": "set_fg", "strict": True, "parameters": {
        "type": "object", "properties": {"color": {"enum": ["red", "blue"]},
                                         "n": {"type": "number"}},
        "required": ["color"], "additionalProperties": False}}  # fmt: skip
    body = {
        "messages": ASK, "tools": [{"type": "function", "function": function}], "seed": 1,
        "tool_choice": {"type": "function", "function": {"name": "set_fg"}}, "max_tokens": 60,
    }  # fmt: skip
    whole = server.post("/v1/chat/completions", temperature=0, **body).json()["choices"][0]
    (call,) = whole["message"]["tool_calls"]
    jsonschema.validate(json.loads(call["function"]["arguments"]), function["parameters"])
    _, events = stream(server, "/v1/chat/completions", **body)
    pieces = [c for e in events for c in e["choices"][0]["delta"].get("tool_calls", [])]
    joined = "".join(piece["function"].get("arguments", "") for piece in pieces)
    assert joined == call["function"]["arguments"]
    assert events[-1]["choices"][0]["finish_reason"] == whole["finish_reason"] == "tool_calls"
