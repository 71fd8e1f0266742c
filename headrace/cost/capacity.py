"""Closed-form capacity: how a model behaves on devices at every batch, and what that costs.

The steady state of one replica that batches continuously: `batch` sequences decode, and each output
token is paid for with prompt tokens of the requests that follow, `prompt / output` a step and
sequence. Steps either decode only, or decode and carry a chunk of prompt; the share of the latter
is what the traffic needs. `headrace.sim` checks such a plan with the scheduler itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import mul

from headrace.cost.catalog import PricedModel
from headrace.cost.hardware import Device, Link
from headrace.cost.roofline import StepModel
from headrace.errors import ConfigError

MEMORY_SHARE = 0.92
"""Part of a device's memory that an engine takes (vLLM's --gpu-memory-utilization)."""

CHUNKS = (128, 256, 512, 1024, 2048, 4096, 8192)
"""Prompt tokens a step that are tried."""

HEADROOM = 0.8
"""Part of its capacity at which a replica is run: queues grow without bound near 1."""


@dataclass(frozen=True)
class Traffic:
    """rate: requests/s of the whole service. prompt, output: mean tokens of a request. cached:
    share of prompt tokens found in the prefix cache. longest: tokens that must fit, prompt and
    output."""

    rate: float = 1.0
    prompt: float = 1000.0
    output: float = 200.0
    cached: float = 0.0
    longest: int = 0

    def __post_init__(self) -> None:
        """Raises ConfigError naming the field at fault."""
        if self.rate <= 0 or self.prompt < 1 or self.output < 1 or not 0 <= self.cached < 1:
            raise ConfigError(
                "traffic", "rate > 0, prompt >= 1, output >= 1 and 0 <= cached < 1 are needed"
            )

    @property
    def context(self) -> int:
        """Mean tokens of a sequence in mid-answer."""
        return round(self.prompt + self.output / 2)

    @property
    def computed(self) -> float:
        """Prompt tokens a request that must be computed; at least one."""
        return max(1.0, self.prompt * (1.0 - self.cached))


@dataclass(frozen=True)
class Point:
    """One batch size of a replica. Times in seconds, throughput in output tokens/s.

    chunk: prompt tokens a step. tpot: mean time between tokens. itl: of a step with a chunk in it,
    the stall that a user sees.
    ttft: of a mean prompt, without queueing. requests: per second at that batch. carried: share of
    steps with a chunk; over 1 the batch never fills: prompts take longer than the answers.
    terms: share of the time of a mean step by what it is spent on.
    """

    batch: int
    chunk: int
    tpot: float
    itl: float
    ttft: float
    requests: float
    throughput: float
    carried: float
    terms: dict[str, float]


@dataclass(frozen=True)
class Replica:
    """A model on devices: its step model and what fits. sequences: of the longest request."""

    model: PricedModel
    device: Device
    steps: StepModel
    devices: int
    kv_bytes: float
    sequences: int

    @property
    def price(self) -> float:
        """Dollars an hour."""
        return self.devices * self.device.price_per_hour


def place(
    model: PricedModel,
    device: Device,
    link: Link | None,
    traffic: Traffic,
    wide: Link | None = None,
) -> Replica | None:
    """One replica of `model` (as spread by its ranks), or None where it does not fit the devices
    with room for one longest request. link, wide: see `compile_model`."""
    devices = model.ranks.tensor * model.ranks.expert
    longest = traffic.longest or round(traffic.prompt + traffic.output)
    room = device.memory * MEMORY_SHARE - model.rank_bytes - workspace_bytes(model)
    one = model.kv_bytes(longest)
    if room < one:
        return None
    mean = model.kv_bytes(round(traffic.prompt + traffic.output))
    steps = model.on(device, link if devices > 1 else None, wide=wide)
    return Replica(model, device, steps, devices, room, int(room // max(mean, 1.0)))


def workspace_bytes(model: PricedModel) -> float:
    """Bytes of activations for a step of 2,048 rows in 16 bits, about 8 live buffers of the widest
    kind, and the logits of 256 rows in 32 bits."""
    widest = max(buffer.width for buffer in model.program.buffers if buffer.rows == "tokens")
    return 2048 * widest * 2.0 * 8 + 256 * model.program.logits.width * 4.0


def point(replica: Replica, traffic: Traffic, batch: int, chunk: int) -> Point:
    """The steady state at `batch` sequences a rank and chunks of `chunk` prompt tokens."""
    steps, context = replica.steps, traffic.context
    decode_terms = steps.price(steps.amounts_of([context] * batch, [1] * batch, batch, batch))
    prompt = max(1, round(traffic.computed))
    taken = min(chunk, prompt)
    before = round(traffic.prompt - traffic.computed / 2)
    starts, counts = [context] * batch, [1] * batch
    filled = 0
    while filled < chunk:  # a step's budget goes to as many prompts as it holds
        starts.append(before)
        counts.append(min(taken, chunk - filled))
        filled += counts[-1]
    whole = len(starts)
    mixed_terms = steps.price(steps.amounts_of(starts, counts, whole, whole))
    start = steps.start()
    decode, mixed = (sum(map(mul, start, terms)) for terms in (decode_terms, mixed_terms))
    carried = batch * traffic.computed / traffic.output / chunk
    share = min(carried, 1.0)
    tpot = share * mixed + (1.0 - share) * decode
    pace = max(carried, 1.0)
    passes = -(-prompt // chunk)
    requests = batch / (traffic.output * tpot * pace) * replica.model.ranks.expert
    mean = [share * m + (1.0 - share) * d for m, d in zip(mixed_terms, decode_terms, strict=True)]
    return Point(
        batch,
        chunk,
        tpot,
        mixed,
        passes * mixed,
        requests,
        requests * traffic.output,
        carried,
        _shares(replica, mean, batch, traffic),
    )


def _shares(
    replica: Replica, terms: Sequence[float], batch: int, traffic: Traffic
) -> dict[str, float]:
    """What a mean step's time goes to."""
    start = replica.steps.start()
    fixed, moving, computing, excess, attention, cache, logits = (
        s * t for s, t in zip(start, terms, strict=True)
    )
    rows = batch * (1.0 + traffic.computed / traffic.output)
    wire = replica.steps.wire.step + replica.steps.wire.token * rows
    compute = (replica.steps.linear_compute.token * rows) >= replica.steps.linear_bytes.step
    linear = moving + computing + excess
    total = fixed + linear + attention + cache + logits
    names = {
        "fixed overhead": fixed,
        "linear layers, compute" if compute else "linear layers, weight bytes": linear - wire,
        "attention and KV": attention + cache,
        "logits": logits,
        "between devices": wire,
    }
    return {name: seconds / total for name, seconds in names.items()}


