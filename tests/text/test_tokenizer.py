"""The tokenizer agrees with a textbook implementation, and its rules hold."""

import logging
import re
import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ModelError, RequestError
from headrace.text.tokenizer import Tokenizer, any_of, from_gguf
from tests.text.conftest import byte_level_metadata
from tests.text.oracle import TextbookBPE
from tests.text.texts import varied_texts

PREFIX = "tokenizer.ggml."


@pytest.fixture(scope="module")
def textbook(smollm2_metadata: Mapping[str, Any]) -> TextbookBPE:
    tokens, kinds = smollm2_metadata[PREFIX + "tokens"], smollm2_metadata[PREFIX + "token_type"]
    specials = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    return TextbookBPE(list(tokens), list(smollm2_metadata[PREFIX + "merges"]), specials)


def test_agrees_with_textbook(smollm2: Tokenizer, textbook: TextbookBPE) -> None:
    texts = varied_texts(2000, tuple(textbook.specials))
    assert sum(any(mark in text for mark in textbook.specials) for text in texts) > 200
    for text in texts:
        assert smollm2.encode(text) == textbook.encode(text), text
        assert smollm2.encode(text, specials=False) == textbook.encode(text, False), text


def test_decodes_what_it_encoded(smollm2: Tokenizer) -> None:
    marks = tuple(smollm2.special_literals)
    for text in varied_texts(500, marks, seed=1):
        assert smollm2.decode(smollm2.encode(text), skip_special=False) == text
        assert smollm2.decode(smollm2.encode(text, specials=False)) == text


def test_facts_of_the_default_model(smollm2: Tokenizer) -> None:
    assert (smollm2.vocabulary, smollm2.bos, smollm2.eos) == (49152, 1, 2)
    assert not smollm2.add_bos
    assert smollm2.stop_ids == {0, 2}
    assert smollm2.special_ids == set(range(17))
    assert smollm2.encode("<|im_start|>a") == [1, *smollm2.encode("a")]
    assert smollm2.token_text(2) == "<|im_end|>"


def test_builds_fast(smollm2_metadata: Mapping[str, Any]) -> None:
    seconds = []
    for _ in range(3):
        start = time.process_time()
        from_gguf(smollm2_metadata)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.5


@pytest.mark.parametrize("text", ["a" * 20_000_000, "é " * 2_000_000])
def test_refuses_huge_text_at_once(smollm2: Tokenizer, text: str) -> None:
    start = time.process_time()
    with pytest.raises(RequestError, match=r"at least \d+ tokens, .* limit of 8191"):
        smollm2.encode(text, limit=8191)
    assert time.process_time() - start < 2


def test_one_letter_many_times(smollm2: Tokenizer) -> None:
    start = time.process_time()
    ids = smollm2.encode("a" * 200_000)
    assert smollm2.decode(ids) == "a" * 200_000
    assert time.process_time() - start < 5


def test_early_refusal_is_never_wrong(tiny: Tokenizer) -> None:
    for text in varied_texts(300, ("<|end|>", "<tool>"), seed=2):
        count = len(tiny.encode(text))
        assert len(tiny.encode(text, limit=count)) == count
        with pytest.raises(RequestError, match=f"limit of {count - 1}$"):
            tiny.encode(text, limit=count - 1)


def test_lone_surrogate_is_refused(tiny: Tokenizer) -> None:
    with pytest.raises(RequestError, match="surrogate at character 1") as caught:
        tiny.encode("a\ud800b", field="messages")
    assert caught.value.field == "messages"


def test_user_defined_tokens_always_match(tiny: Tokenizer) -> None:
    assert tiny.encode("<tool><|end|>") == [2, 0]
    assert tiny.encode("<tool><|end|>", specials=False)[0] == 2
    assert len(tiny.encode("<tool><|end|>", specials=False)) == 8
    assert tiny.decode([2, 0]) == "<tool>"


def test_begin_and_end_rules() -> None:
    both = from_gguf(
        byte_level_metadata(**{PREFIX + "add_bos_token": True, PREFIX + "add_eos_token": True})
    )
    plain = both.encode("hello", add_special=False)
    assert both.encode("hello") == [1, *plain, 0]
    assert both.add_bos
    assert from_gguf(byte_level_metadata("llama-bpe")).add_bos
    assert not from_gguf(byte_level_metadata("qwen2")).add_bos


@pytest.mark.parametrize("pre", [None, "no-such-family"])
def test_unknown_pre_tokenizer_warns(pre: str | None, caplog: pytest.LogCaptureFixture) -> None:
    metadata = byte_level_metadata()
    del metadata[PREFIX + "pre"]
    if pre is not None:
        metadata[PREFIX + "pre"] = pre
    with caplog.at_level(logging.WARNING):
        from_gguf(metadata)
    assert f"{PREFIX}pre" in caplog.text
    assert "missing" in caplog.text if pre is None else pre in caplog.text


def test_template_decides_what_ends_a_turn() -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}<|turn|>\n{% endfor %}"
    tokenizer = from_gguf(byte_level_metadata(**{"tokenizer.chat_template": template}))
    assert tokenizer.stop_ids == {0, 1}


def test_padding_at_the_end_is_no_token() -> None:
    metadata = byte_level_metadata()
    real = len(metadata[PREFIX + "tokens"])
    metadata[PREFIX + "tokens"] += [f"[PAD{i}]" for i in range(5)]
    metadata[PREFIX + "token_type"] += [5] * 5
    assert from_gguf(metadata).vocabulary == real


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": None}, "model is missing"),
        ({"model": "bert"}, "'bert' is not supported"),
        ({"tokens": None}, "tokens is missing"),
        ({"tokens": [1, 2]}, "tokens does not hold str"),
        ({"token_type": [1]}, "token_type has 1 entries"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["ab"]}, r"merges\[0\] 'ab' is not two pieces"),
        ({"merges": ["zz yy"]}, "merges do not fit"),
        ({"eos_token_id": 10_000}, "eos_token_id 10000 is not one of"),
        ({"bos_token_id": "x"}, "bos_token_id 'x' is not one of"),
    ],
)
def test_damaged_metadata_is_named(change: dict[str, Any], message: str) -> None:
    metadata = byte_level_metadata()
    for key, value in change.items():
        metadata.pop(PREFIX + key)
        if value is not None:
            metadata[PREFIX + key] = value
    with pytest.raises(ModelError, match=message):
        from_gguf(metadata)


def test_decode_refuses_ids_that_are_no_tokens(tiny: Tokenizer) -> None:
    with pytest.raises(RequestError, match="-1 is not in"):
        tiny.decode([3, -1])


@given(
    st.lists(st.text("ab<|.*", min_size=1, max_size=5), min_size=1, max_size=8), st.text("ab<|.*")
)
def test_expression_finds_the_longest_text_that_fits(literals: list[str], text: str) -> None:
    pattern = re.compile(any_of(literals))
    for start in range(len(text)):
        fitting = [literal for literal in literals if text.startswith(literal, start)]
        found = pattern.match(text, start)
        assert (found[0] if found else "") == max(fitting, key=len, default="")


def test_other_threads_run_while_a_long_text_is_encoded(smollm2: Tokenizer) -> None:
    done = threading.Event()
    encoding = threading.Event()
    ticks: list[bool] = []

    def watch() -> None:
        while not done.is_set():
            time.sleep(0.001)
            ticks.append(encoding.is_set())

    watcher = threading.Thread(target=watch)
    watcher.start()
    encoding.set()
    smollm2.encode("hello world " * 40_000)
    done.set()
    watcher.join()
    assert sum(ticks) > 5
