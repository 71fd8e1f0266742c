"""Compare a back-end with the golden log-probabilities of tests/golden (see scripts/golden.py).

    python scripts/perplexity.py [--model smollm2] [--backend reference] [--level auto] [--tokens N]

Prints perplexity, greedy agreement and mean KL divergence against transformers in float32 on the
same dequantized weights.
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from headrace.checkpoint import open_checkpoint  # noqa: E402
from headrace.ops.backends import open_backend  # noqa: E402
from tests.models.forward import cut, log_softmax, stream  # noqa: E402

MODELS = {"smollm2": "smollm2-135m", "gemma3": "gemma3-270m"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="smollm2")
    parser.add_argument("--file", help="a .gguf file to use instead of the fetched model")
    parser.add_argument("--backend", default="auto", choices=["auto", "cpu", "reference"])
    parser.add_argument("--level", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--kv-cache-dtype", default=None, choices=["f16", "f32", "int8"])
    arguments = parser.parse_args()

    golden = np.load(ROOT / "tests" / "golden" / f"{arguments.model}.npz")
    backend = open_backend(arguments.backend, arguments.level, arguments.threads)
    dtype = arguments.kv_cache_dtype or ("f32" if backend.name == "reference" else "f16")
    ids = golden["ids"][: arguments.tokens].tolist()
    model = open_checkpoint(arguments.file or MODELS[arguments.model]).model(len(ids))
    began = time.perf_counter()
    chosen, same, divergence = [], 0, []
    start, stride = 0, 16  # as scripts/golden.py
    for rows in stream(backend, model, ids, cut(len(ids), arguments.chunk), dtype):
        logprobs = log_softmax(rows)
        for row in range(len(rows)):
            at = start + row
            same += int(rows[row].argmax()) == golden["argmax"][at]
            if at + 1 < len(ids):
                chosen.append(logprobs[row, ids[at + 1]])
            if at % stride == 0:
                divergence.append(
                    kl(
                        golden["top_logprob"][at // stride],
                        logprobs[row, golden["top_ids"][at // stride]],
                    )
                )
        start += len(rows)
    expected = golden["logprob"][: len(ids) - 1]
    perplexity, wanted = np.exp(-np.mean(chosen)), np.exp(-expected.mean())
    print(f"{arguments.model} on {backend.name} ({backend.level}), {dtype} KV, {len(ids)} tokens")
    print(f"  perplexity {perplexity:.4f}, golden {wanted:.4f} ({perplexity / wanted - 1:+.4%})")
    print(f"  greedy token equal at {same / len(ids):.2%} of positions")
    print(f"  mean KL to golden {np.mean(divergence):.6f} ({len(divergence)} positions)")
    print(f"  {time.perf_counter() - began:.1f} s")


def kl(golden: np.ndarray, ours: np.ndarray) -> float:
    """KL(golden || ours) over the golden top entries and one bucket for everything else."""
    p, q = np.exp(golden.astype(np.float64)), np.exp(ours.astype(np.float64))
    rest_p, rest_q = max(1 - p.sum(), 1e-12), max(1 - q.sum(), 1e-12)
    return float((p * np.log(p / q)).sum() + rest_p * np.log(rest_p / rest_q))


if __name__ == "__main__":
    main()
