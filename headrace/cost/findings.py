"""What a set-up leaves on the table: each finding is a prediction of the cost model, not a rule.

The engine's own step model prices the traffic as configured and with one thing changed; a change
that would gain less than GAIN is not worth a line.
"""

from dataclasses import dataclass

from headrace.cost.capacity import Promise, Traffic
from headrace.cost.roofline import StepModel

GAIN = 0.05


@dataclass(frozen=True)
class Finding:
    """what: one line. evidence: the numbers behind it. gain: share by which the named thing would
    fall, None where it is no matter of degree. advice: what to do."""

    what: str
    evidence: str
    advice: str
    gain: float | None = None


@dataclass(frozen=True)
class Running:
    """How an engine is set up, as far as its cost goes. sequences, step_tokens: caps of a step.
    mixed_tokens: cap of the prompt tokens of a step in which others decode. quantized: the step
    model with 4-bit weights, where the weights have more bits; shared: prompt tokens that requests
    have in common."""

    steps: StepModel
    sequences: int
    step_tokens: int
    mixed_tokens: int
    kv_tokens: int
    prefix_caching: bool
    shared: int = 0
    quantized: StepModel | None = None


def findings(running: Running, traffic: Traffic, promise: Promise) -> list[Finding]:
    """What would help, the largest gain first; what has no degree comes before."""
    found = [
        *_batch(running, traffic, promise),
        *_stall(running, traffic, promise),
        *_first_token(running, traffic, promise),
        *_memory(running, traffic),
        *_weights(running, traffic),
        *_prefix(running, traffic),
    ]
    return sorted(found, key=lambda one: -(one.gain if one.gain is not None else 2.0))


def _decode(steps: StepModel, batch: int, traffic: Traffic) -> float:
    return steps.seconds([traffic.context] * batch, [1] * batch)


def _batch(running: Running, traffic: Traffic, promise: Promise) -> list[Finding]:
    """A batch cap past what the promise allows: throughput up, goodput down."""
    if promise.tpot is None:
        return []
    full = _decode(running.steps, running.sequences, traffic)
    if full <= promise.tpot:
        return []
    most = _largest(running, traffic, promise.tpot)
    if most == 0:
        alone = _decode(running.steps, 1, traffic)
        return [
            Finding(
                "the promise on TPOT cannot be kept, not even for one request",
                f"a step of one sequence takes {alone * 1e3:.1f} ms",
                "promise more time, or use a smaller model or fewer bits",
            )
        ]
    return [
        Finding(
            "the batch cap lets TPOT past the promise",
            f"{running.sequences} sequences: {full * 1e3:.0f} ms a token; {most} keep "
            f"{promise.tpot * 1e3:.0f} ms",
            f"--max-num-seqs {most}",
        )
    ]


def _largest(running: Running, traffic: Traffic, tpot: float) -> int:
    """The largest batch whose decode step keeps the promise, 0 if none."""
    low, high = 0, running.sequences
    while low < high:
        middle = (low + high + 1) // 2
        if _decode(running.steps, middle, traffic) <= tpot:
            low = middle
        else:
            high = middle - 1
    return low


def _stall(running: Running, traffic: Traffic, promise: Promise) -> list[Finding]:
    """A step budget that stalls the streams beside a long prompt."""
    if promise.tpot is None:
        return []
    budget = running.mixed_tokens
    stall = running.steps.seconds([0], [budget], 1)
    if stall <= 4 * promise.tpot:
        return []
    while budget > 16 and running.steps.seconds([0], [budget], 1) > 2 * promise.tpot:
        budget //= 2
    return [
        Finding(
            "long prompts stall the streams beside them",
            f"a step with {running.mixed_tokens} prompt tokens takes {stall * 1e3:.0f} ms, the "
            f"promise is {promise.tpot * 1e3:.0f} ms a token",
            f"--mixed-prefill-tokens {budget}",
        )
    ]


def _first_token(running: Running, traffic: Traffic, promise: Promise) -> list[Finding]:
    prompt = max(1, round(traffic.computed))
    seconds = _prefill(running.steps, prompt, running.step_tokens)
    if promise.ttft is None or seconds <= promise.ttft:
        return []
    return [
        Finding(
            "the promise on TTFT cannot be kept, not even on an idle machine",
            f"a prompt of {prompt} tokens takes {seconds:.2f} s",
            "promise more time, share prefixes, or use a smaller model",
        )
    ]


def _prefill(steps: StepModel, prompt: int, chunk: int) -> float:
    starts = range(0, prompt, chunk)
    return sum(steps.seconds([start], [min(chunk, prompt - start)], 1) for start in starts)


def _memory(running: Running, traffic: Traffic) -> list[Finding]:
    """KV for fewer requests than the cap: the rest wait, or are preempted."""
    fit = int(running.kv_tokens // (traffic.prompt + traffic.output))
    if fit >= running.sequences:
        return []
    return [
        Finding(
            "the KV cache holds fewer requests than may run at once",
            f"{running.kv_tokens:,} tokens hold {fit} requests of "
            f"{traffic.prompt + traffic.output:.0f}; the cap is {running.sequences}",
            "more --kv-cache-memory-bytes, --kv-cache-dtype int8, or a lower --max-num-seqs",
        )
    ]


def _weights(running: Running, traffic: Traffic) -> list[Finding]:
    if running.quantized is None:
        return []
    batch = min(running.sequences, 8)
    before = _decode(running.steps, batch, traffic)
    after = _decode(running.quantized, batch, traffic)
    return _gain(
        "weights have more bits than they need",
        f"a step of {batch} sequences: {before * 1e3:.1f} ms, {after * 1e3:.1f} ms with 4 bits",
        "--quantization int4, or a 4-bit file",
        1.0 - after / before,
    )


def _prefix(running: Running, traffic: Traffic) -> list[Finding]:
    if running.prefix_caching or not running.shared:
        return []
    prompt = max(1, round(traffic.prompt))
    shared = min(running.shared, prompt - 1)
    before = _prefill(running.steps, prompt, running.step_tokens)
    after = before - _prefill(running.steps, shared, running.step_tokens)
    return _gain(
        "prefix caching is off, but prompts share a prefix",
        f"a prompt takes {before:.2f} s; {after:.2f} s with its first {shared} tokens cached",
        "leave out --no-enable-prefix-caching",
        1.0 - after / before,
    )


def _gain(what: str, evidence: str, advice: str, gain: float) -> list[Finding]:
    return [Finding(what, evidence, advice, gain)] if gain >= GAIN else []
