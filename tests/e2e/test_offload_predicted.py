"""An engine with lower tiers and the router's index: GPU hits and what the tiers add are both
predicted, token for token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvevents.codec import encode
from kvevents.events import EventBatch
from kvevents.layout import GroupKind
from kvevents.publisher import announce
from offload.config import CacheConfig
from router.index import Hit, PrefixIndex, SourceId, create_index
from tests.support.cache_driver import CHAIN
from tests.support.cache_layouts import variants
from tests.support.cache_workload import CacheWorkload
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
    """What cache and tiers would reuse of random prompts, and what the index predicts, after every
    step. Close it."""
    pages = TensorPages(config)
    coarse = [1 if group.kind is GroupKind.MAMBA else 2 for group in config.layout.groups]
    disk, store = disk_tier(pages, config, root, 200_000, [1] * len(coarse))
    driver = OffloadDriver(config, pages, [cpu_tier(pages, config, 60, coarse), disk], seed)
    index = create_index()
    index.add(SOURCE)
    index.apply(SOURCE, encode(EventBatch(0.0, [announce(config.layout, CHAIN)], 0)))
    workload = CacheWorkload(driver, seed)
    try:
        for step in range(1000):
            if step % 8 == 0:
                driver.cache.evict_blocks(range(1, config.num_blocks))
            workload.step()
            index.apply(SOURCE, encode(EventBatch(0.0, driver.events, 0)))
            yield from asked(driver, index, workload)
    finally:
        for under_test in driver.tiers:
            under_test.worker.shutdown()
        store.close()


def asked(
    driver: OffloadDriver, index: PrefixIndex, workload: CacheWorkload
) -> Iterator[tuple[Hit, Hit]]:
    """Look a few prompts up in both."""
    for job in workload.probes(3):
        request = job.request
        computed = driver.cache.get_computed_blocks(request)
        hit = driver.connector.find_external_hit(request, computed)
        driver.connector.forget(request.request_id)
        if hit is not None:
            yield (
                Hit(computed.num_tokens, hit.num_tokens),
                index.match(request.token_ids, request.lora_name)[SOURCE],
            )
