"""Seconds of a step from the FLOPs and bytes that the null back-end counts for the same program.

`compile_model` adds up `ops.null.rule` over a program once, by class of op; `StepModel.terms` then
prices a plan in a few microseconds, in pure Python. A class takes max(compute, bytes) seconds where
a device hides one behind the other and their sum where it does not (`Device.overlap`).

The terms, in seconds, and what the fitted model multiplies them by at the start:

    fixed       a unit of about one small step                      step_overhead / unit
    moving      bytes of linear layers, experts, norms; the wire    1
    computing   their arithmetic                                    1 - overlap
    excess      what computing takes beyond moving                  overlap
    attention   query-key pairs and KV read                         1
    cache       KV read, once more                                  0
    logits      the vocabulary's rows, sampling                     1

`moving`, `computing` and `excess` make two lines that meet where computing takes as long as
moving: few rows wait for bytes, many for arithmetic, and the fit finds the height and both slopes.
`cache` lets a key that is read cost more than a pair that is computed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from operator import mul
from typing import Any

from headrace.core.plan import StepPlan
from headrace.cost.hardware import Device, Link
from headrace.ops import null, spec
from headrace.ops.null import Basis
from headrace.ops.spec import KVLayout, Program

TERMS = ("fixed", "moving", "computing", "excess", "attention", "cache", "logits")
ELEMENT_FLOPS = 4.0
"""FLOP that one value of a norm, an activation or an exponential is worth; a guess the fit
mends."""
_CLASSES: Mapping[type[spec.Op], str] = {
    spec.Attention: "attention",
    spec.LatentAttention: "attention",
    spec.Logits: "logits",
    spec.Sample: "logits",
    spec.AllReduce: "wire",
    spec.AllToAll: "wire",
}


@dataclass(frozen=True)
class Form:
    """Seconds of compute, or of moving bytes, as a linear form of a step's amounts."""

    step: float = 0.0
    token: float = 0.0
    logit: float = 0.0
    sample: float = 0.0

    def at(self, amounts: "Amounts") -> float:
        """Its value for a step, without attention and experts."""
        return (
            self.step
            + self.token * amounts.tokens
            + self.logit * amounts.logits
            + self.sample * amounts.samples
        )


@dataclass(frozen=True)
class Span:
    """Attention of the layers with one window: seconds a pair (compute) and a key (bytes)."""

    window: int
    first: int
    pair: float
    key: float


@dataclass(frozen=True)
class Pool:
    """Expert layers alike: seconds of reading one expert in each of them."""

    experts: int
    top_k: int
    expert: float

    def touched(self, tokens: int) -> float:
        """Experts that a step of so many rows is expected to read, of each layer."""
        return self.experts * (1.0 - (1.0 - self.top_k / self.experts) ** tokens)


@dataclass(slots=True)
class Amounts:
    """What a step has of everything. pairs, keys: one entry for each `Span`, in order."""

    tokens: int
    logits: int
    samples: int
    sequences: int
    pairs: Sequence[float]
    keys: Sequence[float]


