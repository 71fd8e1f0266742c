"""The default model's tokenizer, read once, and small tokenizers of each kind."""

import random
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


ALPHABETS = (
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "0123456789٣४５Ⅷ½²",
    " \t\n\r\u00a0\u2003\u3000\u200b",
    "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~«»¿…—€",
    "àéîõüßøñçžłıŞğÆœ",
    "абвгдЕЖЗ αβγδΩ אבגד עברית ابتث",
    "你好世界日本語のテキスト한국어",
    "👍🏽🎉😀👩\u200d💻🇫🇷\ufe0f\u0301\u0308e\u0301",
)
SNIPPETS = (
    "don't we'll I'M they'Re it's 'tis",
    "def f(x):\n    return x ** 2  # square\n",
    "\r\n\r\n  \t x\r\n",
    "{'a': [1, 2.50, -3e10], \"b\": null}",
    "https://example.org/a?b=c&d=%20#e",
    "3.14159 1,000,000 2024-01-31 0x1F600",
    "<div class='x'>&nbsp;</div>",
    "...!!!??? --- ___ ===",
    "naïve café — “quoted” ‘text’",
    'print("héllo")\n\n\nfor i in range(10):\n\tpass',
)


def varied_texts(count: int, marks: tuple[str, ...] = (), seed: int = 0) -> list[str]:
    """Texts that mix scripts, digits, code, emoji, odd spaces, line ends and marks."""
    draw = random.Random(seed)
    texts = []
    for _ in range(count):
        parts = []
        for _ in range(draw.randint(1, 7)):
            kind = draw.random()
            if marks and kind < 0.08:
                parts.append(draw.choice(marks))
            elif kind < 0.3:
                parts.append(draw.choice(SNIPPETS))
            elif kind < 0.45:
                parts.append(" " * draw.randint(1, 6))
            else:
                alphabet = draw.choice(ALPHABETS)
                parts.append("".join(draw.choices(alphabet, k=draw.randint(1, 12))))
        texts.append("".join(parts))
    return texts
