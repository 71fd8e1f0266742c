"""The offline API on the default model."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import LLM, SamplingParams
from headrace.errors import RequestError

PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    with LLM(str(smollm2_path), max_model_len=512) as model:
        yield model
        model.engine.scheduler.check()
        assert not model.engine.has_work


def greedy(**more: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 24, "ignore_eos": True, **more})  # type: ignore[arg-type]


def test_prompts_of_every_form_together_equal_alone(llm: LLM) -> None:
    ids = llm.tokenizer.encode("Water runs")
    together = llm.generate([PROMPT, ids, "One, two,"], greedy())
    for prompt, found in zip((PROMPT, ids, "One, two,"), together, strict=True):
        (alone,) = llm.generate(prompt, greedy())
        assert alone.outputs == found.outputs
        assert found.finished
        assert len(found.outputs[0].token_ids) == 24
    assert "Paris" in together[0].outputs[0].text


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    (whole,) = llm.generate(PROMPT, greedy())
    text = whole.outputs[0].text
    for start in range(0, 40, 7):
        stop = text[start : start + 5]
        (cut,) = llm.generate(PROMPT, greedy(stop=stop))
        assert cut.outputs[0].text == text[: text.index(stop)]
        assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
        (kept,) = llm.generate(PROMPT, greedy(stop=stop, include_stop_str_in_output=True))
        assert kept.outputs[0].text == text[: text.index(stop) + len(stop)]


def test_no_stop_string_counts_before_min_tokens(llm: LLM) -> None:
    (whole,) = llm.generate(PROMPT, greedy())
    early = whole.outputs[0].text[:4]
    (found,) = llm.generate(PROMPT, greedy(stop=early, min_tokens=24))
    assert found.outputs[0].text == whole.outputs[0].text
    assert found.outputs[0].finish_reason == "length"


def test_streamed_pieces_join_to_the_whole_and_leaving_early_frees_it(llm: LLM) -> None:
    (whole,) = llm.generate(PROMPT, greedy())
    assert "".join(llm.stream(PROMPT, greedy())) == whole.outputs[0].text
    for _ in llm.stream(PROMPT, greedy()):
        break
    while llm.engine.has_work:
        llm.engine.step()
    assert llm.get_metrics()["pages_used"] == 0


def test_best_of_returns_the_likeliest(llm: LLM) -> None:
    drawn = SamplingParams(temperature=1.5, max_tokens=8, seed=3, ignore_eos=True, logprobs=0)
    (every,) = llm.generate(PROMPT, SamplingParams(**{**drawn.__dict__, "n": 4}))
    (best,) = llm.generate(PROMPT, SamplingParams(**{**drawn.__dict__, "n": 2, "best_of": 4}))
    means = [sum(e.logprob for e in o.logprobs or ()) / 8 for o in every.outputs]
    order = sorted(range(4), key=lambda index: -means[index])
    assert [o.token_ids for o in best.outputs] == [every.outputs[i].token_ids for i in order[:2]]
    assert [o.index for o in best.outputs] == [0, 1]


def test_a_conversation_is_answered(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Say hello."}]
    (answer,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=16))
    assert answer.prompt_token_ids == llm.chat_ids(messages)
    assert answer.outputs[0].text


def test_refusals_name_the_field_and_run_nothing(llm: LLM) -> None:
    for bad in ([], [10**6], "x" * 9999):
        with pytest.raises(RequestError) as refused:
            llm.generate([PROMPT, bad], greedy())
        assert refused.value.field == "prompt"
    with pytest.raises(TypeError, match="unknown option 'threds'"):
        LLM(threds=2)
    assert not llm.engine.has_work
