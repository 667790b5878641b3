"""The engine's face of its KV cache: what a request can reuse, blocks for its next tokens, and
every change as an event.

A scheduler's step for each request, in this order:

1. `get_computed_blocks` for a request that holds none: its hit;
2. `allocate_slots` for the tokens it computes next; None means that it does not fit now: preempt
   another, or wait;
3. the model runs, `request.append` takes its tokens, and the scheduler moves
   `request.num_computed_tokens` on;
4. `free` when it is finished, aborted or preempted.

`start_step` comes first in every step, `take_events` last. Full blocks are cached by
`allocate_slots` already, before the model has written them: whoever hits them in the same step is
computed behind the writer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvevents.events import Event
from offload.block import Block
from offload.block_pool import BlockPool, PoolStatistics
from offload.config import CacheConfig
from offload.coordinator import ComputedBlocks, RequestNeed, create_coordinator
from offload.errors import CacheConfigError, RequestStateError
from offload.request import CacheRequest


@dataclass(frozen=True, slots=True)
class AllocatedBlocks:
    """What a request was given for its new tokens; `block_tables` has all it holds."""

    new_blocks: tuple[Sequence[Block], ...]
    """Per group the new blocks, in the order of its tokens."""

    @property
    def new_block_ids(self) -> tuple[list[int], ...]:
        """Their ids, per group."""
        return tuple([block.block_id for block in blocks] for blocks in self.new_blocks)


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """Blocks now, and counts since the start."""

    pool: PoolStatistics
    slid_out: tuple[int, ...]
    """Per group, blocks given back while their request ran on."""
    requests: int
    """Admissions: a preempted request counts again."""
    queried_tokens: int
    hit_tokens: int
    """Of `queried_tokens`, those that were reused."""
    external_tokens: int
    """Of `queried_tokens`, those that a lower tier brought."""
    refused: int
    """Times the answer was None."""
    resets: int


class CacheManager:
    """One engine's KV cache. Not thread-safe: it belongs to the scheduler."""

    def __init__(self, config: CacheConfig, scheduler_block_size: int) -> None:
        """
        Args:
            config: The cache.
            scheduler_block_size: What the scheduler aligns to; given to the coordinator and every
                group as it is.

        Raises:
            CacheConfigError: The scheduler's size is not the one the configuration was checked
                with.
        """
        if scheduler_block_size != config.scheduler_block_size:
            raise CacheConfigError(
                f"scheduler_block_size {scheduler_block_size} must be the configuration's, {config.scheduler_block_size}"
            )
        self.config = config
        self.pool = BlockPool(config.num_blocks, config.layout.groups, config.enable_events)
        self.coordinator = create_coordinator(config, self.pool, scheduler_block_size)
        self._requests = 0
        self._queried_tokens = 0
        self._hit_tokens = 0
        self._external_tokens = 0
        self._refused = 0
        self._resets = 0

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, from 0 to 1."""
        return self.pool.usage

    def start_step(self) -> None:
        """A step begins: states that the last one wrote can be read now."""
        self.coordinator.start_step()

    def holds(self, request_id: str) -> bool:
        """Does the request hold blocks?"""
        return self.coordinator.managers[0].holds(request_id)

    def block_tables(self, request_id: str) -> tuple[Sequence[Block], ...]:
        """Per group the request's blocks, the null block where it needs none; empty if it holds
        none."""
        return tuple(manager.block_table(request_id) for manager in self.coordinator.managers)

    # --- a request's way --------------------------------------------------------------------------

    def get_computed_blocks(
        self, request: CacheRequest, limit: int | None = None
    ) -> ComputedBlocks:
        """The longest prefix the request can reuse; changes nothing.

        Args:
            request: One that holds no blocks.
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
        """Give the request blocks for its next tokens; None if they do not fit now, and then
        nothing has changed.

        Nor do they fit while the state that the hit needs is being written by another request of
        this step.

        Args:
            request: Its `num_computed_tokens` says how far it is.
            num_new_tokens: Tokens the next step computes; unverified drafts count.
            computed: Its hit, for a request that holds no blocks.
            num_lookahead_tokens: Drafts that are to be written behind the new tokens.
            num_external_tokens: Tokens behind the hit that a lower tier will bring.
            num_encoder_tokens: Tokens of the encoder's output, for cross attention.
            delay_caching: Cache nothing yet, since a load may fail; the next call without it does,
                or `cache_blocks`.
            full_sequence_must_fit: Admit only if the whole prompt fits, not just these tokens.
            reserved_blocks: Free blocks to leave to others.

        Raises:
            RequestStateError: The call does not fit the request's state.
        """
        is_admitted = self.holds(request.request_id)
        hit = computed or self.coordinator.no_blocks
        _check_not_negative(
            request,
            num_new_tokens=num_new_tokens,
            num_lookahead_tokens=num_lookahead_tokens,
            num_external_tokens=num_external_tokens,
            num_encoder_tokens=num_encoder_tokens,
            reserved_blocks=reserved_blocks,
        )
        self._check_call(request, num_new_tokens, hit, num_external_tokens, is_admitted)
        need = self._need(
            request,
            num_new_tokens,
            hit,
            num_lookahead_tokens,
            num_external_tokens,
            num_encoder_tokens,
        )
        if not self._fits(request, need, full_sequence_must_fit, reserved_blocks):
            self._refused += 1
            return None
        self.coordinator.free_skipped_blocks(request.request_id, need.num_computed_tokens)
        if not is_admitted:
            self._admit(request, hit, need, num_external_tokens)
        new_blocks = self.coordinator.allocate_new_blocks(request.request_id, need)
        if not delay_caching:
            self.cache_blocks(request, need.num_tokens)
        return AllocatedBlocks(new_blocks)

    def cache_blocks(self, request: CacheRequest, num_tokens: int) -> None:
        """Make the full blocks of the request's first *num_tokens* findable; drafts behind its last
        token are left out."""
        if not self.holds(request.request_id):
            raise RequestStateError(
                f"request {request.request_id!r} holds no blocks to cache: call allocate_slots first"
            )
        self.coordinator.cache_blocks(request, min(num_tokens, request.num_tokens))

    def free_skipped_blocks(self, request: CacheRequest) -> None:
        """Give back what slid out of the request's windows, before its next step does."""
        self.coordinator.free_skipped_blocks(request.request_id, request.num_computed_tokens)

    def free(self, request_id: str) -> None:
        """Give back all blocks of a finished, aborted or preempted request; no error if it holds
        none."""
        self.coordinator.free(request_id)

    # --- the cache as a whole ---------------------------------------------------------------------

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Make blocks unfindable whose content turned out wrong; raises `BlockRangeError`."""
        self.pool.evict_blocks(block_ids)

    def reset(self) -> bool:
        """Make every block unfindable, as after new weights; False, and nothing changed, while a
        request holds one."""
        is_reset = self.pool.reset_prefix_cache()
        self._resets += is_reset
        return is_reset

    def take_events(self) -> list[Event]:
        """What changed since the last call, for the publisher; call it at the end of every step."""
        return self.pool.take_events()

    def statistics(self) -> CacheStatistics:
        """Blocks now, and counts since the start."""
        return CacheStatistics(
            pool=self.pool.statistics(),
            slid_out=tuple(manager.slid_out for manager in self.coordinator.managers),
            requests=self._requests,
            queried_tokens=self._queried_tokens,
            hit_tokens=self._hit_tokens,
            external_tokens=self._external_tokens,
            refused=self._refused,
            resets=self._resets,
        )

    # --- steps of allocate_slots ------------------------------------------------------------------

    def _check_call(
        self,
        request: CacheRequest,
        num_new_tokens: int,
        hit: ComputedBlocks,
        num_external_tokens: int,
        is_admitted: bool,
    ) -> None:
        place = f"request {request.request_id!r}"
        if is_admitted and (hit.num_tokens or num_external_tokens):
            raise RequestStateError(
                f"{place} holds blocks already: a hit is for a request that holds none"
            )
        if not is_admitted and request.num_computed_tokens:
            raise RequestStateError(
                f"{place} holds no blocks, so its num_computed_tokens {request.num_computed_tokens} must be 0"
            )
        if not is_admitted and not self.coordinator.still_holds(request, hit):
            raise RequestStateError(
                f"{place}: its hit is out of date, blocks of it were evicted: look it up again"
            )
        if not num_new_tokens and not hit.num_tokens and not num_external_tokens:
            raise RequestStateError(f"{place}: no tokens to allocate for")
        total = request.num_computed_tokens + hit.num_tokens + num_external_tokens + num_new_tokens
        if total > self.config.max_model_len:
            raise RequestStateError(
                f"{place}: {total} tokens exceed max_model_len {self.config.max_model_len}"
            )

    def _need(
        self,
        request: CacheRequest,
        num_new_tokens: int,
        hit: ComputedBlocks,
        num_lookahead_tokens: int,
        num_external_tokens: int,
        num_encoder_tokens: int,
    ) -> RequestNeed:
        num_computed_tokens = request.num_computed_tokens + hit.num_tokens + num_external_tokens
        num_tokens = num_computed_tokens + num_new_tokens
        return RequestNeed(
            num_tokens=num_tokens,
            num_slots=min(num_tokens + num_lookahead_tokens, self.config.max_model_len),
            num_computed_tokens=num_computed_tokens,
            num_encoder_tokens=num_encoder_tokens,
            computed_blocks=hit.blocks,
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
            whole = request.num_tokens
            entire = RequestNeed(
                whole,
                whole,
                need.num_computed_tokens,
                need.num_encoder_tokens,
                need.computed_blocks,
            )
            if coordinator.num_blocks_to_allocate(request_id, entire, is_admission=True) > free:
                return False
        free += coordinator.num_blocks_to_free(request_id, need.num_computed_tokens)
        return coordinator.num_blocks_to_allocate(request_id, need) <= free - reserved_blocks

    def _admit(
        self,
        request: CacheRequest,
        hit: ComputedBlocks,
        need: RequestNeed,
        num_external_tokens: int,
    ) -> None:
        request.shared_prefix_boundary = hit.shared_prefix_boundary
        self.coordinator.adopt_computed_blocks(request.request_id, need, num_external_tokens)
        self._requests += 1
        self._queried_tokens += request.num_tokens
        self._hit_tokens += hit.num_tokens
        self._external_tokens += num_external_tokens


def _check_not_negative(request: CacheRequest, **numbers: int) -> None:
    for name, number in numbers.items():
        if number < 0:
            raise RequestStateError(
                f"request {request.request_id!r}: {name} {number} must not be negative"
            )
