"""One table of cases for every op. Shapes are odd on purpose.

Tolerances are shares of the root mean square of the output.

- EXACT: float32 in another order of summation, and other polynomials for exp, tanh, sin.
- QUANTIZED: a back-end may quantize the rows that enter a matrix product to 8 bits in groups of
  32. The largest of 32 normal values is about 2.4 sigma, so a step is 2.4 / 127 sigma and the error
  of a value is step / sqrt(12) = 0.55 % of sigma, which is also the error of a dot product against
  its standard deviation. The tolerance is six of these.
- F16, INT8: K and V equal up to a rounding tie. A value that falls to the other side moves by
  2^-11 or 1/127 of itself; attention averages such moves.
"""

from typing import Any

import numpy as np

from headrace.ops.formats import FORMATS
from headrace.ops.program import ProgramBuilder
from headrace.ops.spec import Buffer, KVGroup
from headrace.ops.weights import Weight
from tests.ops.quantize import exact, tensor, weight
from tests.ops.rig import TOKENS, Case, finish, layout

EXACT = 2e-5
QUANTIZED = 0.035
KV = {"f32": 5e-5, "f16": 2e-3, "int8": 2e-2}


RARE = ("F64", "I4", "I4Z", "I8", "I8M")
"""Formats that a back-end may decline."""


