"""Integer codes with scales as blocks of a weight format, and floats quantized to blocks.

A checkpoint's own layout (GPTQ, AWQ, compressed-tensors) becomes the format that holds its values
exactly at the fewest bytes, so that back-ends need to know no layouts but those of `ops.formats`.
"""

import numpy as np
import numpy.typing as npt

from headrace.ops.formats import FORMATS, dequantize
from headrace.ops.weights import Tensor

GROUP = 32
U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]
_CHUNK_ROWS = 256


def tensor(name: str, form: str, shape: tuple[int, ...], data: npt.NDArray[np.generic]) -> Tensor:
    """A tensor over an array of any type."""
    return Tensor(name, form, shape, np.ascontiguousarray(data).reshape(-1).view(np.uint8))


def from_codes(
    name: str, codes: npt.NDArray[np.int16], scales: F32, zeros: npt.NDArray[np.int16], bits: int
) -> Tensor:
    """The weight (codes - zeros) * scales in the smallest format that holds it exactly.

    codes: [N, K]. scales: [N, G], zeros: [N, G], each for K / G values in a row. bits: 4 or 8; the
    codes lie in [0, 2 ** bits). Groups must be whole multiples of 32 values; where they are not
    the weight becomes F16, rounded once.
    """
    rows, depth = codes.shape
    group = depth // scales.shape[1]
    if group % GROUP or depth % group:
        return as_half(name, codes, scales, zeros, np.arange(depth) // group)
    repeat = group // GROUP
    scale = np.repeat(scales, repeat, axis=1)
    zero = np.repeat(zeros, repeat, axis=1)
    half = scale.astype(np.float16)
    exact = bool((half.astype(np.float32) == scale).all())
    if bits == 4:
        packed = _nibbles(codes.astype(np.uint8))
        if exact and bool((zeros == 8).all()):
            return _join(name, "Q4_0", (rows, depth), half, packed)
        return _join(name, "I4", (rows, depth), scale, _minimum(scale, zero), packed)
    centre = zero - 128
    values = (codes - 128).astype(np.int8).reshape(rows, -1, GROUP)
    if bool((centre == 0).all()):
        form, stored = ("Q8_0", half) if exact else ("I8", scale)
        return _join(name, form, (rows, depth), stored, values)
    return _join(name, "I8M", (rows, depth), scale, _minimum(scale, centre), values)


def as_half(
    name: str,
    codes: npt.NDArray[np.int16],
    scales: F32,
    zeros: npt.NDArray[np.int16],
    group_of: npt.NDArray[np.int64],
) -> Tensor:
    """The same weight as F16, where column k belongs to any group, group_of[k]."""
    out = np.empty(codes.shape, np.float16)
    for start in range(0, len(codes), _CHUNK_ROWS):
        rows = slice(start, start + _CHUNK_ROWS)
        whole = codes[rows] - zeros[rows][:, group_of]
        out[rows] = whole.astype(np.float32) * scales[rows][:, group_of]
    return tensor(name, "F16", codes.shape, out)


def quantize(source: Tensor, form: str) -> Tensor:
    """A float matrix [N, K] as Q8_0 or Q4_1, by rounding to nearest; K must be a multiple of 32.

    Q8_0: scale = max |w| / 127 of each 32 values, error at most half of that. Q4_1: scale and
    minimum from the range of each 32 values, error at most (max - min) / 30. Scales are rounded to
    float16 first, so the error includes that rounding.
    """
    rows, depth = source.shape
    row_bytes = FORMATS[form].row_bytes(depth)
    width = FORMATS[source.format].row_bytes(depth)
    out = np.empty((rows, row_bytes), np.uint8)
    for start in range(0, rows, _CHUNK_ROWS):
        count = min(_CHUNK_ROWS, rows - start)
        part = source.data[start * width : (start + count) * width]
        values = dequantize(Tensor(source.name, source.format, (count, depth), part))
        grouped = values.reshape(count, -1, GROUP)
        blocks = _q8_0(grouped) if form == "Q8_0" else _q4_1(grouped)
        out[start : start + count] = blocks.reshape(count, -1)
    return Tensor(source.name, form, source.shape, out.reshape(-1))


def _q8_0(values: F32) -> U8:
    scale = (np.abs(values).max(axis=-1) / 127).astype(np.float16)
    codes = _divide(values, scale.astype(np.float32))
    return _concatenate(scale, np.clip(np.rint(codes), -127, 127).astype(np.int8))


def _q4_1(values: F32) -> U8:
    low = values.min(axis=-1).astype(np.float16)
    scale = ((values.max(axis=-1) - low.astype(np.float32)) / 15).astype(np.float16)
    codes = _divide(values - low.astype(np.float32)[..., None], scale.astype(np.float32))
    packed = _nibbles(np.clip(np.rint(codes), 0, 15).astype(np.uint8).reshape(len(values), -1))
    return _concatenate(scale, low, packed)


def _divide(values: F32, scale: F32) -> F32:
    safe = np.where(scale == 0, np.float32(1), scale)[..., None]
    return np.asarray(values / safe, np.float32)


def _minimum(scale: F32, zero: npt.NDArray[np.int16]) -> F32:
    return -(scale * zero.astype(np.float32))


def _nibbles(codes: U8) -> U8:
    """[N, K] -> [N, K / 32, 16]: byte i of a block holds value i, and value i + 16 above it."""
    blocks = codes.reshape(len(codes), -1, 2, GROUP // 2)
    return np.asarray(blocks[:, :, 0] | (blocks[:, :, 1] << 4), np.uint8)


def _concatenate(*fields: npt.NDArray[np.generic]) -> U8:
    """Fields of each block, [N, B] or [N, B, n], as bytes one after the other: [N, B, bytes]."""
    rows, blocks = fields[0].shape[:2]
    parts = [
        np.ascontiguousarray(field).view(np.uint8).reshape(rows, blocks, -1) for field in fields
    ]
    return np.concatenate(parts, axis=2)


def _join(name: str, form: str, shape: tuple[int, int], *fields: npt.NDArray[np.generic]) -> Tensor:
    return tensor(name, form, shape, _concatenate(*fields))
