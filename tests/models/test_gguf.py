"""The GGUF reader: what the official writer writes is read, and damage is named."""

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from headrace.errors import ModelError
from headrace.models.gguf import GGUFFile
from headrace.ops.formats import dequantize

VALUES: dict[str, tuple[str, Any]] = {
    "a.u8": ("add_uint8", 200), "a.i8": ("add_int8", -100), "a.u16": ("add_uint16", 60000),
    "a.i16": ("add_int16", -30000), "a.u32": ("add_uint32", 4_000_000_000),
    "a.i32": ("add_int32", -2_000_000_000), "a.u64": ("add_uint64", 1 << 63),
    "a.i64": ("add_int64", -(1 << 62)), "a.f32": ("add_float32", 0.25),
    "a.f64": ("add_float64", 0.1), "a.yes": ("add_bool", True),
    "a.text": ("add_string", "Grüße, 世界 🌍"), "a.words": ("add_array", ["", "é", "\n"]),
    "a.ints": ("add_array", [1, -2, 3]), "a.floats": ("add_array", [0.5, -1.5]),
    "a.flags": ("add_array", [True, False, True]),
}  # fmt: skip


def write(path: Path, tensors: dict[str, np.ndarray], **extra: Any) -> None:
    writer = gguf.GGUFWriter(path, "llama", **extra)
    for key, (method, value) in VALUES.items():
        getattr(writer, method)(key, value)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_every_kind_of_value_and_tensor(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    rng = np.random.default_rng(0)
    tensors = {
        "one": rng.standard_normal(7).astype(np.float32),
        "two": rng.standard_normal((3, 5)).astype(np.float16),
        "three": rng.standard_normal((2, 3, 4)).astype(np.float32),
    }
    write(path, tensors)
    file = GGUFFile(path)
    assert file.architecture == "llama"
    for key, (_, value) in VALUES.items():
        assert file.metadata[key] == value
        assert type(file.metadata[key]) is type(value)
    for name, values in tensors.items():
        assert file.tensors[name].shape == values.shape
        np.testing.assert_array_equal(dequantize(file.tensors[name]), values.astype(np.float32))


def test_tensors_are_views_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    write(path, {"one": np.ones(7, np.float32)})
    data = GGUFFile(path).tensors["one"].data
    assert data.base is not None
    assert not data.flags.writeable


def test_split_files_are_read_as_one(tmp_path: Path) -> None:
    tensors = {f"t{i}": np.full((4, 4), i, np.float32) for i in range(6)}
    whole = tmp_path / "m.gguf"
    write(whole, tensors, split_max_tensors=2)
    first = tmp_path / "m-00001-of-00003.gguf"
    file = GGUFFile(first)
    assert {name: float(dequantize(t)[0, 0]) for name, t in file.tensors.items()} == {
        f"t{i}": float(i) for i in range(6)
    }
    with pytest.raises(ModelError, match="open the first part, m-00001-of-00003"):
        GGUFFile(tmp_path / "m-00002-of-00003.gguf")
    (tmp_path / "m-00003-of-00003.gguf").unlink()
    with pytest.raises(ModelError, match=r"m-00003-of-00003\.gguf: cannot be read"):
        GGUFFile(first)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(
    tensors: int = 0, pairs: bytes = b"", count: int = 1, version: int = 3, magic: bytes = b"GGUF"
) -> bytes:
    key = text("general.architecture") + struct.pack("<I", 8) + text("llama")
    return magic + struct.pack("<IQQ", version, tensors, count) + key + pairs


def info(name: str = "w", dims: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


HUGE = 1 << 62
DAMAGE = {
    "not a GGUF file": b"PK\x03\x04" + bytes(60),
    "version 1 is not supported": header(version=1),
    "big-endian files are not supported": header(version=3 << 24),
    "tensor count at byte 16: 4611686018427387904 entries": header(tensors=HUGE),
    "metadata count .* entries do not fit": header(count=HUGE),
    "the key appears twice": header(
        pairs=text("general.architecture") + struct.pack("<I", 8) + text("x"), count=2
    ),
    "value type 77 is not known": header(pairs=text("k") + struct.pack("<I", 77), count=2),
    "a list of value type 9 is not supported": header(
        pairs=text("k") + struct.pack("<IIQ", 9, 9, 1) + bytes(50), count=2
    ),
    "k at byte .* entries do not fit": header(
        pairs=text("k") + struct.pack("<IIQ", 9, 4, HUGE), count=2
    ),
    "a string of .* bytes passes the file's end": header(
        pairs=text("k") + struct.pack("<IIQQ", 9, 8, 1, HUGE) + bytes(9), count=2
    ),
    "entry 0 is not valid UTF-8": header(
        pairs=text("k") + struct.pack("<IIQQ", 9, 8, 1, 2) + b"\xff\xfe" + bytes(9), count=2
    ),
    "k at byte .*: not valid UTF-8": header(
        pairs=text("k") + struct.pack("<IQ", 8, 2) + b"\xff\xfe", count=2
    ),
    "the file ends": header(pairs=text("k"), count=2),
    "5 dimensions": header(1) + info(dims=(1, 1, 1, 1, 1)),
    r"tensor type 16 \(IQ2_XXS\) is not supported": header(1) + info(kind=16),
    r"tensor type 99 \(unknown\) is not supported": header(1) + info(kind=99),
    "tensor 'w': 576 values are not a multiple of the 256 of a Q4_K block": header(1)
    + info(dims=(576, 2), kind=12),
    "tensor 'w': .* do not lie in the file": header(1) + info(dims=(HUGE, HUGE)) + bytes(64),
    "tensor 'w': 16 bytes at 1": header(1) + info(offset=1 << 40) + bytes(64),
    "tensor 'w': 0 bytes": header(1) + info(dims=(0,)) + bytes(64),
    "tensor 'w' appears twice": header(2) + info() + info() + bytes(64),
    "general.alignment": header(
        pairs=text("general.alignment") + struct.pack("<II", 4, 7), count=2
    ),
    "general.architecture is missing": b"GGUF" + struct.pack("<IQQ", 3, 0, 0),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_damage_is_named(message: str, tmp_path: Path) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(DAMAGE[message])
    with pytest.raises(ModelError, match=message) as caught:
        GGUFFile(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read: No such file"):
        GGUFFile(tmp_path / "none.gguf")
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(ModelError, match="the file is empty"):
        GGUFFile(tmp_path / "empty.gguf")
