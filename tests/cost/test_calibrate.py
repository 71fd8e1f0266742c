"""Measuring: short, complete, and usable as a device."""

from pathlib import Path

import pytest

from headrace.core.plan import StepPlan
from headrace.cost import calibrate, local
from headrace.cost.catalog import find_model
from headrace.cost.hardware import save_profile
from headrace.models import decoder
from headrace.models.spec import Layer, ModelSpec, Rope
from headrace.ops.spec import KVLayout
from headrace.ops.weights import Tensor, Weight


@pytest.fixture(scope="module")
def found() -> calibrate.Measured:
    return calibrate.measure(budget=0.4)


def test_everything_is_measured(found: calibrate.Measured) -> None:
    threads = str(found.threads)
    assert set(found.read) == {"1", threads}
    assert set(map(int, found.read[threads])) == set(calibrate.READ_SIZES)
    figures = [*found.read[threads].values(), found.copy, found.disk_write, found.disk_read]
    assert all(1e7 < figure < 1e13 for figure in [*figures, found.loopback])
    assert all(1e8 < rate < 1e15 for rate in found.rates["f32"].values())
    assert found.source == "numpy" or {"int4", "int8"} <= set(found.rates)


def test_the_profile_prices_a_model(found: calibrate.Measured) -> None:
    device = calibrate.device(found, memory=8 << 30)
    assert (device.kind, device.overlap, device.memory) == ("cpu", 0.5, 8 << 30)
    model = find_model("smollm2-135m-bf16").on(device)
    one, many = model.seconds([100], [1]), model.seconds([100] * 16, [1] * 16)
    assert 0 < one < many < 16 * one


def test_without_the_native_module_numpy_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "_native", lambda: None)
    found = calibrate.measure(threads=1, budget=0.2)
    assert found.source == "numpy"
    assert set(found.rates) == {"f32"}
    assert calibrate.device(found).rate("int8") > 0


def test_a_machine_that_was_busy_is_told() -> None:
    def rates(one: float, both: float) -> calibrate.Measured:
        return calibrate.Measured("native", 2, rates={"f32": {"1": one, "2": both}})

    assert calibrate.disturbed(rates(100e9, 75e9))
    assert not calibrate.disturbed(rates(100e9, 190e9))
    alone = calibrate.Measured("native", 1, rates={"f32": {"1": 1e9}})
    assert not calibrate.disturbed(alone)


def test_the_engine_finds_the_profile(
    found: calibrate.Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    guess = local.local_device(2)
    assert "not calibrated" in guess.title
    save_profile(calibrate.device(found))
    known = local.local_device(found.threads)
    assert known.bandwidth == calibrate.device(found).bandwidth
    alone = local.local_device(1)
    assert alone.bandwidth == found.read["1"][str(calibrate.READ_SIZES[-1])]
    assert alone.rates["f32"] == found.rates["f32"]["1"]


def test_an_engine_leaves_what_it_found_to_the_next(
    found: calibrate.Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy as np

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    spec = ModelSpec(
        "llama", 96, 32, 2, 1, 16, 64, 128, (Layer(),), {"global": Rope(1e4, 16)}, 0.25, 1e-5, True
    )
    program = decoder.program(spec, {"global": 1.0})
    weights = {
        name: Weight(name, (Tensor(name, "F32", shape, np.zeros(4 * shape[0], np.uint8)),))
        for name, shape in program.shapes.items()
    }
    layout = KVLayout(decoder.kv_groups(spec), 1, 16)
    estimator = local.engine_estimator(program, layout, weights, 2)
    before = estimator.model.seconds([0], [8])
    assert before > 0
    for _ in range(300):
        estimator.observe(StepPlan(0, starts=[0], counts=[8]), 3 * before)
    assert not local.remember(estimator), "without a profile nothing is kept"
    save_profile(calibrate.device(found))
    estimator = local.engine_estimator(program, layout, weights, found.threads)
    before = estimator.model.seconds([0], [8])
    assert not local.remember(estimator), "too few steps"
    for _ in range(300):
        estimator.observe(StepPlan(0, starts=[0], counts=[8]), 3 * before)
    assert local.remember(estimator)
    again = local.engine_estimator(program, layout, weights, found.threads)
    assert again.coefficients == estimator.coefficients
    assert again.model.seconds([0], [8], 0) > 2 * before
    damaged = next((tmp_path / "headrace" / "fits").iterdir())
    damaged.write_text("{}")
    fresh = local.engine_estimator(program, layout, weights, found.threads)
    assert fresh.coefficients == estimator.model.start()
