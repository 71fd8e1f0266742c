"""Buffers share memory exactly when they are never live together."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.ops.batch import Limits
from headrace.ops.cpu.workspace import buffer_bytes, kept, place
from headrace.ops.spec import Buffer, Gated, Program

LIMITS = Limits(7, 1, 3, 1, 1, 1, 1, 16, 10, 1)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Ops that each read an earlier buffer and write a new one."""
    buffers = [Buffer(0, draw(st.integers(1, 40)))]
    ops = []
    for i in range(1, draw(st.integers(2, 25))):
        source = buffers[draw(st.integers(max(0, i - 6), i - 1))]
        buffers.append(
            Buffer(i, draw(st.integers(1, 90)), draw(st.sampled_from(["tokens", "logits"])))
        )
        ops.append(Gated(source, buffers[-1], "silu"))
    taps = {str(b.id): b for b in draw(st.lists(st.sampled_from(buffers), max_size=2))}
    return Program(tuple(ops), tuple(buffers), {}, buffers[-1], buffers[-2], taps)


@given(programs())
@settings(max_examples=60, deadline=None)
def test_live_buffers_never_overlap(program: Program) -> None:
    placed = place(program, LIMITS)
    uses: dict[int, list[int]] = {}
    for i, op in enumerate(program.ops):
        for b in op.buffers():
            uses.setdefault(b.id, []).append(i)
    for b in kept(program):
        uses[b] = [0, len(program.ops)]
    size = {b.id: buffer_bytes(b, LIMITS) for b in program.buffers}
    peak = 0
    for step in range(len(program.ops)):
        live = sorted(
            (placed.offsets[id], id) for id, at in uses.items() if at[0] <= step <= at[-1]
        )
        for (start, id), (following, _) in pairwise(live):
            assert start + size[id] <= following
        peak = max(peak, sum(size[id] for _, id in live))
    assert peak <= placed.bytes <= sum(size.values())
    assert placed.bytes == max(placed.offsets[id] + size[id] for id in uses)
    assert all(offset % 64 == 0 for offset in placed.offsets.values())
