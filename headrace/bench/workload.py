"""What a load client sends, and when."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_COMMON = (
    "the of and to in is it was for on are as with his they at be this have from or one had by "
    "word but not what all were we when your can said there use an each which she do how their if "
    "will up other about out many then them these so some her would make like him into time has "
    "look two more write go see number no way could people my than first water been call who oil "
    "its now find long down day did get come made may part over new sound take only little work "
    "know place year live me back give most very after thing our just name good sentence man think "
    "say great where help through much before line right too mean old any same tell boy follow "
    "came want show also around form three small set put end does another well large must big even "
    "such because turn here why ask went men read need land different "
    "home us move try kind hand picture"
)
WORDS = _COMMON.split()
"""Common words; with a space before it each is one token in most vocabularies."""


@dataclass(frozen=True)
class Ask:
    """One request: a prompt (text or token ids) and how many tokens to ask for."""

    prompt: str | list[int]
    output_len: int


class Source:
    """Draws prompts. form: 'text' (words) or 'ids' (token ids below `vocabulary`)."""

    def __init__(self, seed: int, form: str, vocabulary: int) -> None:
        self._random = random.Random(seed)
        self._form = form
        self._vocabulary = vocabulary

    def tokens(self, count: int) -> list[Any]:
        """`count` words, or ids."""
        if self._form == "ids":
            low = min(1000, self._vocabulary // 10)
            return [self._random.randrange(low, self._vocabulary) for _ in range(count)]
        return [self._random.choice(WORDS) for _ in range(count)]

    def prompt(self, tokens: list[Any]) -> str | list[int]:
        """Words or ids as a prompt."""
        return tokens if self._form == "ids" else " ".join(tokens)

    def length(self, mean: int, ratio: float) -> int:
        """A length within mean * (1 - ratio) and mean * (1 + ratio)."""
        if ratio == 0:
            return mean
        return max(1, self._random.randint(int(mean * (1 - ratio)), int(mean * (1 + ratio))))


def random_asks(
    source: Source, count: int, input_len: int, output_len: int, prefix_len: int, ratio: float
) -> list[Ask]:
    """Random prompts of `input_len` tokens after one shared prefix of `prefix_len`."""
    prefix = source.tokens(prefix_len)
    return [
        Ask(
            source.prompt([*prefix, *source.tokens(source.length(input_len, ratio))]),
            source.length(output_len, ratio),
        )
        for _ in range(count)
    ]


def prefix_asks(
    source: Source, count: int, prefixes: int, prefix_len: int, suffix_len: int, output_len: int
) -> list[Ask]:
    """Prompts that share `prefixes` different prefixes, in turn."""
    shared = [source.tokens(prefix_len) for _ in range(prefixes)]
    return [
        Ask(source.prompt([*shared[i % prefixes], *source.tokens(suffix_len)]), output_len)
        for i in range(count)
    ]


def file_asks(path: str, kind: str, count: int, output_len: int | None) -> list[Ask]:
    """Prompts of a file: ShareGPT's JSON, or JSON lines with `prompt` (and `output_len`).

    Raises OSError or ValueError.
    """
    text = Path(path).read_text(encoding="utf-8")
    asks: list[Ask] = []
    if kind == "sharegpt":
        for entry in json.loads(text):
            turns = entry.get("conversations") or []
            if len(turns) >= 2:
                length = output_len or max(4, len(turns[1]["value"]) // 4)
                asks.append(Ask(turns[0]["value"], length))
    else:
        for line in text.splitlines():
            if line.strip():
                entry = json.loads(line)
                asks.append(Ask(entry["prompt"], output_len or entry.get("output_len") or 128))
    if not asks:
        raise ValueError(f"{path} holds no prompts")
    return [asks[i % len(asks)] for i in range(count)]


def gaps(
    count: int, rate: float, burstiness: float, seed: int, ramp: tuple[float, float, str] | None
) -> Iterator[float]:
    """Seconds between requests: none for an infinite rate, else gamma with mean 1 / rate and shape
    `burstiness` (1: Poisson). ramp: (first rate, last rate, linear or exponential)."""
    chance = random.Random(seed)
    for index in range(count):
        now = rate
        if ramp is not None:
            share = index / max(1, count - 1)
            first, last, how = ramp
            linear = first + (last - first) * share
            now = linear if how == "linear" else first * (last / first) ** share
        if now == float("inf"):
            yield 0.0
        else:
            yield chance.gammavariate(burstiness, 1 / (now * burstiness))
