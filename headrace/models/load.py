"""From a spec and tensors to a Model: program, weights, KV groups."""

from collections.abc import Mapping

import numpy as np

from headrace.models import decoder, names, rope
from headrace.models.names import Naming
from headrace.models.spec import Model, ModelSpec
from headrace.ops.weights import Tensor, Weight


def assemble(
    spec: ModelSpec,
    tensors: Mapping[str, Tensor],
    naming: Naming,
    source: str,
    max_model_len: int | None = None,
) -> Model:
    """The model for sequences of up to `max_model_len` positions (default: all it was made for).

    source: the checkpoint, for messages. Raises ModelError where tensors do not fit the spec.
    """
    length = spec.max_positions if max_model_len is None else max_model_len
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
    program = decoder.program(spec, scales)
    bound = names.bind(spec, program, tensors, naming, source, weights)
    return Model(spec, program, bound, decoder.kv_groups(spec), tuple(notes))
