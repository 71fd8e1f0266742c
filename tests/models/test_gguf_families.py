"""GGUF files of every family, written with the official library, against `transformers`."""

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from headrace.checkpoint import open_checkpoint
from headrace.ops.backends import open_backend
from tests.models.convert import convert
from tests.models.forward import logits
from tests.models.test_parity import FAMILIES

CASES = (
    "llama", "llama+linear", "llama+yarn", "llama+llama3", "phi3+longrope", "phi3+longrope-short",
    "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "phi4mini",
    "olmo2", "granite", "starcoder2", "gpt2", "smollm3",
)  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    folder = FAMILIES / case
    target = tmp_path / "tiny.gguf"
    convert(folder, FAMILIES / case.partition("+")[0] / "model.safetensors", target)
    golden = np.load(folder / "golden.npz")
    ids = golden["ids"].tolist()
    checkpoint = open_checkpoint(str(target))
    if case in ("gemma2", "gemma3"):  # GGUF has no key for query_pre_attn_scalar
        checkpoint = replace(checkpoint, spec=replace(checkpoint.spec, scale=20**-0.5))
    model = checkpoint.model(len(ids))
    ours = logits(open_backend("reference"), model, ids, len(ids))
    wanted = golden["logits"]
    error = np.abs(ours[golden["positions"]] - wanted).max() / np.abs(wanted).max()
    assert error < 1e-4


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "BF16"])
def test_matrices_of_mixed_types(kind: str, tmp_path: Path) -> None:
    """48 values are no multiple of a block, so such a file mixes its type with F32."""
    folder, target = FAMILIES / "starcoder2", tmp_path / "tiny.gguf"
    convert(folder, folder / "model.safetensors", target, gguf.GGMLQuantizationType[kind])
    checkpoint = open_checkpoint(str(target))
    assert {t.format for t in checkpoint.tensors.values()} == {kind, "F32"}
    golden = np.load(folder / "golden.npz")
    ids = golden["ids"].tolist()
    ours = logits(open_backend("reference"), checkpoint.model(len(ids)), ids, len(ids))
    wanted = golden["logits"]
    cosine = (ours * wanted).sum() / np.linalg.norm(ours) / np.linalg.norm(wanted)
    assert cosine > (0.98 if kind == "Q4_0" else 0.9999)
