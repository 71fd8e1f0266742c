"""Weights as they lie in a checkpoint: typed bytes with a shape, never converted before a back-end
asks for it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint.

    name: as in the file. format: a name of `ops.formats.FORMATS` ('F32', 'Q4_1', ...).
    shape: (N, K) row-major, or (N,). data: uint8 [bytes], usually a read-only view of the mapped
    file. aux: further arrays of formats that need them (scales, zero points, group order).
    """

    name: str
    format: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]
    aux: Mapping[str, npt.NDArray[np.generic]] = field(default_factory=dict)


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
