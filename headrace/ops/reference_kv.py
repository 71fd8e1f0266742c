"""The reference's KV pages and the ops that write and read them."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from headrace.ops.batch import F32, I32, Limits, RaggedBatch
from headrace.ops.reference_rows import TILE, TILES, linear, rms
from headrace.ops.spec import Attention, KVLayout, LatentAttention, RopeStore

SPAN = 256
"""Keys that attention takes at once, at absolute positions: the tile of the softmax's merge."""

_DTYPES: dict[str, npt.DTypeLike] = {"f16": np.float16, "f32": np.float32, "int8": np.int8}


class Pages:
    """KV in the storage type. values: [pages, layers in a page, 2 (K, V), kv_heads, block_size,
    head_dim]; scales: float32, the same without head_dim, for int8."""

    def __init__(self, layout: KVLayout, limits: Limits) -> None:
        self.layout = layout
        group = layout.groups[0]
        layers = len(group.layers) // group.pages_per_block
        shape = (limits.num_pages, layers, 2, layout.kv_heads, layout.block_size)
        self.values: npt.NDArray[np.generic] = np.zeros(
            (*shape, layout.head_dim), _DTYPES[layout.dtype]
        )
        self.scales: F32 | None = np.zeros(shape, np.float32) if layout.dtype == "int8" else None

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return self.values.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def copy(self, source: int, target: int, first: int, tokens: int) -> None:
        """Copy tokens [first, first + tokens) of a page to another, in every layer."""
        at = slice(first, first + tokens)
        self.values[target, :, :, :, at] = self.values[source, :, :, :, at].copy()
        if self.scales is not None:
            self.scales[target, :, :, :, at] = self.scales[source, :, :, :, at].copy()

    def store(self, layer: int, table: I32, positions: I32, kv: F32) -> None:
        """Round and write rows of one sequence. table: [table_rows, max_blocks] of the sequence.
        kv: [n, 2, kv_heads, head_dim].

        int8: scale = max |x| / 127 of each token, head and K or V; value = x / scale, rounded to
        nearest, ties to even. f16 likewise rounds to nearest even.
        """
        row, index = self.layout.place(layer)
        block, offset = np.divmod(positions, self.layout.block_size)
        page = table[row, block]
        if self.scales is None:
            self.values[page, index, :, :, offset] = kv.astype(self.values.dtype)
            return
        scales = np.abs(kv).max(axis=-1) / np.float32(127)
        divisor = np.where(scales == 0, np.float32(1), scales)
        self.values[page, index, :, :, offset] = np.rint(kv / divisor[..., None]).astype(np.int8)
        self.scales[page, index, :, :, offset] = scales

    def load(self, layer: int, table: I32, positions: npt.NDArray[np.integer]) -> F32:
        """The stored rows of one sequence as float32, [n, 2, kv_heads, head_dim]."""
        row, index = self.layout.place(layer)
        block, offset = np.divmod(positions, self.layout.block_size)
        page = table[row, block]
        kv = self.values[page, index, :, :, offset].astype(np.float32)
        if self.scales is not None:
            kv *= self.scales[page, index, :, :, offset][..., None]
        return kv


def slices(batch: RaggedBatch) -> Iterator[tuple[slice, I32, I32]]:
    """(rows, positions, page table) of each slice of the step."""
    for i in range(batch.num_slices):
        rows = slice(int(batch.slice_row[i]), int(batch.slice_row[i + 1]))
        yield rows, batch.position[rows], batch.table[batch.slice_slot[i]]


def rope_store(
    op: RopeStore,
    qkv: F32,
    batch: RaggedBatch,
    pages: Pages,
    frequencies: F32 | None,
    q_norm: F32 | None,
    k_norm: F32 | None,
) -> tuple[F32, F32]:
    """The rotated q, [T, heads * head_dim], and q rotated for the kept-first tokens (`RopeStore`);
    stores k and v."""
    rows, head_dim = len(qkv), op.head_dim
    heads = qkv.reshape(rows, op.heads + 2 * op.kv_heads, head_dim)
    q = np.ascontiguousarray(heads[:, : op.heads])
    k = np.ascontiguousarray(heads[:, op.heads : op.heads + op.kv_heads])
    v = heads[:, op.heads + op.kv_heads :]
    if q_norm is not None:
        q = _head_norm(op, q, q_norm)
    if k_norm is not None:
        k = _head_norm(op, k, k_norm)
    near = q
    if frequencies is not None:
        positions = batch.position[:rows]
        if op.near is not None:
            capped = np.minimum(positions, op.near_position)
            near = rotate(q, *_turns(op, capped, frequencies), op.style)
        cos, sin = _turns(op, positions, frequencies)
        q, k = rotate(q, cos, sin, op.style), rotate(k, cos, sin, op.style)
    kv = np.stack([k, v], axis=1)
    for span, positions, table in slices(batch):
        pages.store(op.layer, table, positions, kv[span])
    return q.reshape(rows, -1), near.reshape(rows, -1)


