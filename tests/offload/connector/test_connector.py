"""The connector with real tiers: whatever is loaded is what was computed, however copies end."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvevents.events import CPU, STORAGE, GroupIdx
from kvevents.layout import GroupKind
from offload.base import (
    CPULoadStoreSpec,
    Direction,
    LookupResult,
    OffloadKey,
    PrepareStoreOutput,
    RequestContext,
    TransferResult,
    pack_offload_key,
)
from offload.cache_manager import CacheManager
from offload.config import CacheConfig
from offload.connector.connector import OffloadingConnector
from offload.connector.store_plan import StoreScope
from offload.connector.tier import Tier
from offload.cpu.manager import CPUOffloadingManager
from offload.cpu.worker import CPUTransferWorker
from offload.errors import CacheConfigError, TierStateError
from offload.request import CacheRequest, RequestHasher
from offload.reuse_filter import ReuseFilter
from offload.transfer.runner import TransferOptions
from tests.support.cache_driver import CHAIN
from tests.support.cache_layouts import GROUPS, config_of, variants, with_blocks
from tests.support.cache_workload import CacheWorkload
from tests.support.offload_driver import OffloadDriver, TensorPages, TierUnderTest
from tests.support.offload_tiers import cpu_tier, disk_tier

CACHING = [(label, config) for label, config in variants() if config.enable_caching]


def sizes_for(config: CacheConfig, size: int) -> list[int]:
    """Offloaded blocks of *size* GPU blocks, where the kind allows it."""
    return [1 if group.kind is GroupKind.MAMBA else size for group in config.layout.groups]


def run(
    driver: OffloadDriver,
    seed: int | str,
    steps: int = 100,
    until: Callable[[], object] = lambda: True,
) -> Counter[str]:
    """A random workload until all copies have ended; the GPU loses all it cached again and again.

    How much happens in *steps* depends on how soon copies end: it goes on *until* the wanted has
    happened, within limits.
    """
    workload = CacheWorkload(driver, seed)
    for step in range(20 * steps):
        if step >= steps and until():
            break
        if step % 8 == 0:
            driver.cache.evict_blocks(range(1, driver.config.num_blocks))
        workload.step()
        workload.waiting += driver.came_back
        driver.came_back = []
    driver.drain()
    return driver.counts


@contextmanager
def shut_down(tiers: Sequence[TierUnderTest]) -> Iterator[None]:
    try:
        yield
    finally:
        for under_test in tiers:
            under_test.worker.shutdown()


# --- whatever is loaded is right ------------------------------------------------------------------


@pytest.mark.parametrize(("label", "config"), CACHING, ids=[label for label, _ in CACHING])
def test_what_comes_back_is_what_was_computed(label: str, config: CacheConfig) -> None:
    """Over every layout and several sizes of offloaded blocks.

    Pages, hits and events are checked in every step.
    """
    counts: Counter[str] = Counter()
    for size, policy, scope in (
        (1, "lru", StoreScope.ALL),
        (2, "arc", StoreScope.PROMPT),
        (3, "lru", StoreScope.ALL),
    ):
        config = with_blocks(config, config.num_blocks // 2 + 10 * size)
        pages = TensorPages(config)
        tier = cpu_tier(pages, config, 100 * size, sizes_for(config, size), policy)
        driver = OffloadDriver(config, pages, [tier], f"{label} {size}", scope)
        with shut_down([tier]):
            # The last one goes on until at least one of them has loaded something.
            counts += run(
                driver,
                f"{label} {size}",
                until=lambda: size < 3 or counts["loaded"] or driver.counts["loaded"],  # noqa: B023
            )
    assert counts["loaded"] > 0


@pytest.mark.parametrize(
    "name", ["full", "full and two windows", "every kind", "blocks of three sizes"]
)
def test_two_tiers_fill_one_prefix_together(name: str, tmp_path: Path) -> None:
    """A prefix may lie in parts on the GPU, in memory and on disk.

    Its copies are jobs of several workers.
    """
    config = config_of(GROUPS[name], num_blocks=25 * len(GROUPS[name]), max_in_flight_tokens=32)
    pages = TensorPages(config)
    memory = cpu_tier(pages, config, 10 * len(GROUPS[name]), sizes_for(config, 2))
    disk, store = disk_tier(pages, config, tmp_path, 400_000, sizes_for(config, 1))
    driver = OffloadDriver(config, pages, [memory, disk], name)
    with shut_down([memory, disk]):
        counts = run(
            driver,
            name,
            200,
            lambda: driver.counts["loaded"] > 3 and driver.loaded_from >= {CPU, STORAGE},
        )
    store.close()
    assert counts["loaded"] > 3
    assert driver.loaded_from >= {CPU, STORAGE}


@pytest.mark.parametrize("size", [1, 2])
def test_blocks_on_disk_serve_the_next_process(size: int, tmp_path: Path) -> None:
    """A restart empties the GPU, not the disk.

    What the disk still holds is reported and can be loaded.
    """
    config = config_of(GROUPS["full and a window"], num_blocks=60, max_in_flight_tokens=32)
    hits = []
    for process in range(3):
        pages = TensorPages(config)
        disk, store = disk_tier(pages, config, tmp_path, 1_000_000, sizes_for(config, size))
        driver = OffloadDriver(config, pages, [disk], process)
        driver.patience = 1.0
        driver.end_step()
        with shut_down([disk]):
            assert bool(disk.present) is (process > 0)
            run(driver, "the same prompts", 40)
        hits.append(driver.counts["loaded"])
        store.close()
    assert min(hits[1:]) > 0


# --- copies that fail or take their time ----------------------------------------------------------


class Faults:
    """Fails a share of all chunks in the copying thread, by way of a worker's `pace`."""

    def __init__(self, share: float) -> None:
        self._rng = random.Random(share)
        self._share = share

    def __call__(self, chunk_bytes: int) -> None:
        if self._rng.random() < self._share:
            raise OSError(f"a copy of {chunk_bytes} bytes fails")


