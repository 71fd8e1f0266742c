"""What sequences hold: page tables, sharing through the prefix tree, copies, windows.

The rules, each kept by one method here:

- `take`   a prefix hit: whole blocks by reference, then rows of the nearest block by copy.
- `grow`   blocks for the next slice; a block that others reference is copied before it is written.
- `publish` full blocks of known tokens enter the tree when they are scheduled.
- `share`  a fork references every block of its parent.
- `release` everything goes back; the partly filled last block stays behind as a leaf.

A sequence writes into a block only while it alone references it, never into a block of the tree.
For every index below `len(nodes) - 1` its table holds the node's own block (or -1 past a window).
"""

from headrace.core.blocks import Pool
from headrace.core.plan import Copy, PoolConfig, StepPlan
from headrace.core.prefix import GONE, Node, Tree, pack
from headrace.core.sequence import Match, Sequence

NOTHING = Match([], None, 0)


class Draft:
    """The side effects of the plan that is being made, kept until it is done.

    nodes: those that the plan computes, parents first. sources: nodes that it copies rows from.
    shared: (group, block) that it copies rows from and that no node owns. twins: sequences with a
    full block that the tree has already from another, to be exchanged when the plan is done.
    """

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.nodes: list[Node] = []
        self.sources: list[Node] = []
        self.shared: list[tuple[int, int]] = []
        self.twins: list[Sequence] = []


