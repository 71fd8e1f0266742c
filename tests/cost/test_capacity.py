"""The closed form: curves bend the right way, promises are kept, changes help as they must."""

from dataclasses import replace

import pytest

from headrace.cost.breakeven import break_even
from headrace.cost.capacity import (
    Promise,
    Replica,
    Traffic,
    best_choice,
    curve,
    place,
    point,
)
from headrace.cost.catalog import Precision, find_model
from headrace.cost.formulas.transfer import break_even_bandwidth
from headrace.cost.hardware import find_device, find_link
from headrace.cost.options import Question, answer, describe, gains, spreads
from headrace.errors import MemoryPlanError
from headrace.models.sketch import Ranks

TRAFFIC = Traffic(rate=20, prompt=1000, output=200)
PROMISE = Promise(ttft=1.0, tpot=0.03)
H100 = find_device("h100")


@pytest.fixture(scope="module")
def replica() -> Replica:
    found = place(find_model("llama-3.1-8b"), H100, None, TRAFFIC)
    assert found is not None
    return found


def question(**changes: object) -> Question:
    base = Question("llama-3.1-8b", H100, TRAFFIC, PROMISE, Precision(), Ranks())
    return replace(base, **changes)  # type: ignore[arg-type]


def test_the_curve_rises_in_latency_and_every_step_is_accounted_for(replica: Replica) -> None:
    points = curve(replica, TRAFFIC)
    latency = [p.tpot for p in points]
    assert latency == sorted(latency)
    assert points[-1].batch == replica.sequences
    for p in points:
        assert p.throughput == pytest.approx(p.requests * TRAFFIC.output)
        assert p.tpot <= p.itl
        assert p.carried <= 1
        assert sum(p.terms.values()) == pytest.approx(1)
        # tokens in = tokens out: each step computes the prompts of the requests that end in it
        per_step = p.batch * TRAFFIC.computed / TRAFFIC.output
        assert per_step == pytest.approx(p.carried * p.chunk)
    assert points[5].throughput > 3 * points[0].throughput


def test_prompts_too_long_for_their_answers_never_fill_a_batch(replica: Replica) -> None:
    heavy = Traffic(rate=1, prompt=8000, output=4)
    crowded = point(replica, heavy, 64, 512)
    assert crowded.carried > 1
    assert not Promise().met(crowded)
    assert all(p.carried <= 1 for p in curve(replica, heavy))


def test_the_choice_keeps_the_promise_and_is_the_most(replica: Replica) -> None:
    found = best_choice(replica, TRAFFIC, PROMISE)
    assert found is not None
    assert found.at.tpot <= 0.03
    assert found.at.ttft <= 1.0
    kept = [p.requests for p in found.curve if PROMISE.met(p)]
    assert found.at.requests >= 0.999 * max(kept)
    assert found.replicas * found.at.requests * 0.8 >= TRAFFIC.rate
    assert found.utilisation <= 0.8
    assert best_choice(replica, TRAFFIC, Promise(tpot=1e-4)) is None


def test_money_adds_up(replica: Replica) -> None:
    """What all tokens pay is what all replicas cost."""
    found = best_choice(replica, TRAFFIC, PROMISE)
    assert found is not None
    paid = found.input_price * TRAFFIC.prompt + found.output_price * TRAFFIC.output
    assert paid / 1e6 * TRAFFIC.rate * 3600 == pytest.approx(found.per_hour, rel=0.01)
    assert found.cached_price < found.input_price / 2
    assert found.input_price < found.output_price * 4


def test_changes_help_in_the_right_direction() -> None:
    found = answer(question())
    ratios = {gain.change: gain.ratio for gain in gains(found)}
    for change in ("weights in fp8", "compute + 50 %", "a promise twice as generous"):
        ratio = ratios[change]
        assert ratio is not None
        assert ratio <= 1.0001, change
    cached = answer(question(traffic=replace(TRAFFIC, cached=0.8))).best
    assert found.best is not None
    assert cached is not None
    assert cached.at.requests > 1.5 * found.best.at.requests


def test_a_model_that_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(MemoryPlanError, match=r"141\.1 GB of weights.*80 GB"):
        answer(question(model="llama-3.1-70b"))
    spread = answer(question(model="llama-3.1-70b", ranks=None))
    assert spread.best is not None
    assert spread.best.replica.devices >= 2
    assert "1 device" in dict(spread.misses)


def test_choices_are_ordered_by_money() -> None:
    found = answer(question(ranks=None))
    prices = [choice.per_hour for choice in found.choices]
    assert len(prices) >= 3
    assert prices == sorted(prices)


def test_break_even_is_the_formula_and_flips_there() -> None:
    model = find_model("llama-3.1-70b", ranks=Ranks(tensor=4))
    found = break_even(model, H100, model.on(H100))
    # One rank of four holds 80 KiB a token and computes a quarter of each: W* as of one device.
    assert found.kv_bytes == 80 * 1024
    assert found.bandwidth == pytest.approx(found.kv_bytes * found.prefill)
    achieved = H100.rate("bf16")
    formula = break_even_bandwidth(found.kv_bytes, model.active / 4, achieved)
    assert found.bandwidth == pytest.approx(formula, rel=0.2)
    for verdict in found.verdicts:
        assert verdict.pays == (verdict.bandwidth > found.bandwidth)
        assert verdict.share == pytest.approx(found.bandwidth / verdict.bandwidth)


def test_tensor_and_expert_ranks_combine() -> None:
    """DeepSeek-V3 in FP8 takes 16 devices of 80 GB: experts over two nodes, all else within one."""
    both = find_model("deepseek-v3", ranks=Ranks(tensor=8, expert=2))
    alone = find_model("deepseek-v3", ranks=Ranks(tensor=8))
    kinds = {op.kind for op in both.program.ops}
    assert {"all_reduce", "all_to_all"} <= kinds
    assert alone.rank_bytes / 2 < both.rank_bytes < alone.rank_bytes * 0.6
    near, far = find_link(H100.link), find_link("ndr400")
    slow = both.on(H100, near, wide=far).wire
    assert both.on(H100, near).wire.token < slow.token < both.on(H100, far).wire.token
    found = answer(question(model="deepseek-v3", ranks=Ranks(8, 2), promise=Promise(tpot=0.1)))
    assert found.best is not None
    assert (found.best.replica.devices, describe(both.ranks)) == (16, "TP8 x EP2")
    spreads_tried = {describe(ranks) for ranks in spreads(H100)}
    assert {"1 device", "TP8", "EP32", "TP8 x EP4", "TP2 x EP8"} <= spreads_tried
    assert all(ranks.tensor * ranks.expert <= 32 for ranks in spreads(H100))


def test_the_shares_of_a_step_are_those_of_its_price(replica: Replica) -> None:
    """On a device that hides nothing the shorter part of the linear layers counts too."""
    summed = place(find_model("llama-3.1-8b"), replace(H100, overlap=0.0), None, TRAFFIC)
    assert summed is not None
    at, hidden = point(summed, TRAFFIC, 64, 512), point(replica, TRAFFIC, 64, 512)
    linear = [sum(v for k, v in one.terms.items() if "linear" in k) for one in (at, hidden)]
    assert linear[0] * at.tpot > 1.2 * linear[1] * hidden.tpot
    assert at.terms["logits"] > 0.01
