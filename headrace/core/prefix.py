"""The prefix index: a tree of blocks in which equal prefixes meet.

A node stands for one block of tokens after its parent's; its root is a namespace. Tokens are kept
as the bytes of 32-bit ids (`pack`), a tenth of a tuple's memory. Children are kept in order of
these bytes, so that the exact child and the child with the longest common prefix are
neighbours of one bisection; tokens are compared, never a digest. A *full* node holds block_size
tokens and may have children; a *leaf* with fewer tokens is what a finished sequence leaves of its
last block, good for copying rows.

A node is *computed* once the plan that writes its block is done; it may be attached to before (a
layer's K/V writes precede its reads), but rows are copied from computed nodes only.

Eviction is least recently used. `users` counts live sequences attached to a node; who is attached
to a node is attached to its ancestors, so a node without users has no users below it and can go
leaf first. In a window group a block may lose its last reference while its node still has users:
such a block goes alone. The heap of candidates is invalidated lazily: an entry counts only if its
serial number is the one noted at the node (or at the block).
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from headrace.core.blocks import Pool

WIDTH = 4
"""Bytes of a packed token."""

GONE = -1
"""Stamp of a node that left the tree; a block id of a group whose block left a node."""


def pack(tokens: list[int]) -> bytes:
    """Tokens as the tree keeps them. Ids have at most 31 bits, as in an engine's arrays."""
    return array("i", tokens).tobytes()


class Node:
    """A block in the tree. keys: the children's tokens, sorted; children: in the same order.
    blocks: one per group, -1 where it is gone. filling: id of the sequence that last left a block
    half written below this node (a hint, see `Memory.follows`). tick, stamp: for eviction."""

    __slots__ = (
        "blocks", "children", "computed", "filling", "keys", "parent", "stamp", "tick", "tokens",
        "users",
    )  # fmt: skip

    def __init__(self, parent: "Node | None", tokens: bytes, blocks: list[int]) -> None:
        self.parent = parent
        self.tokens = tokens
        self.blocks = blocks
        self.keys: list[bytes] = []
        self.children: list[Node] = []
        self.users = 0
        self.computed = False
        self.filling = -1
        self.tick = 0
        self.stamp = 0


