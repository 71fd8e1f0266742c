"""What a model is, as data: every difference between families is a field here.

`ModelSpec` is read from a checkpoint's configuration, `decoder.program` turns it into ops, and
`names.bind` finds the tensors. All dims are counts of values unless said otherwise.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from headrace.ops.spec import Activation, KVGroup, Program
from headrace.ops.weights import Weight

ScalingKind = Literal["linear", "dynamic", "llama3", "yarn", "longrope", "factors"]


@dataclass(frozen=True)
class Scaling:
    """How rotary frequencies are stretched beyond the context a model was trained on.

    factor: ratio of the new context to the original. original: positions trained on.
    attention_factor: multiplies cos and sin; None = the kind's own rule. beta_fast, beta_slow,
    truncate, mscale, mscale_all_dim: yarn. low_freq, high_freq: llama3. short, long: longrope's
    divisors of each frequency; factors: divisors given as a tensor (GGUF `rope_freqs`).
    """

    kind: ScalingKind
    factor: float = 1.0
    original: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    low_freq: float = 1.0
    high_freq: float = 4.0
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()


@dataclass(frozen=True)
class Rope:
    """Rotary frequencies theta ** (-2i / dims) over the first `dims` values of a head."""

    theta: float
    dims: int
    scaling: Scaling | None = None


@dataclass(frozen=True)
class Layer:
    """What differs from layer to layer. window: None sees everything, W the last W positions.
    rope: a key of `ModelSpec.ropes`, or None for a layer without rotation. first: positions at the
    start that are seen beside the window."""

    window: int | None = None
    rope: str | None = "global"
    first: int = 0

    @property
    def near_position(self) -> int | None:
        """Position of the query that meets the first positions once the window has left them: the
        last of a cache of first + window tokens. None where there is no such query."""
        if self.window is None or self.rope is None or not self.first:
            return None
        return self.first + self.window - 1


@dataclass(frozen=True)
class ModelSpec:
    """A dense decoder.

    vocabulary: rows of the embedding, padding included. max_positions: the context of the
    checkpoint, rope scaling included. norm_add: constant that the checkpoint's norm weights lack
    (1.0 for Gemma's Hugging Face files). pre_norm, post_norm: norms before and after attention and
    feed-forward. qk_norm: RMS norm of q and k per head or over the row. *_bias: which bias vectors
    exist. scale: of attention scores. softcap: of attention scores, logit_softcap: of logits.
    embed_scale, residual_scale, logit_scale: multipliers, 1.0 for most. tied: the logits use the
    embedding table. positions: rows of a learned position table, 0 for rotary models. endless:
    sequences may be longer than max_positions, because no layer looks further than that.
    """

    family: str
    vocabulary: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    max_positions: int
    layers: tuple[Layer, ...]
    ropes: Mapping[str, Rope]
    scale: float
    norm_eps: float
    tied: bool
    rope_style: Literal["halves", "pairs"] = "halves"
    norm: Literal["rms", "layer"] = "rms"
    norm_add: float = 0.0
    norm_bias: bool = False
    pre_norm: bool = True
    post_norm: bool = False
    qk_norm: Literal["head", "row"] | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    logit_bias: bool = False
    activation: Activation = "silu"
    gated: bool = True
    softcap: float | None = None
    logit_softcap: float | None = None
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    positions: int = 0
    endless: bool = False


def streaming(spec: ModelSpec, sinks: int, window: int) -> ModelSpec:
    """The model with streaming attention (Xiao et al. 2023): layers that see everything see the
    first `sinks` and the last `window` positions instead. The window is at its true distance, the
    sinks where they lie in a cache of sinks + window tokens, so that sequences may go on beyond the
    context of the model, unless it learned its positions by number."""
    layers = tuple(
        replace(layer, window=window, first=sinks) if layer.window is None else layer
        for layer in spec.layers
    )
    return replace(spec, layers=layers, endless=spec.positions == 0)


@dataclass(frozen=True)
class Model:
    """A checkpoint that is ready for a back-end: program, weights by name, and KV groups.

    tokens: ids below this are real; the rest of the vocabulary is padding that is never sampled.
    notes: what was decided at load and a person should know (rope scaling), one line each.
    """

    spec: ModelSpec
    program: Program
    weights: Mapping[str, Weight]
    groups: tuple[KVGroup, ...]
    tokens: int
    notes: tuple[str, ...] = ()
