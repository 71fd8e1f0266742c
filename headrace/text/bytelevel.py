"""The printable alphabet in which byte-level BPE vocabularies spell bytes.

Printable Latin-1 characters stand for themselves; the other 68 bytes are the characters from U+0100
on, in order (Radford et al., 2019).
"""


def byte_alphabet() -> dict[int, str]:
    """The character of each byte."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {byte: chr(byte) for byte in own}
    for byte in range(256):
        if byte not in alphabet:
            alphabet[byte] = chr(0x100 + len(alphabet) - len(own))
    return alphabet


def spelled_bytes(pieces: list[str]) -> list[bytes]:
    """Bytes of each piece, read in the alphabet; a piece with other characters is its UTF-8."""
    to_latin = {ord(char): byte for byte, char in byte_alphabet().items()}
    to_latin |= {code: 0x100 for code in range(256) if code not in to_latin}
    result = []
    for piece in pieces:
        try:
            result.append(piece.translate(to_latin).encode("latin-1"))
        except UnicodeEncodeError:
            result.append(piece.encode())
    return result
