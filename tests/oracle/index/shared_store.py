"""What several sources write to and read from: one file system or bucket behind many replicas.

It is no source's own: it outlives each of them, and a block is there once, whoever announced it and
how often. Blocks are found by the engines' own hashes, as the engines find them; readers take each
other's word for the prefix that a hash stands for, so all have to hash alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TypeAlias

from kvevents.events import GPU, LOCAL, BlockHash, BlockRemoved, BlockStored
from kvevents.layout import KVCacheLayout
from router.index.base import SourceLimits
from router.index.layout_learner import StoreHint, TierHint
from tests.oracle.index.block_table import BlockTable, GroupTier
from tests.oracle.index.tier_units import TierUnits

KeyOf: TypeAlias = Callable[[BlockHash], int | None]
"""The key of a block's prefix, where a source knows it."""


class SharedStore:
    """The blocks of one store, and what its writers know of them. Not thread-safe; no I/O."""

    def __init__(
        self, name: str, limits: SourceLimits, tiers: Sequence[tuple[str, TierHint]] = ()
    ) -> None:
        """
        Args:
            name: From the configuration.
            limits: As of a source; the oldest blocks go first where it is full.
            tiers: What the configuration says of units.
        """
        self.name = name
        self.table = BlockTable(limits)
        self.units = TierUnits(dict(tiers))
        self.layout: KVCacheLayout | None = None
        """Of the writer heard last: readers lay out their blocks alike."""
        self.lookahead = 0
        """Of the same."""

    @property
    def tiers(self) -> list[str]:
        """Under which its blocks were announced."""
        return sorted({tier for _, tier in self.table.held})

    def add(self, where: GroupTier, block_hashes: Iterable[BlockHash], key_of: KeyOf) -> int:
        """Take blocks in; returns how many were refused, for there are too many tiers.

        Args:
            where: Group and tier.
            block_hashes: The writer's.
            key_of: What the writer knows of their places.
        """
        table, held = self.table, self.table.held.get(where, {})
        new = [found for found in dict.fromkeys(block_hashes) if found not in held]
        table.make_room(where, new)
        taken = list(islice(new, table.room(where)))
        table.add(where, taken)
        for block_hash in taken:
            key = key_of(block_hash)
            if key is not None:
                table.place(block_hash, key, is_below=True)
        return len(new) - len(taken)

    def remove(self, where: GroupTier, block_hashes: Sequence[BlockHash]) -> int:
        """Forget blocks, whoever stored them; returns how many were there.

        Args:
            where: Group and tier.
            block_hashes: The writer's.
        """
        return self.table.leave(where, block_hashes, [0] * len(block_hashes))


class SharedStores:
    """The stores that one source shares."""

    def __init__(self, hints: Sequence[StoreHint], stores: Mapping[str, SharedStore]) -> None:
        """
        Args:
            hints: What the configuration says of them.
            stores: By name; at least those that *hints* name.
        """
        self._by_hint = [(hint, stores[hint.name]) for hint in hints]
        self._stores = tuple(dict.fromkeys(store for _, store in self._by_hint))

    def __iter__(self) -> Iterator[SharedStore]:
        return iter(self._stores)

    def __len__(self) -> int:
        return len(self._stores)

    @property
    def layout(self) -> KVCacheLayout | None:
        """That of the other sources, as far as they have said anything."""
        return next((store.layout for store in self if store.layout is not None), None)

    @property
    def lookahead(self) -> int:
        """See `SourceCache`."""
        return next((store.lookahead for store in self if store.layout is not None), 0)

    def of(self, event: BlockStored | BlockRemoved) -> SharedStore | None:
        """The store that an event is about; None: the source's own cache."""
        for hint, store in self._by_hint:
            if is_meant(hint, event):
                return store
        return None

    def clear(self, tier: str) -> int:
        """Empty a tier that is shared as a whole; returns how many blocks there were.

        An engine that says that such a tier is empty means what is behind it.
        """
        meant = dict.fromkeys(store for hint, store in self._by_hint if tier in hint.tiers)
        return sum(store.table.clear(tier) for store in meant)

    def place(self, block_hash: BlockHash, key: int) -> bool:
        """Learn where a block belongs; False where no store has it.

        Args:
            block_hash: Of the source.
            key: Of the prefix it stands for.
        """
        holding = [store.table for store in self if block_hash in store.table]
        for table in holding:
            table.place(block_hash, key, is_below=True)
        return len(holding) > 0

    def key_of(self, block_hash: BlockHash) -> int | None:
        """The key of a block's prefix, where some store knows it."""
        keys = (store.table.key_of(block_hash) for store in self)
        return next((key for key in keys if key is not None), None)


def is_meant(hint: StoreHint, event: BlockStored | BlockRemoved) -> bool:
    """Whether the blocks of an event are in a store.

    Args:
        hint: What the configuration says of the store.
        event: Of a source that shares it.
    """
    if event.tier == GPU or (event.locality or "").upper() == LOCAL:
        return False
    if hint.ownership is not None and hint.ownership != event.ownership:
        return False
    return event.tier in hint.tiers if hint.tiers else event.locality is not None
