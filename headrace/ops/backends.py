"""Choosing a back-end by name, and refusing a program that one cannot run.

Each back-end is imported only when it is chosen, so that none needs the others' libraries.
"""

import importlib
from collections.abc import Mapping

from headrace.errors import ConfigError, KernelError
from headrace.ops.spec import Backend, Program
from headrace.ops.weights import Weight

NAMES = ("auto", "cpu", "reference", "null")


def cpu_missing() -> str | None:
    """Why the CPU back-end is not there, or None where it is.

    Raises KernelError where its C++ module is there but does not load: that is no absence.
    """
    try:
        importlib.import_module("headrace.ops.cpu")
    except ImportError as error:
        if error.path is not None and not error.path.endswith(".py"):
            raise KernelError(
                f"the C++ module of the cpu back-end does not load, build it again: {error}"
            ) from error
        return "the C++ module of the cpu back-end is not built"
    return None


def open_backend(name: str = "auto", level: str = "auto", threads: int = 1) -> Backend:
    """The back-end of that name, ready to load programs.

    name: 'auto' (the CPU back-end), 'cpu', 'reference' or 'null'. level: instruction level of the
    CPU back-end, 'auto' for the best that this machine runs. threads: its worker threads.

    Raises ConfigError for an unknown name, or a level where there is none; KernelError where the
    CPU back-end is wanted and its C++ module was not built.
    """
    if name not in NAMES:
        raise ConfigError("backend", f"unknown back-end {name!r}; choose one of {', '.join(NAMES)}")
    if name in ("reference", "null"):
        if level != "auto":
            raise ConfigError("level", f"the {name} back-end has no level {level!r}; use 'auto'")
        if name == "null":
            from headrace.ops.null import NullBackend

            return NullBackend()
        from headrace.ops.reference import ReferenceBackend

        return ReferenceBackend()
    missing = cpu_missing()
    if missing is not None:
        raise KernelError(f"{missing}; run scripts/setup, or choose --backend reference")
    from headrace.ops.cpu import CpuBackend

    return CpuBackend(level=level, threads=threads)


def require(backend: Backend, program: Program, weights: Mapping[str, Weight]) -> None:
    """Raise KernelError where a weight is absent or misshapen, or the back-end declines an op.

    The message names every such op and the reason.
    """
    for name, shape in program.shapes.items():
        if name not in weights:
            raise KernelError(f"weight {name} {list(shape)} of the program is not given")
        if weights[name].shape != shape:
            raise KernelError(
                f"weight {name} has shape {list(weights[name].shape)}, "
                f"the program needs {list(shape)}"
            )
    formats = {name: weight.formats for name, weight in weights.items()}
    reasons = ((op.kind, reason) for op in program.ops if (reason := backend.accepts(op, formats)))
    declined = dict.fromkeys(f"{kind} ({reason})" for kind, reason in reasons)
    if declined:
        raise KernelError(f"{backend.name} {backend.level} declines {'; '.join(declined)}")
