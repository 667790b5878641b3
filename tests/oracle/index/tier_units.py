"""What a tier keeps together.

A lower tier may store several blocks as one (vLLM's chunks), and bring back all of them or none:
its unit. A configured unit is a fact. A tier with larger blocks than the GPU's names their size:
the largest is its unit, a smaller one the end of a prompt that does not fill it (LMCache's
`save_unfull_chunk`). Elsewhere nothing on the wire says how many blocks a unit has. But it ends at
a multiple of its size, counted from the start of the prompt, so the greatest common divisor of all
ends that a tier has announced is its unit, or a multiple of it as long as few have been seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import compress

from kvevents.events import GPU
from kvevents.layout import GroupKind, KVCacheLayout
from router.index.layout_learner import TierHint
from tests.oracle.index.block_table import GroupTier


@dataclass(slots=True)
class TierUnits:
    """The units of one source's tiers, by group."""

    hints: Mapping[str, TierHint] = field(default_factory=dict)
    """By tier."""
    seen: dict[GroupTier, int] = field(default_factory=dict)
    """The greatest common divisor of the ends, in tokens."""
    sizes: dict[GroupTier, int] = field(default_factory=dict)
    """The largest block that its events describe, in tokens."""

    def see_size(self, where: GroupTier, size: int) -> None:
        """Learn from an event that describes its blocks.

        Args:
            where: Group and tier.
            size: Of one block, in tokens.
        """
        self.sizes[where] = max(self.sizes.get(where, 0), size)

    def see(self, where: GroupTier, ends: Iterable[int]) -> None:
        """Learn from what a tier announces.

        Args:
            where: Group and tier.
            ends: Tokens from the start of the prompt to the ends of units, or between two of them.
        """
        found = math.gcd(self.seen.get(where, 0), *ends)
        if found:
            self.seen[where] = found

    def may_shrink(self, where: GroupTier, layout: KVCacheLayout) -> bool:
        """Whether more ends can change anything.

        Args:
            where: Group and tier.
            layout: The cache's.
        """
        group, tier = where
        if tier == GPU or tier in self.hints or group >= len(layout.groups):
            return False
        found = self.seen.get(where, 0)
        return not found or found > layout.groups[group].block_size

    def wants_ends(self, where: GroupTier, layout: KVCacheLayout, has_unplaced: bool) -> bool:
        """Whether what a tier holds of a prompt may tell more. Not where events describe blocks:
        one names all blocks in a unit, and only the last of them ends it.

        Args:
            where: Group and tier.
            layout: The cache's.
            has_unplaced: Some block of the tier has no place yet, so its end is not known.
        """
        is_known = where in self.sizes or (where in self.seen and not has_unplaced)
        return not is_known and self.may_shrink(where, layout)

    def of(self, tier: str, layout: KVCacheLayout) -> tuple[int, ...]:
        """The tokens of a unit in each group.

        A group of full attention has units from the prompt's start on, so its ends show them soon.
        A window or a state has few: until its own ends say less, its units have as many blocks as
        those of full attention.

        Args:
            tier: Its name.
            layout: The cache's.
        """
        blocks = [self._blocks(index, tier, layout) for index in range(len(layout.groups))]
        full = [group.kind is GroupKind.FULL for group in layout.groups]
        common = math.gcd(*compress(blocks, full)) or math.gcd(*blocks) or 1
        return tuple(
            group.block_size * (own if is_full and own else math.gcd(own, common))
            for group, own, is_full in zip(layout.groups, blocks, full, strict=True)
        )

    def _blocks(self, index: int, tier: str, layout: KVCacheLayout) -> int:
        """Blocks in a unit; 0 while nothing is known."""
        if layout.groups[index].kind is GroupKind.NOT_CACHED:
            return 0
        size = layout.groups[index].block_size
        hint, named = self.hints.get(tier), self.sizes.get((index, tier), 0)
        if hint is not None:
            unit = hint.unit_size or (hint.unit_blocks or 0) * size
        else:
            # Not the GPU's blocks: the tier, such as LMCache's, has its own.
            unit = named if named > size else self.seen.get((index, tier), 0)
        if not unit:
            return 0
        # Ends inside a block are those of a block that is not full.
        return 1 if unit % size else unit // size
