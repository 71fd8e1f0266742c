"""A GGUF file's metadata as a ModelSpec."""

from collections.abc import Mapping
from math import log
from typing import Any

from headrace.errors import ModelError
from headrace.models.families import FAMILIES, Family
from headrace.models.fields import Fields
from headrace.models.gguf import GGUFFile
from headrace.models.spec import Layer, ModelSpec, Rope, Scaling
from headrace.ops.formats import dequantize

_UNUSED = 5
_HARMLESS = (
    "vocab_size",
    "attention.causal",
    "rope.scaling.finetuned",
)


def read(file: GGUFFile) -> ModelSpec:
    """Raises ModelError naming the key for anything missing, unknown or unsupported."""
    source = str(file.paths[0])
    family = _family(file, source)
    fields = Fields(file.metadata, source, f"{file.architecture}.")
    draft = _common(file, fields, family)
    draft |= dict(family.traits) | dict(family.gguf_traits)
    draft |= family.gguf(fields, draft)
    fields.finish(_HARMLESS)
    return ModelSpec(family=family.name, **draft)


def num_tokens(metadata: Mapping[str, Any]) -> int | None:
    """Ids that are real tokens: trailing ones of type 'unused' pad the vocabulary."""
    tokens, types = (metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    if not isinstance(tokens, list):
        return None
    count = len(tokens)
    if isinstance(types, list) and len(types) == count:
        while count and types[count - 1] == _UNUSED:
            count -= 1
    return count


def _family(file: GGUFFile, source: str) -> Family:
    for family in FAMILIES:
        if file.architecture in family.gguf_names:
            return family
    known = ", ".join(sorted(name for family in FAMILIES for name in family.gguf_names))
    raise ModelError(
        f"{source}: general.architecture {file.architecture!r} is not supported (known: {known})"
    )


def _common(file: GGUFFile, fields: Fields, family: Family) -> dict[str, Any]:
    """What all families store under equal keys; biases and tied embeddings show in the tensors."""
    tensors = file.tensors
    if "token_embd.weight" not in tensors:
        raise ModelError(f"{file.paths[0]}: tensor 'token_embd.weight' is missing")
    num_layers = fields.integer("block_count", most=1024)
    hidden = fields.integer("embedding_length", most=1 << 20)
    heads = fields.integer("attention.head_count", most=4096)
    head_dim = fields.integer("attention.key_length", hidden // heads, most=4096)
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise fields.fail("attention.value_length", f"must equal the key length {head_dim}")
    fields.expect("expert_count", 0)
    fields.expect("expert_used_count", 0)
    rms = fields.has("attention.layer_norm_rms_epsilon")
    window = fields.integer("attention.sliding_window", 0) or None
    max_positions = fields.integer("context_length")
    if window is not None and window >= max_positions:
        window = None
    learned = tensors.get("position_embd.weight")
    return {
        "vocabulary": tensors["token_embd.weight"].shape[0],
        "hidden": hidden,
        "heads": heads,
        "kv_heads": fields.integer("attention.head_count_kv", heads, most=heads),
        "head_dim": head_dim,
        "ffn": fields.integer("feed_forward_length", most=1 << 24),
        "max_positions": max_positions,
        "layers": (Layer(window, None if learned else "global"),) * num_layers,
        "ropes": {} if learned else {"global": _rope(file, fields, head_dim)},
        "positions": learned.shape[0] if learned else 0,
        "rope_style": family.gguf_style,
        "scale": fields.number("attention.scale", head_dim**-0.5),
        "norm_eps": fields.number(f"attention.layer_norm_{'rms_' if rms else ''}epsilon"),
        "norm": "rms" if rms else "layer",
        "norm_bias": "output_norm.bias" in tensors,
        "tied": "output.weight" not in tensors,
        "logit_bias": "output.bias" in tensors,
        "qkv_bias": "blk.0.attn_q.bias" in tensors or "blk.0.attn_qkv.bias" in tensors,
        "out_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
    }


def _rope(file: GGUFFile, fields: Fields, head_dim: int) -> Rope:
    theta = fields.number("rope.freq_base", 10000.0)
    dims = fields.integer("rope.dimension_count", head_dim, most=head_dim)
    original = fields.integer("rope.scaling.original_context_length", 0)
    kind = fields.choice(
        "rope.scaling.type", {"none": None, "linear": "linear", "yarn": "yarn", "longrope": None},
        "none",
    )  # fmt: skip
    factor = fields.number("rope.scaling.factor", 0.0)
    attention = fields.number("rope.scaling.attn_factor", 0.0) or None
    if attention is None:
        attention = fields.number("rope.scaling.yarn_attn_factor", 0.0) or None
    fields.expect("rope.scaling.yarn_ext_factor", 1.0)
    if factor == 0.0:
        factor = fields.number("rope.scale_linear", 1.0)
    scaling = None
    if kind == "linear" or (kind is None and factor != 1.0):
        scaling = Scaling("linear", factor)
    elif kind == "yarn":
        scaling = Scaling(
            "yarn",
            factor,
            original or fields.integer("context_length"),
            # GGUF's factor comes on top of YaRN's own.
            None if attention is None else attention * (0.1 * log(factor) + 1.0),
            fields.number("rope.scaling.yarn_beta_fast", 32.0),
            fields.number("rope.scaling.yarn_beta_slow", 1.0),
        )
    if factors := _factors(file, "rope_freqs.weight", dims):
        if scaling is not None:
            raise fields.fail("rope.scaling.type", "cannot be combined with rope_freqs.weight")
        scaling = Scaling("factors", long=factors)
    long = _factors(file, "rope_factors_long.weight", dims)
    short = _factors(file, "rope_factors_short.weight", dims)
    if long and short:
        stretch = fields.integer("context_length") / original if original else 1.0
        scaling = Scaling("longrope", stretch, original, attention, short=short, long=long)
    return Rope(theta, dims, scaling)


def _factors(file: GGUFFile, name: str, dims: int) -> tuple[float, ...]:
    """The frequency divisors in a tensor, or () where the file has none."""
    tensor = file.tensors.get(name)
    if tensor is None:
        return ()
    if tensor.shape != (dims // 2,):
        raise ModelError(
            f"{file.paths[0]}: tensor {name!r} has shape {list(tensor.shape)}, "
            f"expected [{dims // 2}]"
        )
    return tuple(float(value) for value in dequantize(tensor))
