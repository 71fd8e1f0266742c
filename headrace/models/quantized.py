"""Quantized Hugging Face checkpoints: GPTQ, AWQ, compressed-tensors and FP8.

Their tensors come in pieces (codes, scales, zero points). `unpack` gives each weight back as one
tensor under the name it would have in a float checkpoint: a recipe, made by rows while a back-end
loads it, so that a whole checkpoint is never held twice. Activation quantization that a checkpoint
was calibrated for is not imitated: activations keep the precision of the back-end.
Sources: the GPTQ and AutoAWQ repositories, the compressed-tensors specification, DeepSeek-V3's
report (block FP8).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import ModelError
from headrace.models import blocks
from headrace.models.blocks import Codes
from headrace.models.fields import Fields
from headrace.ops.weights import U8, Tensor, recipe

I16 = npt.NDArray[np.int16]
F32 = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]
Tensors = Mapping[str, Tensor]

_AWQ_ORDER = np.array([0, 2, 4, 6, 1, 3, 5, 7])
"""AWQ's nibble i of a 32-bit word holds column _AWQ_ORDER[i] of its eight."""
_FLOATS = ("F32", "F16", "BF16")
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

    def sources(self) -> tuple[Tensor, ...]:
        """The tensors that were asked for and found."""
        return tuple(self._tensors[name] for name in sorted(self.used) if name in self._tensors)

    def words(self, piece: str) -> Words:
        """Packed 32-bit words, a view."""
        found = self.tensor(piece)
        if found.format != "I32" or len(found.shape) != 2:
            raise ModelError(f"tensor {found.name!r} is {found.format}, expected a matrix of I32")
        return found.data.view(np.uint32).reshape(found.shape)

    def group_of(self, piece: str, groups: int, depth: int) -> npt.NDArray[np.int64] | None:
        """The group of each column, None where there is no such piece or groups are neighbours."""
        order = self.optional(piece)
        if order is None:
            return None
        if order.format != "I32":
            raise ValueError(f"{piece} is {order.format}, expected I32")
        found = order.data.view(np.int32).astype(np.int64)
        if found.shape != (depth,) or found.min() < 0 or found.max() >= groups:
            raise ValueError(f"{piece} does not name {groups} groups of {depth} columns")
        plain = np.arange(depth) // -(-depth // groups)
        return None if (found == plain).all() else found


def floats(tensor: Tensor, *part: slice) -> F32:
    """Values of a float tensor, FP8 included, or of a part of it."""
    if tensor.format == "F8_E4M3":
        return np.take(_E4M3, tensor.data.reshape(tensor.shape)[part])
    if tensor.format not in _FLOATS:
        raise ModelError(f"tensor {tensor.name!r} is {tensor.format}, expected floats")
    if tensor.format == "BF16":
        halves = tensor.data.view(np.uint16).reshape(tensor.shape)[part]
        return (halves.astype(np.uint32) << 16).view(np.float32)
    item = np.float32 if tensor.format == "F32" else np.float16
    return tensor.data.view(item).reshape(tensor.shape)[part].astype(np.float32)


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