def _turns(op: RopeStore, positions: I32, frequencies: F32) -> tuple[F32, F32]:
    """Cosines and sines at positions, [n, 1, rotary / 2] each."""
    angle = positions[:, None].astype(np.float64) * frequencies
    if not op.wide:
        angle = (positions[:, None].astype(np.float32) * frequencies).astype(np.float64)
    cos, sin = (np.asarray(f(angle) * op.rope_scale, np.float32)[:, None] for f in (np.cos, np.sin))
    return cos, sin


def _head_norm(op: RopeStore, x: F32, weight: F32) -> F32:
    if op.norm_over == "head":
        return rms(x, weight, op.eps)
    return rms(x.reshape(len(x), -1), weight, op.eps).reshape(x.shape)


def rotate(x: F32, cos: F32, sin: F32, style: str) -> F32:
    """Turn the first 2 * cos.shape[-1] values of each head of x [T, heads, head_dim]."""
    half = cos.shape[-1]
    out = x.copy()
    if style == "halves":
        first, second = slice(0, half), slice(half, 2 * half)
    else:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    a, b = x[..., first], x[..., second]
    out[..., first] = a * cos - b * sin
    out[..., second] = b * cos + a * sin
    return out


def attention(
    op: Attention, q: F32, near: F32, batch: RaggedBatch, pages: Pages, sinks: F32 | None
) -> F32:
    """Each row's attention over the pages of its sequence, [T, heads * head_dim]. near: q for the
    kept-first tokens."""
    out = np.empty_like(q)
    for rows, positions, table in slices(batch):
        keys = visible(positions, op.window, op.first)
        kv = pages.load(op.layer, table, keys)
        group = op.heads // op.kv_heads
        k, v = (np.repeat(kv[:, i], group, axis=1) for i in (0, 1))
        heads, close = (x[rows].reshape(-1, op.heads, op.head_dim) for x in (q, near))
        attended = attend(op, heads, close, positions, keys, k, v, sinks)
        out[rows] = attended.reshape(len(positions), -1)
    return out


def latent_attention(
    op: LatentAttention, q: F32, latent: F32, batch: RaggedBatch, pages: Pages, up: F32
) -> F32:
    """Stores the rows of the compressed cache and attends over them, [T, heads * value_dim].

    A cache row lies half in the K and half in the V of its page. `up` [heads * (nope + value),
    latent] expands it: k of a head = up_k @ c | the shared rotated part, v = up_v @ c.
    """
    layout, width = pages.layout, op.latent_dim + op.rope_dim
    out = np.empty((len(q), op.heads * op.value_dim), np.float32)
    halves = latent.reshape(len(latent), 2, layout.kv_heads, layout.head_dim)
    for rows, positions, table in slices(batch):
        pages.store(op.layer, table, positions, halves[rows])
    shape = Attention(
        op.q, op.out, op.layer, op.heads, op.heads, op.nope_dim + op.rope_dim, op.scale
    )
    for rows, positions, table in slices(batch):
        keys = visible(positions, None, 0)
        cached = pages.load(op.layer, table, keys).reshape(-1, width)
        expanded = linear(cached[:, : op.latent_dim], up).reshape(len(keys), op.heads, -1)
        turned = np.repeat(cached[:, None, op.latent_dim :], op.heads, axis=1)
        k = np.concatenate([expanded[..., : op.nope_dim], turned], axis=-1)
        v = expanded[..., op.nope_dim :]
        heads = q[rows].reshape(len(positions), op.heads, -1)
        out[rows] = attend(shape, heads, heads, positions, keys, k, v, None).reshape(
            len(positions), -1
        )
    return out


