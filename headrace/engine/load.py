"""Loading: a configuration becomes a model on a back-end, with the memory planned before."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headrace.checkpoint import Checkpoint, open_configured
from headrace.config import EngineConfig
from headrace.engine.loadbar import LoadBar
from headrace.engine.memory import MemoryPlan, make_plan
from headrace.errors import ConfigError, KernelError
from headrace.models.load import without_data
from headrace.models.spec import Model
from headrace.ops.backends import open_backend
from headrace.ops.spec import Backend, Executable


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run. timeline: (what, seconds it took), in order. trace: file to record the
    scheduler's inputs in, or None."""

    checkpoint: Checkpoint
    model: Model
    backend: Backend
    executable: Executable
    plan: MemoryPlan
    timeline: tuple[tuple[str, float], ...]
    trace: str | None = None

    @property
    def kernels(self) -> dict[str, str]:
        """The kernel paths of each op, several joined by ' + '."""
        paths: dict[str, dict[str, None]] = {}
        for op, path in self.executable.paths:
            paths.setdefault(op, {})[path] = None
        return {op: " + ".join(found) for op, found in paths.items()}


def usable_cores() -> int:
    """Cores this process may use: its affinity, cut by the cgroup's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores or 1, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return cores or 1


def load(config: EngineConfig, tell: Callable[[str], None] | None = None) -> LoadedModel:
    """Open, plan, refuse or load.

    tell: called with one line for a person at each decision. Raises ModelError, ConfigError,
    MemoryPlanError or KernelError.
    """
    timeline: list[tuple[str, float]] = []
    mark = time.perf_counter()

    def lap(what: str) -> None:
        nonlocal mark
        now = time.perf_counter()
        timeline.append((what, now - mark))
        mark = now

    threads = config.threads if config.threads is not None else usable_cores()
    if threads < 1:
        raise ConfigError("threads", f"must be at least 1, not {threads}")
    checkpoint = open_configured(config)
    model = checkpoint.model(config.max_model_len)
    lap("read checkpoint")
    backend = open_backend(config.backend, config.level, threads)
    plan = make_plan(config, model, backend, threads)
    lap("plan memory")
    if tell is not None:
        for note in (*model.notes, *plan.notes):
            tell(note)
    with LoadBar() as bar:
        executable = backend.load(model.program, model.weights, plan.layout, plan.limits, bar)
    lap("load weights")
    model = without_data(model)
    loaded = LoadedModel(
        checkpoint, model, backend, executable, plan, tuple(timeline), config.trace
    )
    if config.strict_kernels:
        _refuse_slow(loaded)
    return loaded


def _refuse_slow(loaded: LoadedModel) -> None:
    """Raise KernelError where an op takes a path for any shape instead of the fast one."""
    slow = {op: path for op, path in loaded.executable.paths if path.endswith(".generic")}
    if slow:
        loaded.executable.close()
        ops = ", ".join(f"{op} ({path})" for op, path in slow.items())
        why = f" with head_dim {loaded.model.spec.head_dim}" if "attention" in slow else ""
        raise KernelError(
            f"--strict-kernels: a slower path would be taken{why}: {ops};"
            " start without --strict-kernels to run it all the same"
        )