class Memory:
    """Pool, tree and the blocks of running sequences."""

    def __init__(self, config: PoolConfig) -> None:
        self.config = config
        self.size = config.block_size
        self.pages_per_block = tuple(group.pages_per_block for group in config.groups)
        self.pages_per_index = sum(self.pages_per_block)
        self.windows = tuple(
            (index, group.window, -(-group.first // config.block_size))
            for index, group in enumerate(config.groups)
            if group.window is not None
        )
        self.pool = Pool(config.num_pages, self.pages_per_block)
        self.tree = Tree(self.pool, config.block_size, tuple(window[0] for window in self.windows))
        self.promised = 0
        self.copied_tokens = 0
        self._copied: dict[int, int] = {}
        self._rows = [sum(self.pages_per_block[:group]) for group in range(len(config.groups))]

    def most_pages(self, tokens: int, slice_tokens: int) -> int:
        """Pages that a sequence of so many tokens holds at most, computed in slices of
        `slice_tokens`."""
        blocks = -(-tokens // self.size)
        pages = blocks * self.pages_per_index
        for group, window, first in self.windows:
            kept = first + (window + slice_tokens - 2) // self.size + 2
            pages -= max(0, blocks - kept) * self.pages_per_block[group]
        return pages

    # Prefix hits

    def match(self, sequence: Sequence) -> Match:
        """What the tree holds of the sequence's next tokens. Changes nothing."""
        if not self.config.prefix_caching:
            return NOTHING
        size = self.size
        if sequence.nodes:
            node: Node | None = sequence.nodes[-1]
        else:
            node = self.tree.roots.get(sequence.owner.request.namespace)
        if node is None:
            return NOTHING
        limit = sequence.reusable
        tokens = sequence.tokens
        have = max(0, len(sequence.nodes) - 1)
        start = have * size
        path: list[Node] = []
        last = node
        while start + size <= limit:
            child = self.tree.find(last, pack(tokens[start : start + size]))
            if child is None:
                break
            path.append(child)
            last = child
            start += size
        if self.windows and path:
            del path[self._held(sequence, path) :]
            start = (have + len(path)) * size
            last = path[-1] if path else node
        if limit > start and (path or sequence.scheduled == start):
            source, rows = self.tree.nearest(last, pack(tokens[start : min(limit, start + size)]))
            if rows:
                return Match(path, source, rows)
        return Match(path, None, 0) if path else NOTHING

    def _held(self, sequence: Sequence, path: list[Node]) -> int:
        """The longest leading part of `path` after which every window group still holds what a
        query sees: the blocks of the last window - 1 positions, and the kept-first ones."""
        have = max(0, len(sequence.nodes) - 1)
        runs = [0] * len(self.config.groups)
        for group, _, _ in self.windows:
            while runs[group] < have and sequence.blocks[group][have - 1 - runs[group]] >= 0:
                runs[group] += 1
        firsts = [True] * len(runs)
        best = 0
        for count, node in enumerate(path, start=1):
            index = have + count
            good = True
            for group, window, first in self.windows:
                if node.blocks[group] >= 0:
                    runs[group] += 1
                else:
                    runs[group] = 0
                    firsts[group] = firsts[group] and index > first
                needed = index - max(0, index * self.size - window + 1) // self.size
                good = good and runs[group] >= needed and firsts[group]
            if good:
                best = count
        return best

    def cost(self, match: Match) -> int:
        """Pages that taking the match makes unavailable: those of its blocks that nobody uses yet,
        referenced or copied from."""
        refs = self.pool.refs
        nodes = match.nodes if match.source is None else [*match.nodes, match.source]
        return sum(
            self.pages_per_block[group]
            for node in nodes
            for group, block in enumerate(node.blocks)
            if block >= 0 and not refs[block]
        )

    def open(self, sequence: Sequence, need: int, match: Match) -> None:
        """Give a sequence that has a slot an empty table, and promise it the pages it needs."""
        root = self.tree.root(sequence.owner.request.namespace)
        self.tree.attach(root)
        sequence.nodes = [root]
        groups = len(self.config.groups)
        sequence.blocks = [[] for _ in range(groups)]
        sequence.low = [0] * groups
        sequence.room = 0
        sequence.promise = max(need, len(match.nodes) * self.pages_per_index)
        self.promised += sequence.promise

    def take(self, sequence: Sequence, match: Match, draft: Draft) -> int:
        """Make a match the sequence's own. Returns by how many tokens `scheduled` rose."""
        before = sequence.scheduled
        if match.nodes:
            self._take_nodes(sequence, match.nodes)
            self._set_table(sequence, len(sequence.nodes) - 1 - len(match.nodes), draft.plan)
        if match.source is not None:
            self._copy_rows(sequence, match.source, match.rows, draft)
        return sequence.scheduled - before

    def _take_nodes(self, sequence: Sequence, nodes: list[Node]) -> None:
        size = self.size
        have = len(sequence.nodes) - 1
        self._cut(sequence, have)
        end = (have + len(nodes)) * size
        keep = [(0, 0)] * len(self.config.groups)
        for group, window, first in self.windows:
            keep[group] = (max(0, end - window + 1) // size, first)
        for index, node in enumerate(nodes, start=have):
            self.tree.attach(node)
            for group, block in enumerate(node.blocks):
                lowest, first = keep[group]
                if block >= 0 and (index >= lowest or index < first):
                    self.tree.hold(block, group)
                    sequence.blocks[group].append(block)
                else:
                    sequence.blocks[group].append(GONE)
            self.tree.expose(node)
            if node.computed and sequence.computed >= index * size:
                sequence.computed = (index + 1) * size
        sequence.nodes.extend(nodes)
        sequence.scheduled = sequence.room = end
        self._keep_promise(sequence, len(nodes))

    def _cut(self, sequence: Sequence, length: int) -> None:
        """Drop the private blocks from index `length` on."""
        for group, table in enumerate(sequence.blocks):
            for block in table[length:]:
                self.tree.drop(block, group)
            del table[length:]
        if sequence.computed > length * self.size:
            sequence.computed = length * self.size

    def _copy_rows(self, sequence: Sequence, source: Node, rows: int, draft: Draft) -> None:
        """Copy the first rows of a node's block into a fresh one, where there are pages for it."""
        self.tree.hold_source(source)
        if self.pool.available < self.pages_per_index:
            self.tree.release_source(source)
            return
        draft.sources.append(source)
        self.copied_tokens += rows
        index = len(sequence.blocks[0])
        for group, block in enumerate(source.blocks):
            (fresh,) = self._fresh(group, 1)
            self._copy(block, fresh, group, rows, draft.plan)
            sequence.blocks[group].append(fresh)
        self._set_table(sequence, index, draft.plan)
        self._keep_promise(sequence, 1)
        sequence.scheduled += rows
        sequence.room = (index + 1) * self.size

    def follows(self, sequence: Sequence, running: dict[int, Sequence], plan_id: int) -> bool:
        """Whether the sequence's next block is being filled by a neighbour that got a slice in this
        plan: then it waits for the block instead of computing it again."""
        node = sequence.nodes[-1]
        start = (len(sequence.nodes) - 1) * self.size
        end = start + self.size
        leader = running.get(node.filling)
        return (
            leader is not None
            and leader is not sequence
            and leader.granted == plan_id
            and leader.nodes[-1] is node
            and sequence.scheduled == start
            and end <= sequence.reusable
            and len(leader.tokens) >= end
            and leader.tokens[start:end] == sequence.tokens[start:end]
        )

    # Growth

    def fit(self, sequence: Sequence, tokens: int) -> int:
        """How many of the next `tokens` tokens the pool has pages for."""
        self._trim(sequence)
        start = sequence.scheduled
        if start + tokens <= sequence.room:
            return tokens
        fresh = self.pool.available // self.pages_per_index
        if self._shared(sequence):
            fresh -= 1
        reach = (len(sequence.blocks[0]) + fresh) * self.size
        return max(0, min(tokens, reach - start)) if fresh >= 0 else 0

    def grow(self, sequence: Sequence, tokens: int, draft: Draft) -> None:
        """Make the next `tokens` positions writable. The pool has the pages (`fit`)."""
        end = sequence.scheduled + tokens
        if end <= sequence.room:
            return
        changed = length = len(sequence.blocks[0])
        if self._shared(sequence):
            changed = sequence.scheduled // self.size
            self._unshare(sequence, draft)
        count = -(-end // self.size) - length
        if count > 0:
            for group, table in enumerate(sequence.blocks):
                table.extend(self._fresh(group, count))
            self._keep_promise(sequence, count)
        self._set_table(sequence, changed, draft.plan)
        sequence.room = len(sequence.blocks[0]) * self.size

    def _shared(self, sequence: Sequence) -> bool:
        """Whether others may write or read the block that the next token goes into (who only
        copies earlier rows of it does not count)."""
        index = sequence.scheduled // self.size
        table = sequence.blocks[0]
        if index >= len(table) or self.pool.refs[table[index]] == 1:
            return False
        return self.pool.refs[table[index]] - self.copied_from(table[index]) > 1

    def copied_from(self, block: int) -> int:
        """References to a block by copies in flight of earlier rows."""
        return self._copied.get(block, 0)

    def _unshare(self, sequence: Sequence, draft: Draft) -> None:
        index, rows = divmod(sequence.scheduled, self.size)
        self.copied_tokens += rows
        for group, table in enumerate(sequence.blocks):
            block = table[index]
            (fresh,) = self._fresh(group, 1)
            table[index] = fresh
            if rows:
                self._copy(block, fresh, group, rows, draft.plan)
            draft.shared.append((group, block))
            self._copied[block] = self._copied.get(block, 0) + 1

    def _fresh(self, group: int, count: int) -> list[int]:
        pool = self.pool
        pages = count * self.pages_per_block[group]
        if len(pool.free) < pages:
            self.tree.evict(pages)
        return pool.take(group, count)

    def _trim(self, sequence: Sequence) -> None:
        """Drop the blocks that no query from `computed` on will see."""
        for group, window, first in self.windows:
            passed = max(0, sequence.computed - window + 1) // self.size
            table = sequence.blocks[group]
            low = max(sequence.low[group], first)
            if passed <= low:
                continue
            for index in range(low, min(passed, len(table))):
                block = table[index]
                if block >= 0:
                    table[index] = GONE
                    self.tree.drop(block, group)
            sequence.low[group] = passed

    def _keep_promise(self, sequence: Sequence, indexes: int) -> None:
        kept = min(sequence.promise, indexes * self.pages_per_index)
        sequence.promise -= kept
        self.promised -= kept

    def _copy(self, source: int, target: int, group: int, rows: int, plan: StepPlan) -> None:
        pairs = zip(self.pool.pages(source, group), self.pool.pages(target, group), strict=True)
        plan.copies.extend(Copy(old, new, 0, rows) for old, new in pairs)

    def _set_table(
        self, sequence: Sequence, start: int, plan: StepPlan, end: int | None = None
    ) -> None:
        """Write the table entries of the blocks [start, end) into the plan."""
        slot = sequence.slot
        out = plan.table
        for group, table in enumerate(sequence.blocks):
            row = self._rows[group]
            single = self.pages_per_block[group] == 1
            for index, block in enumerate(table[start:end], start):
                if block < 0:
                    continue
                if single:
                    out += (slot, row, index, block)
                    continue
                for offset, page in enumerate(self.pool.pages(block, group)):
                    out += (slot, row + offset, index, page)

    # Sharing

    def publish(self, sequence: Sequence, draft: Draft) -> None:
        """Enter the full scheduled blocks into the tree, as yet to be computed by the plan."""
        if not self.config.prefix_caching:
            return
        size = self.size
        nodes = sequence.nodes
        while len(nodes) * size <= sequence.scheduled:
            if not self._publish_next(sequence):
                draft.twins.append(sequence)
                return
            draft.nodes.append(nodes[-1])

    def _publish_next(self, sequence: Sequence) -> bool:
        """Make the first unpublished block a node. False if the tree has one with its tokens."""
        index = len(sequence.nodes) - 1
        parent = sequence.nodes[-1]
        tokens = pack(sequence.tokens[index * self.size : (index + 1) * self.size])
        node = self.tree.insert(parent, tokens, [table[index] for table in sequence.blocks])
        if node is None:
            return False
        self.tree.attach(node)
        sequence.nodes.append(node)
        return True

    def settle(self, draft: Draft) -> None:
        """The plan is done: its nodes are computed, what it copied from is let go."""
        for node in draft.nodes:
            node.computed = True
        self._unpin_shared(draft)
        for node in draft.sources:
            self.tree.release_source(node)

    def exchange(self, sequence: Sequence, draft: Draft) -> None:
        """Trade full blocks that the tree has from others for the tree's own (the bits are equal),
        and publish what follows. `draft` is the next plan's."""
        size = self.size
        nodes = sequence.nodes
        while len(nodes) * size <= sequence.computed:
            if self._publish_next(sequence):
                nodes[-1].computed = True
                continue
            index = len(nodes) - 1
            tokens = pack(sequence.tokens[index * size : (index + 1) * size])
            node = self.tree.find(nodes[-1], tokens)
            assert node is not None
            self.tree.attach(node)
            nodes.append(node)
            for group, table in enumerate(sequence.blocks):
                own = table[index]
                if own < 0:
                    continue
                block = node.blocks[group]
                if block < 0:
                    self.tree.adopt(node, group, own)
                    continue
                self.tree.hold(block, group)
                table[index] = block
                self.tree.drop(own, group)
            self.tree.expose(node)
            self._set_table(sequence, index, draft.plan, index + 1)

    def share(self, parent: Sequence, child: Sequence, draft: Draft) -> None:
        """Give `child`, which has a slot and no blocks, every block of `parent`. Nothing of the
        parent is in flight."""
        length = -(-parent.scheduled // self.size)
        for node in parent.nodes:
            self.tree.attach(node)
        child.nodes = list(parent.nodes)
        child.blocks = [table[:length] for table in parent.blocks]
        for group, table in enumerate(child.blocks):
            for block in table:
                if block >= 0:
                    self.tree.hold(block, group)
        child.low = list(parent.low)
        child.computed = parent.computed
        child.scheduled = child.room = parent.room = parent.scheduled
        self._set_table(child, 0, draft.plan)

    # The end

    def release(self, sequence: Sequence, keep: bool) -> None:
        """Take back everything. keep: leave the rows of the last block in the tree."""
        length = len(sequence.nodes) - 1
        start = length * self.size
        rows = sequence.computed - start
        last = [table[length] for table in sequence.blocks if len(table) > length]
        if (
            keep
            and self.config.prefix_caching
            and last
            and 0 < rows < self.size
            and all(block >= 0 and self.pool.refs[block] == 1 for block in last)
        ):
            self.tree.leave(
                sequence.nodes[-1], pack(sequence.tokens[start : start + rows]), list(last)
            )
        for group, table in enumerate(sequence.blocks):
            for block in table[length:]:
                if block >= 0:
                    self.tree.drop(block, group)
        self.tree.detach(sequence.nodes, sequence.blocks)
        self.promised -= sequence.promise
        sequence.promise = 0
        sequence.nodes = []
        sequence.blocks = []
        sequence.low = []
        sequence.computed = sequence.scheduled = sequence.room = 0

    def forget(self, draft: Draft) -> None:
        """The plan failed and every sequence that attached to its nodes is released."""
        self._unpin_shared(draft)
        for node in reversed(draft.nodes):
            self.tree.remove(node)
        for node in draft.sources:
            self.tree.release_source(node)

    def _unpin_shared(self, draft: Draft) -> None:
        for group, block in draft.shared:
            self.tree.drop(block, group)
        self._copied.clear()
