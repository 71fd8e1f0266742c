"""Configurations: what is known is read in both spellings, anything else is refused by name."""

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from headrace.checkpoint import open_checkpoint
from headrace.errors import ModelError
from headrace.models import from_hf
from headrace.models.gguf import GGUFFile
from headrace.models.spec import Layer, ModelSpec, Rope, Scaling
from tests.models.convert import convert, hf_tensors
from tests.models.test_parity import FAMILIES


def config(case: str, **changes: Any) -> dict[str, Any]:
    values = json.loads((FAMILIES / case / "config.json").read_text()) | changes
    return {key: value for key, value in values.items() if value != "absent"}


def spec(case: str, **changes: Any) -> ModelSpec:
    return from_hf.read(config(case, **changes), "config.json")


def test_old_and_new_spelling_of_rope_scaling_agree() -> None:
    for case in ("llama+llama3", "llama+linear", "llama+yarn", "llama+dynamic"):
        scaling = config(case)["rope_parameters"]
        theta = scaling.pop("rope_theta")
        kind = scaling.pop("rope_type")
        for key in ("rope_type", "type"):
            old = spec(
                case, rope_parameters="absent", rope_theta=theta, rope_scaling=scaling | {key: kind}
            )
            assert old == spec(case)


def test_gemma3_in_the_old_spelling() -> None:
    old = spec(
        "gemma3", rope_parameters="absent", layer_types="absent", sliding_window_pattern=3,
        _sliding_window_pattern="absent", rope_theta=1e6, rope_local_base_freq=1e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )  # fmt: skip
    assert old == spec("gemma3")


def test_windows_by_layer() -> None:
    assert spec("mistral").layers == (Layer(13), Layer(13))
    assert spec("mistral", sliding_window=None).layers == (Layer(), Layer())
    assert spec("mistral", sliding_window=256).layers == (Layer(), Layer())  # sees everything
    assert spec("qwen2").layers == (Layer(), Layer())
    assert spec("qwen2+window").layers == (Layer(), Layer(9))
    assert spec("qwen2+window", layer_types="absent").layers == (Layer(), Layer(9))
    assert spec("gemma3").layers == (Layer(11, "local"), Layer(11, "local"), Layer())
    assert [layer.rope for layer in spec("smollm3").layers] == ["global"] * 3 + [None]
    assert spec("smollm3", no_rope_layers=None) == spec("smollm3")


def test_positions_with_rope_scaling() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    qwen = spec(
        "qwen2", rope_parameters=None, rope_scaling=scaling, max_position_embeddings=32768,
        rope_theta=1e6,
    )  # fmt: skip
    assert qwen.max_positions == 131072
    assert spec("llama+dynamic").max_positions == 256
    assert spec("llama+llama3").max_positions == 256


# What the published configurations of well-known checkpoints say beside the obvious.
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama": {  # SmolLM2
        "is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"a": 1},
        "pretraining_tp": 2, "rope_scaling": None, "rope_parameters": "absent",
        "rope_theta": 100000, "torch_dtype": "bfloat16", "eos_token_id": [1, 2],
    },
    "gemma2": {
        "hidden_act": "gelu_pytorch_tanh", "sliding_window_size": 4096,
        "cache_implementation": "hybrid", "rope_parameters": "absent", "rope_theta": 10000.0,
    },
    "starcoder2": {
        "activation_function": "gelu", "layer_norm_epsilon": 1e-05, "mlp_type": "default",
        "norm_type": "layer_norm", "attention_softmax_in_fp32": True,
        "scale_attention_softmax_in_fp32": True, "scale_attn_weights": True,
    },
    "phi4mini": {
        "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False,
        "attention_bias": False, "auto_map": {"AutoConfig": "x.y"}, "tokenizer_class": "x",
    },
    "smollm3": {"pretraining_tp": 2, "max_window_layers": 28},
    "qwen2": {"use_mrope": False, "use_sliding_window": False, "sliding_window": 131072},
    "gpt2": {"n_ctx": 1024, "task_specific_params": {"text-generation": {"max_length": 50}}},
}  # fmt: skip


@pytest.mark.parametrize("case", PUBLISHED)
def test_published_configurations_are_read(case: str) -> None:
    assert spec(case, **PUBLISHED[case]).family == spec(case).family


def test_activations_come_from_the_configuration() -> None:
    for case, key in (("gemma2", "hidden_activation"), ("starcoder2", "hidden_act"),
                      ("gpt2", "activation_function"), ("llama", "hidden_act")):  # fmt: skip
        assert spec(case, **{key: "gelu"}).activation == "gelu"
    assert spec("gemma3", hidden_activation="absent").activation == "gelu_tanh"


