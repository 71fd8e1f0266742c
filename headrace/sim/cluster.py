"""Replicas on a clock: each is the engine's own scheduler with a runner that answers from `cost`.

The loop knows two kinds of events, a request that arrives and a step that ends; between them
nothing happens. With a virtual clock it runs as fast as the scheduler does, with a real one at its
pace; the code is the same. A step takes the seconds that the plan's estimator predicted, times a
log-normal `jitter` where one is asked for.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random
from typing import Literal

from headrace.core.plan import Estimator, Event, Knobs, PoolConfig, Refused, Request, StepPlan
from headrace.core.scheduler import Scheduler
from headrace.sim.clock import Clock, VirtualClock
from headrace.sim.report import LogHistogram, Recorder
from headrace.sim.workload import Job, Source

Routing = Literal["sticky", "least", "prefix"]
_TOKEN = 1
_ANSWER = (_TOKEN,) * 4096


@dataclass(frozen=True)
class Setup:
    """One replica's sizes, how many there are, and how requests find one.

    routing: 'sticky' sends session s to replica s % replicas; 'least' to the one with the fewest
    tokens in flight; 'prefix' to the one that its shared prefix names, unless that has half as much
    again in flight as the mean, then as 'least'. jitter: sigma of a step's log-normal noise of
    mean 1. between: seconds from a step to the next that no plan prices (messages, streams).
    """

    pool: PoolConfig
    knobs: Knobs
    replicas: int = 1
    routing: Routing = "sticky"
    jitter: float = 0.0
    between: float = 0.0
    seed: int = 0


class _Live:
    """A request in flight."""

    __slots__ = ("arrived", "cached", "first", "gap_from", "job", "made")

    def __init__(self, job: Job, arrived: float) -> None:
        self.job = job
        self.arrived = arrived
        self.first = -1.0
        self.gap_from = 0.0
        self.made = 0
        self.cached = 0


class Replica:
    """A scheduler, the requests it holds and the step that it runs."""

    def __init__(self, index: int, scheduler: Scheduler) -> None:
        self.index = index
        self.scheduler = scheduler
        self.live: dict[int, _Live] = {}
        self.plan: StepPlan | None = None
        self.load = 0
        self.sampled = -1


class Cluster:
    """Runs a source of jobs over replicas and records what users saw. `run` may be called once.

    only: the replicas to keep, where another process simulates the rest (sticky routing).
    """

    def __init__(
        self,
        setup: Setup,
        estimator: Estimator,
        source: Source,
        clock: Clock | None = None,
        only: Sequence[int] | None = None,
    ) -> None:
        self.recorder = Recorder()
        self.replicas = {
            index: Replica(index, Scheduler(setup.pool, setup.knobs, estimator))
            for index in (range(setup.replicas) if only is None else only)
        }
        self.recorder.replicas = len(self.replicas)
        self._setup = setup
        self._source = source
        self._clock = clock or VirtualClock()
        self._events: list[tuple[float, int, Replica | Job]] = []
        self._order = 0
        self._next_id = 0
        self._random = Random(setup.seed)
        self._total_load = 0

    def run(self, until: float = float("inf")) -> Recorder:
        """Simulate until every request is answered, or the clock passes `until` seconds."""
        arrivals: Iterator[Job] = self._source.arrivals()
        following = next(arrivals, None)
        clock, events = self._clock, self._events
        while following is not None or events:
            if following is not None and (not events or following.arrival <= events[0][0]):
                if following.arrival > until:
                    break
                clock.wait(following.arrival)
                self._arrive(following, clock.now())
                following = next(arrivals, None)
                continue
            when, _, subject = heappop(events)
            if when > until:
                break
            clock.wait(when)
            if isinstance(subject, Replica):
                self._step_ended(subject, clock.now())
            else:
                self._arrive(subject, clock.now())
        for replica in self.replicas.values():
            stats = replica.scheduler.stats()
            self.recorder.preemptions += stats.preemptions
            self.recorder.computed_tokens += stats.computed_tokens
        return self.recorder

    def _push(self, when: float, subject: Replica | Job) -> None:
        self._order += 1
        heappush(self._events, (when, self._order, subject))

    def _arrive(self, job: Job, now: float) -> None:
        replica = self._route(job)
        number = self._next_id
        self._next_id += 1
        try:
            replica.scheduler.add(Request(number, job.prompt, job.output), now)
        except Refused:
            self.recorder.refused += 1
            self._follow(job, (), now)
            return
        replica.live[number] = _Live(job, job.arrival)
        self._carry(replica, len(job.prompt) + job.output)
        if replica.plan is None:
            self._start_step(replica, now)

    def _carry(self, replica: Replica, tokens: int) -> None:
        replica.load += tokens
        self._total_load += tokens

    def _route(self, job: Job) -> Replica:
        setup, replicas = self._setup, self.replicas
        if setup.routing == "sticky":
            return replicas[job.session % setup.replicas]
        if setup.routing == "prefix":
            named = replicas[job.prefix % setup.replicas]
            if named.load <= 1.5 * self._total_load / len(replicas):
                return named
        return min(replicas.values(), key=lambda replica: (replica.load, replica.index))

    def _start_step(self, replica: Replica, now: float) -> None:
        plan = replica.scheduler.step(now)
        replica.plan = plan
        if plan is None:
            return
        seconds = plan.seconds
        if self._setup.jitter:
            seconds *= self._random.lognormvariate(-(self._setup.jitter**2) / 2, self._setup.jitter)
        seconds += self._setup.between
        recorder = self.recorder
        running = len(plan.sequences)
        recorder.steps += 1
        recorder.busy_seconds += seconds
        recorder.running_seconds += seconds * running
        self._sample(replica, now, seconds, running, len(plan.samples) // 2)
        self._push(now + seconds, replica)

    def _sample(
        self, replica: Replica, now: float, seconds: float, running: int, tokens: int
    ) -> None:
        """Keep the timeline: per second, tokens, busy seconds, sequence seconds, waiting, KV."""
        second = int(now)
        row = self.recorder.timeline.get(second)
        if row is None:
            row = self.recorder.timeline[second] = [0.0] * 6
        row[0] += tokens
        row[1] += seconds
        row[2] += seconds * running
        if replica.sampled != second:
            replica.sampled = second
            stats = replica.scheduler.stats()
            share = stats.pages_used / max(1, stats.pages_total)
            row[3] += stats.waiting
            row[4] += share
            row[5] += 1
            self.recorder.kv_share = max(self.recorder.kv_share, share)

    def _step_ended(self, replica: Replica, now: float) -> None:
        plan = replica.plan
        assert plan is not None, "a step that ends was started"
        tokens = [(_TOKEN,)] * (len(plan.samples) // 2)
        events = replica.scheduler.done(plan.id, tokens, now)
        counts, bucket = self.recorder.itl.counts, LogHistogram.bucket
        last_gap, last_bucket = -1.0, 0
        live = replica.live
        for event in events:
            request = live[event.request]
            made = len(event.tokens)
            if made:
                if request.first < 0.0:
                    request.first = now
                    request.cached = replica.scheduler.usage(event.request).cached_tokens
                else:
                    gap = now - request.gap_from
                    if gap != last_gap:
                        last_gap, last_bucket = gap, bucket(gap)
                    counts[last_bucket] += 1
                request.gap_from = now
                request.made += made
            if event.finish is not None:
                self._finished(replica, event, request, now)
        self._start_step(replica, now)

    def _finished(self, replica: Replica, event: Event, request: _Live, now: float) -> None:
        del replica.live[event.request]
        job = request.job
        self._carry(replica, -len(job.prompt) - job.output)
        self.recorder.request(
            request.arrived, request.first, now, len(job.prompt), request.made, request.cached
        )
        self._follow(job, _answer(request.made), now)

    def _follow(self, job: Job, answer: tuple[int, ...], now: float) -> None:
        following = self._source.answered(job, answer, now)
        if following is not None:
            self._push(max(following.arrival, now), following)


def _answer(tokens: int) -> tuple[int, ...]:
    return _ANSWER[:tokens] if tokens <= len(_ANSWER) else (_TOKEN,) * tokens
