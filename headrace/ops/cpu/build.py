"""From a program to its native form: sizes first, then memory, then the instructions.

`plan` builds the native program over null addresses and reads off what it needs; `build` does the
same over real memory. Both walk the ops by the same code, so the plan is what is held.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.ops import spec
from headrace.ops.batch import F32, Limits
from headrace.ops.cpu import _native
from headrace.ops.cpu.workspace import Workspace, place, round_up
from headrace.ops.formats import dequantize
from headrace.ops.spec import KVLayout, LoadProgress, Program
from headrace.ops.weights import Weight

_PAGE = 4096
_LOW_ROWS = 1024  # of split rope tables
_Turns = tuple[str, float, bool]
_POPULATE = 8 << 20  # bytes made resident at a time: a few milliseconds


@dataclass(frozen=True)
class Tables:
    """Cosines and sines of one rope, [rows, rotary / 2] each, as offsets in the weights.

    low_rows: 0 where there is a row for each position; else that many positions, then one row for
    each multiple of that many (runtime.h).
    """

    cos: int
    sin: int
    rotary: int
    rows: int
    low_rows: int

    def angles(self, frequencies: F32) -> npt.NDArray[np.float64]:
        """The angle of each row."""
        if not self.low_rows:
            rows = np.arange(self.rows, dtype=np.float32)[:, None]
            return (rows * frequencies[None]).astype(np.float64)
        low, high = np.arange(self.low_rows), np.arange(self.rows - self.low_rows)
        positions = np.concatenate([low, high * self.low_rows]).astype(np.float64)
        return positions[:, None] * frequencies[None]


@dataclass(frozen=True)
class Sizes:
    """Where everything lies, and the bytes of each mapping.

    packed: native weights by name. matrices, vectors: offsets in the weight memory, by name.
    tables: rope tables by (weight, scale, wide). placed: the buffers. quantized, shared, scratch:
    offsets in the workspace of the quantized activations, the attention partials and the threads'
    scratch.
    """

    packed: Mapping[str, Any]
    matrices: Mapping[str, int]
    vectors: Mapping[str, int]
    tables: Mapping[_Turns, Tables]
    placed: Workspace
    quantized: int
    shared: int
    scratch: int
    weights: int
    kv: int
    workspace: int
    owned: int


class Memory:
    """The three mappings of a loaded program. Weights and workspace are resident from the start, KV
    pages when they are first used or `populate` gets to them."""

    def __init__(self, sizes: Sizes, pool: Any) -> None:
        self._weights = _native.Arena(sizes.weights)
        self._kv = _native.Arena(sizes.kv)
        self._workspace = _native.Arena(sizes.workspace)
        self._workspace.touch(pool)
        self.pool = pool
        self.weights: int = self._weights.address
        self.kv: int = self._kv.address
        self.workspace: int = self._workspace.address
        self.scratch: int = self.workspace + sizes.scratch

    def populate(self, stop: Callable[[], bool]) -> None:
        """Make the KV pages resident, a little at a time, until done or `stop()`."""
        for offset in range(0, self._kv.bytes, _POPULATE):
            if stop() or not self._kv.populate(offset, _POPULATE):
                return

    def read(self, offset: int, shape: tuple[int, ...]) -> F32:
        """A view of float32 values in the workspace; valid while this object lives."""
        return _view(self.workspace + offset, shape)

    def write(self, offset: int, values: F32) -> None:
        """Put float32 values into the weight memory."""
        _view(self.weights + offset, values.shape)[...] = values


def plan(
    level: str,
    program: Program,
    weights: Mapping[str, Weight],
    layout: KVLayout,
    limits: Limits,
) -> Sizes:
    """Place everything that `build` will hold. Reads no weight values."""
    packed: dict[str, Any] = {}
    matrices: dict[str, int] = {}
    vectors: dict[str, int] = {}
    tables: dict[_Turns, Tables] = {}
    at = 0
    depth = 0
    for op in program.ops:
        for name in _matrix_names(op):
            if name not in packed:
                packed[name] = _native_weight(weights[name])
                matrices[name] = at
                at += round_up(packed[name].bytes)
            if isinstance(op, spec.Linear | spec.Logits) and packed[name].quantized:
                depth = max(depth, weights[name].shape[1])
        if isinstance(op, spec.RopeStore) and op.rope and _turns(op) not in tables:
            half = weights[op.rope].shape[0]
            rows, low_rows = limits.max_positions, 0
            if op.wide:
                rows, low_rows = _LOW_ROWS + -(-limits.max_positions // _LOW_ROWS), _LOW_ROWS
            size = round_up(rows * half * 4)
            tables[_turns(op)] = Tables(at, at + size, 2 * half, rows, low_rows)
            at += 2 * size
        for name in _vector_names(op):
            if name not in vectors:
                vectors[name] = at
                at += round_up(weights[name].shape[0] * 4)
    placed = place(program, limits)
    rows = max(limits.max_tokens, limits.max_logits)
    quantized = placed.bytes
    shared = quantized + round_up(_native.quantized_bytes(rows, depth))
    sizes = Sizes(
        packed, matrices, vectors, tables, placed, quantized, shared, shared,
        weights=round_up(at, _PAGE),
        kv=round_up(limits.num_pages * layout.page_bytes, _PAGE),
        workspace=0,
        owned=0,
    )  # fmt: skip
    native = _record(level, program, layout, limits, sizes, None)
    scratch = shared + round_up(_shared_bytes(native, program, limits))
    workspace = scratch + native.scratch_bytes * max(1, limits.threads)
    return replace(
        sizes, scratch=scratch, workspace=round_up(workspace, _PAGE), owned=native.owned_bytes
    )


def build(
    level: str,
    program: Program,
    weights: Mapping[str, Weight],
    layout: KVLayout,
    limits: Limits,
    sizes: Sizes,
    memory: Memory,
    progress: LoadProgress | None = None,
) -> Any:
    """Fill the weight memory and record the instructions over it."""
    sizes = replace(sizes, packed=_packed(weights, limits, sizes, memory, progress))
    for name, offset in sizes.vectors.items():
        memory.write(offset, vector(weights[name]))
    for (name, scale, _), table in sizes.tables.items():
        angles = table.angles(vector(weights[name]))
        scales = np.full((table.rows, 1), scale, np.float32)
        if table.low_rows:
            scales[table.low_rows :] = 1
        memory.write(table.cos, np.cos(angles).astype(np.float32) * scales)
        memory.write(table.sin, np.sin(angles).astype(np.float32) * scales)
    return _record(level, program, layout, limits, sizes, memory)


def _packed(
    weights: Mapping[str, Weight],
    limits: Limits,
    sizes: Sizes,
    memory: Memory,
    progress: LoadProgress | None,
) -> dict[str, Any]:
    """The matrices in their places. Those with a recipe are made one at a time, by rows on all
    threads (numpy lets go of the interpreter's lock), and dropped once packed."""
    packed: dict[str, Any] = {}
    total = sum(weights[name].nbytes for name in sizes.matrices)
    done = 0
    with ThreadPoolExecutor(max(1, limits.threads)) as workers:
        for name, offset in sizes.matrices.items():
            weight, native = weights[name], sizes.packed[name]
            recipes = [part for part in weight.parts if part.recipe]
            if recipes:
                parts = tuple(part.whole(workers) for part in weight.parts)
                native = _native_weight(replace(weight, parts=parts))
            native.pack(memory.weights + offset, memory.pool)
            packed[name] = native
            for part in recipes:
                part.release()
            done += weight.nbytes
            if progress is not None:
                progress(done, total)
    return packed


def vector(weight: Weight) -> F32:
    """The values of a vector weight, float32 [N]: parts joined, reordered, `add` added."""
    values = np.concatenate([dequantize(part) for part in weight.parts])
    if weight.row_order is not None:
        values = values[weight.row_order]
    return np.ascontiguousarray(values + np.float32(weight.add), np.float32)


def _view(address: int, shape: tuple[int, ...]) -> F32:
    count = int(np.prod(shape))
    if count == 0:
        return np.zeros(shape, np.float32)
    import ctypes

    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address)).reshape(shape)


