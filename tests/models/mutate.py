"""Damaged checkpoints from a seed: every way a file can lie about itself."""

import random
import struct

HUGE = (0, 1, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 40, 1 << 62, (1 << 63) - 1, (1 << 64) - 1)
BAD_TEXT = (b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", b"\x00" * 4, b"\xf4\x90\x80\x80")


def mutate(raw: bytes, seed: int, header: int) -> tuple[str, bytes]:
    """(what was done, the damaged file). header: bytes of it that are not tensor data."""
    rng = random.Random(seed)
    data = bytearray(raw)
    at = rng.randrange(header)
    kind = rng.choice(("truncate", "size", "bytes", "flip", "text", "cut", "repeat", "swap"))
    match kind:
        case "truncate":
            return kind, raw[: rng.randrange(len(raw) - 1)]
        case "size":
            at = min(at, header - 8)
            data[at : at + 8] = struct.pack("<Q", rng.choice(HUGE))
        case "bytes":
            data[at : at + 16] = rng.randbytes(16)
        case "flip":
            for _ in range(rng.randrange(1, 9)):
                data[rng.randrange(header)] ^= 1 << rng.randrange(8)
        case "text":
            bad = rng.choice(BAD_TEXT)
            data[at : at + len(bad)] = bad
        case "cut":
            del data[at : at + rng.randrange(1, 200)]
        case "repeat":
            data[at:at] = data[at : at + rng.randrange(1, 200)]
        case "swap":
            other = rng.randrange(header)
            a, b = data[at : at + 8], data[other : other + 8]
            data[at : at + len(b)], data[other : other + len(a)] = b, a
    return kind, bytes(data)
