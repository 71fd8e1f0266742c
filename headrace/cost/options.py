"""The search over ways to run a service, and what would help it most."""

from dataclasses import dataclass, replace

from headrace.cost.capacity import (
    Choice,
    Gain,
    Promise,
    Replica,
    Traffic,
    best_choice,
    cost_rate,
    curve,
    place,
    relaxed,
)
from headrace.cost.catalog import Precision, PricedModel, find_model
from headrace.cost.hardware import Device, find_link
from headrace.errors import ConfigError, HeadraceError, MemoryPlanError, ModelError
from headrace.models.sketch import Ranks


@dataclass(frozen=True)
class Question:
    """What to plan for."""

    model: str
    device: Device
    traffic: Traffic
    promise: Promise
    precision: Precision
    ranks: Ranks | None = None


@dataclass(frozen=True)
class Answer:
    """choices: the best of each spread that keeps the promise, cheapest first. misses: spreads that
    do not, with the reason."""

    question: Question
    choices: tuple[Choice, ...]
    misses: tuple[tuple[str, str], ...]

    @property
    def best(self) -> Choice | None:
        """The cheapest way, if there is any."""
        return self.choices[0] if self.choices else None


def spreads(device: Device) -> list[Ranks]:
    """Ways to spread a model: every matrix over the devices of one node, experts over up to 4
    nodes."""
    most = device.node * (4 if device.kind == "gpu" else 1)
    return [
        Ranks(1 << tensor, 1 << expert)
        for expert in range(6 if device.kind == "gpu" else 1)
        for tensor in range(4)
        if 1 << tensor <= device.node and 1 << tensor + expert <= most
    ]


def describe(ranks: Ranks) -> str:
    """TP4, EP16, TP8 x EP2, or one device."""
    parts = [f"TP{ranks.tensor}"] * (ranks.tensor > 1) + [f"EP{ranks.expert}"] * (ranks.expert > 1)
    return " x ".join(parts) or "1 device"


Models = dict[tuple[str, Precision, Ranks], PricedModel]
"""Models that were declared already: they take longer than anything else here."""


def answer(question: Question, models: Models | None = None) -> Answer:
    """Try every spread. Raises ConfigError or ModelError for a model that cannot be read, and
    MemoryPlanError, with the numbers, when it fits no spread. models: filled and used again."""
    models = {} if models is None else models
    choices: list[Choice] = []
    misses: list[tuple[str, str]] = []
    smallest: PricedModel | None = None
    fits = False
    for ranks in [question.ranks] if question.ranks else spreads(question.device):
        try:
            key = (question.model, question.precision, ranks)
            model = models.get(key) or find_model(*key)
            models[key] = model
        except (ModelError, ConfigError) as error:
            if ranks == Ranks() or question.ranks:
                raise
            if "cannot" not in str(error) and ranks.expert == 1:
                misses.append((describe(ranks), str(error)))
            continue
        if smallest is None or model.rank_bytes < smallest.rank_bytes:
            smallest = model
        devices = ranks.tensor * ranks.expert
        link = find_link(question.device.link)
        wide = None if devices <= question.device.node else find_link("ndr400")
        replica = place(model, question.device, link, question.traffic, wide)
        if replica is None:
            misses.append((describe(ranks), _too_large(model, question)))
            continue
        fits = True
        choice = best_choice(replica, question.traffic, question.promise)
        if choice is None:
            misses.append((describe(ranks), _too_slow(replica, question.traffic)))
        else:
            choices.append(choice)
    if not fits and smallest is not None:
        raise MemoryPlanError(_too_large(smallest, question))
    choices.sort(key=lambda choice: (choice.per_hour, cost_rate(choice, question.traffic)))
    return Answer(question, tuple(choices), tuple(misses))


def _too_slow(replica: Replica, traffic: Traffic) -> str:
    alone = curve(replica, traffic, most=1)
    if not alone:
        return "keeps the promise at no batch: its prompts take longer than its answers"
    first = alone[0]
    return (
        f"keeps the promise at no batch: TPOT {first.tpot * 1e3:.1f} ms and TTFT "
        f"{first.ttft * 1e3:.0f} ms at batch 1"
    )


def _too_large(model: PricedModel, question: Question) -> str:
    traffic = question.traffic
    one = model.kv_bytes(traffic.longest or round(traffic.prompt + traffic.output))
    needs = f"{model.rank_bytes / 1e9:.1f} GB of weights and {one / 1e9:.2f} GB of KV a sequence"
    has = f"{question.device.name} has {question.device.memory / 1e9:.0f} GB"
    return f"{model.name} needs {needs} on each device; {has}"


def gains(found: Answer) -> list[Gain]:
    """What single changes would do to the cost, best first. Changes that cannot be made (a format
    that the checkpoint decides) are left out."""
    question = found.question
    before = found.best
    results: list[Gain] = []
    models: Models = {}
    for name, changed in _changes(question):
        try:
            after = answer(changed, models).best
        except HeadraceError:
            continue
        if after is None:
            continue
        if before is None:
            results.append(Gain(name, None))
            continue
        ratio = cost_rate(after, changed.traffic) / cost_rate(before, question.traffic)
        results.append(Gain(name, ratio))
    return sorted(results, key=lambda gain: gain.ratio if gain.ratio is not None else 0.0)


def _changes(question: Question) -> list[tuple[str, Question]]:
    device, traffic, precision = question.device, question.traffic, question.precision
    formats = [f for f in ("fp8", "int4", "mxfp4") if f != precision.weights]
    changes = [
        (f"weights in {name}", replace(question, precision=replace(precision, weights=name)))
        for name in formats
    ]
    if precision.kv == "f16":
        changes.append(("KV in 8 bits", replace(question, precision=replace(precision, kv="fp8"))))
    more = min(0.95, traffic.cached + 0.5 * (1 - traffic.cached))
    changes += [
        (
            f"prefix cache hits of {more:.0%} of prompt tokens",
            replace(question, traffic=replace(traffic, cached=more)),
        ),
        (
            "memory bandwidth + 50 %",
            replace(question, device=replace(device, bandwidth=1.5 * device.bandwidth)),
        ),
        (
            "compute + 50 %",
            replace(
                question,
                device=replace(device, rates={k: 1.5 * v for k, v in device.rates.items()}),
            ),
        ),
        ("memory + 50 %", replace(question, device=replace(device, memory=1.5 * device.memory))),
        ("a promise twice as generous", replace(question, promise=relaxed(question.promise))),
    ]
    return changes
