"""Beam search equals the one of `transformers`, and shares its KV."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from headrace.engine.beam import highest
from headrace.engine.messages import BeamSpec, Output, SamplingSpec
from headrace.errors import RequestError
from headrace.ops.batch import F32
from tests.engine.conftest import TINY, EngineMaker, drain, submit, tokens

CASES = json.loads((TINY.parent.parent / "beams.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['width']}x{c['length_penalty']}")
@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 5}],
    ids=["roomy", "tight"],
)
def test_equal_to_transformers(
    case: dict[str, object], options: dict[str, object], make: EngineMaker
) -> None:
    engine = make(**options)
    spec = BeamSpec(case["width"], case["length_penalty"], case["early_stopping"])  # type: ignore[arg-type]
    engine.submit(
        submit(
            "beams",
            case["prompt"],
            case["max_tokens"],
            n=case["width"],  # type: ignore[arg-type]
            stop_tokens=(case["stop"],),
            beam=spec,
        )
    )
    found = drain(engine)
    got = [tokens(found["beams", index]) for index in range(case["width"])]  # type: ignore[call-overload]
    assert got == case["sequences"]
    if case["scores"] is not None:
        scores = [
            (found["beams", index][-1].cumulative_logprob or 0)
            / len(got[index]) ** case["length_penalty"]  # type: ignore[operator]
            for index in range(case["width"])  # type: ignore[call-overload]
        ]
        assert scores == pytest.approx(case["scores"], abs=2e-4)


def test_beams_share_blocks(make: EngineMaker) -> None:
    engine = make()
    prompt = [*range(64), 3]
    engine.submit(submit("beams", prompt, 20, n=4, beam=BeamSpec(4)))
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, engine.scheduler.stats().pages_used)
    pages_alone = -(-(65 + 20) // 16)
    assert most < 4 * pages_alone - 3 * 3


def test_searches_wait_for_slots_and_never_for_each_other(make: EngineMaker) -> None:
    engine = make(max_num_seqs=5, max_num_batched_tokens=6)
    for index in range(4):
        engine.submit(submit(f"b{index}", [1, 2, index], 8, n=4, beam=BeamSpec(4)))
    engine.submit(submit("plain", [3, 4], 8))
    found = drain(engine)
    assert len(found) == 4 * 4 + 1
    with pytest.raises(RequestError, match="5 sequences"):
        engine.submit(submit("wide", [1], 8, n=6, beam=BeamSpec(6)))


def test_beams_beside_others_and_aborted(make: EngineMaker) -> None:
    engine = make()
    engine.submit(submit("b", [1, 2, 3], 10, n=3, beam=BeamSpec(3)))
    engine.submit(submit("plain", [1, 2, 3], 10, sampling=SamplingSpec(temperature=0.0)))
    early: list[Output] = []
    for _ in range(3):
        outputs = engine.step()
        early += outputs.outputs if outputs else ()
    engine.abort("b")
    found = drain(engine)
    assert {output.id for output in early} == {"plain"}
    assert len(tokens(early)) + len(tokens(found["plain", 0])) == 10


@given(
    arrays(np.float32, st.integers(1, 40), elements=st.sampled_from([-np.inf, -2, -1, -0.5, 0, 3])),
    st.integers(0, 50),
)
def test_the_highest_are_those_of_a_stable_sort(values: F32, count: int) -> None:
    assert highest(values, count) == np.argsort(-values, kind="stable")[:count].tolist()
