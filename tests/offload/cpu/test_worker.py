"""Copies between GPU blocks and CPU slots, compared byte for byte with a plain loop."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload.base import (
    CPULoadStoreSpec,
    Direction,
    FileLoadStoreSpec,
    GPULoadStoreSpec,
    TransferJob,
)
from offload.cpu.worker import CPUTransferWorker
from offload.errors import CacheConfigError, TransferError
from offload.transfer.canonical import CanonicalKVCache, DataRef
from offload.transfer.runner import TransferOptions
from tests.offload.transfer.world import (
    DEVICES,
    Job,
    PlainLoop,
    World,
    assert_same,
    copies_of,
    jobs,
    results_of,
    worlds,
)
from tests.support.waiting import DEADLINE_S

SLOTS = 8


def submit(worker: CPUTransferWorker, number: int, job: Job) -> None:
    lower = CPULoadStoreSpec([slot for ids in job.lower_ids for slot in ids])
    worker.submit(TransferJob(number, job.direction, job.gpu, lower))


@pytest.mark.parametrize("device", DEVICES)
@given(
    data=st.data(),
    world=worlds(),
    staging_bytes=st.sampled_from([1, 100, 1 << 20]),
    threads=st.sampled_from([1, 3]),
)
@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_random_jobs_copy_what_a_plain_loop_copies(
    device: str, data: st.DataObject, world: World, staging_bytes: int, threads: int
) -> None:
    """Every layout, alignment, chunking and order of jobs: a wrong byte is a wrong response."""
    cache = world.cache(device)
    worker = CPUTransferWorker(cache, SLOTS, world.k, TransferOptions(staging_bytes, threads))
    slots = worker.slots.numpy().copy()
    loop = PlainLoop(world, copies_of(cache), lambda _group, slot: slots[slot])
    todo = data.draw(st.lists(jobs(world, SLOTS), min_size=1, max_size=6))
    for number, job in enumerate(todo):
        submit(worker, number, job)
        loop.run(job)
    results = results_of(worker, range(len(todo)))
    worker.shutdown()
    assert [(r.job_id, r.direction, r.success) for r in results] == [
        (n, j.direction, True) for n, j in enumerate(todo)
    ]
    assert [result.transferred_bytes for result in results] == loop.copied_bytes
    np.testing.assert_array_equal(worker.slots.numpy(), slots)
    assert_same(cache, loop.rows)


WORLD = World(
    [(10, 8, 0), (10, 24, 0)], [[DataRef(0, 8), DataRef(1, 16)], [DataRef(1, 24)]], [2, 1], seed=1
)
"""Two groups that share a tensor; slots of 48 bytes."""

FAULT_WORLD = World([(24, 8, 0), (24, 24, 0)], WORLD.refs, WORLD.k, seed=2)

STORE, LOAD = Direction.STORE, Direction.LOAD


def gpu(ids: list[int], sizes: list[int], indices: list[int]) -> GPULoadStoreSpec:
    return GPULoadStoreSpec(ids, sizes, indices)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("direction", "gpu", "slots", "complaint"),
    [
        (STORE, gpu([1, 2], [2], [0]), [0], "1 groups must be the cache's 2"),
        (
            STORE,
            gpu([1, 10], [2, 0], [0, 0]),
            [0],
            "block ids 1 to 10 of group 0 must be in 0 to 9",
        ),
        (STORE, gpu([-1, 1], [2, 0], [0, 0]), [0], "block ids -1 to 1 of group 0"),
        (
            STORE,
            gpu([1, 2], [2, 0], [0, 0]),
            [],
            r"0 offloaded blocks must be 1, per group \[1, 0\]",
        ),
        (STORE, gpu([1, 2], [2, 0], [0, 0]), [0, 1], "2 offloaded blocks must be 1"),
        (
            LOAD,
            gpu([1, 2], [2, 0], [1, 0]),
            [0],
            r"1 offloaded blocks must be 2, per group \[2, 0\]",
        ),
        (STORE, gpu([1, 2], [2, 0], [0, 0]), [4], "CPU spec: block ids 4 to 4 must be in 0 to 3"),
        (STORE, gpu([1, 2], [2, 0], [0, 0]), [-1], "CPU spec: block ids -1 to -1"),
        (
            STORE,
            gpu([1, 2, 3], [2, 1], [0, 0]),
            [2, 2],
            "CPU spec: 2 block ids, 1 of them different",
        ),
        (
            STORE,
            gpu([1], [1, 0], [0, 0]),
            [0],
            "store of group 0: 1 blocks from index 0 must cover whole offloaded blocks of 2",
        ),
        (
            STORE,
            gpu([1, 2], [2, 0], [1, 0]),
            [0, 1],
            "store of group 0: 2 blocks from index 1 must cover whole",
        ),
        (
            LOAD,
            gpu([1, 1], [2, 0], [0, 0]),
            [0],
            r"load of groups \[0\]: a block id of tensor 0 is named twice",
        ),
        (
            LOAD,
            gpu([1, 2, 2], [2, 1], [0, 0]),
            [0, 1],
            r"load of groups \[0, 1\]: a block id of tensor 1 is named twice",
        ),
        (STORE, gpu([1, 1 << 70], [2, 0], [0, 0]), [0], "must be in 0 to 9"),
    ],
)
def test_a_job_that_does_not_fit_is_refused_and_touches_nothing(
    device: str, direction: Direction, gpu: GPULoadStoreSpec, slots: list[int], complaint: str
) -> None:
    """Its error must show at submission, neither in a thread nor in another request's blocks."""
    cache = WORLD.cache(device)
    worker = CPUTransferWorker(cache, 4, WORLD.k)
    worker.slots.fill_(3)
    before = copies_of(cache)
    with pytest.raises(TransferError, match=complaint):
        worker.submit(TransferJob(1, direction, gpu, CPULoadStoreSpec(slots)))
    worker.shutdown()
    assert worker.get_finished() == []
    assert worker.statistics().finished_jobs == 0
    assert_same(cache, before)
    assert bool((worker.slots == 3).all())