def curve(replica: Replica, traffic: Traffic, most: int = 1024) -> list[Point]:
    """Points at batches 1, 2, 3, 4, 6, 8, 12, ... up to what the memory holds, each at the chunk
    that makes its steps shortest while the batch still fills; up to the batch that no chunk
    fills."""
    limit = max(1, min(replica.sequences, most))
    batches = {b for i in range(11) for b in (1 << i, 3 << max(0, i - 1)) if b <= limit} | {limit}
    points = []
    for batch in sorted(batches):
        tried = [point(replica, traffic, batch, chunk) for chunk in CHUNKS]
        filling = [one for one in tried if one.carried <= 1.0]
        if not filling:
            break
        points.append(min(filling, key=lambda one: one.tpot))
    return points


@dataclass(frozen=True)
class Promise:
    """Seconds; None promises nothing."""

    ttft: float | None = None
    tpot: float | None = None

    def met(self, at: Point) -> bool:
        """Whether the steady state keeps it."""
        return (
            at.carried <= 1.0
            and (self.tpot is None or at.tpot <= self.tpot)
            and (self.ttft is None or at.ttft <= self.ttft)
        )


@dataclass(frozen=True)
class Choice:
    """A way to run the service that keeps the promise, in the closed form.

    replicas: for the traffic at HEADROOM. utilisation: of their
    capacity. per_hour: dollars of all. *_price: dollars per million tokens of that kind.
    """

    replica: Replica
    at: Point
    curve: tuple[Point, ...]
    replicas: int
    utilisation: float
    per_hour: float
    input_price: float
    cached_price: float
    output_price: float

    @property
    def devices(self) -> int:
        """Devices in all."""
        return self.replicas * self.replica.devices


