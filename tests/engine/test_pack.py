"""Packing equals a plain loop over the plan."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.plan import Copy, StepPlan
from headrace.engine.messages import SamplingSpec, Submit
from headrace.engine.pack import Packer, biases, needs_lists
from headrace.engine.state import ParameterTable, RequestState, SequenceState
from headrace.ops.batch import Limits, RaggedBatch

LIMITS = Limits(
    max_tokens=64, max_slices=8, max_logits=32, max_samples=8, slots=8, max_blocks=10,
    num_pages=99, max_positions=160, vocabulary=100,
)  # fmt: skip


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    plan = StepPlan(id=1)
    for index in range(draw(st.integers(1, 8))):
        count = draw(st.one_of(st.just(1), st.integers(1, 8)))
        plan.sequences.append(100 + index)
        plan.slots.append(index)
        plan.starts.append(draw(st.integers(0, 100)))
        plan.counts.append(count)
        plan.logits.append(draw(st.integers(0, min(count, 3))))
        plan.tokens.extend(draw(st.lists(st.integers(0, 99), min_size=count, max_size=count)))
    plan.num_logits = sum(plan.logits)
    for entry in draw(st.lists(st.tuples(*[st.integers(0, top) for top in (7, 1, 9, 98)]))):
        plan.table.extend(entry)
    plan.copies = [Copy(1, 2, 0, 5)] * draw(st.integers(0, 30))
    return plan


@given(plans())
def test_rows_equal_a_plain_loop(plan: StepPlan) -> None:
    batch = RaggedBatch(LIMITS, table_rows=2)
    Packer(batch).pack(plan)
    positions, rows, wanted, table = [], [0], [], np.zeros_like(batch.table)
    for start, count, logits in zip(plan.starts, plan.counts, plan.logits, strict=True):
        positions += range(start, start + count)
        rows.append(rows[-1] + count)
        wanted += range(rows[-1] - logits, rows[-1])
    for place in range(0, len(plan.table), 4):
        slot, row, block, page = plan.table[place : place + 4]
        table[slot, row, block] = page
    assert batch.token[: batch.num_tokens].tolist() == plan.tokens
    assert batch.position[: batch.num_tokens].tolist() == positions
    assert batch.slice_row[: batch.num_slices + 1].tolist() == rows
    assert batch.slice_slot[: batch.num_slices].tolist() == plan.slots
    assert batch.logits_row[: batch.num_logits].tolist() == wanted
    assert (batch.table == table).all()
    assert [tuple(copy) for copy in batch.copy[: batch.num_copies].tolist()] == plan.copies


@given(st.lists(st.tuples(plans(), st.booleans(), st.integers(0, 7)), min_size=2, max_size=6))
def test_what_is_left_as_it_stands_is_as_it_would_be_written(
    steps: list[tuple[StepPlan, bool, int]],
) -> None:
    """One packer for all steps leaves the batch as a new one for each does."""
    used, fresh = RaggedBatch(LIMITS, table_rows=2), RaggedBatch(LIMITS, table_rows=2)
    parameters = ParameterTable(used)
    states = [state(parameters, choice=i, temperature=i / 8) for i in range(6)]
    states += [state(parameters, choice=i, logit_bias={i: 1.0}) for i in (6, 7)]
    packer = Packer(used)
    for plan, again, some in steps:
        for _ in range(1 + again):
            rows = plan.num_logits
            chosen = states[:some] if rows else []
            plan.samples = [
                value for i in range(len(chosen)) for value in (i % max(rows, 1), 50 + i)
            ]
            for one in (packer, Packer(fresh)):
                one.pack(plan)
                one.pack_samples(plan, chosen, parameters)
        for name in ("token", "position", "slice_row", "slice_slot", "logits_row"):
            end = {"slice_row": used.num_slices + 1, "slice_slot": used.num_slices,
                   "logits_row": used.num_logits}.get(name, used.num_tokens)  # fmt: skip
            assert (getattr(used, name)[:end] == getattr(fresh, name)[:end]).all(), name
        assert used.num_samples == fresh.num_samples == len(chosen)
        for name in ("sample_row", "sample_position", "temperature", "choice", "forced",
                     "mask_index", "penalty_start", "bias_start"):  # fmt: skip
            end = len(chosen) + name.endswith("start")
            assert (getattr(used, name)[:end] == getattr(fresh, name)[:end]).all(), name


def state(parameters: ParameterTable, choice: int = 0, **sampling: object) -> SequenceState:
    submit = Submit(
        id="r",
        prompt=(1, 2),
        max_tokens=9,
        sampling=SamplingSpec(**sampling),  # type: ignore[arg-type]
    )
    request = RequestState(number=0, submit=submit, arrived=0.0)
    counts = {1: 0, 2: 0} if needs_lists(submit) else None
    return SequenceState(
        request, 7, choice, parameters.add(submit, choice), needs_lists(submit), counts
    )


def test_samples_gather_each_sequences_own_parameters() -> None:
    batch = RaggedBatch(LIMITS, table_rows=1)
    packer, parameters = Packer(batch), ParameterTable(batch)
    states = [
        state(parameters, choice=i, temperature=i / 8, seed=2**63 + i, top_k=i) for i in range(150)
    ]
    plan = StepPlan(id=1, sequences=[1], slots=[0], starts=[4], counts=[1], logits=[1])
    plan.tokens, plan.num_logits = [5], 1
    plan.samples = [value for i in range(150) for value in (0, i)]
    packer.pack(plan)
    packer.pack_samples(plan, states, parameters)
    assert batch.num_samples == 150
    assert batch.temperature[:150].tolist() == [i / 8 for i in range(150)]
    assert batch.seed[:150].tolist() == [2**63 + i for i in range(150)]
    assert batch.choice[:150].tolist() == list(range(150))
    assert set(batch.sample_position[:150].tolist()) == {5}
    assert set(batch.top_logprobs[:150].tolist()) == {-1}


def test_lists_belong_to_their_sample() -> None:
    batch = RaggedBatch(LIMITS, table_rows=1)
    packer, parameters = Packer(batch), ParameterTable(batch)
    states = [
        state(parameters),
        state(parameters, repetition_penalty=1.5, logit_bias={4: 2.0}),
        state(parameters),
        state(parameters, banned_until=((9,), 2)),
    ]
    plan = StepPlan(id=1, sequences=[1], slots=[0], starts=[0], counts=[1], logits=[1])
    plan.tokens, plan.num_logits = [5], 1
    plan.samples = [0, 1, 0, 2, 0, 3, 0, 4]
    packer.pack(plan)
    packer.pack_samples(plan, states, parameters)
    assert batch.penalty_start[:5].tolist() == [0, 0, 2, 2, 4]
    assert batch.penalty_token[:2].tolist() == [1, 2]
    assert batch.bias_start[:5].tolist() == [0, 0, 1, 1, 2]
    assert batch.bias_token[:2].tolist() == [4, 9]
    assert batch.bias_value[:2].tolist() == [2.0, -np.inf]


def test_min_tokens_and_bad_words_depend_on_the_output() -> None:
    parameters = ParameterTable(RaggedBatch(LIMITS, table_rows=1))
    sequence = state(parameters, banned_until=((9,), 2), bad_words=((3,), (4, 5), (6, 7, 8)))
    assert biases(sequence) == {9: -np.inf, 3: -np.inf}
    sequence.outputs = [1, 6, 4]
    assert biases(sequence) == {3: -np.inf, 5: -np.inf}
    sequence.outputs = [6, 7]
    assert biases(sequence) == {3: -np.inf, 8: -np.inf}
