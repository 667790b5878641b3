"""An engine with lower tiers and the router's index: GPU hits and what the tiers add are both
predicted, token for token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvevents.cache_state import CacheState
from kvevents.codec import encode
from kvevents.events import GPU, BlockRemoved, BlockStored, CacheLayout, Event, EventBatch
from kvevents.layout import GroupKind
from kvevents.publisher import announce
from offload.config import CacheConfig
from router.index.base import Hit, SourceId
from router.index.index import PrefixIndex
from tests.support.cache_driver import CHAIN, Job, free_ids
from tests.support.cache_layouts import GROUPS, config_of, variants
from tests.support.cache_workload import LONGEST, CacheWorkload
from tests.support.offload_driver import OffloadDriver, TensorPages
from tests.support.offload_tiers import cpu_tier, disk_tier

SOURCE = SourceId("replica", 0)
CACHING = [(label, config) for label, config in variants() if config.enable_caching]


@pytest.mark.parametrize(("label", "config"), CACHING, ids=[label for label, _ in CACHING])
def test_hits_of_all_tiers_are_predicted(label: str, config: CacheConfig, tmp_path: Path) -> None:
    """Offload events carry no tokens and mix groups; predictions must still be exact, also with
    coarser blocks."""
    counts: Counter[str] = Counter()
    with closing(answers(config, label, tmp_path)) as found:
        for actual, predicted in found:
            assert predicted == actual
            counts["asked"] += 1
            counts["beyond"] += actual.cached_tokens > actual.gpu_cached_tokens
            # How much the tiers hold by then depends on when copies end.
            if counts["asked"] > 250 and counts["beyond"]:
                break
    assert counts["asked"] > 150
    assert counts["beyond"] > 0


def answers(config: CacheConfig, seed: str, root: Path) -> Generator[tuple[Hit, Hit], None, None]:
    """What cache and tiers would give to random prompts, and what the index says, after every step.
    Close it."""
    with world(config, seed, root, 2, 1) as running:
        for _ in range(1000):
            running.step()
            yield from asked(running.driver, running.index, running.workload)


@dataclass
class Running:
    """A cache with two tiers under a random workload, and an index that follows its events."""

    config: CacheConfig
    driver: OffloadDriver
    workload: CacheWorkload
    index: PrefixIndex = field(default_factory=PrefixIndex)
    events: list[Event] = field(default_factory=list)
    """All since the beginning."""
    steps: int = 0

    def __post_init__(self) -> None:
        self.index.add(SOURCE)
        self.publish([announce(self.config.layout, CHAIN)])

    def step(self) -> None:
        """One step; now and then the GPU loses all that is not in use."""
        if self.steps % 8 == 0:
            self.driver.cache.evict_blocks(free_ids(self.driver.cache.pool))
        self.steps += 1
        self.workload.step()
        self.publish(self.driver.events)

    def empty_the_gpu(self) -> None:
        """End everything, so that only the tiers hold anything."""
        for job in list(self.driver.running.values()):
            self.driver.finish(job)
        while not self.driver.connector.is_idle:
            self.driver.end_step()
            self.publish(self.driver.events)
        assert self.driver.cache.reset()
        self.driver.end_step()
        self.publish(self.driver.events)

    def publish(self, events: Sequence[Event]) -> None:
        self.events += events
        self.index.apply(SOURCE, encode(EventBatch(0.0, events, 0)))


@contextmanager
def world(
    config: CacheConfig, seed: str, root: Path, memory_size: int, disk_size: int
) -> Iterator[Running]:
    """Sizes: GPU blocks in an offloaded block of each tier."""
    pages = TensorPages(config)
    disk, store = disk_tier(pages, config, root, 200_000, sizes_for(config, disk_size))
    memory = cpu_tier(pages, config, 60, sizes_for(config, memory_size))
    driver = OffloadDriver(config, pages, [memory, disk], seed)
    try:
        yield Running(config, driver, CacheWorkload(driver, seed))
    finally:
        for under_test in driver.tiers:
            under_test.worker.shutdown()
        store.close()


def sizes_for(config: CacheConfig, size: int) -> list[int]:
    """Of each group; states are not adjacent."""
    return [1 if group.kind is GroupKind.MAMBA else size for group in config.layout.groups]


def asked(
    driver: OffloadDriver, index: PrefixIndex, workload: CacheWorkload
) -> Iterator[tuple[Hit, Hit]]:
    """A few prompts put to both."""
    yield from compared(driver, index, workload.probes(3))


def compared(
    driver: OffloadDriver, index: PrefixIndex, jobs: Iterable[Job]
) -> Iterator[tuple[Hit, Hit]]:
    """What cache and tiers would give to each prompt, and what the index says."""
    for job in jobs:
        request = job.request
        computed = driver.cache.get_computed_blocks(request)
        hit = driver.connector.find_external_hit(request, computed)
        driver.connector.forget(request.request_id)
        if hit is not None:
            yield (
                Hit(computed.num_tokens, hit.num_tokens),
                Hit(*index.match(request.token_ids, request.lora_name)[SOURCE][:2]),
            )


# --- offloaded blocks of many GPU blocks ----------------------------------------------------------


@pytest.mark.parametrize(("memory_size", "disk_size"), [(2, 3), (4, 8), (8, 2), (16, 4)])
@pytest.mark.parametrize(
    "name", ["full", "full and a window", "full and chunks", "every kind", "blocks of three sizes"]
)
def test_prompts_that_diverge_in_an_offloaded_block_are_predicted(
    name: str, memory_size: int, disk_size: int, tmp_path: Path
) -> None:
    """And those that end exactly with one, or one token beside: there the rounding would show."""
    config = config_of(GROUPS[name], num_blocks=40 * len(GROUPS[name]), max_in_flight_tokens=32)
    counts: Counter[str] = Counter()
    with world(config, f"{name} {memory_size}", tmp_path, memory_size, disk_size) as running:
        for _ in range(400):
            running.step()
            if running.steps % 8 == 1:
                prompts = edges(running, memory_size, disk_size)
                for actual, predicted in compared(running.driver, running.index, prompts):
                    assert predicted == actual
                    counts["asked"] += 1
                    counts["beyond"] += actual.cached_tokens > actual.gpu_cached_tokens
            if counts["asked"] > 300 and counts["beyond"] > 5:
                break
    assert counts["asked"] > 300
    assert counts["beyond"] > 5


def edges(running: Running, memory_size: int, disk_size: int) -> Iterator[Job]:
    """Known prompts cut at and beside the ends of offloaded blocks, and changed inside of one."""
    rng, known = running.workload.rng, running.workload.known
    size = max(group.block_size for group in running.config.layout.groups)
    for in_block in (memory_size, disk_size, 1):
        tokens = rng.choice(known) if known else [1]
        multiple = in_block * size * rng.randrange(1, 4)
        for length in (multiple - 1, multiple, multiple + 1):
            if tokens[:length]:
                yield running.driver.new(tokens[:length])
        inside = rng.randrange(1, multiple + 1)
        yield running.driver.new([*tokens[:inside], 99, *tokens[inside + 1 :]][:LONGEST])


# --- a router that joins late ---------------------------------------------------------------------


@pytest.mark.parametrize(("label", "config"), CACHING, ids=[label for label, _ in CACHING])
def test_a_router_that_joins_when_only_the_tiers_hold_blocks_predicts_their_hits(
    label: str, config: CacheConfig, tmp_path: Path
) -> None:
    """By a snapshot, or by the tiers' own events alone, as after a restart of the engine: they name
    hashes without tokens."""
    counts: Counter[str] = Counter()
    with world(config, label, tmp_path, 2, 1) as running:
        while running.steps < 600 and (running.steps < 80 or counts["beyond"] < 5):
            for _ in range(40):
                running.step()
            running.empty_the_gpu()
            indexes = {
                "snapshot": fed(snapshot(running.events)),
                "tiers' events": fed(
                    [running.events[0], *(one for one in running.events if is_of_a_tier(one))]
                ),
            }
            prompts = [running.driver.new(prompt) for prompt in running.workload.known[-20:]]
            for how, index in indexes.items():
                for actual, predicted in compared(running.driver, index, prompts):
                    assert predicted == actual, how
                    counts["beyond"] += actual.cached_tokens > actual.gpu_cached_tokens
    assert counts["beyond"] >= 5


@pytest.mark.parametrize("disk_size", [1, 2, 8])
@pytest.mark.parametrize(
    "name", ["full", "full and a window", "full and chunks", "full and states", "every kind"]
)
def test_what_an_earlier_process_left_on_disk_is_predicted(
    name: str, disk_size: int, tmp_path: Path
) -> None:
    """The new process announces files of which it has computed nothing itself. Several groups
    rarely agree on a prefix in units of 32 tokens, so there are as many processes as it takes."""
    config = config_of(GROUPS[name], num_blocks=40 * len(GROUPS[name]), max_in_flight_tokens=32)
    counts: Counter[str] = Counter()
    known: list[list[int]] = []
    for process in range(20):
        with world(config, f"{name} {process}", tmp_path, 1, disk_size) as running:
            running.driver.end_step()
            running.publish(running.driver.events)
            running.workload.known += known[-20:]
            while running.steps < 80:
                prompts = [running.driver.new(prompt) for prompt in known[-20:]]
                for actual, predicted in compared(running.driver, running.index, prompts):
                    assert predicted == actual
                    counts["beyond" if running.steps else "at once"] += (
                        actual.cached_tokens > actual.gpu_cached_tokens
                    )
                running.step()
            running.empty_the_gpu()
            known = running.workload.known
        if counts["at once"] and counts["beyond"]:
            return
    raise AssertionError(f"no prompt was ever found on disk: {counts}")


def snapshot(events: Sequence[Event]) -> list[Event]:
    """What a publisher answers to a late subscriber."""
    first, *later = events
    assert isinstance(first, CacheLayout)
    state = CacheState(first)
    state.apply(later)
    return [event for batch in state.snapshot().batches() for event in batch]


def is_of_a_tier(event: Event) -> bool:
    return isinstance(event, BlockStored | BlockRemoved) and event.tier != GPU


def fed(events: Sequence[Event]) -> PrefixIndex:
    """A new index that hears only of these."""
    index = PrefixIndex()
    index.add(SOURCE)
    for event in events:
        index.apply(SOURCE, encode(EventBatch(0.0, [event], 0)))
    return index
