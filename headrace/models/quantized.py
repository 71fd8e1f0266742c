"""Quantized Hugging Face checkpoints: GPTQ, AWQ, compressed-tensors and FP8.

Their tensors come in pieces (codes, scales, zero points). `unpack` gives each weight back as one
tensor under the name it would have in a float checkpoint. Activation quantization that a
checkpoint was calibrated for is not imitated: activations keep the precision of the back-end.
Sources: the GPTQ and AutoAWQ repositories, the compressed-tensors specification, DeepSeek-V3's
report (block FP8).
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import ModelError
from headrace.models import blocks
from headrace.models.fields import Fields
from headrace.ops.formats import dequantize
from headrace.ops.weights import Tensor

I16 = npt.NDArray[np.int16]
F32 = npt.NDArray[np.float32]
Tensors = Mapping[str, Tensor]

_AWQ_ORDER = np.array([0, 2, 4, 6, 1, 3, 5, 7])
"""AWQ's nibble i of a 32-bit word holds column _AWQ_ORDER[i] of its eight."""
_UNUSED = (".input_scale", ".k_scale", ".v_scale", ".input_zero_point", ".output_scale")
"""Calibration of activations and of an 8-bit KV cache."""


def unpack(tensors: Tensors, config: Mapping[str, Any], source: str) -> dict[str, Tensor]:
    """All tensors with the quantized ones made whole.

    config: the `quantization_config` of config.json. Raises ModelError naming what is unsupported.
    """
    fields = Fields(config, source, aliases={"w_bit": "bits", "q_group_size": "group_size"})
    method = fields.choice(
        "quant_method",
        {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed, "fp8": _fp8},
    )
    made: dict[str, Tensor]
    made, used = method(fields, tensors)
    rest = {
        name: one
        for name, one in tensors.items()
        if name not in used and not name.endswith(_UNUSED)
    }
    return rest | made


Unpacked = tuple[dict[str, Tensor], set[str]]


def _each(tensors: Tensors, suffix: str, whole: Callable[["_Pieces"], Tensor]) -> Unpacked:
    """One weight for every tensor whose name ends so."""
    made: dict[str, Tensor] = {}
    used: set[str] = set()
    for name in tensors:
        if name.endswith(suffix):
            pieces = _Pieces(tensors, name.removesuffix(suffix))
            try:
                weight = whole(pieces)
            except (ValueError, IndexError) as error:
                raise ModelError(f"tensor {name!r}: its pieces do not fit: {error}") from None
            made[weight.name] = weight
            used |= pieces.used
    return made, used


class _Pieces:
    """The tensors of one quantized layer, as arrays; remembers which were asked for."""

    def __init__(self, tensors: Tensors, stem: str) -> None:
        self._tensors = tensors
        self.stem = stem
        self.name = f"{stem}.weight"
        self.used: set[str] = set()

    def optional(self, piece: str) -> Tensor | None:
        name = f"{self.stem}.{piece}"
        self.used.add(name)
        return self._tensors.get(name)

    def tensor(self, piece: str) -> Tensor:
        found = self.optional(piece)
        if found is None:
            raise ModelError(f"tensor '{self.stem}.{piece}' is missing")
        return found

    def floats(self, piece: str) -> F32:
        return floats(self.tensor(piece))

    def words(self, piece: str) -> npt.NDArray[np.uint32]:
        """Packed 32-bit words."""
        found = self.tensor(piece)
        if found.format != "I32" or len(found.shape) != 2:
            raise ModelError(f"tensor {found.name!r} is {found.format}, expected a matrix of I32")
        return found.data.view(np.uint32).reshape(found.shape)


def floats(tensor: Tensor) -> F32:
    """Values of a float tensor, FP8 included."""
    if tensor.format == "F8_E4M3":
        return _E4M3[tensor.data].reshape(tensor.shape)
    if tensor.format not in ("F32", "F16", "BF16"):
        raise ModelError(f"tensor {tensor.name!r} is {tensor.format}, expected floats")
    return dequantize(tensor)


def _e4m3() -> F32:
    """The 256 values of FP8 E4M3: sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinity."""
    bits = np.arange(256)
    exponent, mantissa = bits >> 3 & 15, (bits & 7).astype(np.float64)
    value = np.where(
        exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0)
    )
    value[(bits & 127) == 127] = np.nan
    return np.where(bits & 128, -value, value).astype(np.float32)


