"""`CpuBackend`: packs weights, lays out memory and records the native program."""

import os
import threading
from collections.abc import Mapping
from typing import Literal

import numpy as np

from headrace.errors import ConfigError
from headrace.ops import spec
from headrace.ops.backends import require
from headrace.ops.batch import F32, MAX_TOP_LOGPROBS, Limits, RaggedBatch
from headrace.ops.cpu import _native
from headrace.ops.cpu.build import Memory, build, plan
from headrace.ops.cpu.workspace import kept
from headrace.ops.formats import FORMATS
from headrace.ops.spec import Buffer, KVLayout, Op, Program
from headrace.ops.weights import Weight

_PARTS = {"all": 0, "forward": 1, "sample": 2}


class CpuBackend:
    """The C++ kernels of one instruction level.

    level: 'auto' (the best that this machine runs), 'avx512', 'avx2' or 'portable'. threads: used
    where the limits of `load` name fewer than 1. Raises ConfigError for a level that is not built
    or does not run here.
    """

    name = "cpu"

    def __init__(self, level: str = "auto", threads: int = 1) -> None:
        levels = _native.levels()
        if level != "auto" and level not in levels:
            raise ConfigError("level", f"this machine runs {', '.join(levels)}, not {level!r}")
        self.level: str = levels[0] if level == "auto" else level
        self.threads = threads

    def accepts(self, op: Op, weight_formats: Mapping[str, tuple[str, ...]]) -> str | None:
        """See `spec.Backend`."""
        match op:
            case spec.Embed():
                return _packable(op.weights(), weight_formats)
            case spec.Linear() | spec.Logits():
                return _packable([op.weight], weight_formats) or _plain(
                    [op.bias] if op.bias else [], weight_formats
                )
            case spec.RmsNorm() | spec.RopeStore() | spec.Attention():
                return _plain(op.weights(), weight_formats) or _geometry(op)
            case spec.Gated() | spec.Sample():
                return None
            case spec.AllReduce():
                return None if op.ranks == 1 else f"runs on one rank, not {op.ranks}"
        return "has no kernel on the CPU back-end"

    def load(
        self,
        program: Program,
        weights: Mapping[str, Weight],
        layout: KVLayout,
        limits: Limits,
        progress: spec.LoadProgress | None = None,
    ) -> "CpuExecutable":
        """See `spec.Backend`."""
        require(self, program, weights)
        return CpuExecutable(self.level, program, weights, layout, limits, progress)

    def memory(
        self,
        program: Program,
        weights: Mapping[str, Weight],
        layout: KVLayout,
        limits: Limits,
    ) -> dict[str, int]:
        """See `spec.Backend`."""
        require(self, program, weights)
        sizes = plan(self.level, program, weights, layout, limits)
        return {
            "weights": sizes.weights,
            "kv": sizes.kv,
            "workspace": sizes.workspace + sizes.owned,
            "batch": RaggedBatch(limits, layout.table_rows).nbytes,
        }


class CpuExecutable:
    """A loaded program. `paths` lists (op, kernel path) of its instructions, in order."""

    def __init__(
        self,
        level: str,
        program: Program,
        weights: Mapping[str, Weight],
        layout: KVLayout,
        limits: Limits,
        progress: spec.LoadProgress | None = None,
    ) -> None:
        self.batch = RaggedBatch(limits, layout.table_rows)
        self.level = level
        self._program = program
        self._limits = limits
        cores = sorted(os.sched_getaffinity(0)) if limits.pinned else []
        self._pool: _native.Pool | None = _native.Pool(max(1, limits.threads), cores)
        sizes = plan(level, program, weights, layout, limits)
        self._memory: Memory | None = Memory(sizes, self._pool)
        self._native = build(level, program, weights, layout, limits, sizes, self._memory, progress)
        self._native.bind(self._pool, self._memory.scratch)
        self._kept = kept(program)
        self._offsets = sizes.placed.offsets
        self._rows = {"tokens": 0, "logits": 0}
        self._generation = -1
        self._stop = threading.Event()
        self._populating: threading.Thread | None = None

    @property
    def paths(self) -> list[tuple[str, str]]:
        """(op, kernel path) of every instruction, in order."""
        return list(self._native.paths)

    def run(self, part: Literal["all", "forward", "sample"] = "all") -> None:
        """See `spec.Executable`."""
        self._native.run(*self._counts(), _PARTS[part])

    def profile(self) -> list[tuple[str, str, float, float, float]]:
        """Run one step and time it: (op, kernel path, seconds, bytes moved, operations) of every
        instruction that had work."""
        return list(self._native.profile(*self._counts()))

    def read(self, buffer: Buffer) -> F32:
        """See `spec.Executable`."""
        if buffer.id not in self._kept:
            raise KeyError(f"buffer {buffer.id} is not kept after a step")
        if self._memory is None:
            raise ValueError("the program is closed")
        return self._memory.read(
            self._offsets[buffer.id], (self._rows[buffer.rows], buffer.width)
        ).copy()

    def populate(self) -> None:
        """Make the KV pages resident in a thread of the lowest priority, so that neither the start
        nor a step waits for the system to hand out memory. Returns at once; may be called once."""
        memory, stop = self._memory, self._stop
        if memory is None or self._populating is not None:
            return

        def work() -> None:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
            memory.populate(stop.is_set)

        self._populating = threading.Thread(target=work, name="populate", daemon=True)
        self._populating.start()

    def close(self) -> None:
        """See `spec.Executable`."""
        self._stop.set()
        if self._populating is not None:
            self._populating.join()
        self._native = None
        self._memory = None
        self._pool = None

    def _counts(self) -> tuple[int, int, int, int, int]:
        """The counts of the batch, bound first where its arrays were replaced."""
        batch = self.batch
        if batch.generation != self._generation:
            self._bind()
        self._rows["tokens"] = batch.num_tokens
        self._rows["logits"] = batch.num_logits
        return (
            batch.num_tokens,
            batch.num_slices,
            batch.num_logits,
            batch.num_samples,
            batch.num_copies,
        )

    def _bind(self) -> None:
        batch = self.batch
        arrays = {
            name: array.ctypes.data
            for name, array in vars(batch).items()
            if isinstance(array, np.ndarray)
        }
        sizes = {
            "table_rows": batch.table.shape[1],
            "max_blocks": batch.table.shape[2],
            "mask_words": batch.masks.shape[1],
            "max_top": MAX_TOP_LOGPROBS,
        }
        self._native.bind_batch(arrays, sizes)
        self._generation = batch.generation


def _packable(names: list[str], formats: Mapping[str, tuple[str, ...]]) -> str | None:
    for name in names:
        for form in formats.get(name, ()):
            try:
                _native.layout(form)
            except ValueError as error:
                return f"weight {name}: {error}"
    return None


def _plain(names: list[str], formats: Mapping[str, tuple[str, ...]]) -> str | None:
    for name in names:
        for form in formats.get(name, ()):
            if form not in FORMATS:
                return f"vector {name} has the unknown format {form}"
    return None


def _geometry(op: Op) -> str | None:
    if isinstance(op, spec.RopeStore | spec.Attention) and op.heads % op.kv_heads:
        return f"{op.heads} heads are not a multiple of {op.kv_heads} KV heads"
    return None
