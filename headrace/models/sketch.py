"""Models known by their configuration alone: a program to price, without weights.

`read` turns a Hugging Face `config.json` into an `Architecture`, `program` declares it over all
ops: grouped-query or latent attention, dense feed-forward or routed experts, and the collectives of
tensor and expert parallel ranks. The programs are what one rank runs. Only shapes matter here:
names of weights follow `decoder` where both have the weight, rope scaling and biases of the
projections do not appear. Back-ends that lack an op decline these programs by its name; `ops.null`
counts them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any

from headrace.errors import ModelError
from headrace.ops.program import ProgramBuilder
from headrace.ops.spec import Activation, Buffer, KVGroup, Program


@dataclass(frozen=True)
class Experts:
    """Routed experts. hidden: width inside one; shared: width of the always-on expert, 0 = none;
    dense_layers: first layers that have a dense feed-forward instead."""

    count: int
    top_k: int
    hidden: int
    shared: int = 0
    dense_layers: int = 0


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2). query_rank 0 = one plain projection of q."""

    query_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class Architecture:
    """What the shapes of a model follow from. windows: of each layer, None = all positions."""

    name: str
    vocabulary: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    windows: tuple[int | None, ...]
    max_positions: int
    tied: bool
    activation: Activation = "silu"
    experts: Experts | None = None
    latent: Latent | None = None
    sinks: bool = False
    qk_norm: bool = False
    weights: str = "bf16"
    expert_weights: str | None = None


@dataclass(frozen=True)
class Ranks:
    """How a model is spread. tensor: ranks that share every matrix. expert: groups of such ranks
    that share out whole experts, each group with its own rows elsewhere; tensor x expert devices.
    """

    tensor: int = 1
    expert: int = 1


_KNOWN = {
    "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss",
}  # fmt: skip


def read(config: Mapping[str, Any], name: str) -> Architecture:
    """An architecture from a `config.json`. Raises ModelError naming what is missing or unknown."""

    def need(key: str) -> Any:
        if config.get(key) is None:
            raise ModelError(f"{name}: {key} is missing from the configuration")
        return config[key]

    kind = need("model_type")
    if kind not in _KNOWN:
        raise ModelError(f"{name}: model_type {kind!r} cannot be planned (known: {sorted(_KNOWN)})")
    heads, hidden, layers = (
        need("num_attention_heads"),
        need("hidden_size"),
        need("num_hidden_layers"),
    )
    return Architecture(
        name=name,
        vocabulary=need("vocab_size"),
        hidden=hidden,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        ffn=need("intermediate_size"),
        windows=_windows(config, kind, layers),
        max_positions=need("max_position_embeddings"),
        tied=bool(config.get("tie_word_embeddings", False)),
        activation="swiglu_oai" if kind == "gpt_oss" else "silu",
        experts=_experts(config, need),
        latent=_latent(config, need) if config.get("kv_lora_rank") else None,
        sinks=kind == "gpt_oss",
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        **_formats(config),
    )