_E4M3 = _e4m3()


def _along_columns(words: npt.NDArray[np.uint32], bits: int) -> I16:
    """[R, C] words -> [R, C * 32 / bits] codes, lowest bits first."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    codes = (words[:, :, None] >> shifts & ((1 << bits) - 1)).astype(np.int16)
    return codes.reshape(len(words), -1)


def _gptq(fields: Fields, tensors: Tensors) -> Unpacked:
    bits = fields.choice("bits", {4: 4, 8: 8})
    fields.raw("group_size", 128)  # the shapes of the scales say it
    # Files of the first format store each zero point less one.
    one = fields.choice("checkpoint_format", {"gptq": 1, "gptq_v2": 0}, "gptq")
    fields.expect("lm_head", False)
    for key in (
        "desc_act", "sym", "true_sequential", "damp_percent", "damp_auto_increment", "dataset",
        "static_groups", "meta", "model_name_or_path", "model_file_base_name", "is_marlin_format",
        "quantizer", "pack_dtype", "use_exllama", "tokenizer", "exllama_config", "backend",
        "max_input_length", "batch_size", "pad_token_id", "model_seqlen", "block_name_to_quantize",
        "module_name_preceding_first_block", "cache_block_outputs", "modules_in_block_to_quantize",
        "use_cuda_fp16", "disable_exllama", "hyb_act",
    ):  # fmt: skip
        fields.raw(key, False)
    fields.finish()

    def whole(pieces: _Pieces) -> Tensor:
        codes = _along_columns(pieces.words("qweight").T, bits)
        scales = pieces.floats("scales").T
        zeros = _along_columns(pieces.words("qzeros"), bits).T[: len(scales)] + np.int16(one)
        order = pieces.optional("g_idx")
        count, depth = scales.shape[1], codes.shape[1]
        plain = np.arange(depth) // -(-depth // count)
        group_of = plain if order is None else order.data.view(np.int32).astype(np.int64)
        if group_of.shape != plain.shape or group_of.min() < 0 or group_of.max() >= count:
            raise ValueError(f"g_idx does not name {count} groups of {depth} columns")
        if (group_of != plain).any():  # activation order: groups are scattered over the columns
            return blocks.as_half(pieces.name, codes, scales, zeros, group_of)
        return blocks.from_codes(pieces.name, codes, np.ascontiguousarray(scales), zeros, bits)

    return _each(tensors, ".qweight", whole)


def _awq(fields: Fields, tensors: Tensors) -> Unpacked:
    fields.choice("bits", {4: 4})
    fields.raw("group_size", 128)
    fields.choice("version", {"gemm": 0, "GEMM": 0}, "gemm")
    for key in ("zero_point", "modules_to_not_convert", "backend", "do_fuse", "exllama_config",
                "fuse_max_seq_len", "modules_to_fuse"):  # fmt: skip
        fields.raw(key, True)
    fields.finish()

    def unpacked(words: npt.NDArray[np.uint32]) -> I16:
        codes = _along_columns(words, 4).reshape(len(words), -1, 8)
        return codes[:, :, np.argsort(_AWQ_ORDER)].reshape(len(words), -1)

    def whole(pieces: _Pieces) -> Tensor:
        codes = unpacked(pieces.words("qweight")).T
        scales = np.ascontiguousarray(pieces.floats("scales").T)
        zeros = np.full(scales.shape, 8, np.int16)
        if pieces.optional("qzeros") is not None:
            zeros = unpacked(pieces.words("qzeros")).T
        return blocks.from_codes(pieces.name, np.ascontiguousarray(codes), scales, zeros, 4)

    return _each(tensors, ".qweight", whole)


def _compressed(fields: Fields, tensors: Tensors) -> Unpacked:
    """Packed 4- and 8-bit integers, plain int8, and FP8, told apart by their tensors."""
    known = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense")
    fields.choice("format", dict.fromkeys(known, True))
    fields.choice("quantization_status", {"compressed": True, "frozen": True}, "compressed")
    fields.expect("sparsity_config", {}, None)
    fields.expect("transform_config", {}, None)
    for key in ("ignore", "global_compression_ratio", "kv_cache_scheme", "version"):
        fields.raw(key, [])
    bits = _packed_bits(fields)
    fields.finish()

    def packed(pieces: _Pieces) -> Tensor:
        codes = _along_columns(pieces.words("weight_packed"), bits)
        depth = codes.shape[1]
        if (shape := pieces.optional("weight_shape")) is not None:
            depth = int(shape.data.view(np.int64 if shape.format == "I64" else np.int32)[1])
        codes = codes[:, :depth]
        scales = pieces.floats("weight_scale")
        zeros = np.full(scales.shape, 1 << bits - 1, np.int16)
        if pieces.optional("weight_zero_point") is not None:
            points = np.ascontiguousarray(pieces.words("weight_zero_point").T)
            zeros = _along_columns(points, bits).T[: len(codes)]
        if (order := pieces.optional("weight_g_idx")) is not None:
            group_of = order.data.view(np.int32).astype(np.int64)
            return blocks.as_half(pieces.name, codes, scales, zeros, group_of)
        return blocks.from_codes(pieces.name, np.ascontiguousarray(codes), scales, zeros, bits)

    made, used = _each(tensors, ".weight_packed", packed)
    whole, also = _scaled(tensors, "weight_scale", used)
    return made | whole, used | also


def _packed_bits(fields: Fields) -> int:
    """Bits of the packed integers; all groups of the configuration must agree."""
    groups = fields.raw("config_groups")
    found = set()
    for group in groups.values() if isinstance(groups, dict) else [None]:
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict) or weights.get("num_bits") not in (4, 8):
            raise fields.fail("config_groups", "holds weights that are not of 4 or 8 bits")
        if weights.get("type") == "float" and weights["num_bits"] != 8:
            raise fields.fail("config_groups", "4-bit floats are not supported")
        found.add(weights["num_bits"])
    if len(found) != 1:
        raise fields.fail("config_groups", "mixes 4- and 8-bit weights, which is not supported")
    return int(found.pop())


def _fp8(fields: Fields, tensors: Tensors) -> Unpacked:
    fields.choice("fmt", {"e4m3": True}, "e4m3")
    for key in ("activation_scheme", "ignored_layers", "kv_cache_scheme",
                "modules_to_not_convert", "is_checkpoint_fp8_serialized"):  # fmt: skip
        fields.raw(key, [])
    block = fields.numbers("weight_block_size", 2) if fields.has("weight_block_size") else None
    size = (int(block[0]), int(block[1])) if block else None
    fields.finish()
    made, used = _scaled(tensors, "weight_scale_inv", set(), size)
    whole, also = _scaled(tensors, "weight_scale", used, size)
    return made | whole, used | also


def _scaled(
    tensors: Tensors, piece: str, done: set[str], block: tuple[int, int] | None = None
) -> Unpacked:
    """Weights of 8 bits (I8 or FP8) with scales for a tensor, rows, groups, or 2-d blocks."""

    def whole(pieces: _Pieces) -> Tensor:
        weight = pieces.tensor("weight")
        rows, depth = weight.shape
        scales = pieces.floats(piece)
        scales = scales.reshape(1, 1) if scales.size == 1 else scales.reshape(len(scales), -1)
        if block and scales.size > 1:
            if scales.shape != (-(-rows // block[0]), -(-depth // block[1])):
                raise ValueError(f"{list(scales.shape)} scales for blocks of {list(block)}")
            scales = np.repeat(np.repeat(scales, block[0], axis=0), block[1], axis=1)
            scales = scales[:rows, :depth]
        elif len(scales) == 1:
            scales = np.repeat(scales, rows, axis=0)
        if weight.format == "I8":
            codes = weight.data.view(np.int8).reshape(rows, depth).astype(np.int16) + np.int16(128)
            zeros = np.full(scales.shape, 128, np.int16)
            return blocks.from_codes(pieces.name, codes, scales, zeros, 8)
        if weight.format != "F8_E4M3":
            raise ModelError(f"tensor {weight.name!r} is {weight.format}, expected I8 or F8_E4M3")
        # No block format holds 8-bit floats; float16 keeps their 4 significant bits times the
        # scale to 11 bits.
        grouped = floats(weight).reshape(rows, scales.shape[1], -1) * scales[:, :, None]
        return blocks.tensor(pieces.name, "F16", weight.shape, grouped.astype(np.float16))

    rest = {name: one for name, one in tensors.items() if name not in done}
    return _each(rest, f".{piece}", whole)
