"""The blocks of one source: how many copies are where, and which prefix each hash stands for.

Copies are counted under the engine's own hashes, per group and tier. A block is *placed* once we
know the key of the prefix that its hash stands for. Both are kept until the last copy is removed;
the keys of blocks that went most recently are remembered for a while.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeAlias

import msgspec

from kvevents.events import GPU, BlockHash
from router.index.base import SourceLimits

GroupTier: TypeAlias = tuple[int, str]


class _TableEntry(msgspec.Struct, gc=False):
    """One distinct hash. There are millions: the garbage collector must not walk them."""

    copies: int = 0
    """Over all groups and tiers."""
    key: int | None = None
    """Of the prefix; None while the block is not placed."""


class BlockTable:
    """A block with the hash 0xA1, stored on the GPU, copied to the CPU and placed at the key 77:

        held         {(0, "GPU"): {0xA1: 1}, (0, "CPU"): {0xA1: 1}}
        entries      {0xA1: 2 copies, key 77}
        hash_by_key  {77: 0xA1}

    Once both copies are gone all three are empty, and 0xA1 -> 77 is among the forgotten.
    """

    def __init__(self, limits: SourceLimits) -> None:
        self.held: dict[GroupTier, dict[BlockHash, int]] = {}
        """(group, tier) -> hash -> copies."""
        self.hash_by_key: dict[int, BlockHash] = {}
        """For placed blocks. Of two hashes that claim one prefix, the newer."""
        self.tier_hash_by_key: dict[int, BlockHash] = {}
        """Where a lower tier has hashes of its own for prefixes that the GPU's hashes stand for."""
        self.unplaced = 0
        """Distinct hashes held that are not placed."""
        self.ambiguous = 0
        """Times two live hashes claimed one prefix."""
        self.uses_int_hashes = False
        """The form of the newest hash; an engine keeps to one."""
        self._limits = limits
        self._entries: dict[BlockHash, _TableEntry] = {}
        self._forgotten: OrderedDict[BlockHash, int] = OrderedDict()
        self.cleared: dict[BlockHash, int] = {}
        """What clears took, as long as that is not too much."""
        self._all_cleared = 0
        """How many blocks that was, each as often as it was taken."""
        self.removing_tiers: set[str] = set()
        """Lower tiers that have announced a removal. Storage that others share never does."""
        self._totals: dict[str, int] = {}
        self._copies = 0

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._entries

    def __len__(self) -> int:
        """Distinct hashes held."""
        return len(self._entries)

    @property
    def has_further_copies(self) -> bool:
        """Some block has more than one copy in one place."""
        return self._copies > sum(self._totals.values())

    @property
    def has_lower_tiers(self) -> bool:
        """Some block is held below the GPU."""
        return any(tier != GPU for _, tier in self.held)

    def total(self, tier: str) -> int:
        """Distinct (group, hash) held in a tier."""
        return self._totals.get(tier, 0)

    def counts(self) -> dict[GroupTier, int]:
        """(group, tier) -> distinct hashes held, in order."""
        return {where: len(hashes) for where, hashes in sorted(self.held.items())}

    # --- copies -----------------------------------------------------------------------------------

    def room(self, where: GroupTier) -> int:
        """How many more blocks may be held there."""
        if where not in self.held:
            tiers = {tier for _, tier in self.held} | {where[1]}
            if len(tiers) > self._limits.tiers:
                return 0
        return max(0, self._limits.blocks - self.total(where[1]))

    def make_room(self, where: GroupTier, block_hashes: Sequence[BlockHash]) -> None:
        """Drop what was announced first in a tier that is full and never removes: what is still
        there of it nobody knows.

        Args:
            where: Group and tier of the blocks to come.
            block_hashes: Of these.
        """
        tier = where[1]
        if tier == GPU or tier in self.removing_tiers:
            return
        missing = len(block_hashes) - self.room(where)
        if missing <= 0:
            return
        for oldest in [where, *(other for other in self.held if other[1] == tier)]:
            if missing <= 0:
                return
            held = self.held.get(oldest, {})
            for block_hash, copies in list(islice(held.items(), missing)):
                self._discount(oldest, held, block_hash, copies, copies)
                missing -= 1

    def add(self, where: GroupTier, block_hashes: Sequence[BlockHash], copies: int = 1) -> None:
        """Count copies of blocks.

        Args:
            where: Group and tier.
            block_hashes: The engine's.
            copies: How many more there are of each.
        """
        if not block_hashes:
            return
        self._copies += copies * len(block_hashes)
        held, entries, new = self.held.setdefault(where, {}), self._entries, 0
        for block_hash in block_hashes:
            before = held.get(block_hash, 0)
            held[block_hash] = before + copies
            new += not before
            entry = entries.get(block_hash)
            if entry is None:
                entry = self._enter(block_hash, where[1] != GPU)
            entry.copies += copies
        self._totals[where[1]] = self._totals.get(where[1], 0) + new

    def _enter(self, block_hash: BlockHash, is_below: bool) -> _TableEntry:
        entry = self._entries[block_hash] = _TableEntry()
        self.uses_int_hashes = isinstance(block_hash, int)
        self.unplaced += 1
        key = self._forgotten.pop(block_hash, None)
        if key is None:
            key = self.cleared.get(block_hash)
        if key is not None:
            self.place(block_hash, key, is_below)
        return entry

    def remove(self, where: GroupTier, block_hashes: Sequence[BlockHash]) -> int:
        """Discount one copy of each block; returns for how many there was one.

        Args:
            where: Group and tier.
            block_hashes: The engine's.
        """
        held = self.held.get(where)
        if held is None:
            return 0
        removed = 0
        for block_hash in block_hashes:
            copies = held.get(block_hash, 0)
            if copies:
                self._discount(where, held, block_hash, copies, 1)
                removed += 1
        if removed:
            self.removing_tiers.add(where[1])
        return removed

    def leave(
        self, where: GroupTier, block_hashes: Sequence[BlockHash], copies_left: Sequence[int]
    ) -> int:
        """Remove a copy of each block, as `remove` does, and correct how many are left.

        Args:
            where: Group and tier.
            block_hashes: The engine's.
            copies_left: The engine's own count, for each hash.
        """
        removed = 0
        for block_hash, left in zip(block_hashes, copies_left, strict=True):
            held = self.held.get(where, {})
            copies = held.get(block_hash, 0)
            removed += copies > 0
            if copies > left:
                self._discount(where, held, block_hash, copies, copies - left)
            elif copies < left and (copies or self.room(where)):
                self.add(where, (block_hash,), left - copies)
        return removed

    def clear(self, tier: str) -> int:
        """Remove every copy in a tier; returns how many there were.

        What the blocks stood for is remembered of all of them, or of none if they are too many.
        What earlier clears took is forgotten if they are too many together.
        """
        removed = 0
        taken: dict[BlockHash, int] = {}
        for where in [where for where in self.held if where[1] == tier]:
            held = self.held[where]
            for block_hash, copies in list(held.items()):
                self._discount(where, held, block_hash, copies, copies, taken)
                removed += copies
        self._all_cleared += len(taken)
        if self._all_cleared > self._limits.forgotten:
            taken = taken if len(taken) <= self._limits.forgotten else {}
            self.cleared, self._all_cleared = {}, len(taken)
        self.cleared.update(taken)
        return removed

    def _discount(
        self,
        where: GroupTier,
        held: dict[BlockHash, int],
        block_hash: BlockHash,
        copies: int,
        gone: int,
        cleared: dict[BlockHash, int] | None = None,
    ) -> None:
        """*gone* of the *copies* there are left. In a clear *cleared* is to remember the block."""
        self._copies -= gone
        if copies > gone:
            held[block_hash] = copies - gone
        else:
            del held[block_hash]
            self._totals[where[1]] -= 1
            if not held:
                del self.held[where]
        entry = self._entries[block_hash]
        entry.copies -= gone
        if not entry.copies:
            self._forget(block_hash, entry, cleared)

    def _forget(
        self, block_hash: BlockHash, entry: _TableEntry, cleared: dict[BlockHash, int] | None
    ) -> None:
        del self._entries[block_hash]
        if entry.key is None:
            self.unplaced -= 1
            return
        if self.hash_by_key.get(entry.key) == block_hash:
            del self.hash_by_key[entry.key]
        if self.tier_hash_by_key.get(entry.key) == block_hash:
            del self.tier_hash_by_key[entry.key]
        if cleared is None:
            self._remember(block_hash, entry.key)
        else:
            cleared[block_hash] = entry.key

    # --- places -----------------------------------------------------------------------------------

    def place(self, block_hash: BlockHash, key: int, is_below: bool = False) -> None:
        """Learn the key of a block's prefix; the first one learned stays, until it is doubted.

        Args:
            block_hash: Held or not: a lower tier may announce it later.
            key: Of the prefix it stands for.
            is_below: A lower tier says so.
        """
        entry = self._entries.get(block_hash)
        if entry is None:
            self._remember(block_hash, key)
        elif entry.key is None:
            entry.key = key
            self.unplaced -= 1
            if key in self.hash_by_key:
                self._place_beside(block_hash, key, is_below)
            else:
                self.hash_by_key[key] = block_hash

    def doubt(self, where: GroupTier, block_hash: BlockHash, key: int) -> None:
        """Take another key than this from a block that a group of the GPU is about to hold: what
        lower tiers say may leave out what goes into its hash."""
        entry = self._entries.get(block_hash)
        if entry is None or entry.key in (None, key) or block_hash in self.held.get(where, {}):
            return
        if self.hash_by_key.get(entry.key) == block_hash:
            del self.hash_by_key[entry.key]
        if self.tier_hash_by_key.get(entry.key) == block_hash:
            del self.tier_hash_by_key[entry.key]
        entry.key = None
        self.unplaced += 1

    def _place_beside(self, block_hash: BlockHash, key: int, is_below: bool) -> None:
        """Two live hashes for one prefix: LMCache's is not the engine's; any other pair differs in
        something that the events hide."""
        before = self.hash_by_key[key]
        if is_below:
            self.tier_hash_by_key[key] = block_hash
            return
        self.hash_by_key[key] = block_hash
        if self._is_on_gpu(before):
            self.ambiguous += 1
        else:
            self.tier_hash_by_key[key] = before

    def _is_on_gpu(self, block_hash: BlockHash) -> bool:
        return any(block_hash in held for where, held in self.held.items() if where[1] == GPU)

    def key_of(self, block_hash: BlockHash) -> int | None:
        """The key of a block's prefix, also shortly after its last copy went."""
        entry = self._entries.get(block_hash)
        if entry is not None and entry.key is not None:
            return entry.key
        known = self._forgotten.get(block_hash)
        return self.cleared.get(block_hash) if known is None else known

    def unplaced_of(self, block_hashes: Iterable[BlockHash]) -> int:
        """How many of these are held and not placed."""
        entries = self._entries
        return sum(
            entry.key is None for entry in map(entries.get, block_hashes) if entry is not None
        )

    def _remember(self, block_hash: BlockHash, key: int) -> None:
        self._forgotten[block_hash] = key
        if len(self._forgotten) > self._limits.forgotten:
            self._forgotten.popitem(last=False)

    # --- keeping ----------------------------------------------------------------------------------

    def placed(self) -> Iterator[tuple[BlockHash, int, bool]]:
        """`(hash, key, whether the key leads to this hash)` of every placed block."""
        for block_hash, entry in self._entries.items():
            if entry.key is not None:
                yield block_hash, entry.key, self.hash_by_key.get(entry.key) == block_hash

    def forgotten(self) -> list[tuple[BlockHash, int]]:
        """`(hash, key)` of the blocks that went last, the oldest first."""
        return list(self._forgotten.items())

    def restore(
        self,
        held: dict[GroupTier, dict[BlockHash, int]],
        placed: Iterable[tuple[BlockHash, int, bool]],
        forgotten: Iterable[tuple[BlockHash, int]],
        tier_hashes: Iterable[tuple[BlockHash, int]],
        cleared: Iterable[tuple[BlockHash, int]],
    ) -> None:
        """Take back the blocks of an earlier table into this empty one.

        Args:
            held: As in `held`.
            placed: As from `placed`.
            forgotten: As from `forgotten`.
            tier_hashes: The hashes of `tier_hash_by_key`, with their keys.
            cleared: As in `cleared`.
        Raises:
            KeyError: A placed block is not held.
        """
        for where, copies_of in held.items():
            for block_hash, copies in copies_of.items():
                self.add(where, (block_hash,), copies)
        for block_hash, key, is_found in placed:
            self._entries[block_hash].key = key
            self.unplaced -= 1
            if is_found:
                self.hash_by_key[key] = block_hash
        self._forgotten.update(forgotten)
        self.cleared.update(cleared)
        self._all_cleared = len(self.cleared)
        self.tier_hash_by_key.update((key, found) for found, key in tier_hashes)
