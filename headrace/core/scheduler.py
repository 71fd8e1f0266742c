"""The scheduler: requests in, plans out, results in, events out. Pure; time is an argument.

The theory is in docs/scheduler.md. A step serves first the *steady* sequences (running, one known
token not computed, one row of logits, one sample), then the other running ones in order, then
admits waiting ones in order. Blocks are secured best first before anything enters the plan, so that
a victim of preemption never has a slice in it.
"""

from collections.abc import Iterable
from dataclasses import replace

from headrace.core.check import check_scheduler
from headrace.core.limits import check_request, checked_knobs
from headrace.core.memory import Draft, Memory
from headrace.core.plan import (
    Estimator,
    Event,
    FinishReason,
    Knobs,
    PoolConfig,
    Refused,
    Request,
    Stats,
    StepPlan,
    Tokens,
    Usage,
)
from headrace.core.policy import Queue, order, share, victim
from headrace.core.sequence import Match, Owner, Sequence


class Step(Draft):
    """A plan in the making or in flight, with the sequences behind its ids.

    tokens, rows, samples: what is left of the step's budgets. short: pages were not enough.
    steady: sequences with one sample each, the first of the plan. others: running ones beside them.
    slices: (sequence, start, end) of others. points: (carrier of the row, sequence) of each sample
    after those of `steady`.
    """

    def __init__(self, plan: StepPlan) -> None:
        super().__init__(plan)
        self.tokens = 0
        self.rows = 0
        self.samples = 0
        self.short = False
        self.steady: list[Sequence] = []
        self.others: list[Sequence] = []
        self.slices: list[tuple[Sequence, int, int]] = []
        self.points: list[tuple[Sequence, Sequence]] = []