def _matrix_names(op: spec.Op) -> list[str]:
    if isinstance(op, spec.Embed):
        return op.weights()
    return [op.weight] if isinstance(op, spec.Linear | spec.Logits) else []


def _turns(op: spec.RopeStore) -> _Turns:
    assert op.rope is not None
    return op.rope, op.rope_scale, op.wide


def _vector_names(op: spec.Op) -> list[str]:
    matrices = set(_matrix_names(op))
    rope = op.rope if isinstance(op, spec.RopeStore) else None
    return [name for name in op.weights() if name not in matrices and name != rope]


def _native_weight(weight: Weight) -> Any:
    """The native form of a weight; without addresses, for planning, where it is yet to be made."""
    parts = [
        (
            part.format,
            part.shape[0],
            0 if part.recipe else part.data.ctypes.data,
            part.mapping() is not None,
        )
        for part in weight.parts
    ]
    order = [] if weight.row_order is None else [int(row) for row in weight.row_order]
    return _native.Weight(parts, order, weight.shape[1])


def _shared_bytes(native: Any, program: Program, limits: Limits) -> int:
    return max(
        (
            native.attention_shared_bytes(
                op.heads, op.window or 0, op.first, limits.max_tokens, limits.max_positions
            )
            for op in program.ops
            if isinstance(op, spec.Attention)
        ),
        default=0,
    )


