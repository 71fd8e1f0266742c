"""/v1/completions over the fake engine: shapes, streams, stop strings, log-probabilities."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import OverloadError, RequestError
from headrace.serve.resolve import Served
from tests.serve.conftest import CONTEXT, Site, error_of, events, run_async

TEXTS = st.text(st.sampled_from('abc the in \n🙂é日\u0301"\\<|>'), min_size=1, max_size=30)


@run_async
async def test_a_whole_answer_has_the_exact_shape(site: Site) -> None:
    site.engine.cached_tokens = 2
    body = (await site.complete("the end")).json()
    usage = body.pop("usage")
    assert body.pop("id").startswith("cmpl-")
    assert isinstance(body.pop("created"), int)
    assert body.pop("system_fingerprint").startswith("headrace-")
    assert body == {
        "object": "text_completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "text": "Hello world.",
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
    }
    count = len(site.tokenizer.encode("Hello world.")) + 1  # and the end of the turn
    assert usage["completion_tokens"] == count
    assert usage["total_tokens"] == usage["prompt_tokens"] + count
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}


@pytest.mark.parametrize("burst", [1, 2, 5])
@run_async
async def test_a_stream_says_the_same_as_a_whole_answer(site: Site, burst: int) -> None:
    site.engine.burst = burst
    whole = (await site.complete(n=3, logprobs=2)).json()
    chunks = events(await site.complete(n=3, logprobs=2, stream=True))
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)
    for choice in whole["choices"]:
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        *before, last = [part["finish_reason"] for part in parts]
        assert set(before) <= {None}
        assert last == choice["finish_reason"] == "stop"
        for name in choice["logprobs"]:
            joined = [item for part in parts for item in part["logprobs"][name]]
            assert joined == choice["logprobs"][name]


@run_async
async def test_usage_comes_last_and_once_when_asked_for(site: Site) -> None:
    chunks = events(await site.complete(stream=True, stream_options={"include_usage": True}))
    assert [chunk for chunk in chunks if "usage" in chunk] == [chunks[-1]]
    assert chunks[-1]["choices"] == []
    count = len(site.tokenizer.encode("Hello world.")) + 1
    assert chunks[-1]["usage"]["completion_tokens"] == count
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(await site.complete(stream=True, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == count


@settings(max_examples=80, deadline=None)
@given(text=TEXTS, start=st.integers(0, 29), length=st.integers(1, 8), include=st.booleans(),
       burst=st.integers(1, 4), logprobs=st.sampled_from([None, 0, 2]))  # fmt: skip
def test_a_stop_string_anywhere_ends_the_text_before_it(
    tokenizer, text, start, length, include, burst, logprobs
):
    """Nothing of it is ever sent, and tokens with log-probabilities join to the text."""
    site = Site(tokenizer, Served("tiny", tokenizer, CONTEXT), text=text)
    site.engine.burst = burst
    stop = text[start % len(text) :][:length]

    @run_async
    async def both():
        fields = {"stop": [stop], "include_stop_str_in_output": include, "logprobs": logprobs}
        return (
            (await site.complete(**fields)).json(),
            events(await site.complete(stream=True, **fields)),
        )

    whole, chunks = both()
    choice = whole["choices"][0]
    right = text[: text.index(stop)] + (stop if include else "")
    assert choice["text"] == right
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == stop
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == right
    sizes = [len(tokenizer.encode(text[:1], add_special=False))]
    assert 1 <= whole["usage"]["completion_tokens"] <= len(tokenizer.encode(text)) + sizes[0]
    if logprobs is not None:
        shown = choice["logprobs"]
        assert "".join(shown["tokens"]) == right
        assert len(shown["tokens"]) == whole["usage"]["completion_tokens"]


@run_async
async def test_the_engine_is_told_of_a_stop_string_once_per_choice(site: Site) -> None:
    site.ends = False
    body = (await site.complete(stop="world", n=2)).json()
    assert [choice["text"] for choice in body["choices"]] == ["Hello ", "Hello "]
    (submit,) = site.engine.submits
    assert sorted(site.engine.finished) == [(submit.id, 0), (submit.id, 1)]
    assert site.engine.aborted == []


@run_async
async def test_min_tokens_keeps_stop_strings_away(site: Site) -> None:
    site.ends = False
    body = (await site.complete(stop="Hello", min_tokens=2, max_tokens=9)).json()
    assert body["choices"][0]["text"] == "Hello world."
    assert body["choices"][0]["stop_reason"] == "Hello"


@run_async
async def test_a_stop_token_is_named_and_its_text_left_out(site: Site) -> None:
    (dot,) = site.tokenizer.encode(".", add_special=False)
    choice = (await site.complete(stop_token_ids=[dot])).json()["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("Hello world", dot)
    fields = {"stop_token_ids": [dot], "include_stop_str_in_output": True}
    assert (await site.complete(**fields)).json()["choices"][0]["text"] == "Hello world."


@run_async
async def test_echo_with_logprobs_lines_up_with_the_text(site: Site) -> None:
    prompt = "\n1. the 🙂 <|im_end|>"
    for fields in ({"max_tokens": 1}, {"max_tokens": 0}, {"max_tokens": 50}):
        body = (await site.complete(prompt, echo=True, logprobs=1, **fields)).json()
        choice, usage = body["choices"][0], body["usage"]
        shown = choice["logprobs"]
        assert choice["text"].startswith(prompt)
        assert "".join(shown["tokens"]) == choice["text"]
        assert len(shown["tokens"]) == usage["total_tokens"]
        assert shown["token_logprobs"][0] is None
        assert all(value <= 0 for value in shown["token_logprobs"][1:])
        places = [0]
        for token in shown["tokens"]:
            places.append(places[-1] + len(token))
        assert shown["text_offset"] == places[:-1]
        if fields["max_tokens"] == 0:
            assert choice["text"] == prompt
            assert choice["finish_reason"] == "length"


@run_async
async def test_echo_streams_the_prompt_first(site: Site) -> None:
    chunks = events(await site.complete("the", echo=True, logprobs=1, stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "theHello world."
    tokens = [t for chunk in chunks for t in chunk["choices"][0]["logprobs"]["tokens"]]
    assert "".join(tokens) == "theHello world."


@run_async
async def test_prompts_in_every_form(site: Site) -> None:
    ids = site.tokenizer.encode("the end")
    for prompt, count in (
        ("the end", 1), (["the end"], 1), (ids, 1), ([ids, ids], 2), (["a", "b", "c"], 3),
    ):  # fmt: skip
        site.engine.submits.clear()
        body = (await site.complete(prompt, n=2)).json()
        assert [c["index"] for c in body["choices"]] == list(range(2 * count))
        assert len(site.engine.submits) == count
    assert site.engine.submits[0].prompt != site.engine.submits[1].prompt
    streamed = events(await site.complete(["a", "b"], n=2, stream=True))
    texts = dict.fromkeys(range(4), "")
    for chunk in streamed:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert set(texts.values()) == {"Hello world."}


@run_async
async def test_best_of_returns_the_likeliest(site: Site) -> None:
    words = ["in", "er", "the", "on"]
    site.engine.script = lambda submit, index: [*site.tokenizer.encode(words[index]), 2]
    means = []
    for word in words:
        ids = [*site.tokenizer.encode(word), 2]
        means.append(sum(-0.25 - token % 7 for token in ids) / len(ids))
    ranked = sorted(range(4), key=lambda index: (-means[index], index))
    body = (await site.complete(n=2, best_of=4)).json()
    assert [c["text"] for c in body["choices"]] == [words[index] for index in ranked[:2]]
    assert [c["logprobs"] for c in body["choices"]] == [None, None]
    assert error_of(await site.complete(n=1, best_of=2, stream=True))["param"] == "best_of"


@run_async
async def test_token_ids_are_returned_when_asked_for(site: Site) -> None:
    ids = [*site.tokenizer.encode("Hello world."), 2]
    choice = (await site.complete("the", return_token_ids=True)).json()["choices"][0]
    assert choice["token_ids"] == ids
    assert choice["prompt_token_ids"] == site.tokenizer.encode("the")
    chunks = events(await site.complete("the", return_token_ids=True, stream=True))
    assert [t for chunk in chunks for t in chunk["choices"][0]["token_ids"]] == ids
    shown = [chunk["choices"][0].get("prompt_token_ids") for chunk in chunks]
    assert shown == [site.tokenizer.encode("the"), *[None] * (len(chunks) - 1)]
    named = (await site.complete(logprobs=0, return_tokens_as_token_ids=True)).json()
    assert named["choices"][0]["logprobs"]["tokens"] == [f"token_id:{token}" for token in ids]


@run_async
async def test_prompt_logprobs(site: Site) -> None:
    choice = (await site.complete("the in", prompt_logprobs=2)).json()["choices"][0]
    ids = site.tokenizer.encode("the in")
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    assert len(rest) == len(ids) - 1
    assert all(str(token) in entry for token, entry in zip(ids[1:], rest, strict=True))
    assert error_of(await site.complete(prompt_logprobs=1, stream=True))["param"] == (
        "prompt_logprobs"
    )


@run_async
async def test_infinite_logprobs_are_written_as_numbers(site: Site) -> None:
    from headrace.engine.messages import Logprob
    from tests.serve import fake

    original = fake.score
    fake.score = lambda token, wanted: Logprob(token, float("-inf"), 9, ((5, float("-inf")),))
    try:
        response = await site.complete(logprobs=1)
    finally:
        fake.score = original
    value = json.loads(response.text, parse_constant=lambda name: pytest.fail(name))
    assert set(value["choices"][0]["logprobs"]["token_logprobs"]) == {-9999.0}


@run_async
async def test_a_refusal_of_the_engine_is_a_status_also_for_a_stream(site: Site) -> None:
    site.engine.refuse = RequestError("response_format", "response_format: no such keyword")
    for stream in (False, True):
        assert error_of(await site.complete(stream=stream))["param"] == "response_format"
    site.engine.refuse = OverloadError("the queue is full", retry_after=3)
    response = await site.complete(["a", "b"], stream=True)
    assert error_of(response, 503)["type"] == "ServiceUnavailableError"
    assert response.headers["retry-after"] == "3"


@run_async
async def test_an_error_in_the_middle_is_an_event_and_the_end_mark_follows(site: Site) -> None:
    site.engine.fail_after = 2
    chunks = events(await site.complete(stream=True))
    assert chunks[-1]["error"]["type"] == "InternalServerError"
    assert "the engine broke" in chunks[-1]["error"]["message"]
    assert "choices" in chunks[0]
    error_of(await site.complete(), 500)


@run_async
async def test_a_request_id_becomes_part_of_the_answer(site: Site) -> None:
    response = await site.send(
        "POST", "/v1/completions", json={"prompt": "a", "request_id": "mine"},
        headers={"X-Request-Id": "yours"},
    )  # fmt: skip
    assert response.json()["id"] == "cmpl-mine"
    assert response.headers["x-request-id"] == "yours"
