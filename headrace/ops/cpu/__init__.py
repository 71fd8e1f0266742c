"""The CPU back-end: C++ kernels for AVX-512 VNNI, AVX2 and any 64-bit CPU, chosen at load."""

from headrace.ops.cpu.backend import CpuBackend, CpuExecutable

__all__ = ["CpuBackend", "CpuExecutable"]
