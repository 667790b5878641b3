"""What one source - one data-parallel rank of one replica - holds, as far as its events show.

Every event is counted at once, under the engine's hashes. Prompts find a block once its place is
known, and that is learned from dense events, which carry tokens for every hash. Everything else -
a tier without tokens, a group with holes, a suffix whose parent is not known yet - becomes visible
when its hash is placed, or when the engine's hash function is known and a prompt hashes to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType

import msgspec

from kvevents.events import (
    CPU,
    GPU,
    REMOTE,
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    CacheLayout,
    Event,
    EventBatch,
    TierBlocksCleared,
)
from kvevents.hashing import ExtraKeys
from kvevents.layout import GroupKind, KVCacheLayout, kind_from_wire
from router.index.base import ApplyResult, SourceLimits, SourceStatistics
from router.index.hash_finder import HashFinder, HashForm, engine_hashes
from router.index.layout_learner import LayoutHints, LayoutLearner
from tests.oracle.index.block_table import BlockTable, GroupTier
from tests.oracle.index.copy_counting import CopyWatch, Counting
from tests.oracle.index.keys import KeySpace, tokens_of
from tests.oracle.index.placing import BlockRun, WaitingRuns, place_run
from tests.oracle.index.shared_store import SharedStore, SharedStores
from tests.oracle.index.tier_units import TierUnits

_DIGEST_BYTES = 32
"""Of SHA-256; the xxhash family's are shorter."""


@dataclass(frozen=True, slots=True)
class LowerTier:
    """A tier that a source can load from: its own, or one of a store that it shares."""

    tier: str
    """As on the wire."""
    label: str
    """What a hit in it is called: the store's name, or the tier's."""
    table: BlockTable
    units: TierUnits


