"""How far llama.cpp's next-token distributions are from the golden ones, on the same GGUF file.

    python -m venv /tmp/peer && /tmp/peer/bin/pip install xllamacpp numpy
    /tmp/peer/bin/python benchmarks/llama_kl.py
    ~/.cache/headrace/models/SmolLM2-135M-Instruct.Q4_1.gguf

Prints the mean KL divergence at the positions that `scripts/perplexity.py --backend cpu` uses, so
that the two figures compare. Needs `xllamacpp` (llama.cpp as a library) in an environment of its
own.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import xllamacpp

GOLDEN = Path(__file__).parent.parent / "tests" / "golden" / "smollm2.npz"
STRIDE = 16  # as scripts/golden.py


def divergence(golden: np.ndarray, ours: np.ndarray) -> float:
    """KL(golden || ours) over the golden top entries and one bucket for everything else."""
    p, q = np.exp(golden.astype(np.float64)), np.exp(ours.astype(np.float64))
    rest_p, rest_q = max(1 - p.sum(), 1e-12), max(1 - q.sum(), 1e-12)
    return float((p * np.log(p / q)).sum() + rest_p * np.log(rest_p / rest_q))


def server(model: str, threads: int) -> xllamacpp.Server:
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx, params.n_parallel, params.warmup = 4352, 1, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    return xllamacpp.Server(params)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="the .gguf file")
    parser.add_argument("--positions", type=int, default=250)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    golden = np.load(GOLDEN)
    ids = golden["ids"].tolist()
    peer = server(options.model, options.threads)
    found, same = [], 0
    for index in range(options.positions):
        at = STRIDE * index
        request = {
            "prompt": ids[: at + 1], "n_predict": 1, "n_probs": 4000, "temperature": 0.0,
            "cache_prompt": True, "post_sampling_probs": False,
        }  # fmt: skip
        answer = peer.handle_completions(request)
        answer = json.loads(answer) if isinstance(answer, str) else answer
        entries = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        logprobs = {entry["id"]: entry["logprob"] for entry in entries}
        same += max(logprobs, key=logprobs.get) == golden["argmax"][at]
        wanted = [logprobs.get(int(token), -20.0) for token in golden["top_ids"][index]]
        found.append(divergence(golden["top_logprob"][index], np.array(wanted)))
    print(f"llama.cpp (xllamacpp {xllamacpp.__version__}), {len(found)} positions")
    print(f"  greedy token equal at {same / len(found):.2%}")
    print(f"  mean KL to golden {np.mean(found):.6f}")


if __name__ == "__main__":
    main()
