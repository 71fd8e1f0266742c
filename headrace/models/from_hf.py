"""A Hugging Face configuration (config.json) as a ModelSpec."""

from collections.abc import Mapping
from typing import Any

from headrace.errors import ModelError
from headrace.models.families import FAMILIES, Family
from headrace.models.fields import Fields
from headrace.models.spec import Layer, ModelSpec, Rope, Scaling

ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "relu": "relu", "relu2": "relu2",
}  # fmt: skip
_CLASSES = ("ForCausalLM", "LMHeadModel")
# What has no bearing on the values of the logits.
_HARMLESS = (
    "_attn_implementation_autoset", "_name_or_path", "architectures", "attention_dropout",
    "attn_pdrop", "auto_map", "bos_token_id", "cache_implementation", "chunk_size_feed_forward",
    "dtype", "embd_pdrop", "embedding_dropout", "eos_token_id", "hidden_dropout", "id2label",
    "initializer_range", "is_decoder", "label2id", "model_type", "n_ctx", "output_attentions",
    "output_hidden_states", "pad_token_id", "pretraining_tp", "problem_type", "quantization_config",
    "resid_pdrop", "residual_dropout", "return_dict", "summary_activation",
    "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    "task_specific_params", "tokenizer_class", "torch_dtype", "transformers_version",
    "unk_token_id", "use_cache",
)  # fmt: skip


def read(config: Mapping[str, Any], source: str) -> ModelSpec:
    """Raises ModelError naming the key for anything missing, unknown or unsupported."""
    if config.get("trust_remote_code"):
        raise ModelError(f"{source}: trust_remote_code: code from a checkpoint is never run")
    config = _text_part(config, source)
    family = _family(Fields(config, source))
    fields = Fields({**family.hf_defaults, **config}, source, aliases=family.spelling)
    draft = _common(fields, family)
    draft |= dict(family.traits) | dict(family.hf_traits)
    draft |= family.hf(fields, draft)
    draft["layers"] = _layers(fields, draft)
    fields.finish((*_HARMLESS, *family.harmless))
    return ModelSpec(family=family.name, **draft)


