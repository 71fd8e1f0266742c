"""What is in a checkpoint and how its parts will run, as data for `headrace inspect`."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.models.spec import Model, ModelSpec
from headrace.ops.spec import Backend, KVLayout, KVType
from headrace.ops.weights import Tensor


class Inspectable(Protocol):
    """What is asked of an open checkpoint (`headrace.checkpoint.Checkpoint`)."""

    @property
    def name(self) -> str: ...
    @property
    def spec(self) -> ModelSpec: ...
    @property
    def metadata(self) -> Mapping[str, Any]: ...
    @property
    def tensors(self) -> Mapping[str, Tensor]: ...
    @property
    def generation_config(self) -> Mapping[str, Any]: ...
    def model(self, max_model_len: int | None = None) -> Model: ...


@dataclass(frozen=True)
class FormatRow:
    """Tensors of one format: how many, their values and bytes in the file."""

    format: str
    tensors: int
    values: int
    nbytes: int


@dataclass(frozen=True)
class WeightRow:
    """Weights of one kind over all layers. formats: those of the parts, in order. ops: which use
    it. declined: why the back-end cannot run it, or None."""

    kind: str
    count: int
    shape: tuple[int, ...]
    formats: tuple[str, ...]
    nbytes: int
    ops: tuple[str, ...]
    declined: str | None


@dataclass(frozen=True)
class GroupRow:
    """A KV group. token_bytes: bytes one token takes; held_bytes: most that one sequence holds."""

    name: str
    layers: int
    window: int | None
    pages_per_block: int
    token_bytes: int
    held_bytes: int


@dataclass(frozen=True)
class Report:
    """Everything `headrace inspect` shows. facts: (what, value). nbytes: tensors of the file."""

    name: str
    facts: tuple[tuple[str, str], ...]
    formats: tuple[FormatRow, ...]
    weights: tuple[WeightRow, ...]
    groups: tuple[GroupRow, ...]
    notes: tuple[str, ...]
    nbytes: int


def inspect_checkpoint(
    checkpoint: Inspectable,
    backend: Backend,
    max_model_len: int | None = None,
    kv_dtype: KVType = "f16",
    block_size: int = 16,
) -> Report:
    """Read and judge a checkpoint without touching a weight. Raises ModelError where it does not
    fit its configuration."""
    model = checkpoint.model(max_model_len)
    layout = KVLayout(model.groups, model.spec.kv_heads, model.spec.head_dim, block_size, kv_dtype)
    length = max_model_len or model.spec.max_positions
    formats = _formats(checkpoint.tensors)
    return Report(
        checkpoint.name,
        (*_facts(model.spec), *_suggestions(checkpoint.generation_config)),
        formats,
        _weights(model, backend),
        _groups(layout, length),
        model.notes,
        sum(row.nbytes for row in formats),
    )


def _facts(spec: ModelSpec) -> tuple[tuple[str, str], ...]:
    heads = f"{spec.heads} heads over {spec.kv_heads} of {spec.head_dim}"
    ropes = ", ".join(
        f"{name} {rope.theta:g}" + (f" ({rope.scaling.kind})" if rope.scaling else "")
        for name, rope in spec.ropes.items()
    )
    extras = {
        "learned positions": spec.positions > 0,
        "tied embeddings": spec.tied,
        f"q/k norm by {spec.qk_norm}": spec.qk_norm is not None,
        "norms after each part": spec.post_norm,
        "biases": spec.qkv_bias or spec.out_bias or spec.mlp_bias,
        f"attention softcap {spec.softcap}": spec.softcap is not None,
        f"logit softcap {spec.logit_softcap}": spec.logit_softcap is not None,
    }
    return (
        ("family", spec.family),
        ("layers", f"{len(spec.layers)} of hidden {spec.hidden}, feed-forward {spec.ffn}"),
        ("attention", heads),
        ("positions", f"up to {spec.max_positions}" + (f", rope theta {ropes}" if ropes else "")),
        ("vocabulary", f"{spec.vocabulary} rows"),
        ("traits", ", ".join(name for name, present in extras.items() if present) or "none"),
    )


def _suggestions(generation: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    known = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    found = [f"{name} {generation[name]}" for name in known if generation.get(name) is not None]
    return (("suggested sampling", ", ".join(found)),) if found else ()


def _formats(tensors: Mapping[str, Tensor]) -> tuple[FormatRow, ...]:
    rows: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for tensor in tensors.values():
        row = rows[tensor.format]
        values = 1
        for dim in tensor.shape:
            values *= dim
        row[0] += 1
        row[1] += values
        row[2] += tensor.data.nbytes
    ordered = sorted(rows.items(), key=lambda item: -item[1][2])
    return tuple(FormatRow(name, *counts) for name, counts in ordered)


def _weights(model: Model, backend: Backend) -> tuple[WeightRow, ...]:
    formats = {name: weight.formats for name, weight in model.weights.items()}
    users: dict[str, list[str]] = defaultdict(list)
    reasons: dict[str, str] = {}
    for op in model.program.ops:
        reason = backend.accepts(op, formats)
        for name in op.weights():
            if op.kind not in users[name]:
                users[name].append(op.kind)
            if reason is not None:
                reasons[name] = reason
    rows: dict[tuple[Any, ...], list[int]] = {}
    for name, weight in model.weights.items():
        kind = ".".join(part for part in name.split(".") if not part.isdigit())
        key = (kind, weight.shape, weight.formats, tuple(users[name]), reasons.get(name))
        row = rows.setdefault(key, [0, 0])
        row[0] += 1
        row[1] += weight.nbytes
    return tuple(
        WeightRow(kind.removeprefix("layers."), count, shape, parts, nbytes, ops, declined)
        for (kind, shape, parts, ops, declined), (count, nbytes) in rows.items()
    )


def _groups(layout: KVLayout, length: int) -> tuple[GroupRow, ...]:
    rows = []
    for group in layout.groups:
        token = layout.layer_bytes * len(group.layers) // layout.block_size
        held = length if group.window is None else min(length, group.window + group.first)
        rows.append(
            GroupRow(
                group.name, len(group.layers), group.window, group.pages_per_block, token,
                token * held,
            )
        )  # fmt: skip
    return tuple(rows)
