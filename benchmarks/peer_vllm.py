"""A Llama of a GGUF file as the Hugging Face folder in bfloat16 that vLLM's CPU back-end takes."""

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headrace.models.gguf import GGUFFile
from headrace.ops.formats import dequantize
from headrace.text.gguf import build

F32 = npt.NDArray[np.float32]
_BLOCK = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def write_folder(source: str, folder: Path) -> None:
    """Write config, weights (dequantized) and tokenizer of the GGUF file `source`."""
    folder.mkdir(parents=True)
    file = GGUFFile(source)
    facts = {k.removeprefix("llama."): v for k, v in file.metadata.items()}
    heads, kv_heads = facts["attention.head_count"], facts["attention.head_count_kv"]
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16",
        "hidden_act": "silu", "hidden_size": facts["embedding_length"],
        "intermediate_size": facts["feed_forward_length"], "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "num_hidden_layers": facts["block_count"],
        "max_position_embeddings": facts["context_length"],
        "rms_norm_eps": facts["attention.layer_norm_rms_epsilon"],
        "rope_theta": facts["rope.freq_base"],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, default=float))
    tokenizer, _ = build(file.metadata)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    tensors = {}
    for name, tensor in file.tensors.items():
        values = dequantize(tensor)
        if ".attn_q." in name or ".attn_k." in name:
            values = _unpermuted(values, heads if ".attn_q." in name else kv_heads)
        tensors[_renamed(name)] = values
    _write(folder / "model.safetensors", tensors)


def _renamed(name: str) -> str:
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_BLOCK[parts[2]]}.{parts[3]}"
    return f"{_WHOLE[parts[0]]}.{parts[1]}"


def _unpermuted(values: F32, heads: int) -> F32:
    """Rows of a rotated projection from GGUF's order (pairs side by side) to halves of a head."""
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, -1)


def _write(path: Path, tensors: dict[str, F32]) -> None:
    """A safetensors file in bfloat16, rounded to nearest even; numpy has no such type."""
    header, parts, at = {}, [], 0
    for name, values in tensors.items():
        bits = np.ascontiguousarray(values).view(np.uint32)
        raw = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16).tobytes()
        offsets = [at, at + len(raw)]
        header[name] = {"dtype": "BF16", "shape": list(values.shape), "data_offsets": offsets}
        parts.append(raw)
        at += len(raw)
    head = json.dumps(header).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + b"".join(parts))