def visible(positions: I32, window: int | None, first: int) -> npt.NDArray[np.int64]:
    """The positions that some row of a slice sees, ascending."""
    keys = np.arange(int(positions[-1]) + 1)
    if window is None:
        return keys
    return keys[(keys > int(positions[0]) - window) | (keys < first)]


def attend(
    op: Attention,
    q: F32,
    near: F32,
    positions: I32,
    keys: npt.NDArray[np.int64],
    k: F32,
    v: F32,
    sinks: F32 | None,
) -> F32:
    """Softmax attention of the rows of one slice. q, near: [n, heads, d], the latter for keys below
    op.first where op.near is given; k, v: [keys, heads, ...].

    Keys are taken in spans at absolute positions; maximum, sum and output are carried from span to
    span. A span that a row does not see leaves its three values as they are, bit for bit.
    """
    count, heads, width = q.shape
    tiles = -(-count // TILE)

    def tiled(x: F32) -> F32:
        padded = np.zeros((tiles * TILE, heads, width), np.float32)
        padded[:count] = x
        return np.ascontiguousarray(padded.reshape(tiles, TILE, heads, width).swapaxes(1, 2))

    queries, close = tiled(q), tiled(near)
    at = np.full(tiles * TILE, -1, np.int64)
    at[:count] = positions
    at = at.reshape(tiles, 1, TILE, 1)
    out = np.empty((tiles, heads, TILE, v.shape[-1]), np.float32)
    for start in range(0, tiles, TILES):
        part = slice(start, start + TILES)
        out[part] = _attend_tiles(op, queries[part], close[part], at[part], keys, k, v, sinks)
    return out.swapaxes(1, 2).reshape(tiles * TILE, heads, -1)[:count]


def _attend_tiles(
    op: Attention,
    q: F32,
    near: F32,
    at: npt.NDArray[np.int64],
    keys: npt.NDArray[np.int64],
    k: F32,
    v: F32,
    sinks: F32 | None,
) -> F32:
    """q, near: [tiles, heads, TILE, d]; at: [tiles, 1, TILE, 1], -1 in padding -> [tiles, heads,
    TILE, value width]."""
    tiles, heads = q.shape[:2]
    top = np.full((tiles, heads, TILE, 1), -np.inf, np.float32)
    total = np.zeros_like(top)
    out: F32 = np.zeros((tiles, heads, TILE, v.shape[-1]), np.float32)
    if sinks is not None:
        top[:] = sinks[:, None, None]
        total[:] = 1
    for span in range(int(keys[0]) // SPAN, int(at.max()) // SPAN + 1):
        low, high = np.searchsorted(keys, [span * SPAN, (span + 1) * SPAN])
        if low == high:
            continue
        here = keys[low:high]
        span_k = _padded(here, k[low:high])
        span_v = _padded(here, v[low:high])
        scores = np.matmul(q, span_k.swapaxes(1, 2)) * np.float32(op.scale)
        if op.near is not None and span * SPAN < op.first:
            close = np.matmul(near, span_k.swapaxes(1, 2)) * np.float32(op.scale)
            kept = op.first - span * SPAN
            scores[..., :kept] = close[..., :kept]
        if op.softcap is not None:
            scores = np.tanh(scores / np.float32(op.softcap)) * np.float32(op.softcap)
        j = np.arange(span * SPAN, (span + 1) * SPAN)
        seen = j <= at
        if op.window is not None:
            seen &= (at - j < op.window) | (j < op.first)
        scores = np.where(seen, scores, np.float32(-np.inf))
        new_top = np.maximum(top, scores.max(axis=-1, keepdims=True))
        base = np.where(np.isneginf(new_top), np.float32(0), new_top)
        weights = np.exp(scores - base)
        shrink = np.exp(top - base)
        total = total * shrink + weights.sum(axis=-1, keepdims=True)
        out = out * shrink + np.matmul(weights, span_v)
        top = new_top
    total[total == 0] = 1  # padding rows saw nothing
    out /= total
    out += np.float32(0)  # turns -0.0, which a span not taken would have kept, into 0.0
    return out


def _padded(keys: npt.NDArray[np.int64], values: F32) -> F32:
    """values [n, heads, d] at their places in a span of zeros, [heads, SPAN, d]."""
    out = np.zeros((values.shape[1], SPAN, values.shape[2]), np.float32)
    out[:, keys % SPAN] = values.swapaxes(0, 1)
    return out
