"""The state of a sequence, and of the request that owns it.

Progress of a sequence is three counts: `computed <= scheduled <= target`, where `target` is the
number of known tokens. `scheduled - computed` tokens are in the plan in flight; a step gives a
sequence some of the `target - scheduled` others. There is no prefill phase and no decode phase.

A sequence is *waiting* (no slot, no blocks, `computed == 0`), *running* (a slot and blocks),
*unborn* (a choice of a request whose prompt is not computed yet: it shares the prompt of the first
choice) or *ended*. Only `scheduler.py` moves it from one to another; only `memory.py` touches its
blocks.
"""

from typing import NamedTuple

from headrace.core.plan import Request
from headrace.core.prefix import Node

Order = tuple[int, int, int]
"""(priority, arrival, sequence id): lower is served first and preempted last. Unique."""


class Owner:
    """What the sequences of one request have in common.

    arrival: serial number of the request. admitted: whether it ever ran. living: sequences that
    have not gone. choices: index that the next fork gets. unborn: while the prompt of a request
    with n > 1 is computed, the sequences that its first row of logits will yield a token for, the
    one that computes the prompt among them. cached: prompt tokens read from the prefix tree,
    counted while `counting` (until the first token, preemption or failure).
    """

    __slots__ = (
        "admitted", "arrival", "cached", "choices", "counting", "living", "preemptions", "request",
        "unborn",
    )  # fmt: skip

    def __init__(self, request: Request, arrival: int) -> None:
        self.request = request
        self.arrival = arrival
        self.admitted = False
        self.counting = True
        self.living: list[Sequence] = []
        self.choices = request.n
        self.unborn: list[Sequence] = []
        self.cached = 0
        self.preemptions = 0


class Sequence:
    """One row of tokens that grows. For callers: `id`, `request` (its id), `choice`, `tokens` (the
    known ones, prompt first; read only), `prompt` (length of the prompt).

    left: output tokens until max_tokens. score: next prompt position whose log-probability is still
    owed, `prompt` when none is. computed, scheduled: see the module. highest: most tokens ever
    computed, to count recomputation.

    slot: row of the page tables, -1 without one. blocks[group][index]: block that holds positions
    [index * size, (index + 1) * size), -1 where a window has passed. low[group]: blocks below it
    are past the window. room: positions below it may be written without touching blocks. nodes: the
    root of the prefix tree and the nodes of the leading full blocks. promise: pages set aside at
    admission and not taken yet. granted: last plan known to have served it (not kept up while all
    steady sequences are served in every plan). waiting: it stands in the queue.
    """

    __slots__ = (
        "blocks", "choice", "computed", "ended", "granted", "highest", "id", "left", "low", "nodes",
        "order", "owner", "promise", "prompt", "request", "room", "scheduled", "score", "slot",
        "stops", "tokens", "waiting",
    )  # fmt: skip

    def __init__(self, id: int, owner: Owner, choice: int, tokens: list[int]) -> None:
        request = owner.request
        self.id = id
        self.owner = owner
        self.request = request.id
        self.choice = choice
        self.tokens = tokens
        self.prompt = len(request.prompt)
        self.stops = request.stop_tokens
        self.left = request.max_tokens - (len(tokens) - self.prompt)
        self.score = self.prompt
        self.order: Order = (0, 0, 0)
        self.computed = 0
        self.scheduled = 0
        self.highest = 0
        self.slot = -1
        self.blocks: list[list[int]] = []
        self.low: list[int] = []
        self.room = 0
        self.nodes: list[Node] = []
        self.promise = 0
        self.granted = -1
        self.waiting = False
        self.ended = False

    @property
    def reusable(self) -> int:
        """Tokens that a prefix hit may cover: one is left to compute, and every row that scores."""
        if self.score < self.prompt:
            return self.score - 1
        return len(self.tokens) - 1


class Match(NamedTuple):
    """What the prefix tree holds of a sequence beyond what the sequence has.

    nodes: full blocks to take by reference. source: a node whose first `rows` tokens agree with the
    sequence's next ones, to be copied.
    """

    nodes: list[Node]
    source: Node | None
    rows: int