REFUSED = {
    r"new_feature = \[1, 2\] is not known to headrace": {"new_feature": [1, 2]},
    "model_type: 'mamba' is not supported": {"model_type": "mamba"},
    "model_type: is missing": {"model_type": "absent"},
    "architectures: .* is not a causal": {"architectures": ["LlamaForSequenceClassification"]},
    "hidden_act: 'mish' is not supported": {"hidden_act": "mish"},
    "hidden_size: 0 is not a whole number": {"hidden_size": 0},
    "hidden_size: '48' is not a whole number": {"hidden_size": "48"},
    "num_hidden_layers: True is not": {"num_hidden_layers": True},
    "num_hidden_layers: 1000000 is not": {"num_hidden_layers": 1000000},
    "num_key_value_heads: 5 is not a whole number from 1 to 3": {"num_key_value_heads": 5},
    "rms_norm_eps: nan is not a finite number": {"rms_norm_eps": float("nan")},
    "rope.rope_type: 'spiral' is not supported": {"rope_parameters": {"rope_type": "spiral"}},
    "rope.beta = 3 is not known": {"rope_parameters": {"rope_type": "default", "beta": 3}},
    "rope.long_factor: is not a list of 8": {
        "rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1]}
    },
    "rope_scaling: is not an object": {"rope_parameters": None, "rope_scaling": "linear"},
    "partial_rotary_factor: 0.97 of 16 values cannot": {
        "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.97}
    },
    "layer_types: 'linear_attention' is not": {"layer_types": ["linear_attention"] * 2},
    "layer_types: is not a list of 2 kinds": {"layer_types": ["full_attention"]},
    "trust_remote_code: code from a checkpoint is never run": {"trust_remote_code": True},
    "rms_norm_eps and norm_eps say the same": {"norm_eps": 0.5},
    "attention_bias: 1 is neither true nor false": {"attention_bias": 1},
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals_name_the_key(message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        spec("llama", **REFUSED[message])
    assert str(caught.value).startswith("config.json: ")


def test_unknown_gguf_keys_and_architectures_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    convert(FAMILIES / "llama", FAMILIES / "llama" / "model.safetensors", path)
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b"llama.context_length", b"llama.context_lengtx"))
    with pytest.raises(ModelError, match=r"llama\.context_length: is missing"):
        open_checkpoint(str(path))
    path.write_bytes(raw.replace(b"llama.attention.value_length", b"llama.attention.other_length"))
    with pytest.raises(ModelError, match=r"llama\.attention\.other_length = 16 is not known"):
        open_checkpoint(str(path))
    writer = gguf.GGUFWriter(path, "rwkv7")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert GGUFFile(path).architecture == "rwkv7"
    with pytest.raises(ModelError, match="architecture 'rwkv7' is not supported"):
        open_checkpoint(str(path))