def test_a_spec_of_another_tier_is_refused() -> None:
    """An engine has several tiers; a mixed-up job must not pass for an empty one."""
    worker = CPUTransferWorker(WORLD.cache("cpu"), 4, WORLD.k)
    with pytest.raises(TransferError, match="FileLoadStoreSpec must be a CPULoadStoreSpec"):
        worker.submit(TransferJob(1, STORE, gpu([], [0, 0], [0, 0]), FileLoadStoreSpec([])))
    worker.shutdown()


@pytest.mark.parametrize(
    ("num_cpu_blocks", "k"), [(0, [1, 1]), (4, [1]), (4, [1, 0]), (4, [1, -2])]
)
def test_sizes_that_contradict_each_other_are_refused(num_cpu_blocks: int, k: list[int]) -> None:
    """At the start of the engine, not at its first store."""
    with pytest.raises(
        CacheConfigError, match=r"CPU tier: num_cpu_blocks|blocks_per_offloaded_block"
    ):
        CPUTransferWorker(WORLD.cache("cpu"), num_cpu_blocks, k)


@pytest.mark.parametrize("device", DEVICES)
def test_a_job_without_blocks_succeeds(device: str) -> None:
    """A scheduler need not check before it submits."""
    worker = CPUTransferWorker(WORLD.cache(device), 4, WORLD.k)
    worker.submit(TransferJob(1, LOAD, gpu([], [0, 0], [5, 0]), CPULoadStoreSpec([])))
    (result,) = results_of(worker, [1])
    worker.shutdown()
    assert (result.success, result.transferred_bytes) == (True, 0)


