"""Block formats against the `gguf` library, bit for bit."""

import gguf
import numpy as np
import pytest

from headrace.ops.formats import FORMATS, dequantize
from headrace.ops.weights import Tensor

GGUF_FORMATS = [form for form in FORMATS.values() if form.number is not None]


@pytest.mark.parametrize("form", GGUF_FORMATS, ids=lambda form: form.name)
def test_random_blocks_decode_as_the_library_does(form) -> None:
    data = np.random.default_rng(form.number).integers(0, 256, (300, form.block_bytes), np.uint8)
    tensor = Tensor("x", form.name, (100, 3 * form.block_values), data.reshape(-1))
    kind = gguf.GGMLQuantizationType(form.number)
    with np.errstate(all="ignore"):  # random scales are infinite or NaN at times
        ours = dequantize(tensor)
        if form.name == "F64":
            wanted = data.view(np.float64).astype(np.float32)
        else:
            wanted = gguf.dequantize(data, kind)
    assert ours.dtype == np.float32
    np.testing.assert_array_equal(
        ours.view(np.uint32), wanted.reshape(tensor.shape).view(np.uint32)
    )


def test_sizes_are_those_of_the_library() -> None:
    sizes = {form.number: (form.block_values, form.block_bytes) for form in GGUF_FORMATS}
    assert sizes == {number: gguf.GGML_QUANT_SIZES[number] for number in sizes}


def test_many_blocks_decode_like_few() -> None:
    """The decoder works in chunks; their border must not show."""
    form = FORMATS["Q4_1"]
    rng = np.random.default_rng(0)
    data = rng.integers(0, 255, (40000, form.block_bytes), np.uint8)
    data[:, 1] &= 0x3B  # finite scales and minima
    data[:, 3] &= 0x3B
    whole = dequantize(Tensor("x", "Q4_1", (40000, 32), data.reshape(-1)))
    for start in (0, 32767, 32768, 39999):
        one = dequantize(Tensor("x", "Q4_1", (1, 32), data[start]))
        np.testing.assert_array_equal(whole[start], one[0])


def test_a_row_that_is_no_whole_number_of_blocks_is_refused() -> None:
    assert FORMATS["Q4_K"].row_bytes(512) == 288
    with pytest.raises(ValueError, match="576 values are not a multiple of the 256 of a Q4_K"):
        FORMATS["Q4_K"].row_bytes(576)
