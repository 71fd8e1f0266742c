"""Vocabularies in the manner of SentencePiece: scored pieces of text, with a mark for spaces.

A piece spells a space as U+2581; `<0xE4>` is one byte, used for characters that no piece covers.
Encoding merges the two neighbours whose union is the piece of the highest score, again and again
(Kudo and Richardson, 2018): byte-pair encoding whose merges follow from the scores.
"""

import re
from collections.abc import Sequence

from tokenizers import models, normalizers

from headrace.errors import ModelError

SPACE = "\u2581"
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def piece_bytes(pieces: Sequence[str]) -> list[bytes]:
    """Bytes that each piece stands for."""
    result = []
    for piece in pieces:
        byte = BYTE_PIECE.fullmatch(piece) if piece.startswith("<0x") else None
        if byte is not None:
            result.append(bytes([int(byte[1], 16)]))
        else:
            result.append(piece.replace(SPACE, " ").encode())
    return result


def scored_merges(
    pieces: Sequence[str], scores: Sequence[float], mergeable: Sequence[bool]
) -> list[tuple[str, str]]:
    """All pairs of pieces that make a piece, the highest score first (of equal ones the lower id).
    Only mergeable pieces take part."""
    known = {piece for piece, may in zip(pieces, mergeable, strict=True) if may}
    order = sorted(
        (token for token, may in enumerate(mergeable) if may and len(pieces[token]) > 1),
        key=lambda token: -scores[token],
    )
    merges = []
    for token in order:
        piece = pieces[token]
        for cut in range(len(piece) - 1, 0, -1):
            left = piece[:cut]
            if left in known and piece[cut:] in known:
                merges.append((left, piece[cut:]))
    return merges


def piece_model(
    pieces: Sequence[str],
    scores: Sequence[float],
    mergeable: Sequence[bool],
    unknown: str | None,
) -> models.BPE:
    """The encoder's model. Raises ModelError."""
    vocabulary = {piece: token for token, piece in enumerate(pieces)}
    try:
        return models.BPE(
            vocab=vocabulary,
            merges=scored_merges(pieces, scores, mergeable),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"tokenizer.ggml.tokens are inconsistent: {error}") from error


def space_normalizer(prefix: bool) -> normalizers.Normalizer:
    """Spells spaces as pieces do. prefix: a text begins with one."""
    marked = normalizers.Replace(" ", SPACE)
    return normalizers.Sequence([normalizers.Prepend(SPACE), marked]) if prefix else marked
