"""The reference back-end: the definition of every op, in plain numpy and float32.

Readable before fast, yet quick enough for a few thousand tokens of a small model. Weights are made
float32 at their first use. It declines only what the batch cannot express yet (adapters) and what
needs other ranks.
"""

from collections.abc import Mapping
from typing import Literal

import numpy as np

from headrace.errors import KernelError
from headrace.ops import reference_kv as kv
from headrace.ops import reference_rows as rows
from headrace.ops import spec
from headrace.ops.backends import require
from headrace.ops.batch import F32, Limits, RaggedBatch
from headrace.ops.formats import FORMATS, dequantize
from headrace.ops.reference_sample import sample
from headrace.ops.spec import Buffer, KVLayout, Op, Program
from headrace.ops.weights import Weight


class ReferenceBackend:
    """Executes any program, slowly. `threads` of the limits is ignored: numpy has its own."""

    name = "reference"
    level = "numpy"

    def accepts(self, op: Op, weight_formats: Mapping[str, tuple[str, ...]]) -> str | None:
        """See `spec.Backend`."""
        if isinstance(op, spec.Lora):
            return "adapters are not part of the batch"
        if isinstance(op, spec.AllReduce | spec.AllToAll) and op.ranks > 1:
            return f"runs on one rank, not {op.ranks}"
        for name in op.weights():
            for form in weight_formats.get(name, ()):
                if form not in FORMATS:
                    return f"weight {name} has the unknown format {form}"
        return None

    def load(
        self,
        program: Program,
        weights: Mapping[str, Weight],
        layout: KVLayout,
        limits: Limits,
        progress: spec.LoadProgress | None = None,
    ) -> "ReferenceExecutable":
        """See `spec.Backend`."""
        require(self, program, weights)
        return ReferenceExecutable(program, weights, layout, limits)

    def memory(
        self,
        program: Program,
        weights: Mapping[str, Weight],
        layout: KVLayout,
        limits: Limits,
    ) -> dict[str, int]:
        """See `spec.Backend`. The workspace is the buffers; temporaries of numpy come on top."""
        return {
            "weights": sum(4 * int(np.prod(shape)) for shape in program.shapes.values()),
            "kv": limits.num_pages * layout.page_bytes,
            "workspace": peak_bytes(program, limits),
            "batch": RaggedBatch(limits, layout.table_rows).nbytes,
        }


