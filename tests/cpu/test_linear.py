"""Linears against their own definition, and independence of rows, tiles and threads."""

import numpy as np
import pytest

from headrace.ops.cpu import _native
from headrace.ops.formats import FORMATS
from headrace.ops.weights import Weight
from tests.cpu.linears import LEVELS, ROWS, OneLinear, quantized_product
from tests.ops.quantize import tensor

every_level = pytest.mark.parametrize("level", LEVELS)
COLUMNS = 75
"""Four whole panels and a part."""


def inputs(depth: int) -> np.ndarray:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((200, depth)).astype(np.float32)
    x[3] = 0
    x[5, :32] *= 1000
    x[6] += 4  # far from zero mean: the minimum term matters
    return x


def weight(form: str, depth: int, columns: int = COLUMNS) -> Weight:
    return Weight("w", (tensor(np.random.default_rng(5), form, (columns, depth)),))


def assert_product(got: np.ndarray, w: Weight, x: np.ndarray) -> None:
    want = quantized_product(w, x)
    scale = np.abs(want).max(axis=1, keepdims=True) + 1e-6
    assert np.abs(got - want).max() <= 2e-5 * scale.max()
    assert (np.abs(got - want) / scale).max() <= 2e-4


@every_level
@pytest.mark.parametrize("form", FORMATS)
def test_every_format(level: str, form: str) -> None:
    depth = 256 if FORMATS[form].block_values > 1 else 77
    w, x = weight(form, depth), inputs(depth)
    linear = OneLinear(level, w, x)
    alone = np.concatenate([linear.run(np.array([i])) for i in range(max(ROWS))])
    assert_product(alone, w, x[: max(ROWS)])
    other = OneLinear(level, w, x, threads=2)
    for count in ROWS:
        rows = np.arange(max(ROWS))[-count:]
        assert linear.run(rows).tobytes() == alone[-count:].tobytes(), count
    for count in (1, 9, 130):
        rows = np.arange(max(ROWS))[-count:]
        assert other.run(rows).tobytes() == alone[-count:].tobytes(), count


@every_level
def test_parts_of_several_formats_in_another_order(level: str) -> None:
    rng, depth = np.random.default_rng(7), 96
    parts = tuple(tensor(rng, form, (n, depth)) for form, n in
                  (("Q4_1", 40), ("F16", 3), ("Q8_0", 17), ("Q4_0", 33)))  # fmt: skip
    w = Weight("w", parts, row_order=rng.permutation(93).astype(np.int32))
    x, bias = inputs(depth), rng.standard_normal(93).astype(np.float32)
    linear = OneLinear(level, w, x, bias=bias)
    rows = np.arange(10)
    order = w.row_order
    assert order is not None
    quantized = Weight("q", parts)
    want = quantized_product(quantized, x[rows])
    floats = slice(40, 43)
    want[:, floats] = quantized_product(Weight("f", parts[1:2]), x[rows])
    got = linear.run(rows)
    scale = np.abs(want).max()
    assert np.abs(got - (want[:, order] + bias)).max() <= 2e-5 * scale


@every_level
@pytest.mark.parametrize("threads", [1, 3])
def test_more_threads_than_cores_and_odd_panels(level: str, threads: int) -> None:
    x = inputs(64)
    w = weight("Q4_1", 64, columns=1000)
    rows = np.arange(190)
    one, many = OneLinear(level, w, x), OneLinear(level, w, x, threads=threads)
    want = one.run(rows).tobytes()
    for _ in range(20):
        assert many.run(rows).tobytes() == want


@every_level
def test_no_rows(level: str) -> None:
    assert OneLinear(level, weight("Q8_0", 32), inputs(32)).run(np.arange(0)).shape == (0, COLUMNS)


@pytest.mark.parametrize("form", [name for name, f in FORMATS.items() if f.block_values > 1])
def test_weights_are_kept_at_about_their_bytes_on_disk(form):
    """K blocks keep both levels of their scales, zero points stay bytes. Q2_K is the furthest off:
    half a bit, for scales and minima of a byte each. MXFP4 has float32 for its exponents."""
    rows, depth = 48, 512
    packed = _native.Weight([(form, rows, 0, False)], [], depth).bytes
    disk = rows * FORMATS[form].row_bytes(depth)
    assert packed <= disk * {"Q2_K": 1.2, "MXFP4": 1.2}.get(form, 1.05)
