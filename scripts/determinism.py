"""The determinism table: the same tokens and the same bits of the logits, whatever else happens.

    python scripts/determinism.py                 the full table (50 prompts x 64 tokens; minutes)
    python scripts/determinism.py --prompts 4 --tokens 12 --levels avx2     a cut of it
    python scripts/determinism.py --markdown docs/determinism.md

Every row runs the same prompts, greedy and seeded (temperature 0.8), under other conditions, and
compares each sequence's tokens and a BLAKE2 digest of the logits of all its steps with those of the
first row (alone, whole prompt in one chunk, cache off, one thread).
"""

import argparse
import hashlib
import platform
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from headrace.config import EngineConfig
from headrace.core.plan import StepPlan
from headrace.engine.engine import Engine
from headrace.engine.load import load
from headrace.engine.params import SamplingParams, make_submit
from headrace.engine.state import SequenceState
from headrace.text.tokenizer import Tokenizer

WORDS = """water wheel river engine light glass stone north signal copper garden number letter
window music paper winter summer market bridge engineer answer question random table morning"""


PREEMPTING_TOKENS = 512


@dataclass(frozen=True)
class Condition:
    """One row of the table. together: sequences of the set that run at once (0: all).

    others: random requests beside them. config: fields of EngineConfig. warm: run the set once
    before. preempt: a pool of KV that is far too small for all.
    """

    name: str
    together: int = 0
    others: int = 0
    warm: bool = False
    preempt: bool = False
    config: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Trace:
    """What one sequence did: its tokens, and a digest of all the logits it saw."""

    tokens: tuple[int, ...]
    digest: bytes


def conditions(threads: Sequence[int], others: int = 32) -> Iterator[Condition]:
    """The rows, the reference first."""
    off = {"enable_prefix_caching": False}
    yield Condition("alone, cache off", together=1, config={**off, "threads": 1})
    for count in threads:
        at = {"threads": count}
        name = f"beside {others} random others, {count} thread(s)"
        yield Condition(name, others=others, config=at)
    for chunk in (16, 64, 512):
        yield Condition(f"steps of {chunk} tokens", config={"max_num_batched_tokens": chunk})
    yield Condition("prefix cache cold")
    yield Condition("prefix cache warm", warm=True)
    yield Condition("prefix cache off", config=off)
    for block in (16, 32, 64):
        yield Condition(f"blocks of {block} tokens, cache warm", warm=True,
                        config={"block_size": block})  # fmt: skip
    yield Condition("pool so small that sequences are preempted", preempt=True)


