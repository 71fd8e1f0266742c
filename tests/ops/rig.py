"""Runs tiny programs through the real interface, cut into steps in different ways."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from headrace.errors import ConfigError, KernelError
from headrace.ops.backends import cpu_missing, open_backend
from headrace.ops.batch import Limits
from headrace.ops.program import ProgramBuilder
from headrace.ops.spec import Backend, Executable, KVGroup, KVLayout, Program
from headrace.ops.weights import Weight

TOKENS = 64
"""Token ids of the cases; each chooses a row of every input table. One more id fills pages with
what nobody may see."""

Slice = tuple[int, int, int]
"""(sequence, first position, rows)."""

Rows = Mapping[str, list[np.ndarray]]
"""Tap -> for each sequence its rows, in position order."""


@dataclass(frozen=True)
class Case:
    """A program and what runs through it.

    tolerance: tap -> largest difference from the reference, as a share of the tap's root mean
    square, or of the row's where by_row. lengths: positions of each sequence. optional: back-ends
    may decline it.
    """

    name: str
    program: Program
    weights: Mapping[str, Weight]
    layout: KVLayout
    tolerance: Mapping[str, float]
    lengths: tuple[int, ...] = (1, 3, 21, 50)
    optional: bool = False
    by_row: bool = False

    def tokens(self) -> list[np.ndarray]:
        """The same token ids at every call, one array a sequence."""
        rng = np.random.default_rng(11)
        return [rng.integers(0, TOKENS, n).astype(np.int32) for n in self.lengths]

    def limits(self, threads: int) -> Limits:
        """Limits that fit all sequences in one step."""
        blocks = -(-max(self.lengths) // self.layout.block_size)
        sequences, total = len(self.lengths), sum(self.lengths)
        pages = sequences * blocks * self.layout.table_rows + 3
        vocabulary = self.program.logits.width
        return Limits(
            total, sequences, total, 4, sequences + 1, blocks, pages, blocks * 64, vocabulary,
            threads,
        )  # fmt: skip

    def load(self, backend: Backend, threads: int = 1) -> Executable:
        """The case on a back-end."""
        return backend.load(self.program, self.weights, self.layout, self.limits(threads))


def schedules(lengths: Sequence[int]) -> dict[str, list[list[Slice]]]:
    """Ways to cut the same sequences into steps.

    'together': all in one step. 'chunks': an odd first part of each, then the rest one position at
    a time or in sevens, long and short mixed. 'alone': each sequence by itself, last one first.
    """
    indices = range(len(lengths))
    together = [[(i, 0, lengths[i]) for i in indices]]
    alone = [[(i, 0, lengths[i])] for i in reversed(indices)]
    chunks: list[list[Slice]] = []
    at = [0] * len(lengths)
    while any(at[i] < lengths[i] for i in indices):
        step = []
        for i in reversed(indices):
            rest = lengths[i] - at[i]
            size = min(rest, 13 + 2 * i if at[i] == 0 else 1 if i % 2 else 7)
            if size:
                step.append((i, at[i], size))
                at[i] += size
        chunks.append(step)
    return {"together": together, "chunks": chunks, "alone": alone}


def fill(
    executable: Executable, case: Case, step: Sequence[Slice], tables: np.ndarray
) -> Iterator[tuple[int, slice]]:
    """Write a step into the batch; yields (sequence, rows of the step) of each slice.

    tables: [sequences, table rows, blocks] page ids; sequence i lies in slot i + 1. Entries of
    blocks that a window has left behind point to a page of someone else.
    """
    batch, tokens = executable.batch, case.tokens()
    batch.table[1 : 1 + len(tables)] = tables
    row = 0
    for place, (sequence, start, count) in enumerate(step):
        rows = slice(row, row + count)
        batch.token[rows] = tokens[sequence][start : start + count]
        batch.position[rows] = np.arange(start, start + count)
        batch.slice_row[place : place + 2] = rows.start, rows.stop
        batch.slice_slot[place] = sequence + 1
        table_row = 0
        for group in case.layout.groups:
            if group.window is not None:
                dead = max(0, start - group.window + 1) // case.layout.block_size
                span = slice(table_row, table_row + group.pages_per_block)
                batch.table[sequence + 1, span, :dead] = tables[sequence - 1, span, :dead]
            table_row += group.pages_per_block
        row += count
        yield sequence, rows
    batch.num_tokens = batch.num_logits = row
    batch.logits_row[:row] = np.arange(row)
    batch.num_slices = len(step)
    batch.num_samples = batch.num_copies = 0


def run(executable: Executable, case: Case, schedule: Sequence[Sequence[Slice]], seed: int) -> Rows:
    """The tapped rows of every sequence after a schedule, with pages in an order of their own."""
    rng = np.random.default_rng(seed)
    limits = executable.batch.limits
    shape = (len(case.lengths), case.layout.table_rows, limits.max_blocks)
    tables = rng.permutation(limits.num_pages)[: int(np.prod(shape))].reshape(shape)
    rows: dict[str, list[np.ndarray]] = {
        name: [np.empty((n, buffer.width), np.float32) for n in case.lengths]
        for name, buffer in case.program.taps.items()
    }
    for step in schedule:
        places = list(fill(executable, case, step, tables))
        executable.run()
        for name, buffer in case.program.taps.items():
            values = executable.read(buffer)
            for (sequence, at), (_, start, count) in zip(places, step, strict=True):
                rows[name][sequence][start : start + count] = values[at]
    return rows


def layout(
    kv_heads: int = 1,
    head_dim: int = 8,
    groups: tuple[KVGroup, ...] = (KVGroup("full", (0,)),),
    block_size: int = 16,
    dtype: str = "f16",
) -> KVLayout:
    """A KV layout with defaults for programs that store nothing."""
    return KVLayout(groups, kv_heads, head_dim, block_size, dtype)  # type: ignore[arg-type]


def finish(build: ProgramBuilder) -> Program:
    """End a program whose logits nobody wants: a small table serves as hidden rows and weight."""
    hidden = build.embed("end", TOKENS + 1, 8)
    return build.finish(hidden, build.logits(hidden, "end", TOKENS + 1))


def bits(rows: Rows) -> dict[str, list[bytes]]:
    """Rows as bytes, for comparison bit for bit."""
    return {name: [value.tobytes() for value in values] for name, values in rows.items()}


LEVELS = ("portable", "avx2", "avx512")


def backends() -> list[tuple[str, Backend | str]]:
    """(name, back-end, or the reason why it cannot run here) of all back-ends and levels."""
    found: list[tuple[str, Backend | str]] = [("reference", open_backend("reference"))]
    for level in LEVELS:
        name = f"cpu-{level}"
        missing = cpu_missing()
        if missing is not None:
            found.append((name, missing))
            continue
        try:
            found.append((name, open_backend("cpu", level, 1)))
        except (ConfigError, KernelError) as error:
            found.append((name, str(error)))
    return found


every_backend = pytest.mark.parametrize(
    "backend",
    [
        pytest.param(
            found, id=name, marks=pytest.mark.skipif(isinstance(found, str), reason=str(found))
        )
        for name, found in backends()
    ],
)
"""Runs a test once per back-end and level; what cannot run here is skipped with its reason."""
