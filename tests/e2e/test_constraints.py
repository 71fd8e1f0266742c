"""Constraints and clients on the real model: what is forced, what it costs, what can't be had."""

import json
from concurrent.futures import ThreadPoolExecutor

import openai
import pydantic
import pytest

from tests.e2e.conftest import Server

ASK = [{"role": "user", "content": "Reply with one short JSON object."}]
PROMPT = "The three primary colours are"


def test_metrics_tell_what_masks_cost_and_what_the_grammar_forced(server: Server) -> None:
    names = ("masks", "mask_seconds", "mask_hidden_seconds", "forced_tokens")

    def counts() -> dict[str, float]:
        return {name: server.metric(f"headrace:{name}_total") for name in names}

    before = counts()
    server.complete(PROMPT, max_tokens=8)
    assert counts() == before
    server.complete(PROMPT, max_tokens=40, structured_outputs={"regex": "[a-z]{9} and so forth"})
    spent = {name: value - before[name] for name, value in counts().items()}
    assert spent["masks"] >= 2
    assert 0 < spent["mask_seconds"] < 5
    assert 0 <= spent["mask_hidden_seconds"] <= spent["mask_seconds"]
    assert spent["forced_tokens"] >= 2


def test_wishes_that_exclude_each_other_end_their_request_alone(server: Server) -> None:
    the = server.post("/tokenize", prompt="the").json()["tokens"]
    for wishes in (
        {"structured_outputs": {"regex": "abc"}, "allowed_token_ids": the},
        {"structured_outputs": {"choice": ["yes"]}, "bad_words": ["yes", "y", "ye", "es", "s"]},
        {"structured_outputs": {"choice": ["yes", "no"]}, "allowed_token_ids": the, "logprobs": 1},
    ):
        answer = server.post("/v1/completions", prompt=PROMPT, max_tokens=8, **wishes)
        assert answer.status_code == 422, answer.text
        error = answer.json()["error"]
        assert error["param"].startswith("structured_outputs")
        assert "exclude each other" in error["message"]
        assert server.complete(PROMPT, max_tokens=2)["usage"]["completion_tokens"] == 2
    assert server.settled("vllm:num_requests_running", 0) == 0


def test_text_that_a_grammar_forces_is_what_sampling_would_write(server: Server) -> None:
    """With log-probabilities each token takes its step, without them forced ones are appended."""
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8},
              "population": {"type": "integer", "maximum": 999}, "large": {"type": "boolean"}},
              "required": ["city", "population", "large"],
              "additionalProperties": False}  # fmt: skip
    body = {"structured_outputs": {"json": schema}, "max_tokens": 48}
    forced = server.metric("headrace:forced_tokens_total")
    for place in ("Paris", "a village", "1234", "\u96e8"):
        prompt = f"Facts about {place} as JSON:"
        jumped, stepped = (
            server.complete(prompt, **body, **more) for more in ({}, {"logprobs": 0})
        )
        (one,), (other,) = jumped["choices"], stepped["choices"]
        assert (one["text"], one["finish_reason"]) == (other["text"], other["finish_reason"])
        count = stepped["usage"]["completion_tokens"]
        assert jumped["usage"]["completion_tokens"] == count
        assert len(other["logprobs"]["tokens"]) == count
        assert "".join(other["logprobs"]["tokens"]) == other["text"]
        cut = [
            server.complete(prompt, **body, stop="ulati", **more) for more in ({}, {"logprobs": 0})
        ]
        for answer in cut:
            assert answer["choices"][0]["text"] == one["text"][: one["text"].index("ulati")]
            assert answer["choices"][0]["stop_reason"] == "ulati"
        assert cut[0]["usage"] == cut[1]["usage"] | {
            "prompt_tokens_details": cut[0]["usage"]["prompt_tokens_details"]
        }
    assert server.metric("headrace:forced_tokens_total") > forced + 30


def test_eight_equal_greedy_requests_at_once_answer_as_one_alone(server: Server) -> None:
    def ask(_: int) -> str:
        answer = server.complete(PROMPT, max_tokens=64, ignore_eos=True, cache_salt="eight")
        return str(answer["choices"][0]["text"])

    alone = ask(0)
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(ask, range(8))) == {alone}


def test_the_openai_client_reads_every_kind_of_answer(server: Server) -> None:
    class Place(pydantic.BaseModel):
        name: str
        size: int

    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    (model,) = [card.id for card in client.models.list()]
    chat = client.chat.completions
    common = {"model": model, "messages": ASK, "max_tokens": 80, "temperature": 0}
    parsed = chat.parse(**common, response_format=Place).choices[0].message.parsed
    assert isinstance(parsed, Place)
    with chat.stream(**common, response_format=Place) as events:
        for _ in events:
            pass
        assert events.get_final_completion().choices[0].message.parsed == parsed
    tool = {"type": "function", "function": {"name": "paint", "strict": True,
            "parameters": {"type": "object", "properties": {"x": {"type": "integer"}},
                           "required": ["x"], "additionalProperties": False}}}  # fmt: skip
    for choice in ("required", {"type": "function", "function": {"name": "paint"}}):
        with chat.stream(**common, tools=[tool], tool_choice=choice) as events:
            for _ in events:
                pass
            answer = events.get_final_completion().choices[0]
        assert answer.finish_reason == "tool_calls"
        (call,) = answer.message.tool_calls
        assert isinstance(call.function.parsed_arguments["x"], int)
    texts = client.completions.create(model=model, prompt=["a", "b"], n=2, max_tokens=2, echo=True)
    assert [(c.index, c.text[0]) for c in texts.choices] == [(0, "a"), (1, "a"), (2, "b"), (3, "b")]
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("another")
    assert (missing.value.param, missing.value.type) == ("model", "NotFoundError")
    with pytest.raises(openai.BadRequestError) as wrong:
        chat.create(**{**common, "temperature": -1})
    assert wrong.value.param == "temperature"


def test_streamed_logprobs_of_characters_in_several_tokens_join_to_the_text(server: Server) -> None:
    body = {"messages": ASK, "max_tokens": 60, "temperature": 1, "seed": 4, "n": 2,
            "logprobs": True, "top_logprobs": 2,
            "structured_outputs": {"regex": "(😀|é|日){5}xyz"}}  # fmt: skip
    for more in ({}, {"stop": ["😀日", "yz"]}, {"stop": "é", "include_stop_str_in_output": True}):
        whole = server.post("/v1/chat/completions", **body, **more).json()
        lines = server.post("/v1/chat/completions", stream=True, **body, **more).text.split("\n\n")
        parts = [c for line in lines if line.startswith("data: {")
                 for c in json.loads(line[6:])["choices"]]  # fmt: skip
        for choice in whole["choices"]:
            own = [part for part in parts if part["index"] == choice["index"]]
            text, entries = choice["message"]["content"], choice["logprobs"]["content"]
            assert "".join(part["delta"].get("content", "") for part in own) == text
            assert [
                e for p in own for e in (p["logprobs"] or {"content": []})["content"]
            ] == entries
            assert "".join(entry["token"] for entry in entries) == text
            assert own[-1]["finish_reason"] == choice["finish_reason"] == "stop"
        count = sum(len(choice["logprobs"]["content"]) for choice in whole["choices"])
        assert whole["usage"]["completion_tokens"] == count
