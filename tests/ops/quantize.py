"""Weights in every format, for tests: random floats where a quantizer exists, else random blocks.

A block of random bytes is valid in every format once its float16 scales (and MXFP4's exponent) are
sane; those are set here.
"""

import gguf
import numpy as np
from gguf.quants import quantize as gguf_quantize

from headrace.ops.formats import FORMATS
from headrace.ops.weights import Tensor, Weight

QUANTIZED = ("BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
"""Formats that the gguf library can write."""

SCALES = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": (), "I4Z": (0,),
}  # fmt: skip
"""Byte offsets of the float16 scales of a block."""

FLOAT_SCALES = {"I4": (0, 4), "I8": (0,), "I8M": (0, 4)}
"""Byte offsets of the float32 scales and minima of a block."""


def tensor(rng: np.random.Generator, form: str, shape: tuple[int, ...], name: str = "w") -> Tensor:
    """A random tensor of that format, values of the order of 1."""
    if form == "F64":
        data = rng.standard_normal(shape)
    elif form in SCALES or form in FLOAT_SCALES:
        data = _blocks(rng, form, shape)
    else:
        values = rng.standard_normal(shape).astype(np.float32)
        if form in QUANTIZED:
            data = gguf_quantize(values, gguf.GGMLQuantizationType[form])
        else:
            data = values.astype({"F32": np.float32, "F16": np.float16}[form])
    return Tensor(name, form, shape, np.ascontiguousarray(data).reshape(-1).view(np.uint8))


def _blocks(rng: np.random.Generator, form: str, shape: tuple[int, ...]) -> np.ndarray:
    kind = FORMATS[form]
    count = int(np.prod(shape)) // kind.block_values
    blocks = rng.integers(0, 256, (count, kind.block_bytes), dtype=np.uint8)
    if form == "MXFP4":
        blocks[:, 0] = rng.integers(124, 128, count)
    if form == "I4Z":
        blocks[:, 2] = rng.integers(0, 17, count)
    for offset in SCALES.get(form, ()):
        scales = rng.uniform(0.002, 0.01, count).astype(np.float16)
        blocks[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    for offset in FLOAT_SCALES.get(form, ()):
        scales = rng.uniform(0.002, 0.01, count).astype(np.float32)
        blocks[:, offset : offset + 4] = scales.view(np.uint8).reshape(-1, 4)
    return blocks


def weight(rng: np.random.Generator, name: str, form: str, shape: tuple[int, ...]) -> Weight:
    """A random weight of one part."""
    return Weight(name, (tensor(rng, form, shape, name),))


def exact(name: str, values: np.ndarray) -> Weight:
    """A float32 weight with the given values."""
    data = np.ascontiguousarray(values, np.float32)
    return Weight(name, (Tensor(name, "F32", data.shape, data.reshape(-1).view(np.uint8)),))
