"""The messages between an API process and an engine process (msgpack over a local socket).

The same values serve the in-process API, so that both paths run the same engine code.
"""

from typing import Literal

import msgspec

PROTOCOL_VERSION = 1


class SamplingSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a request's tokens are drawn: resolved values, no None where a number is meant.

    See `ops.spec.Sample` for the order. logprobs, prompt_logprobs: number of alternatives, None =
    off, 0 = the chosen token alone. seed: always set (drawn when the user gave none). banned: ids
    that are never sampled; banned_until: (ids, count): banned before that many output tokens
    (min_tokens). allowed: when not None only these ids are sampled. bad_words: token sequences
    never completed.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    logit_bias: dict[int, float] = {}
    banned: tuple[int, ...] = ()
    banned_until: tuple[tuple[int, ...], int] = ((), 0)
    allowed: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None


class GrammarSpec(msgspec.Struct, frozen=True):
    """A constraint on the output text. kind: json, json_object, regex, choice, grammar,
    structural_tag; source: the schema, pattern, ... as text (JSON where the kind's value is not a
    string)."""

    kind: str
    source: str
    after: int | None = None


class BeamSpec(msgspec.Struct, frozen=True):
    """Beam search: width beams, scores divided by length ** length_penalty."""

    width: int
    length_penalty: float = 1.0
    early_stopping: bool = False


class Submit(msgspec.Struct, frozen=True, tag="submit", omit_defaults=True):
    """A new request. id is the client's, unique among those in flight. n sequences share the
    prompt; outputs carry their index. arrival: wall-clock seconds (time.time()) at the door."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingSpec
    n: int = 1
    stop_tokens: tuple[int, ...] = ()
    min_tokens: int = 0
    priority: int = 0
    namespace: tuple[str, ...] = ()
    grammar: GrammarSpec | None = None
    beam: BeamSpec | None = None
    arrival: float = 0.0


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """The client left: free everything of these requests. Unknown ids are ignored."""

    ids: tuple[str, ...]


class Finish(msgspec.Struct, frozen=True, tag="finish"):
    """A stop string was found in one choice of a request: end that sequence."""

    id: str
    index: int


class ResetCache(msgspec.Struct, frozen=True, tag="reset_cache"):
    """Forget all cached prefixes that nobody uses."""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Finish running requests for up to `drain` seconds, then end."""

    drain: float


ToEngine = Submit | Abort | Finish | ResetCache | Shutdown


class Logprob(msgspec.Struct, frozen=True, array_like=True):
    """Of one position: the token's own log-probability and rank, and the best alternatives."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class Output(msgspec.Struct, frozen=True, tag="output", array_like=True):
    """New tokens of one sequence.

    logprobs has one entry per token where asked. prompt_logprobs comes with the first output of the
    request (index 0): one entry per prompt position, None for the first. cached_tokens: prompt
    tokens that were read from the cache. finish: 'stop' with stop_token when a stop id ended it,
    'length', 'abort', or 'error' with `error`. cumulative_logprob is set with `finish` for beams
    and best_of.
    """

    id: str
    index: int
    tokens: tuple[int, ...]
    cached_tokens: int
    finish: str | None = None
    stop_token: int | None = None
    logprobs: tuple[Logprob, ...] | None = None
    prompt_logprobs: tuple[Logprob | None, ...] | None = None
    cumulative_logprob: float | None = None
    error: str | None = None


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """A submit that the engine would not take; the request never existed there."""

    id: str
    field: str | None
    message: str
    code: int = 400
    retry_after: float | None = None


class Observation(msgspec.Struct, frozen=True, array_like=True):
    """Timings of one finished request, in seconds on the engine's clock (see docs/metrics.md)."""

    queue: float
    prefill: float
    decode: float
    prompt_tokens: int
    generation_tokens: int
    cached_tokens: int
    preemptions: int
    finish: str


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """Everything one step produced. stats: counters and gauges of the engine, or None where those
    told last will do: they cost as much as the rest of a small step.

    refused: requests whose grammar turned out not to compile.
    """

    outputs: tuple[Output, ...]
    finished: tuple[Observation, ...] = ()
    stats: dict[str, float] | None = None
    refused: tuple[Refused, ...] = ()


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine can take requests. timeline: (what, seconds since the process started). kernels:
    paths by op."""

    max_model_len: int
    vocabulary: int
    block_size: int
    num_pages: int
    backend: str
    level: str
    threads: int
    memory: dict[str, int]
    timeline: tuple[tuple[str, float], ...]
    kernels: dict[str, str]


class Fatal(msgspec.Struct, frozen=True, tag="fatal"):
    """The engine cannot start or cannot go on; message is one line for a person."""

    message: str
    kind: Literal["start", "run"] = "run"


FromEngine = Outputs | Refused | Ready | Fatal
