"""The sampler on a vocabulary of many blocks, against the reference's choice by choice."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.ops import reference_sample
from headrace.ops.batch import MAX_TOP_LOGPROBS, Limits, RaggedBatch
from headrace.ops.cpu import CpuBackend, CpuExecutable
from headrace.ops.program import ProgramBuilder
from tests.cpu.linears import LEVELS
from tests.ops.quantize import exact
from tests.ops.rig import layout

ROWS, VOCABULARY, POINTS = 8, 3001, 8

every_level = pytest.mark.parametrize("level", LEVELS)


def logits() -> np.ndarray:
    """Rows of logits: spread, sharp, flat, full of ties, and with values that are not finite."""
    rng = np.random.default_rng(4)
    rows = rng.standard_normal((ROWS, VOCABULARY)).astype(np.float32)
    rows[:4] *= np.array([[0.1], [1], [3], [12]], np.float32)
    rows[4] = np.round(rows[4] * 2)
    rows[5, 1:] = -np.inf
    rows[6, [3, 700, 2999]] = np.inf
    rows[7, 1::2] = -np.inf
    return rows


def executable(level: str, threads: int) -> CpuExecutable:
    """Row r of the hidden rows is the r-th unit vector, so that the logits come out exactly."""
    build = ProgramBuilder()
    hidden = build.embed("units", ROWS, ROWS)
    program = build.finish(hidden, build.logits(hidden, "columns", VOCABULARY))
    finite = np.nan_to_num(logits(), posinf=1e30, neginf=-1e30)
    weights = {"units": exact("units", np.eye(ROWS)), "columns": exact("columns", finite.T)}
    limits = Limits(ROWS, 1, ROWS, POINTS, 1, 1, 1, 16, VOCABULARY, threads)
    return CpuBackend(level, threads).load(program, weights, layout(), limits)


@st.composite
def points(draw: st.DrawFn) -> dict[str, object]:
    """One sample point, as values of the batch's arrays."""
    return {
        "sample_row": draw(st.integers(0, ROWS - 1)),
        "forced": draw(st.sampled_from([-1, -1, -1, 17])),
        "temperature": draw(st.sampled_from([0.0, 0.2, 0.8, 1.0, 3.0])),
        "top_k": draw(st.sampled_from([0, -1, 1, 7, 50, 2500, VOCABULARY + 1])),
        "top_p": draw(st.sampled_from([1.0, 1.0, 0.95, 0.4, 0.0, 0.9999])),
        "min_p": draw(st.sampled_from([0.0, 0.0, 0.03, 1.0])),
        "repetition": draw(st.sampled_from([1.0, 1.4])),
        "presence": draw(st.sampled_from([0.0, 0.7])),
        "frequency": draw(st.sampled_from([0.0, -0.3])),
        "seed": draw(st.integers(0, 2**64 - 1)),
        "choice": draw(st.integers(0, 3)),
        "sample_position": draw(st.integers(1, 9000)),
        "top_logprobs": draw(st.sampled_from([-1, 0, 5, MAX_TOP_LOGPROBS])),
        "mask_index": draw(st.sampled_from([-1, -1, 0, 1])),
    }


def fill(batch: RaggedBatch, chosen: list[dict[str, object]], seen: int, bias: int) -> None:
    rng = np.random.default_rng(seen)
    batch.num_tokens = batch.num_logits = ROWS
    batch.num_slices, batch.num_samples = 1, len(chosen)
    batch.token[:], batch.position[:], batch.slice_row[:2] = np.arange(ROWS), 0, (0, ROWS)
    batch.logits_row[:] = np.arange(ROWS)
    batch.masks[0, :] = rng.integers(0, 2**32, batch.masks.shape[1])
    batch.masks[1, :] = 0
    for i, point in enumerate(chosen):
        for name, value in point.items():
            getattr(batch, name)[i] = value
        for lists, count in (("penalty", seen), ("bias", bias)):
            start = getattr(batch, f"{lists}_start")
            start[i + 1] = start[i] + count
            where = slice(int(start[i]), int(start[i + 1]))
            getattr(batch, f"{lists}_token")[where] = rng.permutation(VOCABULARY)[:count]
            if lists == "bias":
                batch.bias_value[where] = rng.standard_normal(count)
            else:
                batch.penalty_count[where] = rng.integers(0, 3, count)


OUTPUTS = ("out_token", "out_logprob", "out_rank", "out_top_token", "out_top_logprob")


def outputs(batch: RaggedBatch) -> dict[str, np.ndarray]:
    """Copies of the outputs, which are then cleared."""
    found = {name: getattr(batch, name).copy() for name in OUTPUTS}
    for name in OUTPUTS:
        getattr(batch, name)[:] = 0
    return found


@every_level
def test_every_choice_is_the_references(level: str) -> None:
    alone, shared = executable(level, 1), executable(level, 2)

    @settings(max_examples=25)
    @given(
        st.lists(points(), min_size=1, max_size=POINTS),
        st.sampled_from([0, 40]),
        st.sampled_from([0, 3]),
    )
    def check(chosen: list[dict[str, object]], seen: int, bias: int) -> None:
        found = []
        for each in (alone, shared):
            each.batch.reserve(penalties=POINTS * 40, biases=POINTS * 3, masks=2)
            fill(each.batch, chosen, seen, bias)
            each.run()
            found.append(outputs(each.batch))
        reference_sample.sample(alone.read(each._program.logits), alone.batch)
        want = outputs(alone.batch)
        for name in OUTPUTS:
            assert found[0][name].tobytes() == found[1][name].tobytes(), name
            if name.endswith("logprob"):
                np.testing.assert_allclose(found[0][name], want[name], rtol=2e-6, atol=2e-6)
            else:
                np.testing.assert_array_equal(found[0][name], want[name])

    check()
    alone.close()
    shared.close()


@every_level
def test_samples_of_one_row_do_not_disturb_each_other(level: str) -> None:
    """A mask and penalties of one sample point leave the row as it is for the next."""
    each = executable(level, 1)
    plain: dict[str, object] = {"sample_row": 2, "temperature": 0.0, "top_logprobs": 5}
    changed = plain | {"mask_index": 1, "repetition": 2.0}
    each.batch.reserve(penalties=POINTS * 40, masks=2)
    fill(each.batch, [plain, changed, plain], 40, 0)
    each.batch.penalty_start[1:4] = (0, 40, 40)
    each.run()
    found = outputs(each.batch)
    assert found["out_token"][0] == found["out_token"][2] == logits()[2].argmax()
    assert found["out_top_token"][0, :5].tobytes() == found["out_top_token"][1, :5].tobytes()
    each.close()