@dataclass(frozen=True)
class StepModel:
    """A program on a device, compiled. *_compute, *_bytes: forms in seconds; unit: seconds.
    compute_share, bandwidth_share: of the device's limits, that the forms assume. fitted:
    coefficients that an engine found for this very model here, or None."""

    linear_compute: Form
    linear_bytes: Form
    rest_compute: Form
    rest_bytes: Form
    attention_compute: Form
    attention_bytes: Form
    logits_compute: Form
    logits_bytes: Form
    wire: Form
    spans: tuple[Span, ...]
    pools: tuple[Pool, ...]
    overlap: float
    unit: float
    overhead: float
    imbalance: float = 1.0
    compute_share: float = 1.0
    bandwidth_share: float = 1.0
    fitted: tuple[float, ...] | None = None

    def start(self) -> tuple[float, ...]:
        """The coefficients to begin with: fitted ones, else those of an engine that behaves as the
        roofline says."""
        if self.fitted is not None:
            return self.fitted
        return (
            self.overhead / self.unit, 1.0, 1.0 - self.overlap, self.overlap, 1.0, 0.0, 1.0,
        )  # fmt: skip

    def terms(self, plan: StepPlan) -> tuple[float, ...]:
        """The terms of a plan, in the order of TERMS, in seconds."""
        return self.price(self.amounts(plan))

    def amounts(self, plan: StepPlan) -> Amounts:
        """The amounts of a plan."""
        return self.amounts_of(
            plan.starts,
            plan.counts,
            plan.num_logits,
            len(plan.samples) // 2 + len(plan.scores) // 3,
        )

    def amounts_of(
        self, starts: Sequence[int], counts: Sequence[int], logits: int, samples: int
    ) -> Amounts:
        """The amounts of slices [starts[i], starts[i] + counts[i])."""
        sequences = len(starts)
        tokens = sum(counts)
        before = sum(starts)
        keys = before + tokens
        if tokens == sequences:
            pairs: float = keys
        else:
            pairs = sum(map(mul, starts, counts)) + (sum(map(mul, counts, counts)) + tokens) / 2
        spans = self.spans
        if len(spans) == 1 and spans[0].window < 0:
            return Amounts(tokens, logits, samples, sequences, (pairs,), (keys,))
        all_pairs: list[float] = []
        all_keys: list[float] = []
        for span in spans:
            if span.window < 0:
                all_pairs.append(pairs)
                all_keys.append(keys)
                continue
            pair_sum, key_sum = _windowed(starts, counts, span.window, span.first)
            all_pairs.append(pair_sum)
            all_keys.append(key_sum)
        return Amounts(tokens, logits, samples, sequences, all_pairs, all_keys)

    def price(self, amounts: Amounts) -> tuple[float, ...]:
        """The terms of a step with those amounts."""
        tokens = amounts.tokens
        linear_compute = self.linear_compute.step + self.linear_compute.token * tokens
        linear_bytes = self.linear_bytes.step + self.linear_bytes.token * tokens
        for pool in self.pools:
            linear_bytes += pool.expert * pool.touched(tokens)
        pair_seconds = self.attention_compute.at(amounts)
        cache = 0.0
        for span, pairs, keys in zip(self.spans, amounts.pairs, amounts.keys, strict=True):
            pair_seconds += span.pair * pairs
            cache += span.key * keys
        linear_compute *= self.imbalance
        rest_compute = self.rest_compute.step + self.rest_compute.token * tokens
        rest_bytes = self.rest_bytes.step + self.rest_bytes.token * tokens
        return (
            self.unit,
            linear_bytes + rest_bytes + self.wire.step + self.wire.token * tokens,
            linear_compute + rest_compute,
            max(0.0, linear_compute - linear_bytes) + max(0.0, rest_compute - rest_bytes),
            self._mix(pair_seconds, self.attention_bytes.at(amounts) + cache),
            cache,
            self._mix(self.logits_compute.at(amounts), self.logits_bytes.at(amounts))
            if amounts.logits
            else 0.0,
        )

    def seconds(
        self, starts: Sequence[int], counts: Sequence[int], logits: int | None = None
    ) -> float:
        """Seconds of a step with those slices by the roofline alone; one logits row a slice unless
        said otherwise."""
        rows = len(starts) if logits is None else logits
        terms = self.price(self.amounts_of(starts, counts, rows, rows))
        return float(sum(map(mul, self.start(), terms)))

    def limits(self, amounts: Amounts) -> tuple[float, float]:
        """Seconds at the device's limits: of all arithmetic, and of reading weights and KV once.
        Over the seconds of a real step they are its MFU and MBU."""
        tokens = amounts.tokens
        compute = self.linear_compute.at(amounts) + self.rest_compute.at(amounts)
        compute += self.logits_compute.at(amounts) + self.attention_compute.at(amounts)
        moved = self.linear_bytes.step + (self.logits_bytes.step if amounts.logits else 0.0)
        for pool in self.pools:
            moved += pool.expert * pool.touched(tokens)
        for span, pairs, keys in zip(self.spans, amounts.pairs, amounts.keys, strict=True):
            compute += span.pair * pairs
            moved += span.key * keys
        return compute * self.compute_share, moved * self.bandwidth_share

    def _mix(self, compute: float, moved: float) -> float:
        longer = compute if compute > moved else moved
        return longer + (1.0 - self.overlap) * (compute + moved - longer)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @staticmethod
    def from_dict(row: Mapping[str, Any]) -> "StepModel":
        """What `to_dict` made."""
        parts: dict[str, Any] = {
            key: Form(**value) if isinstance(value, dict) else value for key, value in row.items()
        }
        parts["spans"] = tuple(Span(**span) for span in row["spans"])
        parts["pools"] = tuple(Pool(**pool) for pool in row["pools"])
        parts["fitted"] = None if row["fitted"] is None else tuple(row["fitted"])
        return StepModel(**parts)


def _windowed(
    starts: Sequence[int], counts: Sequence[int], window: int, first: int
) -> tuple[float, float]:
    """(pairs, keys) under a window: a query at position p sees min(p + 1, window) positions, and of
    those further back the first `first`."""
    pairs = keys = 0
    for start, count in zip(starts, counts, strict=True):
        end = start + count
        hidden = max(start - window + 1, 0)
        keys += end - hidden + min(hidden, first)
        if count == 1:
            pairs += min(end, window) + min(max(end - window, 0), first)
        else:
            pairs += _ramp(end, window) - _ramp(start, window)
            pairs += _ramp(end - window, first) - _ramp(start - window, first)
    return float(pairs), float(keys)


def _ramp(n: int, cap: int) -> int:
    """Sum over i = 1 .. n of min(i, cap)."""
    low = max(0, min(n, cap))
    return low * (low + 1) // 2 + max(0, n - low) * cap


