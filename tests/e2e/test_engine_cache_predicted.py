"""The engine's cache and the router's index, connected only by encoded events: the index predicts
what the cache would reuse."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from kvevents.codec import encode
from kvevents.events import Event, EventBatch
from kvevents.publisher import announce
from offload.config import CacheConfig
from router.index.base import Hit, SourceId
from router.index.index import PrefixIndex
from tests.support.cache_driver import CHAIN, CacheDriver
from tests.support.cache_layouts import variants, with_blocks
from tests.support.cache_workload import CacheWorkload

SOURCE = SourceId("replica", 0)
CACHING = [(label, config) for label, config in variants() if config.enable_caching]


def apply(index: PrefixIndex, events: Sequence[Event]) -> None:
    index.apply(SOURCE, encode(EventBatch(0.0, list(events), 0)))


@pytest.mark.parametrize(("label", "config"), CACHING, ids=[label for label, _ in CACHING])
def test_every_hit_is_predicted(label: str, config: CacheConfig) -> None:
    """A router that is wrong about one prompt in a hundred sends it to the wrong replica and never
    learns why."""
    asked = hits = 0
    for times in (1, 4):
        for actual, predicted in answers(
            with_blocks(config, config.num_blocks * times), f"{label} {times}"
        ):
            assert predicted == Hit(actual, actual)
            asked, hits = asked + 1, hits + (actual > 0)
    assert asked > 300
    assert hits >= 3


def answers(config: CacheConfig, seed: str) -> Iterator[tuple[int, Hit]]:
    """What the cache would reuse of random prompts, and what the index predicts, after every
    step."""
    driver, index = CacheDriver(config), PrefixIndex()
    index.add(SOURCE)
    apply(index, [announce(config.layout, CHAIN)])
    workload = CacheWorkload(driver, seed)
    for _ in range(90):
        workload.step()
        apply(index, driver.events)
        for job in [*workload.probes(2), *workload.waiting[:1]]:
            request = job.request
            actual = driver.cache.get_computed_blocks(request).num_tokens
            yield actual, index.match(request.token_ids, request.lora_name)[SOURCE]
