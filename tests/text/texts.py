"""Varied texts, the same on every run and machine, and a short name for what they encode to."""

import hashlib
import random
from collections.abc import Sequence

DIGEST = 6

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


def digest(ids: Sequence[int]) -> str:
    """A short name for a list of ids (DIGEST characters), to keep golden files small."""
    return hashlib.blake2b(",".join(map(str, ids)).encode(), digest_size=3).hexdigest()
