"""Finds the blocks of one group by their hash."""

from __future__ import annotations

from collections.abc import Iterator

from offload.block import Block


class CachedBlocks:
    """Hash -> block, with duplicates.

    Requests that computed the same prefix at the same time each keep their own copy. A block table
    never changes under its request, so equal blocks are not merged; the oldest copy serves the
    hits.
    """

    def __init__(self) -> None:
        self._oldest: dict[bytes, Block] = {}
        # Usually empty: with later copies kept apart, the first needs no container of its own.
        self._later: dict[bytes, dict[int, Block]] = {}

    def __len__(self) -> int:
        """Distinct hashes."""
        return len(self._oldest)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._oldest

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._oldest)

    def get(self, block_hash: bytes) -> Block | None:
        """The oldest copy."""
        return self._oldest.get(block_hash)

    def copies(self, block_hash: bytes) -> list[Block]:
        """All copies, the oldest first."""
        oldest = self._oldest.get(block_hash)
        return [] if oldest is None else [oldest, *self._later.get(block_hash, {}).values()]

    def add(self, block_hash: bytes, block: Block) -> bool:
        """Add a copy; return True if it is the only one.

        Args:
            block_hash: Identifies the prefix up to the block's end.
            block: Not among the copies yet.
        """
        if block_hash not in self._oldest:
            self._oldest[block_hash] = block
            return True
        self._later.setdefault(block_hash, {})[block.block_id] = block
        return False

    def discard(self, block_hash: bytes, block: Block) -> bool:
        """Remove a copy; return True if it was the last."""
        later = self._later.get(block_hash)
        if later is None:
            del self._oldest[block_hash]
            return True
        if self._oldest[block_hash] is block:
            first = next(iter(later))
            self._oldest[block_hash] = later.pop(first)
        else:
            del later[block.block_id]
        if not later:
            del self._later[block_hash]
        return False

    def clear(self) -> None:
        """Remove every copy of every hash."""
        self._oldest.clear()
        self._later.clear()