def _record(
    level: str,
    program: Program,
    layout: KVLayout,
    limits: Limits,
    sizes: Sizes,
    memory: Memory | None,
) -> Any:
    """The native program, over null addresses where there is no memory yet."""
    native = _native.Program(level, max(1, limits.threads))
    native.set_kv(
        memory.kv if memory else 0,
        layout.page_bytes,
        layout.layer_bytes,
        layout.block_size,
        layout.kv_heads,
        layout.head_dim,
        layout.dtype,
    )
    native.add_copy(layout.page_bytes // layout.layer_bytes)

    def buffer(b: spec.Buffer | None) -> int:
        return memory.workspace + sizes.placed.offsets[b.id] if memory and b else 0

    def values(name: str | None) -> int:
        return memory.weights + sizes.vectors[name] if memory and name else 0

    def workspace(offset: int) -> int:
        return memory.workspace + offset if memory else 0

    for op in program.ops:
        match op:
            case spec.Embed():
                positions = sizes.packed[op.positions] if op.positions else None
                native.add_embed(buffer(op.out), sizes.packed[op.table], positions, op.scale)
            case spec.RmsNorm():
                native.add_norm(
                    buffer(op.x), buffer(op.out), buffer(op.residual), values(op.weight),
                    values(op.bias), op.x.width, op.eps, op.residual_scale, op.norm,
                )  # fmt: skip
            case spec.Linear():
                native.add_linear(
                    buffer(op.x), buffer(op.out), sizes.packed[op.weight], values(op.bias),
                    workspace(sizes.quantized), False, 1.0, 0.0,
                )  # fmt: skip
            case spec.Logits():
                native.add_linear(
                    buffer(op.x), buffer(op.out), sizes.packed[op.weight], values(op.bias),
                    workspace(sizes.quantized), True, op.scale, op.softcap or 0.0,
                )  # fmt: skip
            case spec.RopeStore():
                row, index = layout.place(op.layer)
                table = sizes.tables[_turns(op)] if op.rope else None
                native.add_rope_store(
                    buffer(op.qkv), buffer(op.out), row, index, op.heads,
                    memory.weights + table.cos if memory and table else 0,
                    memory.weights + table.sin if memory and table else 0,
                    table.rotary if table else 0, op.style == "pairs",
                    values(op.q_norm), values(op.k_norm), op.norm_over == "row", op.eps,
                    table.low_rows if table else 0, buffer(op.near), op.near_position,
                )  # fmt: skip
            case spec.Attention():
                row, index = layout.place(op.layer)
                native.add_attention(
                    buffer(op.q), buffer(op.out), row, index, op.heads, op.scale, op.window or 0,
                    op.first, op.softcap or 0.0, values(op.sinks), limits.max_tokens,
                    limits.max_positions, workspace(sizes.shared), op.near is not None,
                    buffer(op.near),
                )  # fmt: skip
            case spec.Gated():
                native.add_gated(
                    buffer(op.x), buffer(op.out), op.out.width, op.activation, op.gated
                )
            case spec.Sample():
                native.add_sample(buffer(op.logits), limits.vocabulary, op.logits.width)
    return native
