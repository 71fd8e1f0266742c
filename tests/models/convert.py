"""Write a tiny Hugging Face checkpoint as a GGUF file with the `gguf` library, which knows the
official names of keys and tensors. Rules per family as in llama.cpp's converter."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors import safe_open

PERMUTED = ("llama", "mistral", "granite", "smollm3")
PLUS_ONE = ("gemma2", "gemma3_text")
ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3"}


def permute(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k so that rotated pairs lie side by side."""
    shape = values.shape
    halves = values.reshape(heads, 2, shape[0] // heads // 2, *shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(shape))


def hf_tensors(path: Path) -> dict[str, np.ndarray]:
    """Float32 values; bfloat16 is widened by hand, numpy has none."""
    with safe_open(path, framework="np") as file:
        names = list(file.keys())
    header_size = int.from_bytes(path.read_bytes()[:8], "little")
    raw = path.read_bytes()
    header = json.loads(raw[8 : 8 + header_size])
    tensors = {}
    for name in names:
        start, end = (8 + header_size + offset for offset in header[name]["data_offsets"])
        assert header[name]["dtype"] == "BF16"
        wide = np.frombuffer(raw[start:end], np.uint16).astype(np.uint32) << 16
        tensors[name] = wide.view(np.float32).reshape(header[name]["shape"])
    return tensors


def add_tokenizer(writer: gguf.GGUFWriter, size: int) -> None:
    """A byte-level tokenizer of single characters and a few merges."""
    letters = [chr(code) for code in range(33, 33 + size - 6)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*letters, "ab", "abc", "cd", "<|a|>", "<|b|>", "Ġ"])
    kinds = [gguf.TokenType.CONTROL if i in (size - 3, size - 2) else 1 for i in range(size)]
    writer.add_token_types(kinds)
    writer.add_token_merges(["a b", "ab c", "c d"])
    writer.add_bos_token_id(size - 3)
    writer.add_eos_token_id(size - 2)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")


def convert(
    folder: Path,
    weights: Path,
    target: Path,
    kind: gguf.GGMLQuantizationType | None = None,
    vocabulary: int = 0,
) -> None:
    """folder: with config.json. kind: type of the matrices, F32 where None. vocabulary: tokens of a
    tokenizer to write too."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    family = config["model_type"]
    name = ARCHITECTURES.get(family, family)
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    writer = gguf.GGUFWriter(target, name)
    layers = config.get("num_hidden_layers") or config["n_layer"]
    write_metadata(writer, config, layers)
    if vocabulary:
        add_tokenizer(writer, vocabulary)
    names = gguf.get_tensor_name_map(arch, layers)
    for key, values in hf_tensors(weights).items():
        found = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert found, key
        if family == "gpt2" and values.ndim == 2 and key.split(".")[-2] in (
            "c_attn", "c_proj", "c_fc",
        ):  # fmt: skip
            values = np.ascontiguousarray(values.T)
        if family in PERMUTED and ("q_proj" in key or "k_proj" in key):
            which = "num_attention_heads" if "q_proj" in key else "num_key_value_heads"
            values = permute(values, config[which])
        if family in PLUS_ONE and values.ndim == 1:
            values = values + 1
        if kind is None or values.ndim == 1 or values.shape[-1] % 32:
            writer.add_tensor(found, values.astype(np.float32))
        else:
            writer.add_tensor(found, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_metadata(writer: gguf.GGUFWriter, config: dict[str, Any], layers: int) -> None:
    def first(*keys: str, default: Any = None) -> Any:
        return next((config[key] for key in keys if config.get(key) is not None), default)

    heads = first("num_attention_heads", "n_head")
    hidden = first("hidden_size", "n_embd")
    writer.add_block_count(layers)
    writer.add_context_length(first("max_position_embeddings", "n_positions"))
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(first("intermediate_size", "n_inner"))
    writer.add_head_count(heads)
    writer.add_head_count_kv(first("num_key_value_heads", default=heads))
    head_dim = first("head_dim", default=hidden // heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if "rms_norm_eps" in config:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    else:
        writer.add_layer_norm_eps(first("norm_epsilon", "layer_norm_epsilon"))
    if window := first("sliding_window"):
        writer.add_sliding_window(window)
    ropes = config.get("rope_parameters")
    if ropes:
        rope = ropes.get("full_attention", ropes)
        writer.add_rope_freq_base(rope["rope_theta"])
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
        write_rope_scaling(writer, rope)
    if config["model_type"] == "granite":
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
        writer.add_attention_scale(config["attention_multiplier"])
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config["model_type"] == "gemma3_text":
        writer.add_sliding_window_pattern(config["layer_types"].index("full_attention") + 1)


def write_rope_scaling(writer: gguf.GGUFWriter, rope: dict[str, Any]) -> None:
    """Keys, or tensors for the rules that have one divisor per frequency."""
    kind = rope["rope_type"]
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "longrope":
        for which in ("long", "short"):
            factors = np.array(rope[f"{which}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{which}.weight", factors)
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(rope, dims=16))


def llama3_factors(rope: dict[str, Any], dims: int) -> np.ndarray:
    """The divisors of Llama 3.1's rule, written out frequency by frequency."""
    original = rope["original_max_position_embeddings"]
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    factors = []
    for index in range(0, dims, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (index / dims)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)
