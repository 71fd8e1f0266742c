"""Streamed text equals text decoded at once, however it is cut."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import RequestError
from headrace.text.detokenize import Detokenizer, StopStrings
from headrace.text.tokenizer import Tokenizer


def cut_up(draw: random.Random, ids: list[int]) -> list[list[int]]:
    pieces, at = [], 0
    while at < len(ids):
        size = draw.randint(1, 4)
        pieces.append(ids[at : at + size])
        at += size
    return pieces


@pytest.mark.parametrize("skip_special", [True, False])
@pytest.mark.parametrize("name", ["smollm2", "tiny"])
def test_pieces_equal_one_decode(
    name: str, skip_special: bool, request: pytest.FixtureRequest
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    draw = random.Random(0)
    lone_bytes = [i for i in range(tokenizer.vocabulary) if len(tokenizer.token_bytes(i)) == 1]
    special = sorted(tokenizer.special_ids)
    for _ in range(500):
        ids = [
            draw.choice((draw.choice(lone_bytes), draw.choice(special), draw.randrange(200)))
            for _ in range(draw.randint(1, 200))
        ]
        detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
        pieces = [detokenizer.push(piece) for piece in cut_up(draw, ids)]
        joined = "".join(pieces) + detokenizer.flush()
        assert joined == tokenizer.decode(ids, skip_special=skip_special)


def test_invalid_bytes_read_as_the_library_reads_them(smollm2: Tokenizer) -> None:
    draw = random.Random(1)
    for _ in range(200):
        ids = [draw.randrange(17, 700) for _ in range(30)]
        assert smollm2.decode(ids) == smollm2._backend.decode(ids)


def test_characters_are_never_split(smollm2: Tokenizer) -> None:
    text = "👩‍💻 naïve 日本語 👍🏽"
    ids = smollm2.encode(text)
    assert len(ids) > len(text.split())
    detokenizer = Detokenizer(smollm2)
    so_far = ""
    for token in ids:
        so_far += detokenizer.push([token])
        assert text.startswith(so_far)
    assert so_far == text
    assert detokenizer.flush() == ""


def test_unfinished_character_comes_out_at_the_end(tiny: Tokenizer) -> None:
    half = tiny.encode("é", specials=False)
    assert len(half) == 1
    lone = [i for i in range(tiny.vocabulary) if tiny.token_bytes(i) == b"\xc3"]
    detokenizer = Detokenizer(tiny)
    assert detokenizer.push(lone) == ""
    assert detokenizer.flush() == "\ufffd"


def first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """By definition: the stop that is complete first, the longest of those complete together."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


SMALL = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=6)


@given(SMALL, STOPS, st.integers(0, 1000), st.booleans())
def test_stop_strings_match_the_definition(
    text: str, stops: list[str], seed: int, include: bool
) -> None:
    wanted, stop = first_stop(text, stops)
    finder = StopStrings(stops, include)
    draw = random.Random(seed)
    sent, at, found = "", 0, None
    while at < len(text) and found is None:
        size = draw.randint(1, 4)
        safe, found = finder.push(text[at : at + size])
        at += size
        sent += safe
        assert (wanted + (stop or "" if include else "")).startswith(sent)
    if found is None:
        sent += finder.flush()
    assert (sent, found) == (wanted + (stop or "" if include else ""), stop)


@pytest.mark.parametrize("offset", range(20))
def test_no_part_of_a_stop_string_leaks(offset: int) -> None:
    text = "the quick brown fox jumps over"
    stop = text[offset : offset + 8]
    finder = StopStrings([stop])
    sent = ""
    for char in text:
        safe, found = finder.push(char)
        sent += safe
        assert text[: text.index(stop)].startswith(sent)
        if found:
            break
    assert sent == text[: text.index(stop)]
    assert finder.push("more") == ("", stop)


def test_held_text_comes_out_when_no_stop_came() -> None:
    finder = StopStrings(["END", "EDGE"])
    assert finder.push("the E") == ("the ", None)
    assert finder.push("N") == ("", None)
    assert finder.flush() == "EN"


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match="empty") as caught:
        StopStrings(["a", ""])
    assert caught.value.field == "stop"
