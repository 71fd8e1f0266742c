"""Where each buffer of a program lies in the workspace: those that are never needed at the same
time share memory."""

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.ops.batch import Limits
from headrace.ops.spec import Buffer, Program

_ALIGNMENT = 64


@dataclass(frozen=True)
class Workspace:
    """offsets: bytes from the start of the workspace, by buffer id. bytes: its size."""

    offsets: Mapping[int, int]
    bytes: int


def round_up(value: int, unit: int = _ALIGNMENT) -> int:
    """The least multiple of `unit` that is not below `value`."""
    return -(-value // unit) * unit


def kept(program: Program) -> set[int]:
    """Ids of the buffers that are read after a step: their memory is never reused."""
    return {program.logits.id, program.hidden.id, *(b.id for b in program.taps.values())}


def buffer_bytes(buffer: Buffer, limits: Limits) -> int:
    """Bytes of a buffer's largest step, rounded up to the alignment."""
    rows = limits.max_tokens if buffer.rows == "tokens" else limits.max_logits
    return round_up(rows * buffer.width * 4)


def place(program: Program, limits: Limits) -> Workspace:
    """First fit, in order of first use, over the ops during which each buffer is live."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    by_id: dict[int, Buffer] = {}
    for index, op in enumerate(program.ops):
        for buffer in op.buffers():
            by_id[buffer.id] = buffer
            first.setdefault(buffer.id, index)
            last[buffer.id] = index
    for id in kept(program) & by_id.keys():
        first[id], last[id] = 0, len(program.ops)
    placed: list[tuple[int, int, int]] = []  # (id, start, end)
    offsets: dict[int, int] = {}
    for id in sorted(by_id, key=lambda id: (first[id], id)):
        size = buffer_bytes(by_id[id], limits)
        start = 0
        for other, begin, end in sorted(placed, key=lambda entry: entry[1]):
            if last[other] < first[id] or first[other] > last[id]:
                continue
            if start + size <= begin:
                break
            start = max(start, end)
        offsets[id] = start
        placed.append((id, start, start + size))
    return Workspace(offsets, max((end for _, _, end in placed), default=0))
