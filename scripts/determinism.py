"""The determinism table: the same tokens and the same bits of the logits, whatever else happens.

    python scripts/determinism.py                 the full table (50 prompts x 64 tokens; minutes)
    python scripts/determinism.py --prompts 4 --tokens 12 --levels avx2     a cut of it
    python scripts/determinism.py --rows features    the rows whose name holds a word
    python scripts/determinism.py --markdown docs/determinism.md

Every row runs the same prompts, greedy and seeded (temperature 0.8), under other conditions, and
compares each sequence's tokens, its log-probabilities and BLAKE2 digests of the logits of all its
steps with those of the first row (alone, whole prompt in one chunk, cache off, one thread). Rows of
"all features" run requests with every sampling and structure feature beside those, and compare both
with each served alone.
"""

import argparse
import hashlib
import platform
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from headrace.config import EngineConfig
from headrace.core.plan import StepPlan
from headrace.engine.engine import Engine
from headrace.engine.load import load
from headrace.engine.memory import blocks_of_sequence
from headrace.engine.messages import GrammarSpec, Output
from headrace.engine.params import SamplingParams, make_submit
from headrace.engine.state import SequenceState
from headrace.text.detokenize import Detokenizer, StopStrings
from headrace.text.tokenizer import Tokenizer

WORDS = """water wheel river engine light glass stone north signal copper garden number letter
window music paper winter summer market bridge engineer answer question random table morning"""


PREEMPTING_TOKENS = 512


@dataclass(frozen=True)
class Condition:
    """One row of the table. together: sequences of the set that run at once (0: all).

    others: random requests beside them. config: fields of EngineConfig. warm: run the set once
    before. preempt: a pool of KV that is far too small for all. features: the requests of
    `mixture` too.
    """

    name: str
    together: int = 0
    others: int = 0
    warm: bool = False
    preempt: bool = False
    features: bool = False
    config: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Trace:
    """What one request did: the tokens of its sequences, a digest of their log-probabilities, and
    digests of (tokens so far, logits) for each row it saw: a set, because in which order its
    sequences come in a step, and whether a beam's row was computed twice, is nobody's promise."""

    tokens: tuple[tuple[int, ...], ...]
    logprobs: bytes
    logits: frozenset[bytes]


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
    yield Condition("all features, alone, cache off", together=1, features=True,
                    config={**off, "threads": 1})  # fmt: skip
    for count in threads:
        yield Condition(f"all features in one batch, {count} thread(s)", others=others // 2,
                        features=True, config={"threads": count})  # fmt: skip
    for chunk in (16, 64):
        yield Condition(f"all features, steps of {chunk} tokens", features=True,
                        config={"max_num_batched_tokens": chunk})  # fmt: skip
    yield Condition("all features, cache warm", warm=True, features=True)
    yield Condition("all features, preempted", preempt=True, features=True)


