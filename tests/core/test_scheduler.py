"""The scheduler's promises: progress, fairness, stops, forks, scores, failure, refusal."""

import itertools
from dataclasses import replace

import pytest

from headrace.core.estimate import LinearEstimator, pairs
from headrace.core.plan import Event, Group, Knobs, PoolConfig, Refused, Request, StepPlan
from headrace.core.scheduler import Scheduler
from tests.core.machine import Machine, solo


def machine(
    pages: int = 1000, positions: int = 512, slots: int = 16, size: int = 16, **knobs: object
) -> Machine:
    pool = PoolConfig(pages, size, (Group(),), positions, slots)
    return Machine(pool, Knobs(max_sequences=slots, **knobs), vocabulary=97)  # type: ignore[arg-type]


# Capacity


def test_prompt_larger_than_the_pool():
    """B028: a pool that cannot hold the context is refused at start, a prompt beyond the context
    at once; the next request is served, and one that grows to the very end finishes."""
    with pytest.raises(ValueError, match="512 tokens needs 32 pages of KV, the pool has 16"):
        machine(pages=16)
    engine = machine(pages=16, positions=256)
    assert not engine.add(Request(1, tuple(range(300)), 10))
    assert engine.add(Request(2, tuple(range(10)), 246))
    assert engine.add(Request(3, tuple(range(10)), 10))
    engine.run()
    assert engine.finished == {(2, 0): "length", (3, 0): "length"}
    assert len(engine.outputs[2, 0]) == 246


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("caching", [True, False])
def test_preemption_changes_nothing(n, caching):
    """B029: requests that cannot all stay resident yield what they yield alone, once."""
    pool = PoolConfig(9 * n, 16, (Group(),), 144, 16, prefix_caching=caching)
    engine = Machine(pool, Knobs(max_sequences=16, watermark=0.0), vocabulary=97)
    for identity in range(4):
        engine.add(Request(identity, tuple(range(identity, identity + 30)), 100, n=n))
    engine.run()
    stats = engine.scheduler.stats()
    assert stats.preemptions > 0
    assert stats.recomputed_tokens > 0
    assert len(engine.outputs) == 4 * n
    for (identity, choice), output in engine.outputs.items():
        assert output == solo(engine.requests[identity], choice, 97)
        assert len(output) == 100
    assert stats.pages_used == 0


def test_first_is_never_preempted():
    engine = machine(pages=14, positions=200, watermark=0.0)
    for identity in range(5):
        engine.add(Request(identity, tuple(range(identity, identity + 20)), 180))
    while engine.scheduler.has_work:
        engine.step()
        engine.done()
        living = [i for i in range(5) if (i, 0) not in engine.finished]
        if living:
            assert engine.scheduler.usage(living[0]).preemptions <= living[0]
        if 0 in living:
            assert engine.scheduler.usage(0).preemptions == 0
    assert engine.scheduler.stats().preemptions > 0


def test_admission_leaves_the_watermark():
    engine = machine(pages=100, positions=512, watermark=0.5, max_tokens=4096, chunk=4096)
    for identity in range(10):
        engine.add(Request(identity, tuple(range(identity * 100, identity * 100 + 160)), 2))
    engine.step()
    assert engine.scheduler.stats().running == 5


def test_admission_alone_ignores_the_watermark():
    engine = machine(pages=32, watermark=0.9)
    engine.add(Request(1, tuple(range(500)), 12))
    engine.run()
    assert engine.finished == {(1, 0): "length"}


# Fairness


def test_decode_and_prefill_do_not_starve_each_other():
    """B035: a stream gets a token in every step while long prompts keep arriving, and each of the
    prompts is computed at the pace of the budget."""
    engine = machine(pages=5000, positions=1100, max_tokens=128, chunk=128)
    engine.add(Request(0, (1, 2, 3), 150))
    engine.step()
    engine.done()
    waiting = {}
    for step in itertools.count():
        if step % 10 == 0:
            engine.add(Request(step + 1, tuple(range(step, step + 1000)), 1))
            waiting[step + 1] = step
        engine.step()
        events = engine.done()
        if (0, 0) in engine.finished:
            break
        assert sum(event.sequence == 0 for event in events) == 1
        for event in events:
            if event.finish:
                assert step - waiting.pop(event.request) <= 12
    assert len(waiting) <= 2