def number_of(formats: Sequence[str], device: Device) -> str:
    """The number format in which a device multiplies a weight of those formats."""
    name = formats[0].upper() if formats else "BF16"
    cpu = device.kind == "cpu"
    if cpu and name.startswith(("Q4", "INT4")):
        return "int4"
    if name in ("F32", "F16", "BF16", "INT4"):
        return "f32" if cpu else "bf16"
    if name in ("MXFP4", "NVFP4"):
        return "int8" if cpu else "fp4"
    if name.startswith(("F8", "FP8")):
        return "f32" if cpu else "fp8"
    return "int8"


@dataclass
class _Sums:
    """Forms under way: class -> basis -> seconds."""

    compute: dict[str, dict[Basis, float]] = field(default_factory=dict)
    moved: dict[str, dict[Basis, float]] = field(default_factory=dict)

    def add(self, name: str, basis: Basis, compute: float, moved: float) -> None:
        for table, seconds in ((self.compute, compute), (self.moved, moved)):
            row = table.setdefault(name, {})
            row[basis] = row.get(basis, 0.0) + seconds

    def form(self, table: dict[str, dict[Basis, float]], name: str) -> Form:
        row = table.get(name, {})
        get = row.get
        return Form(
            get(null.STEP, 0.0), get(null.TOKEN, 0.0), get(null.LOGIT, 0.0), get(null.SAMPLE, 0.0)
        )


def compile_model(
    program: Program,
    layout: KVLayout,
    weight_bytes: Mapping[str, float],
    device: Device,
    formats: Mapping[str, Sequence[str]] | None = None,
    link: Link | None = None,
    imbalance: float = 1.0,
    wide: Link | None = None,
    tensor: int = 1,
) -> StepModel:
    """A program on a device.

    weight_bytes, formats: bytes and formats of each weight; without formats all are taken for
    16-bit. link: between the ranks that collectives span; wide: between those that exchange rows of
    experts, where it is another one; tensor: ranks that share such an exchange, each sending a part
    of the rows, which they then gather over `link`. imbalance: busiest over mean expert.
    """
    formats = formats or {}
    bandwidth = device.bytes_per_second()
    cpu = device.kind == "cpu"
    number = "f32" if cpu else "bf16"
    scalar = device.rate("f32") if cpu else device.rate("bf16")
    buffer_share = 1.0 if cpu else 0.5  # null counts 4 bytes a value; GPUs keep rows in 16 bits
    sums = _Sums()
    for op in program.ops:
        name = _CLASSES.get(type(op), "rest")
        rate = device.rate(number)
        way = wide if wide is not None and isinstance(op, spec.AllToAll) else link
        if isinstance(op, spec.Linear | spec.Experts | spec.Logits):
            weight = op.weight if not isinstance(op, spec.Experts) else op.gate_up
            rate = device.rate(number_of(formats.get(weight, ()), device))
            name = "logits" if isinstance(op, spec.Logits) else "linear"
        for basis, work in null.rule(op, layout, weight_bytes, program).items():
            compute = work.flops / rate + work.elements * ELEMENT_FLOPS / scalar
            moved = (
                work.weight_bytes
                + work.kv_read
                + work.kv_written
                + (work.read + work.written) * buffer_share
            ) / bandwidth
            sums.add(name, basis, compute, moved)
            if work.wire and link is not None and way is not None:
                shared = tensor if isinstance(op, spec.AllToAll) else 1
                pace = (1 / way.bandwidth + (shared - 1) / link.bandwidth) / shared
                sums.add("wire", basis, work.wire * buffer_share * pace, 0.0)
        if name == "wire" and way is not None:
            sums.add("wire", null.STEP, way.latency, 0.0)
    return _model(sums, device, imbalance)


def _model(sums: _Sums, device: Device, imbalance: float) -> StepModel:
    attention = sums.compute.get("attention", {})
    spans = tuple(
        Span(
            basis.a,
            basis.b,
            seconds,
            sums.moved["attention"].get(Basis("key", basis.a, basis.b), 0.0),
        )
        for basis, seconds in attention.items()
        if basis.kind == "pair"
    )
    pools = tuple(
        Pool(basis.a, basis.b, seconds)
        for basis, seconds in sums.moved.get("linear", {}).items()
        if basis.kind == "expert"
    )

    def forms(name: str) -> tuple[Form, Form]:
        return sums.form(sums.compute, name), sums.form(sums.moved, name)

    linear, rest, attention_forms = forms("linear"), forms("rest"), forms("attention")
    logits = forms("logits")
    model = StepModel(
        *linear, *rest, *attention_forms, *logits, sums.form(sums.compute, "wire"),
        spans, pools, device.overlap, 1.0, device.step_overhead, imbalance, device.compute_share,
        device.bandwidth_share,
    )  # fmt: skip
    one = model.seconds([0], [1]) - device.step_overhead
    return replace(model, unit=max(one, device.step_overhead, 1e-9))