class Build(ProgramBuilder):
    """A program builder that makes the weights too: `feed` gives random rows."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng = np.random.default_rng(seed)
        self.made: dict[str, Weight] = {}
        self.tolerance: dict[str, float] = {}
        self.give("end", "F32", (TOKENS + 1, 8))

    def give(self, name: str, form: str, shape: tuple[int, ...]) -> str:
        self.made[name] = weight(self.rng, name, form, shape)
        return name

    def feed(self, width: int, spread: float = 1.0, last: float = 0.0) -> Buffer:
        """Random rows of that width, one per token id; then one row of `last`, token id TOKENS."""
        name = f"rows{len(self.made)}"
        rows = np.full((TOKENS + 1, width), last)
        rows[:TOKENS] = spread * self.rng.standard_normal((TOKENS, width))
        self.made[name] = exact(name, rows)
        return self.embed(name, TOKENS + 1, width)

    def check(self, name: str, buffer: Buffer, tolerance: float) -> None:
        """Tap a buffer and compare it."""
        self.tap(name, buffer)
        self.tolerance[name] = tolerance

    def case(self, name: str, **options: Any) -> Case:
        return Case(
            name, finish(self), self.made, options.pop("layout", layout()), self.tolerance,
            **options,
        )  # fmt: skip


def widths(form: str) -> tuple[int, ...]:
    """Row widths to try: whole blocks, not always multiples of 16 values."""
    block = FORMATS[form].block_values
    return {1: (1, 7, 33, 100), 32: (32, 96, 160), 256: (256, 512)}[block]


def floats(form: str) -> bool:
    return FORMATS[form].block_values == 1


def embeds() -> list[Case]:
    cases = []
    for form in FORMATS:
        build = Build(1)
        for width in widths(form):
            table = build.give(f"table{width}", form, (TOKENS, width))
            build.check(f"k{width}", build.embed(table, TOKENS, width, scale=3.5), EXACT)
        cases.append(build.case(f"embed-{form}", optional=form in RARE))
    build = Build(2)
    table, positions = build.give("table", "Q8_0", (TOKENS, 32)), build.give("p", "F16", (90, 32))
    out = build.embed(table, TOKENS, 32, positions=positions, max_positions=90)
    build.check("positions", out, EXACT)
    return [*cases, build.case("embed-positions")]


def linears() -> list[Case]:
    cases = []
    for form in FORMATS:
        build = Build(3)
        tolerance = EXACT if floats(form) else QUANTIZED
        for i, width in enumerate(widths(form)):
            rows = (5, 37, 1, 64)[i]
            name = build.give(f"w{width}", form, (rows, width))
            bias = build.give(f"b{width}", "F32", (rows,)) if i % 2 else None
            out = build.linear(build.feed(width), name, rows, bias)
            build.check(f"n{rows}k{width}", out, tolerance)
        cases.append(build.case(f"linear-{form}", optional=form in RARE))
    return [*cases, stacked_linear(), scattered_linear()]


def stacked_linear() -> Case:
    """Parts of different formats, and a row order as the Llama GGUF conversion needs."""
    build = Build(4)
    parts = [tensor(build.rng, form, (rows, 64)) for form, rows in
             (("Q4_1", 24), ("Q8_0", 7), ("Q4_1", 9))]  # fmt: skip
    build.made["qkv"] = Weight("qkv", tuple(parts))
    order = build.rng.permutation(40).astype(np.int32)
    build.made["ordered"] = Weight("ordered", tuple(parts), order)
    x = build.feed(64)
    build.check("stacked", build.linear(x, "qkv", 40), QUANTIZED)
    build.check("ordered", build.linear(x, "ordered", 40), QUANTIZED)
    return build.case("linear-stacked")


def scattered_linear() -> Case:
    """Rows with zeros, huge outliers and groups of zeros: scales per row and group must hold."""
    build = Build(5)
    rows = build.rng.standard_normal((TOKENS, 96))
    rows[::3, 32:64] = 0
    rows[1::3] *= 1e4
    rows[::5] = 0
    build.made["x"] = exact("x", rows)
    x = build.embed("x", TOKENS, 96)
    name = build.give("w", "Q4_0", (19, 96))
    build.check("out", build.linear(x, name, 19), QUANTIZED * 2)
    return build.case("linear-outliers", by_row=True)


def norms() -> list[Case]:
    build = Build(6)
    for width in (1, 5, 33, 576):
        x, residual = build.feed(width), build.feed(width)
        scale, bias = (build.give(f"{n}{width}", "F32", (width,)) for n in ("w", "b"))
        build.made[f"plus{width}"] = Weight(f"plus{width}", build.made[scale].parts, add=1.0)
        build.check(f"rms{width}", build.rms_norm(x, scale, 1e-5), EXACT)
        build.check(f"plus{width}", build.rms_norm(x, f"plus{width}", 1e-6), EXACT)
        if width > 1:
            layer = build.rms_norm(x, scale, 1e-5, norm="layer", bias=bias)
            build.check(f"layer{width}", layer, EXACT)
        added = build.rms_norm(x, scale, 1e-5, residual=residual, residual_scale=0.25)
        build.check(f"added{width}", added, EXACT)
        only = build.rms_norm(x, None, 0.0, residual=residual, norm="none")
        build.check(f"only{width}", only, EXACT)
        build.check(f"residual{width}", residual, EXACT)
    return [build.case("norms")]


def gates() -> list[Case]:
    cases = []
    for activation in ("silu", "gelu", "gelu_tanh", "relu", "relu2", "swiglu_oai"):
        build = Build(7)
        for width in (1, 7, 33):
            both = build.gated(build.feed(2 * width, 4.0), activation)
            build.check(f"gated{width}", both, EXACT)
            if activation != "swiglu_oai":
                alone = build.gated(build.feed(width, 4.0), activation, gated=False)
                build.check(f"alone{width}", alone, EXACT)
        cases.append(build.case(f"gated-{activation}"))
    return cases


def logits() -> list[Case]:
    build = Build(8)
    x = build.feed(96)
    for form in ("Q8_0", "F16", "Q4_1"):
        tolerance = EXACT if floats(form) else QUANTIZED
        name, bias = build.give(form, form, (67, 96)), build.give(f"b{form}", "F32", (67,))
        build.check(form, build.logits(x, name, 67), tolerance)
        capped = build.logits(x, name, 67, bias=bias, scale=0.5, softcap=7.0)
        build.check(f"capped{form}", capped, tolerance)
    return [build.case("logits")]


def attention(
    name: str,
    heads: int = 3,
    kv_heads: int = 1,
    head_dim: int = 16,
    *,
    rotary: int | None = None,
    dtype: str = "f16",
    block_size: int = 16,
    lengths: tuple[int, ...] = (1, 3, 21, 50),
    store: dict[str, Any] | None = None,
    q_norm: bool = False,
    **options: Any,
) -> Case:
    """qkv rows -> rope_store -> attention on one layer; both outputs are compared."""
    build = Build(9)
    store = dict(store or {})
    width = head_dim if rotary is None else rotary
    rope = None
    if width > 1:
        rope = "rope"
        frequencies = 1000.0 ** (-np.arange(0, width // 2) / (width // 2))
        build.made["rope"] = exact("rope", frequencies)
    if q_norm:
        over_row = store.get("norm_over") == "row"
        for norm, count in (("q_norm", heads), ("k_norm", kv_heads)):
            store[norm] = build.give(norm, "F32", ((count if over_row else 1) * head_dim,))
    if options.pop("sinks", False):
        options["sinks"] = build.give("sinks", "F32", (heads,))
    # What the last token id stores must never be seen by others; int8 has no NaN.
    qkv = build.feed((heads + 2 * kv_heads) * head_dim, last=1e30 if dtype == "int8" else np.nan)
    q = build.rope_store(qkv, 0, heads, kv_heads, head_dim, rope, width - width % 2, **store)
    build.check("q", q, EXACT)
    scale = options.pop("scale", head_dim**-0.5)
    out = build.attention(q, 0, heads, kv_heads, head_dim, scale, **options)
    build.check("out", out, KV[dtype])
    first = options.get("first", 0)
    groups = (KVGroup("g", (0,), None if first else options.get("window")),)
    return build.case(
        name, layout=layout(kv_heads, head_dim, groups, block_size, dtype), lengths=lengths
    )


def attentions() -> list[Case]:
    cases = [
        attention(f"attention-{heads}:{kv_heads}x{dim}", heads, kv_heads, dim)
        for heads, kv_heads, dim in
        ((1, 1, 8), (3, 1, 20), (9, 3, 64), (4, 4, 33), (2, 1, 128), (5, 5, 15), (8, 2, 96))
    ]  # fmt: skip
    cases += [
        attention(f"attention-{dtype}-{size}", 6, 2, 24, dtype=dtype, block_size=size)
        for dtype in ("f16", "f32", "int8")
        for size in (16, 32, 64)
    ]
    long = (300, 5, 270)
    return [
        *cases,
        attention("attention-long", 3, 3, 16, lengths=long),
        attention("attention-long-int8", 3, 1, 16, dtype="int8", lengths=long),
        attention("attention-window-1", window=1),
        attention("attention-window-20", window=20),
        attention("attention-window-long", window=130, lengths=long),
        attention("attention-window-first", window=16, first=4),
        attention("attention-window-first-long", window=33, first=19, lengths=long, dtype="f32"),
        near("attention-near", window=16, first=4),
        near("attention-near-long", window=33, first=19, lengths=long, dtype="f32", softcap=3.0),
        near("attention-near-spans", window=20, first=270, lengths=(330, 5), dtype="int8"),
        near("attention-near-norm", window=9, first=3, q_norm=True, head_dim=24),
        attention("rope-wide", lengths=(300, 5), store={"wide": True, "rope_scale": 1.25}),
        attention("attention-softcap", softcap=2.0, scale=1.0),
        attention("attention-sinks", sinks=True),
        attention("attention-sinks-window", sinks=True, window=7, heads=4, kv_heads=2),
        attention("attention-sharp", scale=6.0, dtype="f32"),
        attention("rope-none", rotary=0),
        attention("rope-pairs", store={"style": "pairs"}),
        attention("rope-partial", head_dim=20, rotary=6, store={"rope_scale": 1.25}),
        attention(
            "rope-partial-pairs", head_dim=21, rotary=10, store={"style": "pairs"}, dtype="f32"
        ),
        attention("rope-norm-head", q_norm=True, head_dim=24),
        attention("rope-norm-row", q_norm=True, kv_heads=3, store={"norm_over": "row"}),
        groups(),
    ]


def near(name: str, *, window: int, first: int, **options: Any) -> Case:
    """Streaming attention: the kept-first tokens meet a query of their own."""
    store = {"near_position": first + window - 1, "wide": True}
    return attention(name, window=window, first=first, store=store, **options)


def groups() -> Case:
    """Two KV groups, one of two pages a block, the other with a window."""
    build = Build(10)
    kinds = (KVGroup("full", (0, 1, 2, 3), None, 2), KVGroup("local", (4, 5), 16))
    for layer in range(6):
        qkv = build.feed(5 * 12)
        q = build.rope_store(qkv, layer, 3, 1, 12, None, 0)
        window = 16 if layer > 3 else None
        out = build.attention(q, layer, 3, 1, 12, 0.3, window=window)
        build.check(f"layer{layer}", out, KV["f16"])
    return build.case("attention-groups", layout=layout(1, 12, kinds))


def mixtures() -> list[Case]:
    """Routing and experts, with every way to score."""
    ways: list[dict[str, Any]] = [
        {"score": "softmax"},
        {"score": "softmax", "normalise": False, "scale": 2.5},
        {"score": "softmax_topk"},
        {"score": "sigmoid", "bias": "bias", "groups": 3, "top_groups": 2},
        {"score": "softmax", "groups": 3, "top_groups": 1, "normalise": False},
    ]
    cases = []
    for i, way in enumerate(ways):
        build = Build(12)
        if "bias" in way:
            build.give("bias", "F32", (9,))
        routes = build.route(build.feed(9), 3, **way)
        build.give("gate_up", "F32", (9 * 2 * 10, 12))
        build.give("down", "F32", (9 * 12, 10))
        out = build.experts(build.feed(12), routes, "gate_up", "down", 9, 10)
        build.check("routes", routes, EXACT)
        build.check("out", out, EXACT)
        cases.append(build.case(f"experts-{i}-{way['score']}", optional=True))
    return cases


def latents() -> list[Case]:
    build = Build(13)
    build.give("up", "F32", (4 * (6 + 5), 20))
    q, latent = build.feed(4 * (6 + 4)), build.feed(24)
    out = build.latent_attention(
        q, latent, 0, 4, nope_dim=6, rope_dim=4, value_dim=5, latent_dim=20, scale=10**-0.5, up="up"
    )
    build.check("out", out, KV["f16"])
    return [build.case("latent-attention", layout=layout(1, 12), optional=True)]


TABLE: dict[str, Case] = {
    case.name: case
    for make in (embeds, linears, norms, gates, logits, attentions, mixtures, latents)
    for case in make()
}
