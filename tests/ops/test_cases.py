"""Every case on every back-end and level: right, and independent of batch, chunks and threads."""

from functools import cache

import numpy as np
import pytest

from headrace.errors import KernelError
from headrace.ops.spec import Backend
from tests.ops.cases import TABLE
from tests.ops.rig import TOKENS, Case, Rows, backends, bits, every_backend, layout, run, schedules

every_case = pytest.mark.parametrize("name", TABLE)


@cache
def expected(name: str) -> Rows:
    """The reference's rows of a case."""
    case = TABLE[name]
    reference = dict(backends())["reference"]
    return run(case.load(reference), case, schedules(case.lengths)["alone"], seed=0)


def declined(case: Case, backend: Backend) -> bool:
    """Whether the back-end refuses an optional case; then it must refuse it by name."""
    formats = {name: weight.formats for name, weight in case.weights.items()}
    reasons = {op.kind for op in case.program.ops if backend.accepts(op, formats)}
    if not reasons:
        return False
    assert case.optional, f"{backend.name} {backend.level} declines {reasons}"
    with pytest.raises(KernelError, match=reasons.pop()):
        case.load(backend)
    return True


def assert_close(case: Case, got: Rows) -> None:
    for tap, tolerance in case.tolerance.items():
        want = np.concatenate(expected(case.name)[tap])
        squares = want.astype(np.float64) ** 2
        scale = np.sqrt(squares.mean(axis=1 if case.by_row else None, keepdims=True))
        difference = np.abs(np.concatenate(got[tap]) - want)
        worst = (difference / np.maximum(scale, 1e-30)).max()
        assert worst <= tolerance, f"{tap}: off by {worst:.2g} of the rms"


@every_case
@every_backend
def test_case(name: str, backend: Backend) -> None:
    case = TABLE[name]
    if declined(case, backend):
        return
    ways = schedules(case.lengths)
    executable = case.load(backend)
    together = run(executable, case, ways["together"], seed=1)
    assert_close(case, together)
    for i, way in enumerate(("chunks", "alone")):
        assert bits(run(executable, case, ways[way], seed=2 + i)) == bits(together), way
    executable.close()
    if backend.name == "cpu":
        other = type(backend)(level=backend.level, threads=2)
        executable = case.load(other, threads=2)
        got = run(executable, case, ways["together"], seed=4)
        executable.close()
        assert bits(got) == bits(together), "threads"


@every_backend
@pytest.mark.parametrize("dtype", ["f16", "f32", "int8"])
def test_block_size_does_not_show(backend: Backend, dtype: str) -> None:
    found = []
    for size in (16, 32, 64):
        case = TABLE[f"attention-{dtype}-{size}"]
        executable = case.load(backend)
        found.append(bits(run(executable, case, schedules(case.lengths)["chunks"], seed=size)))
        executable.close()
    assert found[0] == found[1] == found[2]


@every_backend
@pytest.mark.parametrize(
    "name",
    ["attention-f32-16", "attention-f16-32", "attention-int8-64", "attention-long",
     "attention-window-20", "attention-window-first"],
)  # fmt: skip
def test_what_pages_held_before_does_not_show(backend: Backend, name: str) -> None:
    """Pages are handed out as they are: here full of what is not a number (int8: huge)."""
    case = TABLE[name]
    executable = case.load(backend)
    ways = schedules(case.lengths)
    clean = bits(run(executable, case, ways["chunks"], seed=1))
    batch, limits = executable.batch, executable.batch.limits
    count = limits.max_blocks * case.layout.block_size
    for first in range(0, limits.num_pages - limits.max_blocks, limits.max_blocks):
        batch.table[0, 0] = first + np.arange(limits.max_blocks)
        rows = min(count, limits.max_tokens)
        for start in range(0, count, rows):
            part = min(rows, count - start)
            batch.token[:part], batch.position[:part] = TOKENS, np.arange(start, start + part)
            batch.slice_row[:2], batch.slice_slot[0] = (0, part), 0
            batch.num_tokens, batch.num_slices, batch.num_logits = part, 1, 0
            with np.errstate(all="ignore"):
                executable.run()
    assert bits(run(executable, case, ways["chunks"], seed=1)) == clean
    executable.close()


@every_backend
@pytest.mark.parametrize("name", ["attention-f16-32", "attention-int8-16", "attention-groups"])
def test_copied_rows_serve_like_the_original(backend: Backend, name: str) -> None:
    """A fork: 27 tokens of the last sequence are copied to the pages of another slot, which then
    computes the rest."""
    case = TABLE[name]
    executable = case.load(backend)
    batch, length, shared = executable.batch, case.lengths[-1], 27
    tokens = case.tokens()[-1]
    blocks = -(-length // case.layout.block_size)
    shape = (2, case.layout.table_rows, blocks)
    pages = np.random.default_rng(3).permutation(batch.limits.num_pages)[: np.prod(shape)]
    batch.table[:2, :, :blocks] = pages.reshape(shape)
    source, target = pages.reshape(shape)

    def step(slot: int, start: int) -> dict[str, bytes]:
        count = length - start
        batch.token[:count], batch.position[:count] = tokens[start:], np.arange(start, length)
        batch.slice_row[:2], batch.slice_slot[0] = (0, count), slot
        batch.num_tokens, batch.num_slices = count, 1
        batch.num_logits = batch.num_samples = 0
        executable.run()
        return {
            tap: executable.read(buffer)[shared - start :].tobytes()
            for tap, buffer in case.program.taps.items()
        }

    original = step(0, 0)
    copies = []
    for block in range(-(-shared // case.layout.block_size)):
        kept = min(case.layout.block_size, shared - block * case.layout.block_size)
        for row in range(case.layout.table_rows):
            head = min(5, kept)
            copies.append((source[row, block], target[row, block], 0, head))
            copies.append((source[row, block], target[row, block], head, kept - head))
    batch.reserve(copies=len(copies))
    batch.copy[: len(copies)] = copies
    batch.num_copies = len(copies)
    assert step(1, shared) == original
    executable.close()


def test_a_weight_of_another_shape_is_refused() -> None:
    case = TABLE["logits"]
    weights = {**case.weights, "end": TABLE["linear-Q4_1"].weights["w32"]}
    reference = dict(backends())["reference"]
    with pytest.raises(KernelError, match=r"weight end has shape \[5, 32\], the program needs"):
        reference.load(case.program, weights, layout(), case.limits(1))


def test_memory_is_what_load_holds() -> None:
    case = TABLE["attention-int8-32"]
    reference = dict(backends())["reference"]
    limits = case.limits(1)
    planned = reference.memory(case.program, case.weights, case.layout, limits)
    executable = case.load(reference)
    assert planned["batch"] == executable.batch.nbytes
    assert planned["kv"] == executable.pages.nbytes
