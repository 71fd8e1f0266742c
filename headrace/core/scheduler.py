"""The scheduler: requests in, plans out, results in, events out. Pure; time is an argument.

The theory is in docs/scheduler.md. A step serves first the *steady* sequences (running, one known
token not computed, one row of logits, one sample), then the other running ones in order, then
admits waiting ones in order. Blocks are secured best first before anything enters the plan, so that
a victim of preemption never has a slice in it.
"""

from collections.abc import Iterable
from dataclasses import replace

from headrace.core.check import check_scheduler
from headrace.core.limits import check_overload, check_request, checked_knobs, checked_pool
from headrace.core.memory import Draft, Memory
from headrace.core.plan import (
    Estimator,
    Event,
    FinishReason,
    Knobs,
    PoolConfig,
    Request,
    Stats,
    StepPlan,
    Tokens,
    Usage,
)
from headrace.core.policy import share, victim
from headrace.core.population import Population
from headrace.core.sequence import Match, Sequence
from headrace.core.step import Step


class Scheduler:
    """See docs/scheduler.md. Every method is an input; together they determine every output.

    Raises ValueError where the pool cannot hold one sequence of `max_positions`, or a knob is out
    of range.
    """

    def __init__(self, pool: PoolConfig, knobs: Knobs, estimator: Estimator | None = None) -> None:
        self.pool = pool
        self.knobs = checked_knobs(knobs)
        self.estimator = estimator or Estimator()
        self.memory = Memory(pool)
        checked_pool(pool, self.memory.most_pages(pool.max_positions, 1))
        self.population = Population(self.memory, pool.slots)
        self.population.reorder(knobs.policy)
        self._draft: Step | None = None
        self._flight: Step | None = None
        self._next_plan = 0
        # The head of the queue that did not fit, and the pages that were available then.
        self._blocked: tuple[int, int] | None = None
        self._stats = Stats(pages_total=pool.num_pages)

    # Inputs

    def add(self, request: Request, now: float) -> None:
        """Take a request. Raises Refused; then the request never existed here."""
        population = self.population
        if request.id in population.owners:
            raise ValueError(f"id: request {request.id} exists already")
        check_request(request, self.pool)
        free = min(self.knobs.max_sequences, self.pool.slots) - len(population.running)
        check_overload(population.unadmitted, free, self.knobs)
        population.open(request)

    def abort(self, request_id: int, now: float) -> list[Event]:
        """End all sequences of a request, at any moment. An unknown id is ignored."""
        owner = self.population.owners.get(request_id)
        events: list[Event] = []
        for sequence in owner.living if owner else ():
            if not sequence.ended:
                events.append(_event(sequence, (), "abort"))
                self.population.end(sequence)
        self._bury()
        return events

    def finish(self, request_id: int, choice: int, now: float) -> list[Event]:
        """End one sequence with 'stop': its text holds a stop string. Unknown ones are ignored."""
        owner = self.population.owners.get(request_id)
        for sequence in owner.living if owner else ():
            if sequence.choice == choice and not sequence.ended:
                self.population.end(sequence)
                self._bury()
                return [_event(sequence, (), "stop")]
        return []

    def set_knobs(self, knobs: Knobs) -> None:
        """Steer from the next step on. Raises ValueError."""
        self.knobs = checked_knobs(knobs)
        self._blocked = None
        self.population.reorder(knobs.policy)

    def extend(self, sequence_id: int, tokens: Iterable[int]) -> list[Event]:
        """Append tokens that are known without sampling, under the same stop rules as sampled ones.
        Not while the sequence is in a plan in flight, nor before its prompt has been sampled from
        where n > 1: ValueError."""
        sequence = self.population.sequences[sequence_id]
        self._demand(sequence, "extend")
        events: list[Event] = []
        self._accept(sequence, tokens, events)
        self.population.mark_odd()
        self._bury()
        return events

    def fork(self, sequence_id: int) -> int:
        """A new sequence of the same request with the same tokens, sharing all blocks; it waits
        where there is no slot. Conditions as for `extend`. Returns its id."""
        parent = self.population.sequences[sequence_id]
        self._demand(parent, "fork")
        owner = parent.owner
        child = self.population.create(owner, owner.choices, list(parent.tokens))
        owner.choices += 1
        child.highest = parent.highest
        self._start(child, parent)
        return child.id

    def drop(self, sequence_id: int) -> None:
        """End a sequence without an event."""
        sequence = self.population.sequences[sequence_id]
        if not sequence.ended:
            self.population.end(sequence)
            self._bury()

    def reset_prefix_cache(self) -> None:
        """Forget all cached blocks that no running sequence uses."""
        self.memory.tree.reset()
        self._blocked = None

    # Views

    def sequence(self, sequence_id: int) -> Sequence:
        """The live state of a sequence, for reading. It is there until the first `step` after the
        event with its `finish`."""
        return self.population.sequences[sequence_id]

    def usage(self, request_id: int) -> Usage:
        """Facts of a request; there as long as its sequences."""
        owner = self.population.owners[request_id]
        return Usage(owner.cached, owner.preemptions)

    def stats(self) -> Stats:
        """A snapshot."""
        pool = self.memory.pool
        return replace(
            self._stats,
            running=len(self.population.running),
            waiting=self.population.queue.length,
            pages_used=pool.num_pages - pool.available,
            pages_cached=pool.evictable,
            preemptions=self.population.preemptions,
            evictions=self.memory.tree.evictions,
            copied_tokens=self.memory.copied_tokens,
        )

    @property
    def has_work(self) -> bool:
        """Whether any sequence has not ended, or a plan is in flight."""
        return self.population.living > 0 or self._flight is not None

    @property
    def idle(self) -> bool:
        """No work: then every page is free or cached."""
        return not self.has_work

    def check(self) -> None:
        """Recompute everything and compare. Raises AssertionError with what differs."""
        assert self._flight is None or self._draft is None, "a draft is open while a plan is out"
        self.population.check(self.pool.slots)
        if self.population.sorted and self._flight is None:
            self.population.check_sorted()
        drafts: list[Draft] = [step for step in (self._draft, self._flight) if step]
        check_scheduler(self.memory, self.population, drafts)

    # A step

    def step(self, now: float) -> StepPlan | None:
        """The next plan, or None: nothing to do, or one is in flight."""
        if self._flight is not None:
            return None
        population = self.population
        population.forget_gone()
        if not population.sorted:
            population.sort()
        if not (population.steady or population.others or population.queue.length):
            return None
        step = self._next()
        step.renew(self.knobs, self.pool.slots)
        step.others = list(population.others)
        preemptions = population.preemptions
        step.steady = self._secure(step, self._choose_steady(step), population.others)
        if not step.steady and not step.slices:
            self._serve_first(step)
        if not step.short and population.preemptions == preemptions:
            self._admit(step)
        self._write(step)
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

    def _choose_steady(self, step: Step) -> list[Sequence]:
        """The steady sequences that this step serves: all, or those that have waited longest."""
        steady = self.population.steady
        wanting = [s for s in self.population.others if len(s.tokens) > s.scheduled]
        count = share(len(steady), wanting, self.knobs, step.samples, step.plan.id)
        step.give(count, self.knobs.mixed_prefill)
        if count == len(steady):
            return steady
        turn = sorted(steady, key=lambda sequence: sequence.granted)
        for sequence in turn[count:]:
            step.skip(sequence, "budget")
        for sequence in turn[:count]:
            sequence.granted = step.plan.id
        return turn[:count]

    def _serve_first(self, step: Step) -> None:
        """Nobody whose turn it was could go on. The first in order always can."""
        running = self.population.running.values()
        wanting = [s for s in running if len(s.tokens) > s.scheduled]
        if not wanting:
            return
        first = min(wanting, key=lambda sequence: sequence.order)
        step.renew(self.knobs, self.pool.slots)
        if first in self.population.steady:
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
        preemptions = self.population.preemptions
        for _, sequence, is_steady in work:
            if sequence.slot < 0:
                continue
            if not is_steady:
                self._grant(sequence, step)
            elif self._find_pages(sequence, 1, step):
                self.memory.grow(sequence, 1, step)
        if step.short or self.population.preemptions > preemptions:
            return [s for s in steady if s.slot >= 0 and s.scheduled < s.room]
        return steady

    def _find_pages(self, sequence: Sequence, tokens: int, step: Step, preempt: bool = True) -> int:
        """For how many of the tokens there are pages, preempting others if there would be none."""
        count = self.memory.fit(sequence, tokens)
        while not count:
            other = victim(self.population.running.values(), sequence) if preempt else None
            if other is None:
                step.short = True
                step.skip(sequence, "pages")
                return 0
            self.population.preempt(other)
            count = self.memory.fit(sequence, tokens)
        return count

    def _grant(self, sequence: Sequence, step: Step, preempt: bool = True) -> None:
        """Give a running sequence its slice of the step, if there is one for it."""
        if len(sequence.tokens) == sequence.scheduled:
            return
        if not step.tokens:
            step.skip(sequence, "budget")
            return
        self._take(sequence, self.memory.match(sequence), step)
        if self.memory.follows(sequence, self.population.running, step.plan.id):
            step.skip(sequence, "prefix")
            return
        start = sequence.scheduled
        wanted = min(len(sequence.tokens) - start, step.tokens, self.knobs.chunk)
        count = step.cut(sequence, wanted)
        if not count:
            step.skip(sequence, "rows")
            return
        count = self._find_pages(sequence, count, step, preempt)
        if not count:
            return
        self.memory.grow(sequence, count, step)
        sequence.scheduled = start + count
        sequence.granted = step.plan.id
        self.memory.publish(sequence, step)
        sequence.nodes[-1].filling = sequence.id
        recomputed = min(sequence.scheduled, sequence.highest) - start
        self._stats.recomputed_tokens += max(0, recomputed)
        step.slice(sequence, start, start + count)

    def _take(self, sequence: Sequence, match: Match, step: Step) -> None:
        gained = self.memory.take(sequence, match, step)
        if gained and sequence.owner.counting:
            sequence.owner.cached += gained
            self._stats.prefix_hits += gained

    def _admit(self, step: Step) -> None:
        """Start waiting sequences in order, while there are slots, tokens and pages."""
        population = self.population
        slice_tokens = min(self.knobs.chunk, self.knobs.max_tokens)
        while step.tokens and not step.short and self._has_seat():
            sequence = population.queue.peek()
            if sequence is None:
                return
            available = self.memory.pool.available - self.memory.promised
            if population.running and not step.slices and self._blocked is not None:
                blocked, then = self._blocked
                if blocked == sequence.id and available <= then:
                    return
            match = self.memory.match(sequence)
            need = self.memory.most_pages(len(sequence.tokens), slice_tokens)
            if population.running and not self._fits(match, need, available):
                self._blocked = (sequence.id, available)
                return
            population.seat(population.queue.pop())
            step.others.append(sequence)
            self.memory.open(sequence, need, match)
            if not sequence.owner.admitted:
                sequence.owner.admitted = True
                population.unadmitted -= 1
                self._stats.prefix_queries += sequence.prompt
            self._take(sequence, match, step)
            self._grant(sequence, step, preempt=False)

    def _has_seat(self) -> bool:
        population = self.population
        seats = len(population.free_slots)
        return seats > 0 and len(population.running) < self.knobs.max_sequences

    def _fits(self, match: Match, need: int, available: int) -> bool:
        """Whether a sequence that needs so many pages in all, and has a match, leaves the
        watermark."""
        fresh = max(0, need - len(match.nodes) * self.memory.pages_per_index)
        spare = int(self.knobs.watermark * self.pool.num_pages)
        return fresh + self.memory.cost(match) + spare <= available

    def _write(self, step: Step) -> None:
        population = self.population
        steady = step.steady
        if steady is population.steady:
            step.write(population.steady_ids.copy(), population.steady_slots.copy())
        else:
            step.write([s.id for s in steady], [s.slot for s in steady])
        for sequence in steady:
            sequence.scheduled += 1
            if sequence.scheduled == sequence.room:
                self.memory.publish(sequence, step)

    # Results

    def done(self, plan_id: int, tokens: Tokens, now: float) -> list[Event]:
        """The plan was executed; `tokens` are what its samples yielded. An empty list leaves a
        sequence where it is until it is extended."""
        step = self._in_flight(plan_id)
        steady = step.steady
        samples = len(steady) + len(step.points)
        if len(tokens) != samples:
            raise ValueError(f"tokens: plan {plan_id} has {samples} samples, got {len(tokens)}")
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
        self.population.sorted = False
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
        running = self.population.running.values()
        for sequence in [s for s in running if s.scheduled != s.computed]:
            self.population.send_back(sequence, keep=False)
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
            self.population.end(sequence)
        elif len(taken) != 1:
            self.population.mark_odd()

    def _start(self, child: Sequence, parent: Sequence) -> None:
        """Let a fork run on its parent's blocks, or wait without any."""
        if parent.slot >= 0 and self._has_seat():
            self.population.seat(child)
            self.memory.share(parent, child, self._next())
        else:
            self.population.queue.push(child)

    def _bury(self) -> None:
        """Free what ended sequences hold, unless a plan in flight still touches it."""
        if self._flight is None:
            self.population.bury()

    def _demand(self, sequence: Sequence, verb: str) -> None:
        """Raises ValueError where a sequence cannot be forked or extended now."""
        if sequence.ended or sequence.owner.unborn:
            raise ValueError(f"sequence {sequence.id} has ended or is not born: can't {verb} it")
        if self._flight is not None and sequence.slot >= 0:
            raise ValueError(f"sequence {sequence.id} is in flight: can't {verb} it before done")


def _event(
    sequence: Sequence,
    tokens: tuple[int, ...],
    finish: FinishReason | None,
    stop_token: int | None = None,
) -> Event:
    return Event(sequence.request, sequence.id, sequence.choice, tokens, finish, stop_token)
