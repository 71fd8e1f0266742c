"""What the table of cases is too small for: contexts of several spans, cut among threads."""

import numpy as np
import pytest

from headrace.ops.backends import open_backend
from headrace.ops.batch import Limits
from headrace.ops.cpu import CpuBackend
from tests.cpu.linears import LEVELS
from tests.ops.cases import attention, near
from tests.ops.rig import Case, Slice, bits, fill, run

LENGTH = 530
"""Three spans of 256 keys, the last one short."""

every_level = pytest.mark.parametrize("level", LEVELS)


def long_case(name: str, **options: object) -> Case:
    return attention(name, lengths=(LENGTH,), **options)  # type: ignore[arg-type]


SHAPES = {
    "mha": long_case("mha", heads=2, kv_heads=2),
    "group-3": long_case("group-3", heads=3, kv_heads=1, dtype="f32", block_size=32),
    "group-14": long_case("group-14", heads=14, kv_heads=1, head_dim=8),
    "int8": long_case("int8", heads=6, kv_heads=2, dtype="int8", block_size=64),
    "window": long_case("window", window=300, sinks=True),
    "kept": long_case("kept", window=40, first=21, block_size=32),
    "near": near("near", window=40, first=21, block_size=32, lengths=(LENGTH,)),
    "near-far": near("near-far", window=70, first=300, lengths=(LENGTH,)),
    "odd": long_case("odd", head_dim=19, softcap=3.0),
}


def rows(level: str, case: Case, threads: int, *steps: list[Slice]) -> list[bytes]:
    executable = case.load(CpuBackend(level, threads), threads)
    got = bits(run(executable, case, steps, seed=threads))["out"]
    executable.close()
    return got


@every_level
@pytest.mark.parametrize("shape", SHAPES)
def test_spans_cut_among_threads_give_the_same_bits(level: str, shape: str) -> None:
    """Few rows over a long context: each span is a piece, and the merge is a second instruction.
    With one thread the same rows go through whole."""
    case = SHAPES[shape]
    whole = rows(level, case, 1, [(0, 0, LENGTH)])
    short = [(0, 0, 250)], [(0, 250, 5)], [(0, 255, 1)], [(0, 256, 1)], [(0, 257, 272)]
    for threads in (1, 2, 5):
        assert rows(level, case, threads, *short, [(0, LENGTH - 1, 1)]) == whole


@every_level
def test_many_sequences_give_the_bits_of_each_alone(level: str) -> None:
    """So many slices that a piece takes all kv heads of one."""
    case = attention("many", 4, 2, lengths=(1, 2, 3, 5) * 17)
    count = len(case.lengths)
    whole: list[Slice] = [(i, 0, case.lengths[i]) for i in range(count)]
    alone = [[place] for place in reversed(whole)]
    assert rows(level, case, 1, whole) == rows(level, case, 1, *alone)


@every_level
@pytest.mark.parametrize("threads", [1, 2])
def test_a_shared_prefix_is_read_together_with_the_same_bits(level: str, threads: int) -> None:
    """Twelve sequences on the pages of the first one's 528 tokens, some behind longer rows of their
    own; one of them shares a span less. Their next rows at once, and one by one."""
    count, shared = 12, 528
    case = attention("prefix", 6, 2, dtype="f16", lengths=(shared + 40,) * count)
    executable = case.load(CpuBackend(level, threads), threads)
    blocks = executable.batch.limits.max_blocks
    tables = np.arange(count * blocks, dtype=np.int32).reshape(count, 1, blocks)
    tables[1:, :, : shared // 16] = tables[0, :, : shared // 16]
    tables[5, :, 20:33] = 5 * blocks + np.arange(20, 33)
    lengths = [shared + 3 * i for i in range(count)]

    def outputs(*steps: list[Slice]) -> list[bytes]:
        found = []
        for step in steps:
            places = list(fill(executable, case, step, tables))
            executable.run("forward")
            values = executable.read(case.program.taps["out"])
            found += [values[rows].tobytes() for _, rows in places]
        return found

    outputs([(0, 0, shared)], [(5, 320, 208)])
    outputs(*([(i, shared, lengths[i] - shared)] for i in range(1, count)))
    last = [(i, lengths[i], 1) for i in range(count)]
    assert outputs(last) == outputs(*([place] for place in last))
    executable.close()


@every_level
def test_eight_bit_keys_and_values_stay_close(level: str) -> None:
    """Against unrounded K and V: half a step of 1 / 127 of the largest of 64 normal values, about
    0.55 % of a value's spread, averaged over the keys that weigh."""
    outputs = []
    for dtype in ("f32", "int8"):
        case = attention(f"quality-{dtype}", 6, 2, 64, dtype=dtype, lengths=(300,))
        executable = case.load(CpuBackend(level))
        outputs.append(run(executable, case, [[(0, 0, 300)]], seed=0)["out"][0])
        executable.close()
    error = np.sqrt(np.mean((outputs[0] - outputs[1]) ** 2) / np.mean(outputs[0] ** 2))
    assert 1e-4 < error < 0.02


@every_level
def test_long_contexts_agree_with_the_reference(level: str) -> None:
    for case in (SHAPES[name] for name in ("mha", "window", "kept", "near", "near-far")):
        found = []
        for backend in (open_backend("reference"), CpuBackend(level)):
            executable = case.load(backend)
            found.append(run(executable, case, [[(0, 0, LENGTH)]], seed=2)["out"][0])
            executable.close()
        scale = np.sqrt(np.mean(found[0] ** 2))
        assert np.abs(found[0] - found[1]).max() < case.tolerance["out"] * scale


@every_level
def test_an_odd_head_dimension_is_named_as_the_slower_path(level: str) -> None:
    paths = {}
    for shape in ("mha", "odd"):
        executable = SHAPES[shape].load(CpuBackend(level))
        paths[shape] = dict(executable.paths)["attention"]  # type: ignore[attr-defined]
        executable.close()
    assert paths == {"mha": level, "odd": f"{level}.generic"}


@every_level
def test_far_positions_turn_as_exactly_as_near_ones(level: str) -> None:
    """Rows a million positions on, where a float32 angle is off by 0.06: q against float64, and the
    attention over what is kept against the reference."""
    start, count, blocks = 1_000_003, 9, 62_600
    case = near("far", window=24, first=4, dtype="f32", lengths=(count,))
    limits = Limits(
        max_tokens=count, max_slices=1, max_logits=count, max_samples=1, slots=1,
        max_blocks=blocks, num_pages=5, max_positions=blocks * 16,
        vocabulary=case.program.logits.width, threads=2,
    )  # fmt: skip
    found = []
    for backend in (open_backend("reference"), CpuBackend(level)):
        executable = backend.load(case.program, case.weights, case.layout, limits)
        batch = executable.batch
        batch.table[0, 0] = np.arange(blocks) % 4
        batch.table[0, 0, 0] = 4  # the kept-first tokens have a page of their own
        batch.num_slices = 1
        for first, rows in ((0, 4), (start - 27, 9), (start - 18, 9), (start - 9, 9), (start, 9)):
            batch.num_tokens = batch.num_logits = rows
            batch.token[:rows] = np.arange(rows) + first % 7
            batch.position[:rows] = first + np.arange(rows)
            batch.slice_row[:2] = (0, rows)
            batch.logits_row[:rows] = np.arange(rows)
            executable.run("forward")
        found.append([executable.read(case.program.taps[name]) for name in ("q", "out")])
        executable.close()
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=5e-6 * np.abs(one).max())