def _windows(config: Mapping[str, Any], kind: str, layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    if window is None or config.get("use_sliding_window") is False:
        return (None,) * layers
    kinds = config.get("layer_types")
    if kinds is None:
        return (window,) * layers
    return tuple(window if one == "sliding_attention" else None for one in kinds)


def _experts(config: Mapping[str, Any], need: Any) -> Experts | None:
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    count = next((config[key] for key in names if config.get(key)), None)
    if count is None:
        return None
    width = config.get("moe_intermediate_size") or need("intermediate_size")
    return Experts(
        count,
        config.get("num_experts_per_tok") or need("experts_per_token"),
        width,
        width * (config.get("n_shared_experts") or 0),
        config.get("first_k_dense_replace") or 0,
    )


def _latent(config: Mapping[str, Any], need: Any) -> Latent:
    return Latent(
        config.get("q_lora_rank") or 0,
        need("kv_lora_rank"),
        need("qk_nope_head_dim"),
        need("qk_rope_head_dim"),
        need("v_head_dim"),
    )


def _formats(config: Mapping[str, Any]) -> dict[str, Any]:
    """Weight formats that the checkpoint states."""
    method = (config.get("quantization_config") or {}).get("quant_method")
    if method == "mxfp4":
        return {"expert_weights": "mxfp4"}
    if method in (None, "fp8"):
        return {"weights": method or "bf16"}
    raise ModelError(f"quantization_config.quant_method {method!r} cannot be planned")


def groups(architecture: Architecture) -> tuple[KVGroup, ...]:
    """The KV groups, in pages that are equally large in all of them."""
    windows: dict[int | None, list[int]] = {}
    for index, window in enumerate(architecture.windows):
        windows.setdefault(window, []).append(index)
    in_page = gcd(*(len(layers) for layers in windows.values()))
    return tuple(
        KVGroup(
            f"window-{window}" if window else "full", tuple(layers), window, len(layers) // in_page
        )
        for window, layers in windows.items()
    )


def program(architecture: Architecture, ranks: Ranks | None = None) -> Program:
    """What one rank runs. Raises ModelError where the ranks do not divide the model."""
    ranks = ranks or Ranks()
    _check(architecture, ranks)
    a, build = architecture, ProgramBuilder()
    residual = build.embed("embed", a.vocabulary, a.hidden)
    branch: Buffer | None = None
    for index in range(len(a.windows)):
        name = f"layers.{index}"
        x = _norm(build, f"{name}.attn_norm", branch, residual)
        attend = _latent_attention if a.latent else _attention
        branch = build.all_reduce(attend(build, a, index, x, ranks.tensor), ranks.tensor)
        x = _norm(build, f"{name}.ffn_norm", branch, residual)
        if a.experts and index >= a.experts.dense_layers:
            branch = _mixture(build, a, a.experts, name, x, ranks)
        else:
            branch = _feed_forward(build, a, name, x, a.ffn // ranks.tensor)
        branch = build.all_reduce(branch, ranks.tensor)
    hidden = _norm(build, "final_norm", branch, residual)
    table = "embed" if a.tied and ranks.tensor == 1 else "logits"
    logits = build.logits(hidden, table, a.vocabulary // ranks.tensor)
    return build.finish(hidden, logits)


def _check(a: Architecture, ranks: Ranks) -> None:
    if a.heads % ranks.tensor or a.ffn % ranks.tensor:
        raise ModelError(f"{a.name}: {a.heads} heads do not divide over {ranks.tensor} ranks")
    if ranks.expert > 1:
        if a.experts is None:
            raise ModelError(f"{a.name} has no experts to spread over {ranks.expert} ranks")
        if a.experts.count % ranks.expert or a.experts.count // ranks.expert < a.experts.top_k:
            raise ModelError(
                f"{a.name}: {a.experts.count} experts do not spread over {ranks.expert} ranks "
                f"(at most {a.experts.count // a.experts.top_k})"
            )


def _norm(build: ProgramBuilder, name: str, branch: Buffer | None, residual: Buffer) -> Buffer:
    if branch is None:
        return build.rms_norm(residual, name, 1e-6)
    return build.rms_norm(branch, name, 1e-6, residual=residual)


def _attention(
    build: ProgramBuilder, a: Architecture, index: int, x: Buffer, tensor: int
) -> Buffer:
    name = f"layers.{index}"
    heads, kv_heads = a.heads // tensor, max(1, a.kv_heads // tensor)
    qkv = build.linear(x, f"{name}.qkv", (heads + 2 * kv_heads) * a.head_dim)
    q = build.rope_store(
        qkv, index, heads, kv_heads, a.head_dim, "rope.global", a.head_dim,
        q_norm=f"{name}.q_norm" if a.qk_norm else None,
        k_norm=f"{name}.k_norm" if a.qk_norm else None,
    )  # fmt: skip
    out = build.attention(
        q, index, heads, kv_heads, a.head_dim, a.head_dim**-0.5, window=a.windows[index],
        sinks=f"{name}.sinks" if a.sinks else None,
    )  # fmt: skip
    return build.linear(out, f"{name}.attn_out", a.hidden)


def _latent_attention(
    build: ProgramBuilder, a: Architecture, index: int, x: Buffer, tensor: int
) -> Buffer:
    name, latent = f"layers.{index}", a.latent
    assert latent is not None, "called for latent attention only"
    heads = a.heads // tensor
    source = x
    if latent.query_rank:
        down = build.linear(x, f"{name}.q_down", latent.query_rank)
        source = build.rms_norm(down, f"{name}.q_down_norm", 1e-6)
    q = build.linear(source, f"{name}.q", heads * (latent.nope + latent.rope))
    compressed = build.linear(x, f"{name}.kv_down", latent.kv_rank + latent.rope)
    out = build.latent_attention(
        q, compressed, index, heads, nope_dim=latent.nope, rope_dim=latent.rope,
        value_dim=latent.value, latent_dim=latent.kv_rank,
        scale=(latent.nope + latent.rope) ** -0.5, up=f"{name}.kv_up",
    )  # fmt: skip
    return build.linear(out, f"{name}.attn_out", a.hidden)


def _feed_forward(
    build: ProgramBuilder, a: Architecture, name: str, x: Buffer, width: int
) -> Buffer:
    inner = build.linear(x, f"{name}.gate_up", 2 * width)
    return build.linear(build.gated(inner, a.activation), f"{name}.down", a.hidden)


def _mixture(
    build: ProgramBuilder, a: Architecture, experts: Experts, name: str, x: Buffer, ranks: Ranks
) -> Buffer:
    scores = build.linear(x, f"{name}.router", experts.count)
    routes = build.route(scores, experts.top_k)
    build.all_to_all(x, routes, ranks.expert, combine=False)
    out = build.experts(
        x, routes, f"{name}.experts.gate_up", f"{name}.experts.down",
        experts.count // ranks.expert, experts.hidden // ranks.tensor, a.activation,
    )  # fmt: skip
    build.all_to_all(out, routes, ranks.expert, combine=True)
    if not experts.shared:
        return out
    shared = _feed_forward(build, a, f"{name}.shared", x, experts.shared // ranks.tensor)
    return build.rms_norm(shared, None, 1e-6, residual=out, norm="none")