@pytest.mark.parametrize("mixed", [0, 1, 24, 500])
def test_prompts_beside_decodes_take_what_the_knob_allows(mixed):
    """Full steps while nobody decodes, at most `mixed_prefill` prompt tokens beside decodes."""
    engine = machine(pages=5000, positions=1100, max_tokens=128, chunk=128, mixed_prefill=mixed)
    engine.add(Request(0, tuple(range(300)), 20))
    assert [sum(engine.step().counts), engine.done()][0] == 128
    engine.add(Request(1, tuple(range(500, 800)), 2))
    engine.add(Request(2, tuple(range(800, 810)), 2))
    allowed = min(mixed or 128, 127)
    seen = set()
    while (0, 0) not in engine.finished:
        plan = engine.step()
        decoding = [s for s, n in zip(plan.sequences, plan.starts, strict=True) if n >= 300]
        prompts = sum(plan.counts) - len(decoding)
        assert prompts <= (allowed if decoding else 128)
        seen.add(prompts if decoding else 0)
        engine.done()
    assert allowed in seen
    engine.run()


@pytest.mark.parametrize(("budget", "rows"), [(4, 64), (64, 4), (1, 1), (3, 2)])
def test_small_steps_are_shared(budget, rows):
    """More sequences than a step has tokens or rows: all advance, and so does a prompt."""
    engine = machine(max_tokens=budget, max_logits=rows)
    for identity in range(8):
        engine.add(Request(identity, (identity,), 60))
    for _ in range(20):
        engine.step()
        engine.done()
    engine.add(Request(100, tuple(range(200, 240)), 1, priority=-1))
    running = [s.id for s in engine.scheduler.population.running.values()]
    before = {s: len(engine.known(s)) for s in running}
    for _ in range(48):
        engine.step()
        engine.done()
    gains = [len(engine.known(s)) - before[s] for s in running]
    assert min(gains) >= min(budget, rows) * 48 // len(running) // 4
    engine.run()


def test_priority_goes_first():
    pool = PoolConfig(1000, 16, (Group(),), 128, 1)
    order = {}
    for policy in ("fcfs", "priority"):
        engine = Machine(pool, Knobs(max_sequences=1, policy=policy), vocabulary=97)
        for identity, priority in enumerate((5, 1, 3, 1)):
            engine.add(Request(identity, (1, 2), 2, priority=priority))
        engine.run()
        order[policy] = [request for request, _ in engine.finished]
    assert order == {"fcfs": [0, 1, 2, 3], "priority": [1, 3, 2, 0]}


def test_policy_changes_while_requests_wait():
    engine = machine(slots=1)
    for identity, priority in enumerate((5, 3, 1)):
        engine.add(Request(identity, (1, 2), 2, priority=priority))
    engine.step()
    engine.done()
    engine.set_knobs(replace(engine.knobs, policy="priority"))
    engine.run()
    assert [request for request, _ in engine.finished] == [0, 2, 1]


# Refusal


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"prompt": ()}, "prompt"),
        ({"prompt": tuple(range(500)), "max_tokens": 13}, "prompt"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"n": 2, "max_tokens": 0}, "n"),
        ({"score_from": 0}, "score_from"),
    ],
)
def test_refused(change, field):
    engine = machine()
    request = replace(Request(1, (1, 2, 3), 5), **change)
    with pytest.raises(Refused) as refused:
        engine.scheduler.add(request, 0.0)
    assert refused.value.field == field
    assert not refused.value.overload
    assert refused.value.message == str(refused.value)
    assert engine.scheduler.idle


@pytest.mark.parametrize("length", [509, 510, 511, 512])
def test_context_border(length):
    engine = machine(pages=32)
    room = 512 - length
    assert engine.add(Request(1, tuple(range(length)), room))
    assert not engine.add(Request(2, tuple(range(length)), room + 1))
    engine.run()
    assert engine.outputs == {(1, 0): solo(engine.requests[1], 0, 97)}


