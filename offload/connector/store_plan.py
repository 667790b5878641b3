"""Chooses the blocks of a request that are worth storing in a lower tier, each considered once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from kvevents.events import GroupIdx
from kvevents.layout import GroupKind
from offload.base import OffloadKey, pack_offload_key
from offload.block import Block
from offload.cache_manager import CacheManager
from offload.connector.tier import Tier
from offload.groups.base import GroupManager
from offload.request import CacheRequest


class StoreScope(Enum):
    """The tokens whose blocks are stored."""

    PROMPT = "prompt"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class StoreCandidate:
    """GPU blocks that make up one offloaded block."""

    key: OffloadKey
    group_idx: GroupIdx
    blocks: Sequence[Block]
    block_hashes: Sequence[bytes]


class StorePlanner:
    """Remembers for every request how many of its blocks each tier was offered."""

    def __init__(self, cache: CacheManager, tiers: Sequence[Tier], scope: StoreScope) -> None:
        self._managers = cache.coordinator.managers
        self._tiers = tiers
        self._scope = scope
        self._offered: dict[str, list[list[int]]] = {}
        """Per request, tier and group: leading blocks of the table that were considered already."""

    def knows(self, request_id: str) -> bool:
        """Return whether the request was started and not forgotten since."""
        return request_id in self._offered

    def start(self, request_id: str, num_computed_tokens: int) -> None:
        """Begin a request behind tokens whose blocks need not be offered.

        Args:
            num_computed_tokens: Its hit, on the GPU or in all tiers.
        """
        self._offered[request_id] = [
            [
                _round_down(num_computed_tokens // m.block_size, tier.sizes[m.group_idx])
                for m in self._managers
            ]
            for tier in self._tiers
        ]

    def forget(self, request_id: str) -> None:
        """Drop a request that gave up its blocks."""
        self._offered.pop(request_id, None)

    def candidates(self, request: CacheRequest, tier_index: int) -> list[StoreCandidate]:
        """Offloaded blocks that became full since the last `mark_offered`, group by group.

        Args:
            tier_index: The tier that will be offered them.
        """
        if not self.knows(request.request_id):
            self.start(request.request_id, 0)
        offered = self._offered[request.request_id][tier_index]
        return [
            candidate
            for manager, start in zip(self._managers, offered, strict=True)
            for candidate in self._of_group(request, manager, start, tier_index)
        ]

    def mark_offered(self, request: CacheRequest, tier_index: int) -> None:
        """Record that `candidates` were offered to the tier."""
        offered = self._offered[request.request_id][tier_index]
        for manager in self._managers:
            offered[manager.group_idx] = max(
                offered[manager.group_idx], self._stop(request, manager, tier_index)
            )

    def _of_group(
        self, request: CacheRequest, manager: GroupManager, start: int, tier_index: int
    ) -> Iterator[StoreCandidate]:
        in_block = self._tiers[tier_index].sizes[manager.group_idx]
        table = manager.block_table(request.request_id)
        for first in range(start, self._stop(request, manager, tier_index), in_block):
            blocks = table[first : first + in_block]
            # A block without a hash serves no hit, and one that slid out can no longer be copied.
            if any(block.is_null or block.is_wrong for block in blocks) or all(
                block.block_hash is None for block in blocks
            ):
                continue
            hashes = [
                request.hash_at((index + 1) * manager.block_size)
                for index in range(first, first + in_block)
            ]
            key = pack_offload_key(hashes[-1], manager.group_idx)
            yield StoreCandidate(key, manager.group_idx, blocks, hashes)

    def _stop(self, request: CacheRequest, manager: GroupManager, tier_index: int) -> int:
        """Index behind the last block that is computed, cached if it is worth it, and in scope."""
        if manager.group.kind is GroupKind.NOT_CACHED:
            return 0
        tokens = request.num_computed_tokens
        if self._scope is StoreScope.PROMPT:
            tokens = min(tokens, request.num_prompt_tokens)
        blocks = min(tokens // manager.block_size, manager.num_cached_blocks(request.request_id))
        return _round_down(blocks, self._tiers[tier_index].sizes[manager.group_idx])


def _round_down(blocks: int, in_block: int) -> int:
    """*blocks* GPU blocks less those of an incomplete offloaded block of *in_block*."""
    return blocks // in_block * in_block
