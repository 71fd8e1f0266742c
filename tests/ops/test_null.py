"""The counts of the null back-end against counting one by one."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.ops import spec
from headrace.ops.batch import Limits
from headrace.ops.null import Basis, Counter, NullBackend, StepShape, Work, count
from headrace.ops.program import ProgramBuilder
from headrace.ops.spec import KVGroup, KVLayout, Program
from tests.ops.cases import TABLE

steps = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=4)


@given(steps, st.one_of(st.just(-1), st.integers(1, 30)), st.integers(0, 12))
def test_pairs_and_keys_are_counted_like_one_by_one(
    slices: list[tuple[int, int]], window: int, first: int
) -> None:
    pairs, keys = 0, 0
    for start, rows in slices:
        seen = [
            {j for j in range(p + 1) if window < 0 or p - j < window or j < first}
            for p in range(start, start + rows)
        ]
        pairs += sum(map(len, seen))
        keys += len(set().union(*seen))
    step = StepShape(slices)
    assert step.amount(Basis("pair", window, first)) == pairs
    assert step.amount(Basis("key", window, first)) == keys


def test_expected_experts_are_the_mean_over_all_choices() -> None:
    """Four experts, two of them per row, three rows: every combination."""
    picks = list(itertools.combinations(range(4), 2))
    touched = [len(set().union(*rows)) for rows in itertools.product(picks, repeat=3)]
    shape = StepShape([(0, 3)])
    assert shape.amount(Basis("expert", 4, 2)) == pytest.approx(sum(touched) / len(touched))
    assert StepShape([(0, 3)], experts_touched=4).amount(Basis("expert", 4, 2)) == 4


def tiny() -> tuple[Program, KVLayout, dict[str, float]]:
    """One Llama layer: width 8, 2 heads over 1 of 4 values, feed-forward 12, vocabulary 30."""
    build = ProgramBuilder()
    x = build.embed("table", 30, 8)
    h = build.rms_norm(x, "norm", 1e-5)
    q = build.rope_store(build.linear(h, "qkv", 16, "bias"), 0, 2, 1, 4, "rope", 4)
    a = build.attention(q, 0, 2, 1, 4, 0.5, window=3)
    h = build.rms_norm(build.linear(a, "o", 8), "norm", 1e-5, residual=x)
    h = build.linear(build.gated(build.linear(h, "up", 24), "silu"), "down", 8)
    program = build.finish(h, build.logits(h, "table", 30))
    sizes = {name: 2.0 * np.prod(shape) for name, shape in program.shapes.items()}
    return program, KVLayout((KVGroup("g", (0,), 3),), 1, 4), sizes


def test_work_of_a_small_model() -> None:
    program, layout, sizes = tiny()
    # Positions 2, 3 of one sequence and 0 of another: 3 + 3 + 1 pairs; keys 0..3 and 0.
    step = StepShape([(2, 2), (0, 1)], logits=2, samples=5)
    works = count(program, layout, sizes, step)
    assert [work.kind for work in works] == [op.kind for op in program.ops]
    found = {(kind, label): work for kind, label, work in works}
    assert found["embed", "table"] == Work(weight_bytes=3 * 16, written=3 * 32)
    assert found["linear", "qkv, bias"] == Work(
        flops=3 * 2 * 8 * 16, elements=3 * 16, weight_bytes=2 * (8 * 16 + 16),
        read=3 * 32, written=3 * 64,
    )  # fmt: skip
    assert found["rope_store", "layer 0"] == Work(
        elements=3 * 3 * 4, weight_bytes=4, kv_written=3 * 16, read=3 * 64, written=3 * 32
    )
    assert found["attention", "layer 0"] == Work(
        flops=7 * 4 * 2 * 4, elements=7 * 2, kv_read=5 * 16, read=3 * 32, written=3 * 32
    )
    assert found["logits", "table"] == Work(
        flops=2 * 2 * 8 * 30, weight_bytes=480, read=2 * 32, written=2 * 120
    )
    assert found["sample", ""] == Work(elements=150, read=600, written=20)
    total = Counter(program, layout, sizes).step(step)
    assert total == sum((work.work for work in works), Work())
    parts = (total.weight_bytes, total.kv_read, total.kv_written, total.read, total.written)
    assert total.memory_bytes == sum(parts)


def test_work_of_experts_adapters_latents_and_collectives() -> None:
    x, wide, routes = spec.Buffer(0, 8), spec.Buffer(1, 16), spec.Buffer(2, 4)
    sizes = {"gate_up": 600.0, "down": 300.0, "up": 77.0}
    layout = KVLayout((KVGroup("g", (0,)),), 1, 6, dtype="int8")
    step = StepShape([(4, 3)], experts_touched=4, lora_rows=2, lora_adapters=1, lora_rank=16)
    ops = {
        spec.Experts(x, routes, x, "gate_up", "down", 6, 2, 10): Work(
            flops=3 * 6 * 2 * 8 * 10, elements=3 * 2 * 18, weight_bytes=4 * 150,
            read=3 * 48, written=3 * 32,
        ),
        spec.Lora(x, wide, "w"): Work(flops=2 * 2 * 16 * 24, weight_bytes=16 * 2 * 24),
        spec.AllReduce(x, 4): Work(elements=3 * 3 * 8, wire=3 * 2 * 3 / 4 * 32),
        spec.AllReduce(x, 1): Work(),
        spec.AllToAll(x, routes, 4, 2, True): Work(wire=3 * 2 * 3 / 4 * 32),
        spec.Route(wide, routes, 16, 2): Work(elements=48, read=192, written=48),
        spec.LatentAttention(wide, x, x, 0, 2, 5, 3, 4, 9, 1.0, "up"): Work(
            flops=3 * 2 * 2 * 9 * (5 + 4) + 18 * 2 * 2 * (2 * 9 + 3), elements=18 * 2,
            weight_bytes=77, kv_read=7 * 20, kv_written=3 * 20, read=3 * 96, written=3 * 32,
        ),
    }  # fmt: skip
    for op, want in ops.items():
        program = Program((op,), (x, wide, routes), {}, x, x)
        (found,) = count(program, layout, sizes, step)
        assert found.work == want, op.kind


def test_every_op_of_the_table_has_a_rule() -> None:
    counted = set()
    for case in TABLE.values():
        sizes = {name: weight.nbytes for name, weight in case.weights.items()}
        works = count(case.program, case.layout, sizes, StepShape([(0, 5)], 5, 1))
        counted |= {work.kind for work in works}
        assert all(work.work.memory_bytes > 0 for work in works)
    beside = {"lora", "all_reduce", "all_to_all"}  # counted in the test above
    assert counted | beside == {op.KIND for op in spec.ALL_OPS}


def test_the_null_executable_fills_the_outputs() -> None:
    program, layout, _ = tiny()
    limits = Limits(8, 4, 4, 4, 2, 2, 4, 32, 30)
    backend = NullBackend()
    assert all(backend.accepts(op, {}) is None for op in program.ops)
    executable = backend.load(program, {}, layout, limits)
    batch = executable.batch
    batch.num_tokens, batch.num_logits, batch.num_samples = 5, 2, 3
    batch.out_token[:] = 9
    batch.forced[1] = 7
    executable.run()
    assert batch.out_token.tolist() == [0, 7, 0, 9]
    assert executable.read(program.logits).shape == (2, 30)
    assert executable.read(program.hidden).shape == (5, 8)
    planned = backend.memory(program, {}, layout, limits)
    assert planned == {"weights": 0, "kv": 0, "workspace": 0, "batch": batch.nbytes}
    executable.close()