def test_overload():
    engine = machine(slots=2, max_waiting=3)
    taken = [engine.add(Request(identity, (1, 2), 5)) for identity in range(7)]
    assert taken == [True] * 5 + [False] * 2
    with pytest.raises(Refused, match="5 requests wait, the limit is 3") as refused:
        engine.scheduler.add(Request(7, (1, 2), 5), 0.0)
    assert refused.value.overload
    engine.step()
    engine.done()
    assert not engine.add(Request(8, (1, 2), 5))
    engine.abort(4)
    assert engine.add(Request(9, (1, 2), 5))
    engine.run()


@pytest.mark.parametrize(
    "knobs",
    [{"max_tokens": 0}, {"chunk": 0}, {"max_sequences": 0}, {"max_logits": 0}, {"watermark": 1.0},
     {"max_waiting": -1}],
)  # fmt: skip
def test_bad_knobs(knobs):
    engine = machine()
    with pytest.raises(ValueError, match=next(iter(knobs))):
        engine.scheduler.set_knobs(replace(Knobs(), **knobs))


def test_misuse():
    engine = machine()
    engine.add(Request(1, (1, 2), 5))
    with pytest.raises(ValueError, match="request 1 exists"):
        engine.scheduler.add(Request(1, (1, 2), 5), 0.0)
    with pytest.raises(ValueError, match="plan 0 is not in flight"):
        engine.scheduler.done(0, [], 0.0)
    plan = engine.step()
    assert plan is not None
    assert engine.scheduler.step(0.0) is None
    with pytest.raises(ValueError, match="has 1 samples, got 0"):
        engine.scheduler.done(plan.id, [], 0.0)
    with pytest.raises(ValueError, match="in flight"):
        engine.scheduler.fork(0)
    with pytest.raises(ValueError, match="in flight"):
        engine.scheduler.extend(0, [1])
    engine.done()
    engine.run()
    with pytest.raises(ValueError, match="ended"):
        engine.scheduler.extend(0, [1])
    assert engine.scheduler.abort(99, 0.0) == engine.scheduler.finish(99, 0, 0.0) == []


# Ends


def one_step(yielded: list[int], **fields: object) -> list[Event]:
    """The events of a sample that yields several tokens at once."""
    scheduler = Scheduler(PoolConfig(100, 16, (Group(),), 200, 2), Knobs())
    scheduler.add(Request(1, (5, 6), **fields), 0.0)  # type: ignore[arg-type]
    plan = scheduler.step(0.0)
    assert plan is not None
    events = scheduler.done(plan.id, [yielded], 0.0)
    scheduler.check()
    return events


@pytest.mark.parametrize("stop", range(1, 8))
@pytest.mark.parametrize("cap", range(1, 8))
def test_stop_before_length(stop, cap):
    """B052: of six tokens the one at place `stop` stops; the cap is `cap`."""
    yielded = [9 if place == stop else 8 for place in range(1, 7)]
    (event,) = one_step(yielded, max_tokens=cap, stop_tokens=frozenset({9}))
    kept = min(stop, cap, 6)
    assert event.tokens == tuple(yielded[:kept])
    if kept == stop:
        assert (event.finish, event.stop_token) == ("stop", 9)
    else:
        assert (event.finish, event.stop_token) == ("length" if kept == cap else None, None)


@pytest.mark.parametrize("least", range(6))
def test_min_tokens(least):
    (event,) = one_step([9, 9, 9, 9], max_tokens=4, min_tokens=least, stop_tokens=frozenset({9}))
    assert len(event.tokens) == max(1, min(least, 4))
    assert event.finish == ("length" if least > 4 else "stop")


def test_state_outlives_its_finish():
    engine = machine()
    engine.add(Request(1, (1, 2), 1))
    engine.step()
    (event,) = engine.done()
    assert engine.scheduler.sequence(event.sequence).tokens[:2] == [1, 2]
    assert engine.scheduler.usage(1).cached_tokens == 0
    assert engine.scheduler.step(0.0) is None
    with pytest.raises(KeyError):
        engine.scheduler.usage(1)


