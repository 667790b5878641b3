"""A block of the KV cache, and the queue of blocks that no request holds."""

from __future__ import annotations

from collections.abc import Sequence

from kvevents.events import GroupIdx


class Block:
    """One page of the KV cache. Blocks are created once, with the pool, and never copied."""

    __slots__ = (
        "block_hash",
        "block_id",
        "group_idx",
        "has_slid_out",
        "is_null",
        "is_wrong",
        "next_free",
        "previous_free",
        "ref_count",
    )

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: bytes | None = None
        """Set while the block is cached: later requests find it by this and `group_idx`."""
        self.group_idx = GroupIdx(0)
        self.is_null = False
        """Fills a block table where no block is needed; never in the queue, never written."""
        self.is_wrong = False
        """Its content turned out wrong, and it was neither given out nor cached since."""
        self.has_slid_out = False
        """Freed because its request's window or state moved on, and not used since."""
        self.previous_free: Block | None = None
        self.next_free: Block | None = None

    def __repr__(self) -> str:
        is_cached = self.block_hash is not None
        return f"Block({self.block_id}, ref_count={self.ref_count}, cached={is_cached})"


class FreeQueue:
    """Free blocks in the order in which they are given out.

    A doubly linked list through the blocks themselves: any block leaves it in constant time. It has
    two parts, so that some blocks can stand before the second part and yet behind the first.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        """Queue *blocks* in the first part; the first is given out first."""
        self._end, self._middle = Block(-1), Block(-2)
        # Sentinels close the ring and part it, so that no operation has an edge case.
        self._join(self._end, self._middle)
        self._join(self._middle, self._end)
        self._count = 0
        self.prepend(blocks)

    def __len__(self) -> int:
        return self._count

    def pop(self, count: int) -> list[Block]:
        """Take the first *count* blocks, at most `len(self)`."""
        taken: list[Block] = []
        before, block = self._end, self._end.next_free
        assert count <= self._count
        while len(taken) < count:
            assert block is not None
            if block is self._middle:
                self._join(self._end, block)
                before = block
            else:
                taken.append(block)
            block = block.next_free
        assert block is not None
        self._join(before, block)
        for out in taken:
            out.previous_free = out.next_free = None
        self._count -= count
        return taken

    def remove(self, block: Block) -> None:
        """Take *block*, which is in the queue, out of its middle."""
        assert block.previous_free is not None
        assert block.next_free is not None
        self._join(block.previous_free, block.next_free)
        block.previous_free = block.next_free = None
        self._count -= 1

    def append(self, blocks: Sequence[Block]) -> None:
        """Add blocks that are given out last, in this order."""
        assert self._end.previous_free is not None
        self._insert(self._end.previous_free, blocks, self._end)

    def insert(self, blocks: Sequence[Block]) -> None:
        """Add blocks that are given out before all in the second part, in this order."""
        assert self._middle.next_free is not None
        self._insert(self._middle, blocks, self._middle.next_free)

    def prepend(self, blocks: Sequence[Block]) -> None:
        """Add blocks to the first part that are given out next, in this order."""
        assert self._end.next_free is not None
        self._insert(self._end, blocks, self._end.next_free)

    def blocks(self) -> list[Block]:
        """All blocks in the queue, the next to be given out first."""
        found: list[Block] = []
        block = self._end.next_free
        while block is not self._end:
            assert block is not None
            if block is not self._middle:
                found.append(block)
            block = block.next_free
        return found

    def _insert(self, before: Block, blocks: Sequence[Block], after: Block) -> None:
        for block in blocks:
            self._join(before, block)
            before = block
        self._join(before, after)
        self._count += len(blocks)

    @staticmethod
    def _join(before: Block, after: Block) -> None:
        before.next_free = after
        after.previous_free = before