@pytest.mark.parametrize(
    "name", ["full", "full and two windows", "full and states", "blocks of three sizes"]
)
@pytest.mark.parametrize("share", [0.05, 0.2])
def test_failed_copies_are_never_served(name: str, share: float) -> None:
    """A failed store leaves nothing behind.

    A failed load sends its request back to the start, and the bad blocks are gone.
    """
    config = config_of(GROUPS[name], num_blocks=30 * len(GROUPS[name]), max_in_flight_tokens=32)
    pages = TensorPages(config)
    tier = cpu_tier(
        pages,
        config,
        200,
        sizes_for(config, 1),
        options=TransferOptions(staging_bytes=64, pace=Faults(share)),
    )
    driver = OffloadDriver(config, pages, [tier], name)
    with shut_down([tier]):
        counts = run(driver, name, 200, lambda: driver.counts["failed loads"])
    statistics = driver.connector.statistics()
    assert statistics.store.failed_jobs > 0
    assert counts["failed loads"] > 0
    assert statistics.jobs_in_flight == statistics.requests_loading == 0


def test_files_that_rot_are_never_served(tmp_path: Path) -> None:
    """Bits flip and files get cut: the checksum fails the load, and the request computes."""
    config = config_of(GROUPS["full and a window"], num_blocks=50, max_in_flight_tokens=32)
    pages = TensorPages(config)
    disk, store = disk_tier(pages, config, tmp_path, 1_000_000, sizes_for(config, 1))
    driver, rng = OffloadDriver(config, pages, [disk], 1), random.Random(1)
    workload = CacheWorkload(driver, 1)
    with shut_down([disk]):
        for _ in range(150):
            workload.step()
            workload.waiting += driver.came_back
            driver.came_back = []
            driver.drain()
            spoil(
                rng.choice(
                    [
                        path
                        for path in tmp_path.rglob("*")
                        if path.is_file() and path.name != "manifest.json"
                    ]
                    or [None]
                ),
                rng,
            )
        driver.drain()
    store.close()
    assert driver.counts["failed loads"] > 0
    assert driver.counts["loaded"] > 0


