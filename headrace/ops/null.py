"""The null back-end: counts what every op of a program costs, and computes nothing.

The work of an op is linear in a few amounts of the step (rows, logits rows, query-key pairs, ...).
`rule` gives the coefficients, so a whole program adds up once (`Counter`) and a step is priced in a
handful of multiplications. The counts describe the op as `spec` defines it:

- a multiplication and an addition inside a matrix product are 2 `flops`; everything else (norms,
  activations, exponentials, rotations) counts the values it passes over, as `elements`;
- weights are read once a step, whatever the rows; an embedding reads its rows;
- K and V are read once per slice: the positions that some row of it sees;
- buffers are read and written once, 4 bytes a value;
- collectives count the bytes that one rank sends (ring all-reduce: 2 (r - 1) / r of the rows).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.ops import spec
from headrace.ops.batch import F32, Limits, RaggedBatch
from headrace.ops.spec import Buffer, KVLayout, Op, Program
from headrace.ops.weights import Weight

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Work:
    """What something costs. Bytes are bytes; flops and elements as the module says.

    read, written: bytes of buffers. wire: bytes sent to other ranks.
    """

    flops: float = 0
    elements: float = 0
    weight_bytes: float = 0
    kv_read: float = 0
    kv_written: float = 0
    read: float = 0
    written: float = 0
    wire: float = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(*(getattr(self, n) + getattr(other, n) for n in _FIELDS))

    def times(self, amount: float) -> "Work":
        """The work of that many."""
        return Work(*(getattr(self, n) * amount for n in _FIELDS))

    @property
    def memory_bytes(self) -> float:
        """Bytes to and from memory: weights, KV and buffers."""
        return self.weight_bytes + self.kv_read + self.kv_written + self.read + self.written


_FIELDS = tuple(f.name for f in fields(Work))


class Basis(NamedTuple):
    """An amount of a step that work is proportional to; see `StepShape.amount`.

    a, b: (window or -1, first) of 'pair' and 'key'; (experts, top_k) of 'expert'.
    """

    kind: Literal["step", "token", "logit", "sample", "pair", "key", "expert", "lora", "adapter"]
    a: int = 0
    b: int = 0


STEP, TOKEN, LOGIT, SAMPLE = Basis("step"), Basis("token"), Basis("logit"), Basis("sample")
LORA, ADAPTER = Basis("lora"), Basis("adapter")

Rule = Mapping[Basis, Work]
"""Work of an op: the sum over its bases of amount times work."""


class OpWork(NamedTuple):
    """The work of one op of a program in one step. label: its weight or layer, for people."""

    kind: str
    label: str
    work: Work


@dataclass(frozen=True)
class StepShape:
    """A step by its shapes. slices: (first position, rows) of each. logits, samples: rows of
    logits and sample points.

    experts_touched: distinct experts that a layer reads; None = expected when each row picks its
    top_k evenly, E (1 - (1 - k / E)^T). lora_rows: rows with an adapter, lora_adapters: distinct
    adapters among them, lora_rank: their rank (2 bytes a value).
    """

    slices: Sequence[tuple[int, int]]
    logits: int = 0
    samples: int = 0
    experts_touched: float | None = None
    lora_rows: int = 0
    lora_adapters: int = 0
    lora_rank: int = 0

    @property
    def tokens(self) -> int:
        """Rows of the step."""
        return sum(count for _, count in self.slices)

    def amount(self, basis: Basis) -> float:
        """How much of a basis the step has.

        'pair': (query, key) pairs that see each other; 'key': positions that some row of their
        slice sees; 'expert': experts touched; 'lora': rows with an adapter times rank; 'adapter':
        adapters times rank.
        """
        match basis.kind:
            case "step":
                return 1 if self.slices else 0
            case "token":
                return self.tokens
            case "logit":
                return self.logits
            case "sample":
                return self.samples
            case "pair":
                return self._pairs(basis.a, basis.b)
            case "key":
                return self._keys(basis.a, basis.b)
            case "expert":
                if self.experts_touched is not None:
                    return self.experts_touched
                return basis.a * (1 - (1 - basis.b / basis.a) ** self.tokens)
            case "lora":
                return self.lora_rows * self.lora_rank
            case "adapter":
                return self.lora_adapters * self.lora_rank

    def _pairs(self, window: int, first: int) -> int:
        start, count = np.array(self.slices, np.int64).reshape(-1, 2).T
        end = start + count
        if window < 0:
            return int((_ramp(end) - _ramp(start)).sum())
        near = _ramp(end, window) - _ramp(start, window)
        far = _ramp(end - window, first) - _ramp(start - window, first)
        return int((near + far).sum())

    def _keys(self, window: int, first: int) -> int:
        start, count = np.array(self.slices, np.int64).reshape(-1, 2).T
        if window < 0:
            return int((start + count).sum())
        hidden = np.maximum(start - window + 1, 0)
        return int((start + count - hidden + np.minimum(hidden, first)).sum())


def _ramp(n: I64, cap: int | None = None) -> I64:
    """Sum over i = 1 .. n of min(i, cap); 0 where n is negative."""
    n = np.maximum(n, 0)
    low = n if cap is None else np.minimum(n, cap)
    total: I64 = low * (low + 1) // 2 + (n - low) * low
    return total


def _token_bytes(layout: KVLayout) -> int:
    """Bytes of K and V of one token in one layer."""
    return layout.layer_bytes // layout.block_size


def _linear(x: Buffer, out: Buffer, weight: float, bias: bool) -> tuple[Work, Work]:
    """(per row, per step) of out = x @ weight.T + bias."""
    row = Work(
        flops=2 * x.width * out.width,
        elements=out.width if bias else 0,
        read=4 * x.width,
        written=4 * out.width,
    )
    return row, Work(weight_bytes=weight)


def rule(op: Op, layout: KVLayout, weight_bytes: Mapping[str, float], program: Program) -> Rule:
    """The work of an op. weight_bytes: bytes of every weight that the program names."""

    def bytes_of(*names: str | None) -> float:
        return sum(weight_bytes[name] for name in names if name is not None)

    kv = _token_bytes(layout)
    match op:
        case spec.Embed():
            width, rows = op.out.width, program.shapes[op.table][0]
            read = weight_bytes[op.table] / rows
            changes = (op.scale != 1) + (op.positions is not None)
            if op.positions is not None:
                read += weight_bytes[op.positions] / program.shapes[op.positions][0]
            row = Work(elements=changes * width, weight_bytes=read, written=4 * width)
            return {TOKEN: row}
        case spec.RmsNorm():
            width, passes = op.x.width, int(op.norm != "none") + (op.residual is not None)
            touched = 2 if op.residual is not None else 1
            row = Work(
                elements=passes * width, read=4 * width * touched, written=4 * width * touched
            )
            return {TOKEN: row, STEP: Work(weight_bytes=bytes_of(op.weight, op.bias))}
        case spec.Linear():
            row, step = _linear(op.x, op.out, bytes_of(op.weight, op.bias), op.bias is not None)
            return {TOKEN: row, STEP: step}
        case spec.Logits():
            row, step = _linear(op.x, op.out, bytes_of(op.weight, op.bias), op.bias is not None)
            changes = (op.scale != 1) + (op.softcap is not None)
            return {LOGIT: row + Work(elements=changes * op.out.width), STEP: step}
        case spec.RopeStore():
            turned = 0 if op.rope is None else 2 * program.shapes[op.rope][0]
            heads = op.heads + op.kv_heads
            normed = (op.heads if op.q_norm else 0) + (op.kv_heads if op.k_norm else 0)
            heads += op.heads if op.near else 0  # the second rotation of q
            row = Work(
                elements=turned * heads + normed * op.head_dim,
                kv_written=kv,
                read=4 * op.qkv.width,
                written=4 * op.out.width * (2 if op.near else 1),
            )
            step = Work(weight_bytes=bytes_of(op.rope, op.q_norm, op.k_norm))
            return {TOKEN: row, STEP: step}
        case spec.Attention():
            window = -1 if op.window is None else op.window
            pair = Work(flops=4 * op.heads * op.head_dim, elements=op.heads)
            return {
                Basis("pair", window, op.first): pair,
                Basis("key", window, op.first): Work(kv_read=kv),
                TOKEN: Work(read=4 * op.q.width * (2 if op.near else 1), written=4 * op.out.width),
                STEP: Work(weight_bytes=bytes_of(op.sinks)),
            }
        case spec.LatentAttention():
            # Absorbed: q turns into the latent space, attends there, and the result turns back.
            latent, heads = op.latent_dim, op.heads
            turn = 2 * heads * latent * (op.nope_dim + op.value_dim)
            pair = Work(flops=2 * heads * (2 * latent + op.rope_dim), elements=heads)
            row = Work(
                flops=turn,
                kv_written=kv,
                read=4 * (op.q.width + op.latent.width),
                written=4 * op.out.width,
            )
            return {
                Basis("pair", -1, 0): pair,
                Basis("key", -1, 0): Work(kv_read=kv),
                TOKEN: row,
                STEP: Work(weight_bytes=bytes_of(op.up)),
            }
        case spec.Gated():
            width = op.out.width
            return {TOKEN: Work(elements=width, read=4 * op.x.width, written=4 * width)}
        case spec.Route():
            row = Work(elements=op.experts, read=4 * op.logits.width, written=4 * op.out.width)
            return {TOKEN: row, STEP: Work(weight_bytes=bytes_of(op.bias))}
        case spec.Experts():
            expert = Work(weight_bytes=bytes_of(op.gate_up, op.down) / op.experts)
            row = Work(
                flops=6 * op.top_k * op.x.width * op.hidden,
                elements=op.top_k * (op.hidden + op.x.width),
                read=4 * (op.x.width + op.routes.width),
                written=4 * op.out.width,
            )
            return {Basis("expert", op.experts, op.top_k): expert, TOKEN: row}
        case spec.Lora():
            both = op.x.width + op.out.width
            return {LORA: Work(flops=2 * both), ADAPTER: Work(weight_bytes=2 * both)}
        case spec.AllReduce():
            sent = 2 * (op.ranks - 1) / op.ranks * 4 * op.x.width
            return {TOKEN: Work(elements=(op.ranks - 1) * op.x.width, wire=sent)}
        case spec.AllToAll():
            return {TOKEN: Work(wire=op.top_k * (op.ranks - 1) / op.ranks * 4 * op.x.width)}
        case spec.Sample():
            width = op.logits.width
            return {SAMPLE: Work(elements=width, read=4 * width, written=4)}
    raise KeyError(f"null has no rule for op {op.kind}")


class Counter:
    """A program with its rules added up. total: the coefficients of the whole program."""

    def __init__(
        self, program: Program, layout: KVLayout, weight_bytes: Mapping[str, float]
    ) -> None:
        self.total: dict[Basis, Work] = {}
        self._rules: list[tuple[str, str, Rule]] = []
        for op in program.ops:
            parts = rule(op, layout, weight_bytes, program)
            self._rules.append((op.kind, _label(op), parts))
            for basis, work in parts.items():
                self.total[basis] = self.total.get(basis, Work()) + work

    def ops(self, step: StepShape) -> list[OpWork]:
        """The work of each op in a step, in program order."""
        return [OpWork(kind, label, _sum(parts, step)) for kind, label, parts in self._rules]

    def step(self, step: StepShape) -> Work:
        """The work of the whole step."""
        return _sum(self.total, step)


def _sum(parts: Rule, step: StepShape) -> Work:
    out = Work()
    for basis, work in parts.items():
        out += work.times(step.amount(basis))
    return out


def _label(op: Op) -> str:
    """What tells an op from others of its kind."""
    layer = getattr(op, "layer", None)
    return f"layer {layer}" if layer is not None else ", ".join(op.weights())


def count(
    program: Program, layout: KVLayout, weight_bytes: Mapping[str, float], step: StepShape
) -> list[OpWork]:
    """FLOPs and bytes of each op of a program in one step, in program order."""
    return Counter(program, layout, weight_bytes).ops(step)


class NullBackend:
    """Accepts every program and computes nothing; every sampled token is 0."""

    name = "null"
    level = "none"

    def accepts(self, op: Op, weight_formats: Mapping[str, tuple[str, ...]]) -> str | None:
        """See `spec.Backend`."""
        return None

    def load(
        self,
        program: Program,
        weights: Mapping[str, Weight],
        layout: KVLayout,
        limits: Limits,
        progress: spec.LoadProgress | None = None,
    ) -> "NullExecutable":
        """See `spec.Backend`. weights may be empty."""
        return NullExecutable(layout, limits)

    def memory(
        self,
        program: Program,
        weights: Mapping[str, Weight],
        layout: KVLayout,
        limits: Limits,
    ) -> dict[str, int]:
        """See `spec.Backend`: nothing but the batch."""
        batch = RaggedBatch(limits, layout.table_rows).nbytes
        return {"weights": 0, "kv": 0, "workspace": 0, "batch": batch}


class NullExecutable:
    """A batch whose outputs are filled with token 0, log-probability 0 and rank 1."""

    def __init__(self, layout: KVLayout, limits: Limits) -> None:
        self.batch = RaggedBatch(limits, layout.table_rows)

    @property
    def paths(self) -> list[tuple[str, str]]:
        """See `spec.Executable`: there are no kernels."""
        return []

    def run(self, part: Literal["all", "forward", "sample"] = "all") -> None:
        """See `spec.Executable`."""
        batch, n = self.batch, self.batch.num_samples
        batch.out_token[:n] = np.maximum(batch.forced[:n], 0)
        batch.out_logprob[:n] = 0
        batch.out_rank[:n] = 1
        batch.out_top_token[:n] = 0
        batch.out_top_logprob[:n] = 0

    def read(self, buffer: Buffer) -> F32:
        """See `spec.Executable`: zeros."""
        rows = self.batch.num_tokens if buffer.rows == "tokens" else self.batch.num_logits
        return np.zeros((rows, buffer.width), np.float32)

    def populate(self) -> None:
        """See `spec.Executable`: everything is allocated when it is used."""

    def close(self) -> None:
        """See `spec.Executable`."""
