"""The portable level beside plain numpy: one decoding sequence, milliseconds a token.

    python benchmarks/portable.py [--model MODEL] [--tokens 32]

numpy multiplies one row with every weight matrix of the model as float32, and nothing else: no
attention, norm or sampling, so it is a bound on what a forward pass written in numpy takes.
"""

import argparse
import time
from statistics import median

import numpy as np

from headrace import LLM, SamplingParams
from headrace.checkpoint import open_configured
from headrace.config import DEFAULT_MODEL, EngineConfig
from headrace.ops.formats import dequantize
from headrace.ops.spec import Linear, Logits


def numpy_step(model: str, tokens: int) -> list[float]:
    """Milliseconds of all matrix products of a step, `tokens` times."""
    loaded = open_configured(EngineConfig(model=model)).model(None)
    names = [op.weight for op in loaded.program.ops if isinstance(op, Linear | Logits)]
    matrices = [
        np.concatenate([dequantize(part) for part in loaded.weights[name].parts]) for name in names
    ]
    rows = {each.shape[1]: np.ones(each.shape[1], np.float32) for each in matrices}
    times = []
    for _ in range(tokens):
        started = time.perf_counter()
        for matrix in matrices:
            matrix @ rows[matrix.shape[1]]
        times.append(1e3 * (time.perf_counter() - started))
    return times


def portable_step(model: str, tokens: int) -> list[float]:
    """Milliseconds of the engine's steps at the portable level."""
    times = []
    with LLM(model, level="portable", max_model_len=1024) as llm:
        step = llm.engine.step

        def timed() -> object:
            outputs = step()
            times.append(1e3 * llm.engine.step_seconds)
            return outputs

        llm.engine.step = timed  # type: ignore[method-assign,assignment]
        greedy = SamplingParams(max_tokens=tokens + 1, temperature=0.0, ignore_eos=True)
        llm.generate(["The mill stands by the river"], greedy)
    return times[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--tokens", type=int, default=32)
    arguments = parser.parse_args()
    ours = median(portable_step(arguments.model, arguments.tokens))
    plain = median(numpy_step(arguments.model, arguments.tokens))
    print(f"portable level {ours:.1f} ms a token, numpy float32 products {plain:.1f} ms")
    print(f"{plain / ours:.2f}x as fast as numpy alone")


if __name__ == "__main__":
    main()
