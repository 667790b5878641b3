"""Which mirror serves beside which indexes."""

from __future__ import annotations

import pytest

from router import service
from router.config import RouterConfig
from router.index import REFERENCE, SourceId, choose_index
from router.mirror import Mirror, create_approximate_caches, create_mirror
from router.mirror.approximate import ApproximateCaches
from tests.router.core.decide.both import needs_core

STORES = """
models:
  - name: m
    tokenizer: replica
    stores: [{name: shared, tiers: [STORAGE]}]
"""
SOURCE = SourceId("r0")


def test_beside_indexes_in_python_serves_the_mirror_in_python() -> None:
    """The compiled one cannot read them."""
    mirror = create_mirror(REFERENCE)
    assert isinstance(mirror, Mirror)
    estimates = create_approximate_caches(lambda _: None, mirror, 60.0, 1024, 1024)
    assert isinstance(estimates, ApproximateCaches)


def test_beside_compiled_indexes_the_compiled_mirror_serves() -> None:
    """It takes a tenth of the time."""
    needs_core()
    mirror = create_mirror(choose_index("native"))
    assert not isinstance(mirror, Mirror)
    estimates = create_approximate_caches(lambda _: None, mirror, 60.0, 1024, 1024)
    assert not isinstance(estimates, ApproximateCaches)


@pytest.mark.parametrize(
    ("text", "is_python"), [("", False), (STORES, True)], ids=["none", "stores"]
)
def test_a_router_with_shared_stores_takes_the_mirror_in_python(text: str, is_python: bool) -> None:
    """Such models are indexed in Python, and one mirror follows the caches of all models."""
    needs_core()
    mirror = service._mirror(RouterConfig.from_yaml(text, {}), choose_index())
    assert isinstance(mirror, Mirror) is is_python


def test_prices_are_found_whatever_the_case_of_a_tiers_name() -> None:
    """Engines and configuration need not agree on it."""
    for indexes in {REFERENCE, choose_index()}:
        mirror = create_mirror(indexes, tier_prices={"CPU": 0.3}, other_price=0.7)
        index = indexes.create()
        mirror.begin("m", index, SOURCE, [], 10, 10)
        prices = mirror.load_prices(SOURCE)
        assert prices is not None
        assert [prices.of(tier) for tier in ("cpu", "CPU", "disk")] == [0.3, 0.3, 0.7]