@pytest.mark.parametrize("moment", ["waiting", "in flight", "between", "unborn"])
@pytest.mark.parametrize("n", [1, 3])
def test_abort(moment, n):
    engine = machine(max_tokens=32, chunk=32)
    engine.add(Request(1, tuple(range(40)), 50, n=n))
    steps = {"waiting": 0, "unborn": 1}.get(moment, 4)
    for _ in range(steps):
        engine.step()
        engine.done()
    if moment == "in flight":
        engine.step()
    events = engine.abort(1)
    assert [event.choice for event in events] == list(range(n))
    assert {event.finish for event in events} == {"abort"}
    if moment == "in flight":
        assert engine.scheduler.stats().pages_used > 0
        assert engine.done() == []
    engine.rest()
    assert engine.abort(1) == []


def test_finish_ends_one_choice():
    engine = machine()
    engine.add(Request(1, (1, 2, 3), 20, n=3))
    for _ in range(3):
        engine.step()
        engine.done()
    (event,) = engine.finish(1, 1)
    assert (event.choice, event.finish, event.stop_token, event.tokens) == (1, "stop", None, ())
    assert engine.finish(1, 1) == []
    engine.run()
    assert engine.finished == {(1, 0): "length", (1, 1): "stop", (1, 2): "length"}


# Forks


def test_choices_share_the_prompt():
    """n sequences: one row yields n first tokens; the prompt is computed and held once."""
    engine = machine(pages=100, max_tokens=600, chunk=600)
    engine.add(Request(1, tuple(range(100)), 10, n=4))
    plan = engine.step()
    assert plan is not None
    assert (plan.num_logits, plan.samples) == (1, [0, 0, 0, 1, 0, 2, 0, 3])
    assert sorted(event.choice for event in engine.done()) == [0, 1, 2, 3]
    assert engine.scheduler.stats().pages_used == 7
    plan = engine.step()
    assert plan is not None
    assert len(plan.tokens) == 4
    assert [(copy.first, copy.tokens) for copy in plan.copies] == [(0, 4)] * 3
    assert engine.scheduler.stats().pages_used == 10
    engine.done()
    engine.run()
    assert engine.scheduler.stats().computed_tokens == 100 + 4 * 9


def test_choices_without_slots_wait():
    engine = machine(slots=4, max_tokens=64)
    engine.set_knobs(replace(engine.knobs, max_sequences=2))
    engine.add(Request(1, tuple(range(50)), 20, n=4))
    engine.add(Request(2, tuple(range(50)), 20))
    engine.run()
    assert len(engine.outputs) == 5
    assert engine.scheduler.stats().computed_tokens <= 50 + 5 * 19 + 3 * 16 + 16


@pytest.mark.parametrize("ended", [[0], [0, 1], [2, 0], [1], [1, 0, 2]])
@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("started", [0, 1, 2])
def test_carrier_ends_before_the_choices_are_born(ended, in_flight, started):
    engine = machine(max_tokens=16, chunk=16)
    engine.add(Request(1, tuple(range(48)), 5, n=3))
    for _ in range(started):
        engine.step()
        engine.done()
    if in_flight:
        engine.step()
    for choice in ended:
        engine.finish(1, choice)
    if in_flight:
        engine.done()
    engine.touched.clear()
    engine.run()
    left = {choice for choice in range(3) if choice not in ended}
    assert {choice for (_, choice), why in engine.finished.items() if why == "length"} == left


def test_beams():
    """Fork, extend and drop between steps: beam search as an engine would run it, against a plain
    beam search on lists."""
    width, length = 3, 8

    def scores(tokens: list[int]) -> list[tuple[float, int]]:
        return [
            (((sum(tokens) * 31 + 7 * token * len(tokens)) % 101) / 101, token)
            for token in (3, 4, 5)
        ]

    engine = machine(pages=40, positions=64, size=4)
    prompt = (1, 2, 3, 4, 5)
    engine.add(Request(1, prompt, length))
    beams = {0: 0.0}
    plain = [(0.0, list(prompt))]
    for _ in range(length):
        plan = engine.step()
        assert plan is not None
        assert sorted(plan.samples[1::2]) == sorted(beams)
        tokens = {s: list(engine.scheduler.sequence(s).tokens) for s in beams}
        engine.done(lambda _: 0)
        options = [(total + s, t, b) for b, total in beams.items() for s, t in scores(tokens[b])]
        best = sorted(options, key=lambda option: (-option[0], tokens[option[2]], option[1]))[
            :width
        ]
        beams = choose(engine, set(beams), best)
        grown = [(total + s, [*seq, t]) for total, seq in plain for s, t in scores(seq)]
        plain = sorted(grown, key=lambda option: (-option[0], option[1]))[:width]
    finished = [tuple(engine.known(beam)) for beam in beams]
    assert sorted(finished) == sorted(tuple(seq) for _, seq in plain)
    engine.scheduler.step(0.0)
    engine.rest()


