"""A bounded reader of safetensors files: mapped, nothing copied, every size checked.

Layout: a little-endian u64 with the size of the header, the header as JSON, then the data.
"""

import json
import mmap
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from headrace.errors import ModelError
from headrace.ops.weights import Tensor

MAX_HEADER_BYTES = 100_000_000
MAX_DIMS = 8
DTYPES = {
    "F32": ("F32", 4), "F16": ("F16", 2), "BF16": ("BF16", 2), "F64": ("F64", 8),
    "F8_E4M3": ("F8_E4M3", 1), "U8": ("U8", 1), "I8": ("I8", 1), "I16": ("I16", 2),
    "I32": ("I32", 4), "I64": ("I64", 8), "BOOL": ("BOOL", 1),
}  # fmt: skip
"""dtype in the file -> (our format name, bytes a value). Integer types occur in quantized
checkpoints only and are no weight formats by themselves."""


def read(path: Path) -> dict[str, Tensor]:
    """The tensors of one file as views of it. Raises ModelError naming file and tensor."""
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        reason = "the file is empty" if isinstance(error, ValueError) else error.strerror
        raise ModelError(f"{path}: cannot be read: {reason}") from None
    if len(data) < 8:
        raise ModelError(f"{path}: {len(data)} bytes are no safetensors file")
    size = int.from_bytes(data[:8], "little")
    if size > min(len(data) - 8, MAX_HEADER_BYTES):
        raise ModelError(
            f"{path}: header of {size} bytes does not fit the file of {len(data)} bytes; "
            "it is damaged or was not downloaded completely"
        )
    header = _header(path, data[8 : 8 + size])
    base = 8 + size
    whole = np.frombuffer(data, np.uint8)
    return {
        name: _tensor(path, name, entry, whole[base:])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _header(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        header = json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: the header is not valid JSON ({error})") from None
    if not isinstance(header, dict):
        raise ModelError(f"{path}: the header is not a JSON object")
    return header


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key appears twice")
    return found


def _tensor(
    path: Path, name: str, entry: Any, data: "np.ndarray[Any, np.dtype[np.uint8]]"
) -> Tensor:
    def fail(message: str) -> ModelError:
        return ModelError(f"{path}: tensor {name[:200]!r}: {message}")

    if not isinstance(entry, dict):
        raise fail("its entry is not an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise fail(f"dtype {str(dtype)[:40]!r} is not supported")
    if not _naturals(shape) or len(shape) > MAX_DIMS:
        raise fail("its shape is not a list of a few sizes")
    if not _naturals(offsets) or len(offsets) != 2:
        raise fail("data_offsets is not a pair of offsets")
    form, size = DTYPES[dtype]
    for dim in shape:
        size *= dim
    start, end = offsets
    if end - start != size or end > len(data):
        raise fail(
            f"{size} bytes by shape, {end - start} by offsets, {len(data)} in the file; "
            "it is damaged or was not downloaded completely"
        )
    return Tensor(name, form, tuple(shape), data[start:end])


def _naturals(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in value
    )
