"""The cost model of the engine on this machine."""

from collections.abc import Mapping
from dataclasses import replace

from headrace.cost.calibrate import KERNEL_SHARE, total_memory
from headrace.cost.estimator import StepEstimator
from headrace.cost.hardware import LOCAL, Device, load_profile
from headrace.cost.roofline import compile_model
from headrace.errors import ConfigError
from headrace.ops.spec import KVLayout, Program
from headrace.ops.weights import Weight

_GUESS_READ = 10e9
_GUESS_RATES = {"int8": 150e9, "f32": 50e9}


def local_device(threads: int) -> Device:
    """This machine with that many threads: the stored profile where there is one, its rates in
    proportion where it knows other thread counts only; else a guess that the fit will correct."""
    try:
        profile = load_profile()
    except ConfigError:
        return _guess(threads)
    measured = profile.measured
    known = int(measured.get("threads", threads))
    if known == threads:
        return profile
    alone = measured.get("read", {}).get(str(threads))
    share = min(1.0, threads / known)
    return replace(
        profile,
        bandwidth=alone[max(alone, key=int)] if alone else profile.bandwidth * share**0.5,
        rates={
            name: measured.get("rates", {}).get(name, {}).get(str(threads), rate * share)
            for name, rate in profile.rates.items()
        },
    )


def _guess(threads: int) -> Device:
    return Device(
        name=LOCAL,
        title=f"this machine, {threads} threads, not calibrated",
        kind="cpu",
        memory=float(total_memory()),
        bandwidth=_GUESS_READ * threads**0.5,
        rates={name: rate * threads for name, rate in _GUESS_RATES.items()},
        source="a guess; `headrace calibrate` measures",
        compute_share=KERNEL_SHARE,
        step_overhead=300e-6,
        overlap=0.0,
    )


def engine_estimator(
    program: Program, layout: KVLayout, weights: Mapping[str, Weight], threads: int
) -> StepEstimator:
    """The estimator of an engine that loads these weights and runs that many threads. Hand it to
    the scheduler, and `observe(plan, seconds)` what each step took."""
    model = compile_model(
        program,
        layout,
        {name: float(weight.nbytes) for name, weight in weights.items()},
        local_device(threads),
        {name: weight.formats for name, weight in weights.items()},
    )
    return StepEstimator(model)
