"""Regenerate the golden files of tests/golden with torch and transformers, in float32.

    python scripts/golden.py smollm2 MODEL.gguf     log-probabilities on tests/golden/english.txt
    python scripts/golden.py gemma3 MODEL.gguf      the same for Gemma 3
    python scripts/golden.py families               tiny random checkpoints and their logits

Needs an environment with torch, transformers, gguf, tokenizers and headrace's own dependencies.
Everything is seeded: on one machine and one torch version the files come out the same.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
GOLDEN = ROOT / "tests" / "golden"
NUM_TOKENS = 4000
TOP = 64
STRIDE = 16


def unpermute(values: np.ndarray, heads: int) -> np.ndarray:
    """GGUF's order of rotated rows ('pairs') back to that of Hugging Face ('halves')."""
    rows, width = values.shape
    return values.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


HF_NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
}  # fmt: skip
LLAMA_NORMS = {"ffn_norm": "post_attention_layernorm"}
GEMMA_NORMS = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def state_of(path: Path, config: Any, names: dict[str, str], gemma: bool) -> dict[str, Any]:
    """The dequantized tensors of a GGUF file under their Hugging Face names."""
    top = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
    }
    state: dict[str, Any] = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        name = top.get(tensor.name)
        if name is None:
            _, layer, part, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{names[part]}.weight"
            if not gemma and part in ("attn_q", "attn_k"):
                heads = config.num_attention_heads
                heads = heads if part == "attn_q" else config.num_key_value_heads
                values = unpermute(values, heads)
        if gemma and values.ndim == 1:
            values = values - 1  # the file holds 1 + weight
        state[name] = torch.from_numpy(np.array(values))
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    return state


def perplexity(path: Path, name: str, model: Any) -> None:
    """Log-probabilities of the English text under a float32 model."""
    from headrace.checkpoint import open_checkpoint

    text = (GOLDEN / "english.txt").read_text()
    ids = open_checkpoint(str(path)).tokenizer().encode(text)[:NUM_TOKENS]
    chosen, best, top_ids, top_logprobs = [], [], [], []
    with torch.inference_mode():
        hidden = model.model(torch.tensor([ids])).last_hidden_state[0]
        for start in range(0, len(ids), 10 * STRIDE):  # the logits of all rows are gigabytes
            logits = model.lm_head(hidden[start : start + 10 * STRIDE])
            logprobs = torch.log_softmax(logits, dim=-1)
            target = torch.tensor([*ids, 0][start + 1 : start + 1 + len(logits)])
            chosen.append(logprobs.gather(1, target[:, None])[:, 0].numpy())
            best.append(logits.argmax(dim=-1).numpy())
            top = logprobs[::STRIDE].topk(TOP)
            top_ids.append(top.indices.numpy())
            top_logprobs.append(top.values.numpy())
    chosen = np.concatenate(chosen)[:-1]
    np.savez_compressed(
        GOLDEN / f"{name}.npz",
        ids=np.array(ids, np.int32),
        logprob=chosen.astype(np.float32),
        argmax=np.concatenate(best).astype(np.int32),
        top_ids=np.concatenate(top_ids).astype(np.int32),
        top_logprob=np.concatenate(top_logprobs).astype(np.float32),
    )
    print(f"{name}: {len(ids)} tokens, perplexity {np.exp(-chosen.mean()):.4f}")


def smollm2(path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192,
        rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    model.load_state_dict(state_of(path, config, HF_NAMES | LLAMA_NORMS, gemma=False))
    perplexity(path, "smollm2", model)


def gemma3(path: Path) -> None:
    layers = ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(18)]
    config = transformers.Gemma3TextConfig(
        vocab_size=262144, hidden_size=640, intermediate_size=2048, num_hidden_layers=18,
        num_attention_heads=4, num_key_value_heads=1, head_dim=256, max_position_embeddings=32768,
        rms_norm_eps=1e-6, sliding_window=512, query_pre_attn_scalar=256, layer_types=layers,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )  # fmt: skip
    model = transformers.Gemma3ForCausalLM(config).eval()
    model.load_state_dict(state_of(path, config, HF_NAMES | GEMMA_NORMS, gemma=True))
    perplexity(path, "gemma3", model)


@dataclasses.dataclass(frozen=True)
class Case:
    """One tiny checkpoint. base: weights are those of that case. length: tokens of the prompt."""

    kind: str
    options: dict[str, Any]
    base: str | None = None
    length: int = 40


SMALL = {
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 3, "num_key_value_heads": 1, "max_position_embeddings": 256,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
TINY_GPT2 = {
    "vocab_size": 96, "n_embd": 48, "n_inner": 80, "n_layer": 2, "n_head": 3, "n_positions": 256,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LOCAL, FULL = "sliding_attention", "full_attention"
SHORT_FACTORS = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7]
LONG_FACTORS = [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0]


def ropes(kind: str, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **options}}


