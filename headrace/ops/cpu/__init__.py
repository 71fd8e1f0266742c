"""The CPU back-end: C++ kernels for AVX-512 VNNI, AVX2 and any 64-bit CPU, chosen at load."""

from headrace.ops.cpu.backend import CpuBackend, CpuExecutable
from headrace.ops.cpu.cores import usable_cores

__all__ = ["CpuBackend", "CpuExecutable", "usable_cores"]
