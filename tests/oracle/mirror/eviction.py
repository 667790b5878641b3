"""What a cache evicts next: the blocks that no request uses any more, in the order in which they
were given back, and how many of them it takes.

A request gives back its blocks of full attention when it ends, the last first. The windows and
states before a boundary within its prompt are given back when the prompt has been computed, those
at its end with the rest. So they have places of their own in the order:

    | A's boundary | A's own keys, from the end | C's boundary | B's own keys | B's boundary |
      next to be evicted                                                                last
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from router.index.mirror_types import STEP
from tests.oracle.mirror.layout import Layout
from tests.oracle.mirror.ownership import Taken, Use

STEP_TOKENS = 2048
"""What an engine is taken to compute in a step at most: vLLM's default on most machines. It matters
to windows only: until the next step a prompt has blocks for all of its tokens."""


class Evicted(NamedTuple):
    """What would be gone."""

    keys: dict[int, float]
    """Of the full attention of a request, by its number: how many keys, from the end."""
    boundaries: set[int]
    """Their keys."""


class EvictionOrder:
    """Ended requests, and boundaries that no request uses; those at the front go first.

    Memory: some 100 bytes for each, and no more of them than the cache has blocks.
    """

    def __init__(self) -> None:
        self._blocks: dict[Use | int, float] = {}
        """Boundaries by their keys."""
        self._total = 0.0
        self._copies: dict[Use, float] = {}
        """Keys of which a request left blocks, and another one blocks of the same content."""
        self.copied_keys = 0.0
        """All of these."""

    def __contains__(self, item: Use | int) -> bool:
        return item in self._blocks

    @property
    def blocks(self) -> float:
        """Of all together."""
        return self._total

    # --- what requests do -------------------------------------------------------------------------

    def hold(self, boundary: int) -> None:
        """A request uses what is kept before a boundary.

        Args:
            boundary: The key of the prefix up to it.
        """
        self._total -= self._blocks.pop(boundary, 0.0)

    def leave(self, boundary: int, blocks: float) -> None:
        """A request has moved on.

        Args:
            boundary: The key of the prefix up to it.
            blocks: That are kept before it.
        """
        self.hold(boundary)
        self._blocks[boundary] = blocks
        self._total += blocks

    def end(self, use: Use, blocks_per_key: float) -> None:
        """A request has ended.

        Args:
            use: That owns keys now.
            blocks_per_key: That a key takes.
        """
        self._blocks[use] = 0.0
        self.weigh(use, blocks_per_key)

    def take(self, taken: Sequence[Taken], hit_keys: int, blocks_per_key: float) -> None:
        """A request took over keys, and computed those behind its hit again.

        Args:
            taken: From the start of its prompt.
            hit_keys: Of its hit.
            blocks_per_key: That a key takes.
        """
        at = 0
        for each in taken:
            at += each.keys
            if each.use in self._blocks:
                again = max(min(each.keys, at - hit_keys), 0)
                if again:
                    self._copies[each.use] = self._copies.get(each.use, 0.0) + again
                    self.copied_keys += again
                self.weigh(each.use, blocks_per_key)

    def weigh(self, use: Use, blocks_per_key: float) -> None:
        """What a request owns has changed.

        Args:
            use: Of a request; nothing happens if it was forgotten, or has not ended.
            blocks_per_key: That a key takes.
        """
        before = self._blocks.get(use)
        if before is None:
            return
        keys = max(use.owned + use.rest, 0.0) if use.owned else 0.0
        blocks = (keys + self._copies.get(use, 0.0)) * blocks_per_key
        self._total += blocks - before
        if blocks:
            self._blocks[use] = blocks
        else:
            del self._blocks[use]

    # --- what the cache does ----------------------------------------------------------------------

    def gone(self, use: Use) -> None:
        """What a request owned was evicted, and so was all before it."""
        while use in self._blocks:
            self._drop_first()

    def fit(self, most_blocks: float) -> None:
        """There are no more blocks than that: what is too much was evicted."""
        while self._total > most_blocks and self._blocks:
            self._drop_first()

    def clear(self) -> None:
        """Everything was evicted."""
        self._blocks.clear()
        self._copies.clear()
        self._total = self.copied_keys = 0.0

    def first(self, blocks: float, blocks_per_key: float) -> Evicted:
        """What goes when the cache needs so many blocks.

        Args:
            blocks: How many.
            blocks_per_key: That a key takes.
        """
        found = Evicted({}, set())
        for item, kept in self._blocks.items():
            if blocks <= 0:
                break
            if isinstance(item, int):
                found.boundaries.add(item)
            elif blocks_per_key:
                found.keys[item.number] = min(kept, blocks) / blocks_per_key
            blocks -= kept
        return found

    def _drop_first(self) -> None:
        first = next(iter(self._blocks))
        self._total -= self._blocks.pop(first)
        if isinstance(first, Use):
            self.copied_keys -= self._copies.pop(first, 0.0)


class Forecast:
    """How many blocks a cache evicts while it computes prompts, one behind the other, in steps.

    Whatever a step computes has blocks in every group. Of a window, those that nobody keeps are
    free again in the next step.

    Args:
        layout: Of the cache.
        free_blocks: That hold nothing.
    """

    def __init__(self, layout: Layout, free_blocks: float) -> None:
        self._layout = layout
        self._free = free_blocks
        self._free_next = 0.0
        """More of them in the next step."""
        self._step_tokens = STEP_TOKENS
        """That are left of the step."""
        self.evicted = 0.0
        """Blocks so far."""

    def compute(self, tokens: int, kept_blocks: float) -> None:
        """A prompt comes next.

        Args:
            tokens: Of it, those that have to be computed.
            kept_blocks: Of its windows and states.
        """
        while tokens > 0:
            if not self._step_tokens:
                self._step_tokens = STEP_TOKENS
                self._free, self._free_next = self._free + self._free_next, 0.0
            count = min(tokens, self._step_tokens)
            tokens -= count
            self._step_tokens -= count
            kept_blocks -= self._take(count / STEP, kept_blocks)

    def _take(self, keys: float, kept_blocks: float) -> float:
        """Take the blocks of a part of a prompt; return how many of its windows and states stay."""
        layout = self._layout
        passing = keys * layout.window_blocks_per_key + layout.states
        taken = keys * layout.full_blocks_per_key + passing
        self.evicted += max(taken - self._free, 0.0)
        self._free = max(self._free - taken, 0.0)
        if not layout.is_sparse:
            return 0.0
        kept = min(kept_blocks, passing)
        self._free_next += passing - kept
        return kept
