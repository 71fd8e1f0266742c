"""`headrace bench latency`: one batch from prompt to last token, again and again."""

import argparse
import time
from dataclasses import replace

from headrace.cli.measure import common
from headrace.cli.measure.common import Limits, engine_config, report, spread
from headrace.engine.llm import LLM
from headrace.engine.params import SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """vLLM's flag names."""
    common.add_arguments(parser)
    parser.add_argument("--input-len", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--output-len", type=int, default=128, help="tokens to generate")
    parser.add_argument("--batch-size", type=int, default=1, help="prompts at once")
    parser.add_argument("--num-iters-warmup", type=int, default=1)
    parser.add_argument("--num-iters", type=int, default=5)


def run(arguments: argparse.Namespace) -> int:
    """Print TTFT, TPOT and rates, with the read limit measured between the iterations."""
    config = replace(engine_config(arguments), enable_prefix_caching=False)
    limits = Limits.of(config)
    options = {name: getattr(config, name) for name in config.__dataclass_fields__}
    llm = LLM(options.pop("model"), **options)
    size = llm.loaded.plan.bytes["weights"]
    ttft, tpot, prefill, reads, e2e = [], [], [], [], []
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=arguments.output_len)
    try:
        for iteration in range(arguments.num_iters_warmup + arguments.num_iters):
            prompts = [
                [100 + (7 * i + 13 * index + 31 * iteration) % 9000
                 for i in range(arguments.input_len)]
                for index in range(arguments.batch_size)
            ]  # fmt: skip
            started = time.perf_counter()
            results = llm.generate(prompts, params, progress=False)
            seconds = time.perf_counter() - started
            if iteration < arguments.num_iters_warmup:
                continue
            first = max(result.metrics["ttft"] for result in results)
            ttft.append(1e3 * first)
            e2e.append(seconds)
            prefill.append(arguments.input_len * arguments.batch_size / first)
            tpot.append(1e3 * (seconds - first) / max(1, arguments.output_len - 1))
            reads.append(limits.read(size, 0.05) / 1e9)
    finally:
        llm.close()
    rows = [
        {"figure": name, **spread(values), "unit": unit}
        for name, values, unit in (
            ("TTFT", ttft, "ms"),
            ("prefill", prefill, "tok/s"),
            ("TPOT", tpot, "ms"),
            ("decode", [1e3 * arguments.batch_size / value for value in tpot], "tok/s"),
            ("end to end", e2e, "s"),
            (f"read limit, {size / 1e6:.0f} MB", reads, "GB/s"),
            (
                "weights read a second of the limit",
                [100 * size / 1e6 / value / read for value, read in zip(tpot, reads, strict=True)],
                "%",
            ),
        )
    ]
    title = (
        f"{config.model}, {limits.level}, {limits.threads} threads: {arguments.batch_size} x"
        f" {arguments.input_len} in, {arguments.output_len} out"
    )
    report(rows, title, arguments.json)
    return 0