def mixture(tokenizer: Tokenizer, tokens: int) -> dict[str, SamplingParams]:
    """Requests that together use every field that steers what is sampled, by name."""
    drawn = SamplingParams(max_tokens=tokens, temperature=0.9, seed=77, ignore_eos=True)
    free = replace(drawn, ignore_eos=False)
    words = tokenizer.encode(" " + " ".join(WORDS.split()))
    schema = (
        '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "size":'
        ' {"enum": ["small", "large"]}, "count": {"type": "integer", "minimum": 1}},'
        ' "required": ["name", "size", "count"], "additionalProperties": false}'
    )
    json = GrammarSpec("json", schema)
    lark = GrammarSpec(
        "grammar", 'start: item (", " item)*\nitem: /[a-z]{1,9}/ " is " /[0-9]{1,4}/'
    )
    return {
        "penalties": replace(drawn, repetition_penalty=1.3, presence_penalty=0.6,
                             frequency_penalty=0.4),
        "frequency, greedy": replace(drawn, temperature=0, frequency_penalty=-1.0, logprobs=2),
        "bias": replace(drawn, logit_bias={words[0]: 9.0, words[1]: -100.0}, min_p=0.05),
        "top_k": replace(drawn, top_k=20, logprobs=5, prompt_logprobs=2),
        "top_k, top_p, min_p": replace(drawn, top_k=50, top_p=0.9, min_p=0.01, logprobs=0),
        "allowed ids": replace(drawn, allowed_token_ids=words, top_p=0.7),
        "n": replace(drawn, n=3, logprobs=1, temperature=1.2),
        "best_of": replace(drawn, n=2, best_of=4, top_p=0.95),
        "beams": replace(free, use_beam_search=True, n=2, best_of=3, logprobs=1,
                         length_penalty=0.5),
        "beams of a regex": replace(free, use_beam_search=True, n=3,
                                    structured_outputs=GrammarSpec("regex", "[a-z]+( [a-z]+){9}")),
        "json": replace(free, structured_outputs=json),
        "json, logprobs": replace(free, structured_outputs=json, logprobs=3, n=2),
        "regex": replace(free, structured_outputs=GrammarSpec("regex", "([A-Z][a-z]+ ){3,9}end")),
        "choice": replace(free, structured_outputs=GrammarSpec(
            "choice", '["internationalization", "international water", "glass"]')),
        "grammar": replace(free, structured_outputs=lark, presence_penalty=1.5, n=2),
        "stop strings": replace(drawn, stop=["e", " the wa", "\n"], min_tokens=min(3, tokens)),
        "min_tokens": replace(free, min_tokens=tokens // 2, stop_token_ids=words[:9], top_k=5),
        "bad words": replace(drawn, bad_words=["the", "water wheel", "a"], cache_salt="salt"),
        "salted": replace(drawn, cache_salt="salt", prompt_logprobs=0),
    }  # fmt: skip


def prompts(tokenizer: Tokenizer, count: int, longest: int) -> list[list[int]]:
    """Texts of 5 to 150 words; every third shares a beginning with the one before. Tiny
    vocabularies spell words out: the longest keep their first tokens."""
    rng = random.Random(20)
    texts: list[str] = []
    for index in range(count):
        words = [rng.choice(WORDS.split()) for _ in range(rng.randint(5, 150))]
        head = texts[-1][: len(texts[-1]) // 2] if index % 3 == 2 else ""
        texts.append(head + " ".join(words))
    return [tokenizer.encode(text)[:longest] for text in texts]


class Answer:
    """A request under test while it runs: its tokens, and stop strings as a client finds them."""

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer, sequences: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(sequences)]
        self.open = set(range(sequences))
        self.logits: set[bytes] = set()
        self._logprobs: list[list[bytes]] = [[] for _ in range(sequences)]
        self._texts = [Detokenizer(tokenizer) for _ in range(sequences)]
        self._stops = [StopStrings(params.stop_strings) for _ in range(sequences)]
        self._min_tokens = params.min_tokens

    def take(self, output: Output) -> bool:
        """Apply an output; True when a stop string ends its sequence."""
        index = output.index
        if output.finish in ("error", "abort"):
            raise RuntimeError(f"{output.id}: {output.finish} {output.error}")
        said: list[object] = [*(output.prompt_logprobs or ()), *(output.logprobs or ())]
        if output.cumulative_logprob is not None:
            said.append(output.cumulative_logprob)
        self._logprobs[index] += map(msgspec.msgpack.encode, said)
        stopped = False
        for token in output.tokens:
            self.tokens[index].append(token)
            text = self._texts[index].push((token,))
            if len(self.tokens[index]) > self._min_tokens:
                stopped = self._stops[index].push(text)[1] is not None
            if stopped:
                break
        if stopped or output.finish is not None:
            self.open.discard(index)
        return stopped and output.finish is None

    def trace(self) -> Trace:
        """What it did, whole."""
        said = hashlib.blake2b(b"|".join(b"".join(pieces) for pieces in self._logprobs)).digest()
        return Trace(tuple(map(tuple, self.tokens)), said, frozenset(self.logits))


class Probe:
    """Collects the digests of the rows that the requests of interest saw."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.answers: dict[str, Answer] = {}

    def __call__(self, plan: StepPlan, states: list[SequenceState]) -> None:
        assert self.engine is not None
        loaded = self.engine.loaded
        logits = loaded.executable.read(loaded.model.program.logits)
        for row, state in zip(plan.samples[0::2], states, strict=True):
            answer = self.answers.get(state.request.submit.id)
            if answer is not None:
                digest = hashlib.blake2b(repr(state.outputs).encode(), digest_size=16)
                digest.update(logits[row].tobytes())
                answer.logits.add(digest.digest())


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
    answers = probe.answers = {
        name: Answer(params, tokenizer, params.num_sequences) for name, _, params in sets
    }
    queue = list(sets)
    running: set[str] = set()
    noise: set[str] = set()
    limit = engine.loaded.plan.max_model_len
    made = 0
    while queue or running:
        while queue and (not together or len(running) < together):
            name, ids, params = queue.pop(0)
            engine.submit(make_submit(name, ids, params, tokenizer, limit))
            running.add(name)
        while len(noise) < others:
            name, made = f"noise-{made}", made + 1
            ids = [rng.randrange(3, tokenizer.vocabulary) for _ in range(rng.randint(3, 120))]
            params = SamplingParams(max_tokens=rng.randint(1, 40), temperature=1.0, seed=made)
            engine.submit(make_submit(name, ids, params, tokenizer, limit))
            noise.add(name)
        outputs = engine.step()
        if outputs is None:
            time.sleep(0.001 if engine.only_compiling else 0)
            continue
        if outputs.refused:
            raise RuntimeError(outputs.refused[0].message)
        for output in outputs.outputs:
            answer = answers.get(output.id)
            if answer is None:
                if output.finish is not None:
                    noise.discard(output.id)
            elif output.index in answer.open:
                if answer.take(output):
                    engine.finish(output.id, output.index)
                if not answer.open:
                    running.discard(output.id)
    for name in noise:
        engine.abort(name)
    while engine.has_work:
        engine.step()
    return {name: answer.trace() for name, answer in answers.items()}


def measure(
    condition: Condition, base: EngineConfig, count: int, tokens: int
) -> tuple[dict[str, Trace], int]:
    """The traces of one condition, and how many preemptions it saw."""
    config = replace(base, **condition.config)  # type: ignore[arg-type]
    longest = base.max_model_len or PREEMPTING_TOKENS
    if condition.preempt:
        length = min(PREEMPTING_TOKENS, longest)
        pool = preempting_pool(replace(base, max_model_len=length))
        config = replace(config, max_model_len=length, watermark=0.0, kv_cache_memory_bytes=pool)
    probe = Probe()
    loaded = load(config)
    engine = Engine(loaded, watch=probe)
    probe.engine = engine
    tokenizer = loaded.checkpoint.tokenizer()
    try:
        texts = prompts(tokenizer, count, min(700, longest // 2))
        greedy = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        seeded = replace(greedy, temperature=0.8, top_p=0.95, seed=1234)
        sets = [(f"greedy-{i}", ids, greedy) for i, ids in enumerate(texts)]
        sets += [(f"seeded-{i}", ids, seeded) for i, ids in enumerate(texts)]
        if condition.features:
            mixed = list(mixture(tokenizer, max(tokens, 12)).items())
            sets += [
                (f"{name}-{i}", texts[(i * len(mixed) + j) % count], params)
                for i in range(-(-count // len(mixed)))
                for j, (name, params) in enumerate(mixed)
            ]
            random.Random(5).shuffle(sets)
        if condition.warm:
            run(engine, probe, tokenizer, sets, condition.together, 0)
        traces = run(engine, probe, tokenizer, sets, condition.together, condition.others)
        engine.scheduler.check()
        return traces, engine.scheduler.stats().preemptions
    finally:
        engine.close()


def preempting_pool(base: EngineConfig) -> int:
    """KV bytes for one sequence of the longest and four pages more."""
    loaded = load(base)
    try:
        plan, layout = loaded.plan, loaded.plan.layout
        sizes = (plan.max_model_len, layout.block_size, plan.limits.max_tokens)
        pages = sum(
            blocks_of_sequence(group, *sizes) * group.pages_per_block for group in plan.pool.groups
        )
        return layout.page_bytes * (pages + 4)
    finally:
        loaded.executable.close()


def table(
    base: EngineConfig,
    levels: Sequence[str],
    threads: Sequence[int],
    count: int,
    tokens: int,
    others: int = 32,
    wanted: Callable[[Condition], bool] = lambda condition: True,
) -> Iterator[tuple[str, str, int, int, str]]:
    """(level, condition, requests equal, requests, note) row by row, of the wanted conditions. The
    first wanted row that runs a request is the one that the others are compared with."""
    for level in levels:
        reference: dict[str, Trace] = {}
        for condition in conditions(threads, others):
            if not wanted(condition):
                continue
            started = time.perf_counter()
            traces, preemptions = measure(condition, replace(base, level=level), count, tokens)
            reference = traces | reference
            wrong = [name for name in traces if traces[name] != reference[name]]
            note = f"{time.perf_counter() - started:.0f} s"
            if condition.preempt:
                note += f", {preemptions} preemptions"
                if not preemptions:
                    note += ": the pool was not small enough"
            if wrong:
                note += f", not equal: {', '.join(wrong[:5])}"
            yield level, condition.name, len(traces) - len(wrong), len(traces), note


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
    parser.add_argument("--rows", default="", help="only rows whose name holds this")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    base = EngineConfig(model=options.model, backend=options.backend, max_model_len=2048)
    levels = options.levels
    if levels is None:
        from headrace.ops.cpu import _native

        levels = _native.levels() if options.backend == "cpu" else ["auto"]
    lines = ["| level | condition | equal | of | |", "|---|---|---|---|---|"]
    wrong = 0
    sizes = (options.prompts, options.tokens)
    rows = table(base, levels, options.threads, *sizes, wanted=lambda c: options.rows in c.name)
    for row in rows:
        wrong += row[2] != row[3]
        lines.append("| " + " | ".join(str(cell) for cell in row) + " |")
        print(*row, sep="  ", flush=True)
    if options.markdown:
        options.markdown.write_text(
            "# The determinism table\n\n"
            f"`python scripts/determinism.py --model {options.model} --prompts {options.prompts}"
            f" --tokens {options.tokens}` on {platform.machine()}.\n"
            "Each row: requests (greedy, seeded, all features) whose tokens, log-probabilities and"
            " logits' bits all equal those of the same request served alone.\n\n"
            + "\n".join(lines)
            + "\n"
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