def test_the_lists_of_a_submitted_job_may_change() -> None:
    """A scheduler goes on changing its lists of blocks; the job stays as submitted."""
    cache = WORLD.cache("cpu")
    go_on = threading.Event()

    def pace(_: int) -> None:
        go_on.wait(DEADLINE_S)

    worker = CPUTransferWorker(cache, 4, WORLD.k, TransferOptions(pace=pace))
    blocks, slots = np.array([1, 2]), [0]
    worker.submit(
        TransferJob(1, STORE, GPULoadStoreSpec(blocks, [2, 0], [0, 0]), CPULoadStoreSpec(slots))
    )
    blocks[:], slots[0] = 5, 3
    go_on.set()
    results_of(worker, [1])
    worker.shutdown()
    assert bool((worker.slots[0, :8] == cache.tensors[0][1]).all())
    assert not worker.slots[3].any()


@pytest.mark.parametrize("device", DEVICES)
@given(fault_at=st.integers(1, 12), data=st.data())
@settings(max_examples=60, deadline=None)
def test_only_jobs_reported_as_copied_count(
    device: str, fault_at: int, data: st.DataObject
) -> None:
    """A copy may break off at any point.

    Blocks of jobs that succeeded are whole, and later jobs are undisturbed.
    """
    calls = 0

    def pace(_: int) -> None:
        nonlocal calls
        calls += 1
        if calls == fault_at:
            raise RuntimeError("the copy broke off")

    cache = FAULT_WORLD.cache(device)
    worker = CPUTransferWorker(
        cache, SLOTS, FAULT_WORLD.k, TransferOptions(staging_bytes=1, pace=pace)
    )
    todo = data.draw(st.lists(jobs(FAULT_WORLD, SLOTS), min_size=3, max_size=8))
    served: dict[int, bytes] = {}
    for number, job in enumerate(todo):
        before = copies_of(cache)
        submit(worker, number, job)
        (result,) = results_of(worker, [number])
        written = [slot for ids in job.lower_ids for slot in ids] if job.direction is STORE else []
        for slot in written:
            served.pop(slot, None)
        if result.success:
            check_job(job, before, cache, worker, served)
        else:
            assert result.transferred_bytes == 0
    worker.shutdown()
    for slot, contents in served.items():
        assert bytes(worker.slots[slot].numpy())[: len(contents)] == contents
    assert worker.statistics().failed_jobs == (1 if calls >= fault_at else 0)


def check_job(
    job: Job,
    before: list[np.ndarray],
    cache: CanonicalKVCache,
    worker: CPUTransferWorker,
    served: dict,
) -> None:
    """A successful job copied everything; record which slots it made hits."""
    slots = worker.slots.numpy().copy()
    loop = PlainLoop(FAULT_WORLD, before, lambda _group, slot: slots[slot])
    loop.run(job)
    np.testing.assert_array_equal(worker.slots.numpy(), slots)
    assert_same(cache, loop.rows)
    if job.direction is STORE:
        sizes = [48, 24]
        for group, ids in enumerate(job.lower_ids):
            served.update({slot: bytes(slots[slot, : sizes[group]]) for slot in ids})


@pytest.mark.parametrize("device", DEVICES)
def test_a_slow_copy_is_not_finished_before_its_last_chunk(device: str) -> None:
    """Bandwidth may be limited chunk by chunk.

    A block of the job becomes a hit only when all of them are copied.
    """
    chunks: list[int] = []
    before_last, go_on = threading.Event(), threading.Event()

    def pace(chunk_bytes: int) -> None:
        chunks.append(chunk_bytes)
        if len(chunks) == 3:
            before_last.set()
            go_on.wait(DEADLINE_S)

    cache = WORLD.cache(device)
    worker = CPUTransferWorker(cache, 4, WORLD.k, TransferOptions(staging_bytes=48, pace=pace))
    worker.submit(
        TransferJob(1, STORE, gpu([1, 2, 3, 4, 5], [4, 1], [0, 0]), CPULoadStoreSpec([3, 1, 0]))
    )
    assert before_last.wait(DEADLINE_S)
    assert worker.get_finished() == []
    assert worker.statistics().queued_jobs == 1
    go_on.set()
    (result,) = results_of(worker, [1])
    worker.shutdown()
    assert (result.success, result.transferred_bytes) == (True, 120)
    assert chunks == [48, 48, 24]


