"""Quantized folders: every layout, packed here by its definition, gives back its exact values."""

import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from headrace.checkpoint import open_checkpoint
from headrace.errors import ConfigError, ModelError
from headrace.models import blocks
from headrace.models.load import without_data
from headrace.models.quantized import _E4M3, unpack
from headrace.ops.backends import open_backend
from headrace.ops.batch import Limits
from headrace.ops.formats import dequantize
from headrace.ops.weights import Tensor
from tests.models.convert import hf_tensors
from tests.models.forward import cpu_levels, layout_of, logits
from tests.models.test_parity import FAMILIES

N, K = 48, 128
DTYPES = {"float32": "F32", "float16": "F16", "int32": "I32", "int8": "I8", "uint8": "F8_E4M3"}


def tensors(**arrays: np.ndarray) -> dict[str, Tensor]:
    """Arrays as tensors of a layer 'a'; uint8 stands for FP8."""
    return {
        f"a.{name}": Tensor(
            f"a.{name}", DTYPES[str(array.dtype)], array.shape,
            np.ascontiguousarray(array).reshape(-1).view(np.uint8),
        )
        for name, array in arrays.items()
    }  # fmt: skip


def random_codes(bits: int, group: int, symmetric: bool = False, half: bool = True) -> Any:
    """(codes [N, K], zeros [N, G], scales [N, G], values [N, K])."""
    rng = np.random.default_rng(bits * 1000 + group)
    count = K // group
    codes = rng.integers(0, 1 << bits, (N, K))
    zeros = np.full((N, count), 1 << bits - 1)
    if not symmetric:
        zeros = rng.integers(1, 1 << bits, (N, count))
    scales = rng.uniform(0.01, 0.1, (N, count)).astype(np.float16 if half else np.float32)
    wide = np.repeat(scales.astype(np.float32), group, axis=1)
    values = (codes - np.repeat(zeros, group, axis=1)).astype(np.float32) * wide
    return codes, zeros, scales, values


def pack(codes: np.ndarray, bits: int, order: list[int] | None = None) -> np.ndarray:
    """[R, C] codes -> [R, C * bits / 32] words; place i of a word holds code order[i]."""
    per = 32 // bits
    order = order or list(range(per))
    runs = codes.reshape(len(codes), -1, per).astype(np.uint64)
    words = np.zeros(runs.shape[:2], np.uint64)
    for place, which in enumerate(order):
        words |= runs[:, :, which] << np.uint64(place * bits)
    return words.astype(np.uint32).view(np.int32)


def only(config: dict[str, Any], pieces: dict[str, Tensor]) -> Tensor:
    found = unpack(pieces, config, "config")
    assert list(found) == ["a.weight"]
    return found["a.weight"]


@pytest.mark.parametrize(
    ("bits", "symmetric", "form"),
    [(4, True, "Q4_0"), (4, False, "I4Z"), (8, True, "Q8_0"), (8, False, "I8M")],
)
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_gptq(bits: int, symmetric: bool, form: str, version: str) -> None:
    codes, zeros, scales, values = random_codes(bits, 32, symmetric)
    stored = zeros - (1 if version == "gptq" else 0)
    pieces = tensors(
        qweight=pack(codes, bits).T, qzeros=pack(stored.T, bits), scales=scales.T,
        g_idx=np.arange(K, dtype=np.int32) // 32,
    )  # fmt: skip
    config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "desc_act": False}
    weight = only(config | {"checkpoint_format": version}, pieces)
    assert weight.format == form
    check(weight, values)


