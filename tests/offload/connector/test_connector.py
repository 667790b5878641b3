"""The connector with real tiers: whatever is loaded is what was computed, however copies end."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvevents.events import CPU, STORAGE
from kvevents.layout import GroupKind
from offload.base import Direction, TransferResult
from offload.cache_manager import CacheManager
from offload.config import CacheConfig
from offload.connector import OffloadingConnector, StoreScope, Tier
from offload.cpu.manager import CPUOffloadingManager
from offload.errors import CacheConfigError, TierStateError
from offload.transfer.runner import TransferOptions
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

    A window's last token would need blocks from before the window.
    """
    for name, expected in (("full", 40), ("full and a window", 36)):
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
    assert blocks == [(0, index) for index in range(9)] + [(1, 7), (1, 8)]


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
    with pytest.raises(CacheConfigError, match="blocks_per_offloaded_block"):
        Tier(CPUOffloadingManager(4), GROUPS[name], sizes)