LLAMA3 = ropes(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=64,
)  # fmt: skip
YARN = ropes("yarn", factor=4.0, original_max_position_embeddings=64)
LONGROPE = ropes(
    "longrope", short_factor=SHORT_FACTORS, long_factor=LONG_FACTORS,
    original_max_position_embeddings=64,
) | {"original_max_position_embeddings": 64}  # fmt: skip
DYNAMIC = ropes("dynamic", factor=4.0, original_max_position_embeddings=64) | {
    "max_position_embeddings": 64
}
CASES: dict[str, Case] = {
    "llama": Case("Llama", {}),
    "llama+untied-bias": Case("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "llama+linear": Case("Llama", ropes("linear", factor=4.0), "llama", 208),
    "llama+dynamic": Case("Llama", DYNAMIC, "llama", 208),
    "llama+llama3": Case("Llama", LLAMA3, "llama", 208),
    "llama+yarn": Case("Llama", YARN, "llama", 208),
    "mistral": Case("Mistral", {"sliding_window": 13, "head_dim": 24}),
    "qwen2": Case("Qwen2", {"tie_word_embeddings": True}),
    "qwen2+window": Case(
        "Qwen2",
        {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 9,
         "max_window_layers": 1, "layer_types": [FULL, LOCAL]},
        "qwen2",
    ),
    "qwen3": Case("Qwen3", {"head_dim": 24}),
    "gemma2": Case(
        "Gemma2",
        {"head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 11,
         "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0,
         "layer_types": [LOCAL, FULL]},
    ),
    "gemma3": Case(
        "Gemma3Text",
        {"head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 11,
         "num_hidden_layers": 3, "layer_types": [LOCAL, LOCAL, FULL],
         "rope_parameters": {
             FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
             LOCAL: {"rope_type": "default", "rope_theta": 1e4},
         }},
    ),
    "phi3": Case("Phi3", {"sliding_window": 30}),
    "phi3+longrope": Case("Phi3", LONGROPE, "phi3", 208),
    "phi3+longrope-short": Case("Phi3", LONGROPE, "phi3", 40),
    "phi4mini": Case(
        "Phi3",
        {"tie_word_embeddings": True, "num_attention_heads": 2,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                             "partial_rotary_factor": 0.75}},
    ),
    "olmo2": Case("Olmo2", {}),
    "granite": Case(
        "Granite",
        {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4,
         "logits_scaling": 2.0, "tie_word_embeddings": True},
    ),
    "starcoder2": Case("Starcoder2", {"sliding_window": 17}),
    "gpt2": Case("GPT2", TINY_GPT2),
    "smollm3": Case(
        "SmolLM3", {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0], "head_dim": 16}
    ),
}  # fmt: skip
CLASSES = {
    "Gemma3Text": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "GPT2": ("GPT2Config", "GPT2LMHeadModel"),
}
HOT = (0, 1, 10, 39, 63, 64, 65, 128, 200, 207)


def randomize(model: Any, seed: int) -> None:
    """Weights of a size at which every part of the model shows in the logits, as bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                norm = "norm" in name or "ln_" in name
                centre = 1.0 if norm and not name.endswith("bias") else 0.0
                value = centre + 0.2 * noise
            elif "embed" in name or "wte" in name or "wpe" in name:
                value = noise
            else:
                value = 1.5 * noise / parameter.shape[-1] ** 0.5
            parameter.copy_(value.to(torch.bfloat16).float())


def family(name: str, case: Case, seed: int) -> None:
    config_name, model_name = CLASSES.get(
        case.kind, (f"{case.kind}Config", f"{case.kind}ForCausalLM")
    )
    options = case.options if case.kind == "GPT2" else SMALL | case.options
    config = getattr(transformers, config_name)(**options)
    config.architectures = [model_name]
    model = getattr(transformers, model_name)(config).eval()
    folder = GOLDEN / "families" / name
    folder.mkdir(parents=True, exist_ok=True)
    randomize(model, seed)
    if case.base is None:
        tied = model.config.tie_word_embeddings
        state = {
            key: value.to(torch.bfloat16).contiguous()
            for key, value in model.state_dict().items()
            if not (tied and key == "lm_head.weight")
        }
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    values = json.loads(config.to_json_string())
    values.pop("transformers_version", None)
    (folder / "config.json").write_text(json.dumps(values, indent=1) + "\n")
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 96, (case.length,), generator=generator)
    with torch.inference_mode():
        logits = model(ids[None]).logits[0].numpy()
    positions = np.array([p for p in HOT if p < case.length] if case.length > 40 else range(40))
    np.savez_compressed(
        folder / "golden.npz",
        ids=ids.numpy().astype(np.int32),
        positions=positions.astype(np.int32),
        logits=logits[positions].astype(np.float32),
    )
    print(f"{name}: logits {logits.std():.3f} std")


def families() -> None:
    bases = [name for name, case in CASES.items() if case.base is None]
    for name, case in CASES.items():
        family(name, case, seed=bases.index(case.base or name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["smollm2", "gemma3", "families"])
    parser.add_argument("model", nargs="?", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    transformers.logging.set_verbosity_error()
    if arguments.what == "families":
        families()
    elif arguments.what == "smollm2":
        smollm2(arguments.model)
    else:
        gemma3(arguments.model)


if __name__ == "__main__":
    main()
