"""Blocks announced under a key, without token ids: hits stay exact for every kind of cache; without
the key they are none, and it is said why."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvevents.codec import encode
from kvevents.events import BlockStored, EventBatch
from kvevents.publisher import announce
from kvevents.sealing import HashKey, hold_key, make_hash_key, read_hash_key, sealed
from offload.config import CacheConfig
from router.index.base import Hit, SourceId
from router.index.index import PrefixIndex
from router.telemetry.problems import summarize_source
from tests.support.actual_hits import hits, until_told
from tests.support.cache_driver import CHAIN, CacheDriver
from tests.support.cache_layouts import variants, with_blocks
from tests.support.cache_workload import CacheWorkload
from tests.support.engine_process import engine_processes, simulated
from tests.support.router_process import QUICK_HEALTH, router_process

SOURCE = SourceId("replica", 0)
CACHING = [(label, config) for label, config in variants() if config.enable_caching]
SOME = CACHING[::3]
KEY, UNKNOWN = HashKey(b"1" * 32), HashKey(b"2" * 32)


@pytest.fixture(autouse=True, scope="module")
def _held() -> None:
    hold_key(KEY)


def follow(index: PrefixIndex, driver: CacheDriver, key: HashKey) -> None:
    events = [sealed(event, key) for event in driver.events]
    assert not any(isinstance(event, BlockStored) and event.token_ids for event in events)
    index.apply(SOURCE, encode(EventBatch(0.0, events, 0)))


@pytest.mark.parametrize(("label", "config"), SOME, ids=[label for label, _ in SOME])
def test_every_hit_is_predicted_without_a_token_on_the_wire(
    label: str, config: CacheConfig
) -> None:
    """The same engine, with the same pressure, as where events carry token ids."""
    driver, index = CacheDriver(with_blocks(config, config.num_blocks * 4)), PrefixIndex()
    index.add(SOURCE)
    index.apply(SOURCE, encode(EventBatch(0.0, [announce(config.layout, CHAIN, KEY)], 0)))
    workload, found = CacheWorkload(driver, f"{label} sealed"), 0
    for _ in range(50):
        workload.step()
        follow(index, driver, KEY)
        for job in [*workload.probes(2), *workload.waiting[:1]]:
            request = job.request
            actual = driver.cache.get_computed_blocks(request).num_tokens
            predicted = index.match(request.token_ids, request.lora_name)[SOURCE]
            assert predicted == Hit(actual, actual)
            found += actual > 0
    assert found > 0


def test_a_key_that_is_not_here_is_named() -> None:
    """A silent zero would look like an empty cache."""
    _, config = CACHING[0]
    driver, index = CacheDriver(config), PrefixIndex()
    index.add(SOURCE)
    index.apply(SOURCE, encode(EventBatch(0.0, [announce(config.layout, CHAIN, UNKNOWN)], 0)))
    workload = CacheWorkload(driver, "unknown")
    for _ in range(10):
        workload.step()
        follow(index, driver, UNKNOWN)
    found = index.statistics()[SOURCE]
    assert found.key_problem is not None
    assert UNKNOWN.key_id in found.key_problem
    assert sum(found.blocks.values()) > 0
    assert summarize_source(0, None, found).key_problem == found.key_problem
    other = PrefixIndex()
    other.restore(list(index.export()))
    assert other.statistics()[SOURCE].key_problem == found.key_problem


def test_an_exported_index_goes_on_and_does_not_hold_the_key() -> None:
    """It is written to disk, and sent to other routers."""
    _, config = CACHING[0]
    driver, index = CacheDriver(config), PrefixIndex()
    index.add(SOURCE)
    index.apply(SOURCE, encode(EventBatch(0.0, [announce(config.layout, CHAIN, KEY)], 0)))
    workload = CacheWorkload(driver, "exported")
    for _ in range(20):
        workload.step()
        follow(index, driver, KEY)
    records = list(index.export())
    assert all(b"1" * 32 not in record for record in records)
    restored = PrefixIndex()
    restored.restore(records)
    for job in workload.probes(20):
        ids = job.request.token_ids
        assert restored.match(ids)[SOURCE] == index.match(ids)[SOURCE]


async def test_an_engine_that_shows_no_prompts_is_predicted_exactly(tmp_path: Path) -> None:
    """With processes, files and sockets; and with a router that has another key, in its log, its
    metrics and on its page."""
    path, wrong = make_hash_key(tmp_path, "right"), make_hash_key(tmp_path, "wrong")
    options = {"served_model_name": "m", "num_blocks": 100, "kv_events_hash_key": path}
    prompt = [number % 200 for number in range(200)]
    async with engine_processes(1, *simulated("gemma", **options)) as (engine,):
        for file in (path, wrong):
            config = {"health": QUICK_HEALTH, "events": {"hash_key": str(file)}}
            with router_process(config) as router:
                async with router.serving(engine):
                    asked = {"model": "m", "prompt": prompt, "max_tokens": 1}
                    for _ in range(2):
                        answer = await router.post("/v1/completions", asked)
                        await until_told(router, engine)
                    predicted, actual = hits(answer)
                    assert actual > 0
                    assert predicted == (actual if file == path else 0)
                    metrics = await router.metrics()
                    assert metrics.sum("kvroute_index_foreign_key") == (file == wrong)
                    said = f"under the hash key {read_hash_key(path).key_id}, which is not here"
                    assert (said in router.log()) == (file == wrong)
                    assert (said in (await router.get("/overview")).body.decode()) == (
                        file == wrong
                    )
