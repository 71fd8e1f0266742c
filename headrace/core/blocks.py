"""The page pool: which pages are free, how often each block is referenced, what could be evicted.

Pages are equal; a block of group g is `pages_per_block[g]` of them and is named by its first page.
A page is in exactly one place: free, or in a block. A block is *referenced* (`refs` > 0: by page
tables and by copies in flight) or *cached* (no reference, but a node of the prefix tree owns it);
otherwise its pages are free. `free + evictable` is what can be had, exact at any time.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.core.prefix import Node


class Pool:
    """Pages and reference counts. owner[block]: the tree's node that holds the block, if any."""

    def __init__(self, num_pages: int, pages_per_block: Sequence[int]) -> None:
        self.num_pages = num_pages
        self.pages_per_block = tuple(pages_per_block)
        self.free = list(range(num_pages - 1, -1, -1))
        self.refs = [0] * num_pages
        self.owner: list[Node | None] = [None] * num_pages
        self.evictable = 0
        self._pages: dict[int, tuple[int, ...]] = {}

    @property
    def available(self) -> int:
        """Pages that are free or could be made free."""
        return len(self.free) + self.evictable

    def pages(self, block: int, group: int) -> tuple[int, ...]:
        """The pages of a block."""
        return (block,) if self.pages_per_block[group] == 1 else self._pages[block]

    def take(self, group: int, count: int) -> list[int]:
        """Fresh blocks with one reference each. The pages must be free already."""
        size = self.pages_per_block[group]
        free = self.free
        blocks = []
        for _ in range(count):
            block = free.pop()
            if size > 1:
                self._pages[block] = (block, *[free.pop() for _ in range(size - 1)])
            self.refs[block] = 1
            blocks.append(block)
        return blocks

    def hold(self, block: int, group: int) -> None:
        """One more reference to a block that is referenced or cached."""
        if not self.refs[block]:
            self.evictable -= self.pages_per_block[group]
        self.refs[block] += 1

    def drop(self, block: int, group: int) -> bool:
        """One reference less. True when the block is now cached."""
        self.refs[block] -= 1
        if self.refs[block]:
            return False
        if self.owner[block] is None:
            self._give(block, group)
            return False
        self.evictable += self.pages_per_block[group]
        return True

    def evict(self, block: int, group: int) -> None:
        """Free a cached block."""
        self.owner[block] = None
        self.evictable -= self.pages_per_block[group]
        self._give(block, group)

    def _give(self, block: int, group: int) -> None:
        if self.pages_per_block[group] == 1:
            self.free.append(block)
        else:
            self.free.extend(reversed(self._pages.pop(block)))

    def check(self, refs: list[int], cached: dict[int, int]) -> None:
        """Compare with what the holders say: references of each block, and group of each block that
        a node owns and nobody references."""
        assert self.refs == refs, "reference counts differ from the tables and pins"
        taken = {block: group for block, group in cached.items() if not refs[block]}
        evictable = sum(self.pages_per_block[group] for group in taken.values())
        assert self.evictable == evictable, f"{self.evictable} evictable pages, counted {evictable}"
        named = [block for block in range(self.num_pages) if refs[block] or block in cached]
        pages = list(self.free)
        for block in named:
            pages.extend(self._pages.get(block, (block,)))
        assert sorted(pages) == list(range(self.num_pages)), "a page is lost or in two places"
        for block, owner in enumerate(self.owner):
            assert (owner is not None) == (block in cached), f"owner of block {block} is stale"
