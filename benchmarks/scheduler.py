"""Seconds that the scheduler itself takes: python benchmarks/scheduler.py.

Steady decoding at several batch sizes (step + done), and whole requests with prompts of 300 and
outputs of 100 tokens, with and without a shared prefix. CPU seconds, medians; no model is run.
"""

import argparse
import random
import statistics
import time

from headrace.core.plan import Group, Knobs, PoolConfig, Request
from headrace.core.scheduler import Scheduler


def steady(running: int, steps: int) -> float:
    """Median seconds of step + done with so many decoding sequences."""
    positions = 64 + steps
    pool = PoolConfig(
        num_pages=running * (positions // 16 + 2),
        block_size=16,
        groups=(Group(),),
        max_positions=positions,
        slots=running,
    )
    knobs = Knobs(max_sequences=running, max_tokens=4096, chunk=4096, max_logits=running)
    scheduler = Scheduler(pool, knobs)
    for index in range(running):
        prompt = tuple(random.Random(index).randrange(1000) for _ in range(20 + index % 16))
        scheduler.add(Request(index, prompt, steps, stop_tokens=frozenset({-1})), 0.0)
    seconds = []
    while scheduler.has_work:
        start = time.process_time()
        plan = scheduler.step(0.0)
        middle = time.process_time()
        assert plan is not None
        tokens = [[index & 1023] for index in range(len(plan.samples) // 2)]
        again = time.process_time()
        scheduler.done(plan.id, tokens, 0.0)
        end = time.process_time()
        if len(plan.sequences) == running and max(plan.counts) == 1:
            seconds.append(middle - start + end - again)
    return statistics.median(seconds)


def requests(count: int, shared: int, running: int) -> tuple[float, float]:
    """(seconds a request, seconds a step) of whole requests."""
    draw = random.Random(0)
    pool = PoolConfig(
        num_pages=running * 40, block_size=16, groups=(Group(),), max_positions=1024, slots=running
    )
    scheduler = Scheduler(
        pool, Knobs(max_sequences=running, max_tokens=2048, chunk=512, max_logits=running)
    )
    prefix = tuple(draw.randrange(50_000) for _ in range(shared))
    prompts = [
        prefix + tuple(draw.randrange(50_000) for _ in range(300 - shared)) for _ in range(count)
    ]
    start = time.process_time()
    for index, prompt in enumerate(prompts):
        scheduler.add(Request(index, prompt, 50 + draw.randrange(100)), 0.0)
        while scheduler.population.queue.length > running // 4:
            advance(scheduler)
    while scheduler.has_work:
        advance(scheduler)
    seconds = time.process_time() - start
    return seconds / count, seconds / scheduler.stats().steps


def advance(scheduler: Scheduler) -> None:
    plan = scheduler.step(0.0)
    assert plan is not None
    tokens = [[plan.id & 1023]] * (len(plan.samples) // 2)
    scheduler.done(plan.id, tokens, 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--requests", type=int, default=2000)
    arguments = parser.parse_args()
    print("decoding   step + done   a sequence")
    for running in (1, 16, 64, 256):
        seconds = steady(running, arguments.steps)
        print(f"{running:8} {seconds * 1e6:10.0f} us {seconds / running * 1e6:9.2f} us")
    print("requests of 300 + 100 tokens   a request    a step")
    for shared in (0, 200):
        request, step = requests(arguments.requests, shared, 128)
        print(f"{shared:4} tokens shared          {request * 1e6:8.0f} us {step * 1e6:8.0f} us")


if __name__ == "__main__":
    main()
