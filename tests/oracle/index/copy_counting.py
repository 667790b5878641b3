"""How a source tells of several copies of one block: every removal, or the last one only.

Engines compute a block twice when two requests need it at once, and store both copies under one
hash. vLLM announces every store and every removal. It may come to announce the removal of the last
copy only: then counting leaves a copy that is gone for good. Nothing in an event says which it is,
but what follows a removal that seems to leave copies does (S: stored, R: removed):

    S S R R      every removal: the last one alone cannot be announced twice
    S S R S      the block is stored again: it was gone, or two requests needed it at once again

The second is evidence where a whole run is stored again, and no proof: a request that may not read
the cache does the same. So it takes several such runs, and not one sign of the first kind. In 36
recordings of engines that announce every removal and hold copies, that sign came before the second
such run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from enum import Enum

from kvevents.events import BlockHash

RUNS_FOR_LAST = 8
"""Runs stored again that it takes to believe that only the last removal is announced."""
MIN_RUN = 2
"""Blocks of a run that must have seemed to be there. Of a prompt that ends between two blocks the
last one is computed again, whatever is cached."""


class Counting(Enum):
    """Which removals a source announces."""

    UNKNOWN = "unknown"
    """Every one, as far as is known."""
    EVERY_COPY = "every copy"
    """Every one: it is proven, or the source tells how many are left."""
    LAST_COPY = "last copy"
    """That of a block's last copy."""


class CopyWatch:
    """Finds out how one source counts. Blocks are named by group and hash.

    Args:
        remembered: Blocks whose last removal seemed to leave copies; older ones are forgotten.
    """

    def __init__(self, remembered: int = 8192) -> None:
        self.counting = Counting.UNKNOWN
        self.leftovers: OrderedDict[tuple[int, BlockHash], None] = OrderedDict()
        """Blocks whose last removal seemed to leave copies, and that were not stored again."""
        self._remembered = remembered
        self._runs = 0

    @property
    def is_settled(self) -> bool:
        """Nothing that follows can show otherwise."""
        return self.counting is Counting.EVERY_COPY

    def settle(self) -> None:
        """Every removal is announced: no further question."""
        self.counting = Counting.EVERY_COPY
        self.leftovers.clear()

    def forget(self) -> None:
        """The cache was cleared: nothing is left over."""
        self.leftovers.clear()

    def removed(self, group: int, block_hash: BlockHash, copies: int) -> None:
        """Note a removal.

        Args:
            group: Index of the group.
            block_hash: The engine's.
            copies: As counted before it.
        """
        if (group, block_hash) in self.leftovers:
            self.settle()
        elif copies > 1 and not self.is_settled:
            self.leftovers[group, block_hash] = None
            if len(self.leftovers) > self._remembered:
                self.leftovers.popitem(last=False)

    def stored(
        self,
        group: int,
        block_hashes: Sequence[BlockHash],
        parent: BlockHash | None,
        is_full_attention: bool,
    ) -> bool:
        """Note a run that was stored; True if it settles that only last removals are announced.

        Args:
            group: Index of the group.
            block_hashes: The engine's.
            parent: The block before them.
            is_full_attention: A running request holds every block before the ones it stores.
        """
        unknown = self.counting is Counting.UNKNOWN
        if unknown and is_full_attention and (group, parent) in self.leftovers:
            # Not certain, since the events of a step are not in order; but to believe it is safe.
            self.settle()
            return False
        again = [each for each in block_hashes if (group, each) in self.leftovers]
        for each in again:
            self.leftovers.pop((group, each), None)
        self._runs += len(again) >= MIN_RUN
        if not unknown or self._runs < RUNS_FOR_LAST:
            return False
        self.counting = Counting.LAST_COPY
        return True
