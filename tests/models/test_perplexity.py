"""The default model on English text against `transformers` in float32 (scripts/golden.py).

A short cut of what scripts/perplexity.py does for all 4,000 tokens.
"""

from pathlib import Path

import numpy as np
import pytest

from headrace.checkpoint import open_checkpoint
from headrace.ops.backends import open_backend
from tests.models.forward import cpu_levels, log_softmax, logits

GOLDEN = Path(__file__).parent.parent / "golden"
TOKENS = 64


def test_reference_agrees_with_transformers(smollm2_path: Path) -> None:
    golden = np.load(GOLDEN / "smollm2.npz")
    ids = golden["ids"][:TOKENS].tolist()
    model = open_checkpoint(str(smollm2_path)).model(TOKENS)
    rows = logits(open_backend("reference"), model, ids, 32)
    np.testing.assert_array_equal(rows.argmax(axis=-1), golden["argmax"][:TOKENS])
    chosen = log_softmax(rows)[np.arange(TOKENS - 1), ids[1:]]
    wanted = golden["logprob"][: TOKENS - 1]
    assert abs(np.exp(wanted.mean() - chosen.mean()) - 1) < 1e-3
    np.testing.assert_allclose(chosen, wanted, atol=2e-3)


def test_golden_ids_are_those_of_the_tokenizer(smollm2_path: Path) -> None:
    text = (GOLDEN / "english.txt").read_text()
    ids = open_checkpoint(str(smollm2_path)).tokenizer().encode(text)
    np.testing.assert_array_equal(ids[:4000], np.load(GOLDEN / "smollm2.npz")["ids"])


@pytest.mark.skipif(not cpu_levels(), reason="the CPU back-end is not built")
def test_the_cpu_backend_is_close_to_float32(smollm2_path: Path) -> None:
    """Weights as in the file, activations in 8 bits, K and V in float16. On all 4,000 tokens
    (scripts/perplexity.py): perplexity +0.35 %, mean KL 0.0021, the same token at 97 %."""
    golden = np.load(GOLDEN / "smollm2.npz")
    count = 256
    ids = golden["ids"][:count].tolist()
    model = open_checkpoint(str(smollm2_path)).model(count)
    rows = logits(open_backend("cpu"), model, ids, 128, "f16")
    logprobs = log_softmax(rows)
    chosen = logprobs[np.arange(count - 1), ids[1:]]
    assert abs(np.exp(golden["logprob"][: count - 1].mean() - chosen.mean()) - 1) < 0.01
    assert (rows.argmax(axis=-1) == golden["argmax"][:count]).mean() > 0.94
    picked = range(0, count, 16)
    kl = [
        (np.exp(golden["top_logprob"][i // 16])
         * (golden["top_logprob"][i // 16] - logprobs[i, golden["top_ids"][i // 16]])).sum()
        for i in picked
    ]  # fmt: skip
    assert np.mean(kl) < 0.005


@pytest.mark.skipif(not cpu_levels(), reason="the CPU back-end is not built")
def test_eight_bit_keys_and_values_do_not_add_up(smollm2_path: Path) -> None:
    """KL divergence of the next token against float32 K and V, at short and at longer contexts
    (bugs.md, B083): small, and no worse as the context grows."""
    ids = np.load(GOLDEN / "smollm2.npz")["ids"][:640].tolist()
    model = open_checkpoint(str(smollm2_path)).model(len(ids))
    plain, small = (
        log_softmax(logits(open_backend("cpu", threads=2), model, ids, 128, dtype)).astype(float)
        for dtype in ("f32", "int8")
    )
    divergence = (np.exp(plain) * (plain - small)).sum(axis=-1)
    near, far = divergence[8:72].mean(), divergence[-64:].mean()
    assert max(near, far) < 0.05
    assert far < 3 * near
