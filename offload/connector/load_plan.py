"""Plans the tokens that lower tiers add to a request's hit on the GPU, and the copies that bring
them back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from typing import TypeAlias

from kvevents.events import GroupIdx
from kvevents.hit_rule import longest_extended_hit
from kvevents.layout import GroupKind
from offload.base import GPULoadStoreSpec, OffloadKey, RequestContext, pack_offload_key
from offload.block import Block
from offload.cache_manager import CacheManager
from offload.connector.tier import Tier
from offload.coordinator import ComputedBlocks
from offload.groups.base import GroupManager
from offload.request import CacheRequest


@dataclass(frozen=True, slots=True)
class Piece:
    """Adjacent GPU blocks of one group that one offloaded block brings back."""

    tier_index: int
    group_idx: GroupIdx
    key: OffloadKey
    first_block: int
    """Index in the request's block table."""
    stop_block: int
    """Index behind the last."""


@dataclass(frozen=True, slots=True)
class ExternalHit:
    """The tokens that lower tiers add to a request's hit on the GPU."""

    num_tokens: int
    """The whole hit. It may be the whole prompt: then the scheduler computes the last token again,
    over the same block."""
    num_external_tokens: int
    """The tokens behind the GPU's hit."""
    pieces: Sequence[Piece] = ()
    """Group by group, each group's in the order of the prompt."""


def context_of(request: CacheRequest) -> RequestContext:
    """The request as tiers know it."""
    return RequestContext(request.request_id, request.kv_transfer_params, request.at_peer)


_Find: TypeAlias = Callable[[GroupIdx, bytes], "tuple[int, OffloadKey] | None"]
"""Returns the index of the first tier that has a block, and the offloaded block that covers it."""


class LoadPlanner:
    """Looks requests up in the tiers; the only thing it changes there is the order of use."""

    def __init__(self, cache: CacheManager, tiers: Sequence[Tier]) -> None:
        """
        Args:
            tiers: The lower tiers, the fastest first.
        """
        self._cache = cache
        self._layout = cache.config.layout
        self._managers = [
            m for m in cache.coordinator.managers if m.group.kind is not GroupKind.NOT_CACHED
        ]
        self._tiers = tiers

    def find(self, request: CacheRequest, computed: ComputedBlocks) -> ExternalHit:
        """Return the tokens that the tiers add to a hit on the GPU."""
        find = self._search(context_of(request))

        def below(group: int, end: int) -> bool:
            return find(GroupIdx(group), request.hash_at(end)) is not None

        start = computed.num_tokens
        stop = longest_extended_hit(self._layout, below, start, request.num_tokens)
        pieces = tuple(self._pieces(request, start, stop, find)) if stop > start else ()
        return ExternalHit(stop, stop - start, pieces)

    def keys(self, request: CacheRequest, most: int) -> list[OffloadKey]:
        """All blocks of a request that a tier might hold, from the prompt's start."""
        found = sorted(
            (end, manager.group_idx)
            for manager in self._managers
            for end in range(manager.block_size, request.num_tokens + 1, manager.block_size)
        )
        return [
            pack_offload_key(request.hash_at(end), group_idx) for end, group_idx in found[:most]
        ]

    def touch(self, request: CacheRequest, num_tokens: int) -> None:
        """Mark a prefix as used in all tiers; its head is kept longest."""
        blocks = [
            (manager.group_idx, request.hash_at((index + 1) * manager.block_size))
            for manager in self._managers
            for index in manager.needed_blocks(num_tokens)
        ]
        for tier in self._tiers:
            tier.touch(reversed(blocks), context_of(request))

    def _search(self, context: RequestContext) -> _Find:
        """Return a search through the tiers that looks each block up once."""

        @cache
        def find(group_idx: GroupIdx, block_hash: bytes) -> tuple[int, OffloadKey] | None:
            for index, tier in enumerate(self._tiers):
                key = tier.find(group_idx, block_hash, context)
                if key is not None:
                    return index, key
            return None

        return find

    def _pieces(self, request: CacheRequest, start: int, stop: int, find: _Find) -> Iterator[Piece]:
        for manager in self._managers:
            # A hit that leaves out the last token of a prompt ends inside a block.
            last = -(-stop // manager.block_size) - 1
            first = max(manager.needed_blocks(stop).start, start // manager.block_size)
            yield from reversed(list(self._backwards(request, manager, first, last, find)))

    def _backwards(
        self, request: CacheRequest, manager: GroupManager, first: int, last: int, find: _Find
    ) -> Iterator[Piece]:
        """Pieces of GPU blocks `[first, last]`, the last piece first.

        The offloaded block that covers a GPU block holds those before it in the same offloaded
        block too. With four GPU blocks in each, and the GPU's hit ending behind block 1:

            GPU blocks          | 0  1  2  3 | 4  5  6  7 |
            needed, first..last         [2  3   4  5]
            pieces                      |---|  |---|        blocks 4-5 first, then blocks 2-3
        """
        while last >= first:
            found = find(manager.group_idx, request.hash_at((last + 1) * manager.block_size))
            assert found is not None  # the hit rule has just found it
            tier_index, key = found
            in_block = self._tiers[tier_index].sizes[manager.group_idx]
            start = max(first, last // in_block * in_block)
            yield Piece(tier_index, manager.group_idx, key, start, last + 1)
            last = start - 1


# --- from pieces to copies ------------------------------------------------------------------------


def split_into_copies(pieces: Sequence[Piece], tier_index: int) -> list[list[Piece]]:
    """The pieces from one tier, so that in each copy every group's GPU blocks are adjacent.

    A copy gives only the index of each group's first block; behind a gap that would be wrong for
    offloaded blocks of several GPU blocks.

    Args:
        pieces: All tiers', in the order of `ExternalHit.pieces`.
    """
    runs: dict[GroupIdx, list[list[Piece]]] = {}
    for piece in pieces:
        if piece.tier_index != tier_index:
            continue
        of_group = runs.setdefault(piece.group_idx, [])
        if of_group and of_group[-1][-1].stop_block == piece.first_block:
            of_group[-1].append(piece)
        else:
            of_group.append([piece])
    together = zip_longest(*(runs[group_idx] for group_idx in sorted(runs)), fillvalue=[])
    return [[piece for run in copy for piece in run] for copy in together]


def gpu_side(
    copy: Sequence[Piece], tables: Sequence[Sequence[Block]]
) -> tuple[GPULoadStoreSpec, list[Block]]:
    """The GPU blocks that a copy fills, as a spec and as blocks.

    Args:
        copy: Pieces of one tier, as `split_into_copies` returns them.
        tables: The request's block table in each group.
    """
    sizes, indices = [0] * len(tables), [0] * len(tables)
    blocks: list[Block] = []
    for piece in copy:
        if not sizes[piece.group_idx]:
            indices[piece.group_idx] = piece.first_block
        sizes[piece.group_idx] += piece.stop_block - piece.first_block
        blocks += tables[piece.group_idx][piece.first_block : piece.stop_block]
    return GPULoadStoreSpec([block.block_id for block in blocks], sizes, indices), blocks
