"""The scheduler's side of offloading: loads for new requests, stores of computed blocks, events.

A scheduler goes on from `CacheManager.get_computed_blocks` like this:

1. `find_external_hit` returns the tokens that lower tiers add to the GPU's hit; None means that
   another request is loading part of it right now: ask again in the next step;
2. `CacheManager.allocate_slots(request, 0, computed, num_external_tokens=..., delay_caching=True)`
   gives it blocks;
3. `start_load` queues the copies, and the request waits while `is_loading`, which is False at once
   where nothing has to be copied;
4. at the end of every step `store` queues copies of what the step has written, `take_jobs` hands
   all to the tiers' workers, and `complete` takes their results: requests whose loads are over go
   on behind their hit, those whose load failed are freed and start again;
5. `forget` when a request gives up its blocks, for any reason.

Blocks that a copy reads or writes stay referenced until it is over, so that they are not given out
meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from kvevents.events import Event
from offload.base import (
    Direction,
    GPULoadStoreSpec,
    OffloadKey,
    RequestContext,
    TransferJob,
    TransferResult,
)
from offload.block import Block
from offload.cache_manager import CacheManager
from offload.connector.load_plan import (
    ExternalHit,
    LoadPlanner,
    context_of,
    gpu_side,
    split_into_copies,
)
from offload.connector.store_plan import StoreCandidate, StorePlanner, StoreScope
from offload.connector.tier import Tier
from offload.coordinator import ComputedBlocks
from offload.errors import CacheConfigError, TierStateError
from offload.request import CacheRequest


@dataclass(frozen=True, slots=True)
class FinishedLoads:
    """Requests whose loads are over."""

    loaded: Sequence[str]
    failed: Sequence[str]


@dataclass(slots=True)
class CopyStatistics:
    """Copies of one direction, since the start."""

    jobs: int = 0
    failed_jobs: int = 0
    transferred_bytes: int = 0
    time_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ConnectorStatistics:
    """Jobs now, and counts since the start."""

    jobs_in_flight: int
    requests_loading: int
    store: CopyStatistics
    load: CopyStatistics
    refused_stores: int
    """Times a tier had no room next to what was in flight."""


@dataclass(frozen=True, slots=True)
class _Flight:
    """A job on its way."""

    job: TransferJob
    tier: Tier
    keys: Sequence[OffloadKey]
    blocks: Sequence[Block]
    context: RequestContext


@dataclass(slots=True)
class _Loading:
    """A request that waits for its loads."""

    jobs: set[int] = field(default_factory=set)
    has_failed: bool = False


class OffloadingConnector:
    """Connects one `CacheManager` to its lower tiers.

    Not thread-safe: it belongs to the scheduler.
    """

    def __init__(
        self,
        cache: CacheManager,
        tiers: Sequence[Tier],
        store_scope: StoreScope = StoreScope.ALL,
        promote: bool = True,
    ) -> None:
        """
        Args:
            tiers: The fastest first. Blocks are stored in all of them; a load takes each block from
                the first that has it.
            promote: True to offer blocks that a load brought back to the tiers that lack them:
                blocks found on disk are then found in memory the next time. Without it only
                computed blocks are stored.

        Raises:
            CacheConfigError: Two tiers have the same medium.
        """
        if len({tier.medium for tier in tiers}) != len(tiers):
            raise CacheConfigError(
                "tiers: each needs a medium of its own, since events name them by it"
            )
        self._pool = cache.pool
        self._cache = cache
        self._tiers = tuple(tiers)
        self._loads = LoadPlanner(cache, tiers)
        self._stores = StorePlanner(cache, tiers, store_scope)
        self._promote = promote
        self._job_ids = count(1)
        self._queued: list[list[TransferJob]] = [[] for _ in tiers]
        self._flights: dict[int, _Flight] = {}
        self._loading: dict[str, _Loading] = {}
        self._contexts: dict[str, RequestContext] = {}
        """The contexts of requests that began and gave up no blocks since."""
        self._keys_loading: Counter[OffloadKey] = Counter()
        self._counts = {direction: CopyStatistics() for direction in Direction}
        self._refused_stores = 0

    @property
    def is_idle(self) -> bool:
        """Return whether all jobs have completed."""
        return not self._flights

    # --- loading ----------------------------------------------------------------------------------

    def block_keys(self, request: CacheRequest, most: int) -> list[OffloadKey]:
        """The blocks of a request's prompt that a tier might hold, of all groups, those at its
        start first.

        Args:
            request: Need not have begun.
        """
        return self._loads.keys(request, most)

    def find_external_hit(
        self, request: CacheRequest, computed: ComputedBlocks
    ) -> ExternalHit | None:
        """Return the tokens that lower tiers add to the GPU's hit. None if part of it is on its way
        to the GPU for another request.
        """
        if request.request_id not in self._contexts:
            context = self._contexts[request.request_id] = context_of(request)
            for tier in self._tiers:
                tier.manager.on_new_request(context)
        hit = self._loads.find(request, computed)
        if any(self._keys_loading[piece.key] for piece in hit.pieces):
            return None
        if not self._stores.knows(request.request_id):
            # Once per request, however often it is looked up: a tier may take two uses for two
            # requests.
            self._loads.touch(request, hit.num_tokens)
        self._stores.start(
            request.request_id, computed.num_tokens if self._promote else hit.num_tokens
        )
        return hit

    def start_load(self, request: CacheRequest, hit: ExternalHit) -> None:
        """Queue the copies of a hit.

        Args:
            request: It has blocks for the hit.

        Raises:
            TierStateError: The request waits for a load already, or a block was lost since the hit
                was found.
        """
        if request.request_id in self._loading:
            raise TierStateError(f"request {request.request_id!r} waits for a load already")
        tables = self._cache.block_tables(request.request_id)
        context = context_of(request)
        for tier_index, tier in enumerate(self._tiers):
            for copy in split_into_copies(hit.pieces, tier_index):
                keys = [piece.key for piece in copy]
                gpu, blocks = gpu_side(copy, tables)
                lower = tier.manager.prepare_load(keys, context)
                job = TransferJob(next(self._job_ids), Direction.LOAD, gpu, lower)
                self._launch(tier_index, _Flight(job, tier, keys, blocks, context))
                self._keys_loading.update(keys)
                self._loading.setdefault(request.request_id, _Loading()).jobs.add(job.job_id)

    def is_loading(self, request_id: str) -> bool:
        """Return whether the request waits for a load."""
        return request_id in self._loading

    def forget(self, request_id: str) -> None:
        """Drop a request that gives up its blocks; its copies in flight end unreported."""
        self._loading.pop(request_id, None)
        self._stores.forget(request_id)
        context = self._contexts.pop(request_id, None)
        if context is not None:
            for tier in self._tiers:
                tier.manager.on_request_finished(context)

    # --- storing ----------------------------------------------------------------------------------

    def store(self, request: CacheRequest) -> None:
        """Queue copies of blocks that are full, can serve a hit, and were not offered before.

        Call it when the step's computation is queued and `request.num_computed_tokens` has moved
        on: those tokens are written, or will be before the copy starts.
        """
        for tier_index, tier in enumerate(self._tiers):
            candidates = self._stores.candidates(request, tier_index)
            if candidates and not self._store_in(tier_index, tier, candidates, context_of(request)):
                self._refused_stores += 1
                continue
            self._stores.mark_offered(request, tier_index)

    def _store_in(
        self,
        tier_index: int,
        tier: Tier,
        candidates: Sequence[StoreCandidate],
        context: RequestContext,
    ) -> bool:
        by_key = {candidate.key: candidate for candidate in candidates}
        agreed = tier.prepare_store({c.key: c.block_hashes for c in candidates}, context)
        if agreed is None:
            return False
        taken = [by_key[key] for key in agreed.keys_to_store]
        if taken:
            blocks = [block for candidate in taken for block in candidate.blocks]
            gpu = self._stored_side(taken)
            job = TransferJob(next(self._job_ids), Direction.STORE, gpu, agreed.store_spec)
            self._launch(tier_index, _Flight(job, tier, agreed.keys_to_store, blocks, context))
        return True

    def _stored_side(self, taken: Sequence[StoreCandidate]) -> GPULoadStoreSpec:
        sizes = [0] * len(self._cache.coordinator.managers)
        for candidate in taken:
            sizes[candidate.group_idx] += len(candidate.blocks)
        ids = [block.block_id for candidate in taken for block in candidate.blocks]
        # Only whole offloaded blocks are stored, so each group's first block begins one, and index
        # 0 expresses just that.
        return GPULoadStoreSpec(ids, sizes, [0] * len(sizes))

    # --- jobs -------------------------------------------------------------------------------------

    def take_jobs(self) -> list[list[TransferJob]]:
        """Per tier, jobs for its worker, in the order in which they must run."""
        jobs, self._queued = self._queued, [[] for _ in self._tiers]
        return jobs

    def complete(self, results: Iterable[TransferResult]) -> FinishedLoads:
        """Take the workers' results, and return the requests whose loads are over.

        Raises:
            TierStateError: A result belongs to a job that is not in flight.
        """
        loaded: list[str] = []
        failed: list[str] = []
        for result in results:
            flight = self._flights.pop(result.job_id, None)
            if flight is None:
                raise TierStateError(f"job {result.job_id} is not in flight")
            self._count(result)
            if result.direction is Direction.STORE:
                flight.tier.complete_store(flight.keys, flight.context, result.success)
            elif self._end_load(flight, result.success):
                is_failed = self._loading.pop(flight.context.request_id).has_failed
                (failed if is_failed else loaded).append(flight.context.request_id)
            self._pool.free_blocks(reversed(flight.blocks))
        return FinishedLoads(loaded, failed)

    def _launch(self, tier_index: int, flight: _Flight) -> None:
        self._pool.touch(flight.blocks)
        self._flights[flight.job.job_id] = flight
        self._queued[tier_index].append(flight.job)

    def _end_load(self, flight: _Flight, success: bool) -> bool:
        """Return True if it was the last load that its request waited for."""
        flight.tier.manager.complete_load(flight.keys, flight.context, success)
        self._keys_loading -= Counter(flight.keys)
        loading = self._loading.get(flight.context.request_id)
        if loading is None or flight.job.job_id not in loading.jobs:
            return False
        loading.jobs.discard(flight.job.job_id)
        loading.has_failed |= not success
        return not loading.jobs

    def _count(self, result: TransferResult) -> None:
        counts = self._counts[result.direction]
        counts.jobs += 1
        counts.failed_jobs += not result.success
        counts.transferred_bytes += result.transferred_bytes
        counts.time_s += result.time_s

    # --- the tiers as a whole ---------------------------------------------------------------------

    def reset(self) -> None:
        """Drop the tiers' blocks, as after new weights."""
        for tier in self._tiers:
            tier.reset()

    def take_events(self) -> list[Event]:
        """Take the tiers' stores and removals since the last call, to publish with the cache's."""
        return [event for tier in self._tiers for event in tier.take_events()]

    def statistics(self) -> ConnectorStatistics:
        """Jobs now, and counts since the start."""
        return ConnectorStatistics(
            jobs_in_flight=len(self._flights),
            requests_loading=len(self._loading),
            store=replace(self._counts[Direction.STORE]),
            load=replace(self._counts[Direction.LOAD]),
            refused_stores=self._refused_stores,
        )

    def check_integrity(self) -> None:
        """Check the cache's invariants with the references of copies in flight.

        For tests and debugging.

        Raises:
            AssertionError: An invariant does not hold; see `BlockPool.check_integrity`.
        """
        flights = self._flights.values()
        self._cache.check_integrity(
            Counter(block.block_id for flight in flights for block in flight.blocks)
        )