@pytest.mark.parametrize("device", DEVICES)
def test_a_copy_that_breaks_off_between_chunks_fails_the_job(device: str) -> None:
    """Its first blocks are copied, but must not be served."""
    budget = iter([None])

    def pace(_: int) -> None:
        next(budget)  # the second chunk finds none

    worker = CPUTransferWorker(
        WORLD.cache(device), 4, WORLD.k, TransferOptions(staging_bytes=48, pace=pace)
    )
    worker.submit(
        TransferJob(1, STORE, gpu([1, 2, 3, 4], [4, 0], [0, 0]), CPULoadStoreSpec([3, 1]))
    )
    (result,) = results_of(worker, [1])
    worker.shutdown()
    assert (result.success, result.transferred_bytes) == (False, 0)
    assert worker.slots[3].any()
    assert not worker.slots[1].any()


def test_copies_let_other_threads_run() -> None:
    """The engine's scheduler shares the interpreter with the transfer thread."""
    cache = CanonicalKVCache(
        [torch.zeros((64, 1 << 20), dtype=torch.int8)], [[DataRef(0, 1 << 20)]]
    )
    worker = CPUTransferWorker(cache, 64, options=TransferOptions(staging_bytes=64 << 20))
    # One chunk, so one call into numpy: were the interpreter locked in it, this loop would not turn
    # before its end.
    worker.submit(
        TransferJob(
            1, STORE, gpu(list(range(64)), [64], [0]), CPULoadStoreSpec(list(reversed(range(64))))
        )
    )
    turns = 0
    while not (results := worker.get_finished()):
        turns += 1
    worker.shutdown()
    assert results[0].success
    assert turns > 100


CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
A_WHILE = 200_000_000
"""Cycles that a kernel sleeps: a tenth of a second, far longer than a copy."""


@CUDA
@pytest.mark.parametrize("staging_bytes", [64 << 10, 64 << 20])
def test_a_store_waits_for_what_the_model_had_queued(staging_bytes: int) -> None:
    """The step that computes a block is still running when its store is submitted."""
    cache = CanonicalKVCache(
        [torch.zeros((64, 64 << 10), dtype=torch.int8, device="cuda")], [[DataRef(0, 64 << 10)]]
    )
    worker = CPUTransferWorker(cache, 64, options=TransferOptions(staging_bytes=staging_bytes))
    torch.cuda._sleep(A_WHILE)
    cache.tensors[0].fill_(7)
    worker.submit(
        TransferJob(
            1, STORE, gpu(list(range(64)), [64], [0]), CPULoadStoreSpec(list(reversed(range(64))))
        )
    )
    assert worker.get_finished() == []
    (result,) = results_of(worker, [1])
    worker.shutdown()
    assert result.success
    assert bool((worker.slots == 7).all())


@CUDA
@pytest.mark.parametrize(
    "slots", [list(range(64)), list(reversed(range(64)))], ids=["consecutive", "scattered"]
)
def test_a_load_does_not_overtake_what_still_reads_its_blocks(slots: list[int]) -> None:
    """The step in flight may still read freed blocks.

    Work queued after the load's end sees its bytes.
    """
    cache = CanonicalKVCache(
        [torch.ones((64, 64 << 10), dtype=torch.int8, device="cuda")], [[DataRef(0, 64 << 10)]]
    )
    worker = CPUTransferWorker(cache, 64)
    worker.slots.fill_(5)
    torch.cuda._sleep(A_WHILE)
    before = cache.tensors[0].clone()
    worker.submit(TransferJob(1, LOAD, gpu(list(range(64)), [64], [0]), CPULoadStoreSpec(slots)))
    (result,) = results_of(worker, [1])
    after = cache.tensors[0].clone()
    worker.shutdown()
    assert result.success
    assert bool((before == 1).all())
    assert bool((after == 5).all())


@CUDA
def test_the_slots_of_a_cache_on_a_gpu_are_pinned() -> None:
    """Otherwise every copy over the bus goes through a buffer of the driver, and waits."""
    worker = CPUTransferWorker(WORLD.cache("cuda"), 4, WORLD.k)
    worker.shutdown()
    assert worker.slots.is_pinned()
