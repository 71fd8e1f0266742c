"""Streaming attention: the first N and the last W tokens, asked for by flags."""

from pathlib import Path

import numpy as np
import pytest

from headrace import LLM, SamplingParams
from headrace.checkpoint import open_checkpoint, open_configured
from headrace.config import EngineConfig
from headrace.engine.memory import make_plan
from headrace.errors import ConfigError
from headrace.models.spec import Layer
from headrace.ops.backends import open_backend
from headrace.ops.spec import KVGroup
from tests.models.convert import convert
from tests.models.forward import cpu_levels, logits
from tests.models.test_parity import FAMILIES

LLAMA = str(FAMILIES / "llama")


def test_layers_and_groups() -> None:
    config = EngineConfig(model=LLAMA, attention_sinks=4, attention_window=20)
    model = open_configured(config).model()
    assert model.spec.layers == (Layer(20, "global", 4),) * 2
    assert model.groups == (KVGroup("window-4+20", (0, 1), 20, 1, 4),)
    assert model.notes == ("attention sees the first 4 and the last 20 tokens, as asked",)
    gemma = EngineConfig(model=str(FAMILIES / "gemma3"), attention_window=20)
    assert [group.window for group in open_configured(gemma).model().groups] == [11, 20]


@pytest.mark.parametrize("backend", ["reference", *(["cpu"] if cpu_levels() else [])])
def test_what_is_seen(backend: str) -> None:
    """With a window as long as the text nothing changes. With a shorter one the rows change from
    the first position that no longer sees all, and a change to a token shows at a row exactly
    where that row can see it (the model has one layer of reach each)."""
    runs = open_backend(backend)
    rng = np.random.default_rng(0)
    ids = rng.integers(3, 96, 64).tolist()
    plain = logits(runs, open_checkpoint(LLAMA).model(64), ids, 64)

    def streamed(sinks: int, window: int, tokens: list[int] = ids) -> np.ndarray:
        config = EngineConfig(model=LLAMA, attention_sinks=sinks, attention_window=window)
        return logits(runs, open_configured(config).model(64), tokens, 64)

    np.testing.assert_array_equal(streamed(0, 64), plain)
    short = streamed(4, 10)
    changed = (short != plain).any(axis=1)
    assert not changed[:14].any()  # positions below 4 + 10 see all before them
    assert changed[14:].all()
    other = [*ids[:20], (ids[20] + 1) % 96, *ids[21:]]
    differs = (streamed(4, 10, other) != short).any(axis=1)
    reach = 20 + 2 * 9  # two layers, each looks back nine tokens
    assert not differs[:20].any()
    assert differs[20 : 20 + 10].all()
    assert not differs[reach + 1 :].any()
    first = [ids[0] + 1, *ids[1:]]
    assert (streamed(4, 10, first) != short).any(axis=1).all()  # a sink is seen from everywhere
    assert not (streamed(0, 10, first) != streamed(0, 10)).any(axis=1)[19:].any()


@pytest.mark.parametrize("backend", ["reference", *cpu_levels()])
def test_a_row_depends_on_its_window_and_the_sinks_wherever_it_is(backend: str) -> None:
    """What makes generation endless: with the same first tokens and the same last ones the logits
    are the same at position 60 and far beyond the context, whatever lay between. The oracle is the
    shorter text, where all distances are those of a plain model."""
    runs = open_backend("cpu", backend) if backend != "reference" else open_backend(backend)
    sinks, window, reach = 4, 10, 2 * 9  # two layers, each looks back nine tokens
    rng = np.random.default_rng(1)
    first, last = rng.integers(3, 96, sinks).tolist(), rng.integers(3, 96, reach + 8).tolist()
    config = EngineConfig(model=LLAMA, attention_sinks=sinks, attention_window=window)
    checkpoint = open_configured(config)
    assert checkpoint.max_positions == 256
    found = []
    for between in (0, 30, 1500):
        ids = first + rng.integers(3, 96, between).tolist() + last
        found.append(logits(runs, checkpoint.model(2048), ids, 64)[-8:])
    scale = np.abs(found[0]).max()
    for rows in found[1:]:
        np.testing.assert_allclose(rows, found[0], rtol=0, atol=0.02 * scale)
    if backend == "reference":  # which does not quantize the rows of a matrix product
        np.testing.assert_allclose(found[2], found[0], rtol=0, atol=2e-5 * scale)


@pytest.mark.skipif(not cpu_levels(), reason="the CPU back-end is not built")
def test_generation_goes_on_past_the_context(tmp_path: Path) -> None:
    """350 tokens after 80 of a model of 256 positions: the same in steps of any size, alone or
    together, and the pages of a sequence do not grow with it."""
    model = str(tmp_path / "llama.gguf")
    convert(FAMILIES / "llama", FAMILIES / "llama" / "model.safetensors", model, vocabulary=96)
    options = {"attention_sinks": 4, "attention_window": 40, "max_model_len": 100_000}
    params = SamplingParams(max_tokens=350, temperature=0.8, seed=3, ignore_eos=True)
    prompts = [list(range(5, 85)), list(range(30, 60))]
    found = []
    for batched, threads in ((16, 1), (64, 2)):
        with LLM(
            model, backend="cpu", kv_cache_memory_bytes=1 << 20, max_num_batched_tokens=batched,
            threads=threads, max_num_seqs=2, **options,
        ) as llm:  # fmt: skip
            assert llm.loaded.plan.bytes["kv"] <= 1 << 20
            used = []
            step = llm.engine.step

            def watched(step=step, llm=llm, used=used):  # type: ignore[no-untyped-def]
                outputs = step()
                used.append(llm.engine.scheduler.stats().pages_used)
                return outputs

            llm.engine.step = watched  # type: ignore[method-assign]
            together = [list(one.outputs[0].token_ids) for one in llm.generate(prompts, params)]
            alone = [list(llm.generate([one], params)[0].outputs[0].token_ids) for one in prompts]
            assert together == alone
            # The window, the sinks, a step and a block at each end, of two sequences.
            assert max(used) <= 2 * ((40 + 4 + batched) // 16 + 4)
            found.append(together)
    assert found[0] == found[1]
    assert [len(one) for one in found[0]] == [350, 350]


def test_how_long_sequences_may_be() -> None:
    """Only where every distance stays within the context, and not where positions are learned."""
    backend = open_backend("reference")

    def planned(model: str, length: int, window: int | None) -> int:
        config = EngineConfig(
            model=model, attention_window=window, max_model_len=length, max_num_seqs=1
        )
        checkpoint = open_configured(config)
        return make_plan(config, checkpoint.model(length), backend, 1).max_model_len

    assert planned(LLAMA, 5000, 40) == 5000
    with pytest.raises(ConfigError, match=r"must be in \[1, 256\].*--attention-window goes beyond"):
        planned(LLAMA, 5000, None)
    with pytest.raises(ConfigError, match=r"must be in \[1, \d+\] for this model, not 5000$"):
        planned(str(FAMILIES / "gpt2"), 5000, 40)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_sinks": 4}, "attention_sinks: needs --attention-window"),
        ({"attention_sinks": -1}, "attention_sinks: must not be negative"),
        ({"attention_window": 0}, "attention_window: must be at least 1"),
        ({"attention_window": 253, "attention_sinks": 4}, "4 sinks and a window of 253 are more"),
    ],
)
def test_refusals(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_configured(EngineConfig(model=LLAMA, **options))
