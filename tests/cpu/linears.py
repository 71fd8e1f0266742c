"""One linear, run alone: rows in, rows out, on any level and number of threads."""

import numpy as np

from headrace.ops.batch import F32, Limits
from headrace.ops.cpu import CpuBackend, CpuExecutable, _native
from headrace.ops.formats import FORMATS, dequantize
from headrace.ops.program import ProgramBuilder
from headrace.ops.weights import Weight
from tests.ops.quantize import exact
from tests.ops.rig import layout

LEVELS: list[str] = _native.levels()
ROWS = (1, 2, 3, 5, 7, 8, 9, 16, 17, 33, 130)
"""Row counts around every tile of the kernels."""


class OneLinear:
    """x @ weight.T + bias for chosen rows of a fixed table of inputs."""

    def __init__(
        self, level: str, weight: Weight, x: F32, threads: int = 1, bias: F32 | None = None
    ) -> None:
        build = ProgramBuilder()
        rows = build.embed("x", *x.shape)
        out = build.linear(rows, "w", weight.shape[0], "b" if bias is not None else None)
        build.tap("out", out)
        hidden = build.embed("x", *x.shape)
        self.program = build.finish(hidden, build.logits(hidden, "x", x.shape[0]))
        self.weights = {"x": exact("x", x), "w": weight}
        if bias is not None:
            self.weights["b"] = exact("b", bias)
        self.limits = Limits(256, 1, 1, 1, 1, 1, 1, 16, x.shape[0], threads)
        self.executable: CpuExecutable = CpuBackend(level).load(
            self.program, self.weights, layout(), self.limits
        )

    def run(self, rows: np.ndarray) -> F32:
        """The outputs of the rows with these indices, in one step."""
        batch = self.executable.batch
        batch.num_tokens = len(rows)
        batch.token[: len(rows)] = rows
        batch.position[: len(rows)] = 0
        self.executable.run("forward")
        return self.executable.read(self.program.taps["out"])


def quantized_product(weight: Weight, x: F32) -> np.ndarray:
    """The product as the kernels define it, in float64: x in 8 bits per row and group of 32 where
    the weight is quantized."""
    values = np.concatenate([dequantize(part) for part in weight.parts]).astype(np.float64)
    if weight.row_order is not None:
        values = values[weight.row_order]
    if all(FORMATS[form].block_values == 1 for form in weight.formats):
        return x.astype(np.float64) @ values.T
    groups = x.reshape(len(x), -1, 32)
    most = np.abs(groups).max(axis=2, keepdims=True)
    inverse = np.divide(np.float32(127), most, out=np.zeros_like(most), where=most > 0)
    rounded = np.rint(groups * inverse).astype(np.float64) * (most / np.float32(127))
    return rounded.reshape(x.shape) @ values.T
