"""One lower tier as the connector sees it: its manager, its names, and its events for the wire."""

from __future__ import annotations

from collections.abc import Sequence

from kvevents.events import BlockHash, BlockRemoved, BlockStored, Event, GroupIdx
from kvevents.layout import GroupKind, KVCacheGroup
from offload.base import (
    LookupResult,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    RequestContext,
    unpack_offload_key,
)
from offload.connector.block_aliases import TierNames
from offload.errors import CacheConfigError


class Tier:
    """A tier of one cache. Not thread-safe: it belongs to the scheduler."""

    def __init__(
        self,
        manager: OffloadingManager,
        groups: Sequence[KVCacheGroup],
        blocks_per_offloaded_block: Sequence[int] | int = 1,
    ) -> None:
        """
        Args:
            manager: What the tier holds.
            groups: The cache's groups.
            blocks_per_offloaded_block: GPU blocks in an offloaded block, per group or for all; as
                the tier's worker has it.

        Raises:
            CacheConfigError: The sizes do not fit the groups.
        """
        sizes = blocks_per_offloaded_block
        self.sizes = (sizes,) * len(groups) if isinstance(sizes, int) else tuple(sizes)
        self.manager = manager
        self._groups = groups
        self._check_sizes()
        self.names = TierNames(self.sizes)
        self._learned: list[tuple[GroupIdx, list[BlockHash]]] = []

    def find(
        self, group_idx: GroupIdx, block_hash: bytes, context: RequestContext
    ) -> OffloadKey | None:
        """The offloaded block that brings back the GPU block of that hash; None if there is none to
        load."""
        key = self.names.bearer(group_idx, block_hash)
        if key is None or self.manager.lookup(key, context) is not LookupResult.HIT:
            return None
        return key

    def take_events(self) -> list[Event]:
        """What the tier stored and removed since the last call, per group, without tokens: the
        GPU's events carry them."""
        # First: what was learned of a block may be gone by now, never the other way round.
        events: list[Event] = [
            self._stored(group_idx, hashes, self.manager.medium)
            for group_idx, hashes in self._learned
        ]
        self._learned = []
        for change in self.manager.take_events():
            events += self._events(change)
        return events

    def learn(self, key: OffloadKey, block_hashes: Sequence[bytes]) -> None:
        """A block the tier holds already, with the hashes of its GPU blocks."""
        names = self.names.learn(key, block_hashes)
        if names:
            _, group_idx = unpack_offload_key(key)
            self._learned.append((group_idx, list[BlockHash](names)))

    def _events(self, change: OffloadingEvent) -> list[Event]:
        per_group: dict[GroupIdx, list[BlockHash]] = {}
        for key in change.keys:
            _, group_idx = unpack_offload_key(key)
            names = self.names.remove(key) if change.removed else self.names.add(key)
            per_group.setdefault(group_idx, []).extend(names)
        told = sorted((group_idx, hashes) for group_idx, hashes in per_group.items() if hashes)
        if change.removed:
            return [BlockRemoved(hashes, change.medium, group_idx) for group_idx, hashes in told]
        return [self._stored(group_idx, hashes, change.medium) for group_idx, hashes in told]

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
        if len(self.sizes) != len(self._groups) or min(self.sizes, default=0) < 1:
            raise CacheConfigError(
                f"{self.manager.medium} tier: blocks_per_offloaded_block {list(self.sizes)} must be one positive size for each "
                f"of {len(self._groups)} groups"
            )
        for index, (size, group) in enumerate(zip(self.sizes, self._groups, strict=True)):
            if size > 1 and group.kind is GroupKind.MAMBA:
                # A block table of states has holes: no two of them follow each other.
                raise CacheConfigError(
                    f"{self.manager.medium} tier: group {index} (mamba) has blocks_per_offloaded_block {size}; must be 1"
                )
