"""The reference against textbook formulas in float64, and the property that its tiles rest on."""

import math

import numpy as np
import pytest

from headrace.errors import ConfigError, KernelError
from headrace.ops import reference_rows, spec
from headrace.ops.backends import cpu_missing, open_backend
from headrace.ops.reference import ReferenceBackend, last_uses, values
from tests.ops.cases import TABLE
from tests.ops.rig import run, schedules

REFERENCE = ReferenceBackend()


@pytest.mark.parametrize(
    ("rows", "width"), [(1, 33), (3, 1), (37, 75), (960, 576), (64, 257), (150, 1536), (5, 4100)]
)
def test_a_row_of_a_matmul_knows_nothing_of_its_tile(rows: int, width: int) -> None:
    """Its bits are the same at every place of the tile and beside any other rows. Both layouts of
    the second factor occur: transposed (weights, K) and plain (V)."""
    rng = np.random.default_rng(1)
    weight = rng.standard_normal((rows, width)).astype(np.float32)
    row = rng.standard_normal(width).astype(np.float32)
    found, plain = {reference_rows.linear(row[None], weight).tobytes()}, set()
    for place in range(reference_rows.TILE):
        tiles = 10 * rng.standard_normal((2 * reference_rows.TILE, width)).astype(np.float32)
        tiles[place] = row
        found.add(reference_rows.linear(tiles, weight)[place].tobytes())
        tiles = tiles.reshape(2, reference_rows.TILE, width)
        plain.add(np.matmul(tiles, np.ascontiguousarray(weight.T))[0, place].tobytes())
    assert len(found) == len(plain) == 1


def rotate(x: np.ndarray, position: int, op: spec.RopeStore, frequencies: np.ndarray) -> np.ndarray:
    """One head, value by value."""
    out, half = x.copy(), len(frequencies)
    for i, frequency in enumerate(frequencies):
        angle = float(np.float32(position) * np.float32(frequency))
        a, b = (i, i + half) if op.style == "halves" else (2 * i, 2 * i + 1)
        cos, sin = math.cos(angle) * op.rope_scale, math.sin(angle) * op.rope_scale
        out[a], out[b] = x[a] * cos - x[b] * sin, x[b] * cos + x[a] * sin
    return out


