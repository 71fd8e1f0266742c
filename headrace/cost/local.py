"""The cost model of the engine on this machine, and what engines found out about it.

Once the machine is calibrated, an engine that ends leaves its fitted coefficients beside the
profile, in a file named by a digest of the very step model (program, weights, profile). The next
engine begins with them, and so do plans and simulations for `--hardware local`.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

from headrace.cost.calibrate import CPU_OVERLAP, KERNEL_SHARE, total_memory
from headrace.cost.estimator import StepEstimator
from headrace.cost.hardware import LOCAL, Device, load_profile, profile_path
from headrace.cost.roofline import TERMS, StepModel, compile_model
from headrace.errors import ConfigError
from headrace.ops.spec import KVLayout, Program
from headrace.ops.weights import Weight

_GUESS_READ = 10e9
GOOD_MAPE = 0.25
"""Mean relative error of the last steps up to which coefficients are worth handing on."""
_GUESS_RATES = {"int4": 250e9, "int8": 150e9, "f32": 50e9}


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
        overlap=CPU_OVERLAP,
    )


def engine_estimator(
    program: Program, layout: KVLayout, weights: Mapping[str, Weight], threads: int
) -> StepEstimator:
    """The estimator of an engine that loads these weights and runs that many threads. Hand it to
    the scheduler, and `observe(plan, seconds)` what each step took."""
    device = local_device(threads)
    model = compile_model(
        program,
        layout,
        {name: float(weight.nbytes) for name, weight in weights.items()},
        device,
        {name: weight.formats for name, weight in weights.items()},
    )
    return StepEstimator(recall(model) if device.measured else model)


def _fit_path(model: StepModel) -> Path:
    row = replace(model, fitted=None).to_dict()
    digest = blake2b(json.dumps(row, sort_keys=True).encode(), digest_size=10).hexdigest()
    return profile_path().parent / "fits" / f"{digest}.json"


def recall(model: StepModel) -> StepModel:
    """The model with the coefficients that an engine left for it, or as it is."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        row = json.loads(_fit_path(model).read_text("utf-8"))
        fitted = tuple(float(row[name]) for name in TERMS)
        if all(0.0 <= value < 1e6 for value in fitted):
            return replace(model, fitted=fitted)
    return model


def remember(estimator: StepEstimator, least: int = 256) -> bool:
    """Leave the coefficients of an engine that ends for the next; whether it was done. Not without
    a profile, nor after fewer than `least` steps, nor where they predict poorly (a machine busy
    with other work). A folder that cannot be written is no error."""
    if estimator.observations < least or not profile_path().exists():
        return False
    if estimator.errors.mape > GOOD_MAPE:
        return False
    path = _fit_path(estimator.model)
    row = dict(zip(TERMS, estimator.coefficients, strict=True))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(row), "utf-8")
        partial.replace(path)
    except OSError:
        return False
    return True
