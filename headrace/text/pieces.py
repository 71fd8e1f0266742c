"""Vocabularies in the manner of SentencePiece: pieces of text with a mark for spaces.

A piece spells a space as U+2581; `<0xE4>` is one byte, used for characters that no piece covers.
"""

import re

SPACE = "\u2581"
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def piece_bytes(pieces: list[str]) -> list[bytes]:
    """Bytes that each piece stands for."""
    result = []
    for piece in pieces:
        byte = BYTE_PIECE.fullmatch(piece) if piece.startswith("<0x") else None
        if byte is not None:
            result.append(bytes([int(byte[1], 16)]))
        else:
            result.append(piece.replace(SPACE, " ").encode())
    return result
