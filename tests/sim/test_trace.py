"""A recorded run replays to the same plans, all of them; a changed one does not."""

from pathlib import Path
from random import Random

import msgspec
import pytest

from headrace import trace
from headrace.core.estimate import LinearEstimator
from headrace.core.plan import Estimator, Event, Group, Knobs, PoolConfig, Refused, Request
from headrace.cost.catalog import find_model
from headrace.cost.estimator import StepEstimator
from headrace.cost.hardware import find_device
from headrace.errors import ConfigError
from headrace.trace import RecordingScheduler, TraceWriter

POOL = PoolConfig(44, 16, (Group(),), 512, 16)
KNOBS = Knobs(max_sequences=12, max_tokens=96, chunk=64, max_logits=24, max_waiting=40)


def record(path: Path, estimator: Estimator | None, requests: int, seed: int = 0) -> int:
    """A live run in small: chunked prompts, shared prefixes, n > 1, preemption, aborts, stop
    strings, failed steps, changing knobs and coefficients. Returns the number of preemptions."""
    draw = Random(seed)
    heads = [tuple(range(i * 1000, i * 1000 + 70)) for i in range(3)]
    now, submitted = 0.0, 0
    with TraceWriter(path) as writer:
        scheduler = RecordingScheduler(POOL, KNOBS, estimator, writer)
        alive: dict[int, int] = {}
        while submitted < requests or scheduler.has_work:
            while submitted < requests and draw.random() < 0.5:
                head = draw.choice(heads)[: draw.randrange(0, 70)]
                tail = tuple(draw.randrange(5000) for _ in range(draw.randrange(1, 120)))
                n = draw.choice((1, 1, 1, 2, 3))
                try:
                    scheduler.add(Request(submitted, head + tail, draw.randrange(1, 60), n=n), now)
                    alive[submitted] = n
                except Refused:
                    pass
                submitted += 1
            if alive and draw.random() < 0.05:
                scheduler.abort(draw.choice(sorted(alive)), now)
            if alive and draw.random() < 0.05:
                scheduler.finish(draw.choice(sorted(alive)), 0, now)
            if draw.random() < 0.02:
                scheduler.set_knobs(
                    Knobs(12, draw.choice((64, 96)), draw.choice((32, 64)), 24, max_waiting=40)
                )
            plan = scheduler.step(now)
            seconds = draw.uniform(0.01, 0.03)
            now += seconds
            if plan is None:
                continue
            if draw.random() < 0.03:
                scheduler.failed(plan.id, now)
                continue
            if isinstance(estimator, StepEstimator):
                estimator.observe(plan, seconds)
            tokens = [(draw.randrange(5000),) for _ in range(len(plan.samples) // 2)]
            events: list[Event] = scheduler.done(plan.id, tokens, now)
            for event in events:
                if event.finish is not None and event.request in alive:
                    alive[event.request] -= 1
                    if not alive[event.request]:
                        del alive[event.request]
        return scheduler.stats().preemptions


def step_estimator() -> StepEstimator:
    return StepEstimator(find_model("smollm2-135m-bf16").on(find_device("ryzen-7950x")))


@pytest.mark.parametrize("kind", ["none", "linear", "fitted"])
def test_replay_makes_the_same_plans(tmp_path: Path, kind: str) -> None:
    estimator: Estimator | None = None
    if kind == "linear":
        estimator = LinearEstimator(0.001, 1e-5, 1e-8)
    elif kind == "fitted":
        estimator = step_estimator()
    path = tmp_path / "trace.jsonl"
    preemptions = record(path, estimator, requests=500 if kind == "fitted" else 60)
    report = trace.replay(path)
    assert report.difference is None
    assert report.identical
    assert report.plans > 50
    assert report.requests == (500 if kind == "fitted" else 60)
    assert not report.cut
    if kind == "fitted":
        assert preemptions > 0
        assert report.predicted > 0
        text = path.read_text()
        for word in ("add", "abort", "finish", "knobs", "coefficients", "failed", "done"):
            assert f'["{word}"' in text


def test_a_changed_trace_is_told_from_the_original(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    record(path, step_estimator(), requests=60)
    lines = path.read_bytes().splitlines(keepends=True)
    adds = [i for i, line in enumerate(lines) if line.startswith(b'["add"')]
    missing = tmp_path / "missing.jsonl"
    missing.write_bytes(b"".join(lines[: adds[5]] + lines[adds[5] + 1 :]))
    with_difference = trace.replay(missing)
    assert not with_difference.identical
    assert with_difference.difference is not None
    assert with_difference.difference.startswith("line ")
    steps = [
        i for i, line in enumerate(lines) if line.startswith(b'["step"') and b"null" not in line
    ]
    plan = msgspec.json.decode(lines[steps[7]])
    plan[2]["counts"][0] += 1
    lines[steps[7]] = msgspec.json.encode(plan) + b"\n"
    path.write_bytes(b"".join(lines))
    found = trace.replay(path).difference
    assert found is not None
    assert f"plan {plan[2]['id']}: counts[0]" in found


def test_a_cut_trace_replays_up_to_the_cut(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    record(path, None, requests=30)
    whole = trace.replay(path)
    path.write_bytes(path.read_bytes()[:-20])
    report = trace.replay(path)
    assert report.cut
    assert report.identical
    assert report.steps >= whole.steps - 1


def test_other_files_and_versions_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    for content, message in (
        (b"hello\n", "is not a trace"),
        (b"[]\n", "not a trace of headrace"),
        (b'{"trace": "headrace", "version": 99}\n', "version 99"),
        (b'{"trace": "headrace", "version": 3, "estimator": null}\n', "header is damaged"),
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            trace.replay(path)
    record(path, None, requests=3)
    text = path.read_bytes()
    path.write_bytes(text + b'["dance"]\n')
    with pytest.raises(ConfigError, match="dance"):
        trace.replay(path)
    path.write_bytes(text + b"{]\n")
    with pytest.raises(ConfigError, match="line"):
        trace.replay(path)
    with pytest.raises(ConfigError, match="cannot read"):
        trace.replay(tmp_path / "absent")
    with pytest.raises(ConfigError, match="cannot write"):
        TraceWriter(tmp_path / "no" / "folder")


def test_an_estimator_that_cannot_be_recorded_is_refused(tmp_path: Path) -> None:
    class Own(Estimator):
        pass

    with TraceWriter(tmp_path / "t") as writer, pytest.raises(ConfigError, match="Own"):
        RecordingScheduler(POOL, KNOBS, Own(), writer)
