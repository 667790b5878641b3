"""Plans of jobs over many groups, large offloaded blocks, and groups of different row counts."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from offload.base import CPULoadStoreSpec, Direction, GPULoadStoreSpec, TransferJob
from offload.cpu.worker import CPUTransferWorker
from offload.errors import CacheConfigError, TransferError
from offload.transfer.canonical import DataRef
from offload.transfer.plan import Chunk, TransferGeometry
from offload.transfer.runner import TransferOptions
from tests.offload.transfer.world import (
    Job,
    PlainLoop,
    World,
    assert_same,
    copies_of,
    results_of,
)

STORE, LOAD = Direction.STORE, Direction.LOAD
SLOTS = 120


def large_world(seed: int) -> World:
    """Up to 200 groups over tensors of different row counts; up to 16 blocks per offloaded one."""
    rng = random.Random(seed)
    tensors = [
        (rng.randrange(20, 400), rng.randrange(1, 40), rng.choice([0, 8]))
        for _ in range(rng.randrange(1, 9))
    ]
    refs = []
    for _ in range(rng.choice([1, 4, 7, 40, 200])):
        used = rng.sample(range(len(tensors)), rng.randrange(1, min(3, len(tensors)) + 1))
        refs.append([DataRef(index, rng.randrange(1, tensors[index][1] + 1)) for index in used])
    return World(tensors, refs, [rng.randrange(1, 17) for _ in refs], seed)


def rows_of(world: World, group: int) -> int:
    """How many block ids a group has."""
    return min(world.tensors[ref.tensor_idx][0] for ref in world.refs[group])


def large_job(world: World, rng: random.Random) -> Job:
    """A job that fits, with every group that the slots and rows have room for."""
    direction = rng.choice([STORE, LOAD])
    free_slots = rng.sample(range(SLOTS), SLOTS)
    taken = [set[int]() for _ in world.tensors]
    job = Job(direction, [], [], [])
    for group, k in enumerate(world.k):
        count = rng.choice([0, 1, 1, 2, 3])
        lead = rng.randrange(k) if direction is LOAD else 0
        size = count * k - lead - (rng.randrange(k) if direction is LOAD else 0)
        used = set[int]().union(*(taken[ref.tensor_idx] for ref in world.refs[group]))
        rows = [row for row in range(rows_of(world, group)) if row not in used]
        touched = -(-(lead + size) // k) if size > 0 else 0
        if size < 1 or size > len(rows) or touched > len(free_slots):
            size = touched = 0
        ids = rng.sample(rows, size)
        for ref in world.refs[group]:
            taken[ref.tensor_idx].update(ids)
        job.block_ids.append(ids)
        job.block_indices.append(lead + k * rng.randrange(100))
        job.lower_ids.append([free_slots.pop() for _ in range(touched)])
    return job


@pytest.mark.parametrize("seed", range(40))
def test_a_job_over_many_groups_copies_what_a_plain_loop_copies(seed: int) -> None:
    """Models have up to dozens of groups, and offloaded blocks of many GPU blocks; each group's
    share of a job must land in its own rows and slots."""
    rng, world = random.Random(seed), large_world(seed)
    cache = world.cache("cpu")
    options = TransferOptions(rng.choice([1, 1000, 1 << 20]), rng.choice([1, 3]))
    worker = CPUTransferWorker(cache, SLOTS, world.k, options)
    slots = worker.slots.numpy().copy()
    loop = PlainLoop(world, copies_of(cache), lambda _group, slot: slots[slot])
    jobs = [large_job(world, rng) for _ in range(4)]
    for number, job in enumerate(jobs):
        lower = CPULoadStoreSpec([slot for ids in job.lower_ids for slot in ids])
        worker.submit(TransferJob(number, job.direction, job.gpu, lower))
        loop.run(job)
    results = results_of(worker, range(len(jobs)))
    worker.shutdown()
    assert all(result.success for result in results)
    assert [result.transferred_bytes for result in results] == loop.copied_bytes
    np.testing.assert_array_equal(worker.slots.numpy(), slots)
    assert_same(cache, loop.rows)


def test_the_random_jobs_are_worth_their_name() -> None:
    """Many groups in one job, many blocks in one offloaded block, and starts inside of one."""
    seen: Counter[str] = Counter()
    for seed in range(40):
        rng, world = random.Random(seed), large_world(seed)
        job = large_job(world, rng)
        seen["groups in one job"] = max(seen["groups in one job"], sum(map(bool, job.block_ids)))
        for ids, index, k in zip(job.block_ids, job.block_indices, world.k, strict=True):
            seen["blocks in an offloaded block"] = max(
                seen["blocks in an offloaded block"], k if ids else 0
            )
            seen["starts inside"] += bool(ids and index % k)
    assert seen["groups in one job"] > 50
    assert seen["blocks in an offloaded block"] == 16
    assert seen["starts inside"] > 50


# --- groups of different row counts ---------------------------------------------------------------

ROWS = (30, 10, 20)
UNEQUAL = World(
    [(rows, 8, 0) for rows in ROWS],
    [[DataRef(0, 8)], [DataRef(1, 8)], [DataRef(2, 8)], [DataRef(0, 4), DataRef(2, 4)]],
    [1, 1, 1, 1],
    seed=1,
)
LIMITS = (30, 10, 20, 20)
"""Block ids that each group has; the last lies in two tensors."""


@pytest.mark.parametrize("direction", [STORE, LOAD])
@pytest.mark.parametrize("group", range(4))
def test_a_groups_block_ids_are_bounded_by_its_own_rows(direction: Direction, group: int) -> None:
    """Whatever the others have: its last row fits, and one behind it is refused at submission, not
    in the copying thread."""
    geometry = TransferGeometry(UNEQUAL.cache("cpu"))
    limit = LIMITS[group]

    def plan(block_id: int) -> None:
        ids = [1, 2, 3, 4]  # of the other groups, within the rows of all
        ids[group] = block_id
        geometry.plan(direction, GPULoadStoreSpec(ids, [1] * 4, [0] * 4), 4, 1 << 20)

    plan(limit - 1)
    for block_id in (limit, -1):
        with pytest.raises(TransferError, match=f"of group {group} must be in 0 to {limit - 1}$"):
            plan(block_id)


@pytest.mark.parametrize("ids", [(-1, 1), (1, -1), (30, 1), (1, 30)])
def test_one_id_outside_its_group_refuses_the_job_whatever_the_others_are(
    ids: tuple[int, int],
) -> None:
    """A negative id would be read from the end of the tensor."""
    geometry = TransferGeometry(UNEQUAL.cache("cpu"))
    spec = GPULoadStoreSpec([*ids, 2, 3, 4], [2, 1, 1, 1], [0] * 4)
    with pytest.raises(TransferError, match=r"of group 0 must be in 0 to 29$"):
        geometry.plan(STORE, spec, 5, 1 << 20)


def test_a_refused_job_of_unequal_groups_touches_nothing() -> None:
    """The next job runs as if it had never been."""
    cache = UNEQUAL.cache("cpu")
    worker = CPUTransferWorker(cache, 4, UNEQUAL.k)
    rows, slots = copies_of(cache), worker.slots.numpy().copy()
    with pytest.raises(TransferError, match="block ids 10 to 10 of group 1"):
        worker.submit(
            TransferJob(
                1,
                LOAD,
                GPULoadStoreSpec([29, 10, 19], [1, 1, 1, 0], [0] * 4),
                CPULoadStoreSpec([0, 1, 2]),
            )
        )
    gpu = GPULoadStoreSpec([29, 9, 19], [1, 1, 1, 0], [0] * 4)
    worker.submit(TransferJob(2, STORE, gpu, CPULoadStoreSpec([0, 1, 2])))
    assert [(each.job_id, each.success) for each in results_of(worker, [2])] == [(2, True)]
    worker.shutdown()
    assert_same(cache, rows)
    for slot, (tensor, row) in enumerate([(0, 29), (1, 9), (2, 19)]):
        slots[slot, :8] = rows[tensor][row]
    np.testing.assert_array_equal(worker.slots.numpy(), slots)


# --- chunks ---------------------------------------------------------------------------------------


def test_a_job_is_cut_where_the_drawing_of_the_module_says() -> None:
    """GPU blocks 3 to 9, four to an offloaded block, in chunks of two offloaded blocks."""
    world = World([(20, 8, 0)], [[DataRef(0, 8)]], [4], seed=1)
    geometry = TransferGeometry(world.cache("cpu"), world.k)
    spec = GPULoadStoreSpec(list(range(7)), [7], [3])
    plan = geometry.plan(LOAD, spec, 3, staging_bytes=2 * 4 * 8 + 1)
    assert plan.chunks == [
        Chunk(0, slice(0, 2), pages=slice(3, 8), ids=slice(0, 5), gpu_bytes=40),
        Chunk(0, slice(2, 3), pages=slice(0, 2), ids=slice(5, 7), gpu_bytes=16),
    ]
    assert plan.gpu_bytes == 7 * 8


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [[2, 0], [0, 2], [-1, 1], [1]])
def test_each_group_has_a_positive_number_of_blocks_per_offloaded_block(k: list[int]) -> None:
    """A zero in any place would divide by it in the first job."""
    world = World([(9, 8, 0)], [[DataRef(0, 8)], [DataRef(0, 4)]], [1, 1], seed=1)
    with pytest.raises(CacheConfigError, match="one positive number for each of 2 groups"):
        TransferGeometry(world.cache("cpu"), k)


@pytest.mark.parametrize(("size", "index"), [(4, 1), (3, 0), (2, 3)])
def test_a_store_of_a_part_of_an_offloaded_block_is_refused(size: int, index: int) -> None:
    """Whether its start or its length is the part; a load of it fits."""
    world = World([(9, 8, 0)], [[DataRef(0, 8)]], [4], seed=1)
    geometry = TransferGeometry(world.cache("cpu"), world.k)
    spec = GPULoadStoreSpec(list(range(size)), [size], [index])
    (count,) = geometry.lower_counts(spec)
    with pytest.raises(TransferError, match="must cover whole offloaded blocks of 4"):
        geometry.plan(STORE, spec, count, 1 << 20)
    assert geometry.plan(LOAD, spec, count, 1 << 20).gpu_bytes == size * 8


def test_a_row_that_two_groups_share_is_loaded_once() -> None:
    """Also if they share one of several tensors; rows of other tensors may be equal."""
    world = World(
        [(9, 8, 0)] * 3,
        [[DataRef(0, 8), DataRef(1, 8)], [DataRef(1, 4)], [DataRef(2, 8)]],
        [1, 1, 1],
        seed=1,
    )
    geometry = TransferGeometry(world.cache("cpu"))
    with pytest.raises(TransferError, match=r"groups \[0, 1\]: a block id of tensor 1"):
        geometry.plan(LOAD, GPULoadStoreSpec([3, 3, 3], [1, 1, 1], [0, 0, 0]), 3, 1 << 20)
    geometry.plan(LOAD, GPULoadStoreSpec([3, 4, 3], [1, 1, 1], [0, 0, 0]), 3, 1 << 20)
    geometry.plan(STORE, GPULoadStoreSpec([3, 3, 3], [1, 1, 1], [0, 0, 0]), 3, 1 << 20)
