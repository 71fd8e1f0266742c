"""The values that cross the border of the core: requests in, plans and events out.

Everything here is plain data of the standard library. Ids are ints that the caller (requests) or
the scheduler (sequences, plans) hands out, never reused. Times are seconds as float on the caller's
clock; the core never reads one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Group:
    """A KV group as the core sees it: which positions it keeps, and pages per block.

    window: None keeps every position; W > 0 keeps the last W. first: kept-first tokens of streaming
    attention, never freed.
    """

    window: int | None = None
    pages_per_block: int = 1
    first: int = 0


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """Sizes fixed at load. num_pages: pages in the pool. block_size: tokens a block.
    max_positions: longest sequence (prompt and output). One such sequence fits the pool."""

    num_pages: int
    block_size: int
    groups: tuple[Group, ...]
    max_positions: int
    slots: int
    prefix_caching: bool = True


@dataclass(frozen=True, slots=True)
class Knobs:
    """What steers the scheduler and may change while it runs (`Scheduler.set_knobs`).

    max_sequences: sequences that run at once, at most `PoolConfig.slots`.
    max_tokens: token budget of a step. chunk: most tokens of one sequence in a step.
    mixed_prefill: most tokens of a step for all that are not at their last known token (prompts,
    as a rule) while others decode beside them; bounds the ITL of those (0: only max_tokens does).
    max_logits: logits rows of a step. watermark: share of the pool's pages that admission leaves
    free for growth. max_waiting: requests that may wait; one more is refused (0: no limit).
    policy: order of waiting requests, 'fcfs' or 'priority' (lower first, then arrival).
    """

    max_sequences: int = 128
    max_tokens: int = 512
    chunk: int = 512
    max_logits: int = 256
    watermark: float = 0.01
    max_waiting: int = 0
    policy: Literal["fcfs", "priority"] = "fcfs"
    mixed_prefill: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """What the core must know of a request; sampling and text are the engine's business.

    namespace: root of the prefix index (adapter, cache_salt, ...): equal namespaces may share KV.
    n: sequences that are forked after the prompt. stop_tokens: ids that end a sequence (the id
    itself is the last known token); the caller leaves out what `ignore_eos` ignores. min_tokens:
    stop_tokens do not end a sequence with fewer output tokens (the sampler also bans them).
    score_from: first prompt position whose own log-probability is wanted (1 = all that have one),
    or None; no prefix is reused past score_from - 1 and every row from there on yields logits.
    max_tokens may be 0: the prompt is computed (and scored), nothing is sampled.
    """

    id: int
    prompt: tuple[int, ...]
    max_tokens: int
    n: int = 1
    stop_tokens: frozenset[int] = frozenset()
    min_tokens: int = 0
    priority: int = 0
    namespace: tuple[str, ...] = ()
    score_from: int | None = None


class Refused(Exception):
    """The scheduler does not take a request. `str()` is one line for a person.

    field: the field of `Request` at fault, None when it is no field's fault. overload: the request
    is fine but too many wait; the same request may be taken later.
    """

    def __init__(self, field: str | None, message: str, overload: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.overload = overload


class Copy(NamedTuple):
    """Copy tokens [first, first + tokens) of one page to another, in every layer of it."""

    source: int
    target: int
    first: int
    tokens: int


@dataclass(slots=True)
class StepPlan:
    """One forward pass, as parallel lists (index i = slice i). Nobody changes a plan once made.

    sequences, slots, starts, counts: slice i computes positions [starts[i], starts[i] + counts[i])
    of that sequence, whose page table is row slots[i]. tokens: the ids of all slices, joined.
    logits: how many of the slice's last rows yield logits.
    samples: flat pairs (logits row in plan order, sequence id): one new token each.
    scores: flat triples (logits row, sequence id, position): the known token at that position is
    scored by that row.
    table: flat quadruples (slot, table row, block index, page): page table entries to set first.
    copies: row copies to make before the pass. num_logits = sum(logits).
    seconds: predicted by the estimator. reasons: running sequences that got nothing in this step
    and why, as (sequence id, word): 'pages', 'rows' (of logits), 'budget' (tokens), 'prefix' (a
    neighbour computes its next block).

    Bounds that arrays may rely on: tokens <= max_tokens, num_logits <= max_logits,
    samples / 2 + scores / 3 <= max(max_logits, slots), one slice a slot, and at most one block
    copied a slot (pages_per_block copies a group).
    """

    id: int
    sequences: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    logits: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    scores: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    num_logits: int = 0
    seconds: float = 0.0
    reasons: list[tuple[int, str]] = field(default_factory=list)


class Event(NamedTuple):
    """What became of one sequence in one `done` (or `abort`, `finish`, `failed`).

    choice: its index among the request's n. tokens: new known tokens, in order (empty when only the
    state changed). finish: None while it runs. stop_token: the id that ended it, where finish is
    'stop'.
    """

    request: int
    sequence: int
    choice: int
    tokens: tuple[int, ...]
    finish: FinishReason | None
    stop_token: int | None = None


class Usage(NamedTuple):
    """Read-only facts of a request: prompt tokens read from the cache when first admitted, and how
    often it was preempted."""

    cached_tokens: int
    preemptions: int


@dataclass(slots=True)
class Stats:
    """Counters (monotonic) and gauges of a scheduler, for metrics and reports."""

    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages_cached: int = 0
    pages_total: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    evictions: int = 0
    copied_tokens: int = 0
    steps: int = 0


class Estimator:
    """Predicts the seconds of a plan. The default knows nothing and says 0."""

    def seconds(self, plan: StepPlan) -> float:
        """Predicted seconds of one execution of `plan`."""
        return 0.0


Tokens = Sequence[Sequence[int]]
"""What `done` takes: for each sample point of the plan, in order, the token ids it yielded."""