class ReferenceExecutable:
    """A program with its pages, its batch and the rows of the last step."""

    def __init__(
        self,
        program: Program,
        weights: Mapping[str, Weight],
        layout: KVLayout,
        limits: Limits,
    ) -> None:
        self.batch = RaggedBatch(limits, layout.table_rows)
        self._program = program
        self._weights = dict(weights)
        self._values: dict[str, F32] = {}
        self.pages = kv.Pages(layout, limits)
        self._rows: dict[Buffer, F32] = {}
        self._done = last_uses(program)

    @property
    def paths(self) -> list[tuple[str, str]]:
        """See `spec.Executable`."""
        return [(op.kind, "numpy.generic") for op in self._program.ops]

    def run(self, part: Literal["all", "forward", "sample"] = "all") -> None:
        """See `spec.Executable`."""
        if part != "sample":
            for copy in self.batch.copy[: self.batch.num_copies]:
                self.pages.copy(*(int(value) for value in copy))
            self._rows = {}
        for op, done in zip(self._program.ops, self._done, strict=True):
            if part == "all" or (part == "sample") == isinstance(op, spec.Sample):
                self._execute(op)
                for buffer in done:
                    del self._rows[buffer]

    def read(self, buffer: Buffer) -> F32:
        """See `spec.Executable`."""
        return self._rows[buffer].copy()

    def populate(self) -> None:
        """See `spec.Executable`: everything is allocated when it is used."""

    def close(self) -> None:
        """See `spec.Executable`."""
        self._weights, self._values, self._rows = {}, {}, {}

    def _weight(self, name: str) -> F32:
        """The values of a weight, float32, kept once made."""
        if name not in self._values:
            self._values[name] = values(self._weights[name])
        return self._values[name]

    def _optional(self, name: str | None) -> F32 | None:
        return None if name is None else self._weight(name)

    def _execute(self, op: Op) -> None:
        """Run one op on the rows of this step."""
        batch, pages, row = self.batch, self.pages, self._rows
        match op:
            case spec.Embed():
                out = self._weight(op.table)[batch.token[: batch.num_tokens]]
                out = out * np.float32(op.scale)
                if op.positions is not None:
                    out += self._weight(op.positions)[batch.position[: batch.num_tokens]]
                row[op.out] = out
            case spec.RmsNorm():
                v = row[op.x]
                if op.residual is not None:
                    row[op.residual] += np.float32(op.residual_scale) * v
                    v = row[op.residual]
                weight, bias = self._optional(op.weight), self._optional(op.bias)
                row[op.out] = rows.norm(op, v, weight, bias)
            case spec.Linear():
                row[op.out] = rows.linear(
                    row[op.x], self._weight(op.weight), self._optional(op.bias)
                )
            case spec.RopeStore():
                row[op.out], near = kv.rope_store(
                    op, row[op.qkv], batch, pages, self._optional(op.rope),
                    self._optional(op.q_norm), self._optional(op.k_norm),
                )  # fmt: skip
                if op.near is not None:
                    row[op.near] = near
            case spec.Attention():
                sinks = self._optional(op.sinks)
                near = row[op.q if op.near is None else op.near]
                row[op.out] = kv.attention(op, row[op.q], near, batch, pages, sinks)
            case spec.LatentAttention():
                row[op.out] = kv.latent_attention(
                    op, row[op.q], row[op.latent], batch, pages, self._weight(op.up)
                )
            case spec.Gated():
                act = rows.gated if op.gated else rows.activate
                row[op.out] = act(op.activation, row[op.x])
            case spec.Route():
                row[op.out] = rows.route(op, row[op.logits], self._optional(op.bias))
            case spec.Experts():
                width = op.x.width
                gate_up = self._weight(op.gate_up).reshape(op.experts, -1, width)
                down = self._weight(op.down).reshape(op.experts, width, op.hidden)
                row[op.out] = rows.experts(row[op.x], row[op.routes], gate_up, down, op.activation)
            case spec.Logits():
                x = row[op.x][batch.logits_row[: batch.num_logits]]
                out = rows.linear(x, self._weight(op.weight), self._optional(op.bias))
                out = out * np.float32(op.scale)
                if op.softcap is not None:
                    cap = np.float32(op.softcap)
                    out = np.tanh(out / cap) * cap
                row[op.out] = out
            case spec.Sample():
                sample(row[op.logits], batch)
            case spec.AllReduce() | spec.AllToAll():
                pass  # one rank: every row is here already
            case _:
                raise KernelError(f"reference: no definition of op {op.kind}")


def last_uses(program: Program) -> list[list[Buffer]]:
    """For each op the buffers that nothing reads after it; exported ones are in no list."""
    kept = {program.logits, program.hidden, *program.taps.values()}
    last = {buffer: i for i, op in enumerate(program.ops) for buffer in op.buffers()}
    done: list[list[Buffer]] = [[] for _ in program.ops]
    for buffer, index in last.items():
        if buffer not in kept:
            done[index].append(buffer)
    return done


def peak_bytes(program: Program, limits: Limits) -> int:
    """Bytes of the buffers that live at once, at most."""
    height = {"tokens": limits.max_tokens, "logits": limits.max_logits}
    live: set[Buffer] = set()
    peak = 0
    for op, done in zip(program.ops, last_uses(program), strict=True):
        live.update(op.buffers())
        peak = max(peak, sum(4 * height[b.rows] * b.width for b in live))
        live.difference_update(done)
    return peak


def values(weight: Weight) -> F32:
    """The float32 values of a weight: parts stacked, rows in order, constant added."""
    parts = [dequantize(part) for part in weight.parts]
    out = parts[0] if len(parts) == 1 else np.concatenate(parts)
    if weight.row_order is not None:
        out = out[weight.row_order]
    if weight.add:
        out = out + np.float32(weight.add)
    return np.ascontiguousarray(out)
