"""Weight formats: bytes a block, and what the bytes mean as float32.

The block types are those of GGUF, and four of our own for other checkpoints: I4 (float32 scale and
minimum, then nibbles as in Q4_1), I4Z (float16 scale, int8 zero point, then nibbles), I8 (float32
scale, then int8) and I8M (with a minimum too). Each
GGUF decoder repeats the arithmetic of the `gguf` library in the same order, so that the result is
equal bit for bit (tests/models/test_formats.py). A decoder takes the raw blocks, uint8 [blocks,
block_bytes], and returns float32 [blocks, block_values].
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from headrace.ops.weights import Tensor

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]

_IQ4 = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)
_FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
_CHUNK_VALUES = 1 << 20


@dataclass(frozen=True)
class Format:
    """One way to store weights.

    block_values: values that share scales, along K. block_bytes: their bytes. number: the type
    number in a GGUF file, or None for formats of other checkpoints.
    """

    name: str
    block_values: int
    block_bytes: int
    number: int | None
    decode: Callable[[U8], F32]

    def row_bytes(self, values: int) -> int:
        """Bytes of a row of that many values. Raises ValueError where blocks do not fit evenly."""
        blocks, rest = divmod(values, self.block_values)
        if rest:
            raise ValueError(f"{values} values are not a multiple of the {self.block_values} "
                             f"of a {self.name} block")  # fmt: skip
        return blocks * self.block_bytes


def dequantize(tensor: Tensor) -> F32:
    """The values of a tensor, float32 of `tensor.shape`. Raises KeyError for an unknown format."""
    form = FORMATS[tensor.format]
    tensor = tensor.whole()
    if form.name == "F32":
        return tensor.data.view(np.float32).reshape(tensor.shape)
    blocks = tensor.data.reshape(-1, form.block_bytes)
    out = np.empty((len(blocks), form.block_values), np.float32)
    step = max(1, _CHUNK_VALUES // form.block_values)
    for start in range(0, len(blocks), step):
        out[start : start + step] = form.decode(blocks[start : start + step])
    return out.reshape(tensor.shape)


def _half(blocks: U8, offset: int) -> F32:
    """The float16 at a byte offset of every block, as a float32 column."""
    return blocks[:, offset : offset + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(packed: U8, run: int) -> U8:
    """[n, bytes] -> [n, 2 * bytes]: of each run of bytes first the low, then the high nibbles."""
    runs = packed.reshape(len(packed), -1, 1, run)
    shifts = np.array([0, 4], np.uint8).reshape(1, 1, 2, 1)
    return np.asarray((runs >> shifts) & 15, np.uint8).reshape(len(packed), -1)


def _pairs(packed: U8, run: int) -> U8:
    """[n, bytes] -> [n, 4 * bytes]: of each run of bytes the bit pairs, lowest first."""
    runs = packed.reshape(len(packed), -1, 1, run)
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    return np.asarray((runs >> shifts) & 3, np.uint8).reshape(len(packed), -1)


def _bits(packed: U8, run: int) -> U8:
    """[n, bytes] -> [n, 8 * bytes]: of each run of bytes the single bits, lowest first."""
    runs = packed.reshape(len(packed), -1, 1, run)
    shifts = np.arange(8, dtype=np.uint8).reshape(1, 1, 8, 1)
    return np.asarray((runs >> shifts) & 1, np.uint8).reshape(len(packed), -1)


def _f32(blocks: U8) -> F32:
    return blocks.copy().view(np.float32)


def _f16(blocks: U8) -> F32:
    return blocks.copy().view(np.float16).astype(np.float32)


def _bf16(blocks: U8) -> F32:
    return (blocks.copy().view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _f64(blocks: U8) -> F32:
    return blocks.copy().view(np.float64).astype(np.float32)


def _q4_0(blocks: U8) -> F32:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:], 16).astype(np.float32) - np.float32(8))


def _q4_1(blocks: U8) -> F32:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:], 16).astype(np.float32) + _half(blocks, 2)


def _five(blocks: U8, high: int) -> F32:
    """5-bit values: the fifth bits, one of each value, lie in 4 bytes at `high`, nibbles follow."""
    fifth = np.unpackbits(blocks[:, high : high + 4], axis=1, bitorder="little")
    return (_nibbles(blocks[:, high + 4 :], 16) | (fifth << 4)).astype(np.float32)


def _q5_0(blocks: U8) -> F32:
    return _half(blocks, 0) * (_five(blocks, 2) - np.float32(16))


def _q5_1(blocks: U8) -> F32:
    return _half(blocks, 0) * _five(blocks, 4) + _half(blocks, 2)


def _q8_0(blocks: U8) -> F32:
    return blocks[:, 2:].view(np.int8).astype(np.float32) * _half(blocks, 0)


def _q2_k(blocks: U8) -> F32:
    scale, minimum = _half(blocks, 80), _half(blocks, 82)
    scales = (scale * (blocks[:, :16] & 15).astype(np.float32)).reshape(-1, 16, 1)
    minima = (minimum * (blocks[:, :16] >> 4).astype(np.float32)).reshape(-1, 16, 1)
    quants = _pairs(blocks[:, 16:80], 32).reshape(-1, 16, 16).astype(np.float32)
    return (scales * quants - minima).reshape(-1, 256)


def _q3_k(blocks: U8) -> F32:
    low = _nibbles(blocks[:, 96:104], 8)
    high = _pairs(blocks[:, 104:108], 4)
    scales = (low | (high << 4)).astype(np.float32) - np.float32(32)
    scales = (_half(blocks, 108) * scales).reshape(-1, 16, 1)
    absent = _bits(blocks[:, :32], 32) ^ 1  # a clear mask bit subtracts 4
    quants = _pairs(blocks[:, 32:96], 32).astype(np.int8) - (absent << 2).astype(np.int8)
    return (scales * quants.reshape(-1, 16, 16).astype(np.float32)).reshape(-1, 256)


def _six_bit_scales(packed: U8) -> tuple[U8, U8]:
    """The 8 scales and 8 minima of 6 bits in the 12 bytes of a Q4_K or Q5_K block."""
    first, second, third = (packed[:, i : i + 4] for i in (0, 4, 8))
    scales = [first & 63, (third & 15) | ((first >> 2) & 48)]
    minima = [second & 63, (third >> 4) | ((second >> 2) & 48)]
    return np.concatenate(scales, axis=1), np.concatenate(minima, axis=1)


def _affine_k(blocks: U8, quants: U8) -> F32:
    """Q4_K and Q5_K: two-level scale and minimum over eight groups of 32."""
    scales, minima = _six_bit_scales(blocks[:, 4:16])
    scale = (_half(blocks, 0) * scales.astype(np.float32)).reshape(-1, 8, 1)
    minimum = (_half(blocks, 2) * minima.astype(np.float32)).reshape(-1, 8, 1)
    values = scale * quants.reshape(-1, 8, 32).astype(np.float32) - minimum
    return values.reshape(-1, 256)


def _q4_k(blocks: U8) -> F32:
    return _affine_k(blocks, _nibbles(blocks[:, 16:], 32))


def _q5_k(blocks: U8) -> F32:
    fifth = _bits(blocks[:, 16:48], 32)
    return _affine_k(
        blocks, np.bitwise_or(_nibbles(blocks[:, 48:], 32), fifth << 4, dtype=np.uint8)
    )


def _q6_k(blocks: U8) -> F32:
    quants = _nibbles(blocks[:, :128], 64) | (_pairs(blocks[:, 128:192], 32) << 4)
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    signed = quants.astype(np.float32) - np.float32(32)
    return (scales.reshape(-1, 16, 1) * signed.reshape(-1, 16, 16)).reshape(-1, 256)


def _iq4_nl(blocks: U8) -> F32:
    return _half(blocks, 0) * _IQ4[_nibbles(blocks[:, 2:], 16)]


def _iq4_xs(blocks: U8) -> F32:
    high = blocks[:, 2:4].copy().view(np.uint16) >> (2 * np.arange(8, dtype=np.uint16))
    low = _nibbles(blocks[:, 4:8], 1)
    scales = (low | ((high & 3) << 4).astype(np.uint8)).astype(np.float32) - np.float32(32)
    scales = (_half(blocks, 0) * scales).reshape(-1, 8, 1)
    return (scales * _IQ4[_nibbles(blocks[:, 8:], 16)].reshape(-1, 8, 32)).reshape(-1, 256)


def _mxfp4(blocks: U8) -> F32:
    # Half of 2 ** (e - 127), since the table holds doubled values; two exponents are subnormal.
    exponent = blocks[:, :1].astype(np.uint32)
    normal = np.maximum(exponent, 1) - 1 << 23
    scale = np.where(exponent < 2, np.uint32(0x200000) << np.minimum(exponent, 1), normal)
    return scale.astype(np.uint32).view(np.float32) * _FP4[_nibbles(blocks[:, 1:], 16)]


def _i4(blocks: U8) -> F32:
    columns = blocks[:, :8].copy().view(np.float32)
    return columns[:, :1] * _nibbles(blocks[:, 8:], 16).astype(np.float32) + columns[:, 1:]


def _i4z(blocks: U8) -> F32:
    zeros = blocks[:, 2:3].view(np.int8).astype(np.float32)
    return _half(blocks, 0) * (_nibbles(blocks[:, 3:], 16).astype(np.float32) - zeros)


def _i8(blocks: U8) -> F32:
    return blocks[:, :4].copy().view(np.float32) * blocks[:, 4:].view(np.int8).astype(np.float32)


def _i8m(blocks: U8) -> F32:
    columns = blocks[:, :8].copy().view(np.float32)
    return columns[:, :1] * blocks[:, 8:].view(np.int8).astype(np.float32) + columns[:, 1:]


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        form.name: form
        for form in (
            Format("F32", 1, 4, 0, _f32),
            Format("F16", 1, 2, 1, _f16),
            Format("BF16", 1, 2, 30, _bf16),
            Format("F64", 1, 8, 28, _f64),
            Format("Q4_0", 32, 18, 2, _q4_0),
            Format("Q4_1", 32, 20, 3, _q4_1),
            Format("Q5_0", 32, 22, 6, _q5_0),
            Format("Q5_1", 32, 24, 7, _q5_1),
            Format("Q8_0", 32, 34, 8, _q8_0),
            Format("Q2_K", 256, 84, 10, _q2_k),
            Format("Q3_K", 256, 110, 11, _q3_k),
            Format("Q4_K", 256, 144, 12, _q4_k),
            Format("Q5_K", 256, 176, 13, _q5_k),
            Format("Q6_K", 256, 210, 14, _q6_k),
            Format("IQ4_NL", 32, 18, 20, _iq4_nl),
            Format("IQ4_XS", 256, 136, 23, _iq4_xs),
            Format("MXFP4", 32, 17, 39, _mxfp4),
            Format("I4", 32, 24, None, _i4),
            Format("I4Z", 32, 19, None, _i4z),
            Format("I8", 32, 36, None, _i8),
            Format("I8M", 32, 40, None, _i8m),
        )
    }
)
"""Every format by name."""