def spoil(path: Path | None, rng: random.Random) -> None:
    """Flip a bit of a file's second half, or cut it there."""
    if path is None or path.stat().st_size < 64:
        return
    content = bytearray(path.read_bytes())
    place = rng.randrange(len(content) // 2, len(content))
    content[place] ^= 1 << rng.randrange(8)
    path.write_bytes(content[:place] if rng.random() < 0.3 else content)


def test_a_request_that_leaves_while_it_loads_gives_its_blocks_back_after_the_copy() -> None:
    """The copy still writes into them: given to another request, they would be overwritten."""
    config = config_of(GROUPS["full"], num_blocks=40)
    pages = TensorPages(config)
    tier = cpu_tier(pages, config, 100, [1])
    driver = OffloadDriver(config, pages, [tier], 1)
    with shut_down([tier]):
        job = computed_and_evicted(driver, list(range(40)))
        assert driver.admit(job, 8)
        free = driver.cache.pool.num_free_blocks
        driver.finish(job)
        assert driver.cache.pool.num_free_blocks == free
        driver.drain()
        assert driver.cache.pool.num_free_blocks == config.num_blocks - 1
        assert driver.counts["loaded"] == 0


def computed_and_evicted(driver: OffloadDriver, prompt: list[int]) -> object:
    """A new request for a prompt that only the tier holds."""
    job = driver.new(prompt)
    assert driver.admit(job, len(prompt))
    driver.patience = 1.0
    driver.end_step()
    driver.finish(job)
    driver.drain()
    assert driver.cache.reset()
    driver.end_step()
    return driver.new(prompt)


# --- small facts ----------------------------------------------------------------------------------


def test_a_prompt_is_hit_to_its_end_only_with_full_attention() -> None:
    """Its last token is computed again over the same block.

    With a window that token is left out.
    """
    for name, expected in (("full", 40), ("full and a window", 39)):
        config = config_of(GROUPS[name], num_blocks=80)
        pages = TensorPages(config)
        tier = cpu_tier(pages, config, 100, [1] * len(GROUPS[name]))
        driver = OffloadDriver(config, pages, [tier], 1)
        with shut_down([tier]):
            request = computed_and_evicted(driver, list(range(40))).request  # type: ignore[attr-defined]
            hit = driver.connector.find_external_hit(
                request, driver.cache.get_computed_blocks(request)
            )
            assert hit is not None
            assert (hit.num_tokens, hit.num_external_tokens) == (expected, expected)


def test_a_window_loads_only_what_its_hit_needs() -> None:
    """The rest would be copied for nothing, into blocks that do not exist."""
    config = config_of(GROUPS["full and a window"], num_blocks=80)
    pages = TensorPages(config)
    tier = cpu_tier(pages, config, 100, [1, 1])
    driver = OffloadDriver(config, pages, [tier], 1)
    with shut_down([tier]):
        request = computed_and_evicted(driver, list(range(40))).request  # type: ignore[attr-defined]
        hit = driver.connector.find_external_hit(request, driver.cache.get_computed_blocks(request))
    assert hit is not None
    blocks = [(piece.group_idx, piece.first_block) for piece in hit.pieces]
    assert blocks == [(0, index) for index in range(10)] + [(1, 7), (1, 8), (1, 9)]


def test_a_block_is_looked_up_once() -> None:
    """The rule asks first, and the copies are planned from its findings.

    A tier's statistics must not count that twice.
    """
    config = config_of(GROUPS["full"], num_blocks=80)
    pages = TensorPages(config)
    tier = cpu_tier(pages, config, 100, [1])
    driver = OffloadDriver(config, pages, [tier], 1)
    manager = tier.tier.manager
    assert isinstance(manager, CPUOffloadingManager)
    with shut_down([tier]):
        request = computed_and_evicted(driver, list(range(40))).request  # type: ignore[attr-defined]
        before = manager.statistics().counts.lookup_hits
        hit = driver.connector.find_external_hit(request, driver.cache.get_computed_blocks(request))
    assert hit is not None
    assert manager.statistics().counts.lookup_hits - before == len(hit.pieces) == 10


def test_only_the_prompt_is_stored_where_that_is_asked_for() -> None:
    """Responses recur only in conversations; elsewhere storing them is wasted."""
    stored = {}
    for scope in StoreScope:
        config = config_of(GROUPS["full"], num_blocks=80)
        pages = TensorPages(config)
        tier = cpu_tier(pages, config, 100, [1])
        driver = OffloadDriver(config, pages, [tier], 1, scope)
        with shut_down([tier]):
            job = driver.new(list(range(20)), 20)
            assert driver.admit(job, 20)
            while not job.is_done:
                driver.end_step()
                assert driver.advance(job, 1)
            driver.drain()
        stored[scope] = len(tier.present)
    assert stored == {StoreScope.PROMPT: 5, StoreScope.ALL: 9}


@pytest.mark.parametrize("size", [1, 4])
def test_a_block_that_turned_out_wrong_is_not_stored_within_a_larger_one(size: int) -> None:
    """It would come back as right."""
    config = config_of(GROUPS["full"], num_blocks=80)
    pages = TensorPages(config)
    tier = cpu_tier(pages, config, 100, [size])
    driver = OffloadDriver(config, pages, [tier], 1)
    with shut_down([tier]):
        job = driver.new(list(range(48)))
        assert driver.admit(job, 48)
        wrong = driver.cache.block_tables(job.request.request_id)[0][5]
        driver.cache.evict_blocks([wrong.block_id])
        driver.end_step()
        driver.finish(job)
        driver.drain()
        stored = [
            index
            for index in range(12)
            if tier.tier.find(
                GroupIdx(0), job.request.hash_at(4 * index + 4), RequestContext("other")
            )
        ]
    left_out = range(5 // size * size, (5 // size + 1) * size)
    assert stored == [index for index in range(12) if index not in left_out]


def test_two_tiers_of_one_medium_are_refused() -> None:
    """A removal from one would read as a removal from both."""
    config = config_of(GROUPS["full"])
    tiers = [Tier(CPUOffloadingManager(4), config.layout.groups) for _ in range(2)]
    with pytest.raises(CacheConfigError, match="medium of its own"):
        OffloadingConnector(CacheManager(config, 4), tiers)


def test_a_result_of_an_unknown_job_is_refused() -> None:
    """A worker that reports twice would free blocks twice."""
    config = config_of(GROUPS["full"])
    connector = OffloadingConnector(
        CacheManager(config, 4), [Tier(CPUOffloadingManager(4), config.layout.groups)]
    )
    with pytest.raises(TierStateError, match="job 7 is not in flight"):
        connector.complete([TransferResult(7, Direction.STORE, True, 0, 0.0)])


@pytest.mark.parametrize(("sizes", "name"), [([1, 1], "full"), ([0], "full"), (2, "states")])
def test_sizes_that_do_not_fit_the_groups_are_refused(
    sizes: Sequence[int] | int, name: str
) -> None:
    """Every block would be looked up under a wrong key."""
    with pytest.raises(CacheConfigError, match="must be"):
        Tier(CPUOffloadingManager(4, enable_events=True), GROUPS[name], sizes)


def test_blocks_of_several_gpu_blocks_need_the_managers_events() -> None:
    """Which GPU blocks they cover is learned from them: without, nothing would ever be loaded."""
    Tier(CPUOffloadingManager(4), GROUPS["full"], 1)
    with pytest.raises(CacheConfigError, match=r"CPU tier: .*\[2\] needs .* enable_events"):
        Tier(CPUOffloadingManager(4), GROUPS["full"], 2)


def test_a_block_evicted_and_offered_again_in_one_step_keeps_its_aliases() -> None:
    """The eviction's event is taken after the new offer: it must not take that one's aliases."""
    manager = CPUOffloadingManager(1, enable_events=True)
    tier = Tier(manager, GROUPS["full"], 2)
    context, (inner, own, other) = RequestContext("r"), (bytes([n]) * 32 for n in range(3))
    block, intruder = pack_offload_key(own, GroupIdx(0)), pack_offload_key(other, GroupIdx(0))
    assert tier.prepare_store({block: [inner, own]}, context)
    tier.complete_store([block], context, True)
    assert [event.block_hashes for event in tier.take_events()] == [[inner, own]]
    assert tier.prepare_store({intruder: [inner, other]}, context)
    tier.complete_store([intruder], context, False)
    assert tier.prepare_store({block: [inner, own]}, context)
    assert [event.block_hashes for event in tier.take_events()] == [[inner, own]]
    tier.complete_store([block], context, True)
    assert [event.block_hashes for event in tier.take_events()] == [[inner, own]]
    assert tier.find(GroupIdx(0), inner, context) == block


def test_what_is_in_flight_at_a_reset_leaves_no_aliases() -> None:
    """Its store never becomes a hit; what was noted for it would pile up."""
    tier = Tier(CPUOffloadingManager(4, enable_events=True), GROUPS["full"], 2)
    context, key = RequestContext("r"), pack_offload_key(bytes(32), GroupIdx(0))
    assert tier.prepare_store({key: [b"x" * 32, bytes(32)]}, context)
    tier.reset()
    tier.complete_store([key], context, True)
    assert tier.take_events() == []
    assert not tier._aliases._prepared


def test_a_block_on_its_way_to_the_gpu_is_not_loaded_a_second_time() -> None:
    """A second request with the same prefix asks again, and finds it on the GPU."""
    config = config_of(GROUPS["full"], num_blocks=40)
    pages = TensorPages(config)
    tier = cpu_tier(pages, config, 100, [1])
    driver = OffloadDriver(config, pages, [tier], 1)
    with shut_down([tier]):
        first: Any = computed_and_evicted(driver, list(range(40)))
        assert driver.admit(first, 40)
        second = driver.new([*range(24), 99, 98])
        assert not driver.admit(second, 26)
        assert driver.counts["joined"] == 1
        apart = driver.new(list(range(500, 520)))
        assert driver.admit(apart, 20), "one that shares nothing with it does not wait"
        driver.patience = 1.0
        while driver.loading:
            driver.end_step()
        assert driver.advance(first, 8)
        computed = driver.cache.get_computed_blocks(second.request)
        hit = driver.connector.find_external_hit(second.request, computed)
        assert hit is not None
        assert (computed.num_tokens, hit.num_external_tokens) == (24, 0)
        driver.connector.forget(second.request.request_id)
        for job in (first, apart):
            driver.finish(job)
        driver.drain()
    assert driver.connector.statistics().load.jobs == 1


# --- what requests say to tiers -------------------------------------------------------------------


class Listener(CPUOffloadingManager):
    """Notes which request each call was made for."""

    def __init__(self) -> None:
        super().__init__(100, enable_events=True)
        self.heard: list[tuple[str, RequestContext]] = []

    def on_new_request(self, context: RequestContext) -> None:
        self.heard.append(("new", context))

    def on_request_finished(self, context: RequestContext) -> None:
        self.heard.append(("finished", context))

    def lookup(self, key: OffloadKey, context: RequestContext) -> LookupResult:
        self.heard.append(("lookup", context))
        return super().lookup(key, context)

    def touch(self, keys: Iterable[OffloadKey], context: RequestContext) -> None:
        self.heard.append(("touch", context))
        super().touch(keys, context)

    def prepare_load(self, keys: Sequence[OffloadKey], context: RequestContext) -> CPULoadStoreSpec:
        self.heard.append(("prepare_load", context))
        return super().prepare_load(keys, context)

    def complete_load(
        self, keys: Sequence[OffloadKey], context: RequestContext, success: bool = True
    ) -> None:
        self.heard.append(("complete_load", context))
        super().complete_load(keys, context, success)

    def prepare_store(
        self, keys: Sequence[OffloadKey], context: RequestContext
    ) -> PrepareStoreOutput | None:
        self.heard.append(("prepare_store", context))
        return super().prepare_store(keys, context)

    def complete_store(
        self, keys: Sequence[OffloadKey], context: RequestContext, success: bool = True
    ) -> None:
        self.heard.append(("complete_store", context))
        super().complete_store(keys, context, success)


ALL_CALLS = {
    "new",
    "finished",
    "lookup",
    "touch",
    "prepare_load",
    "complete_load",
    "prepare_store",
    "complete_store",
}


def test_a_requests_parameters_reach_the_tier_with_every_call() -> None:
    """A tier of one's own may take part only for some requests, or fetch from where they say."""
    config = config_of(GROUPS["full"], num_blocks=40)
    pages = TensorPages(config)
    manager = Listener()
    tier = TierUnderTest(
        # Behind a filter, which passes on everything.
        Tier(ReuseFilter(manager, 1, 100), config.layout.groups),
        CPUTransferWorker(pages.cache, 100),
    )
    driver = OffloadDriver(config, pages, [tier], 1)
    with shut_down([tier]):
        computed_and_evicted(driver, list(range(40)))
        job = driver.new(list(range(60)))
        job.request.kv_transfer_params = {"peer": "10.0.0.7"}
        manager.heard.clear()
        assert driver.admit(job, 60)
        driver.patience = 1.0
        while not job.is_done:
            driver.end_step()
            assert driver.advance(job, 8)
        driver.end_step()
        driver.finish(job)
        driver.drain()
    assert {call for call, _ in manager.heard} == ALL_CALLS
    assert {context.request_id for _, context in manager.heard} == {job.request.request_id}
    assert all(context.kv_transfer_params == {"peer": "10.0.0.7"} for _, context in manager.heard)


def test_a_tier_hears_of_each_request_once_and_of_its_end() -> None:
    """However often it is looked up while it waits: a tier may keep something for it."""
    config = config_of(GROUPS["full"], num_blocks=40)
    manager = Listener()
    cache = CacheManager(config, config.scheduler_block_size)
    connector = OffloadingConnector(cache, [Tier(manager, config.layout.groups)])
    hasher = RequestHasher(CHAIN, config.layout.hash_block_size)
    request = CacheRequest("a", list(range(40)), hasher)
    for _ in range(3):
        connector.find_external_hit(request, cache.get_computed_blocks(request))
    calls = [call for call, _ in manager.heard]
    assert (calls[0], calls.count("new"), calls.count("finished")) == ("new", 1, 0)
    connector.forget("a")
    connector.forget("a")
    connector.forget("never seen")
    calls = [call for call, _ in manager.heard]
    assert (calls.count("new"), calls.count("finished")) == (1, 1)
    connector.find_external_hit(request, cache.get_computed_blocks(request))
    assert [call for call, _ in manager.heard].count("new") == 2, "preempted, it begins anew"


# --- between tiers --------------------------------------------------------------------------------


@pytest.mark.parametrize("promote", [True, False])
@pytest.mark.parametrize("name", ["full", "full and a window", "full and chunks"])
def test_what_was_found_on_disk_is_found_in_memory_the_next_time(
    promote: bool, name: str, tmp_path: Path
) -> None:
    """Unless that is switched off; the bytes that memory gives back are checked by the driver."""
    config = config_of(GROUPS[name], num_blocks=120)
    pages = TensorPages(config)
    memory = cpu_tier(pages, config, 100, sizes_for(config, 2))
    disk, store = disk_tier(pages, config, tmp_path, 1_000_000, sizes_for(config, 1))
    driver = OffloadDriver(config, pages, [memory, disk], 1, promote=promote)
    prompt = list(range(58))
    with shut_down([memory, disk]), closing(store):
        job = computed_and_evicted(driver, prompt)
        assert memory.present
        memory.tier.reset()
        driver.end_step()
        assert not memory.present
        load(driver, job)
        assert driver.loaded_from == {STORAGE}
        assert bool(memory.present) is promote
        assert driver.cache.reset()
        driver.end_step()
        driver.loaded_from.clear()
        load(driver, driver.new(prompt))
        assert driver.loaded_from == {CPU if promote else STORAGE}


def load(driver: OffloadDriver, job: Any) -> None:
    """Load a prompt, which checks every token's slot, and compute the rest of it."""
    loaded = driver.counts["loaded"]
    assert driver.admit(job, 58)
    driver.patience = 1.0
    while driver.loading:
        driver.end_step()
    assert driver.counts["loaded"] == loaded + 1
    assert driver.advance(job, 58)
    driver.end_step()
    driver.finish(job)
    driver.drain()