def prompts(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Texts of 5 to 150 words; every third shares a beginning with the one before."""
    rng = random.Random(20)
    texts: list[str] = []
    for index in range(count):
        words = [rng.choice(WORDS.split()) for _ in range(rng.randint(5, 150))]
        head = texts[-1][: len(texts[-1]) // 2] if index % 3 == 2 else ""
        texts.append(head + " ".join(words))
    return [tokenizer.encode(text)[:700] for text in texts]  # tiny vocabularies spell words out


class Probe:
    """Collects the logits' digests of the sequences of interest."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.hashes: dict[str, hashlib._Hash] = {}

    def __call__(self, plan: StepPlan, states: list[SequenceState]) -> None:
        assert self.engine is not None
        loaded = self.engine.loaded
        logits = loaded.executable.read(loaded.model.program.logits)
        for row, state in zip(plan.samples[0::2], states, strict=True):
            digest = self.hashes.get(state.request.submit.id)
            if digest is not None:
                digest.update(logits[row].tobytes())


def run(
    engine: Engine,
    probe: Probe,
    tokenizer: Tokenizer,
    sets: list[tuple[str, list[int], SamplingParams]],
    together: int,
    others: int,
) -> dict[str, Trace]:
    """Run the requests of `sets` (at most `together` at once) beside `others` random ones."""
    rng = random.Random(7)
    results: dict[str, list[int]] = {}
    queue = list(sets)
    running: set[str] = set()
    noise: set[str] = set()
    limit = engine.loaded.plan.max_model_len
    made = 0
    while queue or running:
        while queue and (not together or len(running) < together):
            name, ids, params = queue.pop(0)
            engine.submit(make_submit(name, ids, params, tokenizer, limit))
            probe.hashes[name] = hashlib.blake2b(digest_size=16)
            results[name] = []
            running.add(name)
        while len(noise) < others:
            name, made = f"noise-{made}", made + 1
            ids = [rng.randrange(3, tokenizer.vocabulary) for _ in range(rng.randint(3, 120))]
            params = SamplingParams(max_tokens=rng.randint(1, 40), temperature=1.0, seed=made)
            engine.submit(make_submit(name, ids, params, tokenizer, limit))
            noise.add(name)
        outputs = engine.step()
        for output in outputs.outputs if outputs else ():
            if output.id in results:
                results[output.id].extend(output.tokens)
            if output.finish is not None:
                running.discard(output.id)
                noise.discard(output.id)
    for name in noise:
        engine.abort(name)
    while engine.has_work:
        engine.step()
    return {
        name: Trace(tuple(tokens), probe.hashes.pop(name).digest())
        for name, tokens in results.items()
    }


def measure(
    condition: Condition, base: EngineConfig, count: int, tokens: int
) -> tuple[dict[str, Trace], int]:
    """The traces of one condition, and how many preemptions it saw."""
    config = replace(base, **condition.config)  # type: ignore[arg-type]
    if condition.preempt:
        small = {"max_model_len": PREEMPTING_TOKENS, "watermark": 0.0}
        config = replace(config, **small, kv_cache_memory_bytes=preempting_pool(base))
    probe = Probe()
    loaded = load(config)
    engine = Engine(loaded, watch=probe)
    probe.engine = engine
    tokenizer = loaded.checkpoint.tokenizer()
    try:
        texts = prompts(tokenizer, count)
        greedy = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        seeded = replace(greedy, temperature=0.8, top_p=0.95, seed=1234)
        sets = [(f"greedy-{i}", ids, greedy) for i, ids in enumerate(texts)]
        sets += [(f"seeded-{i}", ids, seeded) for i, ids in enumerate(texts)]
        if condition.warm:
            run(engine, probe, tokenizer, sets, condition.together, 0)
        traces = run(engine, probe, tokenizer, sets, condition.together, condition.others)
        engine.scheduler.check()
        return traces, engine.scheduler.stats().preemptions
    finally:
        engine.close()


def preempting_pool(base: EngineConfig) -> int:
    """KV bytes for one sequence of the set's longest and little more."""
    loaded = load(replace(base, max_model_len=PREEMPTING_TOKENS))
    try:
        layout = loaded.plan.layout
        blocks = PREEMPTING_TOKENS // layout.block_size + 4
        return layout.page_bytes * layout.table_rows * blocks
    finally:
        loaded.executable.close()


def table(
    base: EngineConfig,
    levels: Sequence[str],
    threads: Sequence[int],
    count: int,
    tokens: int,
    others: int = 32,
) -> Iterator[tuple[str, str, int, int, str]]:
    """(level, condition, sequences equal, sequences, note) row by row."""
    for level in levels:
        reference: dict[str, Trace] | None = None
        for condition in conditions(threads, others):
            started = time.perf_counter()
            traces, preemptions = measure(condition, replace(base, level=level), count, tokens)
            reference = reference or traces
            equal = sum(traces[name] == reference[name] for name in reference)
            note = f"{time.perf_counter() - started:.0f} s"
            if condition.preempt:
                note += f", {preemptions} preemptions"
                if not preemptions:
                    note += ": the pool was not small enough"
            yield level, condition.name, equal, len(reference), note


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=EngineConfig().model)
    parser.add_argument("--backend", default="cpu", choices=("cpu", "reference"))
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--levels", nargs="+", default=None, help="default: all that run here")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    base = EngineConfig(model=options.model, backend=options.backend, max_model_len=2048)
    levels = options.levels
    if levels is None:
        from headrace.ops.cpu import _native

        levels = _native.levels() if options.backend == "cpu" else ["auto"]
    lines = ["| level | condition | equal | of | |", "|---|---|---|---|---|"]
    wrong = 0
    for row in table(base, levels, options.threads, options.prompts, options.tokens):
        wrong += row[2] != row[3]
        lines.append("| " + " | ".join(str(cell) for cell in row) + " |")
        print(*row, sep="  ", flush=True)
    if options.markdown:
        options.markdown.write_text(
            "# The determinism table\n\n"
            f"`python scripts/determinism.py --model {options.model} --prompts {options.prompts}"
            f" --tokens {options.tokens}` on {platform.machine()}.\n"
            "Each row: sequences (greedy and seeded) whose tokens and logits' bits all equal those"
            " of the first row of their level.\n\n" + "\n".join(lines) + "\n"
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