class SourceCache:
    """One source's blocks, layout and hash function. Not thread-safe; no I/O."""

    def __init__(
        self,
        space: KeySpace,
        hints: LayoutHints | None = None,
        limits: SourceLimits | None = None,
        stores: Mapping[str, SharedStore] = MappingProxyType({}),
    ) -> None:
        """
        Args:
            space: The index's.
            hints: What the configuration says of it.
            limits: Of what it may hold.
            stores: By name, all that its hints name.
        """
        self.limits = limits or SourceLimits()
        self.learner = LayoutLearner(hints or LayoutHints())
        self.finder = HashFinder(self.learner.hints.hash_seeds)
        self.table = BlockTable(self.limits)
        self.units = TierUnits(dict(self.learner.hints.tiers))
        self.waiting = WaitingRuns()
        self.copies = CopyWatch()
        self.batches = 0
        """Applied so far."""
        self.removals = 0
        """Blocks removed from the GPU since it was empty for certain."""
        self.removed: dict[int, int] = {}
        """Blocks removed from the GPU, by group."""
        self.has_overflowed = False
        self.has_lost_removals = False
        """An event that took blocks away could not be read, or was taken for more than it said."""
        self.shows_extra_keys = False
        """The events say what salts and the like a block has."""
        self.has_shared = False
        """It has written to a store that it shares."""
        self.announces_unshared = False
        """It announced blocks as remote that no configured store is for."""
        self.stores = SharedStores(self.learner.hints.stores, stores)
        self._place_block = self._place_everywhere if self.stores else self.table.place
        self._space = space

    # --- reading ----------------------------------------------------------------------------------

    @property
    def layout(self) -> KVCacheLayout | None:
        """None while too little is known. One that has said nothing so far, but shares a store, is
        taken to be like the others."""
        layout = self.learner.layout
        if layout is None and self.stores and self.learner.error is None:
            return self.stores.layout
        return layout

    @property
    def lookahead(self) -> int:
        """Tokens after a block that its hash covers too."""
        if self.learner.layout is None and self.stores:
            return self.stores.lookahead
        return self.learner.lookahead

    @property
    def hides_extra_keys(self) -> bool:
        """True for engines whose events say nothing of salts and the like (vLLM < 0.17)."""
        return bool(self.table) and not self.shows_extra_keys

    def statistics(self) -> SourceStatistics:
        """Everything worth showing."""
        given_up_for_good = self.waiting.given_up > 0 and self.finder.chain is None
        return SourceStatistics(
            blocks=self.table.counts(),
            units=self._units(),
            unplaced=self.table.unplaced,
            ambiguous=self.table.ambiguous,
            waiting=self.waiting.statistics(),
            layout=self.layout,
            hash_algorithm=self.finder.chain.algorithm if self.finder.chain else None,
            assumptions=self._assumptions(),
            key_problem=self.finder.key_problem,
            is_incomplete=self.has_overflowed or self.has_lost_removals or given_up_for_good,
            stores={store.name: store.table.counts() for store in self.stores},
            removed=dict(sorted(self.removed.items())),
        )

    def lower_tiers(self) -> list[LowerTier]:
        """All that it can load from, the fastest first as far as names tell; its own before what it
        shares."""
        own = {tier for _, tier in self.table.held} - {GPU}
        ordered = sorted(own, key=lambda tier: (not tier.startswith(CPU), tier))
        found = [LowerTier(tier, tier, self.table, self.units) for tier in ordered]
        for store in self.stores:
            found += (LowerTier(tier, store.name, store.table, store.units) for tier in store.tiers)
        return found

    def units_of(self, lower: LowerTier) -> tuple[int, ...]:
        """Tokens that a lower tier keeps together, by group."""
        layout = self.layout
        assert layout is not None
        if self.learner.announced is not None:
            # Our own engine names every block that a tier can bring back.
            return tuple(group.block_size for group in layout.groups)
        return lower.units.of(lower.tier, layout)

    @property
    def has_own_blocks_below(self) -> bool:
        """Whether some tier has blocks of its own, larger than the GPU's, and so hashes of its
        own."""
        layout = self.layout
        if layout is None:
            return False
        return any(
            size > layout.groups[group].block_size
            for units in (self.units, *(store.units for store in self.stores))
            for (group, _), size in units.sizes.items()
            if group < len(layout.groups)
        )

    @property
    def has_unplaced(self) -> bool:
        """Whether some block that it could load has no place yet."""
        return self.table.unplaced > 0 or any(store.table.unplaced for store in self.stores)

    def _units(self) -> dict[GroupTier, int]:
        if self.layout is None:
            return {}
        units = {
            lower.tier: self.units_of(lower)
            for lower in self.lower_tiers()
            if lower.table is self.table
        }
        return {
            (group, tier): units[tier][group]
            for group, tier in sorted(self.table.held)
            if tier in units and group < len(units[tier])
        }

    def _assumptions(self) -> tuple[str, ...]:
        known = self.learner.assumptions()
        if self.copies.counting is Counting.LAST_COPY:
            known = (*known, "removals: announced only with the last copy of a block")
        if self.learner.layout is None and self.layout is not None:
            known = (*known, "layout: as that of others that share its store")
        if self.announces_unshared:
            known = (
                *known,
                "blocks announced as remote count for this replica alone: "
                "configure stores if others read them too",
            )
        unplaced = self.table.unplaced
        if not unplaced or self.finder.known:
            return known
        unknown = (
            f"{unplaced} blocks cannot be placed: the engine's hash function is not known; "
            "configure hash_seeds"
        )
        return (*known, unknown)

    # --- applying ---------------------------------------------------------------------------------

    def apply(self, batch: EventBatch) -> ApplyResult:
        """Take one batch; nothing in it can fail half-way."""
        result = ApplyResult(
            skipped=batch.skipped, unreadable=batch.unreadable, problem=batch.problem
        )
        layout_before = self.layout
        self.batches += 1
        for event in batch.events:
            self._learn_layout(event)
        for event in batch.events:
            self._apply_event(event, result)
        result.given_up = self.waiting.trim(
            self.limits, self.batches, lambda run: self._is_unplaced(run.hashes)
        )
        self._find_hash_function(batch)
        result.layout_changed = self.layout != layout_before
        result.has_lower_tiers = self.table.has_lower_tiers or self.has_shared
        # A known hash function makes up for keys that were never learned.
        given_up_for_good = result.given_up > 0 and self.finder.chain is None
        self.has_lost_removals |= batch.hides_removals
        result.is_incomplete |= result.overflow > 0 or batch.hides_removals or given_up_for_good
        return result

    def _learn_layout(self, event: Event) -> None:
        if isinstance(event, CacheLayout):
            self.shows_extra_keys = True
            self.learner.see_announcement(event)
            self.finder.see_announcement(event)
        elif isinstance(event, BlockStored):
            self.learner.see_stored(event)

    def _apply_event(self, event: Event, result: ApplyResult) -> None:
        if isinstance(event, BlockStored):
            self._store(_stored_with_short_hashes(event), result)
        elif isinstance(event, BlockRemoved):
            self._remove(_removed_with_short_hashes(event), result)
        elif isinstance(event, (AllBlocksCleared, TierBlocksCleared)):
            if isinstance(event, AllBlocksCleared) and not event.medium:
                result.removed += self._clear_host_memory()
            result.removed += self.table.clear(event.tier)
            result.removed += self.stores.clear(event.tier)
            if event.tier == GPU:
                result.cleared = True
                self.copies.forget()
                self.removals = 0
                # With nothing left there is nothing that could be wrong, or missing.
                self.has_lost_removals &= bool(self.table)
                if not self.table and not self.has_shared:
                    self.has_overflowed, self.waiting.given_up = False, 0

    def _clear_host_memory(self) -> int:
        """SGLang's flush empties its host memory too, and announces both as one. Engines that
        announce a layout name each tier."""
        return 0 if self.learner.announced else self.table.clear("CPU_PINNED")

    def _store(self, event: BlockStored, result: ApplyResult) -> None:
        self.shows_extra_keys |= event.extra_keys is not None or event.cache_salt is not None
        store = self.stores.of(event)
        if store is not None:
            self._store_shared(event, store, result)
            return
        self.announces_unshared |= event.locality is not None and event.locality.upper() == REMOTE
        table, where = self.table, (event.group_idx or 0, event.tier)
        table.make_room(where, event.block_hashes)
        taken = event.block_hashes[: table.room(where)]
        key = self._parent_key(event)
        if event.tier == GPU and table.has_lower_tiers and key is not None:
            self._doubt(event, where, len(taken), key)
        table.add(where, taken)
        if self.copies.leftovers and event.tier == GPU:
            self._drop_ghosts(event)
        block_size = event.tokens_per_block
        if block_size:
            self._place(event, block_size, key)
        if event.tier != GPU:
            self._see_unit(where, event, self.units)
        refused = len(event.block_hashes) - len(taken)
        self.has_overflowed |= refused > 0
        result.stored += len(taken)
        result.overflow += refused
        result.skipped += refused
        if table.unplaced:
            result.waiting += table.unplaced_of(taken)

    # --- what is shared ---------------------------------------------------------------------------

    def _store_shared(self, event: BlockStored, store: SharedStore, result: ApplyResult) -> None:
        if self.learner.layout is not None:
            store.layout, store.lookahead = self.learner.layout, self.learner.lookahead
        where = (event.group_idx or 0, event.tier)
        refused = store.add(where, event.block_hashes, self.table.key_of)
        block_size = event.tokens_per_block
        if block_size:
            self._place(event, block_size, self._parent_key(event))
        self._see_unit(where, event, store.units)
        result.stored += len(event.block_hashes) - refused
        result.skipped += refused
        result.waiting += store.table.unplaced_of(event.block_hashes)
        self.has_shared = True

    def _place_everywhere(self, block_hash: BlockHash, key: int, is_below: bool) -> None:
        is_shared = self.stores.place(block_hash, key)
        if not is_shared or block_hash in self.table:
            self.table.place(block_hash, key, is_below)

    def _key_of(self, block_hash: BlockHash) -> int | None:
        key = self.table.key_of(block_hash)
        return self.stores.key_of(block_hash) if key is None and self.stores else key

    # --- removing ---------------------------------------------------------------------------------

    def _remove(self, event: BlockRemoved, result: ApplyResult) -> None:
        store = self.stores.of(event)
        if store is not None:
            removed = store.remove((event.group_idx or 0, event.tier), event.block_hashes)
            result.removed += removed
            result.skipped += len(event.block_hashes) - removed
            return
        where, left = (event.group_idx or 0, event.tier), event.remaining_copy_counts
        if left is not None:
            self.copies.settle()
        elif event.tier == GPU and (self.copies.leftovers or self.table.has_further_copies):
            left = self._left_of_last(event, result)
        if left is None:
            removed = self.table.remove(where, event.block_hashes)
        else:
            removed = self.table.leave(where, event.block_hashes, left)
        if event.tier == GPU and removed:
            group = event.group_idx or 0
            self.removals += removed
            self.removed[group] = self.removed.get(group, 0) + removed
        result.removed += removed
        result.skipped += len(event.block_hashes) - removed

    def _left_of_last(self, event: BlockRemoved, result: ApplyResult) -> list[int] | None:
        """No copy of any block, where the source announces last removals only; else None: one less
        of each."""
        if self.copies.is_settled:
            return None
        group, told_last = event.group_idx or 0, self.copies.counting is Counting.LAST_COPY
        held = self.table.held.get((group, GPU), {})
        for block_hash in event.block_hashes:
            self.copies.removed(group, block_hash, held.get(block_hash, 0))
        if not told_last:
            return None
        if self.copies.is_settled:
            # It announces every removal after all: copies were taken for gone that are there.
            self.has_lost_removals = result.is_incomplete = True
            return None
        return [0] * len(event.block_hashes)

    def _drop_ghosts(self, event: BlockStored) -> None:
        """Remove the copies that only seemed to be left, once it is known that there are none."""
        group = event.group_idx or 0
        is_full = kind_from_wire(event.kv_cache_spec_kind) in (None, GroupKind.FULL)
        parent = event.parent_block_hash
        if self.copies.stored(group, event.block_hashes, parent, is_full):
            for of_group, block_hash in self.copies.leftovers:
                self.table.leave((of_group, GPU), (block_hash,), (0,))

    # --- placing ----------------------------------------------------------------------------------

    def _parent_key(self, event: BlockStored) -> int | None:
        parent = event.parent_block_hash
        return self._space.root(event.adapter) if parent is None else self._key_of(parent)

    def _doubt(self, event: BlockStored, where: GroupTier, taken: int, key: int) -> None:
        """Give up what lower tiers said of blocks, where the GPU says something else."""
        block_size = event.tokens_per_block
        if not block_size or self._is_opaque(event):
            return
        run = BlockRun.of(event, block_size, self.learner.lookahead, self.batches)
        for block_hash, block_key in islice(run.keys(key, self._space), taken):
            self.table.doubt(where, block_hash, block_key)

    def _place(self, event: BlockStored, block_size: int, key: int | None) -> None:
        """Learn the keys of a dense event, now or when its parent's is known."""
        if self._is_opaque(event):
            return
        run = BlockRun.of(event, block_size, self.learner.lookahead, self.batches)
        parent = event.parent_block_hash
        if key is not None:
            place_run(run, key, self._space, self._place_block, self.waiting)
        elif parent is not None and self._needs_parent(event):
            self.waiting.add(parent, run)

    def _needs_parent(self, event: BlockStored) -> bool:
        """Whether only the parent's key can show where this run belongs. A known hash function
        shows it at every look-up, unless a tier has hashes of its own."""
        if self.finder.chain is not None and event.tier == GPU and event.adapter is None:
            return False
        return self._is_unplaced(event.block_hashes)

    def _is_unplaced(self, hashes: Sequence[BlockHash]) -> bool:
        """Whether it, or a store that it shares, holds one of these blocks without a place."""
        tables = (self.table, *(store.table for store in self.stores))
        return any(table.unplaced_of(hashes) for table in tables)

    def _is_opaque(self, event: BlockStored) -> bool:
        """Whether something the event hides goes into its hashes, such as a salt before vLLM 0.17.
        Only a known hash function can show it: the first hash then differs from what the event's
        tokens hash to. A lower tier may have hashes of its own, so theirs show nothing."""
        if event.tier != GPU:
            return False
        if event.parent_block_hash is not None or event.extra_keys is not None:
            return False
        if event.adapter is not None or event.cache_salt:
            return False
        chain = self.finder.chain
        if chain is None or self.layout is None or event.lookahead_token_ids:
            return False
        size = len(event.token_ids) // len(event.block_hashes)
        form = HashForm(chain, self.layout.hash_block_size, as_int=self.table.uses_int_hashes)
        first = engine_hashes(form, event.token_ids[:size])
        return bool(first) and first[-1] != event.block_hashes[0]

    # --- units of lower tiers ---------------------------------------------------------------------

    def _see_unit(self, where: GroupTier, event: BlockStored, units: TierUnits) -> None:
        """Learn from the ends that a tier announces.

        Every hash ends a unit, with one exception: a self-describing event of vLLM is about one
        unit, and names the blocks in it. LMCache's names its own blocks, which are larger.
        """
        layout, ends = self.layout, event.block_hashes
        if event.token_ids:
            ends = ends[-1:]
            units.see_size(where, event.tokens_per_block or event.block_size or 1)
            units.see(where, [len(event.token_ids)])
        if layout is None or self.learner.announced or not units.may_shrink(where, layout):
            return
        keys = map(self._key_of, ends)
        known = [tokens_of(key) - self.learner.lookahead for key in keys if key is not None]
        if known:
            units.see(where, known)

    # --- the engine's own hashes ------------------------------------------------------------------

    def learn_from_prompt(
        self, token_ids: Sequence[int], spell: Callable[[int], Iterable[Sequence[ExtraKeys]]]
    ) -> None:
        """Look for the hash function with a prompt, if there are blocks that need it.

        Args:
            token_ids: The prompt.
            spell: For a hash block size, the ways in which engines may hash its extra keys.
        """
        if self.layout is None or not self.table.unplaced or not self.finder.may_find:
            return
        step = self.layout.hash_block_size
        self.finder.try_prompt(
            token_ids, spell(step), step, self.learner.lookahead, self.table.__contains__
        )

    def _find_hash_function(self, batch: EventBatch) -> None:
        """Try known functions on a batch, where placing alone leaves blocks unfound: holes without
        a dense group, lost parents, hidden salts."""
        if self.layout is None or not self.finder.may_find:
            return
        if not (self.has_unplaced or self.hides_extra_keys):
            return
        for event in batch.events:
            if isinstance(event, BlockStored) and self.finder.may_find and event.tier == GPU:
                self.finder.try_event(event, self.layout.hash_block_size)


# --- hashes of several digests --------------------------------------------------------------------


def _stored_with_short_hashes(event: BlockStored) -> BlockStored:
    """The event with each hash cut to one digest.

    Up to vLLM 0.23 a block of several hash blocks is named by all their digests, one after the
    other; the last is the hash that every other group and every newer version has for the same end.
    """
    if not any(map(_is_long, (event.parent_block_hash, *event.block_hashes))):
        return event
    parent = None if event.parent_block_hash is None else _last_digest(event.parent_block_hash)
    return msgspec.structs.replace(
        event, block_hashes=list(map(_last_digest, event.block_hashes)), parent_block_hash=parent
    )


def _removed_with_short_hashes(event: BlockRemoved) -> BlockRemoved:
    if not any(map(_is_long, event.block_hashes)):
        return event
    return msgspec.structs.replace(event, block_hashes=list(map(_last_digest, event.block_hashes)))


def _is_long(block_hash: BlockHash | None) -> bool:
    return isinstance(block_hash, bytes) and len(block_hash) > _DIGEST_BYTES


def _last_digest(block_hash: BlockHash) -> BlockHash:
    return block_hash[-_DIGEST_BYTES:] if isinstance(block_hash, bytes) else block_hash
