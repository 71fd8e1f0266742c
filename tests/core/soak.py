"""Random operations, with every check after every one: python -m tests.core.soak --help."""

import argparse
import random
import time
from dataclasses import replace

from headrace.core.memory import Memory
from headrace.core.plan import Group, Knobs, PoolConfig, Request
from tests.core.machine import STOP, Machine

GROUPS: tuple[tuple[Group, ...], ...] = (
    (Group(),),
    (Group(),),
    (Group(window=5),),
    (Group(), Group(window=6)),
    (Group(pages_per_block=2), Group(window=4)),
    (Group(window=1), Group(), Group(window=9, pages_per_block=3)),
    (Group(), Group(pages_per_block=2)),
    (Group(window=5, first=3),),
    (Group(window=3, first=5), Group()),
)


class Soak:
    """A pool, knobs, and operations, all drawn from one source."""

    def __init__(self, draw: random.Random) -> None:
        self.random = draw
        size = draw.choice((1, 2, 3, 4, 8))
        groups = draw.choice(GROUPS)
        positions = draw.randint(6, 40)
        pool = PoolConfig(
            num_pages=0,
            block_size=size,
            groups=groups,
            max_positions=positions,
            slots=draw.randint(1, 8),
            prefix_caching=draw.random() < 0.85,
        )
        least = Memory(pool).most_pages(positions, 1)
        pool = replace(pool, num_pages=least + draw.choice((0, 0, 1, 3, 10, 40, 100)))
        self.machine = Machine(pool, self.knobs(pool.slots), vocabulary=draw.choice((2, 3, 40)))
        self.next_id = 0
        self.held: set[int] = set()
        self.prompts: list[tuple[int, ...]] = []

    def knobs(self, slots: int) -> Knobs:
        draw = self.random
        return Knobs(
            max_sequences=draw.choice((slots, draw.randint(1, slots))),
            max_tokens=draw.choice((1, 2, 5, 16, 64)),
            chunk=draw.choice((1, 3, 8, 64)),
            max_logits=draw.choice((1, 2, 4, 64)),
            watermark=draw.choice((0.0, 0.01, 0.3)),
            max_waiting=draw.choice((0, 0, 3)),
            policy=draw.choice(("fcfs", "priority")),
            mixed_prefill=draw.choice((0, 0, 1, 4)),
        )

    def request(self) -> Request:
        """Prompts that share beginnings, of a small vocabulary, often with forks and scores."""
        draw = self.random
        longest = self.machine.pool.max_positions
        prompt: tuple[int, ...] = ()
        if self.prompts and draw.random() < 0.7:
            other = draw.choice(self.prompts)
            prompt = other[: draw.randint(0, len(other))]
        tail = draw.randint(0, draw.choice((2, 8, longest)))
        prompt += tuple(draw.randrange(3) for _ in range(tail))
        prompt = prompt[: draw.randint(1, longest)] or (1,)
        if draw.random() < 0.1 and self.machine.outputs:  # the next turn of a conversation
            request, choice = draw.choice(list(self.machine.outputs))
            output = self.machine.outputs[request, choice]
            prompt = (*self.machine.requests[request].prompt, *output, *prompt)[:longest]
        self.prompts = [*self.prompts[-20:], prompt]
        room = longest - len(prompt) + (draw.random() < 0.05)
        tokens = draw.choice((room, draw.randint(0, room)))
        self.next_id += 1
        return Request(
            id=self.next_id,
            prompt=prompt,
            max_tokens=tokens,
            n=draw.randint(1, 5) if tokens and draw.random() < 0.3 else 1,
            stop_tokens=frozenset({STOP}) if draw.random() < 0.3 else frozenset(),
            min_tokens=draw.randint(0, 3),
            priority=draw.randint(0, 2),
            namespace=draw.choice(((), (), ("a",), ("a", "b"))),
            score_from=draw.randint(1, len(prompt)) if draw.random() < 0.2 else None,
        )

    def operate(self) -> None:
        """One random operation."""
        draw = self.random
        machine = self.machine
        scheduler = machine.scheduler
        roll = draw.random()
        living = [
            s for owner in scheduler.population.owners.values() for s in owner.living if not s.ended
        ]
        if roll < 0.12 and scheduler.population.queue.length < 8:
            machine.add(self.request())
        elif roll < 0.14 and living:
            machine.abort(draw.choice(living).request)
        elif roll < 0.16 and living:
            sequence = draw.choice(living)
            machine.finish(sequence.request, sequence.choice)
        elif roll < 0.17 and living:
            machine.drop(draw.choice(living).id)
        elif roll < 0.18:
            machine.set_knobs(self.knobs(machine.pool.slots))
        elif roll < 0.19:
            machine.reset()
        elif roll < 0.22 and living and machine.plan is None:
            self.grow(draw.choice(living))
        elif machine.plan is None:
            if machine.step() is None and scheduler.has_work:
                self.wake()
        elif roll < 0.27:
            machine.failed()
        else:
            chance = draw.choice((0.0, 0.0, 0.2))
            machine.done(lambda _: draw.choice((0, 2, 3)) if draw.random() < chance else 1)

    def grow(self, sequence: object) -> None:
        """Fork or extend a sequence, where the rules allow it."""
        machine = self.machine
        state = machine.scheduler.sequence(sequence.id)  # type: ignore[attr-defined]
        if state.owner.unborn or state.ended or state.left < 1:
            return
        if self.random.random() < 0.5:
            machine.fork(state.id)
        else:
            count = self.random.randint(0, min(3, state.left))
            machine.extend(state.id, [self.random.randrange(3) for _ in range(count)])

    def wake(self) -> None:
        """Extend the sequences that a sample without tokens has left idle."""
        machine = self.machine
        idle = [
            s
            for s in machine.scheduler.population.running.values()
            if s.computed == len(s.tokens) and s.left > 0
        ]
        assert idle, "there is work, nobody waits for tokens, and yet no plan"
        for sequence in idle:
            machine.extend(sequence.id, [1])

    def drain(self) -> None:
        """No more input: everything finishes in bounded steps and gives back all it holds."""
        machine = self.machine
        if machine.plan is not None:
            machine.done()
        living = [s for owner in machine.scheduler.population.owners.values() for s in owner.living]
        turns = 2 * machine.pool.slots + 2  # within so many steps the first in order gets a token
        bound = turns * sum(len(s.tokens) + s.left + 1 for s in living)
        steps = 0
        while machine.scheduler.has_work:
            if machine.step() is None:
                self.wake()
                continue
            machine.done()
            steps += 1
            assert steps <= bound, f"more than {bound} steps"
        machine.rest()


def soak(seed: int, operations: int) -> Soak:
    """Run one seed; drained every so often, so that empty states occur too."""
    state = Soak(random.Random(seed))
    for count in range(operations):
        state.operate()
        if count % 500 == 499:
            state.drain()
    state.drain()
    return state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=10_000, help="a seed")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    arguments = parser.parse_args()
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        start = time.perf_counter()
        stats = soak(seed, arguments.operations).machine.scheduler.stats()
        print(
            f"seed {seed}: {arguments.operations} operations, {stats.steps} steps, "
            f"{stats.preemptions} preemptions, {stats.prefix_hits} tokens hit, "
            f"{stats.copied_tokens} copied, {stats.evictions} evictions, "
            f"{time.perf_counter() - start:.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