def make_folder(path: Path, tensors: dict[str, np.ndarray], shards: int = 1) -> None:
    shutil.copy(FAMILIES / "llama" / "config.json", path / "config.json")
    if shards == 1:
        save_file(tensors, path / "model.safetensors")
        return
    places = {name: f"part-{index % shards}.safetensors" for index, name in enumerate(tensors)}
    for part in set(places.values()):
        save_file({n: t for n, t in tensors.items() if places[n] == part}, path / part)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def llama_tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    layer = {
        "input_layernorm": (48,), "self_attn.q_proj": (48, 48), "self_attn.k_proj": (16, 48),
        "self_attn.v_proj": (16, 48), "self_attn.o_proj": (48, 48),
        "post_attention_layernorm": (48,), "mlp.gate_proj": (64, 48), "mlp.up_proj": (64, 48),
        "mlp.down_proj": (48, 64),
    }  # fmt: skip
    shapes = {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    shapes |= {"model.embed_tokens": (96, 48), "model.norm": (48,), "lm_head": (96, 48)}
    return {
        f"{name}.weight": rng.standard_normal(shape).astype(np.float16)
        for name, shape in shapes.items()
    }


def test_shards_read_as_one(tmp_path: Path) -> None:
    tensors = llama_tensors()
    make_folder(tmp_path, tensors, shards=3)
    model = open_checkpoint(str(tmp_path)).model()
    gate = model.weights["layers.1.gate_up"].parts[0]
    wanted = tensors["model.layers.1.mlp.gate_proj.weight"]
    np.testing.assert_array_equal(gate.data.view(np.float16).reshape(gate.shape), wanted)
    (tmp_path / "part-1.safetensors").unlink()
    with pytest.raises(ModelError, match=r"part-1\.safetensors: cannot be read"):
        open_checkpoint(str(tmp_path))


def test_missing_extra_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    tensors = llama_tensors()
    cases = {
        f"tensor '{name}' is missing": {k: v for k, v in tensors.items() if k != name},
        "tensor 'extra' is not used by the llama family": tensors | {"extra": np.ones(3)},
        r"down_proj.weight \[48, 63\]: expected \[48, 64\]": tensors
        | {name: tensors[name][:, :63].copy()},
    }
    for message, damaged in cases.items():
        make_folder(tmp_path, damaged)
        with pytest.raises(ModelError, match=message):
            open_checkpoint(str(tmp_path)).model()
    ignored = tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    make_folder(tmp_path, ignored)
    open_checkpoint(str(tmp_path)).model()


def test_names_that_lead_nowhere(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere: no such file or folder"):
        open_checkpoint("nowhere")
    with pytest.raises(ModelError, match=r"config\.json: cannot be read"):
        open_checkpoint(str(tmp_path))
    shutil.copy(FAMILIES / "llama" / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match="because unpickling runs code"):
        open_checkpoint(str(tmp_path))


def test_yarn_by_hand() -> None:
    """The attention factor of YaRN is 0.1 ln(factor) + 1."""
    from headrace.models.rope import frequencies

    rope = Rope(1e4, 16, Scaling("yarn", 4.0, 64))
    found = frequencies(rope, 256)
    assert found.scale == pytest.approx(0.1 * np.log(4) + 1)
    assert found.inverse[0] == pytest.approx(1.0)  # fast dims keep their speed
    assert found.inverse[-1] == pytest.approx(1e4 ** (-14 / 16) / 4)  # slow ones are divided


def test_padding_of_the_vocabulary_is_told_apart(tmp_path: Path) -> None:
    """Rows beyond the tokenizer, and trailing tokens of type 'unused', are never sampled."""
    path = tmp_path / "x.gguf"
    weights = FAMILIES / "llama" / "model.safetensors"
    convert(FAMILIES / "llama", weights, path, vocabulary=80)
    assert open_checkpoint(str(path)).model().tokens == 80
    raw = path.read_bytes()
    types = np.array([1] * 74 + [1, 1, 1, 3, 3, 1], "<i4").tobytes()
    assert raw.count(types) == 1
    unused = types[:-4] + np.array([5], "<i4").tobytes()
    path.write_bytes(raw.replace(types, unused))
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.model().tokens == checkpoint.tokenizer().vocabulary == 79
    convert(FAMILIES / "llama", weights, path, vocabulary=100)
    with pytest.raises(ModelError, match="100 tokens but the embedding only 96 rows"):
        open_checkpoint(str(path)).model()
    assert open_checkpoint(str(FAMILIES / "llama")).model().tokens == 96


def test_gemma3_with_a_vision_tower(tmp_path: Path) -> None:
    """The language model is taken out of such a checkpoint; its file leaves out class defaults."""
    text = config("gemma3")
    whole = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"],
             "text_config": text, "vision_config": {"hidden_size": 7}}  # fmt: skip
    assert from_hf.read(whole, "config.json") == spec("gemma3")
    short = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
             "num_hidden_layers": 34, "sliding_window": 1024,
             "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}  # fmt: skip
    read = from_hf.read(whole | {"text_config": short}, "config.json")
    assert (read.heads, read.kv_heads, read.head_dim, read.vocabulary) == (8, 4, 256, 262208)
    assert read.ropes["global"] == Rope(1e6, 256, Scaling("linear", 8.0, 131072))
    assert read.ropes["local"] == Rope(1e4, 256)
    tensors = hf_tensors(FAMILIES / "gemma3" / "model.safetensors")
    for prefix in ("language_model.model.", "model.language_model."):
        stored = {name.replace("model.", prefix, 1): one for name, one in tensors.items()}
        stored |= {"vision_tower.x.weight": np.ones((2, 2), np.float32)}
        save_file(stored, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(whole))
        model = open_checkpoint(str(tmp_path)).model()
        assert model.notes == ("the vision tower is left out: text only",)


def test_folders_of_gguf_files(tmp_path: Path) -> None:
    weights = FAMILIES / "llama" / "model.safetensors"
    convert(FAMILIES / "llama", weights, tmp_path / "one.gguf")
    assert open_checkpoint(str(tmp_path)).path.name == "one.gguf"
    convert(FAMILIES / "llama", weights, tmp_path / "two.gguf")
    with pytest.raises(ModelError, match=r"several GGUF files, name one: one\.gguf, two\.gguf"):
        open_checkpoint(str(tmp_path))
