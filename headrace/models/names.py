"""Finding the tensors of a model: headrace's names for weights against those of checkpoints.

A naming gives, for each weight, the alternatives in which checkpoints store it; an alternative is
one or more tensors that are stacked along N. Tensors that nothing uses are refused, because a model
that ignores a weight computes something else.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from headrace.errors import ModelError
from headrace.models.spec import ModelSpec
from headrace.ops.spec import Program
from headrace.ops.weights import Tensor, Weight, recipe

Alternatives = tuple[tuple[str, ...], ...]
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Naming:
    """How one kind of checkpoint names its tensors.

    top: weight -> alternatives. layer: weight within a layer -> alternatives, below `layer_prefix`
    with {} for the index. Names lack their '.weight' or '.bias'. ignored: pattern of tensors that
    carry nothing (stored masks and frequencies). prefixes: what may stand before every name.
    transposed: weights that are stored as [K, N].
    """

    top: Mapping[str, Alternatives]
    layer: Mapping[str, Alternatives]
    layer_prefix: str
    ignored: str = r"(?!)"
    prefixes: tuple[str, ...] = ("",)
    transposed: frozenset[str] = frozenset()

    def but(self, **layer: Alternatives) -> "Naming":
        """The same with some names within a layer replaced."""
        return replace(self, layer={**self.layer, **layer})


def one(*names: str) -> Alternatives:
    """Alternatives of one tensor each."""
    return tuple((name,) for name in names)


GGUF = Naming(
    top={
        "embed": one("token_embd"),
        "positions": one("position_embd"),
        "final_norm": one("output_norm"),
        "logits": one("output"),
    },
    layer={
        "attn_norm": one("attn_norm"),
        "qkv": (("attn_q", "attn_k", "attn_v"), ("attn_qkv",)),
        "q_norm": one("attn_q_norm"),
        "k_norm": one("attn_k_norm"),
        "attn_out": one("attn_output"),
        "attn_post_norm": one("post_attention_norm"),
        "ffn_norm": one("ffn_norm"),
        "gate_up": (("ffn_gate", "ffn_up"), ("ffn_up",)),
        "up": one("ffn_up"),
        "down": one("ffn_down"),
        "ffn_post_norm": one("post_ffw_norm"),
    },
    layer_prefix="blk.{}.",
    ignored=r"rope_(freqs|factors_long|factors_short)\.weight",
)

HF = Naming(
    top={
        "embed": one("model.embed_tokens"),
        "final_norm": one("model.norm"),
        "logits": one("lm_head"),
    },
    layer={
        "attn_norm": one("input_layernorm"),
        "qkv": (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),),
        "q_norm": one("self_attn.q_norm"),
        "k_norm": one("self_attn.k_norm"),
        "attn_out": one("self_attn.o_proj"),
        "ffn_norm": one("post_attention_layernorm"),
        "gate_up": (("mlp.gate_proj", "mlp.up_proj"),),
        "up": one("mlp.c_fc"),
        "down": one("mlp.down_proj"),
    },
    layer_prefix="model.layers.{}.",
    ignored=r"rotary_emb\.inv_freq$",
)
HF_SANDWICH = HF.but(
    attn_post_norm=one("post_attention_layernorm"),
    ffn_norm=one("pre_feedforward_layernorm"),
    ffn_post_norm=one("post_feedforward_layernorm"),
)
HF_PHI = HF.but(qkv=one("self_attn.qkv_proj"), gate_up=one("mlp.gate_up_proj"))
HF_STARCODER = HF.but(down=one("mlp.c_proj"))
HF_GPT2 = Naming(
    top={
        "embed": one("wte"),
        "positions": one("wpe"),
        "final_norm": one("ln_f"),
        "logits": one("lm_head"),
    },
    layer={
        "attn_norm": one("ln_1"),
        "qkv": one("attn.c_attn"),
        "attn_out": one("attn.c_proj"),
        "ffn_norm": one("ln_2"),
        "up": one("mlp.c_fc"),
        "down": one("mlp.c_proj"),
    },
    layer_prefix="h.{}.",
    ignored=r"\.attn\.(bias|masked_bias)$",
    prefixes=("transformer.", ""),
    transposed=frozenset({"qkv", "attn_out", "up", "down"}),
)


def bind(
    spec: ModelSpec,
    program: Program,
    tensors: Mapping[str, Tensor],
    naming: Naming,
    source: str,
    computed: Mapping[str, Weight],
) -> dict[str, Weight]:
    """Every weight that the program names, with its tensors.

    computed: weights that come from elsewhere (rope frequencies). Raises ModelError for a tensor
    that is missing, has another shape, or is left over.
    """
    prefix = next((p for p in naming.prefixes if any(name.startswith(p) for name in tensors)), "")
    weights: dict[str, Weight] = dict(computed)
    used: set[str] = set()
    for name, shape in program.shapes.items():
        if name in computed:
            continue
        parts = _parts(spec, name, tensors, naming, prefix, source)
        if name.rpartition(".")[2] in naming.transposed:
            parts = tuple(transpose(part) for part in parts)
        add = spec.norm_add if name.endswith("norm") else 0.0
        weight = Weight(name, parts, add=add)
        tails = {part.shape[1:] for part in parts}
        if len(tails) != 1 or weight.shape != shape:
            found = " + ".join(f"{part.name} {list(part.shape)}" for part in parts)
            raise ModelError(f"{source}: {found}: expected {list(shape)} in all for {name}")
        weights[name] = weight
        used.update(part.name for part in parts)
    if spec.tied:  # a stored copy of the embedding is not looked at
        used.update(f"{prefix}{part}.weight" for names in naming.top["logits"] for part in names)
        used.update(f"{part}.weight" for names in naming.top["logits"] for part in names)
    for name in tensors:
        if name not in used and not re.search(naming.ignored, name):
            raise ModelError(
                f"{source}: tensor {name!r} is not used by the {spec.family} family; "
                "a model without it would compute something else, so it is refused"
            )
    return weights


def _parts(
    spec: ModelSpec,
    name: str,
    tensors: Mapping[str, Tensor],
    naming: Naming,
    prefix: str,
    source: str,
) -> tuple[Tensor, ...]:
    match = _LAYER.fullmatch(name)
    table = naming.layer if match else naming.top
    place = prefix + (naming.layer_prefix.format(match[1]) if match else "")
    short = match[2] if match else name
    stem = short.removesuffix("_bias")
    suffix = ".bias" if stem != short else ".weight"
    if stem not in table:
        raise ModelError(f"{source}: no name is known for weight {name} of family {spec.family}")
    full = [tuple(place + part + suffix for part in names) for names in table[stem]]
    for names in full:
        if all(part in tensors for part in names):
            return tuple(tensors[part] for part in names)
    lacking = [part for part in full[0] if part not in tensors]
    raise ModelError(f"{source}: tensor {lacking[0]!r} is missing")


_LANGUAGE = re.compile(r"^(language_model\.model|model\.language_model)\.")
_OTHER_SENSES = ("vision_tower.", "multi_modal_projector.")


def language_part(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The language model's tensors of a checkpoint that holds a vision tower too, under the names
    they have without one."""
    part = {}
    for name, tensor in tensors.items():
        if not name.removeprefix("model.").startswith(_OTHER_SENSES):
            plain = _LANGUAGE.sub("model.", name).removeprefix("language_model.")
            part[plain] = replace(tensor, name=plain)
    return part


_ITEMS: Mapping[str, np.dtype[np.generic]] = {
    "F32": np.dtype(np.uint32),
    "F16": np.dtype(np.uint16),
    "BF16": np.dtype(np.uint16),
}


def transpose(tensor: Tensor) -> Tensor:
    """A matrix of 2- or 4-byte values the other way round, made when it is wanted."""
    if tensor.format not in _ITEMS or len(tensor.shape) != 2 or tensor.recipe is not None:
        raise ModelError(
            f"tensor {tensor.name!r}: {tensor.format} {list(tensor.shape)} cannot be transposed; "
            "a matrix of F32, F16 or BF16 is expected"
        )
    item = _ITEMS[tensor.format]
    depth, count = tensor.shape
    turned = tensor.data.view(item).reshape(depth, count).T

    def rows(start: int, stop: int) -> npt.NDArray[np.uint8]:
        return np.ascontiguousarray(turned[start:stop]).view(np.uint8)

    size = depth * item.itemsize
    return recipe(tensor.name, tensor.format, (count, depth), size, rows, (tensor,))
