"""`headrace bench throughput`: many prompts at once, offline."""

import argparse
import random
import time

from headrace.cli.measure import common
from headrace.cli.measure.common import engine_config, report
from headrace.engine.llm import LLM
from headrace.engine.params import SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """vLLM's flag names."""
    common.add_arguments(parser)
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--output-len", type=int, default=128, help="tokens to generate")
    parser.add_argument("--prefix-len", type=int, default=0, help="tokens that all prompts share")
    parser.add_argument("--random-seed", type=int, default=0, help="of the prompts' token ids")


def run(arguments: argparse.Namespace) -> int:
    """Print tokens a second, what the cache gave and how the time was spent."""
    config = engine_config(arguments)
    options = {name: getattr(config, name) for name in config.__dataclass_fields__}
    rng = random.Random(arguments.random_seed)

    def ids(count: int) -> list[int]:
        return [rng.randrange(100, 9000) for _ in range(count)]

    prefix = ids(arguments.prefix_len)
    prompts = [prefix + ids(arguments.input_len) for _ in range(arguments.num_prompts)]
    with LLM(options.pop("model"), **options) as llm:
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=arguments.output_len)
        started = time.perf_counter()
        results = llm.generate(prompts, params)
        seconds = time.perf_counter() - started
        stats = llm.get_metrics()
    outputs = arguments.num_prompts * arguments.output_len
    inputs = sum(len(prompt) for prompt in prompts)
    rows = [
        {"figure": name, "value": value, "unit": unit}
        for name, value, unit in (
            ("time", seconds, "s"),
            ("output", outputs / seconds, "tok/s"),
            ("input and output", (inputs + outputs) / seconds, "tok/s"),
            ("requests", arguments.num_prompts / seconds, "1/s"),
            ("prompt tokens from the cache", sum(r.num_cached_tokens for r in results), "tokens"),
            ("preemptions", stats["preemptions"], ""),
            ("steps", stats["steps"], ""),
        )
    ]
    report(rows, f"{config.model}: {arguments.num_prompts} prompts", arguments.json)
    return 0
