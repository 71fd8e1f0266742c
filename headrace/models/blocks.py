"""Integer codes with scales as blocks of a weight format, and floats quantized to blocks.

A checkpoint's own layout (GPTQ, AWQ, compressed-tensors) becomes the format that holds its values
exactly at the fewest bytes, so that back-ends need to know no layouts but those of `ops.formats`.
Nothing is converted here at once: the tensors are recipes that a back-end has made, a weight at a
time, while it loads.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.ops.formats import FORMATS, dequantize
from headrace.ops.weights import Tensor, recipe

GROUP = 32
U8 = npt.NDArray[np.uint8]
I16 = npt.NDArray[np.int16]
F32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Codes:
    """A weight (codes - zeros) * scales of N rows and K columns, read by rows.

    Each function takes (start, stop), start a multiple of 32. codes: [n, K], each in
    [0, 2 ** bits). scales: float32 [n, groups], zeros: [n, groups]; a group is K / groups
    neighbours of a row, or the columns k with group_of[k] where that is given. sources: the tensors
    that all this is read from.
    """

    name: str
    shape: tuple[int, int]
    bits: int
    groups: int
    codes: Callable[[int, int], I16]
    scales: Callable[[int, int], F32]
    zeros: Callable[[int, int], I16]
    sources: tuple[Tensor, ...]
    group_of: npt.NDArray[np.int64] | None = None


def tensor(name: str, form: str, shape: tuple[int, ...], data: npt.NDArray[np.generic]) -> Tensor:
    """A tensor over an array of any type."""
    return Tensor(name, form, shape, np.ascontiguousarray(data).reshape(-1).view(np.uint8))


def from_codes(weight: Codes) -> Tensor:
    """The weight in the smallest format that holds it exactly.

    Groups must be whole multiples of 32 neighbours; where they are not the weight becomes F16,
    rounded once. Reads the scales and zero points, to choose the format, but no codes.
    """
    rows, depth = weight.shape
    if not 1 <= weight.groups <= depth or not rows:
        raise ValueError(f"{weight.groups} groups in {rows} rows of {depth} values")
    group = depth // weight.groups
    if weight.group_of is not None or group % GROUP or depth % group:
        return _as_half(weight)
    scales = weight.scales(0, rows)
    exact = bool((scales.astype(np.float16).astype(np.float32) == scales).all())
    centred = bool((weight.zeros(0, rows) == 1 << weight.bits - 1).all())
    if weight.bits == 4:
        form = "I4" if not exact else "Q4_0" if centred else "I4Z"
    else:
        form = "I8M" if not centred else "Q8_0" if exact else "I8"

    def blocks(start: int, stop: int) -> U8:
        scale = np.repeat(weight.scales(start, stop), group // GROUP, axis=1)
        codes = weight.codes(start, stop)
        if weight.bits == 4:
            values, centre = _nibbles(codes.astype(np.uint8)), 0
        else:
            values = (codes - 128).astype(np.int8).reshape(stop - start, -1, GROUP).view(np.uint8)
            centre = 128
        if form in ("Q4_0", "Q8_0"):
            return _join(scale.astype(np.float16), values)
        if form == "I8":
            return _join(scale, values)
        zeros = np.repeat(weight.zeros(start, stop), group // GROUP, axis=1) - centre
        if form == "I4Z":
            return _join(scale.astype(np.float16), zeros.astype(np.int8), values)
        return _join(scale, -(scale * zeros.astype(np.float32)), values)

    size = FORMATS[form].row_bytes(depth)
    return recipe(weight.name, form, weight.shape, size, blocks, weight.sources)


def _as_half(weight: Codes) -> Tensor:
    """The same weight as F16."""
    depth = weight.shape[1]
    group_of = weight.group_of
    if group_of is None:
        group_of = np.arange(depth) // -(-depth // weight.groups)

    def halves(start: int, stop: int) -> U8:
        whole = weight.codes(start, stop) - weight.zeros(start, stop)[:, group_of]
        values = whole.astype(np.float32) * weight.scales(start, stop)[:, group_of]
        return half_bytes(values)

    return recipe(weight.name, "F16", weight.shape, 2 * depth, halves, weight.sources)


def half_bytes(values: F32) -> U8:
    """Float32 [n, K] rounded to nearest even float16, as bytes [n, 2 K].

    numpy converts one value at a time; values that are normal float16 go by integer arithmetic
    instead, which is several times as fast.
    """
    values = np.ascontiguousarray(values)
    bits = values.view(np.uint32)
    size = bits & np.uint32(0x7FFFFFFF)
    biases = np.uint32(112 << 10)  # of the exponents: 127 less 15
    out = ((size + np.uint32(0xFFF) + (size >> 13 & 1) >> 13) - biases).astype(np.uint16)
    out |= (bits >> 16).astype(np.uint16) & np.uint16(0x8000)
    other = size - np.uint32(0x38800000) >= np.uint32(0x477FF000 - 0x38800000)
    if other.any():
        out[other] = values[other].astype(np.float16).view(np.uint16)
    return out.view(np.uint8)


def quantize(source: Tensor, form: str) -> Tensor:
    """A float matrix [N, K] as Q8_0 or Q4_1, by rounding to nearest; K must be a multiple of 32.

    Q8_0: scale = max |w| / 127 of each 32 values, error at most half of that. Q4_1: scale and
    minimum from the range of each 32 values, error at most (max - min) / 30. Scales are rounded to
    float16 first, so the error includes that rounding.
    """
    rows, depth = source.shape

    def blocks(start: int, stop: int) -> U8:
        part = source.rows(start, stop).reshape(-1)
        values = dequantize(Tensor(source.name, source.format, (stop - start, depth), part))
        grouped = values.reshape(stop - start, -1, GROUP)
        made = _q8_0(grouped) if form == "Q8_0" else _q4_1(grouped)
        return made.reshape(stop - start, -1)

    size = FORMATS[form].row_bytes(depth)
    return recipe(source.name, form, (rows, depth), size, blocks, (source,))


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


def _join(*fields: npt.NDArray[np.generic]) -> U8:
    """Fields of each block as bytes one after the other: [N, bytes of a row]."""
    return _concatenate(*fields).reshape(len(fields[0]), -1)