def _along_columns(words: Words, bits: int, order: npt.NDArray[np.int64] | None = None) -> I16:
    """[R, C] words -> [R, C * 32 / bits] codes, lowest bits first; or code i of a word is the one
    at place order[i]."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    if order is not None:
        shifts = shifts[order]
    codes = (words[:, :, None] >> shifts & ((1 << bits) - 1)).astype(np.int16)
    return codes.reshape(len(words), -1)


def _rows_of(
    words: Words, bits: int, order: npt.NDArray[np.int64] | None = None, add: int = 0
) -> Callable[[int, int], I16]:
    """Codes of a [C, N] table that is packed along N, as rows of its transpose, plus `add`."""
    each = 32 // bits

    def rows(start: int, stop: int) -> I16:
        part = words[:, start // each : -(-stop // each)]
        return _along_columns(part, bits, order).T[: stop - start] + np.int16(add)

    return rows


def _same(value: int, groups: int) -> Callable[[int, int], I16]:
    """One zero point for all."""
    return lambda start, stop: np.full((stop - start, groups), value, np.int16)


def _agree(what: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """Raises ValueError where a piece is smaller than the weight needs."""
    if len(found) != len(wanted) or any(a < b for a, b in zip(found, wanted, strict=True)):
        raise ValueError(f"{what} is {list(found)}, expected {list(wanted)}")


def _matrix(tensor: Tensor, formats: tuple[str, ...] = _FLOATS) -> tuple[int, int]:
    """The shape of a table of scales. Raises ValueError where it is none."""
    if tensor.format not in formats:
        raise ValueError(f"{tensor.name} is {tensor.format}, expected {' or '.join(formats)}")
    if len(tensor.shape) != 2 or 0 in tensor.shape:
        raise ValueError(f"{tensor.name} is {list(tensor.shape)}, expected a matrix")
    return tensor.shape[0], tensor.shape[1]


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
        words, zeros = pieces.words("qweight"), pieces.words("qzeros")
        scales = pieces.tensor("scales")
        groups, rows = _matrix(scales)
        depth = words.shape[0] * 32 // bits
        _agree("qweight", words.shape, (-(-groups * bits // 32), rows))
        _agree("qzeros", zeros.shape, (groups, -(-rows * bits // 32)))
        codes = Codes(
            pieces.name, (rows, depth), bits, groups,
            lambda start, stop: _along_columns(words[:, start:stop].T, bits),
            lambda start, stop: floats(scales, slice(None), slice(start, stop)).T,
            _rows_of(zeros[:groups], bits, add=one),
            pieces.sources(),
        )  # fmt: skip
        # With activation order the groups are scattered over the columns.
        group_of = pieces.group_of("g_idx", groups, depth)
        return blocks.from_codes(replace(codes, group_of=group_of))

    return _each(tensors, ".qweight", whole)


def _awq(fields: Fields, tensors: Tensors) -> Unpacked:
    fields.choice("bits", {4: 4})
    fields.raw("group_size", 128)
    fields.choice("version", {"gemm": 0, "GEMM": 0}, "gemm")
    for key in ("zero_point", "modules_to_not_convert", "backend", "do_fuse", "exllama_config",
                "fuse_max_seq_len", "modules_to_fuse"):  # fmt: skip
        fields.raw(key, True)
    fields.finish()

    order = np.argsort(_AWQ_ORDER)

    def whole(pieces: _Pieces) -> Tensor:
        words, scales = pieces.words("qweight"), pieces.tensor("scales")
        groups, rows = _matrix(scales)
        depth = words.shape[0]
        _agree("qweight", words.shape, (groups, -(-rows // 8)))
        zeros = _same(8, groups)
        if pieces.optional("qzeros") is not None:
            points = pieces.words("qzeros")
            _agree("qzeros", points.shape, (groups, -(-rows // 8)))
            zeros = _rows_of(points[:groups], 4, order)
        return blocks.from_codes(
            Codes(
                pieces.name, (rows, depth), 4, groups,
                _rows_of(words, 4, order),
                lambda start, stop: floats(scales, slice(None), slice(start, stop)).T,
                zeros,
                pieces.sources(),
            )
        )  # fmt: skip

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
        words, scales = pieces.words("weight_packed"), pieces.tensor("weight_scale")
        rows, groups = _matrix(scales)
        depth = words.shape[1] * 32 // bits
        if (shape := pieces.optional("weight_shape")) is not None:
            depth = int(shape.data.view(np.int64 if shape.format == "I64" else np.int32)[1])
        _agree("weight_packed", words.shape, (rows, -(-max(depth, groups) * bits // 32)))
        zeros = _same(1 << bits - 1, groups)
        if pieces.optional("weight_zero_point") is not None:
            points = pieces.words("weight_zero_point")
            _agree("weight_zero_point", points.shape, (-(-rows * bits // 32), groups))
            zeros = _rows_of(points.T[:groups], bits)
        group_of = pieces.group_of("weight_g_idx", groups, depth)
        return blocks.from_codes(
            Codes(
                pieces.name, (rows, depth), bits, groups,
                lambda start, stop: _along_columns(words[start:stop], bits)[:, :depth],
                lambda start, stop: floats(scales, slice(start, stop)),
                zeros,
                pieces.sources(),
                group_of,
            )
        )  # fmt: skip

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
        weight, scale = pieces.tensor("weight"), pieces.tensor(piece)
        rows, depth = _matrix(weight, ("I8", "F8_E4M3"))
        values = floats(scale)
        values = values.reshape(1, 1) if values.size == 1 else values.reshape(len(values), -1)
        high, wide = (1, -(-depth // max(values.shape[1], 1)))
        if block and values.size > 1:
            high, wide = block
        if (block and values.size > 1) or len(values) > 1:
            fits = values.shape == (-(-rows // high), -(-depth // wide))
        else:
            fits = values.shape[1] >= 1
        if not fits or (not block and depth % values.shape[1]):
            raise ValueError(f"{list(values.shape)} scales for {[rows, depth]} values")

        def scales(start: int, stop: int) -> F32:
            if len(values) == 1:
                return np.repeat(values, stop - start, axis=0)
            return values[np.arange(start, stop) // high]

        if weight.format == "I8":
            codes = weight.data.view(np.int8).reshape(rows, depth)
            return blocks.from_codes(
                Codes(
                    pieces.name, (rows, depth), 8, values.shape[1],
                    lambda start, stop: codes[start:stop].astype(np.int16) + np.int16(128),
                    scales,
                    _same(128, values.shape[1]),
                    pieces.sources(),
                    np.arange(depth) // wide if depth % wide else None,
                )
            )  # fmt: skip

        # No block format holds 8-bit floats; float16 keeps their 4 significant bits times the
        # scale to 11 bits.
        def halves(start: int, stop: int) -> U8:
            each = np.repeat(scales(start, stop), wide, axis=1)[:, :depth]
            return blocks.half_bytes(floats(weight, slice(start, stop)) * each)

        return recipe(pieces.name, "F16", (rows, depth), 2 * depth, halves, pieces.sources())

    rest = {name: one for name, one in tensors.items() if name not in done}
    return _each(rest, f".{piece}", whole)
