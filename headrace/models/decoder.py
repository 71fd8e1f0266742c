"""The one program of all dense decoders: a ModelSpec in, ops out."""

from math import gcd

from headrace.models.spec import ModelSpec
from headrace.ops.program import ProgramBuilder
from headrace.ops.spec import Buffer, KVGroup, Program


def program(spec: ModelSpec, rope_scales: dict[str, float], wide: bool = False) -> Program:
    """The ops of the model. rope_scales: attention factor of each rope (yarn, longrope). wide:
    positions go beyond the context (`RopeStore.wide`)."""
    build = ProgramBuilder()
    residual = build.embed(
        "embed", spec.vocabulary, spec.hidden, spec.embed_scale,
        "positions" if spec.positions else None, spec.positions,
    )  # fmt: skip
    branch: Buffer | None = None
    for index in range(len(spec.layers)):
        name = f"layers.{index}"
        x = _norm(build, spec, f"{name}.attn_norm", branch, residual)
        branch = _attention(build, spec, index, x, rope_scales, wide)
        if spec.post_norm:
            branch = _plain_norm(build, spec, f"{name}.attn_post_norm", branch)
        x = _norm(build, spec, f"{name}.ffn_norm", branch, residual)
        branch = _feed_forward(build, spec, name, x)
        if spec.post_norm:
            branch = _plain_norm(build, spec, f"{name}.ffn_post_norm", branch)
    assert branch is not None, "a decoder has at least one layer"
    hidden = build.rms_norm(
        branch, "final_norm", spec.norm_eps, residual=residual, residual_scale=spec.residual_scale,
        norm=spec.norm, bias="final_norm_bias" if spec.norm_bias else None,
    )  # fmt: skip
    table = "embed" if spec.tied else "logits"
    logits = build.logits(
        hidden, table, spec.vocabulary, scale=spec.logit_scale, softcap=spec.logit_softcap,
        bias="logits_bias" if spec.logit_bias else None,
    )  # fmt: skip
    return build.finish(hidden, logits)


def _norm(
    build: ProgramBuilder, spec: ModelSpec, name: str, branch: Buffer | None, residual: Buffer
) -> Buffer:
    """Add the branch to the residual, then the norm before the next part, if the family has one."""
    if not spec.pre_norm:
        if branch is None:
            return residual
        return build.rms_norm(
            branch, None, spec.norm_eps, residual=residual, norm="none",
            residual_scale=spec.residual_scale,
        )  # fmt: skip
    if branch is None:
        return _plain_norm(build, spec, name, residual)
    return build.rms_norm(
        branch, name, spec.norm_eps, residual=residual, residual_scale=spec.residual_scale,
        norm=spec.norm, bias=f"{name}_bias" if spec.norm_bias else None,
    )  # fmt: skip


def _plain_norm(build: ProgramBuilder, spec: ModelSpec, name: str, x: Buffer) -> Buffer:
    bias = f"{name}_bias" if spec.norm_bias else None
    return build.rms_norm(x, name, spec.norm_eps, norm=spec.norm, bias=bias)


def _attention(
    build: ProgramBuilder,
    spec: ModelSpec,
    index: int,
    x: Buffer,
    rope_scales: dict[str, float],
    wide: bool,
) -> Buffer:
    name, layer = f"layers.{index}", spec.layers[index]
    heads = (spec.heads, spec.kv_heads, spec.head_dim)
    width = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    qkv = build.linear(x, f"{name}.qkv", width, f"{name}.qkv_bias" if spec.qkv_bias else None)
    q = build.rope_store(
        qkv, index, *heads,
        rope=None if layer.rope is None else f"rope.{layer.rope}",
        rotary=0 if layer.rope is None else spec.ropes[layer.rope].dims,
        rope_scale=1.0 if layer.rope is None else rope_scales[layer.rope],
        style=spec.rope_style,
        q_norm=f"{name}.q_norm" if spec.qk_norm else None,
        k_norm=f"{name}.k_norm" if spec.qk_norm else None,
        norm_over=spec.qk_norm or "head",
        eps=spec.norm_eps,
        wide=wide and layer.rope is not None,
        near_position=layer.near_position,
    )  # fmt: skip
    out = build.attention(
        q, index, *heads, scale=spec.scale, window=layer.window, first=layer.first,
        softcap=spec.softcap,
    )  # fmt: skip
    bias = f"{name}.attn_out_bias" if spec.out_bias else None
    return build.linear(out, f"{name}.attn_out", spec.hidden, bias)


def _feed_forward(build: ProgramBuilder, spec: ModelSpec, name: str, x: Buffer) -> Buffer:
    first = f"{name}.gate_up" if spec.gated else f"{name}.up"
    width = spec.ffn * (2 if spec.gated else 1)
    inner = build.linear(x, first, width, f"{first}_bias" if spec.mlp_bias else None)
    inner = build.gated(inner, spec.activation, spec.gated)
    bias = f"{name}.down_bias" if spec.mlp_bias else None
    return build.linear(inner, f"{name}.down", spec.hidden, bias)


def kv_groups(spec: ModelSpec) -> tuple[KVGroup, ...]:
    """Layers that keep the same positions, in pages that are equally large in all groups."""
    windows: dict[tuple[int | None, int], list[int]] = {}
    for index, layer in enumerate(spec.layers):
        windows.setdefault((layer.window, layer.first), []).append(index)
    in_page = gcd(*(len(layers) for layers in windows.values()))
    return tuple(
        KVGroup(
            "full" if window is None else f"window-{f'{first}+' if first else ''}{window}",
            tuple(layers),
            window,
            len(layers) // in_page,
            first,
        )
        for (window, first), layers in windows.items()
    )
