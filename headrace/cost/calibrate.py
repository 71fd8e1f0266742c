"""Measuring this machine: what `headrace calibrate` stores as the device 'local'.

Rates come from the peak loops of the C++ module where it is built, else from numpy, which is said
in the profile: numpy's products are its BLAS library's and have no integer path. Every figure is
the best of a few short runs, since other work on the machine only ever takes away.
"""

import importlib
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headrace.cost.hardware import LOCAL, Device

Progress = Callable[[str], None]

KERNEL_SHARE = 0.5
"""Part of the peak multiply rate that linear kernels reach; the fit corrects it as an engine
runs."""
CPU_OVERLAP = 0.5
"""How much of the shorter of computing and reading hides behind the other; the fit corrects it for
linear layers."""
READ_SIZES = (1 << 20, 8 << 20, 32 << 20, 256 << 20)
_COPY_BYTES = 64 << 20
_DISK_BYTES = 64 << 20
_LOOP_BYTES = 64 << 20


@dataclass
class Measured:
    """read: bytes/s by threads and buffer size. rates: op/s by number format and threads (a
    multiply-add counts 2). copy: bytes/s one thread copies (read once, written once). disk_write,
    disk_read: bytes/s of a file (the read may come from the page cache). loopback: bytes/s through
    a local TCP socket. source: 'native LEVEL' or 'numpy'."""

    source: str
    threads: int
    read: dict[str, dict[str, float]] = field(default_factory=dict)
    rates: dict[str, dict[str, float]] = field(default_factory=dict)
    copy: float = 0.0
    disk_write: float = 0.0
    disk_read: float = 0.0
    loopback: float = 0.0
    seconds: float = 0.0


def measure(
    threads: int | None = None, budget: float = 5.0, progress: Progress | None = None
) -> Measured:
    """Measure, in about `budget` seconds. threads: most to use (default: all usable cores)."""
    began = time.monotonic()
    say = progress or (lambda text: None)
    count = threads or usable_threads()
    native = _native()
    found = Measured(f"native {native.levels()[0]}" if native else "numpy", count)
    steps = sorted({1, count})
    slots = len(steps) * (len(READ_SIZES) + 4) + 4
    slot = budget / slots * 0.8
    for number in steps:
        say(f"memory and arithmetic, {number} thread{'s' if number > 1 else ''}")
        found.read[str(number)] = {}
        if native:
            _measure_native(native, number, slot, found)
        else:
            _measure_numpy(number, slot, found)
    say("copies, disk and loopback")
    found.copy = copy_rate(slot)
    with tempfile.TemporaryDirectory() as folder:
        found.disk_write, found.disk_read = _disk(Path(folder))
    found.loopback = loopback_rate()
    found.seconds = time.monotonic() - began
    return found


def disturbed(found: Measured) -> bool:
    """Whether other work must have held the cores: all threads together computed hardly more than
    one alone."""
    most = str(found.threads)
    gains = [rates[most] / rates["1"] for rates in found.rates.values()]
    return found.threads > 1 and min(gains) < 1.3


def usable_threads() -> int:
    """Cores of the affinity mask, or all."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


def device(found: Measured, memory: int | None = None) -> Device:
    """The profile as a device: bandwidth from a buffer larger than caches, rates of all threads,
    and about half of computing behind reading (the same cores do both, but ask ahead)."""
    most = str(found.threads)
    largest = found.read[most][max(found.read[most], key=int)]
    rates = {name: by_threads[most] for name, by_threads in found.rates.items()}
    measured = {
        "source": found.source,
        "threads": found.threads,
        "read": found.read,
        "rates": found.rates,
        "copy": found.copy,
        "disk_write": found.disk_write,
        "disk_read": found.disk_read,
        "loopback": found.loopback,
    }
    return Device(
        name=LOCAL,
        title=f"this machine, {found.threads} threads",
        kind="cpu",
        memory=float(memory or total_memory()),
        bandwidth=largest,
        rates=rates,
        source=f"headrace calibrate ({found.source})",
        bandwidth_share=1.0,
        compute_share=KERNEL_SHARE,
        step_overhead=300e-6,
        overlap=CPU_OVERLAP,
        measured=measured,
    )


def total_memory() -> int:
    """Bytes of the machine's memory, fewer where a control group grants less."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 8 << 30
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(path).read_text()))
        except (OSError, ValueError):
            continue
    return total


def _native() -> Any:
    """The C++ module, or None where it is not built."""
    try:
        return importlib.import_module("headrace.ops.cpu._native")
    except ImportError:
        return None


def _measure_native(native: Any, threads: int, slot: float, found: Measured) -> None:
    pool, level = native.Pool(threads, []), native.levels()[0]
    for size in READ_SIZES:
        found.read[str(threads)][str(size)] = native.measure_read(pool, level, size, slot)
    for name, what in (("int4", "dot4"), ("int8", "dot8"), ("f32", "fma")):
        best = max(native.measure(pool, level, what, slot / 2) for _ in range(2))
        found.rates.setdefault(name, {})[str(threads)] = 2.0 * best


def _best_rate(amount: float, slot: float, run: Callable[[], object]) -> float:
    """amount over the shortest time of `run`, tried for `slot` seconds and at least twice."""
    best, ends, tries = float("inf"), time.perf_counter() + slot, 0
    while tries < 2 or time.perf_counter() < ends:
        began = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - began)
        tries += 1
    return amount / best


def _measure_numpy(threads: int, slot: float, found: Measured) -> None:
    """Reads by the dot product of a buffer with itself, one slice a thread; products of matrices by
    BLAS, which brings its own threads: the figure of one thread is its share."""
    with ThreadPoolExecutor(threads) as workers:
        for size in READ_SIZES:
            buffer = np.ones(size // 4, np.float32)
            parts = np.array_split(buffer, threads * 2)

            def read(parts: list[Any] = parts) -> None:
                list(workers.map(np.max, parts))

            found.read[str(threads)][str(size)] = _best_rate(size, slot, read)
    left = np.ones((512, 512), np.float32)
    whole = _best_rate(2.0 * 512**3, slot, lambda: left @ left)
    share = threads / found.threads
    found.rates.setdefault("f32", {})[str(threads)] = whole * share


def copy_rate(slot: float) -> float:
    """Bytes/s that one thread copies in memory, tried for `slot` seconds."""
    source = np.ones(_COPY_BYTES, np.uint8)
    target = np.empty_like(source)
    return _best_rate(_COPY_BYTES, slot, lambda: np.copyto(target, source))


def _disk(folder: Path) -> tuple[float, float]:
    """Bytes/s of writing a file through to the device, and of reading it back."""
    path, data = folder / "headrace-calibrate", os.urandom(1 << 20)
    began = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(_DISK_BYTES >> 20):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    written = time.perf_counter() - began
    with path.open("rb") as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        while file.read(1 << 20):
            pass
        read = time.perf_counter() - began
    return _DISK_BYTES / written, _DISK_BYTES / read


def loopback_rate() -> float:
    """Bytes/s through a TCP connection to this machine, sender and receiver in one process each on
    a thread."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        chunk = bytes(1 << 20)

        def send() -> None:
            with socket.create_connection(server.getsockname()) as out:
                for _ in range(_LOOP_BYTES >> 20):
                    out.sendall(chunk)

        sender = threading.Thread(target=send)
        sender.start()
        connection, _ = server.accept()
        with connection:
            began = time.perf_counter()
            buffer = bytearray(1 << 20)
            while connection.recv_into(buffer):
                pass
            seconds = time.perf_counter() - began
        sender.join()
    return _LOOP_BYTES / seconds
