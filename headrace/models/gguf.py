"""A bounded reader of GGUF files (versions 2 and 3, little-endian).

Layout: magic, version, counts, metadata pairs, tensor infos, padding, tensor data. Every count and
size is checked against the bytes that are left before anything is allocated, so a damaged file
costs at most its own size. Source: the GGUF specification in the ggml repository, docs/gguf.md.
"""

import mmap
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import ModelError
from headrace.ops.formats import FORMATS, Format
from headrace.ops.weights import Tensor

MAX_DIMS = 4
_SCALARS: Mapping[int, tuple[str, str]] = {
    0: ("u1", "B"), 1: ("i1", "b"), 2: ("<u2", "<H"), 3: ("<i2", "<h"), 4: ("<u4", "<I"),
    5: ("<i4", "<i"), 6: ("<f4", "<f"), 7: ("u1", "?"), 10: ("<u8", "<Q"), 11: ("<i8", "<q"),
    12: ("<f8", "<d"),
}  # fmt: skip
_STRING, _ARRAY, _BOOL = 8, 9, 7
_UNSUPPORTED = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S",
    22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0",
    40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
_SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class GGUFFile:
    """A GGUF file, or all parts of a split one, mapped read-only.

    metadata: key -> int, float, bool, str or a list of one of these. tensors: name -> view of the
    file. architecture: `general.architecture`. paths: the files, in order.
    Raises ModelError with file, field and offset where the file is damaged or not supported.
    """

    def __init__(self, path: str | Path) -> None:
        first = Path(path)
        self.metadata, self.tensors = _read(first)
        self.paths = [first]
        count = self.metadata.get("split.count", 1)
        if count != 1:
            self._read_parts(first, count)
        architecture = self.metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise ModelError(f"{first}: general.architecture is missing from the metadata")
        self.architecture: str = architecture

    def _read_parts(self, first: Path, count: Any) -> None:
        match = _SPLIT_NAME.fullmatch(first.name)
        if not match or not isinstance(count, int) or int(match[3]) != count:
            raise ModelError(
                f"{first}: split.count is {count!r}, so the file must be named "
                "NAME-00001-of-0000N.gguf with all parts beside it"
            )
        if int(match[2]) != 1 or self.metadata.get("split.no", 0) != 0:
            raise ModelError(f"{first}: open the first part, {match[1]}-00001-of-{match[3]}.gguf")
        for number in range(2, count + 1):
            part = first.with_name(f"{match[1]}-{number:05d}-of-{match[3]}.gguf")
            metadata, tensors = _read(part)
            if metadata.get("split.no") != number - 1:
                raise ModelError(f"{part}: split.no is {metadata.get('split.no')!r}, "
                                 f"expected {number - 1}")  # fmt: skip
            for name, tensor in tensors.items():
                if name in self.tensors:
                    raise ModelError(f"{part}: tensor {name} is also in an earlier part")
                self.tensors[name] = tensor
            self.paths.append(part)
        expected = self.metadata.get("split.tensors.count", len(self.tensors))
        if expected != len(self.tensors):
            raise ModelError(
                f"{first}: split.tensors.count is {expected!r}, parts hold {len(self.tensors)}"
            )


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Metadata and tensors of one file."""
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        reason = "the file is empty" if isinstance(error, ValueError) else error.strerror
        raise ModelError(f"{path}: cannot be read: {reason}") from None
    return _Reader(path, data).read()


class _Reader:
    """A cursor over one file; every move is checked against the file's end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.at = 0

    def fail(self, field: str, message: str) -> ModelError:
        return ModelError(f"{self.path}: {field} at byte {self.at}: {message}")

    def take(self, count: int, field: str) -> int:
        """Move on by `count` bytes and return where they start."""
        start = self.at
        if count > self.size - start:
            raise self.fail(
                field, f"needs {count} bytes but the file ends after {self.size - start}"
            )
        self.at = start + count
        return start

    def number(self, form: str, field: str) -> Any:
        return struct.unpack_from(form, self.data, self.take(struct.calcsize(form), field))[0]

    def count(self, smallest: int, field: str) -> int:
        """A count of things that take at least `smallest` bytes each."""
        value: int = self.number("<Q", field)
        if value > (self.size - self.at) // smallest:
            raise self.fail(field, f"{value} entries do not fit in the rest of the file "
                                   f"({self.size - self.at} bytes)")  # fmt: skip
        return value

    def text(self, field: str) -> str:
        length = self.count(1, field)
        start = self.take(length, field)
        try:
            return self.data[start : start + length].decode()
        except UnicodeDecodeError as error:
            raise self.fail(field, f"not valid UTF-8 ({error.reason})") from None

    def texts(self, count: int, field: str) -> list[str]:
        """`count` strings: the hot loop of the reader (a vocabulary has up to 10^6)."""
        unpack, data, size = struct.Struct("<Q").unpack_from, self.data, self.size
        at = self.at
        values: list[str] = []
        append = values.append
        try:
            for _ in range(count):
                start = at + 8
                (length,) = unpack(data, at)
                at = start + length
                if at > size:
                    self.at = start
                    raise self.fail(field, f"a string of {length} bytes passes the file's end")
                append(data[start:at].decode())
        except struct.error:
            self.at = at
            raise self.fail(field, "the file ends inside the list") from None
        except UnicodeDecodeError as error:
            self.at = start
            raise self.fail(field, f"entry {len(values)} is not valid UTF-8 "
                                   f"({error.reason})") from None  # fmt: skip
        self.at = at
        return values

    def array(self, field: str) -> list[Any]:
        kind = self.number("<I", field)
        if kind == _STRING:
            return self.texts(self.count(8, field), field)
        if kind not in _SCALARS:
            raise self.fail(field, f"a list of value type {kind} is not supported")
        dtype = np.dtype(_SCALARS[kind][0])
        count = self.count(dtype.itemsize, field)
        start = self.take(count * dtype.itemsize, field)
        values = np.frombuffer(self.data, dtype, count, start)
        return list((values != 0).tolist() if kind == _BOOL else values.tolist())

    def value(self, field: str) -> Any:
        kind = self.number("<I", field)
        if kind == _STRING:
            return self.text(field)
        if kind == _ARRAY:
            return self.array(field)
        if kind not in _SCALARS:
            raise self.fail(field, f"value type {kind} is not known")
        return self.number(_SCALARS[kind][1], field)

    def read(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        if self.data[:4] != b"GGUF":
            raise ModelError(f"{self.path}: not a GGUF file (it starts with {self.data[:4]!r})")
        self.at = 4
        version = self.number("<I", "version")
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            reason = "big-endian files are" if swapped in (2, 3) else f"version {version} is"
            raise self.fail("version", f"{reason} not supported (2 and 3 are)")
        num_tensors = self.count(24, "tensor count")
        num_pairs = self.count(13, "metadata count")
        metadata: dict[str, Any] = {}
        for index in range(num_pairs):
            key = self.text(f"metadata key {index}")
            if key in metadata:
                raise self.fail(key, "the key appears twice")
            metadata[key] = self.value(key)
        infos = [self.tensor_info(index) for index in range(num_tensors)]
        return metadata, self.place(infos, metadata.get("general.alignment", 32))

    def tensor_info(self, index: int) -> tuple[str, Format, tuple[int, ...], int]:
        """(name, format, shape, offset in the data area)."""
        name = self.text(f"name of tensor {index}")
        field = f"tensor {name!r}"
        num_dims = self.number("<I", field)
        if not 1 <= num_dims <= MAX_DIMS:
            raise self.fail(field, f"{num_dims} dimensions (1 to {MAX_DIMS} are supported)")
        # The file lists the fastest dimension first.
        shape = tuple(self.number("<Q", field) for _ in range(num_dims))[::-1]
        number = self.number("<I", field)
        form = _FORMATS_BY_NUMBER.get(number)
        if form is None:
            known = _UNSUPPORTED.get(number, "unknown")
            raise self.fail(field, f"tensor type {number} ({known}) is not supported")
        return name, form, shape, self.number("<Q", field)

    def place(
        self, infos: list[tuple[str, Format, tuple[int, ...], int]], alignment: Any
    ) -> dict[str, Tensor]:
        """Views of the tensor data, which follows the infos at the file's alignment."""
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20 or alignment % 8:
            raise self.fail("general.alignment", f"{alignment!r} is not a sensible alignment")
        base = -(-self.at // alignment) * alignment
        whole = np.frombuffer(self.data, np.uint8)
        tensors: dict[str, Tensor] = {}
        for name, form, shape, offset in infos:
            try:
                size = form.row_bytes(shape[-1])
            except ValueError as error:
                raise ModelError(f"{self.path}: tensor {name!r}: {error}") from None
            for dim in shape[:-1]:
                size *= dim
            start = base + offset
            if size == 0 or start + size > self.size or offset % alignment:
                raise ModelError(
                    f"{self.path}: tensor {name!r}: {size} bytes at {start} do not lie in the "
                    f"file of {self.size} bytes; it is damaged or was not downloaded completely"
                )
            if name in tensors:
                raise ModelError(f"{self.path}: tensor {name!r} appears twice")
            tensors[name] = Tensor(name, form.name, shape, whole[start : start + size])
        return tensors


_FORMATS_BY_NUMBER = {form.number: form for form in FORMATS.values() if form.number is not None}
