"""Copies between GPU blocks and files, compared byte for byte with a plain loop.

They break off as disks and crashes make them.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload.base import (
    CPULoadStoreSpec,
    Direction,
    FileLoadStoreSpec,
    GPULoadStoreSpec,
    LookupResult,
    OffloadKey,
    RequestContext,
    TransferJob,
    TransferResult,
)
from offload.errors import CacheConfigError, TransferError
from offload.fs.block_file import relative_path
from offload.fs.manager import FileOffloadingManager
from offload.fs.store import BlockStore
from offload.fs.worker import FileTransferWorker
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
    key_of,
    results_of,
    worlds,
)

STORE, LOAD = Direction.STORE, Direction.LOAD
KEYS = 6
CONTEXT = RequestContext("r")


def sizes_of(world: World) -> list[int]:
    return [
        k * sum(ref.page_bytes for ref in refs) for k, refs in zip(world.k, world.refs, strict=True)
    ]


def keys_of(job: Job) -> list[OffloadKey]:
    return [key_of(group, number) for group, ids in enumerate(job.lower_ids) for number in ids]


@pytest.mark.parametrize("device", DEVICES)
@given(data=st.data(), world=worlds(), staging_bytes=st.sampled_from([1, 100, 1 << 20]))
@settings(
    max_examples=80,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_random_jobs_copy_what_a_plain_loop_copies(
    device: str,
    data: st.DataObject,
    world: World,
    staging_bytes: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Every layout, alignment and chunking.

    What one job stores the next one loads, without a wait in between.
    """
    cache = world.cache(device)
    store = BlockStore(tmp_path_factory.mktemp("tier"), sizes_of(world))
    worker = FileTransferWorker(cache, store, world.k, 3, TransferOptions(staging_bytes))
    files: dict[tuple[int, int], np.ndarray] = {}
    loop = PlainLoop(
        world,
        copies_of(cache),
        lambda group, number: files.setdefault(
            (group, number), np.zeros(sizes_of(world)[group], np.int8)
        ),
    )
    number_of_jobs = data.draw(st.integers(1, 6))
    for number in range(number_of_jobs):
        stored = [[n for g, n in sorted(files) if g == group] for group in range(len(world.k))]
        job = data.draw(jobs(world, KEYS, stored))
        worker.submit(TransferJob(number, job.direction, job.gpu, FileLoadStoreSpec(keys_of(job))))
        loop.run(job)
    results = results_of(worker, range(number_of_jobs))
    worker.shutdown()
    assert [(result.job_id, result.success) for result in results] == [
        (n, True) for n in range(number_of_jobs)
    ]
    assert [result.transferred_bytes for result in results] == loop.copied_bytes
    assert_same(cache, loop.rows)
    for (group, number), contents in files.items():
        payload = bytearray(len(contents))
        store.read(key_of(group, number), memoryview(payload))
        assert bytes(payload) == contents.tobytes()
    shutil.rmtree(store.root)


WORLD = World(
    [(16, 8, 0), (16, 24, 0)], [[DataRef(0, 8), DataRef(1, 16)], [DataRef(1, 24)]], [2, 1], seed=1
)


@pytest.fixture
def store(tmp_path: Path) -> BlockStore:
    return BlockStore(tmp_path / "tier", sizes_of(WORLD))


