"""An oracle around the scheduler: a fake engine whose pages hold what was written into them.

K and V at a position depend on all tokens up to it, so a page row holds a digest of that history.
Each plan is executed on the fake pages (table entries, copies, writes), then everything that its
queries see is read back through the page tables and compared with the sequences' own histories.
The next token is a function of history and choice: what a request must yield is known beforehand.
"""

from collections.abc import Callable, Sequence

from headrace.core.plan import Event, Knobs, PoolConfig, Refused, Request, StepPlan
from headrace.core.scheduler import Scheduler

PRIME = (1 << 61) - 1
STOP = 0


def start_of(namespace: tuple[str, ...]) -> int:
    """Digest of an empty history."""
    value = 1
    for name in namespace:
        for byte in (*name.encode(), 255):
            value = (value * 1_000_003 + byte) % PRIME
    return value


def follow(history: int, token: int) -> int:
    return (history * 1_000_003 + token + 1) % PRIME


def next_token(history: int, choice: int, vocabulary: int) -> int:
    return ((history ^ (choice * 7_919)) >> 5) % vocabulary


def solo(request: Request, choice: int, vocabulary: int) -> list[int]:
    """The output of one choice of a request that runs alone."""
    history = start_of(request.namespace)
    for token in request.prompt:
        history = follow(history, token)
    output: list[int] = []
    while len(output) < request.max_tokens:
        token = next_token(history, choice, vocabulary)
        output.append(token)
        history = follow(history, token)
        if token in request.stop_tokens and len(output) >= request.min_tokens:
            break
    return output


