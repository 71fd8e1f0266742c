"""The default model on English text against `transformers` in float32 (scripts/golden.py).

A short cut of what scripts/perplexity.py does for all 4,000 tokens.
"""

from pathlib import Path

import numpy as np

from headrace.checkpoint import open_checkpoint
from headrace.ops.backends import open_backend
from tests.models.forward import log_softmax, logits

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