def gpu(ids: list[int], sizes: list[int], indices: list[int]) -> GPULoadStoreSpec:
    return GPULoadStoreSpec(ids, sizes, indices)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("direction", "gpu", "lower", "complaint"),
    [
        (
            STORE,
            gpu([1, 2], [2, 0], [0, 0]),
            CPULoadStoreSpec([0]),
            "CPULoadStoreSpec must be a FileLoadStoreSpec",
        ),
        (
            STORE,
            gpu([1, 2], [2, 0], [0, 0]),
            [key_of(1, 0)],
            r"keys must be listed group by group, \[1, 0\] of each group",
        ),
        (STORE, gpu([1, 2], [2, 0], [0, 0]), [key_of(9, 0)], "a key of group 9"),
        (STORE, gpu([1, 2], [2, 0], [0, 0]), [], r"0 offloaded blocks must be 1"),
        (
            STORE,
            gpu([1, 2, 3, 4], [4, 0], [0, 0]),
            [key_of(0, 0)] * 2,
            "2 keys, 1 of them different",
        ),
        (STORE, gpu([1], [1, 0], [0, 0]), [key_of(0, 0)], "must cover whole offloaded blocks of 2"),
        (LOAD, gpu([3, 3], [2, 0], [0, 0]), [key_of(0, 0)], "is named twice"),
        (
            LOAD,
            gpu([16], [0, 1], [0, 0]),
            [key_of(1, 0)],
            "block ids 16 to 16 of group 1 must be in 0 to 15",
        ),
    ],
)
def test_a_job_that_does_not_fit_is_refused_and_touches_nothing(
    device: str,
    store: BlockStore,
    direction: Direction,
    gpu: GPULoadStoreSpec,
    lower: CPULoadStoreSpec | list[OffloadKey],
    complaint: str,
) -> None:
    """Its error must show where it is submitted, and no file may be written."""
    cache = WORLD.cache(device)
    worker = FileTransferWorker(cache, store, WORLD.k)
    before = copies_of(cache)
    spec = lower if isinstance(lower, CPULoadStoreSpec) else FileLoadStoreSpec(lower)
    with pytest.raises(TransferError, match=complaint):
        worker.submit(TransferJob(1, direction, gpu, spec))
    worker.shutdown()
    assert worker.get_finished() == []
    assert_same(cache, before)
    assert store.scan() == []


@pytest.mark.parametrize(
    ("hashes", "complaint"),
    [((), "0 block hashes of a block of group 0"), ([[b"x"]] * 2, "2 block_hashes must be one")],
)
def test_a_store_without_the_hashes_that_files_keep_is_refused(
    tmp_path: Path, hashes: Sequence[Sequence[bytes]], complaint: str
) -> None:
    """Where it is submitted, not in the copying thread."""
    store = BlockStore(tmp_path, sizes_of(WORLD), blocks_per_offloaded_block=WORLD.k)
    worker = FileTransferWorker(WORLD.cache("cpu"), store, WORLD.k)
    spec = FileLoadStoreSpec([key_of(0, 1)], hashes)
    with pytest.raises(TransferError, match=complaint):
        worker.submit(TransferJob(1, STORE, gpu([1, 2], [2, 0], [0, 0]), spec))
    worker.shutdown()
    assert store.scan() == []


def test_a_directory_for_other_sizes_is_refused(tmp_path: Path) -> None:
    """At the start of the engine."""
    with pytest.raises(
        CacheConfigError,
        match=r"payload_bytes \[48, 25\] must be the cache's offloaded blocks, \[48, 24\]",
    ):
        FileTransferWorker(WORLD.cache("cpu"), BlockStore(tmp_path / "one", [48, 25]), WORLD.k)
    with pytest.raises(CacheConfigError, match="io_threads 0 must be at least 1"):
        FileTransferWorker(
            WORLD.cache("cpu"), BlockStore(tmp_path / "other", [48, 24]), WORLD.k, io_threads=0
        )


@pytest.mark.parametrize("device", DEVICES)
def test_a_load_of_a_damaged_file_fails_and_leaves_the_chunks_blocks_alone(
    device: str, store: BlockStore
) -> None:
    """Only verified bytes reach a GPU block."""
    cache = WORLD.cache(device)
    worker = FileTransferWorker(cache, store, WORLD.k)
    keys = [key_of(0, 0), key_of(1, 0)]
    worker.submit(TransferJob(1, STORE, gpu([1, 2, 3], [2, 1], [0, 0]), FileLoadStoreSpec(keys)))
    worker.wait([1])
    path = store.root / relative_path(keys[0])
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    before = copies_of(cache)
    worker.submit(TransferJob(2, LOAD, gpu([4, 5], [2, 0], [0, 0]), FileLoadStoreSpec(keys[:1])))
    worker.submit(TransferJob(3, LOAD, gpu([6], [0, 1], [0, 0]), FileLoadStoreSpec(keys[1:])))
    worker.wait([2, 3])
    assert [(r.job_id, r.success, r.transferred_bytes) for r in worker.get_finished()] == [
        (1, True, 72),
        (2, False, 0),
        (3, True, 24),
    ]
    worker.shutdown()
    before[1][6] = before[1][3]
    assert_same(cache, before)
    assert not path.exists()