def check(weight: Tensor, values: np.ndarray) -> None:
    """Exact where zero points are symmetric; otherwise scale * code - scale * zero rounds twice."""
    assert weight.shape == values.shape
    if weight.format in ("I4", "I8M"):
        np.testing.assert_allclose(dequantize(weight), values, rtol=0, atol=4e-6)
    elif weight.format == "F16":
        np.testing.assert_array_equal(dequantize(weight), values.astype(np.float16))
    else:
        np.testing.assert_array_equal(dequantize(weight), values)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("config", [{"desc_act": True}, {"desc_act": False}, {}])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_gptq_with_activation_order(
    bits: int, symmetric: bool, config: dict[str, bool], version: str
) -> None:
    """A shuffled group index counts, whatever the configuration says of it (bugs.md, B082)."""
    codes, zeros, scales, _ = random_codes(bits, 32, symmetric)
    order = np.random.default_rng(0).permutation(np.arange(K, dtype=np.int32) // 32)
    stored = zeros.T - (1 if version == "gptq" else 0)
    pieces = tensors(
        qweight=pack(codes, bits).T, qzeros=pack(stored, bits), scales=scales.T, g_idx=order
    )
    said = {"quant_method": "gptq", "bits": bits, "checkpoint_format": version}
    weight = only(said | config, pieces)
    values = (codes - zeros[:, order]) * scales.astype(np.float32)[:, order]
    check(weight, values.astype(np.float32))


@pytest.mark.parametrize("symmetric", [True, False])
def test_awq(symmetric: bool) -> None:
    codes, zeros, scales, values = random_codes(4, 64, symmetric)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    pieces = tensors(
        qweight=pack(codes.T, 4, order), qzeros=pack(zeros.T, 4, order), scales=scales.T
    )
    config = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}
    weight = only(config | {"zero_point": True, "modules_to_not_convert": None}, pieces)
    assert weight.format == ("Q4_0" if symmetric else "I4Z")
    check(weight, values)


def compressed(bits: int, kind: str, form: str) -> dict[str, Any]:
    group = {"weights": {"num_bits": bits, "type": kind, "symmetric": True}, "targets": ["Linear"]}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"g": group}}


@pytest.mark.parametrize(("bits", "form"), [(4, "I4"), (8, "I8")])
def test_compressed_packed(bits: int, form: str) -> None:
    codes, _, scales, values = random_codes(bits, 32, symmetric=True, half=False)
    pieces = tensors(
        weight_packed=pack(codes, bits), weight_scale=scales,
        weight_shape=np.array([N, K], np.int32),
    )  # fmt: skip
    weight = only(compressed(bits, "int", "pack-quantized"), pieces)
    assert weight.format == form
    check(weight, values)


def test_compressed_with_zero_points() -> None:
    codes, zeros, scales, values = random_codes(4, 32)
    pieces = tensors(
        weight_packed=pack(codes, 4), weight_scale=scales, weight_zero_point=pack(zeros.T, 4).T,
        weight_shape=np.array([N, K], np.int32),
    )  # fmt: skip
    check(only(compressed(4, "int", "pack-quantized"), pieces), values)


def test_compressed_int8_by_channel() -> None:
    codes, _, scales, values = random_codes(8, K, symmetric=True, half=False)
    pieces = tensors(weight=(codes - 128).astype(np.int8), weight_scale=scales)
    weight = only(compressed(8, "int", "int-quantized"), pieces)
    assert weight.format == "I8"
    check(weight, values)


@pytest.mark.parametrize("scales", ["tensor", "channel", "block"])
def test_fp8(scales: str) -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (N, K), np.uint8)
    codes[(codes & 127) == 127] = 0  # no NaN
    if scales == "block":  # 48 rows are no whole number of blocks of 32
        scale = rng.uniform(0.001, 0.1, (2, 4)).astype(np.float32)
        wide = np.repeat(np.repeat(scale, 32, axis=0), 32, axis=1)[:N]
        config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 32]}
        weight = only(config, tensors(weight=codes, weight_scale_inv=scale))
    else:
        wide = rng.uniform(0.001, 0.1, (N if scales == "channel" else 1, 1)).astype(np.float32)
        config = compressed(8, "float", "float-quantized")
        weight = only(config, tensors(weight=codes, weight_scale=wide))
    check(weight, _E4M3[codes] * wide)


def test_fp8_values() -> None:
    """Spot values of E4M3 from its definition (Micikevicius et al. 2022)."""
    assert _E4M3[[0x00, 0x01, 0x08, 0x38, 0x3C, 0x7E]].tolist() == [
        0, 2**-9, 2**-6, 1, 1.5, 448,
    ]  # fmt: skip
    assert (_E4M3[0xB8], np.isnan(_E4M3[0x7F])) == (-1, True)


