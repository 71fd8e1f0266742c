"""The engine on a tiny exact model: what comes out depends on the request alone."""

import random

import pytest

from headrace.engine.messages import SamplingSpec
from headrace.errors import OverloadError, RequestError
from tests.engine.conftest import EngineMaker, drain, submit, tokens

SEEDED = SamplingSpec(temperature=0.9, top_p=0.95, seed=77)


def prompts(count: int, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(90) for _ in range(rng.randint(1, 60))] for _ in range(count)]


def test_alone_together_chunked_and_cached_give_the_same(make: EngineMaker) -> None:
    texts = prompts(6)
    alone = {}
    engine = make(enable_prefix_caching=False)
    for i, text in enumerate(texts):
        for name, sampling in (("g", SamplingSpec(temperature=0.0)), ("s", SEEDED)):
            engine.submit(submit(f"{name}{i}", text, sampling=sampling, n=2))
            alone |= {key: tokens(found) for key, found in drain(engine).items()}
    for options in (
        {},
        {"max_num_batched_tokens": 16},
        {"block_size": 32, "max_num_seqs": 3},
        {"kv_cache_memory_bytes": None, "max_num_batched_tokens": 24, "max_num_seqs": 5},
    ):
        engine = make(**options)
        for _ in range(2):  # cold, then warm
            for i, text in enumerate(texts):
                engine.submit(submit(f"g{i}", text, n=2))
                engine.submit(submit(f"s{i}", text, sampling=SEEDED, n=2))
            found = {key: tokens(outputs) for key, outputs in drain(engine).items()}
            assert found == alone


def test_preemption_changes_nothing(make: EngineMaker) -> None:
    texts = [text[:30] + [5] * 10 for text in prompts(5)]
    roomy = make()
    for i, text in enumerate(texts):
        roomy.submit(submit(f"r{i}", text, 60, n=1 + i % 3, sampling=SEEDED))
    expected = drain(roomy)
    layout = roomy.loaded.plan.layout
    tight = make(kv_cache_memory_bytes=layout.page_bytes * 12)
    for i, text in enumerate(texts):
        tight.submit(submit(f"r{i}", text, 60, n=1 + i % 3, sampling=SEEDED))
    got = drain(tight)
    assert tight.scheduler.stats().preemptions > 0
    assert {k: tokens(v) for k, v in got.items()} == {k: tokens(v) for k, v in expected.items()}
    assert all(len(tokens(outputs)) == 60 for outputs in got.values())


def test_logprobs_cold_and_warm_agree(make: EngineMaker) -> None:
    engine = make()
    sampling = SamplingSpec(temperature=0.0, logprobs=3, prompt_logprobs=2)
    text = prompts(1, seed=9)[0][:16] * 3 + [1, 2, 3]
    results = []
    for name in ("cold", "warm"):
        engine.submit(submit(name, text, 5, sampling=sampling))
        (outputs,) = drain(engine).values()
        results.append(outputs)
        assert outputs[0].prompt_logprobs is not None
        assert len(outputs[0].prompt_logprobs) == len(text)
        assert outputs[0].prompt_logprobs[0] is None
        assert [e.token for e in outputs[0].prompt_logprobs if e] == text[1:]
        entries = [entry for output in outputs for entry in output.logprobs or ()]
        assert [entry.token for entry in entries] == tokens(outputs)
        assert all(entry.rank == 1 and len(entry.top) == 3 for entry in entries)
        assert outputs[0].cached_tokens == 0  # scored rows are computed, not read
    cold, warm = results
    assert cold[0].prompt_logprobs == warm[0].prompt_logprobs
    assert [o.logprobs for o in cold] == [o.logprobs for o in warm]


def test_scoring_alone_yields_no_token(make: EngineMaker) -> None:
    engine = make()
    sampling = SamplingSpec(prompt_logprobs=0)
    engine.submit(submit("score", list(range(40)), 0, sampling=sampling))
    (outputs,) = drain(engine).values()
    assert tokens(outputs) == []
    assert outputs[-1].finish == "length"
    assert outputs[0].prompt_logprobs is not None
    assert len(outputs[0].prompt_logprobs) == 40


