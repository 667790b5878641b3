"""The groups of one cache together: one hit for all of them, and blocks for a request in each.

Three forms: without caching nothing is found; one group is asked alone; several must agree on one
length, by the rule in `kvevents/layout.py`. Nothing here decides whether a request fits: the cache
manager does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvevents.events import GroupIdx
from kvevents.layout import (
    GroupKind,
    KVCacheLayout,
    Present,
    equal_groups,
    longest_accepted,
    longest_hit,
)
from offload.block import Block
from offload.block_pool import BlockPool
from offload.cached_blocks import CachedBlocks
from offload.config import CacheConfig
from offload.groups.base import GroupManager, Need, Retention
from offload.groups.chunked_local import ChunkedLocalManager
from offload.groups.cross_attention import CrossAttentionManager
from offload.groups.full import FullAttentionManager
from offload.groups.mamba import MambaManager
from offload.groups.sliding_window import SlidingWindowManager
from offload.request import CacheRequest

_MANAGERS: dict[GroupKind, type[GroupManager]] = {
    GroupKind.FULL: FullAttentionManager,
    GroupKind.SLIDING_WINDOW: SlidingWindowManager,
    GroupKind.CHUNKED_LOCAL: ChunkedLocalManager,
    GroupKind.MAMBA: MambaManager,
    GroupKind.NOT_CACHED: CrossAttentionManager,
}


@dataclass(frozen=True, slots=True)
class ComputedBlocks:
    """What a request can reuse."""

    num_tokens: int
    """The hit, a multiple of the scheduler block size."""
    blocks: tuple[Sequence[Block], ...]
    """Per group the block table of the hit; the null block where the group needs none."""
    evictions: int = 0
    """The pool's count of evictions when the hit was found."""
    shared_prefix_boundary: int = 0
    """Where full attention holds more of the prompt than a group of states, or one that is kept
    sparsely; else 0. Worth keeping there from now on; a scheduler ends a chunk there if it has
    states to keep."""


@dataclass(frozen=True, slots=True)
class RequestNeed:
    """What a request needs of all groups for its next tokens; fields as in `Need`."""

    num_tokens: int
    num_slots: int
    num_computed_tokens: int
    num_encoder_tokens: int
    computed_blocks: tuple[Sequence[Block], ...]


