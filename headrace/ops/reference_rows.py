"""The reference's ops on rows: linear, norms, activations, expert routing. Plain float32 numpy.

Row independence. A BLAS matmul may sum in another order when it is given another number of rows, so
every matmul here has exactly TILE rows (the last tile is padded with zeros), and a tile is small
enough that each of its rows takes the same path (`tests/ops/test_reference.py` checks that a row's
bits depend neither on its place in the tile nor on the other rows). All else is elementwise or a
reduction along one contiguous row.
"""

import math

import numpy as np

from headrace.ops.batch import F32
from headrace.ops.spec import Activation, RmsNorm, Route

TILE = 8
"""Rows of every matmul. 16 and more rows are not independent in OpenBLAS."""

PRODUCTS = 1 << 18
"""Multiplications that OpenBLAS still does on one thread. Weights are cut into matmuls no larger:
two threads that wait for each other at every small matmul are slow on a busy machine."""

TILES = 64
"""Tiles that go through an op together, to bound its temporaries."""

_erf = np.vectorize(math.erf, otypes=[np.float64])


def linear(x: F32, weight: F32, bias: F32 | None = None) -> F32:
    """x [T, K] @ weight [N, K].T + bias [N] -> [T, N]."""
    out = np.empty((len(x), len(weight)), np.float32)
    for start in range(0, len(x), TILES * TILE):
        part = slice(start, start + TILES * TILE)
        out[part] = _matmul(x[part], weight)
    if bias is not None:
        out += bias
    return out


def _matmul(x: F32, weight: F32) -> F32:
    """x @ weight.T, each tile of rows with each piece of the weight's rows."""
    rows, width = x.shape
    tiles = np.zeros((-(-rows // TILE), TILE, width), np.float32)
    tiles.reshape(-1, width)[:rows] = x
    out = np.empty((len(tiles), TILE, len(weight)), np.float32)
    piece = max(4, PRODUCTS // (TILE * width) // 16 * 16)
    whole = len(weight) // piece * piece
    if whole:
        pieces = weight[:whole].reshape(-1, 1, piece, width).swapaxes(2, 3)
        products = np.matmul(tiles, pieces)  # [pieces, tiles, TILE, piece]
        out[..., :whole] = np.moveaxis(products, 0, 2).reshape(len(tiles), TILE, whole)
    if whole < len(weight):
        out[..., whole:] = np.matmul(tiles, weight[whole:].T)
    return out.reshape(-1, len(weight))[:rows]


def norm(op: RmsNorm, v: F32, weight: F32 | None, bias: F32 | None) -> F32:
    """The norm of `RmsNorm` over each row of v."""
    if op.norm == "none":
        return v.copy()
    if op.norm == "layer":
        v = v - row_mean(v)
    out: F32 = v / np.sqrt(row_mean(v * v) + np.float32(op.eps))
    if weight is not None:
        out *= weight
    if bias is not None:
        out += bias
    return out


def rms(v: F32, weight: F32, eps: float) -> F32:
    """RMS norm over the last axis."""
    out: F32 = v / np.sqrt(row_mean(v * v) + np.float32(eps)) * weight
    return out


def row_mean(v: F32) -> F32:
    """Mean over the last axis, kept as an axis of 1."""
    mean: F32 = v.sum(axis=-1, keepdims=True) / np.float32(v.shape[-1])
    return mean


def sigmoid(x: F32) -> F32:
    """1 / (1 + exp(-x)) without overflow."""
    small = np.exp(-np.abs(x))
    out: F32 = np.where(x >= 0, np.float32(1), small) / (1 + small)
    return out


def activate(activation: Activation, x: F32) -> F32:
    """act(x), elementwise. swiglu_oai: its gate factor alone."""
    one, half = np.float32(1), np.float32(0.5)
    match activation:
        case "silu":
            out = x * sigmoid(x)
        case "gelu":
            erf = _erf(x * math.sqrt(0.5)).astype(np.float32)
            out = half * x * (one + erf)
        case "gelu_tanh":
            inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
            out = half * x * (one + np.tanh(inner))
        case "relu":
            out = np.maximum(x, np.float32(0))
        case "relu2":
            out = np.square(np.maximum(x, np.float32(0)))
        case "swiglu_oai":
            gate = np.minimum(x, np.float32(7))
            out = gate * sigmoid(np.float32(1.702) * gate)
    return out


def gated(activation: Activation, x: F32) -> F32:
    """x = gate | up [T, 2n] -> act(gate) * up [T, n]."""
    n = x.shape[1] // 2
    gate, up = np.ascontiguousarray(x[:, :n]), x[:, n:]
    if activation == "swiglu_oai":
        up = np.clip(up, np.float32(-7), np.float32(7)) + np.float32(1)
    return activate(activation, gate) * up


def softmax(x: F32) -> F32:
    """Softmax over the last axis."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    out: F32 = e / e.sum(axis=-1, keepdims=True)
    return out


def route(op: Route, logits: F32, bias: F32 | None) -> F32:
    """Expert ids | weights of each row, [T, 2 * top_k].

    The bias only steers the choice (DeepSeek-V3). With groups, the experts of the `top_groups` best
    groups compete; a group is as good as its best expert, or as the sum of its best two where there
    is a bias.
    """
    rows = len(logits)
    match op.score:
        case "softmax":
            scores = softmax(logits)
        case "sigmoid":
            scores = sigmoid(logits)
        case "softmax_topk":
            scores = logits
    choice = scores if bias is None else scores + bias
    if op.groups > 1:
        grouped = choice.reshape(rows, op.groups, -1)
        best = -np.sort(-grouped, axis=-1)[..., : 1 if bias is None else 2].sum(axis=-1)
        kept = np.argsort(-best, axis=-1, kind="stable")[:, : op.top_groups]
        allowed = np.zeros((rows, op.groups), bool)
        np.put_along_axis(allowed, kept, True, axis=-1)
        choice = np.where(allowed[..., None], grouped, np.float32(-np.inf)).reshape(rows, -1)
    ids = np.argsort(-choice, axis=-1, kind="stable")[:, : op.top_k]
    weights = np.take_along_axis(scores, ids, axis=-1)
    if op.score == "softmax_topk":
        weights = softmax(weights)
    elif op.normalise:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return np.concatenate([ids.astype(np.float32), weights * np.float32(op.scale)], axis=1)


def experts(x: F32, routes: F32, gate_up: F32, down: F32, activation: Activation) -> F32:
    """The routed experts' MLPs of each row, summed in top-k order.

    x [T, K]; routes [T, 2 * top_k]; gate_up [experts, 2 * hidden, K]; down [experts, K, hidden].
    """
    top_k = routes.shape[1] // 2
    ids = routes[:, :top_k].astype(np.int64)
    parts = np.zeros((top_k, *x.shape), np.float32)
    for expert in np.unique(ids):
        row, rank = np.nonzero(ids == expert)
        inner = gated(activation, linear(x[row], gate_up[expert]))
        parts[rank, row] = linear(inner, down[expert]) * routes[row, top_k + rank, None]
    out: F32 = parts[0].copy()
    for part in parts[1:]:
        out += part
    return out
