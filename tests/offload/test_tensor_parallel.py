"""Two workers, each with its shard of every block, that are out of step."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvevents.events import CPU, BlockHash, BlockRemoved, BlockStored
from kvevents.layout import GroupKind, KVCacheGroup
from kvroute_engine.core.simulated import SimulatedTransferWorker
from kvroute_engine.core.time_model import TimeModel, VirtualClock
from offload.base import (
    CPULoadStoreSpec,
    Direction,
    GPULoadStoreSpec,
    OffloadingWorker,
    RequestContext,
    TransferJob,
    pack_offload_key,
)
from offload.cache_manager import CacheManager
from offload.connector.connector import OffloadingConnector
from offload.connector.tier import Tier
from offload.cpu.manager import CPUOffloadingManager
from offload.cpu.worker import CPUTransferWorker
from offload.errors import CacheConfigError, TransferError
from offload.request import CacheRequest, RequestHasher
from offload.tensor_parallel import ShardedWorker, ShardEvents
from offload.transfer.canonical import CanonicalKVCache, DataRef
from offload.transfer.runner import TransferOptions
from tests.support.cache_driver import CHAIN
from tests.support.cache_layouts import GROUPS, config_of

A, B, C = (bytes([number]) * 32 for number in (1, 2, 3))


def stored(*hashes: bytes, group_idx: int = 0) -> BlockStored:
    """As a tier reports it."""
    return BlockStored(
        list[BlockHash](hashes), None, [], CPU, group_idx, kv_cache_spec_kind="full_attention"
    )


def removed(*hashes: bytes, group_idx: int = 0) -> BlockRemoved:
    return BlockRemoved(list[BlockHash](hashes), CPU, group_idx)


# --- events of workers with tiers of their own ----------------------------------------------------


def test_a_block_is_published_when_all_workers_have_it_and_gone_with_the_first() -> None:
    """In between a load would find a part of it."""
    shards = ShardEvents(2)
    shards.report(0, [stored(A, B)])
    assert shards.take_events() == []
    shards.report(1, [stored(A)])
    assert shards.take_events() == [stored(A)]
    shards.report(1, [stored(B, C)])
    assert shards.take_events() == [stored(B)]
    shards.report(0, [removed(A)])
    assert shards.take_events() == [removed(A)]
    shards.report(1, [removed(A, C)])
    assert shards.take_events() == []


def test_a_worker_that_is_ahead_by_an_eviction_makes_no_block_appear() -> None:
    """It stored and evicted before the other had stored: at no time did both have it."""
    shards = ShardEvents(2)
    shards.report(0, [stored(A), removed(A)])
    shards.report(1, [stored(A)])
    assert shards.take_events() == []
    shards.report(0, [stored(A)])
    assert shards.take_events() == [stored(A)], "and now they have"


def test_a_block_that_one_worker_lost_returns_with_that_worker_alone() -> None:
    """The others never lost theirs, and do not report it again."""
    shards = ShardEvents(3)
    for worker in range(3):
        shards.report(worker, [stored(A)])
    assert shards.take_events() == [stored(A)]
    shards.report(2, [removed(A), stored(A)])
    assert shards.take_events() == [removed(A), stored(A)]


def test_what_a_worker_reports_twice_counts_once() -> None:
    """Two reports of one worker are not those of two."""
    shards = ShardEvents(2)
    shards.report(0, [stored(A), stored(A)])
    assert shards.take_events() == []
    shards.report(1, [stored(A), stored(A), removed(B)])
    assert shards.take_events() == [stored(A)]
    shards.report(0, [stored(A), removed(A)])
    assert shards.take_events() == [removed(A)]


def test_groups_are_kept_apart_and_travel_in_one_event_each() -> None:
    """Equal hashes of two groups are two blocks."""
    shards = ShardEvents(2)
    shards.report(0, [stored(A, B), stored(A, B, group_idx=1)])
    shards.report(1, [stored(A, group_idx=1), stored(B, A), stored(B, group_idx=1)])
    assert shards.take_events() == [stored(A, B), stored(A, B, group_idx=1)]
    shards.report(1, [removed(A), removed(A, group_idx=1), removed(B)])
    assert shards.take_events() == [removed(A, B), removed(A, group_idx=1)]


@pytest.mark.parametrize("worker", [-1, 2])
def test_a_rank_that_does_not_exist_is_refused(worker: int) -> None:
    """Its blocks would never be complete, or complete too early."""
    with pytest.raises(CacheConfigError, match=f"worker {worker} must be in 0 to 1"):
        ShardEvents(2).report(worker, [])
    with pytest.raises(CacheConfigError, match="num_workers 0 must be at least 1"):
        ShardEvents(0)


@given(seed=st.integers(0, 2**32), workers=st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_what_was_published_is_at_every_time_what_all_workers_reported_to_have(
    seed: int, workers: int
) -> None:
    """Real tiers of different sizes, which evict in their own order and report in their own time;
    and nothing is remembered of blocks that nobody has."""
    rng = random.Random(seed)
    groups = [KVCacheGroup(GroupKind.FULL, 4), KVCacheGroup(GroupKind.FULL, 4)]
    tiers = [
        Tier(CPUOffloadingManager(rng.randrange(2, 8), enable_events=True), groups)
        for _ in range(workers)
    ]
    shards, reported, published = ShardEvents(workers), [set() for _ in tiers], set()
    for _ in range(60):
        rank = rng.randrange(workers)
        use(tiers[rank], rng)
        if rng.random() < 0.5:
            events = tiers[rank].take_events()
            replay(events, reported[rank])
            shards.report(rank, events)
        if rng.random() < 0.5:
            replay(shards.take_events(), published, exact=True)
            assert published == set.intersection(*reported)
    for rank, tier in enumerate(tiers):
        shards.report(rank, tier.take_events())
        tier.reset()
        shards.report(rank, tier.take_events())
    replay(shards.take_events(), published, exact=True)
    assert published == set()
    assert not shards._stored
    assert not shards._reported
    assert shards._aggregator.get_all_events() == []


def use(tier: Tier, rng: random.Random) -> None:
    """Store a few blocks, or lose them all."""
    context = RequestContext("r")
    if rng.random() < 0.05:
        tier.reset()
        return
    keys = [pack_offload_key(bytes([rng.randrange(8)]) * 32, rng.randrange(2)) for _ in range(2)]
    agreed = tier.prepare_store({key: [key[:-4]] for key in keys}, context)
    if agreed is not None:
        tier.complete_store(agreed.keys_to_store, context, rng.random() < 0.9)


def replay(events: Sequence[object], present: set[tuple[int | None, BlockHash]], exact=False):
    """Apply events to a set of blocks; *exact*: each must change something."""
    for event in events:
        assert isinstance(event, BlockStored | BlockRemoved)
        blocks = {(event.group_idx, block_hash) for block_hash in event.block_hashes}
        if isinstance(event, BlockStored):
            assert not (exact and blocks & present)
            present |= blocks
        else:
            assert not exact or blocks <= present
            present -= blocks


# --- workers that follow one manager --------------------------------------------------------------


def test_a_store_out_of_step_is_a_hit_and_an_event_only_when_both_workers_have_ended_it() -> None:
    """The scheduler's whole path, with a worker that is ten times as slow as the other."""
    config = config_of(GROUPS["full"], num_blocks=40)
    cache = CacheManager(config, config.scheduler_block_size)
    manager = CPUOffloadingManager(100, enable_events=True)
    connector = OffloadingConnector(cache, [Tier(manager, config.layout.groups)])
    clock = VirtualClock()
    worker = ShardedWorker(
        [
            SimulatedTransferWorker(TimeModel(transfer_bytes_per_s=rate).transfer_s, clock, 100)
            for rate in (10_000, 1_000)
        ]
    )
    hasher = RequestHasher(CHAIN, config.layout.hash_block_size)
    request = CacheRequest("a", list(range(40)), hasher)
    computed = cache.get_computed_blocks(request)
    connector.find_external_hit(request, computed)
    assert cache.allocate_slots(request, 40, computed)
    request.num_computed_tokens = 40
    connector.store(request)
    for job in connector.take_jobs()[0]:
        worker.submit(job)
    clock.sleep(0.5)  # ten blocks of 100 bytes: 0.1 s and 1 s
    connector.complete(worker.get_finished())
    assert (connector.take_events(), connector.is_idle) == ([], False)
    clock.sleep(0.6)
    connector.complete(worker.get_finished())
    (event,) = connector.take_events()
    assert (event.block_hashes, connector.is_idle) == (request.block_hashes, True)  # type: ignore[union-attr]
    assert connector.statistics().store.transferred_bytes == 2000
    worker.shutdown()


