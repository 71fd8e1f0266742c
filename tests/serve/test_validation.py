"""Nothing is ignored: every field changes what the engine gets or is refused by name."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import RequestError
from headrace.serve.fields import ChatRequest, CompletionRequest
from headrace.serve.openapi import document, markdown
from headrace.serve.resolve import Served
from tests.serve.conftest import CONTEXT, Site, error_of, run_async

WRONG = [
    ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", "4"), ("temperature", -1),
    ("temperature", "hot"), ("temperature", 101), ("top_p", 1.5), ("top_p", -0.1), ("top_p", 0),
    ("top_k", 0.01), ("top_k", -2), ("min_p", 2), ("min_p", -0.1), ("n", 0), ("n", 129),
    ("n", True), ("best_of", 0), ("seed", 2**64), ("seed", 1.5), ("repetition_penalty", 0),
    ("repetition_penalty", -1), ("presence_penalty", 2.1), ("frequency_penalty", -2.1),
    ("logit_bias", {"99999999": 5}), ("logit_bias", {"-1": 5}), ("logit_bias", {"3": 101}),
    ("logit_bias", {"x": 1}), ("logit_bias", [1]), ("stop", ""), ("stop", ["a", ""]),
    ("stop", ["a"] * 65), ("stop", "x" * 4097), ("stop", ["x" * 4097]), ("stop", 5),
    ("stop_token_ids", [99999999]), ("stop_token_ids", [-1]),
    ("stop_token_ids", 5), ("allowed_token_ids", []), ("allowed_token_ids", [99999999]),
    ("bad_words", [""]), ("bad_words", "word"), ("min_tokens", -1),
    ("prompt_logprobs", -1), ("prompt_logprobs", 21), ("truncate_prompt_tokens", 0),
    ("truncate_prompt_tokens", -2), ("truncate_prompt_tokens", CONTEXT + 1), ("priority", 3),
    ("cache_salt", ""), ("stream", "yes"), ("stream_options", {"include_usage": True}),
    ("response_format", {"type": "poem"}), ("response_format", {"type": "json_schema"}),
    ("response_format", {}), ("response_format", "json"), ("structured_outputs", {}),
    ("structured_outputs", {"json": {}, "regex": "a"}), ("guided_choice", []),
    ("length_penalty", 2), ("service_tier", "flex"), ("request_id", ""), ("user", 5),
    ("metadata", "x"), ("temprature", 1), ("kv_transfer_params", {}), ("modalities", ["audio"]),
]  # fmt: skip
"""A field and a value that must be refused with its name, whatever the endpoint."""


@pytest.mark.parametrize(("field", "value"), WRONG, ids=lambda value: str(value)[:30])
@run_async
async def test_a_wrong_value_is_refused_by_name(site: Site, field: str, value: Any) -> None:
    for answer in (await site.complete(**{field: value}), await site.chat(**{field: value})):
        error = error_of(answer)
        assert error["type"] == "BadRequestError"
        assert field in error["message"]
        assert str(error["param"]).startswith(field)
    assert site.engine.submits == []
    assert (await site.complete()).status_code == 200


def test_the_list_above_has_every_field_that_has_a_limit() -> None:
    """All shared fields but those which take any value of their type."""
    free = {
        "model", "include_stop_str_in_output", "ignore_eos", "use_beam_search",
        "skip_special_tokens", "spaces_between_special_tokens", "add_special_tokens",
        "guided_json", "guided_regex", "guided_grammar", "regex", "ebnf", "json_schema",
        "return_token_ids", "return_tokens_as_token_ids", "safety_identifier",
        "prompt_cache_key", "store",
    }  # fmt: skip
    shared = set(CompletionRequest.__struct_fields__) & set(ChatRequest.__struct_fields__)
    assert {field for field, _ in WRONG} >= shared - free - {"logprobs", "echo"}


@run_async
async def test_null_is_the_same_as_absent_for_every_field(site: Site) -> None:
    for kind, ask in ((CompletionRequest, site.complete), (ChatRequest, site.chat)):
        optional = [f.encode_name for f in msgspec.structs.fields(kind) if not f.required]
        nulls = {**dict.fromkeys(optional), "audio": None, "max_tokens": 9}
        site.engine.submits.clear()
        assert (await ask(**nulls)).status_code == 200
        assert (await ask(max_tokens=9)).status_code == 200
        first, second = (_comparable(submit) for submit in site.engine.submits)
        assert first == second


@run_async
async def test_nulls_inside_of_objects_are_absent_too(site: Site) -> None:
    """As in a message that a client library wrote out, with members that are not known here."""
    call = {"id": "c", "type": "function", "index": None, "future": None,
            "function": {"name": "f", "arguments": "{}", "parsed": None}}  # fmt: skip
    talk = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache": None}], "name": None},
        {"role": "assistant", "content": "b", "refusal": None, "audio": None,
         "function_call": None, "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "user", "content": "c"},
    ]  # fmt: skip
    options = {
        "stream": False,
        "stream_options": None,
        "response_format": {"type": "text", "x": None},
    }
    assert (await site.chat(talk, max_tokens=4, **options)).status_code == 200
    schema = {"type": "object", "properties": {"v": {"const": None}}}
    await site.complete(guided_json=schema, audio=None)
    assert json.loads(site.engine.submits[1].grammar.source) == schema
    talk[1]["audio"] = {"id": "x"}
    assert error_of(await site.chat(talk))["param"] == "messages[1].audio"


def _comparable(submit: Any) -> Any:
    value = msgspec.to_builtins(submit)
    value.pop("id")
    value.pop("arrival", None)
    value["sampling"].pop("seed", None)
    return value


CHANGES: list[tuple[str, Any, str]] = [
    ("max_tokens", 3, "max_tokens"), ("temperature", 0.5, "sampling.temperature"),
    ("top_p", 0.5, "sampling.top_p"), ("top_k", 5, "sampling.top_k"),
    ("min_p", 0.1, "sampling.min_p"), ("seed", 7, "sampling.seed"), ("n", 2, "n"),
    ("best_of", 3, "n"), ("stop_token_ids", [9], "stop_tokens"),
    ("ignore_eos", True, "stop_tokens"), ("min_tokens", 2, "min_tokens"),
    ("presence_penalty", 1, "sampling.presence_penalty"),
    ("frequency_penalty", 1, "sampling.frequency_penalty"),
    ("repetition_penalty", 1.5, "sampling.repetition_penalty"),
    ("logit_bias", {"9": 1}, "sampling.logit_bias"),
    ("allowed_token_ids", [9], "sampling.allowed"), ("bad_words", ["the"], "sampling.bad_words"),
    ("prompt_logprobs", 1, "sampling.prompt_logprobs"), ("use_beam_search", True, "beam"),
    ("truncate_prompt_tokens", 2, "prompt"), ("cache_salt", "s", "namespace"),
    ("response_format", {"type": "json_object"}, "grammar"),
    ("structured_outputs", {"regex": "a"}, "grammar"), ("guided_json", {}, "grammar"),
    ("guided_regex", "a", "grammar"), ("guided_choice", ["a"], "grammar"),
    ("guided_grammar", "start: \"a\"", "grammar"), ("regex", "a", "grammar"),
    ("ebnf", "root ::= \"a\"", "grammar"), ("json_schema", {}, "grammar"),
]  # fmt: skip
"""A field, a value, and the part of the submit that it changes."""


@pytest.mark.parametrize(("field", "value", "place"), CHANGES, ids=lambda value: str(value)[:30])
@run_async
async def test_a_field_reaches_the_engine(site: Site, field: str, value: Any, place: str) -> None:
    site.engine.script = lambda submit, index: [9, 2]
    for ask in (site.complete, site.chat):
        site.engine.submits.clear()
        assert (await ask(seed=1, max_tokens=8)).status_code == 200
        assert (await ask(**{"seed": 1, "max_tokens": 8, field: value})).status_code == 200
        first, second = (_comparable_seeded(submit) for submit in site.engine.submits)
        top = place.split(".")[0]
        assert first[top] != second[top]
        for other in set(first) - {top, "sampling"}:
            if field not in ("max_tokens", "ignore_eos", "min_tokens"):
                assert first[other] == second[other]


def _comparable_seeded(submit: Any) -> Any:
    value = {name: getattr(submit, name) for name in submit.__struct_fields__}
    value.pop("id")
    value.pop("arrival")
    return value


@run_async
async def test_shapes_of_the_prompt_that_are_refused(site: Site) -> None:
    for prompt in (
        [], [[]], "", [""], [999999], [-1], [[1], "a"], ["a", 1], [1.5], {"a": 1}, None,
        [True], [[[1]]], "the " * CONTEXT, list(range(3, 3 + CONTEXT)),
    ):  # fmt: skip
        assert "prompt" in error_of(await site.complete(prompt))["message"]
    long = error_of(await site.complete([3] * (CONTEXT + 1)))
    assert str(CONTEXT) in long["message"]
    assert str(CONTEXT + 1) in long["message"]


@pytest.mark.parametrize(("size", "tokens"), [(126, 2), (127, 1), (128, None), (129, None)])
@run_async
async def test_the_border_of_the_context(site: Site, size: int, tokens: int | None) -> None:
    site.ends = False
    response = await site.complete([3] * size, max_tokens=8)
    if tokens is None:
        error_of(response)
    else:
        body = response.json()
        assert body["usage"]["completion_tokens"] == tokens
        assert body["choices"][0]["finish_reason"] == "length"


@run_async
async def test_more_min_tokens_than_max_tokens(site: Site) -> None:
    for ask in (site.complete, site.chat):
        assert error_of(await ask(max_tokens=4, min_tokens=5))["param"] == "min_tokens"


@run_async
async def test_another_model_is_not_found(site: Site) -> None:
    for ask in (site.complete, site.chat):
        error = error_of(await ask(model="no-such-model"), 404)
        assert error["type"] == "NotFoundError"
        assert "no-such-model" in error["message"]
        assert (await ask(model="tiny")).status_code == 200


@run_async
async def test_harmless_fields_are_taken(site: Site) -> None:
    fields = {"user": "u", "metadata": {"k": "v"}, "store": True, "safety_identifier": "s"}
    for ask in (site.complete, site.chat):
        assert (await ask(**fields)).status_code == 200


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"[]", b"3", b"null", b'"text"', b'{"prompt":"a"', b'{"prompt":"\xff"}',
        b'{"prompt":"hi \\ud83d"}', b'{"prompt":"hi","stop":["\\ude00"]}',
        b'{"prompt":"a","guided_json":{"const":"\\ud83d"}}', b'{"prompt":"a","temperature":NaN}',
        b'{"prompt":"a","temperature":1e999}', b'{"prompt":' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"prompt":"a","guided_json":' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}",
    ],
    ids=lambda raw: raw[:24].decode("latin1"),
)  # fmt: skip
@run_async
async def test_bodies_that_are_no_requests(site: Site, raw: bytes) -> None:
    error_of(await site.send("POST", "/v1/completions", content=raw))
    assert (await site.complete()).status_code == 200


@run_async
async def test_a_paired_escape_is_a_character(site: Site) -> None:
    raw = b'{"prompt":"hi \\ud83d\\ude00","echo":true}'
    body = (await site.send("POST", "/v1/completions", content=raw)).json()
    assert body["choices"][0]["text"].startswith("hi 😀")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner,
                                                                 max_size=3),
    max_leaves=6,
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_value_in_any_field_is_answered_or_refused(tokenizer, data):
    """No 5xx, no hang: JSON values of every kind in up to three fields."""
    kind, path = data.draw(
        st.sampled_from(
            [(CompletionRequest, "/v1/completions"), (ChatRequest, "/v1/chat/completions")]
        )
    )
    names = st.sampled_from(kind.__struct_fields__)
    body = {"prompt": "a"} if kind is CompletionRequest else {
        "messages": [{"role": "user", "content": "a"}]
    }  # fmt: skip
    body |= data.draw(st.dictionaries(names, VALUES, min_size=1, max_size=3))
    site = Site(tokenizer, Served("tiny", tokenizer, CONTEXT))

    @run_async
    async def ask():
        raw = json.dumps(body).encode("utf-8", "surrogatepass")
        return await site.send("POST", path, content=raw)

    response = ask()
    assert response.status_code in (200, 400, 404), (body, response.text)
    if response.status_code != 200:
        error_of(response, response.status_code)


def test_the_document_names_every_field() -> None:
    schemas = json.loads(document())["components"]["schemas"]
    for kind in (CompletionRequest, ChatRequest):
        properties = schemas[kind.__name__]["properties"]
        assert set(properties) == set(kind.__struct_fields__)
        assert all(value["description"] for value in properties.values())
        assert schemas[kind.__name__]["additionalProperties"] is False


@run_async
async def test_defaults_of_the_checkpoint_apply_under_the_request(site: Site) -> None:
    site.served = Served("tiny", site.tokenizer, CONTEXT, {"temperature": 0.3, "top_k": 7}, seed=5)
    await site.complete()
    await site.chat(temperature=0.9)
    first, second = (submit.sampling for submit in site.engine.submits)
    assert (first.temperature, first.top_k, first.seed) == (0.3, 7, 5)
    assert (second.temperature, second.top_k) == (0.9, 7)


@run_async
async def test_priority_needs_its_policy(site: Site) -> None:
    site.served = Served("tiny", site.tokenizer, CONTEXT, priorities=True)
    assert (await site.complete(priority=-4)).status_code == 200
    assert site.engine.submits[0].priority == -4


def test_the_page_lists_every_field() -> None:
    """docs/api.md holds the tables as scripts/api_docs.py makes them."""
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
    assert markdown() in page, "run scripts/api_docs.py"
    for kind in (CompletionRequest, ChatRequest):
        for name in kind.__struct_fields__:
            assert f"| `{name}` |" in page


@run_async
async def test_a_constraint_is_refused_under_the_name_that_was_used(site: Site) -> None:
    text = "structured_outputs: the keyword uniqueItems can't be honoured"
    site.engine.refuse = RequestError("structured_outputs", text)
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "array"}}}
    for fields, name in (
        ({"response_format": form}, "response_format"),
        ({"guided_json": {}}, "guided_json"),
        ({"structured_outputs": {"json": {}}}, "structured_outputs.json"),
    ):
        error = error_of(await site.complete(**fields))
        assert error["param"] == name
        assert error["message"] == text.replace("structured_outputs", name, 1)


@run_async
async def test_white_space_of_json(site: Site) -> None:
    await site.complete(structured_outputs={"json": {"type": "object"}, "whitespace_pattern": " "})
    assert json.loads(site.engine.submits[0].grammar.source)["x-whitespace-pattern"] == " "
    await site.complete(structured_outputs={"json": '{"type":"object"}'})
    assert site.engine.submits[1].grammar.source == '{"type":"object"}'
    for wrong in ({"whitespace_pattern": " "}, {"regex": "a", "whitespace_pattern": " "}):
        name = str(error_of(await site.complete(structured_outputs=wrong))["param"])
        assert name.startswith("structured_outputs")


HUGE: list[tuple[str, Any]] = [
    ("prompt", list(range(3, 200)) * 10_000),
    ("prompt", ["a"] * 100_000),
    ("prompt", "a " * 2_000_000),
    ("messages", [{"role": "user", "content": "a"}] * 30_000),
    ("messages", [{"role": "user", "content": [{"type": "text", "text": "a"}] * 30_000}]),
    ("allowed_token_ids", [5] * 600_000),
    ("bad_words", ["word " * 20] * 20_000),
    ("stop", ["s" * 100] * 50_000),
    ("logit_bias", {str(i): 1 for i in range(200_000)}),
    ("tools", [{"type": "function", "function": {"name": "f"}}] * 20_000),
    ("guided_choice", ["c" * 50] * 100_000),
]


@pytest.mark.parametrize(("field", "value"), HUGE, ids=lambda value: str(value)[:20])
@run_async
async def test_huge_values_do_not_hold_up_the_others(site: Site, field: str, value: Any) -> None:
    """Refused or answered, and the event loop is never held for long."""
    body = {"prompt": "a", field: value}
    path = "/v1/completions"
    if field in ("messages", "tools"):
        body = {"messages": [{"role": "user", "content": "a"}], field: value}
        path = "/v1/chat/completions"
    raw = json.dumps(body).encode()
    app = site.app()
    transport = httpx.ASGITransport(app=app)
    longest = 0.0
    async with httpx.AsyncClient(transport=transport, base_url="http://t", trust_env=False) as web:
        asked = asyncio.create_task(web.post(path, content=raw))
        while not asked.done():
            before = time.thread_time()
            await asyncio.sleep(0.001)
            longest = max(longest, time.thread_time() - before)
        response = await asked
    assert response.status_code in (200, 400), response.text
    if field != "guided_choice":
        assert field in error_of(response)["message"]
    assert longest < 0.5  # CPU seconds


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "application/json"}, 200),
        ({"content-type": "Application/JSON; charset=utf-8"}, 200),
        ({"content-type": "application/vnd.api+json"}, 200),
        ({}, 200),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": "multipart/form-data; boundary=x"}, 415),
        ({"content-type": "application/json", "content-encoding": "gzip"}, 415),
        ({"content-type": "application/json", "content-encoding": "identity"}, 200),
    ],
    ids=str,
)
@run_async
async def test_only_plain_json_is_read(site: Site, headers: dict[str, str], status: int) -> None:
    raw = b'{"prompt":"hi","messages":[{"role":"user","content":"a"}]}'
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        answer = await site.send("POST", path, content=raw, headers=headers)
        if status == 415:
            assert error_of(answer, 415)["type"] == "UnsupportedMediaTypeError"
        else:
            assert answer.status_code in (200, 400)
    assert bool(site.engine.submits) is False  # no path takes this very body


@pytest.mark.parametrize(
    ("raw", "param", "words"),
    [
        (b'{"prompt":"a","temperature":1e999}', "temperature", "out of range"),
        (b'{"prompt":"a","logit_bias":{"5":-1e400}}', "logit_bias", "out of range"),
        (b'{"prompt":"a","seed":' + b"9" * 5000 + b"}", "seed", "out of range"),
        (b'{"prompt":"a","max_tokens":' + b"9" * 2000 + b"}", "max_tokens", "must be in"),
        (b'{"prompt":"a","logit_bias":{"5":101}}', "logit_bias", "100"),
        (b'{"prompt":"a","temperature":NaN}', None, "not legal JSON: invalid character"),
        (b'{"prompt":"a","functions":[]}', "functions", "use tools"),
        (b'{"prompt":"a","function_call":"auto"}', "function_call", "use tool_choice"),
        (b'{"prompt":"a","max_new_tokens":1}', "max_new_tokens", "use max_tokens"),
        (b'{"prompt":"a","response_format":{"type":"text","json_schema":{"schema":{}}}}',
         "response_format.json_schema", "not with the type text"),
        (b'{"prompt":"a","response_format":{"type":"json_object","triggers":[]}}',
         "response_format.triggers", "not with the type json_object"),
        (b'{"prompt":"a","allowed_token_ids":[2],"min_tokens":1}', "allowed_token_ids", "ban all"),
        (b'{"prompt":"a","allowed_token_ids":[75],"bad_words":["i"]}', "allowed_token_ids",
         "ban all"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
@run_async
async def test_a_refusal_names_the_field_and_says_what_to_do(
    site: Site, raw: bytes, param: str | None, words: str
) -> None:
    error = error_of(await site.send("POST", "/v1/completions", content=raw))
    assert error["param"] == param
    assert words in error["message"]
    assert len(error["message"]) < 300
    assert site.engine.submits == []


@run_async
async def test_a_template_of_the_request_is_refused_as_such(site: Site) -> None:
    error = error_of(await site.chat(chat_template="{% for"))
    assert error["param"] == "chat_template"
    assert error_of(await site.chat(chat_template=""))["param"] == "messages"
    assert (await site.chat(chat_template="{{ messages[0]['content'] }}")).status_code == 200


@run_async
async def test_no_alternatives_need_no_logprobs(site: Site) -> None:
    assert (await site.chat(top_logprobs=0)).status_code == 200
    assert error_of(await site.chat(top_logprobs=1))["param"] == "top_logprobs"


@run_async
async def test_prompts_times_answers_have_a_limit(site: Site) -> None:
    error = error_of(await site.complete(["a"] * 33, n=128))
    assert error["param"] == "n"
    assert "4096" in error["message"]
    assert site.engine.submits == []


@run_async
async def test_what_would_have_no_effect_is_refused(site: Site) -> None:
    alone = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    for answer in (await site.complete(**alone), await site.chat(**alone)):
        assert error_of(answer)["param"] == "stream_options.continuous_usage_stats"
    papers = [{"title": "a", "text": "b"}]
    assert error_of(await site.chat(documents=papers))["param"] == "documents"
    shown = "{% for d in documents %}{{ d.title }}{{ d.text }}{% endfor %}"
    assert (await site.chat(documents=papers, chat_template=shown)).status_code == 200
    assert site.engine.submits[0].prompt == tuple(site.tokenizer.encode("ab", add_special=False))
