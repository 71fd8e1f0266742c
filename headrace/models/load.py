"""From a spec and tensors to a Model: program, weights, KV groups."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from headrace.errors import ModelError
from headrace.models import blocks, decoder, names, rope
from headrace.models.names import Naming
from headrace.models.spec import Model, ModelSpec
from headrace.ops.weights import Tensor, Weight


def assemble(
    spec: ModelSpec,
    tensors: Mapping[str, Tensor],
    naming: Naming,
    source: str,
    max_model_len: int | None = None,
    quantize: str | None = None,
    tokens: int | None = None,
) -> Model:
    """The model for sequences of up to `max_model_len` positions (default: all it was made for).

    tokens: ids that the tokenizer knows, None where it is not known. source: the checkpoint, for
    messages. quantize: format for float matrices, or None. Raises
    ModelError where tensors do not fit the spec.
    """
    length = spec.max_positions if max_model_len is None else max_model_len
    wide = length > spec.max_positions
    if wide:  # windows: no distance is longer than the context
        length = spec.max_positions
    weights: dict[str, Weight] = {}
    scales: dict[str, float] = {}
    notes: list[str] = []
    for name, one in spec.ropes.items():
        found = rope.frequencies(one, length)
        data = np.frombuffer(found.inverse.tobytes(), np.uint8)
        tensor = Tensor(f"rope.{name}", "F32", found.inverse.shape, data)
        weights[tensor.name] = Weight(tensor.name, (tensor,))
        scales[name] = found.scale
        if found.note:
            notes.append(found.note)
    program = decoder.program(spec, scales, wide)
    bound = names.bind(spec, program, tensors, naming, source, weights)
    if quantize is not None:
        notes.append(f"float matrices are quantized to {quantize} while loading")
        bound = _quantized(bound, quantize)
    real = spec.vocabulary if tokens is None else tokens
    if real > spec.vocabulary:
        raise ModelError(
            f"{source}: the tokenizer has {real} tokens but the embedding only {spec.vocabulary} "
            "rows; the files do not belong together"
        )
    return Model(spec, program, bound, decoder.kv_groups(spec), real, tuple(notes))


def _quantized(weights: Mapping[str, Weight], form: str) -> dict[str, Weight]:
    """Float matrices as blocks; the embedding and the logits get 8 bits at least. A matrix whose
    rows are no whole number of blocks stays as it is."""

    def fits(tensor: Tensor) -> bool:
        plain = tensor.format in ("F32", "F16", "BF16") and len(tensor.shape) == 2
        return plain and tensor.shape[1] % blocks.GROUP == 0

    def quantized(weight: Weight) -> Weight:
        to = "Q8_0" if weight.name in ("embed", "logits", "positions") else form
        parts = (blocks.quantize(p, to) if fits(p) else p for p in weight.parts)
        return replace(weight, parts=tuple(parts))

    return {name: quantized(weight) for name, weight in weights.items()}


def without_data(model: Model) -> Model:
    """The model with weights that have names, formats, shapes and sizes but no bytes: what is
    needed of it once a back-end has loaded them. Lets go of the files."""

    def hollow(tensor: Tensor) -> Tensor:
        data = np.broadcast_to(np.uint8(0), tensor.data.shape)
        return replace(tensor, data=data, aux={}, recipe=None)

    weights = {
        name: replace(weight, parts=tuple(hollow(part) for part in weight.parts))
        for name, weight in model.weights.items()
    }
    return replace(model, weights=weights)