def normalised(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / math.sqrt(float(np.mean(x**2)) + eps) * weight


def plain_attention(name: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """q and the output of an attention case, row by row and head by head, in float64, from the qkv
    rows themselves: no pages, no rounding."""
    case = TABLE[name]
    embed, store, attend = case.program.ops[:3]
    assert isinstance(embed, spec.Embed)
    assert isinstance(store, spec.RopeStore)
    assert isinstance(attend, spec.Attention)
    weights = {n: values(w).astype(np.float64) for n, w in case.weights.items()}
    d, group = store.head_dim, store.heads // store.kv_heads
    queries, outputs = [], []
    for tokens in case.tokens():
        heads = weights[embed.table][tokens].reshape(len(tokens), -1, d)
        q, k = heads[:, : store.heads].copy(), heads[:, store.heads : -store.kv_heads].copy()
        v = heads[:, -store.kv_heads :]
        for part, norm in ((q, store.q_norm), (k, store.k_norm)):
            for row in part:
                if norm is not None and store.norm_over == "row":
                    row[:] = normalised(row.ravel(), weights[norm], store.eps).reshape(row.shape)
                for head in row:
                    if norm is not None and store.norm_over == "head":
                        head[:] = normalised(head, weights[norm], store.eps)
        close = q.copy()
        if store.rope is not None:
            most = store.near_position if store.near else len(tokens)
            for part, last in ((q, len(tokens)), (k, len(tokens)), (close, most)):
                for t, row in enumerate(part):
                    for head in row:
                        head[:] = rotate(head, min(t, last), store, weights[store.rope])
        out = np.zeros_like(q)
        for t in range(len(tokens)):
            for h in range(store.heads):
                seen = [
                    j
                    for j in range(t + 1)
                    if attend.window is None or t - j < attend.window or j < attend.first
                ]
                asks = [(close if attend.near and j < attend.first else q)[t, h] for j in seen]
                scores = [
                    attend.scale * float(ask @ k[j, h // group])
                    for ask, j in zip(asks, seen, strict=True)
                ]
                if attend.softcap is not None:
                    scores = [attend.softcap * math.tanh(s / attend.softcap) for s in scores]
                sinks = [] if attend.sinks is None else [float(weights[attend.sinks][h])]
                top = max(scores + sinks)
                total = sum(math.exp(s - top) for s in scores + sinks)
                for j, score in zip(seen, scores, strict=True):
                    out[t, h] += math.exp(score - top) / total * v[j, h // group]
        queries.append(q.reshape(len(tokens), -1))
        outputs.append(out.reshape(len(tokens), -1))
    return queries, outputs


@pytest.mark.parametrize(
    "name",
    [name for name in TABLE
     if name.startswith(("attention-", "rope-")) and "long" not in name and "groups" not in name],
)  # fmt: skip
def test_attention_is_the_formula(name: str) -> None:
    """Exact K and V to rounding; f16 and int8 pages move the result by their precision."""
    case = TABLE[name]
    got = run(case.load(REFERENCE), case, schedules(case.lengths)["chunks"], seed=5)
    tolerance = {"f32": 1e-5, "f16": 3e-3, "int8": 3e-2}[case.layout.dtype]
    queries, outputs = plain_attention(name)
    for tap, want, limit in (("q", queries, 1e-5), ("out", outputs, tolerance)):
        for rows, plain in zip(got[tap], want, strict=True):
            assert np.abs(rows - plain).max() <= limit * max(1, float(np.abs(plain).max())), tap


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


ACTIVATIONS = {
    "silu": lambda x: x * sigmoid(x),
    "gelu": lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: (
        x * 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    ),
    "relu": lambda x: max(x, 0.0),
    "relu2": lambda x: max(x, 0.0) ** 2,
    "swiglu_oai": lambda x: min(x, 7.0) * sigmoid(1.702 * min(x, 7.0)),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_the_formulas(activation: spec.Activation) -> None:
    x = np.concatenate([np.linspace(-12, 12, 49), [0.0, 1e-20, -80.0, 80.0]]).astype(np.float32)
    want = [ACTIVATIONS[activation](float(value)) for value in x]
    assert reference_rows.activate(activation, x) == pytest.approx(want, rel=1e-6, abs=5e-7)


def test_swiglu_of_gpt_oss_clamps_both_halves() -> None:
    x = np.array([[9.0, 1.0, -9.0, 9.0]], np.float32)
    gate = [7 * sigmoid(1.702 * 7), sigmoid(1.702)]
    want = [gate[0] * (1 - 7), gate[1] * (1 + 7)]
    assert reference_rows.gated("swiglu_oai", x)[0] == pytest.approx(want, rel=1e-6)


def route(scores: list[float], **options: object) -> list[float]:
    x = np.array([scores], np.float32)
    bias = options.pop("bias", None)
    buffer = spec.Buffer(0, len(scores))
    op = spec.Route(buffer, buffer, len(scores), 2, **options)  # type: ignore[arg-type]
    return reference_rows.route(op, x, None if bias is None else np.float32(bias))[0].tolist()


def test_routing() -> None:
    """Small enough to do by hand: ln 1 to ln 4 have softmax 0.1 to 0.4."""
    scores = [math.log(n) for n in (1, 4, 2, 3)]
    assert route(scores) == pytest.approx([1, 3, 4 / 7, 3 / 7])
    assert route(scores, normalise=False, scale=10) == pytest.approx([1, 3, 4, 3])
    assert route(scores, score="softmax_topk") == pytest.approx([1, 3, 4 / 7, 3 / 7])
    assert route(scores, score="sigmoid", normalise=False) == pytest.approx([1, 3, 4 / 5, 3 / 4])
    assert route([0.0] * 4)[:2] == [0, 1], "ties go to the lowest id"
    biased = route(scores, bias=[1.0, 0, 0, 0], normalise=False)
    assert biased == pytest.approx([0, 1, 0.1, 0.4]), "the bias steers the choice alone"
    grouped = route(scores, groups=2, top_groups=1, normalise=False)
    assert grouped == pytest.approx([1, 0, 0.4, 0.1]), "the best expert wins for its group"
    two = route(scores, score="sigmoid", groups=2, top_groups=1, bias=[0.0] * 4, normalise=False)
    assert two == pytest.approx([3, 2, 3 / 4, 2 / 3]), "with a bias the best two count"


def test_latent_attention_is_attention_over_the_expanded_cache() -> None:
    case = TABLE["latent-attention"]
    op = next(op for op in case.program.ops if isinstance(op, spec.LatentAttention))
    q_table, latent_table = (
        values(case.weights[embed.table]).astype(np.float64)
        for embed in case.program.ops[:2]
        if isinstance(embed, spec.Embed)
    )
    up = values(case.weights["up"]).astype(np.float64).reshape(op.heads, -1, op.latent_dim)
    got = run(case.load(REFERENCE), case, schedules(case.lengths)["chunks"], seed=5)["out"]
    for tokens, rows in zip(case.tokens(), got, strict=True):
        q = q_table[tokens].reshape(len(tokens), op.heads, -1)
        latent = latent_table[tokens]
        for t in range(len(tokens)):
            for h in range(op.heads):
                expanded = latent[: t + 1, : op.latent_dim] @ up[h].T
                k = np.concatenate(
                    [expanded[:, : op.nope_dim], latent[: t + 1, op.latent_dim :]], axis=1
                )
                weight = np.exp(op.scale * (k @ q[t, h]))
                want = weight @ expanded[:, op.nope_dim :] / weight.sum()
                part = slice(h * op.value_dim, (h + 1) * op.value_dim)
                assert np.abs(rows[t, part] - want).max() < 2e-2


def test_rows_are_freed_after_their_last_use() -> None:
    """Only exported rows are left, and reading others is an error."""
    case = TABLE["attention-groups"]
    executable = case.load(REFERENCE)
    run(executable, case, schedules(case.lengths)["together"], seed=1)
    freed = {buffer for done in last_uses(case.program) for buffer in done}
    kept = {case.program.logits, case.program.hidden, *case.program.taps.values()}
    assert freed == set(case.program.buffers) - kept
    with pytest.raises(KeyError):
        executable.read(freed.pop())


def test_what_the_reference_declines_it_names() -> None:
    x = spec.Buffer(0, 8)
    assert "adapters" in str(REFERENCE.accepts(spec.Lora(x, x, "w"), {}))
    assert "2" in str(REFERENCE.accepts(spec.AllReduce(x, 2), {}))
    assert REFERENCE.accepts(spec.AllReduce(x, 1), {}) is None
    odd = REFERENCE.accepts(spec.Linear(x, x, "w"), {"w": ("Q9_9",)})
    assert odd == "weight w has the unknown format Q9_9"


def test_opening_back_ends() -> None:
    assert open_backend("reference").name == "reference"
    assert open_backend("null").name == "null"
    with pytest.raises(ConfigError, match="unknown back-end 'gpu'; choose one of"):
        open_backend("gpu")
    with pytest.raises(ConfigError, match="no level 'avx2'"):
        open_backend("reference", "avx2")
    if cpu_missing():
        with pytest.raises(KernelError, match="not built"):
            open_backend("auto")
