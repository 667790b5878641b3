"""The groups of one cache together: one hit for all of them, and blocks for a request in each.

All groups must agree on one length, by the rule in `kvevents/hit_rule.py`. Without prefix caching
blocks are given out and taken back, and none is found again. Whether a request fits is decided by
the cache manager.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvevents.events import GroupIdx
from kvevents.hit_rule import Present, equal_groups, longest_accepted, longest_hit
from kvevents.layout import GroupKind, KVCacheLayout
from offload.block import Block
from offload.block_pool import BlockPool
from offload.config import CacheConfig
from offload.groups.base import GroupManager, RequestNeed, Retention
from offload.groups.cross_attention import CrossAttentionManager
from offload.groups.local import ChunkedLocalManager, SlidingWindowManager
from offload.groups.mamba import MambaManager
from offload.request import CacheRequest

_MANAGERS: dict[GroupKind, type[GroupManager]] = {
    GroupKind.FULL: GroupManager,
    GroupKind.SLIDING_WINDOW: SlidingWindowManager,
    GroupKind.CHUNKED_LOCAL: ChunkedLocalManager,
    GroupKind.MAMBA: MambaManager,
    GroupKind.NOT_CACHED: CrossAttentionManager,
}
_KEEP_ALL = Retention(None)


@dataclass(frozen=True, slots=True)
class ComputedBlocks:
    """The blocks that a request can reuse."""

    num_tokens: int
    """The hit, a multiple of the scheduler block size."""
    blocks: tuple[Sequence[Block], ...]
    """Per group the block table of the hit; the null block where the group needs none."""
    evictions: int = 0
    """The pool's count of evictions when the hit was found."""
    shared_prefix_boundary: int = 0
    """Length of the prefix that full attention holds beyond the hit, where a group of states or a
    sparsely retained one cut the hit short; else 0. It is worth retaining from now on, and a
    scheduler with states ends a chunk there."""


