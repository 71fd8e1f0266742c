"""/v1/chat/completions over the fake engine: shapes, log-probabilities, forced calls."""

import json
from typing import Any

import pytest

from headrace.serve.resolve import Served
from tests.serve.conftest import CONTEXT, Site, error_of, events, run_async
from tests.serve.vocabulary import small_tokenizer

TOOL = {
    "type": "function",
    "function": {
        "name": "set_fg",
        "strict": True,
        "parameters": {"type": "object", "properties": {"color": {"enum": ["red"]}}},
    },
}
NAMED = {"type": "function", "function": {"name": "set_fg"}}


@run_async
async def test_a_whole_answer_has_the_exact_shape(site: Site) -> None:
    body = (await site.chat("the end")).json()
    assert body.pop("id").startswith("chatcmpl-")
    assert isinstance(body.pop("created"), int)
    usage = body.pop("usage")
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    body.pop("system_fingerprint")
    assert body == {
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello world.", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
    }


@run_async
async def test_a_stream_opens_with_the_role_and_closes_once(site: Site) -> None:
    chunks = events(await site.chat("the end", stream=True, n=2))
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    for index in (0, 1):
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert parts[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(p["delta"].get("content") or "" for p in parts) == "Hello world."
        reasons = [part["finish_reason"] for part in parts]
        assert reasons == [None] * (len(parts) - 1) + ["stop"]


@run_async
async def test_max_tokens_defaults_to_the_rest_of_the_context(site: Site) -> None:
    await site.chat("the end")
    (submit,) = site.engine.submits
    assert submit.max_tokens == CONTEXT - len(submit.prompt)
    assert error_of(await site.chat(max_tokens=1, max_completion_tokens=2))["param"] == (
        "max_completion_tokens"
    )
    body = (await site.chat(max_completion_tokens=2)).json()
    assert body["usage"]["completion_tokens"] == 2
    assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
@run_async
async def test_logprobs_have_an_entry_per_token(site: Site, stream: bool) -> None:
    site.text = "é🙂 the"
    response = await site.chat(logprobs=True, top_logprobs=2, stream=stream)
    if stream:
        chunks = events(response)
        content = [
            e for c in chunks for e in (c["choices"][0]["logprobs"] or {}).get("content", [])
        ]
    else:
        content = response.json()["choices"][0]["logprobs"]["content"]
    ids = [*site.tokenizer.encode(site.text), 2]
    assert len(content) == len(ids)
    assert "".join(entry["token"] for entry in content) == site.text
    raw = b"".join(bytes(entry["bytes"]) for entry in content[:-1])
    assert raw.decode() == site.text
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    plain = (await site.chat(logprobs=True)).json()["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in plain)
    assert error_of(await site.chat(top_logprobs=2))["param"] == "top_logprobs"


@pytest.fixture
def roomy(site: Site) -> Site:
    """A site whose context holds the description of tools."""
    site.served = Served("tiny", site.tokenizer, 2048)
    return site


@run_async
async def test_a_forced_call_is_held_to_its_schema(roomy: Site) -> None:
    site = roomy
    site.text = '{"color":"red"}'
    fields = {"tools": [TOOL], "tool_choice": NAMED}
    choice = (await site.chat(**fields)).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "set_fg", "arguments": site.text}
    (submit,) = site.engine.submits
    assert submit.grammar is not None
    assert json.loads(submit.grammar.source) == TOOL["function"]["parameters"]
    chunks = events(await site.chat(stream=True, **fields))
    pieces = [
        call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])
    ]
    assert "".join(piece["function"]["arguments"] for piece in pieces) == site.text
    assert pieces[0]["id"]
    assert [piece["function"].get("name") for piece in pieces[1:]] == [None] * (len(pieces) - 1)
    assert {piece["index"] for piece in pieces} == {0}


@run_async
async def test_tool_choices_that_cannot_be_honoured_are_refused(roomy: Site) -> None:
    site = roomy
    for fields in (
        {"tool_choice": NAMED},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "none"}}},
        {"tools": [TOOL], "tool_choice": "sometimes"},
        {"tools": [TOOL], "tool_choice": NAMED, "response_format": {"type": "json_object"}},
    ):
        assert error_of(await site.chat(**fields))["param"] == "tool_choice"
    assert (await site.chat(tools=[TOOL], tool_choice="none")).status_code == 200


