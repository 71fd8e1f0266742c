"""A cut of the determinism table for a tiny checkpoint of each family."""

import json
import shutil
from pathlib import Path
from types import ModuleType

import pytest
import tokenizers

from headrace.checkpoint import open_checkpoint
from headrace.config import EngineConfig
from tests.models.test_parity import FAMILIES

CASES = sorted(
    path.name
    for path in FAMILIES.iterdir()
    if "+" not in path.name or path.name in ("qwen2+window", "phi3+longrope")
)
ROWS = (
    "alone, cache off",
    "beside 3 random others, 2 thread(s)",
    "steps of 16 tokens",
    "blocks of 64 tokens, cache warm",
    "pool so small that sequences are preempted",
)


def write_family(case: str, folder: Path) -> str:
    """The golden checkpoint of a family with a tokenizer of single characters."""
    shutil.copy(FAMILIES / case / "config.json", folder)
    shutil.copy(FAMILIES / case.partition("+")[0] / "model.safetensors", folder)
    words = [chr(33 + i) for i in range(94)] + ["Ġ"]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE({word: id for id, word in enumerate(words)}, [])
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


@pytest.mark.parametrize("case", CASES)
def test_tokens_and_bits_of_a_family(case: str, determinism: ModuleType, tmp_path: Path) -> None:
    model = write_family(case, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    length = min(192, config.get("max_position_embeddings", 192))
    base = EngineConfig(model, backend="cpu", max_model_len=length, max_num_batched_tokens=32)
    rows = list(
        determinism.table(
            base, ["auto"], [2], count=6, tokens=44, others=3, wanted=lambda row: row.name in ROWS
        )
    )
    assert len(rows) == len(ROWS)
    all_windows = all(layer.window for layer in open_checkpoint(model).spec.layers)
    for _, condition, equal, of, note in rows:
        assert equal == of == 12, f"{condition}: {note}"
        # A sequence that sees a short window everywhere does not grow, so nothing need give way.
        assert all_windows or "not small enough" not in note, condition