def test_a_failed_job_is_reported_only_when_none_of_its_files_is_touched_any_more(
    store: BlockStore,
) -> None:
    """The manager deletes the job's files on the report.

    A write still in progress would bring one back unnoticed.
    """
    cache = CanonicalKVCache([WORLD.cache("cpu").tensors[1]], [[DataRef(0, 24)]])
    store = BlockStore(store.root.parent / "one", [24])
    worker = FileTransferWorker(cache, store, io_threads=4)
    keys = [key_of(0, number) for number in range(16)]
    blocker = (store.root / relative_path(keys[0])).parent
    blocker.parent.mkdir()
    blocker.write_text("no directory")
    for job_id in range(20):
        worker.submit(
            TransferJob(job_id, STORE, gpu(list(range(16)), [16], [0]), FileLoadStoreSpec(keys))
        )
        (result,) = results_of(worker, [job_id])
        written = sorted(store.root.rglob("*.block"))
        assert not result.success
        assert len(written) == 15
        assert list(store.root.rglob("*.tmp")) == []
        for path in written:
            path.unlink()
    worker.shutdown()


def test_shutdown_finishes_what_was_queued(store: BlockStore) -> None:
    """Stored blocks survive the engine, so the last ones should."""
    worker = FileTransferWorker(WORLD.cache("cpu"), store, WORLD.k)
    for number in range(5):
        keys = [key_of(0, number)]
        worker.submit(
            TransferJob(number, STORE, gpu([1, 2], [2, 0], [0, 0]), FileLoadStoreSpec(keys))
        )
    worker.shutdown()
    worker.shutdown()
    assert len(store.scan()) == 5
    assert [result.success for result in worker.get_finished()] == [True] * 5
    with pytest.raises(TransferError, match="was shut down"):
        worker.submit(
            TransferJob(9, STORE, gpu([1, 2], [2, 0], [0, 0]), FileLoadStoreSpec([key_of(0, 9)]))
        )


