"""The manual of the op set: what a model program may say, and what each word means.

A model is a `Program`: a straight list of ops over buffers of float32 rows. A back-end executes
it; `ops/reference.py` defines what every op computes, `ops/null.py` counts what it costs. A
back-end may decline an op (`Backend.accepts`), never half-work.

Vocabulary. A *row* is one token of the step; there are T of them, those of one sequence adjacent
and in position order. A *slice* is one sequence's run of rows. *Logits rows* are the R rows of the
step whose next-token logits are wanted. A *block* is `block_size` tokens of KV of one group
(accounting, in `core`); a *page* is the memory behind it. All arithmetic on rows is in float32
unless an op says otherwise, and **the bits of a row depend on that row and its KV alone**: never on
T, on the other rows, on how a prompt was cut, on the block size or on the number of threads.

Shapes in the op docstrings: `[T, n]` is a token buffer of width n, `[R, n]` a logits-row buffer.
Weights are named; a weight is a matrix `[N, K]` (out features, in features) or a vector `[N]`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Literal, Protocol

from headrace.ops.batch import F32, Limits, RaggedBatch
from headrace.ops.weights import Weight

WEIGHT_FIELDS = frozenset(
    {
        "table", "positions", "weight", "bias", "rope", "q_norm", "k_norm", "sinks", "up",
        "gate_up", "down",
    }
)  # fmt: skip
"""Fields of ops that name a weight."""

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "swiglu_oai"]


@dataclass(frozen=True)
class Buffer:
    """Float32 rows of one width, written by one op and read by later ones (SSA but for
    `residual` of `RmsNorm`, which is updated in place).

    id: index in `Program.buffers`. width: values a row. rows: `tokens` [T] or `logits` [R].
    """

    id: int
    width: int
    rows: Literal["tokens", "logits"] = "tokens"


@dataclass(frozen=True)
class Op:
    """Base of all ops; `kind` is the name used in logs, metrics and refusals."""

    @property
    def kind(self) -> str:
        return type(self).KIND  # type: ignore[attr-defined,no-any-return]

    def buffers(self) -> list[Buffer]:
        """Every buffer the op touches, in field order."""
        return [v for f in fields(self) if isinstance(v := getattr(self, f.name), Buffer)]

    def weights(self) -> list[str]:
        """The names of the weights that the op reads, in field order."""
        names = (getattr(self, f.name) for f in fields(self) if f.name in WEIGHT_FIELDS)
        return [name for name in names if name is not None]


@dataclass(frozen=True)
class Embed(Op):
    """out[t] = table[token[t]] * scale (+ positions[position[t]] where given).

    table: [V, width] in any weight format. positions: [max_positions, width] (GPT-2).
    """

    KIND = "embed"
    out: Buffer
    table: str
    scale: float = 1.0
    positions: str | None = None


@dataclass(frozen=True)
class RmsNorm(Op):
    """If `residual`: residual += residual_scale * x, and the norm is taken of residual, else of x.

    norm = 'rms':   out = v / sqrt(mean(v^2) + eps) * weight           (Zhang & Sennrich 2019)
    norm = 'layer': out = (v - mean) / sqrt(var + eps) * weight + bias (Ba et al. 2016)
    norm = 'none':  out = v (only the residual addition; weight is None)
    Gemma's "1 + weight" is folded into the weight when it is loaded.
    """

    KIND = "rms_norm"
    x: Buffer
    out: Buffer
    weight: str | None
    eps: float
    residual: Buffer | None = None
    residual_scale: float = 1.0
    norm: Literal["rms", "layer", "none"] = "rms"
    bias: str | None = None


@dataclass(frozen=True)
class Linear(Op):
    """out = x @ weight.T + bias. weight: [N, K] of any format, possibly several parts stacked
    along N (q, k, v; gate, up). A back-end may quantize x per row and group of 32."""

    KIND = "linear"
    x: Buffer
    out: Buffer
    weight: str
    bias: str | None = None


@dataclass(frozen=True)
class RopeStore(Op):
    """Split qkv rows into q [heads, head_dim], k and v [kv_heads, head_dim]; normalise q and k
    where asked; rotate; write k and v to the pages of `layer`, rounded to the KV type; q goes to
    out.

    rope: name of a weight vector [rotary/2] with the inverse frequencies, or None for no rotation.
    The angle is float32(position) * inv_freq rounded to float32, or, where `wide`, the exact
    product (positions far beyond a model's context, where a float32 angle is too coarse); cos and
    sin are taken of that and multiplied by rope_scale (yarn's and longrope's attention factor).
    Only the first 2*len(rope) values of a head turn. style 'halves' pairs i with i + rotary/2
    (GPT-NeoX, Hugging Face checkpoints); 'pairs' pairs 2i with 2i+1 (GGUF files of the Llama
    family).
    q_norm, k_norm: weights of an RMS norm over each head (norm_over 'head': Qwen3, Gemma 3) or over
    the whole q or k row (norm_over 'row': OLMo 2), before rotation.
    near: where given, gets q as out does, but rotated as at min(position, near_position): the
    query of a streaming cache against its kept-first tokens (`Attention.near`).
    """

    KIND = "rope_store"
    qkv: Buffer
    out: Buffer
    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: str | None
    rope_scale: float = 1.0
    style: Literal["halves", "pairs"] = "halves"
    q_norm: str | None = None
    k_norm: str | None = None
    norm_over: Literal["head", "row"] = "head"
    eps: float = 1e-6
    wide: bool = False
    near: Buffer | None = None
    near_position: int = 0


@dataclass(frozen=True)
class Attention(Op):
    """out[t, h] = softmax_j(scale * q[t, h] . k[j, g(h)]) @ v[j, g(h)], with
    g(h) = h // (heads / kv_heads), over the positions j of t's sequence with j <= position[t], and
    position[t] - j < window where a window is given, or j < first (StreamingLLM's kept tokens).

    K and V are read from the pages only. softcap: scores = cap * tanh(scores / cap) (Gemma 2).
    sinks: weight [heads] of learned logits that join the softmax with a zero value (gpt-oss).
    near: where given, the query that meets the positions j < first instead of q. With the rotation
    of `RopeStore.near` these stay at the distance that they have within a cache of first + window
    tokens, however long the sequence grows (Xiao et al. 2023, section 3.2).
    """

    KIND = "attention"
    q: Buffer
    out: Buffer
    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    first: int = 0
    softcap: float | None = None
    sinks: str | None = None
    near: Buffer | None = None


@dataclass(frozen=True)
class LatentAttention(Op):
    """Multi-head latent attention (DeepSeek-V2): q [T, heads * (nope + rope)], the compressed cache
    row [latent + rope] of each token is stored and attended; out [T, heads * value_dim]."""

    KIND = "latent_attention"
    q: Buffer
    latent: Buffer
    out: Buffer
    layer: int
    heads: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    latent_dim: int
    scale: float
    up: str


@dataclass(frozen=True)
class Gated(Op):
    """gated: x is [T, 2n] = gate | up, out = act(gate) * up [T, n]. Otherwise out = act(x) [T, n].

    gelu is the exact erf form, gelu_tanh the tanh approximation, relu2 = relu(x)^2; swiglu_oai is
    gpt-oss's clamped form: (up + 1) * gate * sigmoid(1.702 * gate), gate <= 7, |up| <= 7.
    """

    KIND = "gated"
    x: Buffer
    out: Buffer
    activation: Activation
    gated: bool = True


@dataclass(frozen=True)
class Route(Op):
    """Router logits [T, experts] -> out [T, 2 * top_k]: expert ids (as floats) then their weights,
    highest score first, ties to the lowest id."""

    KIND = "route"
    logits: Buffer
    out: Buffer
    experts: int
    top_k: int
    score: Literal["softmax", "sigmoid", "softmax_topk"] = "softmax"
    normalise: bool = True
    scale: float = 1.0
    bias: str | None = None
    groups: int = 1
    top_groups: int = 1


@dataclass(frozen=True)
class Experts(Op):
    """out[t] = sum over t's routed experts, in top-k order, of weight * down(act(gate) * up)."""

    KIND = "experts"
    x: Buffer
    routes: Buffer
    out: Buffer
    gate_up: str
    down: str
    experts: int
    top_k: int
    hidden: int
    activation: Activation = "silu"


@dataclass(frozen=True)
class Lora(Op):
    """out[t] += scale_a * (x[t] @ A_a.T) @ B_a.T for the adapter a of row t; rows without one keep
    their value. target names the linear that is adapted."""

    KIND = "lora"
    x: Buffer
    out: Buffer
    target: str


@dataclass(frozen=True)
class AllReduce(Op):
    """Sum over ranks in rank order; identity on one rank."""

    KIND = "all_reduce"
    x: Buffer
    ranks: int


@dataclass(frozen=True)
class AllToAll(Op):
    """Send each row's routed copies to the ranks of their experts, or bring results back."""

    KIND = "all_to_all"
    x: Buffer
    routes: Buffer
    ranks: int
    top_k: int
    combine: bool


@dataclass(frozen=True)
class Logits(Op):
    """out [R, V] = softcap(scale * (x[logits rows] @ weight.T + bias))."""

    KIND = "logits"
    x: Buffer
    out: Buffer
    weight: str
    bias: str | None = None
    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True)
class Sample(Op):
    """One token per sample point from its row of logits; the arrays are in `RaggedBatch`.

    In this order: log-probabilities of the raw logits (what `logprobs` reports); grammar mask and
    additive bias (logit_bias, and -inf for banned ids); repetition penalty (logit > 0 divided, else
    multiplied) over prompt and output ids; presence and frequency penalties over output ids. Then
    temperature 0 takes the highest logit, ties to the lowest id. Otherwise divide by temperature;
    keep p >= min_p * max p; keep the top_k highest (0 or -1: all; ties to the lowest ids); keep the
    shortest prefix, in order of probability (renormalised over the survivors; ties to the lowest
    ids), whose sum reaches top_p, always at least one; and take the argmax of logit + g, where
    g = -ln(-ln(u)), u a hash of (seed, choice, position, id). Gumbel-max draws from the softmax of
    the survivors, and the draw depends on nothing else in the batch.
    """

    KIND = "sample"
    logits: Buffer


ALL_OPS: tuple[type[Op], ...] = (
    Embed, RmsNorm, Linear, RopeStore, Attention, LatentAttention, Gated, Route, Experts, Lora,
    AllReduce, AllToAll, Logits, Sample,
)  # fmt: skip


@dataclass(frozen=True)
class KVGroup:
    """Layers that keep the same positions of KV.

    window: None keeps all positions; W keeps those that a query may still see (the last W).
    first: positions at the start that are kept beside a window (streaming attention).
    `pages_per_block` pages of equal bytes hold one block: page s of a block holds layers
    `layers[s * n : (s + 1) * n]`, n = len(layers) / pages_per_block.
    """

    name: str
    layers: tuple[int, ...]
    window: int | None = None
    pages_per_block: int = 1
    first: int = 0


KVType = Literal["f16", "f32", "int8"]


@dataclass(frozen=True)
class KVLayout:
    """Geometry of the KV pages. All layers have the same kv_heads and head_dim.

    block_size: tokens a block, a multiple of the tile of 16. The order of values inside a page is
    the back-end's own.
    """

    groups: tuple[KVGroup, ...]
    kv_heads: int
    head_dim: int
    block_size: int = 16
    dtype: KVType = "f16"

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer in one block: K and V, with a float32 scale per token and head each
        where the type is int8."""
        values = 2 * self.kv_heads * self.block_size
        item = {"f16": 2, "f32": 4, "int8": 1}[self.dtype]
        return values * (self.head_dim * item + (4 if self.dtype == "int8" else 0))

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, the same in every group."""
        group = self.groups[0]
        return self.layer_bytes * (len(group.layers) // group.pages_per_block)

    @property
    def table_rows(self) -> int:
        """Rows of a sequence's page table: one per (group, page of a block)."""
        return sum(group.pages_per_block for group in self.groups)

    def place(self, layer: int) -> tuple[int, int]:
        """(row of the page table, index of the layer inside its page)."""
        row = 0
        for group in self.groups:
            if layer in group.layers:
                in_page = len(group.layers) // group.pages_per_block
                index = group.layers.index(layer)
                return row + index // in_page, index % in_page
            row += group.pages_per_block
        raise KeyError(f"layer {layer} is in no KV group")


@dataclass(frozen=True)
class Program:
    """A model as ops in order, with the shapes of the weights it names.

    buffers: all buffers, by id. shapes: weight name -> (N, K), or (N,) for a vector.
    logits: the buffer that `Sample` reads; hidden: the rows that `Logits` reads (after the final
    norm), for embeddings. taps: name -> buffer of exported hidden rows.
    """

    ops: tuple[Op, ...]
    buffers: tuple[Buffer, ...]
    shapes: Mapping[str, tuple[int, ...]]
    logits: Buffer
    hidden: Buffer
    taps: Mapping[str, Buffer] = field(default_factory=dict)


class Executable(Protocol):
    """A program loaded on a back-end, with its KV pages and its batch arena.

    `batch` is owned by the caller's engine and read at fixed addresses; `run` executes one step,
    fills the output arrays of `batch`, and is not re-entrant.
    """

    batch: RaggedBatch

    def run(self, part: Literal["all", "forward", "sample"] = "all") -> None:
        """Execute the copies of the batch, then the program. Changes pages and outputs.

        part: 'forward' runs up to and with the logits, 'sample' the sampling after it, so that
        grammar masks can be computed while the forward pass runs.
        """

    def read(self, buffer: Buffer) -> F32:
        """A copy of the rows of `buffer` as the last `run` left them, [rows of that step, width].

        For `Program.logits`, `Program.hidden` and the taps; a back-end reuses the memory of other
        buffers and raises KeyError for them.
        """

    @property
    def paths(self) -> list[tuple[str, str]]:
        """(op, kernel path) of every instruction, in order. A path that ends in '.generic' works
        for any shape and is slower than the one for common shapes."""

    def populate(self) -> None:
        """Begin to make the planned memory resident in the background, where that is not done at
        load. Returns at once."""

    def close(self) -> None:
        """Free pages, weights and threads. Idempotent."""


LoadProgress = Callable[[int, int], None]
"""Called while weights are packed, with (bytes done, bytes in all)."""


class Backend(Protocol):
    """A way to execute programs. `level` is the instruction level or device in use."""

    name: str
    level: str

    def accepts(self, op: Op, weight_formats: Mapping[str, tuple[str, ...]]) -> str | None:
        """None if this back-end executes the op as given, else the reason it does not."""

    def load(
        self,
        program: Program,
        weights: Mapping[str, Weight],
        layout: KVLayout,
        limits: Limits,
        progress: LoadProgress | None = None,
    ) -> Executable:
        """Pack the weights, allocate pages and workspace.

        Weights with a recipe are made one at a time, so that memory peaks at the plan and about one
        weight. Raises KernelError naming every op that is declined, before anything is allocated.
        """

    def memory(
        self,
        program: Program,
        weights: Mapping[str, Weight],
        layout: KVLayout,
        limits: Limits,
    ) -> dict[str, int]:
        """Bytes that `load` will hold: {'weights', 'kv', 'workspace', 'batch'}, exact, without
        allocating."""
