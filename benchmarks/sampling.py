"""A step of 64 sequences with 64 different sampling settings beside one of 64 equal ones.

    python benchmarks/sampling.py [--json] [--rounds 7] [--sequences 64] [--steps 16]

One engine in this process. A round decodes the same prompts twice, with equal settings and with
different ones (temperature, top_k, top_p, min_p, penalties, seed, logit_bias, min_tokens, ...), and
takes the median time of a step with all sequences. Rounds are interleaved and begin in turn. The
equal settings use the same filters, so that what is compared is the mix, not the features; `plain`
is greedy decoding, for scale. _outside_ms is the part of a step outside the kernels.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from typing import Any

from headrace.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.load import load
from headrace.engine.params import SamplingParams, make_submit

PROMPT = "The river turns the water wheel, and the wheel turns stone number"


def settings(count: int, tokens: int) -> dict[str, list[SamplingParams]]:
    """`count` settings a kind."""
    base = SamplingParams(max_tokens=tokens, ignore_eos=True)
    equal = replace(
        base, temperature=0.8, top_k=40, top_p=0.95, min_p=0.02, repetition_penalty=1.1,
        presence_penalty=0.2, frequency_penalty=0.1, logit_bias={500: 1.0, 900: -1.0},
        min_tokens=4, seed=1,
    )  # fmt: skip
    different = [
        replace(
            equal, temperature=0.5 + i / 100, top_k=20 + i, top_p=0.9 + i / 1000,
            min_p=0.01 + i / 5000, repetition_penalty=1 + i / 400, presence_penalty=i / 200,
            frequency_penalty=i / 300, logit_bias={500 + i: 1.0, 900 + i: -1.0},
            min_tokens=1 + i % 8, seed=i,
        )
        for i in range(count)
    ]  # fmt: skip
    return {"plain": [replace(base, temperature=0)] * count, "equal": [equal] * count,
            "different": different}  # fmt: skip


def decode(engine: Engine, name: str, params: list[SamplingParams]) -> tuple[float, float]:
    """(median seconds of a step with all sequences, of its part outside the kernels)."""
    tokenizer = engine.loaded.checkpoint.tokenizer()
    for index, each in enumerate(params):
        ids = tokenizer.encode(f"{PROMPT} {index}")
        engine.submit(make_submit(f"{name}-{index}", ids, each, tokenizer, 2048))
    steps: list[tuple[float, float]] = []
    while engine.has_work:
        started = time.perf_counter()
        outputs = engine.step()
        seconds = time.perf_counter() - started
        if outputs is not None and len(outputs.outputs) == len(params):
            steps.append((seconds, seconds - engine.kernel_seconds))
    inner = steps[2:-1]  # the first builds states, the last tears them down
    return statistics.median(s for s, _ in inner), statistics.median(s for _, s in inner)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=EngineConfig().model)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    engine = Engine(load(EngineConfig(options.model, max_model_len=2048)))
    kinds = settings(options.sequences, options.steps)
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    outside: dict[str, list[float]] = {name: [] for name in kinds}
    try:
        for name, params in kinds.items():
            decode(engine, f"warm-{name}", params)
        for number in range(options.rounds):
            names = list(kinds) if number % 2 == 0 else list(reversed(kinds))
            for name in names:
                whole, part = decode(engine, f"{number}-{name}", kinds[name])
                seconds[name].append(whole)
                outside[name].append(part)
    finally:
        engine.close()
    pairs = zip(seconds["different"], seconds["equal"], strict=True)
    result: dict[str, Any] = {
        f"{name}_ms": round(1e3 * statistics.median(each), 2) for name, each in seconds.items()
    }
    result |= {
        f"{name}_outside_ms": round(1e3 * statistics.median(each), 2)
        for name, each in outside.items()
    }
    result["different_over_equal"] = round(statistics.median(a / b for a, b in pairs), 4)
    result["equal_over_plain"] = round(
        statistics.median(a / b for a, b in zip(seconds["equal"], seconds["plain"], strict=True)), 4
    )
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        print(*(f"{name}={value}" for name, value in result.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
