"""The fitted model: finds coefficients, forgets, shrugs off outliers, reports its own error."""

from random import Random

import pytest

from headrace.core.plan import StepPlan
from headrace.cost.catalog import find_model
from headrace.cost.estimator import StepEstimator
from headrace.cost.fit import ErrorWindow, FitSettings, WindowFit
from headrace.cost.hardware import find_device
from headrace.cost.roofline import TERMS

TRUTH = (0.8, 2.5, 0.6, 0.9, 1.7, 0.5, 1.2)


def random_plan(draw: Random) -> StepPlan:
    sequences = draw.randrange(1, 33)
    counts = [1] * sequences
    if draw.random() < 0.4:
        counts[-1] = draw.randrange(16, 512)
    starts = [draw.randrange(0, 4000) for _ in counts]
    return StepPlan(
        0, starts=starts, counts=counts, num_logits=sequences, samples=[0] * 2 * sequences
    )


def test_coefficients_are_found_from_a_wrong_start() -> None:
    model = find_model("smollm2-135m-bf16").on(find_device("ryzen-7950x"))
    estimator = StepEstimator(model)
    draw = Random(1)
    for _ in range(600):
        plan = random_plan(draw)
        exact = sum(t * x for t, x in zip(TRUTH, model.terms(plan), strict=True))
        estimator.observe(plan, exact * draw.lognormvariate(0, 0.02))
    for _ in range(50):
        plan = random_plan(draw)
        exact = sum(t * x for t, x in zip(TRUTH, model.terms(plan), strict=True))
        assert estimator.seconds(plan) == pytest.approx(exact, rel=0.05)
    stats = estimator.stats()
    assert stats["cost_mape"] < 0.05
    assert abs(stats["cost_bias"]) < 0.02
    assert all(stats[f"cost_{name}"] >= 0 for name in TERMS)


def test_outliers_do_not_move_it() -> None:
    draw = Random(2)
    clean, hit = WindowFit((1.0, 1.0)), WindowFit((1.0, 1.0))
    for step in range(400):
        terms = (1.0, draw.uniform(0.5, 4.0))
        seconds = (0.5 * terms[0] + 2.0 * terms[1]) * draw.lognormvariate(0, 0.02)
        clean.update(terms, seconds)
        hit.update(terms, seconds * (20.0 if step > 50 and step % 20 == 0 else 1.0))
    assert hit.refit() == pytest.approx(clean.refit(), rel=0.05, abs=0.05)


@pytest.mark.parametrize("change", [1.6, 8.0, 0.1])
def test_it_follows_a_machine_that_changes(change: float) -> None:
    fit = WindowFit((1.0, 0.0), FitSettings(memory=128))
    draw = Random(3)
    for step in range(600):
        terms = (1.0, draw.uniform(0.1, 2.0))
        fit.update(terms, (1.0 if step < 400 else change) * (terms[0] + terms[1]))
        if step % 16 == 0:
            fit.refit()
    assert fit.refit() == pytest.approx([change, change], rel=0.02)


def test_a_start_that_is_wrong_by_a_lot_is_left_at_once() -> None:
    draw = Random(6)
    fit = WindowFit((50.0, 0.5, 20.0))
    for _ in range(64):
        terms = (1.0, draw.uniform(0.1, 2.0), draw.uniform(0.1, 2.0))
        fit.update(terms, 0.4 * terms[0] + terms[1] + 0.8 * terms[2])
    for _ in range(3):
        found = fit.refit()
    assert found == pytest.approx([0.4, 1.0, 0.8], rel=0.05)


def test_no_coefficient_is_negative_and_the_rest_make_up_for_it() -> None:
    fit = WindowFit((1.0, 0.0))
    draw = Random(4)
    for _ in range(300):
        x = draw.uniform(1.0, 3.0)
        fit.update((1.0, x), 4.0 - 0.2 * x)
    for _ in range(10):
        first, second = fit.refit()
    assert second == 0
    assert 4.0 - 0.2 * 3 < first < 4.0 - 0.2