def best_choice(replica: Replica, traffic: Traffic, promise: Promise) -> Choice | None:
    """The batch and chunk with the most requests/s within the promise, or None."""
    points = curve(replica, traffic)
    if not points:
        return None
    candidates = [
        point(replica, traffic, one.batch, chunk)
        for one in points
        for chunk in CHUNKS
        if chunk >= one.chunk
    ]
    kept = [one for one in candidates if promise.met(one)]
    if not kept:
        return None
    most = max(one.requests for one in kept)
    at = min((one for one in kept if one.requests > 0.999 * most), key=lambda one: one.itl)
    replicas = max(1, -(-traffic.rate // (at.requests * HEADROOM)))
    utilisation = traffic.rate / (replicas * at.requests)
    prices = _prices(replica, traffic, at, utilisation)
    return Choice(
        replica, at, tuple(points), int(replicas), utilisation, replicas * replica.price, *prices
    )


def _prices(
    replica: Replica, traffic: Traffic, at: Point, utilisation: float
) -> tuple[float, float, float]:
    """Dollars per million input, cached and output tokens.

    A request's share of the time splits into what one more computed prompt token takes, what one
    more token of context adds to each of its decode steps (all that a cached token costs), and the
    rest, which its output pays.
    """
    steps, context = replica.steps, traffic.context
    ranks = replica.model.ranks.expert
    batch, prompt = [context] * at.batch, max(1, round(traffic.computed))
    ones = [1] * at.batch
    before = round(traffic.prompt - traffic.computed)
    base = steps.seconds([*batch, before], [*ones, prompt], at.batch)
    more = steps.seconds([*batch, before, before], [*ones, prompt, prompt], at.batch)
    longer = steps.seconds([c + 64 for c in batch], ones, at.batch)
    plain = steps.seconds(batch, ones, at.batch)
    request = traffic.output * at.tpot / at.batch  # seconds of the replica that one request takes
    held = max(0.0, longer - plain) / 64 / at.batch * traffic.output
    computed = min((more - base) / prompt, 0.95 * request / traffic.computed)
    output = (request - computed * traffic.computed - held * traffic.prompt) / traffic.output
    if output < 0.0:
        held, output = 0.0, (request - computed * traffic.computed) / traffic.output
    second = replica.price / 3600.0 / ranks / utilisation * 1e6
    return (computed + held) * second, held * second, output * second


@dataclass(frozen=True)
class Gain:
    """A change and what it does to the cost of the service, at equal promise. ratio: new over old
    dollars an hour before rounding up to whole replicas; None where the promise becomes kept."""

    change: str
    ratio: float | None


def cost_rate(choice: Choice, traffic: Traffic) -> float:
    """Dollars an hour for the traffic with replicas divisible: fair to compare changes by. Where
    devices have no price, devices."""
    share = traffic.rate / (choice.at.requests * HEADROOM)
    price = choice.replica.device.price_per_hour or 1.0
    return share * choice.replica.devices * price


def relaxed(promise: Promise) -> Promise:
    """The same promise, twice as generous."""
    return replace(
        promise,
        ttft=None if promise.ttft is None else 2 * promise.ttft,
        tpot=None if promise.tpot is None else 2 * promise.tpot,
    )
