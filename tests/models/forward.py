"""Run a model over given ids, cut as one likes, and read every row of logits."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from headrace.models.spec import Model
from headrace.ops.batch import Limits
from headrace.ops.spec import Backend, KVLayout, KVType

F32 = npt.NDArray[np.float32]


def cpu_levels() -> list[str]:
    """Levels of the CPU back-end that run here; none where it is not built."""
    try:
        from headrace.ops.cpu import _native
    except ImportError:
        return []
    return list(_native.levels())


def layout_of(model: Model, dtype: KVType = "f32", block_size: int = 16) -> KVLayout:
    return KVLayout(model.groups, model.spec.kv_heads, model.spec.head_dim, block_size, dtype)


def stream(
    backend: Backend,
    model: Model,
    ids: Sequence[int],
    cuts: Sequence[int],
    dtype: KVType = "f32",
    block_size: int = 16,
) -> Iterator[F32]:
    """The logits [count, V] of each piece of one sequence; cuts: tokens of each step."""
    layout = layout_of(model, dtype, block_size)
    blocks = -(-len(ids) // block_size)
    rows = layout.table_rows
    limits = Limits(
        max_tokens=max(cuts), max_slices=1, max_logits=max(cuts), max_samples=1, slots=1,
        max_blocks=blocks, num_pages=blocks * rows, max_positions=len(ids),
        vocabulary=model.spec.vocabulary,
    )  # fmt: skip
    executable = backend.load(model.program, model.weights, layout, limits)
    batch = executable.batch
    # Pages in a scrambled order, so that nothing can rely on them being adjacent.
    pages = np.random.default_rng(len(ids)).permutation(limits.num_pages)
    batch.table[0] = pages.reshape(rows, blocks)
    start = 0
    for count in cuts:
        batch.num_tokens = batch.num_logits = count
        batch.num_slices = 1
        batch.token[:count] = ids[start : start + count]
        batch.position[:count] = np.arange(start, start + count)
        batch.slice_row[:2] = (0, count)
        batch.slice_slot[0] = 0
        batch.logits_row[:count] = np.arange(count)
        executable.run("forward")
        yield executable.read(model.program.logits)
        start += count
    executable.close()


def cut(total: int, size: int) -> list[int]:
    """Pieces of `size` tokens and the rest."""
    return [min(size, total - start) for start in range(0, total, size)]


def logits(
    backend: Backend, model: Model, ids: Sequence[int], size: int, dtype: KVType = "f32"
) -> F32:
    """All rows of logits of one sequence, computed in pieces of `size` tokens."""
    return np.concatenate(list(stream(backend, model, ids, cut(len(ids), size), dtype)))


def log_softmax(rows: F32) -> F32:
    """Log-probabilities of each row, summed in float64."""
    wide = rows.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return wide.astype(np.float32)