def _text_part(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """The language model's part of a Gemma 3 configuration that describes a vision tower too."""
    if config.get("model_type") != "gemma3":
        return config
    part = config.get("text_config")
    if not isinstance(part, dict):
        raise ModelError(f"{source}: text_config: is missing")
    return {"model_type": "gemma3_text", **part}


def _family(fields: Fields) -> Family:
    known = {name: family for family in FAMILIES for name in family.hf_types}
    family: Family = fields.choice("model_type", known)
    classes = fields.raw("architectures", [f"{family.name}{_CLASSES[0]}"])
    if not isinstance(classes, list) or not all(
        isinstance(one, str) and one.endswith(_CLASSES) for one in classes
    ):
        raise fields.fail("architectures", f"{classes!r} is not a causal language model")
    return family


def _common(fields: Fields, family: Family) -> dict[str, Any]:
    """What all families say alike."""
    fields.expect("is_encoder_decoder", False)
    fields.expect("use_mrope", False)
    hidden = fields.integer("hidden_size", most=1 << 20)
    heads = fields.integer("num_attention_heads", most=4096)
    head_dim = fields.integer("head_dim", hidden // heads, most=4096)
    max_positions = fields.integer("max_position_embeddings")
    bias = fields.flag("attention_bias", False)
    ffn = fields.integer("intermediate_size", 4 * hidden, most=1 << 24)
    learned = family.name == "gpt2"
    ropes = {} if learned else _ropes(fields, head_dim, max_positions, family.theta)
    return {
        "vocabulary": fields.integer("vocab_size", most=1 << 24),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": fields.integer("num_key_value_heads", heads, most=heads),
        "head_dim": head_dim,
        "ffn": ffn,
        "max_positions": stretched(max_positions, ropes),
        "layers": (Layer(rope=None if learned else "global"),)
        * fields.integer("num_hidden_layers", most=1024),
        "ropes": ropes,
        "positions": max_positions if learned else 0,
        "scale": head_dim**-0.5,
        "norm_eps": fields.number("norm_eps", 1e-6),
        "tied": fields.flag("tie_word_embeddings", family.ties),
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": fields.flag("mlp_bias", False),
        "activation": fields.choice("activation", ACTIVATIONS, "silu"),
    }


def stretched(max_positions: int, ropes: Mapping[str, Rope]) -> int:
    """Positions with rope scaling. Configurations give `max_position_embeddings` before stretching
    for dynamic and some yarn models, after it for the others."""
    scaling = ropes["global"].scaling if "global" in ropes else None
    if scaling is not None and scaling.kind in ("dynamic", "yarn"):
        return max(max_positions, int(scaling.factor * scaling.original))
    return max_positions


def _layers(fields: Fields, draft: Mapping[str, Any]) -> tuple[Layer, ...]:
    """Windows and ropes of the layers; `layer_types` wins over a family's pattern."""
    layers: tuple[Layer, ...] = draft["layers"]
    kinds = fields.raw("layer_types", None)
    if kinds is not None:
        allowed = {"full_attention": False, "sliding_attention": True}
        if not isinstance(kinds, list) or len(kinds) != len(layers):
            raise fields.fail("layer_types", f"is not a list of {len(layers)} kinds")
        for kind in kinds:
            if not isinstance(kind, str) or kind not in allowed:
                raise fields.fail("layer_types", f"{kind!r} is not supported")
        window = fields.integer("sliding_window") if "sliding_attention" in kinds else None
        local = "local" if "local" in draft["ropes"] else "global"
        layers = tuple(
            Layer(window, layer.rope and local)
            if allowed[kind]
            else Layer(None, layer.rope and "global")
            for kind, layer in zip(kinds, layers, strict=True)
        )
    limit = draft["max_positions"]
    return tuple(
        Layer(None if one.window and one.window >= limit else one.window, one.rope)
        for one in layers
    )


def _ropes(fields: Fields, head_dim: int, max_positions: int, theta: float) -> dict[str, Rope]:
    """Both spellings: `rope_parameters` (one, or one a kind of layer), and `rope_theta` with
    `rope_scaling` and `partial_rotary_factor`."""
    parameters = fields.raw("rope_parameters", None)
    scaling = fields.raw("rope_scaling", None)
    if parameters is None:
        parameters = dict(scaling) if isinstance(scaling, dict) else {}
        parameters.setdefault("rope_theta", fields.number("rope_theta", theta))
        parameters.setdefault("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if not isinstance(parameters, dict) or not isinstance(scaling, dict | None):
        raise fields.fail("rope_scaling", "is not an object")
    kinds = {"full_attention": "global", "sliding_attention": "local"}
    if not parameters.keys() & kinds.keys():
        parameters = {"full_attention": parameters}
    ropes = {}
    original = fields.integer("original_max_position_embeddings", 0)
    for kind, one in parameters.items():
        if kind not in kinds or not isinstance(one, dict):
            raise fields.fail("rope_parameters", f"{kind!r} is not supported")
        ropes[kinds[kind]] = _rope(fields, one, head_dim, original, max_positions)
    return ropes


def _rope(
    fields: Fields, values: dict[str, Any], head_dim: int, original: int, max_positions: int
) -> Rope:
    part = Fields({f"rope.{key}": value for key, value in values.items()}, fields.source, "rope.")
    theta = part.number("rope_theta", 10000.0)
    share = part.number("partial_rotary_factor", 1.0)
    dims = int(head_dim * share)
    if dims % 2 or not 0 < dims <= head_dim:
        raise part.fail("partial_rotary_factor", f"{share} of {head_dim} values cannot be rotated")
    kinds = {
        "default": None, "linear": "linear", "dynamic": "dynamic", "llama3": "llama3",
        "yarn": "yarn", "longrope": "longrope", "su": "longrope",
    }  # fmt: skip
    old = part.choice("type", kinds, "default")
    kind = part.choice("rope_type", kinds, "default") or old
    scaling = None if kind is None else _scaling(part, kind, dims, original, max_positions)
    part.finish()
    return Rope(theta, dims, scaling)


def _scaling(part: Fields, kind: Any, dims: int, outer: int, max_positions: int) -> Scaling:
    original = part.integer("original_max_position_embeddings", outer or max_positions)
    if kind == "dynamic":
        original = max_positions  # as transformers has it
    return Scaling(
        kind,
        factor=part.number("factor", max_positions / original),
        original=original,
        attention_factor=part.number("attention_factor", 0.0) or None,
        beta_fast=part.number("beta_fast", 32.0),
        beta_slow=part.number("beta_slow", 1.0),
        truncate=part.flag("truncate", True),
        mscale=part.number("mscale", 0.0),
        mscale_all_dim=part.number("mscale_all_dim", 0.0),
        low_freq=part.number("low_freq_factor", 1.0),
        high_freq=part.number("high_freq_factor", 4.0),
        short=part.numbers("short_factor", dims // 2) if kind == "longrope" else (),
        long=part.numbers("long_factor", dims // 2) if kind == "longrope" else (),
    )