def test_what_the_last_steps_say_nothing_about_is_kept() -> None:
    fit = WindowFit((1.0, 1.0), FitSettings(memory=64))
    for step in range(64):
        terms = (1.0, float(step % 5))
        fit.update(terms, 2.0 * terms[0] + 3.0 * terms[1])
    fit.refit()
    for _ in range(200):
        fit.update((1.0, 0.0), 2.5)
        fit.refit()
    assert fit.refit() == pytest.approx([2.5, 3.0], rel=0.1)


def test_predictions_change_at_refits_only() -> None:
    model = find_model("smollm2-135m-bf16").on(find_device("ryzen-7950x"))
    plan = random_plan(Random(5))
    before = StepEstimator(model).seconds(plan)
    estimator = StepEstimator(model, refit_every=20 * 3 * before)
    changes = []
    for step in range(1, 65):
        version, predicted = estimator.version, estimator.seconds(plan)
        estimator.observe(plan, 3 * before)
        assert estimator.version != version or estimator.seconds(plan) == predicted
        if estimator.version != version:
            changes.append(step)
    assert changes == [1, 2, 4, 8, 16, 32, 52, 64]
    assert estimator.seconds(plan) == pytest.approx(3 * before, rel=0.01)
    estimator.observe(plan, 0.0)
    assert estimator.stats()["cost_observations"] == 64
    again = StepEstimator.from_dict(estimator.to_dict())
    assert again.seconds(plan) == estimator.seconds(plan)


def test_error_window_is_the_plain_mean_of_the_last() -> None:
    window = ErrorWindow(3)
    assert (window.mape, window.bias) == (0, 0)
    for predicted in (9.0, 1.1, 0.8, 1.3):
        window.add(predicted, 1.0)
    assert window.mape == pytest.approx((0.1 + 0.2 + 0.3) / 3)
    assert window.bias == pytest.approx((0.1 - 0.2 + 0.3) / 3)
    assert len(window) == 3


def test_utilisation_is_what_the_limits_say() -> None:
    """A step that takes as long as its bytes at full bandwidth has an MBU of 1."""
    device = find_device("ryzen-7950x")
    priced = find_model("smollm2-135m-bf16")
    estimator = StepEstimator(priced.on(device))
    plan = StepPlan(0, starts=[1000], counts=[1], num_logits=1, samples=[0, 0])
    kv = 1001 * priced.kv_token_bytes()
    weights = sum(
        held for name, held in priced.weight_bytes.items() if name == "embed" or ".norm" not in name
    )
    estimator.observe(plan, (weights + kv) / device.bandwidth)
    assert estimator.stats()["mbu"] == pytest.approx(1.0, rel=0.01)
    flops = 2 * priced.active + 4 * 1001 * 30 * 576
    estimator.observe(plan, 100 * flops / device.rates["f32"])
    assert estimator.stats()["mfu"] == pytest.approx(0.01, rel=0.05)


def test_small_steps_do_not_push_out_what_large_ones_cost() -> None:
    """A kind that no line through the others explains keeps its say, however long ago it was."""
    draw = Random(7)
    fit = WindowFit((1.0, 1.0))
    for _ in range(60):
        rows = draw.uniform(60.0, 64.0)
        fit.update((0.003, 0.001 * rows), 0.003 + 0.0015 * rows, kind=7)
    for _ in range(6000):
        fit.update((0.003, 0.001), 0.0045 * draw.lognormvariate(0, 0.1), kind=1)
        if draw.random() < 0.02:
            fit.refit()
    step, row = fit.refit()
    assert 0.003 * step + 0.064 * row == pytest.approx(0.099, rel=0.03)
    assert 0.003 * step + 0.001 * row == pytest.approx(0.0045, rel=0.03)


def test_predictions_add_up_to_what_was_measured() -> None:
    """Noise that only ever adds must not make the sum of the predictions too short."""
    draw = Random(8)
    fit = WindowFit((1.0, 1.0))
    predicted = measured = 0.0
    for step in range(3000):
        terms = (0.002, draw.uniform(0.001, 0.03))
        seconds = (terms[0] + terms[1]) * (1.0 + draw.expovariate(8.0))
        if step > 500:
            predicted += sum(t * x for t, x in zip(fit.theta, terms, strict=True))
            measured += seconds
        fit.update(terms, seconds, kind=int(terms[1] * 200))
        if step % 25 == 0:
            fit.refit()
    assert predicted / measured == pytest.approx(1.0, abs=0.02)
