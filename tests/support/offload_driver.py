"""A `CacheDriver` with lower tiers: real pages in a real tensor, real copies, and loads."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from kvevents.events import CPU, STORAGE, BlockHash, BlockRemoved, BlockStored, Event
from offload.base import OffloadingWorker, TransferResult
from offload.config import CacheConfig
from offload.connector.connector import OffloadingConnector
from offload.connector.load_plan import ExternalHit
from offload.connector.store_plan import StoreScope
from offload.connector.tier import Tier
from offload.coordinator import ComputedBlocks
from offload.request import CacheRequest
from offload.transfer.canonical import CanonicalKVCache, DataRef
from tests.support.cache_driver import CacheDriver, Job, Pages
from tests.support.engine_model import defined_tier_hit

SLOT_BYTES = 8
"""One 64-bit number per token."""


class TensorPages(Pages):
    """Pages in one canonical tensor, `[num_blocks, page_bytes]` int8, that all groups share.

    The largest block fills a page.
    """

    def __init__(self, config: CacheConfig) -> None:
        super().__init__()
        slots = max(group.block_size for group in config.layout.groups)
        self.tensor = torch.zeros((config.num_blocks, slots * SLOT_BYTES), dtype=torch.int8)
        self._numbers = self.tensor.view(torch.int64)
        sizes = [group.block_size * SLOT_BYTES for group in config.layout.groups]
        self.cache = CanonicalKVCache([self.tensor], [[DataRef(0, size)] for size in sizes])

    def read(self, block_id: int, slot: int) -> int:
        return int(self._numbers[block_id, slot])

    def write(self, block_id: int, slot: int, value: int) -> None:
        if slot == 0:
            self._numbers[block_id] = 0
        self._numbers[block_id, slot] = value


@dataclass
class Waiting:
    """A request whose blocks are being loaded."""

    job: Job
    hit: ExternalHit


@dataclass
class TierUnderTest:
    """A tier, its worker, and what it holds according to its events."""

    tier: Tier
    worker: OffloadingWorker
    present: set[tuple[int, BlockHash]] = field(default_factory=set)


class OffloadDriver(CacheDriver):
    """Admits requests through the connector, stores what they compute, checks what is loaded."""

    def __init__(
        self,
        config: CacheConfig,
        pages: TensorPages,
        tiers: Sequence[TierUnderTest],
        seed: int | str,
        scope: StoreScope = StoreScope.ALL,
        promote: bool = True,
    ) -> None:
        super().__init__(config, pages)
        self.tiers = tiers
        self.connector = OffloadingConnector(
            self.cache, [under_test.tier for under_test in tiers], scope, promote
        )
        self.loading: dict[str, Waiting] = {}
        self.loaded_from: set[str] = set()
        self.came_back: list[Job] = []
        """Requests whose load failed: they hold no blocks and start again."""
        self.patience = 0.5
        """How often a step waits for the copies."""
        self._rng = random.Random(seed)

    def admit(self, sequence: Job, budget: int, must_fit: bool = False) -> bool:
        request = sequence.request
        computed = self.cache.get_computed_blocks(request)
        hit = self.connector.find_external_hit(request, computed)
        if hit is None:
            self.counts["joined"] += 1
            return False
        assert hit.num_tokens == self.expected_total(request, computed.num_tokens)
        if not hit.num_external_tokens:
            return super().admit(sequence, budget, must_fit)
        return self._admit_with_load(sequence, computed, hit)

    def _admit_with_load(self, sequence: Job, computed: ComputedBlocks, hit: ExternalHit) -> bool:
        before = self.snapshot()
        given = self.cache.allocate_slots(
            sequence.request,
            0,
            computed,
            num_external_tokens=hit.num_external_tokens,
            num_encoder_tokens=10,
            delay_caching=True,
        )
        if given is None:
            assert self.snapshot() == before
            return False
        self.connector.start_load(sequence.request, hit)
        self.running[sequence.request.request_id] = sequence
        self.loading[sequence.request.request_id] = Waiting(sequence, hit)
        self.counts["loads"] += 1
        self.loaded_from |= {self.tiers[piece.tier_index].tier.medium for piece in hit.pieces}
        return True

    def advance(self, sequence: Job, budget: int, lookahead: int = 0) -> bool:
        if sequence.request.request_id in self.loading:
            return True
        return super().advance(sequence, budget, lookahead)

    def finish(self, sequence: Job) -> None:
        self.loading.pop(sequence.request.request_id, None)
        self.connector.forget(sequence.request.request_id)
        super().finish(sequence)

    def end_step(self) -> None:
        for job in self.running.values():
            if job.request.request_id not in self.loading:
                self.connector.store(job.request)
        for under_test, jobs in zip(self.tiers, self.connector.take_jobs(), strict=True):
            for job in jobs:
                under_test.worker.submit(job)
            if self._rng.random() < self.patience:
                under_test.worker.wait([job.job_id for job in jobs])
        for under_test in self.tiers:
            self._complete(under_test.worker.get_finished())
        super().end_step()
        lower = self.connector.take_events()
        self._replay_lower(lower)
        self.events = [*self.events, *lower]

    def drain(self) -> None:
        """Step until no copy is in flight."""
        patience, self.patience = self.patience, 1.0
        while not self.connector.is_idle:
            self.end_step()
        self.patience = patience

    def _complete(self, results: Iterable[TransferResult]) -> None:
        finished = self.connector.complete(results)
        for request_id in finished.loaded:
            waiting = self.loading.pop(request_id)
            request = waiting.job.request
            request.num_computed_tokens = min(waiting.hit.num_tokens, request.num_tokens - 1)
            self._check_loaded(waiting.job)
            self.counts["loaded"] += 1
        for request_id in finished.failed:
            self.counts["failed loads"] += 1
            job = self.loading[request_id].job
            self.finish(job)
            self.came_back.append(job)

    def _check_loaded(self, job: Job) -> None:
        tables = self.cache.block_tables(job.request.request_id)
        for group, table in zip(self.config.layout.groups, tables, strict=True):
            self._read(job, group, table, job.request.num_computed_tokens)

    def expected_total(self, request: CacheRequest, gpu_hit: int) -> int:
        """The hit with the tiers' blocks, by the definition of the rule, computed from the tiers'
        events.
        """
        layout = self.config.layout
        reach = len(request.block_hashes) * layout.hash_block_size

        def has(group: int, end: int) -> bool:
            if end > reach:
                return False
            block_hash = request.block_hashes[end // layout.hash_block_size - 1]
            return any((group, block_hash) in under_test.present for under_test in self.tiers)

        blocks = [group.block_size for group in layout.groups]
        return defined_tier_hit(layout, has, gpu_hit, request.num_tokens, blocks)

    def check_invariants(self) -> None:
        super().check_invariants()
        self.connector.check_integrity()

    def held_by_copies(self) -> Counter[int]:
        flights = self.connector._flights.values()  # internal, but only tests need it
        return Counter(block.block_id for flight in flights for block in flight.blocks)

    def _replay_lower(self, events: Sequence[Event]) -> None:
        tiers = {under_test.tier.medium: under_test.present for under_test in self.tiers}
        for event in events:
            assert isinstance(event, BlockStored | BlockRemoved)
            assert event.group_idx is not None
            assert event.medium in (CPU, STORAGE)
            named = {(event.group_idx, block_hash) for block_hash in event.block_hashes}
            assert len(named) == len(event.block_hashes)
            present = tiers[event.medium]
            if isinstance(event, BlockRemoved):
                assert named <= present, "removed what was not there"
                present -= named
            else:
                assert not event.token_ids
                assert not named & present, "stored what was there"
                present |= named