def choose(
    engine: Machine, alive: set[int], best: list[tuple[float, int, int]]
) -> dict[int, float]:
    """Turn the best (score, token, parent) into sequences; the rest is dropped."""
    used: set[int] = set()
    chosen = []
    for total, token, parent in best:
        child = engine.fork(parent) if parent in used else parent
        used.add(parent)
        chosen.append((total, token, child))
    for sequence in alive - used:
        engine.drop(sequence)
    for _, token, sequence in chosen:
        engine.extend(sequence, [token])
    return {sequence: total for total, _, sequence in chosen}


def test_extend_computes_several_tokens_in_one_step():
    engine = machine()
    engine.add(Request(1, (1, 2, 3), 10))
    engine.step()
    engine.done()
    (event,) = engine.extend(0, [7, 8, 9])
    assert (event.tokens, event.finish) == ((7, 8, 9), None)
    plan = engine.step()
    assert plan is not None
    assert (plan.starts, plan.counts, plan.logits) == ([3], [4], [1])
    engine.done()
    (event,) = engine.extend(0, [1] * 9)
    assert (len(event.tokens), event.finish) == (5, "length")


# Scores


@pytest.mark.parametrize("rows", [1, 3, 50])
@pytest.mark.parametrize("chunk", [5, 64])
@pytest.mark.parametrize("tokens", [0, 4])
def test_prompt_scores(rows, chunk, tokens):
    """Every position from score_from scores once, in slices that fit the rows of a step; nothing
    past the first is read from the cache."""
    engine = machine(max_logits=rows, chunk=chunk)
    prompt = tuple(range(50))
    engine.add(Request(1, prompt, 3))
    engine.run()
    engine.add(Request(2, prompt, tokens, score_from=20))
    engine.add(Request(3, prompt, 3))
    engine.step()
    assert engine.scheduler.usage(2).cached_tokens <= 19
    engine.done()
    engine.run()
    assert engine.scored[2] == list(range(20, 50))
    assert engine.finished[2, 0] == "length"
    assert len(engine.outputs[2, 0]) == tokens


@pytest.mark.parametrize("prompt", [(1,), tuple(range(30))])
@pytest.mark.parametrize("score", [None, 1, 30, 99])
def test_nothing_to_sample(prompt, score):
    engine = machine()
    engine.add(Request(1, prompt, 0, score_from=score))
    engine.run()
    assert engine.outputs == {(1, 0): []}
    assert engine.finished == {(1, 0): "length"}


# Failure and estimates


@pytest.mark.parametrize("when", range(8))
def test_failed_plan_is_retried(when):
    """Whatever step fails, all tokens come out as if it had not; dependants go back too."""
    engine = machine(max_tokens=64, chunk=20)
    for identity in range(4):
        engine.add(Request(identity, (*range(60), identity), 6, n=1 + identity % 2))
    for _ in range(when):
        engine.step()
        engine.done()
    plan = engine.step()
    assert plan is not None
    engine.failed()
    again = engine.step()
    assert again is not None
    assert again.id > plan.id
    engine.done()
    engine.run()
    assert len(engine.outputs) == 6


def test_estimate():
    plan = StepPlan(0, starts=[10, 0], counts=[1, 3], tokens=[1, 2, 3, 4], num_logits=2)
    brute = [query for start, n in ((10, 1), (0, 3)) for query in range(start, start + n)]
    assert pairs(plan) == sum(position + 1 for position in brute)
    assert LinearEstimator(1.0, 10.0, 100.0, 1000.0).seconds(plan) == 1 + 40 + 1700 + 2000
    scheduler = Scheduler(PoolConfig(9, 16, (Group(),), 99, 1), Knobs(), LinearEstimator(1.0, 2.0))
    scheduler.add(Request(1, (1, 2, 3), 1), 0.0)
    first = scheduler.step(0.0)
    assert first is not None
    assert first.seconds == 7.0