GEOMETRY = [[DataRef(0, 8)]]
SPEC = GPULoadStoreSpec([0, 1, 2], [3], [0])
SLOTS = CPULoadStoreSpec([0, 1, 2])


@contextmanager
def two_shards(fails: bool = False) -> Iterator[tuple[ShardedWorker, list[torch.Tensor]]]:
    """Two workers over pages of their own; the second one may fail to copy."""

    def pace(chunk_bytes: int) -> None:
        if fails:
            raise OSError(f"a copy of {chunk_bytes} bytes fails")

    pages = [torch.full((4, 8), rank + 1, dtype=torch.int8) for rank in range(2)]
    workers: list[OffloadingWorker] = [
        CPUTransferWorker(
            CanonicalKVCache([tensor], GEOMETRY),
            4,
            options=TransferOptions(pace=pace) if rank else None,
        )
        for rank, tensor in enumerate(pages)
    ]
    sharded = ShardedWorker(workers)
    try:
        yield sharded, pages
    finally:
        sharded.shutdown()


def test_every_worker_gets_its_own_shard_back() -> None:
    """The jobs are the same, the bytes are not."""
    with two_shards() as (worker, pages):
        worker.submit(TransferJob(1, Direction.STORE, SPEC, SLOTS))
        worker.wait([1])
        for tensor in pages:
            tensor.zero_()
        worker.submit(TransferJob(2, Direction.LOAD, SPEC, SLOTS))
        worker.wait([2])
        results = worker.get_finished()
        for rank, tensor in enumerate(pages):
            assert tensor[:3].eq(rank + 1).all()
            assert tensor[3].eq(0).all()
    assert [(each.job_id, each.success, each.transferred_bytes) for each in results] == [
        (1, True, 48),
        (2, True, 48),
    ]


def test_a_job_that_one_worker_failed_has_failed() -> None:
    """The shards of the others are useless without it."""
    with two_shards(fails=True) as (worker, _):
        worker.submit(TransferJob(1, Direction.STORE, SPEC, SLOTS))
        worker.wait([1])
        (result,) = worker.get_finished()
    assert (result.success, result.transferred_bytes) == (False, 0)


def test_a_job_that_only_some_workers_can_take_fails_when_those_have_ended_it() -> None:
    """Its blocks stay untouched until then; one that none can take is refused."""
    with two_shards() as (worker, _):
        worker._workers[1].shutdown()
        worker.submit(TransferJob(1, Direction.STORE, SPEC, SLOTS))
        worker.wait([1])
        (result,) = worker.get_finished()
        assert (result.job_id, result.success) == (1, False)
        worker._workers[0].shutdown()
        with pytest.raises(TransferError, match="shut down"):
            worker.submit(TransferJob(2, Direction.STORE, SPEC, SLOTS))
        assert worker.get_finished() == []
    with pytest.raises(CacheConfigError, match="at least one worker"):
        ShardedWorker([])
