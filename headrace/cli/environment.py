"""`headrace collect-env`: what a bug report needs."""

import argparse
import importlib.metadata
import os
import platform
import sys
from pathlib import Path

from headrace import __version__

PACKAGES = ("numpy", "tokenizers", "jinja2", "llguidance", "msgspec", "uvicorn", "httptools",
            "prometheus-client", "rich")  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There are none."""


def run(arguments: argparse.Namespace) -> int:
    """Print the facts; returns the exit status."""
    rows = [
        ("headrace", __version__),
        ("python", sys.version.split()[0]),
        ("system", f"{platform.system()} {platform.release()} {platform.machine()}"),
        ("processor", _processor()),
        ("cores", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}"),
        ("memory", _memory()),
        *((name, _version(name)) for name in PACKAGES),
        *sorted((name, _shown(name, value)) for name, value in os.environ.items()
                if name.startswith("HEADRACE_")),
    ]  # fmt: skip
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        sys.stdout.write(f"{name:<{width}}  {value}\n")
    return 0


def _shown(name: str, value: str) -> str:
    return "(set)" if name.endswith("KEY") else value


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _line(path: str, start: str) -> str | None:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = [line for line in lines if line.startswith(start)]
    return found[0].partition(":")[2].strip() if found else None


def _processor() -> str:
    flags = set((_line("/proc/cpuinfo", "flags") or "").split())
    wanted = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8")
    name = _line("/proc/cpuinfo", "model name") or platform.processor() or "unknown"
    return f"{name} ({', '.join(flag for flag in wanted if flag in flags)})"


def _memory() -> str:
    total, free = _line("/proc/meminfo", "MemTotal"), _line("/proc/meminfo", "MemAvailable")
    return f"{total}, {free} available" if total else "unknown"
