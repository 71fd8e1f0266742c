"""A textbook byte-level BPE, written from the definition: slow, plain, used only to compare."""

import re
import sys
import unicodedata
from functools import cache
from itertools import pairwise

WHITE = "\t\n\x0b\x0c\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"  # White_Space


@cache
def category_class(prefix: str) -> str:
    """The inside of a character class: all code points whose general category has a prefix."""
    ranges: list[list[int]] = []
    for code in range(sys.maxunicode + 1):
        if unicodedata.category(chr(code)).startswith(prefix):
            if ranges and ranges[-1][1] == code - 1:
                ranges[-1][1] = code
            else:
                ranges.append([code, code])
    return "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in ranges)


@cache
def words() -> re.Pattern[str]:
    """GPT-2's cut (Radford et al., 2019), in Python's `re`."""
    letter, number = category_class("L"), category_class("N")
    return re.compile(
        f"'s|'t|'re|'ve|'m|'ll|'d| ?[{letter}]+| ?[{number}]+| ?[^{WHITE}{letter}{number}]+"
        f"|[{WHITE}]+(?![^{WHITE}])|[{WHITE}]+"
    )


def cut_smollm(text: str) -> list[str]:
    """SmolLM's cut: each digit by itself, then GPT-2's."""
    pieces, run = [], ""
    for char in text:
        if unicodedata.category(char).startswith("N"):
            pieces += [run, char]
            run = ""
        else:
            run += char
    return [word for piece in [*pieces, run] for word in words().findall(piece)]


def merge(symbols: list[str], ranks: dict[tuple[str, str], int]) -> list[str]:
    """Merge the pair of lowest rank, leftmost first, until no pair has a rank."""
    while len(symbols) > 1:
        rank, at = min(
            (ranks.get(pair, sys.maxsize), index) for index, pair in enumerate(pairwise(symbols))
        )
        if rank == sys.maxsize:
            break
        symbols = [*symbols[:at], symbols[at] + symbols[at + 1], *symbols[at + 2 :]]
    return symbols


def spell(text: str) -> list[str]:
    """Bytes in GPT-2's printable alphabet, from its published definition."""
    own = set(range(ord("!"), ord("~") + 1)) | set(range(ord("¡"), ord("¬") + 1))
    own |= set(range(ord("®"), ord("ÿ") + 1))
    others = [byte for byte in range(256) if byte not in own]
    return [chr(b) if b in own else chr(256 + others.index(b)) for b in text.encode()]


class TextbookBPE:
    def __init__(self, tokens: list[str], merges: list[str], specials: list[str]) -> None:
        self.ids = {token: index for index, token in enumerate(tokens)}
        self.ranks = {tuple(pair.split(" ")): rank for rank, pair in enumerate(merges)}
        self.specials = specials
        self.words: dict[str, list[int]] = {}
        self.split = re.compile("(" + "|".join(map(re.escape, specials)) + ")")

    def encode(self, text: str, specials: bool = True) -> list[int]:
        ids = []
        for part in self.split.split(text) if specials else [text]:
            if specials and part in self.specials:
                ids.append(self.ids[part])
            else:
                for word in cut_smollm(part):
                    if word not in self.words:
                        symbols = merge(spell(word), self.ranks)
                        self.words[word] = [self.ids[symbol] for symbol in symbols]
                    ids += self.words[word]
        return ids
