"""Findings: each appears where its cause is, and not where it is not."""

from dataclasses import replace

import pytest

from headrace.cost.capacity import Promise, Traffic
from headrace.cost.catalog import Precision, find_model
from headrace.cost.findings import Running, findings
from headrace.cost.hardware import find_device

DEVICE = find_device("ryzen-7950x")
TRAFFIC = Traffic(prompt=300, output=100)
PROMISE = Promise(ttft=1.0, tpot=0.05)


@pytest.fixture(scope="module")
def healthy() -> Running:
    steps = find_model("smollm2-135m-bf16", Precision(weights="int4")).on(DEVICE)
    return Running(steps, 32, 512, 512, 100_000, True)


def said(running: Running, promise: Promise = PROMISE) -> str:
    return "; ".join(f"{one.what}: {one.advice}" for one in findings(running, TRAFFIC, promise))


def test_a_healthy_set_up_has_none(healthy: Running) -> None:
    assert said(healthy) == ""


def test_each_cause_is_named_with_what_to_do(healthy: Running) -> None:
    wide = find_model("smollm2-135m-bf16").on(DEVICE)
    cases = {
        "batch cap": (replace(healthy, sequences=256), Promise(tpot=0.012)),
        "not even for one": (healthy, Promise(tpot=1e-5)),
        "stall": (replace(healthy, mixed_tokens=8192), PROMISE),
        "promise on TTFT": (healthy, Promise(ttft=0.001)),
        "KV cache holds fewer": (replace(healthy, kv_tokens=4000), PROMISE),
        "more bits": (replace(healthy, steps=wide, quantized=healthy.steps), PROMISE),
        "prefix caching is off": (replace(healthy, prefix_caching=False, shared=200), PROMISE),
    }
    for words, (running, promise) in cases.items():
        assert words in said(running, promise), words


def test_the_advised_cap_keeps_the_promise_and_one_more_does_not(healthy: Running) -> None:
    promise = Promise(tpot=0.012)
    found = findings(replace(healthy, sequences=256), TRAFFIC, promise)
    finding = next(one for one in found if "batch cap" in one.what)
    cap = int(finding.advice.split()[-1])
    context = TRAFFIC.context
    assert healthy.steps.seconds([context] * cap, [1] * cap) <= 0.012
    assert healthy.steps.seconds([context] * (cap + 1), [1] * (cap + 1)) > 0.012


def test_gains_come_in_order_after_what_is_broken(healthy: Running) -> None:
    wide = find_model("smollm2-135m-bf16").on(DEVICE)
    running = replace(
        healthy, steps=wide, quantized=healthy.steps, kv_tokens=4000, prefix_caching=False,
        shared=250,
    )  # fmt: skip
    gains = [one.gain for one in findings(running, TRAFFIC, PROMISE)]
    assert gains[0] is None
    rest = [gain for gain in gains if gain is not None]
    assert len(rest) == 2
    assert rest == sorted(rest, reverse=True)