@run_async
async def test_text_parts_and_names_reach_the_prompt(site: Site) -> None:
    joined = [{"role": "user", "content": "ab\ncd"}]
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "cd"}]
    await site.chat(joined)
    await site.chat([{"role": "user", "name": "bob", "content": parts}])
    first, second = site.engine.submits
    assert first.prompt == second.prompt
    for content in ([], [{"type": "no_such_part", "x": 1}], [{"type": "image_url"}]):
        error_of(await site.chat([{"role": "user", "content": content}]))


@run_async
async def test_control_token_text_of_a_user_stays_text(site: Site) -> None:
    await site.chat("a<|im_end|>b")
    await site.chat("ab")
    first, second = site.engine.submits
    assert first.prompt.count(2) == second.prompt.count(2)
    assert first.prompt.count(1) == second.prompt.count(1)


@run_async
async def test_past_tool_calls_with_any_arguments(roomy: Site) -> None:
    site = roomy

    def talk(arguments: str) -> list[dict[str, object]]:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return [
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "sunny"},
        ]

    for arguments in ('{"city":"Rome"}', ""):
        assert (await site.chat(talk(arguments))).status_code == 200
    for arguments in ('"Rome"', "[1]", '{"city":'):
        error_of(await site.chat(talk(arguments)))


@run_async
async def test_conversations_that_cannot_be_rendered(site: Site) -> None:
    for talk in ([], [{"role": "nosuchrole", "content": "x"}], [{"role": "user"}]):
        error_of(await site.chat(talk))
    developer = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "a"}]
    assert (await site.chat(developer)).status_code == 200
    template = "{{ raise_exception('roles must alternate') }}"
    refused = error_of(await site.chat("a", chat_template=template))
    assert "roles must alternate" in refused["message"]


@run_async
async def test_continuing_the_final_message(site: Site) -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "the "}]
    body = (await site.chat(talk, continue_final_message=True, echo=True)).json()
    assert body["choices"][0]["message"]["content"] == "the Hello world."
    (submit,) = site.engine.submits
    assert site.tokenizer.decode(submit.prompt).endswith("assistant\nthe ")
    error_of(await site.chat(talk, continue_final_message=True, add_generation_prompt=True))


SECOND = {"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"city": {"$ref": "#/$defs/city"}},
    "$defs": {"city": {"type": "string"}},
}}}  # fmt: skip
CALLED = [("set_fg", '{"color": "red"}'), ("weather", '{"city": "Rome"}')]


def calls_of(chunks: list[Any]) -> list[tuple[str, str]]:
    """Calls joined by index, their shape checked."""
    found: dict[int, list[str]] = {}
    for chunk in chunks:
        for call in chunk["choices"][0]["delta"].get("tool_calls", []):
            if call["index"] not in found:
                assert call["id"]
                assert call["type"] == "function"
                found[call["index"]] = [call["function"]["name"], ""]
            else:
                assert "name" not in call["function"]
            found[call["index"]][1] += call["function"]["arguments"]
    return [(name, arguments) for _, (name, arguments) in sorted(found.items())]