class Root(Node):
    """The root of a namespace; it holds no block."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: tuple[str, ...]) -> None:
        super().__init__(None, b"", [])
        self.namespace = namespace
        self.computed = True


Entry = tuple[int, int, Node, int]
"""(tick, serial, node, group): group -1 is the whole node."""


class Tree:
    """All namespaces. `windowed`: the groups whose blocks may go alone."""

    def __init__(self, pool: Pool, block_size: int, windowed: tuple[int, ...]) -> None:
        self.pool = pool
        self.size = block_size
        self.windowed = windowed
        self.roots: dict[tuple[str, ...], Root] = {}
        self.evictions = 0
        self.nodes = 0
        self._stamps: dict[int, int] = {}
        self._heap: list[Entry] = []
        self._tick = 0
        self._serial = 0

    def root(self, namespace: tuple[str, ...]) -> Root:
        """The root of a namespace, made on first use. It lives while it has users or children."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Root(namespace)
        return root

    def find(self, parent: Node, tokens: bytes) -> Node | None:
        """The child with exactly these tokens."""
        keys = parent.keys
        index = bisect_left(keys, tokens)
        if index < len(keys) and keys[index] == tokens:
            return parent.children[index]
        return None

    def nearest(self, parent: Node, tokens: bytes) -> tuple[Node | None, int]:
        """The computed child that agrees with the most leading tokens, and how many. Children that
        lost a block do not count. Ties go to the nearest, the lower one first."""
        keys = parent.keys
        index = bisect_left(keys, tokens)
        found: Node | None = None
        most = 0
        for places in (range(index - 1, -1, -1), range(index, len(keys))):
            for place in places:
                common = _common(keys[place], tokens)
                if common <= most:
                    break
                child = parent.children[place]
                if child.computed and GONE not in child.blocks:
                    found, most = child, common
        return found, most

    def insert(self, parent: Node, tokens: bytes, blocks: list[int]) -> Node | None:
        """A new child that owns `blocks`, or None where one has these tokens already. A leaf that
        it continues is forgotten."""
        keys = parent.keys
        index = bisect_left(keys, tokens)
        if index < len(keys) and keys[index] == tokens:
            return None
        if index and tokens.startswith(keys[index - 1]):
            shorter = parent.children[index - 1]
            if not shorter.users:
                self._unlink(shorter)
                index -= 1
        node = Node(parent, tokens, blocks)
        keys.insert(index, tokens)
        parent.children.insert(index, node)
        self.nodes += 1
        owner = self.pool.owner
        for block in blocks:
            if block >= 0:
                owner[block] = node
        return node

    def leave(self, parent: Node, tokens: bytes, blocks: list[int]) -> bool:
        """Keep a partly filled block as a leaf, unless a child has its rows anyway. The caller
        drops its reference afterwards either way. True when it was kept."""
        index = bisect_left(parent.keys, tokens)
        if index < len(parent.keys) and parent.keys[index].startswith(tokens):
            return False
        leaf = self.insert(parent, tokens, blocks)
        assert leaf is not None
        leaf.computed = True
        self._tick += 1
        self._offer(leaf, self._tick)
        return True

    def adopt(self, node: Node, group: int, block: int) -> None:
        """Give a node the block of a group that it had lost."""
        node.blocks[group] = block
        self.pool.owner[block] = node

    def attach(self, node: Node) -> None:
        """One user more. The caller holds the blocks that it needs, then calls `expose`."""
        node.users += 1

    def expose(self, node: Node) -> None:
        """Make window blocks that nobody references candidates of their own, where the node itself
        is no candidate because it has users."""
        for group in self.windowed:
            block = node.blocks[group]
            if block >= 0 and not self.pool.refs[block] and block not in self._stamps:
                self._serial += 1
                self._stamps[block] = self._serial
                self._push((node.tick, self._serial, node, group))

    def hold(self, block: int, group: int) -> None:
        """`Pool.hold`; the block is no candidate any more."""
        self.pool.hold(block, group)
        if self.windowed:
            self._stamps.pop(block, None)

    def drop(self, block: int, group: int) -> None:
        """`Pool.drop` of a block outside `detach`. A window block that its users have passed keeps
        the tick of the node's last release: of all cached blocks it is the least likely needed."""
        if self.pool.drop(block, group) and group in self.windowed:
            node = self.pool.owner[block]
            assert node is not None
            self.expose(node)

    def detach(self, path: list[Node], tables: list[list[int]]) -> None:
        """End a sequence's use of the nodes path[1:] below the root path[0], and its references to
        the leading blocks of its tables."""
        self._tick += 1
        tick = self._tick
        pool = self.pool
        for index in range(len(path) - 1, 0, -1):
            node = path[index]
            node.users -= 1
            node.tick = tick
            for group, table in enumerate(tables):
                block = table[index - 1]
                if block >= 0:
                    pool.drop(block, group)
            if node.users:
                if self.windowed:
                    self.expose(node)
            elif not node.children:
                self._offer(node, tick)
        root = path[0]
        root.users -= 1
        self._prune(root)

    def release_source(self, node: Node) -> None:
        """End the use of a node that rows were copied from, and the references to its blocks. A
        leaf that has been continued meanwhile is forgotten."""
        node.users -= 1
        for group, block in enumerate(node.blocks):
            self.pool.drop(block, group)
        self._tick += 1
        node.tick = self._tick
        if node.users:
            self.expose(node)
        elif not node.children:
            parent = node.parent
            assert parent is not None
            after = bisect_left(parent.keys, node.tokens) + 1
            if after < len(parent.keys) and parent.keys[after].startswith(node.tokens):
                self.remove(node)
            else:
                self._offer(node, self._tick)

    def hold_source(self, node: Node) -> None:
        """Use a node to copy rows from: it and its blocks stay until `release_source`."""
        node.users += 1
        for group, block in enumerate(node.blocks):
            self.hold(block, group)

    def remove(self, node: Node) -> None:
        """Take out a node that has neither users nor children, and free its blocks."""
        parent = node.parent
        assert parent is not None
        self._unlink(node)
        self._settle(parent)

    def evict(self, pages: int) -> None:
        """Make so many pages free, taking the least recently used candidates: leaves, or window
        blocks alone. The pages are available."""
        free = self.pool.free
        while len(free) < pages:
            _, serial, node, group = heappop(self._heap)
            if not self._valid(serial, node, group):
                continue
            if group < 0:
                self._evict_path(node, pages)
                continue
            block = node.blocks[group]
            node.blocks[group] = GONE
            del self._stamps[block]
            self.pool.evict(block, group)
            self.evictions += 1
            if not node.users and not node.children and max(node.blocks) < 0:
                self.remove(node)

    def _evict_path(self, node: Node, pages: int) -> None:
        """Evict a leaf and, while pages are needed, the ancestors that were let go along with it:
        they are next in turn."""
        tick = node.tick
        free = self.pool.free
        while True:
            parent = node.parent
            assert parent is not None
            self._unlink(node)
            self.evictions += 1
            spent = parent.users or parent.children or parent.parent is None
            if spent or parent.tick != tick or len(free) >= pages:
                self._settle(parent)
                return
            node = parent

    def reset(self) -> None:
        """Forget every node that has no users."""
        for root in list(self.roots.values()):
            for node in reversed(list(_walk(root))):
                if node.parent and not node.users and not node.children and node.stamp != GONE:
                    self.remove(node)

    def _unlink(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        index = bisect_left(parent.keys, node.tokens)
        del parent.keys[index]
        del parent.children[index]
        self.nodes -= 1
        node.stamp = GONE
        for group, block in enumerate(node.blocks):
            if block >= 0:
                node.blocks[group] = GONE
                self._stamps.pop(block, None)
                self.pool.evict(block, group)

    def _settle(self, node: Node) -> None:
        """A child of `node` is gone: it may be a candidate now, or have nothing left to keep."""
        while not node.users and not node.children:
            if node.parent is None:
                self._prune(node)
                return
            if max(node.blocks) >= 0:
                self._offer(node, node.tick)
                return
            parent = node.parent
            self._unlink(node)
            node = parent

    def _prune(self, root: Node) -> None:
        assert isinstance(root, Root)
        if not root.users and not root.children:
            del self.roots[root.namespace]

    def _offer(self, node: Node, tick: int) -> None:
        self._serial += 1
        node.stamp = self._serial
        self._push((tick, self._serial, node, GONE))

    def _push(self, entry: Entry) -> None:
        heappush(self._heap, entry)
        if len(self._heap) > 64 + 2 * (self.nodes + len(self._stamps)):
            self._heap = [entry for entry in self._heap if self._valid(*entry[1:])]
            heapify(self._heap)

    def _valid(self, serial: int, node: Node, group: int) -> bool:
        if group < 0:
            return node.stamp == serial and not node.users and not node.children
        block = node.blocks[group]
        return block >= 0 and self._stamps.get(block) == serial

    def check(self, users: dict[int, int]) -> dict[int, int]:
        """Compare with the sequences' word: users of each node by `id`. Returns the group of every
        block that a node owns."""
        owned: dict[int, int] = {}
        live = {(entry[1], id(entry[2])) for entry in self._heap if self._valid(*entry[1:])}
        count = 0
        for namespace, root in self.roots.items():
            assert root.namespace == namespace
            assert root.users or root.children, f"empty root {namespace}"
            for node in _walk(root):
                count += node is not root
                self._check_node(node, users.get(id(node), 0), owned, live)
        assert count == self.nodes, f"{self.nodes} nodes, counted {count}"
        return owned

    def _check_node(
        self, node: Node, users: int, owned: dict[int, int], live: set[tuple[int, int]]
    ) -> None:
        assert node.users == users, f"{node.users} users of a node, counted {users}"
        assert node.keys == sorted(set(node.keys)), "children out of order"
        assert node.keys == [child.tokens for child in node.children]
        for child in node.children:
            assert child.parent is node
            assert WIDTH <= len(child.tokens) <= WIDTH * self.size
            full = node.parent is None or len(node.tokens) == WIDTH * self.size
            assert full, "a leaf has children"
        if node.parent is None:
            return
        for group, block in enumerate(node.blocks):
            if block < 0:
                assert group in self.windowed, "a full group lost a block"
                continue
            assert block not in owned, f"block {block} is in two nodes"
            assert self.pool.owner[block] is node, f"block {block} has another owner"
            owned[block] = group
            if node.users and not self.pool.refs[block]:
                assert group in self.windowed, "a used node's block has no reference"
                assert (self._stamps.get(block, 0), id(node)) in live, "a block can't be evicted"
        if not node.users and not node.children:
            assert (node.stamp, id(node)) in live, "a leaf can't be evicted"


def _walk(root: Node) -> Iterator[Node]:
    """All nodes, parents before children."""
    stack = [root]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children)


def _common(left: bytes, right: bytes) -> int:
    """How many leading tokens agree."""
    length = min(len(left), len(right))
    differ = int.from_bytes(left[:length], "little") ^ int.from_bytes(right[:length], "little")
    if not differ:
        return length // WIDTH
    return ((differ & -differ).bit_length() - 1) // (8 * WIDTH)