GPTQ = {"quant_method": "gptq", "bits": 4}
REFUSED = {
    "quant_method: 'bitsandbytes' is not supported": {"quant_method": "bitsandbytes"},
    "bits: 3 is not supported": GPTQ | {"bits": 3},
    "checkpoint_format: 'marlin' is not": GPTQ | {"checkpoint_format": "marlin"},
    "surprise = 1 is not known": GPTQ | {"surprise": 1},
    "version: 'gemv' is not": {"quant_method": "awq", "bits": 4, "version": "gemv"},
    "format: 'marlin-24' is not": compressed(4, "int", "marlin-24"),
    "4-bit floats are not supported": compressed(4, "float", "pack-quantized"),
    "fmt: 'e5m2' is not": {"quant_method": "fp8", "fmt": "e5m2"},
    r"tensor 'a\.qzeros' is missing": GPTQ,
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals(message: str) -> None:
    pieces = tensors(qweight=np.zeros((K // 8, N), np.int32), scales=np.ones((1, N), np.float16))
    with pytest.raises(ModelError, match=message):
        unpack(pieces, REFUSED[message], "config")


def test_a_gptq_llama_runs(tmp_path: Path) -> None:
    """A whole checkpoint with quantized linears equals the float one with the same values."""
    rng = np.random.default_rng(1)
    stored: dict[str, np.ndarray] = {}
    floats: dict[str, np.ndarray] = {}
    for name, values in hf_tensors(FAMILIES / "llama" / "model.safetensors").items():
        if "proj" not in name:
            stored[name] = floats[name] = values
            continue
        rows, depth = values.shape
        scales = (np.abs(values).max(axis=1) / 8).astype(np.float16)
        codes = np.clip(np.rint(values / scales.astype(np.float32)[:, None]) + 8, 0, 15)
        floats[name] = ((codes - 8) * scales.astype(np.float32)[:, None]).astype(np.float32)
        stem = name.removesuffix(".weight")
        stored[f"{stem}.qweight"] = pack(codes.astype(np.int64), 4).T.copy()
        stored[f"{stem}.qzeros"] = pack(np.full((1, rows), 7), 4)
        stored[f"{stem}.scales"] = scales[None]
        stored[f"{stem}.g_idx"] = np.zeros(depth, np.int32)
    results = []
    ids = rng.integers(0, 96, 20).tolist()
    config = json.loads((FAMILIES / "llama" / "config.json").read_text())
    quant = {"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": False, "sym": True}
    for weights, extra in ((stored, {"quantization_config": quant}), (floats, {})):
        save_file(weights, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(config | extra))
        model = open_checkpoint(str(tmp_path)).model(20)
        results.append(logits(open_backend("reference"), model, ids, 20))
    # 48 values in a row are no whole number of blocks, so some layers are F16 here.
    np.testing.assert_allclose(results[0], results[1], atol=2e-3 * np.abs(results[1]).max())


@pytest.mark.parametrize("form", ["Q8_0", "Q4_1"])
def test_error_of_quantizing_while_loading(form: str) -> None:
    values = np.random.default_rng(0).standard_normal((1030, 64)).astype(np.float32)
    values[3, :32] = 0  # a block of zeros
    values[4, :32] = 7.5
    source = blocks.tensor("w", "F32", values.shape, values)
    result = dequantize(blocks.quantize(source, form)).reshape(1030, 2, 32)
    grouped = values.reshape(1030, 2, 32)
    if form == "Q8_0":
        bound = np.abs(grouped).max(axis=-1) / 127 / 2
        rounding = np.abs(grouped).max(axis=-1) * 2.0**-11
    else:
        bound = (grouped.max(axis=-1) - grouped.min(axis=-1)) / 15 / 2
        rounding = np.abs(grouped).max(axis=-1) * 2.0**-9
    error = np.abs(result - grouped).max(axis=-1)
    assert (error <= bound + rounding + 1e-7).all()


def test_quantization_of_a_checkpoint(tmp_path: Path) -> None:
    """Matrices whose rows are whole blocks change, the rest stays; tied tables stay one tensor."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(FAMILIES / "starcoder2" / name, tmp_path / name)
    model = open_checkpoint(str(tmp_path), quantization="int4").model()
    formats = {name: weight.formats for name, weight in model.weights.items()}
    assert formats["layers.0.down"] == ("Q4_1",)  # 64 in
    assert formats["layers.0.up"] == ("BF16",)  # 48 in
    hollow = without_data(model)
    assert {n: (w.shape, w.formats, w.nbytes) for n, w in hollow.weights.items()} == {
        n: (w.shape, w.formats, w.nbytes) for n, w in model.weights.items()
    }
    assert all(p.data.strides == (0,) for w in hollow.weights.values() for p in w.parts)
    assert model.notes == ("float matrices are quantized to Q4_1 while loading",)
    with pytest.raises(ConfigError, match="quantization: 'int2' is not supported"):
        open_checkpoint(str(tmp_path), quantization="int2")


def test_half_bytes_round_as_numpy_does() -> None:
    """Every class of float32: normal, subnormal and infinite as float16, NaN, ties."""
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, np.uint64).astype(np.uint32)
    ties = np.arange(0, 0x7C00, 7, np.uint16).view(np.float16).astype(np.float32)
    ties = (ties.view(np.uint32) + 0x1000).view(np.float32)
    for values in (bits.view(np.float32), ties, -ties, np.zeros(4, np.float32)):
        with np.errstate(all="ignore"):
            expected = values[None].astype(np.float16)
            made = blocks.half_bytes(values[None]).view(np.float16)
        np.testing.assert_array_equal(made.view(np.uint16), expected.view(np.uint16))


def gptq_folder(folder: Path, layers: int) -> tuple[dict[str, Any], int]:
    """A Llama of GPTQ linears; returns what it holds, and the values of its largest weight."""
    rng = np.random.default_rng(0)
    hidden, ffn, vocabulary = 256, 1024, 64
    shapes = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (hidden, hidden),
        "self_attn.v_proj": (hidden, hidden), "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }  # fmt: skip
    stored: dict[str, Any] = {
        "model.embed_tokens.weight": rng.standard_normal((vocabulary, hidden)).astype(np.float16),
        "model.norm.weight": np.ones(hidden, np.float32),
    }
    for layer in range(layers):
        for name, (rows, depth) in shapes.items():
            stem = f"model.layers.{layer}.{name}"
            stored[f"{stem}.qweight"] = pack(rng.integers(0, 16, (rows, depth)), 4).T.copy()
            stored[f"{stem}.qzeros"] = pack(rng.integers(0, 16, (depth // 64, rows)), 4)
            scales = rng.uniform(1e-3, 1e-2, (depth // 64, rows))
            stored[f"{stem}.scales"] = scales.astype(np.float16)
        for name in ("input_layernorm", "post_attention_layernorm"):
            stored[f"model.layers.{layer}.{name}.weight"] = np.ones(hidden, np.float32)
    save_file(stored, folder / "model.safetensors")
    config = {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": ffn,
        "rms_norm_eps": 1e-5, "num_attention_heads": 4, "num_hidden_layers": layers,
        "vocab_size": vocabulary, "max_position_embeddings": 64, "tie_word_embeddings": True,
        "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 64},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return stored, 2 * ffn * hidden


@pytest.mark.skipif(not cpu_levels(), reason="the CPU back-end is not built")
def test_loading_holds_one_converted_weight_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, largest = gptq_folder(tmp_path, 3)
    made: list[weakref.ref[Any]] = []
    whole = Tensor.whole

    def remembered(self: Tensor, workers: Any = None) -> Tensor:
        found = whole(self, workers)
        if self.recipe is not None:
            made.append(weakref.ref(found.data.base))
        return found

    monkeypatch.setattr(Tensor, "whole", remembered)
    model = open_checkpoint(str(tmp_path)).model(32)
    codes = sum(array.nbytes for name, array in stored.items() if "qweight" in name)
    assert sum(weight.nbytes for weight in model.weights.values()) > codes
    assert made == []  # nothing is converted yet, though all is counted
    limits = Limits(
        max_tokens=8, max_slices=1, max_logits=1, max_samples=1, slots=1, max_blocks=2,
        num_pages=2, max_positions=32, vocabulary=64, threads=2,
    )  # fmt: skip
    held: list[int] = []
    seen: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        seen.append((done, total))
        alive = [array for one in made if (array := one()) is not None]
        held.append(sum(array.nbytes for array in alive))

    open_backend("cpu").load(
        model.program, model.weights, layout_of(model), limits, progress
    ).close()
    assert len(made) == 3 * 7
    assert max(held) == largest * 19 // 32  # gate and up, the widest weight
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]


def test_an_fp8_llama_says_that_it_doubles(tmp_path: Path) -> None:
    """A whole FP8 checkpoint gives the logits of the same values in float16, and says what its
    weights take. safetensors for numpy knows no FP8: the header is written here."""
    config = json.loads((FAMILIES / "llama" / "config.json").read_text())
    ids = np.random.default_rng(1).integers(0, 96, 20).tolist()
    stored: dict[str, tuple[str, np.ndarray]] = {}
    halves: dict[str, np.ndarray] = {}
    for name, values in hf_tensors(FAMILIES / "llama" / "model.safetensors").items():
        if "proj" not in name:
            stored[name], halves[name] = ("F32", values.astype(np.float32)), values
            continue
        scale = np.float32(np.abs(values).max() / 448)
        codes = np.abs(values[..., None] / scale - _E4M3[:127]).argmin(axis=-1).astype(np.uint8)
        stored[name] = ("F8_E4M3", codes)
        stored[f"{name}_scale_inv"] = ("F32", np.array([[scale]], np.float32))
        halves[name] = (_E4M3[codes] * scale).astype(np.float16)
    header: dict[str, Any] = {}
    at = 0
    for name, (form, array) in stored.items():
        header[name] = {
            "dtype": form,
            "shape": array.shape,
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    raw = json.dumps(header).encode()
    data = b"".join(array.tobytes() for _, array in stored.values())
    (tmp_path / "fp8").mkdir()
    (tmp_path / "f16").mkdir()
    (tmp_path / "fp8" / "model.safetensors").write_bytes(
        len(raw).to_bytes(8, "little") + raw + data
    )
    save_file(halves, tmp_path / "f16" / "model.safetensors")
    quant = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}}
    for kind, extra in (("fp8", quant), ("f16", {})):
        (tmp_path / kind / "config.json").write_text(json.dumps(config | extra))
    small = open_checkpoint(str(tmp_path / "fp8")).model(20)
    bytes_stored = sum(array.nbytes for form, array in stored.values() if form == "F8_E4M3")
    assert small.notes == (
        f"{bytes_stored} bytes of FP8 weights are held as F16, at twice their size",
    )
    assert {w.formats[0] for n, w in small.weights.items() if n.endswith(("qkv", "down"))} == {
        "F16"
    }
    plain = open_checkpoint(str(tmp_path / "f16")).model(20)
    backend = open_backend("reference")
    np.testing.assert_array_equal(logits(backend, small, ids, 20), logits(backend, plain, ids, 20))


FUZZED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "gptq": (GPTQ, ["qweight", "qzeros", "scales", "g_idx"]),
    "awq": ({"quant_method": "awq", "bits": 4}, ["qweight", "qzeros", "scales"]),
    "packed": (
        compressed(4, "int", "pack-quantized"),
        ["weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"],
    ),
    "scaled": (compressed(8, "int", "int-quantized"), ["weight", "weight_scale"]),
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [4, 4]},
        ["weight", "weight_scale_inv"],
    ),
}


@pytest.mark.parametrize("method", FUZZED)
def test_pieces_that_do_not_fit_are_refused_when_opened(method: str) -> None:
    """Pieces of random shapes, types and numbers: either a clear error at once, or a weight that
    can be made. Nothing else may come up later, while a back-end loads."""
    config, names = FUZZED[method]
    rng = np.random.default_rng(len(method))
    sizes = (0, 1, 2, 4, 8, 32, 64)
    made = refused = 0
    for _ in range(400):
        arrays = {}
        rows, groups = int(rng.choice(sizes)), int(rng.choice((1, 2, 4)))
        good = {
            "qweight": (8, rows) if method == "gptq" else (64, rows // 8),
            "qzeros": (groups, rows // 8), "scales": (groups, rows), "g_idx": (64,),
            "weight_packed": (rows, 8), "weight_scale": (rows, groups), "weight_shape": (2,),
            "weight_zero_point": (rows // 8, groups), "weight_g_idx": (64,), "weight": (rows, 64),
            "weight_scale_inv": (-(-rows // 4), 16),
        }  # fmt: skip
        for name in names:
            shape = good[name]
            if rng.random() < 0.15:
                shape = tuple(int(n) for n in rng.choice(sizes, rng.integers(0, 4)))
            integers = name in ("qweight", "qzeros", "weight_packed", "weight_zero_point")
            kind = np.int32 if integers or name.endswith(("g_idx", "shape")) else np.float16
            if name == "weight":
                kind = np.uint8 if method == "fp8" else np.int8
            if rng.random() < 0.05:
                kind = rng.choice([np.int32, np.float16, np.int8])
            arrays[name] = rng.integers(0, groups, shape).astype(kind)
            if name == "weight_shape" and shape == (2,) and kind == np.int32:
                arrays[name][:] = (rows, int(rng.choice([64, 64, 64, 60, 0, -5, 1 << 30])))
        if rng.random() < 0.3 and len(names) > 2:
            arrays.pop(names[-1])
        try:
            found = unpack(tensors(**arrays), config, "config")
        except ModelError:
            refused += 1
            continue
        for weight in found.values():
            if weight.recipe is not None:
                assert weight.whole().data.nbytes == weight.data.nbytes
                made += 1
    assert made > 20
    assert refused > 20
