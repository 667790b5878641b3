"""One lower tier as the connector sees it: its manager, its aliases, its events for the wire."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from kvevents.events import BlockHash, BlockRemoved, BlockStored, Event, GroupIdx
from kvevents.layout import GroupKind, KVCacheGroup
from offload.base import (
    FileLoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    RequestContext,
    unpack_offload_key,
)
from offload.connector.block_aliases import BlockAliases
from offload.errors import CacheConfigError


class Tier:
    """One tier of a cache by GPU blocks and their hashes, where its manager knows offloaded blocks.

    Not thread-safe: it belongs to the scheduler.
    """

    def __init__(
        self,
        manager: OffloadingManager,
        groups: Sequence[KVCacheGroup],
        blocks_per_offloaded_block: Sequence[int] | int = 1,
    ) -> None:
        """
        Args:
            manager: Decides which blocks the tier holds; loads and statistics are its own.
            blocks_per_offloaded_block: GPU blocks in an offloaded block, per group or for all; the
                same as the tier's worker has.

        Raises:
            CacheConfigError: The sizes do not fit the groups, or the manager reports no events and
                an offloaded block covers several GPU blocks.
        """
        sizes = blocks_per_offloaded_block
        self.sizes = (sizes,) * len(groups) if isinstance(sizes, int) else tuple(sizes)
        """GPU blocks in an offloaded block, per group."""
        self.manager = manager
        self.medium = manager.medium
        """The tier's name on the wire."""
        self._groups = groups
        self._check_sizes()
        self._aliases = BlockAliases(self.sizes)
        for key, hashes in manager.restored_block_hashes().items():
            self._aliases.prepare(key, hashes)
        self._learned: list[tuple[GroupIdx, list[BlockHash]]] = []

    def find(
        self, group_idx: GroupIdx, block_hash: bytes, context: RequestContext
    ) -> OffloadKey | None:
        """Return the offloaded block that brings back a GPU block; None if none can be loaded."""
        key = self._aliases.covering_block(group_idx, block_hash)
        if key is None or self.manager.lookup(key, context) is not LookupResult.HIT:
            return None
        return key

    def touch(self, blocks: Iterable[tuple[GroupIdx, bytes]], context: RequestContext) -> None:
        """Mark the offloaded blocks that cover GPU blocks as used; called once per request.

        Args:
            blocks: Group and hash of each GPU block, the most recently used one last.
        """
        covering = (self._aliases.covering_block(*block) for block in blocks)
        self.manager.touch([key for key in covering if key is not None], context)

    def prepare_store(
        self, block_hashes: Mapping[OffloadKey, Sequence[bytes]], context: RequestContext
    ) -> PrepareStoreOutput | None:
        """Offer blocks to the tier; None if they do not fit next to what is in flight.

        Args:
            block_hashes: Per offloaded block the hashes of its GPU blocks, its own last.
        """
        agreed = self.manager.prepare_store(list(block_hashes), context)
        if agreed is None:
            return None
        to_store = set(agreed.keys_to_store)
        for key, hashes in block_hashes.items():
            if key in to_store:
                self._aliases.prepare(key, hashes)
            else:
                self._learn(key, hashes)
        return self._with_hashes(agreed, block_hashes)

    def _with_hashes(
        self, agreed: PrepareStoreOutput, block_hashes: Mapping[OffloadKey, Sequence[bytes]]
    ) -> PrepareStoreOutput:
        """Let files keep the hashes of their GPU blocks, for the process after this one."""
        spec = agreed.store_spec
        if not isinstance(spec, FileLoadStoreSpec) or max(self.sizes) == 1:
            return agreed
        kept = FileLoadStoreSpec(spec.keys, [block_hashes[key] for key in spec.keys])
        return replace(agreed, store_spec=kept)

    def complete_store(
        self, keys: Sequence[OffloadKey], context: RequestContext, success: bool
    ) -> None:
        """See `OffloadingManager.complete_store`."""
        self.manager.complete_store(keys, context, success)
        if not success:
            for key in keys:
                self._aliases.cancel(key)

    def reset(self) -> None:
        """Drop the tier's blocks, as after new weights."""
        self.manager.reset()
        self._aliases.cancel_all()

    def take_events(self) -> list[Event]:
        """Take the tier's stores and removals since the last call, per group.

        The events carry no tokens: the GPU's events of the same hashes do.
        """
        # Learned aliases come first: their block may be gone by now, and never the other way round.
        events: list[Event] = [
            self._stored(group_idx, hashes, self.medium) for group_idx, hashes in self._learned
        ]
        self._learned = []
        for change in self.manager.take_events():
            events += self._events(change)
        return events

    def _learn(self, key: OffloadKey, block_hashes: Sequence[bytes]) -> None:
        """The tier may hold the block from an earlier process, without its aliases."""
        hashes = self._aliases.learn(key, block_hashes)
        if hashes:
            _, group_idx = unpack_offload_key(key)
            self._learned.append((group_idx, list[BlockHash](hashes)))

    def _events(self, change: OffloadingEvent) -> list[Event]:
        per_group: dict[GroupIdx, list[BlockHash]] = {}
        update = self._aliases.remove if change.removed else self._aliases.add
        for key in change.keys:
            _, group_idx = unpack_offload_key(key)
            per_group.setdefault(group_idx, []).extend(update(key))
        changed = sorted((group_idx, hashes) for group_idx, hashes in per_group.items() if hashes)
        if change.removed:
            return [BlockRemoved(hashes, change.medium, group_idx) for group_idx, hashes in changed]
        return [self._stored(group_idx, hashes, change.medium) for group_idx, hashes in changed]

    def _stored(self, group_idx: GroupIdx, hashes: list[BlockHash], medium: str) -> BlockStored:
        group = self._groups[group_idx]
        return BlockStored(
            block_hashes=hashes,
            parent_block_hash=None,
            token_ids=[],
            medium=medium,
            group_idx=group_idx,
            kv_cache_spec_kind=group.kind.value,
            kv_cache_spec_sliding_window=group.sliding_window,
        )

    def _check_sizes(self) -> None:
        if max(self.sizes, default=0) > 1 and not self.manager.enable_events:
            # The manager's events show which GPU blocks can be loaded.
            raise CacheConfigError(
                f"{self.medium} tier: blocks_per_offloaded_block {list(self.sizes)} needs a "
                "manager with enable_events"
            )
        if len(self.sizes) != len(self._groups) or min(self.sizes, default=0) < 1:
            raise CacheConfigError(
                f"{self.medium} tier: blocks_per_offloaded_block {list(self.sizes)} must be one "
                f"positive size for each of {len(self._groups)} groups"
            )
        for index, (size, group) in enumerate(zip(self.sizes, self._groups, strict=True)):
            if size > 1 and group.kind is GroupKind.MAMBA:
                # A block table of states has holes: no two of them are adjacent.
                raise CacheConfigError(
                    f"{self.medium} tier: group {index} (mamba) has blocks_per_offloaded_block "
                    f"{size}; must be 1"
                )
