"""MODEL as something to price: shipped configurations, a config.json, or a checkpoint's real
weights."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from math import prod
from pathlib import Path
from typing import Any

from headrace import checkpoint
from headrace.cost.hardware import Device, Link
from headrace.cost.local import recall
from headrace.cost.roofline import StepModel, compile_model
from headrace.errors import ConfigError, ModelError
from headrace.models import sketch
from headrace.models.sketch import Ranks
from headrace.ops import spec
from headrace.ops.spec import KVLayout, Program

BITS: Mapping[str, float] = {
    "f32": 32.0, "bf16": 16.0, "fp8": 8.0, "int8": 8.0 + 16 / 128, "int4": 4.0 + 16 / 128,
    "mxfp4": 4.25, "nvfp4": 4.5,
}  # fmt: skip
"""Bits a weight, scales included: 16 bits a group of 128 for integers, one byte a block of 32
(MXFP4) or 16 (NVFP4) weights."""

KV_BYTES: Mapping[str, float] = {"f32": 4.0, "f16": 2.0, "fp8": 1.0, "int8": 1.0}


@dataclass(frozen=True)
class Precision:
    """Formats to plan with; None = what the configuration states."""

    weights: str | None = None
    experts: str | None = None
    kv: str = "f16"

    def __post_init__(self) -> None:
        """Raises ConfigError naming an unknown format."""
        for field, value, known in (
            ("weights", self.weights, BITS), ("experts", self.experts, BITS), ("kv", self.kv,
        KV_BYTES), ):  # fmt: skip
            if value is not None and value not in known:
                raise ConfigError(field, f"unknown format {value!r}; known: {', '.join(known)}")


@dataclass(frozen=True)
class PricedModel:
    """One rank's program with the bytes of everything.

    weight_bytes, formats: by weight. layout: of one rank's KV. params, active: parameters of the
    whole model, and those that one token uses. hidden: width of a row. ranks: how it is spread.
    rank_bytes: bytes of weights that one rank holds; tied ones count once.
    """

    name: str
    program: Program
    layout: KVLayout
    weight_bytes: Mapping[str, float]
    formats: Mapping[str, Sequence[str]]
    params: float
    active: float
    hidden: int
    max_positions: int
    ranks: Ranks
    rank_bytes: float

    def kv_bytes(self, context: int) -> float:
        """Bytes of KV that one rank holds for a sequence of that many tokens, in whole blocks."""
        block = self.layout.block_size
        total = 0
        for group in self.layout.groups:
            kept = context if group.window is None else min(context, group.window + block)
            total += -(-kept // block) * group.pages_per_block
        return float(total * self.layout.page_bytes)

    def kv_token_bytes(self) -> float:
        """Bytes of KV that each further token of a long sequence adds (all-position groups)."""
        full = [g for g in self.layout.groups if g.window is None]
        pages = sum(group.pages_per_block for group in full)
        return pages * self.layout.page_bytes / self.layout.block_size

    def on(
        self,
        device: Device,
        link: Link | None = None,
        imbalance: float = 1.0,
        wide: Link | None = None,
    ) -> StepModel:
        """The program priced on a device; on this machine with what engines found out."""
        model = compile_model(
            self.program, self.layout, self.weight_bytes, device, self.formats, link, imbalance,
            wide, self.ranks.tensor,
        )  # fmt: skip
        return recall(model) if device.measured else model


def names() -> list[str]:
    """The shipped configurations."""
    folder = resources.files("headrace.cost").joinpath("data", "models")
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir())


def find_model(
    name: str, precision: Precision | None = None, ranks: Ranks | None = None, kv_block: int = 16
) -> PricedModel:
    """The model of that name, config.json, .gguf file, folder of a checkpoint or short name.

    A checkpoint brings its own weight formats and runs on one rank. Raises ConfigError or
    ModelError in one line.
    """
    precision, ranks = precision or Precision(), ranks or Ranks()
    config = _configuration(name)
    if config is not None:
        return from_architecture(sketch.read(config, name), precision, ranks, kv_block)
    if ranks != Ranks():
        raise ConfigError("model", f"{name} is a checkpoint, which runs on one rank here")
    return from_checkpoint(name, precision, kv_block)


def configured(name: str) -> bool:
    """Whether the name is a configuration, shipped or a file, rather than a checkpoint."""
    return _configuration(name) is not None


def _configuration(name: str) -> Mapping[str, Any] | None:
    path = Path(name)
    try:
        if name in names():
            file = resources.files("headrace.cost").joinpath("data", "models", f"{name}.json")
            shipped: dict[str, Any] = json.loads(file.read_text("utf-8"))["config"]
            return shipped
        if path.suffix == ".json":
            found = json.loads(path.read_text("utf-8"))
            if isinstance(found, dict):
                return found
            raise ModelError(f"{path} is not a JSON object")
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    return None


def from_architecture(
    architecture: sketch.Architecture, precision: Precision, ranks: Ranks, kv_block: int = 16
) -> PricedModel:
    """Price a configuration. Embeddings, routers and vectors stay in 16 bits, as in practice."""
    program = sketch.program(architecture, ranks)
    plain = precision.weights or architecture.weights
    routed = precision.experts or architecture.expert_weights or plain
    formats = _formats(program, plain, routed)
    bits = {name: BITS[form[0]] for name, form in formats.items()}
    weight_bytes = {name: prod(shape) * bits[name] / 8 for name, shape in program.shapes.items()}
    whole = sketch.program(architecture)
    latent = architecture.latent
    if latent is not None:
        kv_heads, values = 1, (latent.kv_rank + latent.rope) // 2
    else:
        kv_heads = max(1, architecture.kv_heads // ranks.tensor)
        values = architecture.head_dim
    # A layout counts f16 values; other widths are as many of those as fill the same bytes.
    values = int(values * KV_BYTES[precision.kv] / 2)
    layout = KVLayout(sketch.groups(architecture), kv_heads, values, kv_block)
    params = float(sum(prod(shape) for shape in whole.shapes.values()))
    held = sum(weight_bytes.values())
    return PricedModel(
        architecture.name, program, layout, weight_bytes, formats, params, _active(whole),
        architecture.hidden, architecture.max_positions, ranks, held,
    )  # fmt: skip


def _formats(program: Program, plain: str, routed: str) -> dict[str, tuple[str, ...]]:
    formats: dict[str, tuple[str, ...]] = dict.fromkeys(program.shapes, ("bf16",))
    for op in program.ops:
        if isinstance(op, spec.Linear) and not op.weight.endswith(".router"):
            formats[op.weight] = (plain,)
        elif isinstance(op, spec.LatentAttention):
            formats[op.up] = (plain,)
        elif isinstance(op, spec.Experts):
            formats[op.gate_up] = formats[op.down] = (routed,)
    return formats


def _active(program: Program) -> float:
    """Parameters that one token uses: all but the experts it is not routed to and the rows of the
    embedding that it does not look up."""
    total = float(sum(prod(shape) for shape in program.shapes.values()))
    for op in program.ops:
        if isinstance(op, spec.Experts):
            stored = prod(program.shapes[op.gate_up]) + prod(program.shapes[op.down])
            total -= stored * (1 - op.top_k / op.experts)
        elif isinstance(op, spec.Embed):
            tied = any(isinstance(o, spec.Logits) and o.weight == op.table for o in program.ops)
            total -= 0 if tied else prod(program.shapes[op.table])
    return total


def from_checkpoint(name: str, precision: Precision, kv_block: int = 16) -> PricedModel:
    """Price a checkpoint by its real tensors; only headers are read."""
    if precision.weights is not None or precision.experts is not None:
        raise ConfigError("weights", f"{name} is a checkpoint and brings its own formats")
    opened = checkpoint.open_checkpoint(name)
    model = opened.model()
    kv = {"f16": "f16", "f32": "f32", "int8": "int8"}.get(precision.kv)
    if kv is None:
        raise ConfigError("kv", f"{precision.kv} is not a KV type of this engine (f16, f32, int8)")
    layout = KVLayout(
        model.groups,
        model.spec.kv_heads,
        model.spec.head_dim,
        kv_block,
        kv,  # type: ignore[arg-type]
    )
    tensors = {part.name: part for weight in model.weights.values() for part in weight.parts}
    params = float(sum(prod(tensor.shape) for tensor in tensors.values()))
    return PricedModel(
        opened.name,
        model.program,
        layout,
        {key: float(weight.nbytes) for key, weight in model.weights.items()},
        {key: weight.formats for key, weight in model.weights.items()},
        params,
        _active(model.program),
        model.spec.hidden,
        opened.max_positions,
        Ranks(),
        float(sum(tensor.data.nbytes for tensor in tensors.values())),
    )