class Coordinator:
    """Finds, caches and allocates a request's blocks in all groups."""

    def __init__(self, config: CacheConfig, pool: BlockPool) -> None:
        """
        Args:
            pool: Shared by all groups.
        """
        self.layout = config.layout
        self.pool = pool
        self.scheduler_block_size = config.scheduler_block_size
        self.retention_interval = config.retention_interval
        self.managers = tuple(
            _MANAGERS[group.kind](GroupIdx(index), config, pool)
            for index, group in enumerate(config.layout.groups)
        )
        self.no_blocks = ComputedBlocks(0, tuple(() for _ in self.managers))
        self._enable_caching = config.enable_caching
        self._has_states = any(group.kind is GroupKind.MAMBA for group in config.layout.groups)

    # --- finding and caching ----------------------------------------------------------------------

    def find_longest_hit(self, request: CacheRequest, limit: int) -> ComputedBlocks:
        """The longest prefix that every group can serve.

        Args:
            limit: Longest hit wanted, in tokens.
        """
        if not self._enable_caching:
            return self.no_blocks
        present, reach = self._present(request), self._reach(request)
        num_tokens = longest_hit(self.layout, present, limit, reach)
        boundary = self._shared_prefix_boundary(request, limit, num_tokens)
        blocks = self.no_blocks.blocks
        if num_tokens:
            blocks = tuple(self._hit_table(request, each, num_tokens) for each in self.managers)
        return ComputedBlocks(num_tokens, blocks, self.pool.evictions, boundary)

    def group_hits(self, request: CacheRequest, limit: int) -> tuple[int, ...]:
        """The longest prefix in tokens that each group could serve by itself; for display."""
        if not self._enable_caching:
            return (0,) * len(self.managers)
        present, reach = self._present(request), self._reach(request)
        indexes = range(len(self.managers))
        return tuple(
            longest_accepted(self.layout, index, present, limit, reach) for index in indexes
        )

    def cache_blocks(self, request: CacheRequest, num_tokens: int) -> None:
        """Make full blocks of a request findable.

        Args:
            num_tokens: How far its blocks are written, or will be by the end of this step.
        """
        if self._enable_caching:
            for manager in self.managers:
                cacheable = self._within_hits(manager, num_tokens)
                manager.cache_blocks(request, cacheable, self._retention(request, manager))

    def still_holds(self, request: CacheRequest, hit: ComputedBlocks) -> bool:
        """Return whether a hit's blocks still hold the prefix they were found for."""
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
        """Free blocks the request will take in all groups.

        Args:
            need: Its next tokens, or all of them.
            is_admission: True if *need* is the whole request.
        """
        return sum(
            manager.num_blocks_to_allocate(request_id, need, is_admission)
            for manager in self.managers
        )

    def num_blocks_to_free(self, request_id: str, num_computed_tokens: int) -> int:
        """Blocks that `free_skipped_blocks` would make free."""
        skipped = (
            manager.skipped_blocks(request_id, num_computed_tokens) for manager in self.managers
        )
        return sum(block.ref_count == 1 for blocks in skipped for block in blocks)

    def can_read(self, need: RequestNeed) -> bool:
        """Return whether a hit's blocks can be read in this step, in every group."""
        return all(
            manager.can_read(blocks)
            for manager, blocks in zip(self.managers, need.computed_blocks, strict=True)
        )

    def adopt_computed_blocks(self, request_id: str, need: RequestNeed) -> None:
        """Start the request's tables with a hit's blocks and blocks for a tier's tokens.

        All groups' hits are taken first: a new block for one group must not be another's hit.

        Args:
            request_id: A request that holds no blocks.
        """
        for manager, blocks in zip(self.managers, need.computed_blocks, strict=True):
            manager.adopt_computed_blocks(request_id, blocks, need.num_computed_tokens)
        if need.num_external_tokens:
            for manager in self.managers:
                manager.allocate_external_blocks(request_id, need.num_computed_tokens)

    def allocate_new_blocks(self, request_id: str, need: RequestNeed) -> tuple[list[Block], ...]:
        """Allocate blocks for the slots that have none, and return them per group."""
        return tuple(manager.allocate_new_blocks(request_id, need) for manager in self.managers)

    def free_skipped_blocks(self, request: CacheRequest, num_computed_tokens: int) -> None:
        """Give back blocks that the running request no longer needs. If its session goes on, no
        request resumes at its beginning any more: the next turn does behind it. That leaves the
        boundaries that it named, and its present end."""
        ends: Sequence[int] | None = None
        if request.hints.keep_end and self.retention_interval == 0:
            named, shared = request.hints.boundaries, request.shared_prefix_boundary
            ends = (*named, shared, num_computed_tokens)
        for manager in self.managers:
            manager.free_skipped_blocks(request.request_id, num_computed_tokens, ends)

    def refresh_named(self, request: CacheRequest, hit_tokens: int) -> None:
        """Keep the boundaries that a request names within its hit as long as the blocks it uses.

        It uses the windows and states at the end of its hit, and full attention as a whole, which
        would then outlive the windows that make it a hit for others.
        """
        step = self.scheduler_block_size
        for manager in self.managers:
            if manager.num_skipped_tokens(hit_tokens):
                for boundary in request.hints.boundaries:
                    if boundary // step * step < hit_tokens:
                        manager.refresh(request, boundary // step * step)

    def free(self, request_id: str) -> None:
        """Give back everything the request holds."""
        for manager in self.managers:
            manager.free(request_id)

    def start_step(self) -> None:
        """Begin a step: the last one's blocks can be read now."""
        for manager in self.managers:
            manager.start_step()

    def references(self) -> Counter[int]:
        """Per block id, how many block tables list the block."""
        return sum((manager.references() for manager in self.managers), Counter[int]())

    # --- inside -----------------------------------------------------------------------------------

    def _shared_prefix_boundary(self, request: CacheRequest, limit: int, num_tokens: int) -> int:
        """How far the leading group's blocks reach, if a sparsely kept group cut the hit short.

        With `retention_interval` 0, and a request that shares 20 tokens with an earlier one:

                             0         20                  40
            full attention   xxxxxxxxxxxxxxxxxxxxxxxxxxxxxx     the earlier prompt, whole
            sliding window   .............................x     only its end was retained
            this request     ssssssssssoooooooooooooo           hit 0, boundary 20
        """
        if len(self.managers) == 1 or (self.retention_interval is None and not self._has_states):
            return 0
        leading, present = _leading_group(self.layout), self._present(request)
        group = self.layout.groups[leading]
        behind = num_tokens + group.block_size
        if group.kind is GroupKind.FULL and not (behind <= limit and present(leading, behind)):
            return 0  # its run ends here too
        longest = longest_accepted(self.layout, leading, present, limit, self._reach(request))
        return longest if longest > num_tokens else 0

    def _within_hits(self, manager: GroupManager, num_tokens: int) -> int:
        """Return how far a group's blocks are worth caching: where several groups must agree, to
        the last end that a hit can have; by itself a group may keep every full block."""
        if len(self.managers) == 1:
            return num_tokens
        aligned = num_tokens // self.scheduler_block_size * self.scheduler_block_size
        if aligned and manager.eagle:  # EAGLE's block lies behind the boundary
            return min(num_tokens, aligned + manager.block_size)
        return aligned

    def _retention(self, request: CacheRequest, manager: GroupManager) -> Retention:
        """Return where later requests can resume behind this one."""
        if self.retention_interval is None:
            return _KEEP_ALL
        hints, shared = request.hints, request.shared_prefix_boundary
        ends = self._resumed_at(hints.boundaries)
        ends += resume_positions(
            request.num_prompt_tokens, self.scheduler_block_size, bool(self.layout.eagle)
        )
        if shared:
            ends.append(shared)
            if manager.eagle:
                # A request that leaves the shared prefix right at its end lacks EAGLE's block
                # behind it, and resumes a block before.
                ends.append(max(shared - manager.block_size, 0))
        # A prompt that ends with a full block is resumed before that block by the same one again,
        # and behind it by a next turn whose response fills no block.
        kept_behind = request.num_prompt_tokens - 1 if hints.keep_end else None
        return Retention(self.retention_interval, ends, kept_behind)

    def _resumed_at(self, boundaries: Sequence[int]) -> list[int]:
        """Return where prompts that leave another one at *boundaries* resume; not at 0.

        With EAGLE a block is missing behind the boundary, whichever group it is in, and all groups
        resume where that one does: with blocks of 16, at 16 for a boundary of 40.
        """
        step = self.scheduler_block_size
        dropped = step if self.layout.eagle else 0
        hits = (boundary // step * step - dropped for boundary in boundaries)
        return [hit for hit in hits if hit > 0]

    def _reach(self, request: CacheRequest) -> int:
        # Blocks behind the last hash cannot be looked up yet.
        return len(request.block_hashes) * self.layout.hash_block_size

    def _present(self, request: CacheRequest) -> Present:
        hashes, step = request.block_hashes, self.layout.hash_block_size
        cached = [self.pool.cached(manager.group_idx) for manager in self.managers]
        return lambda group, end: hashes[end // step - 1] in cached[group]

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


def resume_positions(
    num_prompt_tokens: int, scheduler_block_size: int, eagle: bool
) -> tuple[int, ...]:
    """Token positions at which a later request can resume behind a prompt.

    The same prompt again is hit up to its last token but one; a longer one up to the last whole
    block. The two differ where a prompt ends with a block. EAGLE gives a block back in both cases:
    with blocks of 16, a prompt of 32 tokens is resumed at 0 or 16, one of 33 at 16.

    Args:
        num_prompt_tokens: Length of the earlier prompt.
        scheduler_block_size: Hits end at its multiples, in tokens.
        eagle: True if some group must have one block more of a hit than is reused.
    """
    if not eagle:
        return (num_prompt_tokens - 1,)
    step = scheduler_block_size
    ends = ((num_prompt_tokens - 1) // step * step, num_prompt_tokens // step * step)
    return tuple(sorted({max(end - step, 0) for end in ends}))


def _leading_group(layout: KVCacheLayout) -> int:
    """The group that bounds the hit first: full attention, or else the first that caches."""
    firsts = [members[0] for members in equal_groups(layout)]
    return next(
        (index for index in firsts if layout.groups[index].kind is GroupKind.FULL), firsts[0]
    )