class Scheduler:
    """See docs/scheduler.md. Every method is an input; together they determine every output.

    Raises ValueError where the pool cannot hold one sequence of `max_positions`, or a knob is out
    of range.
    """

    def __init__(self, pool: PoolConfig, knobs: Knobs, estimator: Estimator | None = None) -> None:
        self.pool = pool
        self.memory = Memory(pool)
        self.estimator = estimator or Estimator()
        need = self.memory.most_pages(pool.max_positions, 1)
        if need > pool.num_pages:
            raise ValueError(
                f"num_pages: a sequence of {pool.max_positions} tokens needs {need} pages of KV, "
                f"the pool has {pool.num_pages}; lower max_positions or give more memory"
            )
        self.knobs = checked_knobs(knobs)
        self.queue = Queue()
        self.running: dict[int, Sequence] = {}
        self._owners: dict[int, Owner] = {}
        self._sequences: dict[int, Sequence] = {}
        self._slots = list(range(pool.slots - 1, -1, -1))
        self._sorted = True
        self._odd = False
        self._seated: list[Sequence] = []
        self._steady: list[Sequence] = []
        self._others: list[Sequence] = []
        self._steady_ids: list[int] = []
        self._steady_slots: list[int] = []
        self._draft: Step | None = None
        self._flight: Step | None = None
        self._ending: list[Sequence] = []
        self._gone: list[Sequence] = []
        self._living = 0
        self._unadmitted = 0
        self._blocked: tuple[int, int] | None = None
        self._next_sequence = 0
        self._next_arrival = 0
        self._next_plan = 0
        self._stats = Stats(pages_total=pool.num_pages)

    # Inputs between steps

    def add(self, request: Request, now: float) -> None:
        """Take a request. Raises Refused; then the request never existed here."""
        if request.id in self._owners:
            raise ValueError(f"id: request {request.id} exists already")
        check_request(request, self.pool)
        self._check_overload()
        owner = Owner(request, self._next_arrival)
        self._next_arrival += 1
        self._owners[request.id] = owner
        tokens = list(request.prompt)
        for choice in range(request.n):
            self._new(owner, choice, tokens)
        carrier = owner.living[0]
        if request.score_from is not None:
            carrier.score = min(request.score_from, carrier.prompt)
        if request.n > 1:
            owner.unborn = list(owner.living)
        self._unadmitted += 1
        self.queue.push(carrier)

    def abort(self, request_id: int, now: float) -> list[Event]:
        """End all sequences of a request, at any moment. An unknown id is ignored."""
        owner = self._owners.get(request_id)
        events: list[Event] = []
        for sequence in owner.living if owner else ():
            if not sequence.ended:
                events.append(_event(sequence, (), "abort"))
                self._end(sequence)
        self._bury()
        return events

    def finish(self, request_id: int, choice: int, now: float) -> list[Event]:
        """End one sequence with 'stop': its text holds a stop string. Unknown ones are ignored."""
        owner = self._owners.get(request_id)
        for sequence in owner.living if owner else ():
            if sequence.choice == choice and not sequence.ended:
                self._end(sequence)
                self._bury()
                return [_event(sequence, (), "stop")]
        return []

    def set_knobs(self, knobs: Knobs) -> None:
        """Steer from the next step on. Raises ValueError."""
        self.knobs = checked_knobs(knobs)
        self._blocked = None
        self._sorted = False
        for sequence in self._sequences.values():
            self._set_order(sequence)
        self.queue.reorder()

    def extend(self, sequence_id: int, tokens: Iterable[int]) -> list[Event]:
        """Append tokens that are known without sampling, under the same stop rules as sampled ones.
        Not while the sequence is in a plan in flight, nor before its prompt has been sampled from
        where n > 1."""
        sequence = self._sequences[sequence_id]
        self._demand(sequence, "extend")
        events: list[Event] = []
        self._accept(sequence, tokens, events)
        self._odd = True
        self._bury()
        return events

    def fork(self, sequence_id: int) -> int:
        """A new sequence of the same request with the same tokens, sharing all blocks; it waits
        where there is no slot. Not while a plan is in flight. Returns its id."""
        parent = self._sequences[sequence_id]
        self._demand(parent, "fork")
        owner = parent.owner
        child = self._new(owner, owner.choices, list(parent.tokens))
        owner.choices += 1
        child.left = parent.left
        child.highest = parent.highest
        self._start(child, parent)
        return child.id

    def drop(self, sequence_id: int) -> None:
        """End a sequence without an event."""
        sequence = self._sequences[sequence_id]
        if not sequence.ended:
            self._end(sequence)
            self._bury()

    def reset_prefix_cache(self) -> None:
        """Forget all cached blocks that no running sequence uses."""
        self.memory.tree.reset()
        self._blocked = None

    # Views

    def sequence(self, sequence_id: int) -> Sequence:
        """The live state of a sequence, for reading. It is there until the first `step` after the
        event with its `finish`."""
        return self._sequences[sequence_id]

    def usage(self, request_id: int) -> Usage:
        """Facts of a request; there as long as its sequences."""
        owner = self._owners[request_id]
        return Usage(owner.cached, owner.preemptions)

    def stats(self) -> Stats:
        """A snapshot."""
        pool = self.memory.pool
        return replace(
            self._stats,
            running=len(self.running),
            waiting=self.queue.length,
            pages_used=pool.num_pages - pool.available,
            pages_cached=pool.evictable,
            evictions=self.memory.tree.evictions,
            copied_tokens=self.memory.copied_tokens,
        )

    @property
    def has_work(self) -> bool:
        """Whether any sequence has not ended, or a plan is in flight."""
        return self._living > 0 or self._flight is not None

    @property
    def idle(self) -> bool:
        """No work: then every page is free or cached."""
        return not self.has_work

    # A step

    def step(self, now: float) -> StepPlan | None:
        """The next plan, or None: nothing to do, or one is in flight."""
        if self._flight is not None:
            return None
        self._forget_gone()
        if not self._sorted:
            self._sort()
        if not (self._steady or self._others or self.queue.length):
            return None
        step = self._begin()
        preemptions = self._stats.preemptions
        step.steady = self._secure(step, self._choose_steady(step), self._others)
        if not step.steady and not step.slices:
            self._serve_first(step)
        if not step.short and self._stats.preemptions == preemptions:
            self._admit(step)
        self._write_steady(step)
        self._write_others(step)
        if not step.plan.sequences:
            return None
        self._draft = None
        self._flight = step
        step.plan.seconds = self.estimator.seconds(step.plan)
        return step.plan

    def _next(self) -> Step:
        """The step that the next plan will come from; side effects since the last go into it."""
        if self._draft is None:
            self._draft = Step(StepPlan(self._next_plan))
            self._next_plan += 1
        return self._draft

    def _begin(self) -> Step:
        step = self._next()
        self._renew(step)
        step.others = list(self._others)
        return step

    def _renew(self, step: Step) -> None:
        step.tokens = self.knobs.max_tokens
        step.rows = self.knobs.max_logits
        step.samples = max(self.knobs.max_logits, self.pool.slots)
        step.short = False
        step.plan.reasons.clear()

    def _sort(self) -> None:
        """Part the running sequences into steady ones and others. Steady ones stay so while each
        sample yields one token (`_odd`: one did not); only the rest is looked at."""
        rest = self._others + self._seated
        steady = [sequence for sequence in self._steady if sequence.slot >= 0]
        if self._odd:
            rest += steady
            steady = []
        self._others = []
        for sequence in rest:
            if sequence.slot >= 0:
                (steady if _is_steady(sequence) else self._others).append(sequence)
        self._others.sort(key=lambda sequence: sequence.order)
        self._steady = steady
        self._seated = []
        self._odd = False
        self._steady_ids = [sequence.id for sequence in self._steady]
        self._steady_slots = [sequence.slot for sequence in self._steady]
        self._sorted = True

    def _choose_steady(self, step: Step) -> list[Sequence]:
        """The steady sequences that this step serves: all, or those that have waited longest."""
        steady = self._steady
        wanting = [s for s in self._others if len(s.tokens) > s.scheduled]
        count = share(len(steady), wanting, self.knobs, step.samples, step.plan.id)
        if count < len(steady):
            for sequence in sorted(steady, key=lambda s: s.granted)[count:]:
                step.plan.reasons.append((sequence.id, "budget"))
            steady = sorted(steady, key=lambda s: s.granted)[:count]
            for sequence in steady:
                sequence.granted = step.plan.id
        step.tokens -= count
        step.rows -= count
        step.samples -= count
        return steady

    def _serve_first(self, step: Step) -> None:
        """Nobody whose turn it was could go on. The first in order always can."""
        wanting = [s for s in self.running.values() if len(s.tokens) > s.scheduled]
        if not wanting:
            return
        first = min(wanting, key=lambda s: s.order)
        self._renew(step)
        if first in self._steady:
            step.steady = self._secure(step, [first], [])
        else:
            self._secure(step, [], [first])
        step.short = True

    def _secure(self, step: Step, steady: list[Sequence], others: list[Sequence]) -> list[Sequence]:
        """Find blocks for the steady sequences at the end of theirs and slices for the others, best
        first. Returns the steady sequences that can go on."""
        work = [(s.order, s, True) for s in steady if s.scheduled == s.room]
        if not work and not others:
            return steady
        work += [(s.order, s, False) for s in others]
        work.sort()
        preemptions = self._stats.preemptions
        for _, sequence, is_steady in work:
            if sequence.slot < 0:
                continue
            if not is_steady:
                self._grant(sequence, step)
            elif self._find_pages(sequence, 1, step):
                self.memory.grow(sequence, 1, step)
        if step.short or self._stats.preemptions > preemptions:
            return [s for s in steady if s.slot >= 0 and s.scheduled < s.room]
        return steady

    def _find_pages(self, sequence: Sequence, tokens: int, step: Step, preempt: bool = True) -> int:
        """For how many of the tokens there are pages, preempting others if there would be none."""
        count = self.memory.fit(sequence, tokens)
        while not count:
            other = victim(self.running.values(), sequence) if preempt else None
            if other is None:
                step.short = True
                step.plan.reasons.append((sequence.id, "pages"))
                return 0
            self._preempt(other)
            count = self.memory.fit(sequence, tokens)
        return count

    def _grant(self, sequence: Sequence, step: Step, preempt: bool = True) -> None:
        """Give a running sequence its slice of the step, if there is one for it."""
        if len(sequence.tokens) == sequence.scheduled:
            return
        if not step.tokens:
            step.plan.reasons.append((sequence.id, "budget"))
            return
        self._take(sequence, self.memory.match(sequence), step)
        if self.memory.follows(sequence, self.running, step.plan.id):
            step.plan.reasons.append((sequence.id, "prefix"))
            return
        start = sequence.scheduled
        wanted = len(sequence.tokens) - start
        count = self._cut_rows(sequence, min(wanted, step.tokens, self.knobs.chunk), step)
        if not count:
            step.plan.reasons.append((sequence.id, "rows"))
            return
        if count < wanted:
            past = (start + count) % self.pool.block_size
            count -= past if past < count else 0
        count = self._find_pages(sequence, count, step, preempt)
        if not count:
            return
        self.memory.grow(sequence, count, step)
        sequence.scheduled = end = start + count
        sequence.granted = step.plan.id
        self.memory.publish(sequence, step)
        sequence.nodes[-1].filling = sequence.id
        if start < sequence.highest:
            self._stats.recomputed_tokens += min(end, sequence.highest) - start
        step.slices.append((sequence, start, end))
        rows = _rows(sequence, start, end)
        step.tokens -= count
        step.rows -= rows
        step.samples -= rows
        if end == len(sequence.tokens):
            step.samples -= max(0, len(sequence.owner.unborn) - 1)

    def _take(self, sequence: Sequence, match: Match, step: Step) -> None:
        gained = self.memory.take(sequence, match, step)
        if gained and sequence.owner.counting:
            sequence.owner.cached += gained
            self._stats.prefix_hits += gained

    def _cut_rows(self, sequence: Sequence, count: int, step: Step) -> int:
        """Cut a slice so that its logits rows and samples fit what is left of the step."""
        start = sequence.scheduled
        if sequence.score < sequence.prompt:
            rows = min(step.rows, step.samples)
            count = min(count, max(0, sequence.score - 1 - start) + rows)
        end = start + count
        rows = _rows(sequence, start, end)
        samples = rows + max(0, len(sequence.owner.unborn) - 1)
        if rows and end == len(sequence.tokens) and (rows > step.rows or samples > step.samples):
            count -= 1
        return count

    def _admit(self, step: Step) -> None:
        """Start waiting sequences in order, while there are slots, tokens and pages."""
        memory = self.memory
        spare = int(self.knobs.watermark * self.pool.num_pages)
        while (
            step.tokens > 0
            and not step.short
            and self._slots
            and len(self.running) < self.knobs.max_sequences
        ):
            sequence = self.queue.peek()
            if sequence is None:
                return
            available = memory.pool.available - memory.promised
            if self.running and self._blocked and not step.slices:
                blocked, then = self._blocked
                if blocked == sequence.id and available <= then:
                    return
            match = memory.match(sequence)
            slice_tokens = min(self.knobs.chunk, self.knobs.max_tokens)
            need = memory.most_pages(len(sequence.tokens), slice_tokens)
            reused = len(match.nodes) * memory.pages_per_index
            lacking = max(0, need - reused) + memory.cost(match) + spare - available
            if self.running and lacking > 0:
                self._blocked = (sequence.id, available)
                return
            self._seat(self.queue.pop())
            step.others.append(sequence)
            memory.open(sequence, max(need, reused))
            owner = sequence.owner
            if not owner.admitted:
                owner.admitted = True
                self._unadmitted -= 1
                self._stats.prefix_queries += sequence.prompt
            self._take(sequence, match, step)
            self._grant(sequence, step, preempt=False)

    def _write_steady(self, step: Step) -> None:
        plan = step.plan
        steady = step.steady
        count = len(steady)
        if steady is self._steady:
            plan.sequences = self._steady_ids.copy()
            plan.slots = self._steady_slots.copy()
        else:
            plan.sequences = [sequence.id for sequence in steady]
            plan.slots = [sequence.slot for sequence in steady]
        plan.starts = [sequence.scheduled for sequence in steady]
        plan.tokens = [sequence.tokens[-1] for sequence in steady]
        plan.counts = [1] * count
        plan.logits = [1] * count
        plan.samples = [0] * (2 * count)
        plan.samples[::2] = range(count)
        plan.samples[1::2] = plan.sequences
        plan.num_logits = count
        for sequence in steady:
            sequence.scheduled += 1
            if sequence.scheduled == sequence.room:
                self.memory.publish(sequence, step)

    def _write_others(self, step: Step) -> None:
        plan = step.plan
        for sequence, start, end in step.slices:
            plan.sequences.append(sequence.id)
            plan.slots.append(sequence.slot)
            plan.starts.append(start)
            plan.counts.append(end - start)
            plan.tokens += sequence.tokens[start:end]
            rows = _rows(sequence, start, end)
            plan.logits.append(rows)
            first = end - rows
            row = plan.num_logits - first
            plan.num_logits += rows
            if sequence.score < sequence.prompt:
                for position in range(first, min(end, sequence.prompt - 1)):
                    plan.scores += (row + position, sequence.id, position + 1)
            if end == len(sequence.tokens) and sequence.left > 0:
                for target in sequence.owner.unborn or (sequence,):
                    plan.samples += (row + end - 1, target.id)
                    step.points.append((sequence, target))

    # Results

    def done(self, plan_id: int, tokens: Tokens, now: float) -> list[Event]:
        """The plan was executed; `tokens` are what its samples yielded. An empty list leaves a
        sequence where it is until it is extended."""
        step = self._in_flight(plan_id)
        steady = step.steady
        if len(tokens) != len(steady) + len(step.points):
            raise ValueError(
                f"tokens: plan {plan_id} has {len(steady) + len(step.points)} samples, "
                f"got {len(tokens)}"
            )
        self._flight = None
        self.memory.settle(step)
        self._stats.steps += 1
        self._stats.computed_tokens += len(step.plan.tokens)
        events: list[Event] = []
        new_event = tuple.__new__
        for sequence, new in zip(steady, tokens, strict=False):
            sequence.computed = sequence.scheduled
            if len(new) == 1 and not sequence.ended:
                token = new[0]
                if sequence.left > 1 and token not in sequence.stops:
                    sequence.left -= 1
                    sequence.tokens.append(token)
                    fields = (sequence.request, sequence.id, sequence.choice, (token,), None, None)
                    events.append(new_event(Event, fields))
                    continue
            self._accept(sequence, new, events)
        if step.others:
            self._advance_others(step, tokens[len(steady) :], events)
        for sequence in step.twins:
            if sequence.slot >= 0:
                self.memory.exchange(sequence, self._next())
        self._bury()
        return events

    def _advance_others(self, step: Step, tokens: Tokens, events: list[Event]) -> None:
        self._sorted = False
        for sequence in step.others:
            if sequence.slot >= 0:
                sequence.computed = sequence.scheduled
                if sequence.score < sequence.prompt:
                    owed = max(sequence.score, sequence.computed + 1)
                    sequence.score = min(owed, sequence.prompt)
        for (carrier, sequence), new in zip(step.points, tokens, strict=True):
            carrier.owner.unborn = []
            carrier.owner.counting = False
            if carrier is sequence:
                self._accept(sequence, new, events)
            elif not sequence.ended:
                sequence.tokens = list(carrier.owner.request.prompt)
                self._accept(sequence, new, events)
                if not sequence.ended:
                    self._start(sequence, carrier)
        for sequence, _, end in step.slices:
            if not sequence.owner.request.max_tokens and end == sequence.prompt:
                self._accept(sequence, (), events)

    def failed(self, plan_id: int, now: float) -> list[Event]:
        """The plan was not executed, or partly. Whatever depends on it is taken back: its sequences
        wait again with the tokens they had, and find what was computed before in the tree."""
        step = self._in_flight(plan_id)
        self._flight = None
        for sequence in [s for s in self.running.values() if s.scheduled != s.computed]:
            sequence.highest = max(sequence.highest, sequence.computed)
            sequence.owner.counting = False
            self._unseat(sequence, keep=False)
            self.queue.push(sequence)
        self.memory.forget(step)
        self._bury()
        return []

    def _in_flight(self, plan_id: int) -> Step:
        if self._flight is None or self._flight.plan.id != plan_id:
            raise ValueError(f"plan_id: plan {plan_id} is not in flight")
        return self._flight

    def _accept(self, sequence: Sequence, new: Iterable[int], events: list[Event]) -> None:
        """Make tokens known one by one: a stop goes before the length, nothing follows either."""
        if sequence.ended:
            return
        self._sorted = False
        taken: list[int] = []
        finish: FinishReason | None = None if sequence.left > 0 else "length"
        stop: int | None = None
        for token in new:
            taken.append(token)
            sequence.tokens.append(token)
            sequence.left -= 1
            output = len(sequence.tokens) - sequence.prompt
            if token in sequence.stops and output >= sequence.owner.request.min_tokens:
                finish, stop = "stop", token
            elif not sequence.left:
                finish = "length"
            if finish:
                break
        if taken or finish:
            events.append(_event(sequence, tuple(taken), finish, stop))
        if finish:
            self._end(sequence)
        elif len(taken) != 1:
            self._odd = True

    # Life and death of a sequence

    def _check_overload(self) -> None:
        free = min(self.knobs.max_sequences, self.pool.slots) - len(self.running)
        limit = self.knobs.max_waiting
        if limit and self._unadmitted >= limit + max(0, free):
            raise Refused(None, f"{self._unadmitted} requests wait, the limit is {limit}", True)

    def _demand(self, sequence: Sequence, verb: str) -> None:
        """Raises ValueError where a sequence cannot be forked or extended now."""
        if sequence.ended or sequence.owner.unborn:
            raise ValueError(f"sequence {sequence.id} has ended or is not born: can't {verb} it")
        if self._flight is not None and sequence.slot >= 0:
            raise ValueError(f"sequence {sequence.id} is in flight: can't {verb} it before done")

    def _new(self, owner: Owner, choice: int, tokens: list[int]) -> Sequence:
        sequence = Sequence(self._next_sequence, owner, choice, tokens)
        self._next_sequence += 1
        self._set_order(sequence)
        self._sequences[sequence.id] = sequence
        owner.living.append(sequence)
        self._living += 1
        return sequence

    def _set_order(self, sequence: Sequence) -> None:
        owner = sequence.owner
        sequence.order = order(owner.request, owner.arrival, sequence.id, self.knobs.policy)

    def _start(self, child: Sequence, parent: Sequence) -> None:
        """Let a fork run on its parent's blocks, or wait without any."""
        if parent.slot >= 0 and self._slots and len(self.running) < self.knobs.max_sequences:
            self._seat(child)
            self.memory.share(parent, child, self._next())
        else:
            self.queue.push(child)

    def _seat(self, sequence: Sequence) -> None:
        sequence.slot = self._slots.pop()
        self.running[sequence.id] = sequence
        self._seated.append(sequence)
        self._sorted = False

    def _unseat(self, sequence: Sequence, keep: bool) -> None:
        self.memory.release(sequence, keep)
        self._slots.append(sequence.slot)
        sequence.slot = -1
        del self.running[sequence.id]
        self._sorted = False

    def _preempt(self, sequence: Sequence) -> None:
        sequence.highest = max(sequence.highest, sequence.computed)
        sequence.owner.preemptions += 1
        sequence.owner.counting = False
        self._stats.preemptions += 1
        self._unseat(sequence, keep=True)
        self.queue.push(sequence)

    def _end(self, sequence: Sequence) -> None:
        sequence.ended = True
        self._ending.append(sequence)

    def _bury(self) -> None:
        """Take back what ended sequences hold, unless a plan in flight still touches it."""
        if self._flight is not None:
            return
        for sequence in self._ending:
            owner = sequence.owner
            if sequence in owner.unborn:
                owner.unborn.remove(sequence)
                heirs = [other for other in owner.unborn if not other.ended]
                if heirs and (sequence.slot >= 0 or sequence.waiting):
                    self._bequeath(sequence, heirs[0])
            if sequence.slot >= 0:
                self._unseat(sequence, keep=True)
            elif sequence.waiting:
                self.queue.discard(sequence)
            owner.living.remove(sequence)
            if not owner.living and not owner.admitted:
                self._unadmitted -= 1
            self._living -= 1
            self._gone.append(sequence)
        self._ending.clear()

    def _bequeath(self, sequence: Sequence, heir: Sequence) -> None:
        """Another unborn sequence goes on computing the prompt."""
        heir.score = sequence.score
        heir.highest = sequence.highest
        if sequence.waiting:
            self.queue.discard(sequence)
            self.queue.push(heir)
            return
        heir.slot, sequence.slot = sequence.slot, -1
        for name in ("blocks", "low", "room", "nodes", "promise", "computed", "scheduled"):
            setattr(heir, name, getattr(sequence, name))
        del self.running[sequence.id]
        self.running[heir.id] = heir
        self._seated.append(heir)
        self._sorted = False

    def _forget_gone(self) -> None:
        for sequence in self._gone:
            del self._sequences[sequence.id]
            if not sequence.owner.living:
                self._owners.pop(sequence.request, None)
        self._gone.clear()

    def check(self) -> None:
        """Recompute everything and compare. Raises AssertionError with what differs."""
        assert sorted([*self._slots, *(s.slot for s in self.running.values())]) == list(
            range(self.pool.slots)
        ), "a slot is lost"
        living = [s for s in self._sequences.values() if s in s.owner.living]
        assert len(living) == self._living, f"{self._living} living, counted {len(living)}"
        assert self._flight is None or self._draft is None, "a draft is open while a plan is out"
        if self._sorted and self._flight is None:
            steady = {s.id for s in self.running.values() if _is_steady(s)}
            assert steady == set(self._steady_ids), "steady sequences are not told apart"
            others = {s.id for s in self._others}
            assert others == set(self.running) - steady, "a running sequence is forgotten"
        check_scheduler(self, [step for step in (self._draft, self._flight) if step])


def _event(
    sequence: Sequence,
    tokens: tuple[int, ...],
    finish: FinishReason | None,
    stop_token: int | None = None,
) -> Event:
    return Event(sequence.request, sequence.id, sequence.choice, tokens, finish, stop_token)


def _is_steady(sequence: Sequence) -> bool:
    """One token to compute, one row of logits, one sample."""
    return (
        len(sequence.tokens) - sequence.scheduled == 1
        and sequence.left > 0
        and sequence.score >= sequence.prompt
        and not sequence.owner.unborn
    )


def _rows(sequence: Sequence, start: int, end: int) -> int:
    """Rows of logits of a slice: the last ones, from the first that scores or for the sample."""
    if sequence.score < sequence.prompt:
        return max(0, end - max(start, sequence.score - 1))
    return int(end == len(sequence.tokens) and sequence.left > 0)
