"""Recompute everything the scheduler keeps, and compare. Slow; for tests and idle moments."""

from typing import TYPE_CHECKING

from headrace.core.prefix import pack
from headrace.core.sequence import Sequence

if TYPE_CHECKING:
    from headrace.core.memory import Draft, Memory
    from headrace.core.population import Population


def check_scheduler(memory: "Memory", population: "Population", drafts: "list[Draft]") -> None:
    """Raises AssertionError with what differs. drafts: plans being made or in flight."""
    running = list(population.running.values())
    for sequence in population.queue.sequences():
        held = (sequence.slot >= 0, sequence.nodes, sequence.computed, sequence.scheduled)
        assert not any(held), f"sequence {sequence.id} waits and holds something"
    assert population.queue.length == len(population.queue.sequences())
    for sequence in running:
        assert sequence.slot >= 0, f"sequence {sequence.id} runs without a slot"
        assert not sequence.waiting, f"sequence {sequence.id} runs and waits"
        _check_sequence(memory, sequence)
    promised = sum(sequence.promise for sequence in running)
    assert memory.promised == promised, f"{memory.promised} pages promised, counted {promised}"
    _check_references(memory, running, drafts)


def _check_sequence(memory: "Memory", sequence: Sequence) -> None:
    name = f"sequence {sequence.id}"
    size = memory.size
    known = len(sequence.tokens)
    assert 0 <= sequence.computed <= sequence.scheduled <= known, f"{name}: progress out of order"
    assert known <= memory.config.max_positions, f"{name} is too long"
    length = len(sequence.blocks[0])
    assert length >= -(-sequence.scheduled // size), f"{name}: scheduled past its blocks"
    assert sequence.scheduled <= sequence.room <= length * size or (
        sequence.room == sequence.scheduled
    ), f"{name}: room {sequence.room} for {length} blocks at {sequence.scheduled}"
    nodes = sequence.nodes
    assert (len(nodes) - 1) * size <= sequence.scheduled, f"{name}: unscheduled block in the tree"
    for group, table in enumerate(sequence.blocks):
        assert len(table) == length, f"{name}: tables of different lengths"
        _check_kept(memory, sequence, group)
        for index, node in enumerate(nodes[1:]):
            assert node.parent is nodes[index], f"{name}: broken path"
            assert node.tokens == pack(sequence.tokens[index * size : (index + 1) * size])
            assert table[index] in (-1, node.blocks[group]), f"{name}: block {index} is another's"
        for block in table[sequence.scheduled // size :]:
            assert memory.pool.owner[block] is None, f"{name}: writes into the tree"
    if sequence.room > sequence.scheduled:
        index = sequence.scheduled // size
        for group, table in enumerate(sequence.blocks):
            users = memory.pool.refs[table[index]] - memory.copied_from(table[index])
            assert users == 1, f"{name}: may write a block of {users} users in group {group}"


def _check_kept(memory: "Memory", sequence: Sequence, group: int) -> None:
    """Every position that the next query sees has its block."""
    window = memory.config.groups[group].window
    first = memory.config.groups[group].first
    table = sequence.blocks[group]
    lowest = 0 if window is None else max(0, sequence.scheduled - window + 1) // memory.size
    for index, block in enumerate(table):
        if index >= lowest or index * memory.size < first:
            assert block >= 0, f"sequence {sequence.id}: block {index} of group {group} is missing"


def _check_references(memory: "Memory", running: list[Sequence], drafts: "list[Draft]") -> None:
    refs = [0] * memory.pool.num_pages
    users: dict[int, int] = {}
    for sequence in running:
        for table in sequence.blocks:
            for block in table:
                if block >= 0:
                    refs[block] += 1
        for node in sequence.nodes:
            users[id(node)] = users.get(id(node), 0) + 1
    for draft in drafts:
        for node in draft.sources:
            users[id(node)] = users.get(id(node), 0) + 1
            for block in node.blocks:
                refs[block] += 1
        for _, block in draft.shared:
            refs[block] += 1
    memory.pool.check(refs, memory.tree.check(users))
