"""Recording a model as a `Program`: allocate buffers, append ops, note the shapes of weights.

Each method appends one op and returns its output buffer. A weight that is named twice must have the
same shape both times (tied embeddings).
"""

from typing import Any, Literal

from headrace.ops.spec import (
    Activation,
    AllReduce,
    AllToAll,
    Attention,
    Buffer,
    Embed,
    Experts,
    Gated,
    LatentAttention,
    Linear,
    Logits,
    Op,
    Program,
    RmsNorm,
    RopeStore,
    Route,
    Sample,
)

Norm = Literal["rms", "layer", "none"]


class ProgramBuilder:
    """Collects ops; `finish` returns the immutable program."""

    def __init__(self) -> None:
        self._ops: list[Op] = []
        self._buffers: list[Buffer] = []
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._near: dict[Buffer, Buffer] = {}
        self._taps: dict[str, Buffer] = {}

    def _buffer(self, width: int, rows: Literal["tokens", "logits"] = "tokens") -> Buffer:
        buffer = Buffer(len(self._buffers), width, rows)
        self._buffers.append(buffer)
        return buffer

    def _weight(self, name: str | None, *shape: int) -> None:
        if name is None:
            return
        if self._shapes.setdefault(name, shape) != shape:
            raise ValueError(f"weight {name} is used as {self._shapes[name]} and as {shape}")

    def embed(
        self,
        table: str,
        vocabulary: int,
        width: int,
        scale: float = 1.0,
        positions: str | None = None,
        max_positions: int = 0,
    ) -> Buffer:
        """Rows of the embedding table, [T, width]."""
        self._weight(table, vocabulary, width)
        self._weight(positions, max_positions, width)
        out = self._buffer(width)
        self._ops.append(Embed(out, table, scale, positions))
        return out

    def rms_norm(
        self,
        x: Buffer,
        weight: str | None,
        eps: float,
        *,
        residual: Buffer | None = None,
        residual_scale: float = 1.0,
        norm: Norm = "rms",
        bias: str | None = None,
    ) -> Buffer:
        """The norm of x, or of residual += residual_scale * x; [T, x.width]."""
        self._weight(weight, x.width)
        self._weight(bias, x.width)
        out = self._buffer(x.width)
        self._ops.append(RmsNorm(x, out, weight, eps, residual, residual_scale, norm, bias))
        return out

    def linear(self, x: Buffer, weight: str, width: int, bias: str | None = None) -> Buffer:
        """x @ weight.T + bias, [T, width]."""
        self._weight(weight, width, x.width)
        self._weight(bias, width)
        out = self._buffer(width)
        self._ops.append(Linear(x, out, weight, bias))
        return out

    def rope_store(
        self,
        qkv: Buffer,
        layer: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        rope: str | None,
        rotary: int,
        near_position: int | None = None,
        **options: Any,
    ) -> Buffer:
        """Rotated q, [T, heads * head_dim]; k and v go to the pages. Options as in `RopeStore`;
        with near_position the second rotation of q is what `near` gives for the result."""
        if rope is not None:
            self._weight(rope, rotary // 2)
        over_row = options.get("norm_over", "head") == "row"
        self._weight(options.get("q_norm"), (heads if over_row else 1) * head_dim)
        self._weight(options.get("k_norm"), (kv_heads if over_row else 1) * head_dim)
        out = self._buffer(heads * head_dim)
        if near_position is not None:
            near = self._near[out] = self._buffer(heads * head_dim)
            options |= {"near": near, "near_position": near_position}
        self._ops.append(RopeStore(qkv, out, layer, heads, kv_heads, head_dim, rope, **options))
        return out

    def near(self, q: Buffer) -> Buffer | None:
        """The second rotation of a q that `rope_store` gave, or None."""
        return self._near.get(q)

    def attention(
        self,
        q: Buffer,
        layer: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float,
        **options: Any,
    ) -> Buffer:
        """[T, heads * head_dim]. Options as in `Attention`."""
        self._weight(options.get("sinks"), heads)
        out = self._buffer(heads * head_dim)
        options.setdefault("near", self.near(q))
        self._ops.append(Attention(q, out, layer, heads, kv_heads, head_dim, scale, **options))
        return out

    def gated(self, x: Buffer, activation: Activation, gated: bool = True) -> Buffer:
        """act(gate) * up of x = gate | up, [T, x.width / 2]; or act(x) where not gated."""
        out = self._buffer(x.width // 2 if gated else x.width)
        self._ops.append(Gated(x, out, activation, gated))
        return out

    def latent_attention(
        self,
        q: Buffer,
        latent: Buffer,
        layer: int,
        heads: int,
        *,
        nope_dim: int,
        rope_dim: int,
        value_dim: int,
        latent_dim: int,
        scale: float,
        up: str,
    ) -> Buffer:
        """[T, heads * value_dim]. up: [heads * (nope_dim + value_dim), latent_dim]."""
        self._weight(up, heads * (nope_dim + value_dim), latent_dim)
        out = self._buffer(heads * value_dim)
        self._ops.append(
            LatentAttention(
                q, latent, out, layer, heads, nope_dim, rope_dim, value_dim, latent_dim, scale, up
            )
        )
        return out

    def route(self, logits: Buffer, top_k: int, **options: Any) -> Buffer:
        """Expert ids and weights, [T, 2 * top_k]. Options as in `Route`."""
        bias = options.get("bias")
        self._weight(bias, logits.width)
        out = self._buffer(2 * top_k)
        self._ops.append(Route(logits, out, logits.width, top_k, **options))
        return out

    def experts(
        self,
        x: Buffer,
        routes: Buffer,
        gate_up: str,
        down: str,
        experts: int,
        hidden: int,
        activation: Activation = "silu",
    ) -> Buffer:
        """[T, x.width]. gate_up: [experts * 2 * hidden, x.width], down: [experts * x.width,
        hidden], the experts stacked in order of id."""
        self._weight(gate_up, experts * 2 * hidden, x.width)
        self._weight(down, experts * x.width, hidden)
        out = self._buffer(x.width)
        top_k = routes.width // 2
        self._ops.append(Experts(x, routes, out, gate_up, down, experts, top_k, hidden, activation))
        return out

    def all_reduce(self, x: Buffer, ranks: int) -> Buffer:
        """x summed over the ranks, in place; nothing is recorded for one rank."""
        if ranks > 1:
            self._ops.append(AllReduce(x, ranks))
        return x

    def all_to_all(self, x: Buffer, routes: Buffer, ranks: int, combine: bool) -> Buffer:
        """x after its rows went to their experts' ranks, or came back; nothing for one rank."""
        if ranks > 1:
            self._ops.append(AllToAll(x, routes, ranks, routes.width // 2, combine))
        return x

    def tap(self, name: str, buffer: Buffer) -> None:
        """Export the rows of a buffer under a name."""
        self._taps[name] = buffer

    def logits(
        self,
        x: Buffer,
        weight: str,
        vocabulary: int,
        *,
        bias: str | None = None,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> Buffer:
        """[R, vocabulary] of the logits rows of x."""
        self._weight(weight, vocabulary, x.width)
        self._weight(bias, vocabulary)
        out = self._buffer(vocabulary, "logits")
        self._ops.append(Logits(x, out, weight, bias, scale, softcap))
        return out

    def finish(self, hidden: Buffer, logits: Buffer) -> Program:
        """End with `Sample` over the logits. hidden: the rows that `Logits` read."""
        self._ops.append(Sample(logits))
        return Program(
            tuple(self._ops), tuple(self._buffers), dict(self._shapes), logits, hidden,
            dict(self._taps),
        )  # fmt: skip
