"""The families of dense decoders: one row each, differences as data.

`traits` are ModelSpec fields that hold for every member of a family. What a configuration decides
is read by `from_gguf` and `from_hf`; a family's own keys are read by its `gguf` and `hf` functions,
which return further ModelSpec fields (`draft` holds those read so far).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.models import names
from headrace.models.fields import Fields
from headrace.models.names import Naming
from headrace.models.spec import Layer, ModelSpec, Rope

Reader = Callable[[Fields, dict[str, Any]], dict[str, Any]]


def _nothing(fields: Fields, draft: dict[str, Any]) -> dict[str, Any]:
    return {}


_SPELLING = {"rms_norm_eps": "norm_eps", "hidden_act": "activation"}


@dataclass(frozen=True)
class Family:
    """A row of the table.

    gguf_names: values of `general.architecture`. gguf_style: order of the rotated values in GGUF
    files, whose converter permutes q and k of the Llama kin. hf_types: values of `model_type`.
    naming: of Hugging Face tensors. ties: whether Hugging Face ties the embedding by default.
    hf_traits, gguf_traits: traits of one kind of files only. hf_defaults: what its configuration
    class assumes where a file leaves a key out; theta: the same of the rope. spelling: key of its
    files -> the key it is read by here. harmless: keys that its own code does not read.
    """

    name: str
    gguf_names: tuple[str, ...] = ()
    gguf_style: Literal["halves", "pairs"] = "halves"
    hf_types: tuple[str, ...] = ()
    naming: Naming = names.HF
    ties: bool = False
    traits: Mapping[str, Any] = field(default_factory=dict)
    hf_traits: Mapping[str, Any] = field(default_factory=dict)
    gguf_traits: Mapping[str, Any] = field(default_factory=dict)
    hf_defaults: Mapping[str, Any] = field(default_factory=dict)
    theta: float = 10000.0
    spelling: Mapping[str, str] = field(default_factory=lambda: _SPELLING)
    harmless: tuple[str, ...] = ()
    gguf: Reader = _nothing
    hf: Reader = _nothing


def _every(fields: Fields, draft: dict[str, Any]) -> dict[str, Any]:
    """Hugging Face: a window, where given, holds in every layer."""
    window = fields.integer("sliding_window", 0) or None
    return {"layers": tuple(Layer(window) for _ in draft["layers"])}


def _qwen_hf(fields: Fields, draft: dict[str, Any]) -> dict[str, Any]:
    """The last layers slide, if the switch says so. Qwen2 has biases that no key mentions."""
    window = fields.integer("sliding_window", 0)
    first = fields.integer("max_window_layers", 28)
    found = {"layers": draft["layers"]}
    if fields.flag("use_sliding_window", False):
        found["layers"] = tuple(
            Layer(window if index >= first else None) for index in range(len(draft["layers"]))
        )
    return found


def _gemma_layers(draft: dict[str, Any], window: int, every: int, local: str) -> tuple[Layer, ...]:
    """One layer in `every` sees everything, the last of each group."""
    count = len(draft["layers"])
    return tuple(Layer() if (i + 1) % every == 0 else Layer(window, local) for i in range(count))


def _gemma_common(draft: dict[str, Any]) -> dict[str, Any]:
    return {"embed_scale": draft["hidden"] ** 0.5}


def _gemma2_gguf(fields: Fields, draft: dict[str, Any]) -> dict[str, Any]:
    window = draft["layers"][0].window or fields.integer("attention.sliding_window", 4096)
    large = len(draft["layers"]) == 46  # 27B divides by the hidden size per head
    divisor = draft["hidden"] / draft["heads"] if large else draft["head_dim"]
    return _gemma_common(draft) | {
        "layers": _gemma_layers(draft, window, 2, "global"),
        "scale": divisor**-0.5,
        "softcap": fields.number("attn_logit_softcapping", 50.0),
        "logit_softcap": fields.number("final_logit_softcapping", 30.0),
    }


def _gemma3_layers(
    fields: Fields, draft: dict[str, Any], window: int, slides: Any
) -> tuple[Layer, ...]:
    """slides: how many layers make a group, or for each layer whether it slides."""
    if isinstance(slides, list) and len(slides) == len(draft["layers"]):
        return tuple(Layer(window, "local") if one else Layer() for one in slides)
    every = fields.integer("attention.sliding_window_pattern", 6)
    return _gemma_layers(draft, window, every, "local")


def _gemma3_gguf(fields: Fields, draft: dict[str, Any]) -> dict[str, Any]:
    window = draft["layers"][0].window or fields.integer("attention.sliding_window")
    slides = fields.raw("attention.sliding_window_pattern", 6)
    local = fields.number("rope.freq_base_swa", 10000.0)
    large = len(draft["layers"]) == 62  # 27B divides by the hidden size per head
    divisor = draft["hidden"] / draft["heads"] if large else draft["head_dim"]
    cap = fields.number("final_logit_softcapping", 0.0)
    return _gemma_common(draft) | {
        "layers": _gemma3_layers(fields, draft, window, slides),
        "ropes": draft["ropes"] | {"local": Rope(local, draft["ropes"]["global"].dims)},
        "scale": divisor**-0.5,
        "logit_softcap": cap or None,
    }


def _olmo2_gguf(fields: Fields, draft: dict[str, Any]) -> dict[str, Any]:
    if any(layer.window for layer in draft["layers"]):  # OLMo 3 comes under this name too
        raise fields.fail("attention.sliding_window", "is not supported for this family")
    return {}


def _gemma2_hf(fields: Fields, draft: dict[str, Any]) -> dict[str, Any]:
    window = fields.integer("sliding_window", 4096)
    fields.expect("use_bidirectional_attention", None, False)
    return _gemma_common(draft) | {
        "layers": _gemma_layers(draft, window, 2, "global"),
        "scale": fields.number("query_pre_attn_scalar", 256) ** -0.5,
        "softcap": fields.number("attn_logit_softcapping", 0.0) or None,
        "logit_softcap": fields.number("final_logit_softcapping", 0.0) or None,
    }


def _gemma3_hf(fields: Fields, draft: dict[str, Any]) -> dict[str, Any]:
    found = _gemma2_hf(fields, draft)
    window = fields.integer("sliding_window", 4096)
    pattern = fields.integer("sliding_window_pattern", 0)
    pattern = pattern or fields.integer("_sliding_window_pattern", 6)
    found["layers"] = _gemma_layers(draft, window, pattern, "local")
    if "local" not in draft["ropes"]:
        local = Rope(fields.number("rope_local_base_freq", 10000.0), draft["head_dim"])
        found["ropes"] = draft["ropes"] | {"local": local}
    return found


def _granite_hf(fields: Fields, draft: dict[str, Any]) -> dict[str, Any]:
    return {
        "embed_scale": fields.number("embedding_multiplier", 1.0),
        "residual_scale": fields.number("residual_multiplier", 1.0),
        "scale": fields.number("attention_multiplier", 1.0),
        "logit_scale": 1.0 / fields.number("logits_scaling", 1.0),
    }


def _granite_gguf(fields: Fields, draft: dict[str, Any]) -> dict[str, Any]:
    return {
        "embed_scale": fields.number("embedding_scale", 1.0),
        "residual_scale": fields.number("residual_scale", 1.0),
        "logit_scale": 1.0 / fields.number("logit_scale", 1.0),
    }


def _smollm3_layers(draft: dict[str, Any], interval: int) -> tuple[Layer, ...]:
    return tuple(
        Layer(layer.window, None if (index + 1) % interval == 0 else "global")
        for index, layer in enumerate(draft["layers"])
    )


def _smollm3_gguf(fields: Fields, draft: dict[str, Any]) -> dict[str, Any]:
    return {"layers": _smollm3_layers(draft, 4)}


def _smollm3_hf(fields: Fields, draft: dict[str, Any]) -> dict[str, Any]:
    fields.expect("use_sliding_window", False)
    fields.expect("sliding_window", None)
    fields.raw("max_window_layers", 0)
    layers = _smollm3_layers(draft, fields.integer("no_rope_layer_interval", 4))
    if fields.has("no_rope_layers"):
        turns = fields.numbers("no_rope_layers", len(layers))
        layers = tuple(Layer(rope="global" if turn else None) for turn in turns)
    return {"layers": layers}


def _phi_hf(fields: Fields, draft: dict[str, Any]) -> dict[str, Any]:
    fields.expect("full_attn_mod", 1)
    fields.expect("interpolate_factor", 1)
    fields.expect("lm_head_bias", False)
    return _every(fields, draft)


def _llama_hf(fields: Fields, draft: dict[str, Any]) -> dict[str, Any]:
    fields.expect("rope_interleaved", False)
    return {}


def _starcoder_hf(fields: Fields, draft: dict[str, Any]) -> dict[str, Any]:
    fields.expect("mlp_type", "default")
    fields.expect("norm_type", "layer_norm")
    bias = fields.flag("use_bias", True)
    biases = dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), bias)
    return _every(fields, draft) | biases


def _gpt2_hf(fields: Fields, draft: dict[str, Any]) -> dict[str, Any]:
    fields.expect("scale_attn_by_inverse_layer_idx", False)
    fields.expect("reorder_and_upcast_attn", False)
    fields.expect("add_cross_attention", False)
    fields.expect("scale_attn_weights", True)
    return {}


_SANDWICH = {"post_norm": True}
_LAYER_NORM = {"norm": "layer", "norm_bias": True, "gated": False}
_GELU = {"activation": "gelu_tanh"}
_BIASES = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
_GPT2_SPELLING = {
    "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings", "n_inner": "intermediate_size",
    "activation_function": "activation", "layer_norm_epsilon": "norm_eps",
}  # fmt: skip
_GEMMA_SPELLING = {"rms_norm_eps": "norm_eps", "hidden_activation": "activation"}
_GEMMA_DEFAULTS = {"hidden_activation": "gelu_pytorch_tanh"}
_GEMMA3_DEFAULTS = {
    "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "max_position_embeddings": 131072, "sliding_window": 4096,
}  # fmt: skip

FAMILIES: tuple[Family, ...] = (
    Family(
        "llama",
        ("llama",),
        "pairs",
        ("llama",),
        hf=_llama_hf,
        harmless=("is_llama_config", "transformers.js_config"),
    ),
    Family("mistral", (), "pairs", ("mistral",), hf=_every),
    Family(
        "qwen2",
        ("qwen2",),
        hf_types=("qwen2",),
        hf=_qwen_hf,
        hf_traits={"qkv_bias": True, "out_bias": False},
    ),
    Family("qwen3", ("qwen3",), hf_types=("qwen3",), hf=_qwen_hf, traits={"qk_norm": "head"}),
    Family(
        "gemma2",
        ("gemma2",),
        hf_types=("gemma2",),
        naming=names.HF_SANDWICH,
        ties=True,
        traits=_SANDWICH,
        hf_traits={"norm_add": 1.0},
        gguf_traits=_GELU,
        gguf=_gemma2_gguf,
        hf=_gemma2_hf,
        hf_defaults=_GEMMA_DEFAULTS,
        harmless=("hidden_act", "sliding_window_size"),
        spelling=_GEMMA_SPELLING,
    ),
    Family(
        "gemma3",
        ("gemma3",),
        hf_types=("gemma3_text",),
        naming=names.HF_SANDWICH,
        ties=True,
        traits=_SANDWICH | {"qk_norm": "head"},
        hf_traits={"norm_add": 1.0},
        gguf_traits=_GELU,
        hf_defaults=_GEMMA_DEFAULTS | _GEMMA3_DEFAULTS,
        theta=1e6,
        gguf=_gemma3_gguf,
        hf=_gemma3_hf,
        harmless=("hidden_act",),
        spelling=_GEMMA_SPELLING,
    ),
    Family("phi3", ("phi3",), hf_types=("phi3",), naming=names.HF_PHI, hf=_phi_hf),
    Family(
        "olmo2",
        ("olmo2",),
        hf_types=("olmo2",),
        naming=names.HF_SANDWICH,
        traits={"pre_norm": False, "post_norm": True, "qk_norm": "row"},
        gguf=_olmo2_gguf,
    ),
    Family("granite", ("granite",), "pairs", ("granite",), gguf=_granite_gguf, hf=_granite_hf),
    Family(
        "starcoder2",
        ("starcoder2",),
        hf_types=("starcoder2",),
        naming=names.HF_STARCODER,
        ties=True,
        traits=_LAYER_NORM,
        gguf_traits=_GELU,
        hf=_starcoder_hf,
        spelling={"norm_epsilon": "norm_eps", "hidden_act": "activation"},
        harmless=(
            "activation_function",
            "attention_softmax_in_fp32",
            "layer_norm_epsilon",
            "scale_attention_softmax_in_fp32",
            "scale_attn_weights",
        ),
    ),
    Family(
        "gpt2",
        ("gpt2",),
        hf_types=("gpt2",),
        naming=names.HF_GPT2,
        ties=True,
        traits=_LAYER_NORM,
        gguf_traits=_GELU,
        hf_traits=_BIASES,
        hf=_gpt2_hf,
        spelling=_GPT2_SPELLING,
    ),
    Family(
        "smollm3",
        ("smollm3",),
        "pairs",
        ("smollm3",),
        ties=True,
        gguf=_smollm3_gguf,
        hf=_smollm3_hf,
    ),
)


def naming_of(spec: ModelSpec) -> Naming:
    """How Hugging Face names the tensors of a family."""
    return next(family.naming for family in FAMILIES if family.name == spec.family)