def test_penalties_bias_and_bans_reach_the_sampler(make: EngineMaker) -> None:
    engine = make()
    text = [7, 8, 9]
    engine.submit(submit("plain", text, 12))
    plain = tokens(next(iter(drain(engine).values())))
    greedy = SamplingSpec(temperature=0.0)
    for name, changed in {
        "banned": replace_spec(greedy, banned=(plain[0],)),
        "bias": replace_spec(greedy, logit_bias={plain[0]: -100.0}),
        "bad": replace_spec(greedy, bad_words=((plain[0],),)),
        "min": replace_spec(greedy, banned_until=((plain[0],), 12)),
    }.items():
        engine.submit(submit(name, text, 12, sampling=changed))
        assert plain[0] not in tokens(next(iter(drain(engine).values()))), name
    engine.submit(submit("once", text, 30, sampling=replace_spec(greedy, presence_penalty=1e9)))
    once = tokens(next(iter(drain(engine).values())))
    assert len(set(once)) == len(once)
    engine.submit(submit("few", text, 20, sampling=replace_spec(greedy, allowed=(3, 4))))
    assert set(tokens(next(iter(drain(engine).values())))) <= {3, 4}


def replace_spec(spec: SamplingSpec, **changes: object) -> SamplingSpec:
    import msgspec

    return msgspec.structs.replace(spec, **changes)  # type: ignore[arg-type]


def test_stop_tokens_min_tokens_and_length(make: EngineMaker) -> None:
    engine = make()
    engine.submit(submit("plain", [4, 5], 20))
    plain = tokens(next(iter(drain(engine).values())))
    stop = plain[3]
    first = plain.index(stop)
    engine.submit(submit("stop", [4, 5], 20, stop_tokens=(stop,)))
    (outputs,) = drain(engine).values()
    assert tokens(outputs) == plain[: first + 1]
    assert (outputs[-1].finish, outputs[-1].stop_token) == ("stop", stop)


def test_abort_at_any_moment_frees_everything(make: EngineMaker) -> None:
    rng = random.Random(4)
    engine = make(max_num_batched_tokens=16)
    for round_ in range(30):
        engine.submit(submit(f"r{round_}", prompts(1, round_)[0], 20, n=rng.randint(1, 3)))
        for _ in range(rng.randint(0, 4)):
            engine.step()
        if rng.random() < 0.7:
            engine.abort(f"r{rng.randint(0, round_)}")
        if rng.random() < 0.2:
            engine.finish(f"r{round_}", 0)
        engine.scheduler.check()
    drain(engine)


def test_a_failing_step_ends_its_requests_and_the_engine_goes_on(
    make: EngineMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make()
    engine.submit(submit("a", [1, 2, 3]))
    executable = engine.loaded.executable
    run = executable.run

    def broken(part: str = "all") -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(executable, "run", broken)
    with pytest.raises(RuntimeError):
        engine.step()
    engine.fail_all("the engine failed in a step")
    (outputs,) = drain(engine).values()
    assert outputs[-1].finish == "error"
    monkeypatch.setattr(executable, "run", run)
    engine.submit(submit("b", [1, 2, 3]))
    assert len(tokens(next(iter(drain(engine).values())))) == 8


def test_refusals_keep_nothing(make: EngineMaker) -> None:
    engine = make(max_num_queued_reqs=1, max_num_seqs=1)
    with pytest.raises(RequestError, match="128"):
        engine.submit(submit("long", list(range(90)) * 2))
    engine.submit(submit("a", [1]))
    with pytest.raises(RequestError, match="in use"):
        engine.submit(submit("a", [1]))
    engine.step()
    engine.submit(submit("b", [1]))
    with pytest.raises(OverloadError):
        engine.submit(submit("c", [1]))
    drain(engine)


def test_observations_add_up(make: EngineMaker) -> None:
    engine = make()
    engine.submit(submit("a", [1, 2, 3], 5, n=2))
    seen = []
    while engine.has_work:
        outputs = engine.step()
        seen += outputs.finished if outputs else ()
    (observation,) = seen
    assert observation.generation_tokens == 10
    assert observation.prompt_tokens == 3
    assert min(observation.queue, observation.prefill, observation.decode) >= 0
