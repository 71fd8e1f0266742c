"""Weights as they lie in a checkpoint: typed bytes with a shape, never converted before a back-end
asks for it."""

import mmap
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
_CHUNK_VALUES = 1 << 18  # made at once by one thread; its temporaries should fit its caches


@dataclass(frozen=True)
class Recipe:
    """How the bytes of a tensor are made when a back-end wants them.

    rows: called with (start, stop), gives the bytes of those rows, uint8 [stop - start, row bytes];
    safe to call from several threads; start is a multiple of 32. sources: the tensors it reads.
    """

    rows: Callable[[int, int], U8]
    sources: tuple["Tensor", ...]


@dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint.

    name: as in the file. format: a name of `ops.formats.FORMATS` ('F32', 'Q4_1', ...).
    shape: (N, K) row-major, or (N,). data: uint8 [bytes], usually a read-only view of the mapped
    file. aux: further arrays of formats that need them (scales, zero points, group order).
    recipe: where given, `data` only has the size of the tensor and no memory; `whole` makes it.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    data: U8
    aux: Mapping[str, npt.NDArray[np.generic]] = field(default_factory=dict)
    recipe: Recipe | None = None

    def rows(self, start: int, stop: int) -> U8:
        """The bytes of rows [start, stop), [stop - start, row bytes]; start is a multiple of 32."""
        if self.recipe is not None:
            return self.recipe.rows(start, stop)
        return self.data.reshape(self.shape[0], -1)[start:stop]

    def whole(self, workers: Executor | None = None) -> "Tensor":
        """This tensor with its bytes, made by the workers where there is a recipe."""
        if self.recipe is None:
            return self
        rows, depth = self.shape
        out = np.empty((rows, self.data.nbytes // rows), np.uint8)
        step = max(_CHUNK_VALUES // depth // 32 * 32, 32)

        def make(start: int) -> None:
            stop = min(start + step, rows)
            out[start:stop] = self.rows(start, stop)

        starts = range(0, rows, step)
        for _ in map(make, starts) if workers is None else workers.map(make, starts):
            pass
        return replace(self, data=out.reshape(-1), recipe=None)

    def release(self) -> None:
        """Let go of the file's pages in memory that the tensor was made of; they come back from
        the file where they are read again."""
        if self.recipe is not None:
            for source in self.recipe.sources:
                source.release()
            return
        file = self.mapping()
        if file is None:
            return
        base = np.frombuffer(file, np.uint8).ctypes.data
        start = self.data.ctypes.data - base
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (start + self.data.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            file.madvise(mmap.MADV_DONTNEED, first, last - first)

    def mapping(self) -> mmap.mmap | None:
        """The mapped file that the bytes are a read-only view of, or None."""
        base: Any = None if self.data.flags.writeable else self.data
        while base is not None and not isinstance(base, mmap.mmap):
            base = base.obj if isinstance(base, memoryview) else getattr(base, "base", None)
        return base if isinstance(base, mmap.mmap) else None


def recipe(
    name: str,
    form: str,
    shape: tuple[int, int],
    row_bytes: int,
    rows: Callable[[int, int], U8],
    sources: Iterable[Tensor],
) -> Tensor:
    """A tensor that is made when it is wanted (see `Recipe`)."""
    data = np.broadcast_to(np.uint8(0), (shape[0] * row_bytes,))
    return Tensor(name, form, shape, data, recipe=Recipe(rows, tuple(sources)))


@dataclass(frozen=True)
class Weight:
    """What a program calls one weight: one or more tensors stacked along N.

    row_order: where given, int32 [N]; row i of the weight is row row_order[i] of the stacked parts.
    add: constant added to every value of a vector (Gemma's 1 + weight).
    """

    name: str
    parts: tuple[Tensor, ...]
    row_order: npt.NDArray[np.int32] | None = None
    add: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        rows = sum(part.shape[0] for part in self.parts)
        return (rows, *self.parts[0].shape[1:])

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats of the parts, in order."""
        return tuple(part.format for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes in the checkpoint."""
        return sum(
            part.data.nbytes + sum(array.nbytes for array in part.aux.values())
            for part in self.parts
        )