@pytest.mark.parametrize("burst", [1, 4])
@pytest.mark.parametrize("choice", ["auto", None, "required"])
@run_async
async def test_several_calls(roomy: Site, choice: str | None, burst: int) -> None:
    roomy.engine.burst = burst
    objects = [f'{{"name": "{name}", "arguments": {text}}}' for name, text in CALLED]
    lead = None if choice == "required" else "I call:"
    roomy.text = "[" + ", ".join(objects) + "]"
    if choice != "required":
        roomy.text = f"{lead} " + "\n".join(f"<tool_call>\n{o}\n</tool_call>" for o in objects)
    fields = {"tools": [TOOL, SECOND], "tool_choice": choice}
    whole = (await roomy.chat(**fields)).json()["choices"][0]
    assert whole["finish_reason"] == "tool_calls"
    assert whole["message"]["content"] == lead
    calls = whole["message"]["tool_calls"]
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in calls] == CALLED
    assert len({call["id"] for call in calls}) == 2
    chunks = events(await roomy.chat(stream=True, **fields))
    assert calls_of(chunks) == CALLED
    content = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
    assert content == (lead or "")
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    (grammar,) = {submit.grammar for submit in roomy.engine.submits}
    if choice == "required":
        schema = json.loads(grammar.source)
        names = [o["properties"]["name"]["const"] for o in schema["items"]["anyOf"]]
        assert names == ["set_fg", "weather"]
        arguments = schema["items"]["anyOf"][1]["properties"]["arguments"]
        place = arguments["properties"]["city"]["$ref"]
        assert place == "#/items/anyOf/1/properties/arguments/$defs/city"
    else:
        assert grammar.kind == "structural_tag"  # set_fg is strict
    only = {**fields, "parallel_tool_calls": False}
    if choice != "required":
        calls = (await roomy.chat(**only)).json()["choices"][0]["message"]["tool_calls"]
        assert [call["function"]["name"] for call in calls] == ["set_fg"]


@run_async
async def test_free_choice_may_be_no_call(roomy: Site) -> None:
    choice = (await roomy.chat(tools=[TOOL], stop="world")).json()["choices"][0]
    assert choice["message"]["content"] == "Hello "
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"
    chunks = events(await roomy.chat(tools=[TOOL], stream=True))
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks) == "Hello world."


@run_async
async def test_a_template_without_tools_still_tells_of_them(roomy: Site) -> None:
    await roomy.chat(tools=[TOOL])
    system = {"role": "system", "content": "Be brief."}
    await roomy.chat([system, {"role": "user", "content": "a"}], tools=[TOOL])
    await roomy.chat(tools=[TOOL], tool_choice="none")
    first, second, none = (roomy.tokenizer.decode(s.prompt) for s in roomy.engine.submits)
    assert first.startswith("system\nYou may call")
    assert '"name": "set_fg"' in first
    assert second.startswith("system\nBe brief.\n\nYou may call")
    assert "set_fg" not in none
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    roomy.engine.submits.clear()
    await roomy.chat(
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b",
         "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": "d"}]
    )  # fmt: skip
    text = roomy.tokenizer.decode(roomy.engine.submits[0].prompt)
    assert 'b\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>' in text
    known = "{{ tools[0]['function']['name'] }}{{ messages[0]['content'] }}"
    await roomy.chat(tools=[TOOL], chat_template=known)
    assert roomy.tokenizer.decode(roomy.engine.submits[1].prompt) == "set_fgOne"


@pytest.mark.parametrize("burst", [1, 3, 50])
@pytest.mark.parametrize("opened", [False, True])
@run_async
async def test_thinking_is_told_apart(roomy: Site, opened: bool, burst: int) -> None:
    """Under both names; with tools, calls are looked for in the answer only."""
    roomy.engine.burst = burst
    thought = "hm <tool_call> hm"
    roomy.text = ("" if opened else "<think>\n") + thought + "\n</think>\n\nHello world."
    ending = "<think>\n" if opened else "{# </think> #}"
    fields = {"chat_template": "{{ messages[0]['content'] }}" + ending, "tools": [SECOND]}
    body = (await roomy.chat(**fields)).json()
    message = body["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == thought
    assert message["content"] == "Hello world."
    details = body["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] == len(roomy.tokenizer.encode(thought))
    options = {"include_usage": True}
    chunks = events(await roomy.chat(stream=True, stream_options=options, **fields))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Hello world."
    assert "".join(delta.get("reasoning") or "" for delta in deltas) == thought
    assert chunks[-1]["usage"] == body["usage"]


@run_async
async def test_a_constraint_begins_after_the_thinking(roomy: Site) -> None:
    """Where thinking ends with one token, and is still to come."""
    templates = "{{ messages[0]['content'] }}<think>", "{# <think> #}<think></think>"
    for tokenizer in (roomy.tokenizer, small_tokenizer(first="</think>")):
        roomy.served = Served("tiny", tokenizer, 2048)
        for template in templates:
            await roomy.chat(chat_template=template, response_format={"type": "json_object"})
    after = [submit.grammar.after for submit in roomy.engine.submits]
    assert after == [None, None, 0, None]
