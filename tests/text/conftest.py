"""The default model's tokenizer, read once, and small tokenizers of each kind."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from headrace.models.gguf import GGUFFile
from headrace.text.bytelevel import byte_alphabet
from headrace.text.tokenizer import Tokenizer, from_gguf


@pytest.fixture(scope="session")
def smollm2_metadata(smollm2_path: Path) -> Mapping[str, Any]:
    return GGUFFile(smollm2_path).metadata


@pytest.fixture(scope="session")
def smollm2(smollm2_metadata: Mapping[str, Any]) -> Tokenizer:
    return from_gguf(smollm2_metadata)


def byte_level_metadata(pre: str = "smollm", **changes: Any) -> dict[str, Any]:
    """A byte-level BPE vocabulary of 256 bytes, some merges, two marks and a user-defined token."""
    alphabet = list(byte_alphabet().values())
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "Ċ Ċ", "1 2", "Ã ©", "a n"]
    pieces = ["<|end|>", "<|turn|>", "<tool>", *alphabet, *(m.replace(" ", "") for m in merges)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": [3, 3, 4] + [1] * (len(pieces) - 3),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
    } | changes


@pytest.fixture(scope="session")
def tiny() -> Tokenizer:
    return from_gguf(byte_level_metadata())
