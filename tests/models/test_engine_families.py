"""Tiny checkpoints through the whole engine: padding is never sampled, windows keep to their size,
and every family answers the same alone, in a batch, with a cold and with a warm cache."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from headrace import LLM, SamplingParams
from headrace.checkpoint import open_checkpoint
from headrace.errors import RequestError
from headrace.ops.backends import open_backend
from tests.models.convert import convert
from tests.models.forward import cpu_levels, log_softmax, logits
from tests.models.test_parity import FAMILIES

BACKEND = "cpu" if cpu_levels() else "reference"


def tiny(folder: Path, case: str, vocabulary: int) -> str:
    path = folder / f"{case}.gguf"
    convert(FAMILIES / case, FAMILIES / case / "model.safetensors", path, vocabulary=vocabulary)
    return str(path)


def test_padded_ids_are_never_sampled_nor_listed(tmp_path: Path) -> None:
    """96 rows, 80 tokens (bugs.md, B070)."""
    model = tiny(tmp_path, "llama", 80)
    hot = SamplingParams(n=16, temperature=5.0, max_tokens=40, ignore_eos=True, logprobs=20, seed=7)
    with LLM(model, backend=BACKEND, kv_cache_memory_bytes=1 << 20) as llm:
        (output,) = llm.generate([[1, 2, 3]], hot)
        ids = [token for choice in output.outputs for token in choice.token_ids]
        assert len(ids) == 640
        assert max(ids) < 80
        assert len(set(ids)) > 60  # hot enough that padding would have shown
        for choice in output.outputs:
            listed = {token for entry in choice.logprobs for token, _ in entry.top}
            assert max(listed) < 80
        with pytest.raises(RequestError, match=r"token id 85 is outside the vocabulary \[0, 80\)"):
            llm.generate([[1, 85]], SamplingParams())


@pytest.mark.parametrize("case", ["gemma2", "gemma3", "mistral", "gpt2", "olmo2", "smollm3"])
def test_the_same_answer_alone_together_and_from_the_cache(case: str, tmp_path: Path) -> None:
    model = tiny(tmp_path, case, 96)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=24, ignore_eos=True)
    common = [5 + i % 80 for i in range(50)]
    prompts = [[*common, 7, i, i + 1] for i in range(6)]
    options = {"backend": BACKEND, "kv_cache_memory_bytes": 2 << 20, "max_model_len": 128}

    def tokens(llm: LLM, batch: list[list[int]]) -> list[list[int]]:
        return [list(output.outputs[0].token_ids) for output in llm.generate(batch, params)]

    with LLM(model, enable_prefix_caching=False, **options) as llm:
        alone = [tokens(llm, [prompt])[0] for prompt in prompts]
    with LLM(model, max_num_batched_tokens=32, **options) as llm:
        assert tokens(llm, prompts) == alone
        assert tokens(llm, prompts) == alone  # from a warm cache


def test_eight_bit_scales_survive_reuse_and_preemption(tmp_path: Path) -> None:
    """Keys and values of 8 bits with their scales: the same tokens alone, from the cache, and after
    a pool too small for all (bugs.md, B083)."""
    model = tiny(tmp_path, "llama", 96)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=40, ignore_eos=True)
    prompts = [[*range(5, 55), 7, i, i + 1] for i in range(6)]
    options = {"backend": BACKEND, "kv_cache_dtype": "int8", "max_model_len": 128}

    def tokens(llm: LLM, batch: list[list[int]]) -> list[list[int]]:
        return [list(output.outputs[0].token_ids) for output in llm.generate(batch, params)]

    with LLM(model, enable_prefix_caching=False, **options) as llm:
        alone = [tokens(llm, [prompt])[0] for prompt in prompts]
        page = llm.loaded.plan.layout.page_bytes
    with LLM(model, kv_cache_memory_bytes=11 * page, watermark=0.0, **options) as llm:
        assert tokens(llm, prompts) == alone
        assert tokens(llm, prompts[:1]) == alone[:1]
        stats = llm.engine.scheduler.stats()
        assert stats.preemptions > 0
        assert stats.prefix_hits > 0


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_a_folder_quantized_while_loading(quantization: str, tmp_path: Path) -> None:
    """The engine answers as the reference does, whatever became of the weights."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(FAMILIES / "starcoder2" / name, tmp_path / name)
    vocabulary = {chr(33 + i): i for i in range(90)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    checkpoint = open_checkpoint(str(tmp_path), quantization=quantization)
    model = checkpoint.model(64)
    assert model.tokens == 90
    prompt = list(range(5, 35))
    rows = logits(open_backend("reference"), model, prompt, len(prompt))[:, :90]
    options = {"quantization": quantization, "max_model_len": 64}
    with LLM(str(tmp_path), backend=BACKEND, kv_cache_memory_bytes=1 << 20, **options) as llm:
        params = SamplingParams(max_tokens=1, temperature=0, logprobs=5, prompt_logprobs=1)
        (output,) = llm.generate([prompt], params)
    scored = [entry.logprob for entry in output.prompt_logprobs[1:]]
    wanted = log_softmax(rows)[np.arange(len(prompt) - 1), prompt[1:]]
    # Activations in 8 bits: half a percent of the logits' spread each, see tests/ops/cases.py.
    error = np.abs(np.array(scored) - wanted) / rows.std()
    assert error.mean() < 0.01
    assert error.max() < 0.05