class Engine:
    """Manager and worker as a connector drives them.

    A block's bytes identify the store of its key that wrote them.
    """

    def __init__(self, root: Path, device: str) -> None:
        self.cache = CanonicalKVCache(WORLD.cache(device).tensors[1:], [[DataRef(0, 24)]])
        self.store = BlockStore(root, [24])
        self.manager = FileOffloadingManager(self.store, 4 * self.store.file_bytes(key_of(0, 0)))
        self.fault = threading.Event()
        self.worker = FileTransferWorker(
            self.cache, self.store, options=TransferOptions(staging_bytes=24, pace=self.pace)
        )
        self.jobs: dict[int, tuple[Direction, list[OffloadKey], list[int]]] = {}
        self.submitted: dict[OffloadKey, int] = {}
        self.versions: dict[OffloadKey, int] = {}
        self.free = list(range(16))
        self.stamp = 0

    def pace(self, _: int) -> None:
        """Break off the next copy at its next chunk, if requested."""
        if self.fault.is_set():
            self.fault.clear()
            raise RuntimeError("the copy broke off")

    def store_blocks(self, numbers: Sequence[int]) -> None:
        output = self.manager.prepare_store([key_of(0, number) for number in numbers], CONTEXT)
        if output is None or not output.keys_to_store or len(output.keys_to_store) > len(self.free):
            if output is not None:
                self.manager.complete_store(output.keys_to_store, CONTEXT, success=False)
            return
        self.stamp += 1
        blocks = [self.free.pop() for _ in output.keys_to_store]
        for block in blocks:
            self.cache.tensors[0][block] = self.stamp % 100
        self.submit(STORE, list(output.keys_to_store), blocks)

    def load_blocks(self, numbers: Sequence[int]) -> None:
        keys = [key_of(0, number) for number in dict.fromkeys(numbers)]
        hits = [key for key in keys if self.manager.lookup(key, CONTEXT) is LookupResult.HIT][
            : len(self.free)
        ]
        if hits:
            self.manager.prepare_load(hits, CONTEXT)
            blocks = [self.free.pop() for _ in hits]
            self.submit(LOAD, hits, blocks)

    def submit(self, direction: Direction, keys: list[OffloadKey], blocks: list[int]) -> None:
        job_id = len(self.jobs)
        self.jobs[job_id] = (direction, keys, blocks)
        self.worker.submit(
            TransferJob(job_id, direction, gpu(blocks, [len(blocks)], [0]), FileLoadStoreSpec(keys))
        )
        if direction is STORE:
            self.submitted.update(dict.fromkeys(keys, self.stamp))

    def finish(self) -> None:
        for result in self.worker.get_finished():
            self.finish_job(result)

    def finish_job(self, result: TransferResult) -> None:
        direction, keys, blocks = self.jobs[result.job_id]
        self.free += blocks
        if direction is STORE:
            self.manager.complete_store(keys, CONTEXT, result.success)
            if result.success:
                self.versions.update({key: self.submitted[key] for key in keys})
            return
        if result.success:
            for key, block in zip(keys, blocks, strict=True):
                row = self.cache.tensors[0][block].cpu()
                assert bool((row == self.versions[key] % 100).all())
        self.manager.complete_load(keys, CONTEXT, result.success)

    def damage(self, number: int, how: str) -> None:
        path = self.store.root / relative_path(key_of(0, number))
        if not path.exists():
            return
        if how == "truncate":
            path.write_bytes(path.read_bytes()[:-1])
        elif how == "flip":
            contents = bytearray(path.read_bytes())
            contents[-3] ^= 4
            path.write_bytes(contents)
        else:
            path.unlink()


STEPS = st.one_of(
    st.tuples(st.just("store_blocks"), st.lists(st.integers(0, 7), min_size=1, max_size=3)),
    st.tuples(st.just("load_blocks"), st.lists(st.integers(0, 7), min_size=1, max_size=3)),
    st.tuples(st.just("finish")),
    st.tuples(st.just("wait")),
    st.tuples(st.just("reset")),
    st.tuples(st.just("fault")),
    st.tuples(
        st.just("damage"), st.integers(0, 7), st.sampled_from(["truncate", "flip", "delete"])
    ),
)


@pytest.mark.parametrize("device", DEVICES)
@given(steps=st.lists(STEPS, min_size=5, max_size=40))
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_breaks_a_load_that_succeeds_brings_the_last_completed_store(
    device: str, steps: list[tuple], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Broken copies, damaged, cut and vanished files, evictions and resets between queued jobs.

    Only blocks of the last completed store are served.
    """
    engine = Engine(tmp_path_factory.mktemp("tier"), device)
    for name, *arguments in steps:
        if name == "fault":
            engine.fault.set()
        elif name == "reset":
            engine.manager.reset()
        elif name == "wait":
            engine.worker.wait(engine.jobs)
            engine.finish()
        else:
            getattr(engine, name)(*arguments)
    engine.worker.shutdown()
    engine.finish()
    assert len(engine.free) == 16
    statistics = engine.manager.statistics()
    assert (statistics.loading_blocks, statistics.pending_blocks, statistics.doomed_blocks) == (
        0,
        0,
        0,
    )
    on_disk = {path.name for path in engine.store.root.rglob("*.block")}
    hits = {n for n in range(8) if engine.manager.lookup(key_of(0, n), CONTEXT) is LookupResult.HIT}
    assert on_disk <= {Path(relative_path(key_of(0, n))).name for n in hits}
    engine.store.close()
    shutil.rmtree(engine.store.root)