class Machine:
    """Scheduler and fake engine. `tokens[sequence]` is what its events said, prompt first."""

    def __init__(self, pool: PoolConfig, knobs: Knobs, vocabulary: int = 5) -> None:
        self.scheduler = Scheduler(pool, knobs)
        self.pool = pool
        self.knobs = knobs
        self.vocabulary = vocabulary
        self.requests: dict[int, Request] = {}
        self.tokens: dict[int, list[int]] = {}
        self.histories: dict[int, list[int]] = {}
        self.finished: dict[tuple[int, int], str] = {}
        self.outputs: dict[tuple[int, int], list[int]] = {}
        self.touched: set[int] = set()
        self.scored: dict[int, list[int]] = {}
        self.sampled: dict[int, int] = {}
        self.plan: StepPlan | None = None
        self.now = 0.0
        rows = sum(group.pages_per_block for group in pool.groups)
        self.rows = [
            (row, group)
            for row, group in zip(
                range(rows),
                [g for g in pool.groups for _ in range(g.pages_per_block)],
                strict=True,
            )
        ]
        self.changed: list[tuple[int, int]] = []
        self.tables: dict[tuple[int, int, int], int] = {}
        self.pages: list[list[tuple[int, int] | None]] = [
            [None] * pool.block_size for _ in range(pool.num_pages)
        ]

    # Inputs

    def add(self, request: Request) -> bool:
        try:
            self.scheduler.add(request, self.now)
        except Refused:
            return False
        self.requests[request.id] = request
        self.scored[request.id] = []
        self.settle([])
        return True

    def step(self) -> StepPlan | None:
        plan = self.scheduler.step(self.now)
        self.now += 1.0
        if plan is not None:
            self.plan = plan
            self.execute(plan)
        self.settle([])
        return plan

    def done(self, shape: Callable[[int], int] = lambda _: 1) -> list[Event]:
        """Report the plan in flight; sample i yields shape(i) tokens."""
        plan = self.plan
        assert plan is not None
        self.plan = None
        yields = []
        for index, sequence in enumerate(plan.samples[1::2]):
            history = self.history(sequence)[-1]
            state = self.scheduler.sequence(sequence)
            new = []
            for _ in range(shape(index)):
                token = next_token(history, state.choice, self.vocabulary)
                history = follow(history, token)
                new.append(token)
            if not new:
                self.touched.add(state.request)
                self.sampled.pop(sequence, None)
            yields.append(new)
        for position, sequence in zip(plan.scores[2::3], plan.scores[1::3], strict=True):
            state = self.scheduler.sequence(sequence)
            self.scored[state.request].append(position)
        return self.settle(self.scheduler.done(plan.id, yields, self.now))

    def failed(self) -> None:
        """The plan in flight failed; whatever it was to write is lost."""
        plan = self.plan
        assert plan is not None
        self.plan = None
        for sequence in plan.samples[1::2]:
            self.sampled.pop(sequence, None)
        for page, row in self.changed:
            self.pages[page][row] = None
        self.settle(self.scheduler.failed(plan.id, self.now))

    def abort(self, request: int) -> list[Event]:
        return self.settle(self.scheduler.abort(request, self.now))

    def finish(self, request: int, choice: int) -> list[Event]:
        self.touched.add(request)
        return self.settle(self.scheduler.finish(request, choice, self.now))

    def extend(self, sequence: int, tokens: Sequence[int]) -> list[Event]:
        self.touched.add(self.scheduler.sequence(sequence).request)
        return self.settle(self.scheduler.extend(sequence, tokens))

    def fork(self, sequence: int) -> int:
        self.touched.add(self.scheduler.sequence(sequence).request)
        child = self.scheduler.fork(sequence)
        self.tokens[child] = list(self.scheduler.sequence(sequence).tokens)
        self.settle([])
        return child

    def drop(self, sequence: int) -> None:
        self.touched.add(self.scheduler.sequence(sequence).request)
        self.scheduler.drop(sequence)
        self.settle([])

    def set_knobs(self, knobs: Knobs) -> None:
        self.knobs = knobs
        self.scheduler.set_knobs(knobs)
        self.settle([])

    def reset(self) -> None:
        self.scheduler.reset_prefix_cache()
        self.settle([])

    def run(self, steps: int = 100_000) -> int:
        """Steps until there is no work; no event may be missing and no page lost at the end."""
        for count in range(steps):
            if not self.scheduler.has_work:
                self.rest()
                return count
            assert self.step() is not None, "work, but no plan"
            self.done()
        raise AssertionError(f"not finished after {steps} steps")

    def rest(self) -> None:
        """Nothing runs: nothing may be used."""
        stats = self.scheduler.stats()
        assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
        assert self.scheduler.idle

    # The oracle

    def settle(self, events: list[Event]) -> list[Event]:
        """Take the events in, then let the scheduler check itself."""
        for event in events:
            assert (event.request, event.choice) not in self.finished, "an event after the finish"
            known = self.known(event.sequence)
            known.extend(event.tokens)
            assert self.scheduler.sequence(event.sequence).tokens == known
            self.sampled.pop(event.sequence, None)
            if event.finish is not None:
                self.end(event, known)
        self.scheduler.check()
        return events

    def end(self, event: Event, known: list[int]) -> None:
        assert event.finish is not None
        request = self.requests[event.request]
        output = known[len(request.prompt) :]
        self.finished[event.request, event.choice] = event.finish
        self.outputs[event.request, event.choice] = output
        if event.finish == "length":
            assert len(output) == request.max_tokens
        if event.finish in ("stop", "length") and event.request not in self.touched:
            assert output == solo(request, event.choice, self.vocabulary)
            if request.score_from is not None:
                scored = list(range(request.score_from, len(request.prompt)))
                assert self.scored[event.request] == scored, "each position scores once"
        if event.finish == "stop" and event.stop_token is not None:
            assert output[-1] == event.stop_token

    def known(self, sequence: int) -> list[int]:
        if sequence not in self.tokens:
            request = self.scheduler.sequence(sequence).request
            self.tokens[sequence] = list(self.requests[request].prompt)
        return self.tokens[sequence]

    def history(self, sequence: int) -> list[int]:
        """Digest after each known token."""
        known = self.known(sequence)
        if sequence not in self.histories:
            request = self.requests[self.scheduler.sequence(sequence).request]
            self.histories[sequence] = [start_of(request.namespace)]
        digests = self.histories[sequence]
        while len(digests) <= len(known):
            digests.append(follow(digests[-1], known[len(digests) - 1]))
        return digests

    def execute(self, plan: StepPlan) -> None:
        self.check_shape(plan)
        for at in range(0, len(plan.table), 4):
            slot, row, index, page = plan.table[at : at + 4]
            self.tables[slot, row, index] = page
        self.changed = []
        for copy in plan.copies:
            for row in range(copy.first, copy.first + copy.tokens):
                self.pages[copy.target][row] = self.pages[copy.source][row]
                self.changed.append((copy.target, row))
        size = self.pool.block_size
        written: set[tuple[int, int]] = set()
        slices = list(zip(plan.sequences, plan.slots, plan.starts, plan.counts, strict=True))
        for sequence, slot, start, count in slices:
            history = self.history(sequence)
            for position in range(start, start + count):
                for row, _ in self.rows:
                    page = self.tables[slot, row, position // size]
                    place = (page, position % size)
                    assert place not in written, "two slices write one row"
                    written.add(place)
                    self.pages[page][position % size] = (history[position + 1], row)
        self.changed += sorted(written)
        for sequence, slot, start, count in slices:
            self.read(sequence, slot, start, start + count)

    def read(self, sequence: int, slot: int, start: int, end: int) -> None:
        """What the queries [start, end) see is the sequence's own history."""
        size = self.pool.block_size
        history = self.history(sequence)
        for row, group in self.rows:
            lowest = 0 if group.window is None else max(0, start - group.window + 1)
            for position in (*range(min(group.first, lowest)), *range(lowest, end)):
                page = self.tables[slot, row, position // size]
                assert self.pages[page][position % size] == (history[position + 1], row), (
                    f"sequence {sequence} sees foreign KV at {position} in table row {row}"
                )

    def check_shape(self, plan: StepPlan) -> None:
        """The plan keeps its own rules and the knobs."""
        knobs = self.knobs
        assert 1 <= len(plan.tokens) <= knobs.max_tokens
        assert len(plan.tokens) == sum(plan.counts)
        assert all(1 <= count <= knobs.chunk for count in plan.counts)
        assert plan.num_logits == sum(plan.logits) <= knobs.max_logits
        samples = len(plan.samples) // 2 + len(plan.scores) // 3
        assert samples <= max(knobs.max_logits, self.pool.slots)
        assert len(set(plan.slots)) == len(plan.slots) == len(set(plan.sequences))
        rows: list[tuple[int, int]] = []
        at = 0
        for sequence, start, count, logits in zip(
            plan.sequences, plan.starts, plan.counts, plan.logits, strict=True
        ):
            known = self.known(sequence)
            assert plan.tokens[at : at + count] == known[start : start + count]
            at += count
            end = start + count
            rows += [(sequence, position) for position in range(end - logits, end)]
        assert len(rows) == plan.num_logits
        for row, sequence in zip(plan.samples[::2], plan.samples[1::2], strict=True):
            carrier, position = rows[row]
            known = self.known(sequence)
            assert self.known(carrier) == known
            assert position == len(known) - 1, "a sample from a row that is not the last"
            assert self.sampled.get(sequence) != position, "a position is sampled twice"
            self.sampled[sequence] = position
        for at in range(0, len(plan.scores), 3):
            row, sequence, position = plan.scores[at : at + 3]
            assert rows[row] == (sequence, position - 1)