class Coordinator:
    """Without prefix caching: blocks are given and taken, none is found again. The other forms
    build on it."""

    def __init__(self, config: CacheConfig, pool: BlockPool, scheduler_block_size: int) -> None:
        """
        Args:
            config: The cache, checked.
            pool: Where blocks come from.
            scheduler_block_size: The scheduler's own; passed on to every group as it is.
        """
        self.layout = config.layout
        self.pool = pool
        self.scheduler_block_size = scheduler_block_size
        self.retention_interval = config.retention_interval
        self.managers = tuple(
            _MANAGERS[group.kind](
                GroupIdx(index),
                group,
                pool,
                # An encoder's blocks take no part in hits, so they need not fit the scheduler's.
                group.block_size if group.kind is GroupKind.NOT_CACHED else scheduler_block_size,
                config.max_in_flight_tokens,
                config.max_model_len,
                config.layout.eagle,
            )
            for index, group in enumerate(config.layout.groups)
        )
        self.no_blocks = ComputedBlocks(0, tuple(() for _ in self.managers))

    # --- finding ----------------------------------------------------------------------------------

    def find_longest_hit(self, request: CacheRequest, limit: int) -> ComputedBlocks:
        """The longest prefix of at most *limit* tokens that every group can serve."""
        del request, limit
        return self.no_blocks

    def group_hits(self, request: CacheRequest, limit: int) -> tuple[int, ...]:
        """The longest prefix of at most *limit* tokens that each group alone can serve, for
        people."""
        del request, limit
        return tuple(0 for _ in self.managers)

    def still_holds(self, request: CacheRequest, hit: ComputedBlocks) -> bool:
        """Are a hit's blocks what they were when it was found?"""
        if hit.evictions == self.pool.evictions:
            return True
        return all(
            block.is_null or block.block_hash == request.hash_at((index + 1) * manager.block_size)
            for manager, blocks in zip(self.managers, hit.blocks, strict=True)
            for index, block in enumerate(blocks)
        )

    # --- blocks for a request ---------------------------------------------------------------------

    def num_blocks_to_allocate(
        self, request_id: str, need: RequestNeed, is_admission: bool = False
    ) -> int:
        """Free blocks the request will take in all groups."""
        return sum(
            manager.num_blocks_to_allocate(request_id, _of_group(need, manager), is_admission)
            for manager in self.managers
        )

    def num_blocks_to_free(self, request_id: str, num_computed_tokens: int) -> int:
        """Blocks that `free_skipped_blocks` would make free."""
        skipped = (
            manager.skipped_blocks(request_id, num_computed_tokens) for manager in self.managers
        )
        return sum(block.ref_count == 1 for blocks in skipped for block in blocks)

    def can_read(self, need: RequestNeed) -> bool:
        """Are a hit's blocks ready for this step in every group?"""
        return all(
            manager.can_read(blocks)
            for manager, blocks in zip(self.managers, need.computed_blocks, strict=True)
        )

    def adopt_computed_blocks(
        self, request_id: str, need: RequestNeed, num_external_tokens: int
    ) -> None:
        """Start the request's tables with a hit's blocks, and blocks for what a lower tier will
        bring.

        All groups' hits are taken first: a new block for one group must not be another's hit.
        """
        for manager, blocks in zip(self.managers, need.computed_blocks, strict=True):
            manager.adopt_computed_blocks(request_id, blocks, need.num_computed_tokens)
        if num_external_tokens:
            for manager in self.managers:
                manager.allocate_external_blocks(request_id, need.num_computed_tokens)

    def allocate_new_blocks(self, request_id: str, need: RequestNeed) -> tuple[list[Block], ...]:
        """Blocks for the slots that have none, per group."""
        return tuple(
            manager.allocate_new_blocks(request_id, _of_group(need, manager))
            for manager in self.managers
        )

    def free_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Give back what the request no longer needs, while it runs."""
        for manager in self.managers:
            manager.free_skipped_blocks(request_id, num_computed_tokens)

    def free(self, request_id: str) -> None:
        """Give back everything the request holds."""
        for manager in self.managers:
            manager.free(request_id)

    def start_step(self) -> None:
        """The scheduler begins a step."""
        for manager in self.managers:
            manager.start_step()

    # --- caching ----------------------------------------------------------------------------------

    def cache_blocks(self, request: CacheRequest, num_tokens: int) -> None:
        """Make the full blocks of the first *num_tokens* findable."""
        del request, num_tokens


class SingleGroupCoordinator(Coordinator):
    """One group: it is asked alone, and every full block of it may be kept."""

    def find_longest_hit(self, request: CacheRequest, limit: int) -> ComputedBlocks:
        present, reach = self._present(request), self._reach(request)
        num_tokens = longest_hit(self.layout, present, limit, reach)
        return self._computed_blocks(request, num_tokens, 0)

    def group_hits(self, request: CacheRequest, limit: int) -> tuple[int, ...]:
        present, reach = self._present(request), self._reach(request)
        indexes = range(len(self.managers))
        return tuple(
            longest_accepted(self.layout, index, present, limit, reach) for index in indexes
        )

    def cache_blocks(self, request: CacheRequest, num_tokens: int) -> None:
        for manager in self.managers:
            retention = Retention(self.retention_interval, self._boundaries(request, manager))
            manager.cache_blocks(request, self._cacheable_tokens(manager, num_tokens), retention)

    def _cacheable_tokens(self, manager: GroupManager, num_tokens: int) -> int:
        del manager
        return num_tokens

    def _boundaries(self, request: CacheRequest, manager: GroupManager) -> Sequence[int]:
        """Where a later request can resume under sparse retention."""
        if self.retention_interval is None:
            return ()
        ends = resume_positions(
            request.num_prompt_tokens, self.scheduler_block_size, self.layout.eagle
        )
        junction = request.shared_prefix_boundary
        if not junction:
            return ends
        # Who parts from the prefix right at the junction lacks EAGLE's block behind it, and resumes
        # a block before.
        return (
            (*ends, junction, junction - manager.block_size)
            if self.layout.eagle
            else (*ends, junction)
        )

    def _reach(self, request: CacheRequest) -> int:
        # Blocks behind the last hash have no name yet.
        return len(request.block_hashes) * self.layout.hash_block_size

    def _present(self, request: CacheRequest) -> Present:
        hashes, step = request.block_hashes, self.layout.hash_block_size
        cached: list[CachedBlocks] = [
            self.pool.cached(manager.group_idx) for manager in self.managers
        ]
        return lambda group, end: hashes[end // step - 1] in cached[group]

    def _computed_blocks(
        self, request: CacheRequest, num_tokens: int, boundary: int
    ) -> ComputedBlocks:
        if not num_tokens:
            return ComputedBlocks(0, self.no_blocks.blocks, self.pool.evictions, boundary)
        tables = tuple(self._hit_table(request, manager, num_tokens) for manager in self.managers)
        return ComputedBlocks(num_tokens, tables, self.pool.evictions, boundary)

    def _hit_table(
        self, request: CacheRequest, manager: GroupManager, num_tokens: int
    ) -> list[Block]:
        if manager.group.kind is GroupKind.NOT_CACHED:
            return []
        needed, cached = manager.needed_blocks(num_tokens), self.pool.cached(manager.group_idx)
        table = [self.pool.null_block] * needed.start
        for index in needed:
            block = cached.get(request.hash_at((index + 1) * manager.block_size))
            assert block is not None  # the hit rule has just found it
            table.append(block)
        return table


class HybridCoordinator(SingleGroupCoordinator):
    """Several groups: the hit is what all accept, so only blocks up to such a length are worth
    keeping."""

    def __init__(self, config: CacheConfig, pool: BlockPool, scheduler_block_size: int) -> None:
        super().__init__(config, pool, scheduler_block_size)
        self._has_states = any(group.kind is GroupKind.MAMBA for group in config.layout.groups)

    def find_longest_hit(self, request: CacheRequest, limit: int) -> ComputedBlocks:
        present, reach = self._present(request), self._reach(request)
        num_tokens = longest_hit(self.layout, present, limit, reach)
        return self._computed_blocks(
            request, num_tokens, self._junction(request, limit, num_tokens)
        )

    def _junction(self, request: CacheRequest, limit: int, num_tokens: int) -> int:
        """Where the group that is asked first would have let the hit end, if a sparsely kept one
        cut it shorter."""
        if self.retention_interval is None and not self._has_states:
            return 0
        first, present = _asked_first(self.layout), self._present(request)
        group = self.layout.groups[first]
        behind = num_tokens + group.block_size
        if group.kind is GroupKind.FULL and not (behind <= limit and present(first, behind)):
            return 0  # its run ends here too
        longest = longest_accepted(self.layout, first, present, limit, self._reach(request))
        return longest if longest > num_tokens else 0

    def _cacheable_tokens(self, manager: GroupManager, num_tokens: int) -> int:
        step = self.scheduler_block_size
        aligned = num_tokens // step * step
        # EAGLE's block lies behind the boundary.
        return (
            min(num_tokens, aligned + manager.block_size) if aligned and manager.eagle else aligned
        )


def create_coordinator(
    config: CacheConfig, pool: BlockPool, scheduler_block_size: int
) -> Coordinator:
    """The form that fits the configuration."""
    if not config.enable_caching:
        return Coordinator(config, pool, scheduler_block_size)
    if len(config.layout.groups) == 1:
        return SingleGroupCoordinator(config, pool, scheduler_block_size)
    return HybridCoordinator(config, pool, scheduler_block_size)


def resume_positions(
    num_prompt_tokens: int, scheduler_block_size: int, eagle: bool
) -> tuple[int, ...]:
    """Token positions at which a later request can resume behind a prompt.

    The same prompt again is hit up to its last token but one; a longer one up to the last whole
    block. The two differ where a prompt ends with a block. EAGLE gives a block back in both cases.
    """
    if not eagle:
        return (num_prompt_tokens - 1,)
    step = scheduler_block_size
    ends = ((num_prompt_tokens - 1) // step * step, num_prompt_tokens // step * step)
    return tuple(sorted({max(end - step, 0) for end in ends}))


def _asked_first(layout: KVCacheLayout) -> int:
    firsts = [members[0] for members in equal_groups(layout)]
    return next(
        (index for index in firsts if layout.groups[index].kind is GroupKind.FULL), firsts[0]
    )


def _of_group(need: RequestNeed, manager: GroupManager) -> Need:
    if manager.group.kind is GroupKind.NOT_CACHED:
        return Need(need.num_encoder_tokens, need.num_encoder_tokens, 0)
    return Need(
        need.num_tokens,
        need.num_slots,
        need.num_computed_tokens,
        need.computed_blocks[manager.group_idx],
    )
