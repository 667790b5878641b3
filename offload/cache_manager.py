"""The engine's interface to its KV cache: hits, blocks for new tokens, events.

A scheduler's step for each request, in this order:

1. `get_computed_blocks` for a request that holds none: its hit;
2. `allocate_slots` for the tokens it computes next; None means that they do not fit now: preempt
   another request, or wait;
3. the model runs, `request.append` takes its tokens, and the scheduler moves
   `request.num_computed_tokens` on;
4. `free` when it is finished, aborted or preempted.

`start_step` comes first in every step, `take_events` last. Full blocks are already cached by
`allocate_slots`, before the model has written them: a request that hits them in the same step is
computed behind the writer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvevents.events import Event
from offload.block import Block
from offload.block_pool import BlockPool, PoolStatistics
from offload.config import CacheConfig
from offload.coordinator import ComputedBlocks, Coordinator
from offload.errors import CacheConfigError, RequestStateError
from offload.event_log import EventLog
from offload.groups.base import RequestNeed
from offload.request import CacheRequest


@dataclass(frozen=True, slots=True)
class AllocatedBlocks:
    """The blocks that a request got for its new tokens; `block_tables` has all it holds."""

    new_blocks: tuple[Sequence[Block], ...]
    """Per group the new blocks, in the order of its tokens."""

    @property
    def new_block_ids(self) -> tuple[list[int], ...]:
        """Their ids, per group."""
        return tuple([block.block_id for block in blocks] for blocks in self.new_blocks)


@dataclass(slots=True)
class CacheCounts:
    """Counts since the start."""

    requests: int = 0
    """Admissions: a preempted request counts again."""
    queried_tokens: int = 0
    hit_tokens: int = 0
    """Tokens of `queried_tokens` that were reused."""
    external_tokens: int = 0
    """Tokens of `queried_tokens` that a lower tier brought."""
    refused: int = 0
    """Calls of `allocate_slots` that returned None."""
    resets: int = 0


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """Blocks now, and counts since the start."""

    pool: PoolStatistics
    slid_out: tuple[int, ...]
    """Per group, blocks given back while their request ran on."""
    counts: CacheCounts


class CacheManager:
    """One engine's KV cache. Not thread-safe: it belongs to the scheduler."""

    def __init__(self, config: CacheConfig, scheduler_block_size: int) -> None:
        """
        Args:
            scheduler_block_size: The size that the scheduler aligns to, in tokens.

        Raises:
            CacheConfigError: The scheduler's size is not the one the configuration was checked
                with.
        """
        if scheduler_block_size != config.scheduler_block_size:
            raise CacheConfigError(
                f"scheduler_block_size {scheduler_block_size} must be the configuration's, "
                f"{config.scheduler_block_size}"
            )
        self.config = config
        self._log = EventLog(config.layout.groups) if config.enable_events else None
        self.pool = BlockPool(config.num_blocks, config.layout.groups, self._log)
        self.coordinator = Coordinator(config, self.pool)
        self._counts = CacheCounts()

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, from 0 to 1."""
        return self.pool.usage

    def start_step(self) -> None:
        """Begin a step: states that the last one wrote can be read now."""
        self.coordinator.start_step()

    def holds(self, request_id: str) -> bool:
        """Return whether the request holds blocks."""
        return self.coordinator.managers[0].holds(request_id)

    def block_tables(self, request_id: str) -> tuple[Sequence[Block], ...]:
        """Per group the request's blocks, with null blocks where it needs none; empty without."""
        return tuple(manager.block_table(request_id) for manager in self.coordinator.managers)

    # --- one request ------------------------------------------------------------------------------

    def get_computed_blocks(
        self, request: CacheRequest, limit: int | None = None
    ) -> ComputedBlocks:
        """The longest prefix the request can reuse; changes nothing.

        Args:
            limit: Longest hit wanted, in tokens; the last token is computed in any case, so at most
                `num_tokens - 1`.
        """
        most = request.num_tokens - 1
        return self.coordinator.find_longest_hit(
            request, most if limit is None else min(limit, most)
        )

    def allocate_slots(
        self,
        request: CacheRequest,
        num_new_tokens: int,
        computed: ComputedBlocks | None = None,
        *,
        num_lookahead_tokens: int = 0,
        num_external_tokens: int = 0,
        num_encoder_tokens: int = 0,
        delay_caching: bool = False,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
    ) -> AllocatedBlocks | None:
        """Give the request blocks for its next tokens.

        None, with nothing changed: they do not fit now, or another request of this step is writing
        the state that the hit needs.

        Args:
            request: Its `num_computed_tokens` is how far it has come.
            num_new_tokens: Tokens the next step computes; unverified drafts count.
            computed: Its hit, for a request that holds no blocks.
            num_lookahead_tokens: Drafts that are to be written behind the new tokens.
            num_external_tokens: Tokens behind the hit that a lower tier will bring.
            num_encoder_tokens: Tokens of the encoder's output, for cross attention.
            delay_caching: Cache nothing yet, since a load may fail; the next call without it, or
                `cache_blocks`, does.
            full_sequence_must_fit: Admit only if the whole prompt fits, not just these tokens.
            reserved_blocks: Free blocks to leave to others.

        Raises:
            RequestStateError: The call does not fit the request's state.
        """
        _check_not_negative(
            request,
            num_new_tokens=num_new_tokens,
            num_lookahead_tokens=num_lookahead_tokens,
            num_external_tokens=num_external_tokens,
            num_encoder_tokens=num_encoder_tokens,
            reserved_blocks=reserved_blocks,
        )
        hit = computed or self.coordinator.no_blocks
        num_computed_tokens = request.num_computed_tokens + hit.num_tokens + num_external_tokens
        num_tokens = num_computed_tokens + num_new_tokens
        need = RequestNeed(
            num_tokens=num_tokens,
            num_slots=min(num_tokens + num_lookahead_tokens, self.config.max_model_len),
            num_computed_tokens=num_computed_tokens,
            computed_blocks=hit.blocks,
            num_external_tokens=num_external_tokens,
            num_encoder_tokens=num_encoder_tokens,
        )
        self._check_call(request, hit, need)
        if not self._fits(request, need, full_sequence_must_fit, reserved_blocks):
            self._counts.refused += 1
            return None
        return AllocatedBlocks(self._allocate(request, hit, need, delay_caching))

    def cache_blocks(self, request: CacheRequest, num_tokens: int) -> None:
        """Make full blocks of a request findable, where `allocate_slots` delayed it.

        Args:
            num_tokens: How far its blocks are written; drafts behind its last token are left out.

        Raises:
            RequestStateError: The request holds no blocks.
        """
        if not self.holds(request.request_id):
            raise RequestStateError(
                f"request {request.request_id!r} holds no blocks to cache: "
                "call allocate_slots first"
            )
        self.coordinator.cache_blocks(request, min(num_tokens, request.num_tokens))

    def free_skipped_blocks(self, request: CacheRequest) -> None:
        """Give back blocks that slid out of the request's windows, ahead of its next
        `allocate_slots`."""
        self.coordinator.free_skipped_blocks(request, request.num_computed_tokens)

    def free(self, request_id: str) -> None:
        """Give back all blocks of a request that ended; no error if it holds none."""
        self.coordinator.free(request_id)

    # --- the cache as a whole ---------------------------------------------------------------------

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Make blocks unfindable whose content turned out wrong; raises `BlockRangeError`."""
        self.pool.evict_blocks(block_ids)

    def reset(self) -> bool:
        """Make every block unfindable, as after new weights; return False if a request holds
        any."""
        is_reset = self.pool.reset_prefix_cache()
        self._counts.resets += is_reset
        return is_reset

    def take_events(self) -> list[Event]:
        """Take the changes since the last call, for the publisher; call it at the end of every
        step."""
        return self._log.take() if self._log else []

    def statistics(self) -> CacheStatistics:
        """Blocks now, and counts since the start."""
        return CacheStatistics(
            pool=self.pool.statistics(),
            slid_out=tuple(manager.slid_out for manager in self.coordinator.managers),
            counts=replace(self._counts),
        )

    def check_integrity(self, other_references: Mapping[int, int] | None = None) -> None:
        """Check the cache's invariants; for tests and debugging, linear in the size of the pool.

        Args:
            other_references: Per block id, references besides those of block tables, such as those
                of copies in flight.

        Raises:
            AssertionError: An invariant does not hold; see `BlockPool.check_integrity`.
        """
        self.pool.check_integrity(self.coordinator.references() + Counter(other_references or {}))

    # --- steps of allocate_slots ------------------------------------------------------------------

    def _check_call(self, request: CacheRequest, hit: ComputedBlocks, need: RequestNeed) -> None:
        place = f"request {request.request_id!r}"
        if self.holds(request.request_id):
            if hit.num_tokens or need.num_external_tokens:
                raise RequestStateError(
                    f"{place} holds blocks already: a hit is for a request that holds none"
                )
        elif request.num_computed_tokens:
            raise RequestStateError(
                f"{place} holds no blocks, so its num_computed_tokens "
                f"{request.num_computed_tokens} must be 0"
            )
        elif not self.coordinator.still_holds(request, hit):
            raise RequestStateError(
                f"{place}: its hit is out of date, blocks of it were evicted: look it up again"
            )
        if need.num_tokens == request.num_computed_tokens:
            raise RequestStateError(f"{place}: no tokens to allocate for")
        if need.num_tokens > self.config.max_model_len:
            raise RequestStateError(
                f"{place}: {need.num_tokens} tokens exceed max_model_len "
                f"{self.config.max_model_len}"
            )

    def _fits(
        self,
        request: CacheRequest,
        need: RequestNeed,
        full_sequence_must_fit: bool,
        reserved_blocks: int,
    ) -> bool:
        request_id, coordinator = request.request_id, self.coordinator
        if not coordinator.can_read(need):
            return False
        free = self.pool.num_free_blocks
        if full_sequence_must_fit:
            entire = replace(need, num_tokens=request.num_tokens, num_slots=request.num_tokens)
            if coordinator.num_blocks_to_allocate(request_id, entire, is_admission=True) > free:
                return False
        free += coordinator.num_blocks_to_free(request_id, need.num_computed_tokens)
        return coordinator.num_blocks_to_allocate(request_id, need) <= free - reserved_blocks

    def _allocate(
        self, request: CacheRequest, hit: ComputedBlocks, need: RequestNeed, delay_caching: bool
    ) -> tuple[list[Block], ...]:
        request_id = request.request_id
        self.coordinator.free_skipped_blocks(request, need.num_computed_tokens)
        if not self.holds(request_id):
            self._admit(request, hit, need)
        new_blocks = self.coordinator.allocate_new_blocks(request_id, need)
        if not delay_caching:
            self.cache_blocks(request, need.num_tokens)
        return new_blocks

    def _admit(self, request: CacheRequest, hit: ComputedBlocks, need: RequestNeed) -> None:
        request.shared_prefix_boundary = hit.shared_prefix_boundary
        self.coordinator.adopt_computed_blocks(request.request_id, need)
        self.coordinator.refresh_named(request, hit.num_tokens)
        self._counts.requests += 1
        self._counts.queried_tokens += request.num_tokens
        self._counts.hit_tokens += hit.num_tokens
        self._counts.external_tokens += need.num_external_tokens


def _check_not_negative(request: CacheRequest, **amounts: int) -> None:
    for name, amount in amounts.items():
        if amount < 0:
            raise RequestStateError(
                f"request {request.request_id!r}: {name} {amount} must not be negative"
            )
