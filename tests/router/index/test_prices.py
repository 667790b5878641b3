"""What the mirror is made with."""

from __future__ import annotations

from router.index.base import SourceId
from router.index.index import PrefixIndex
from router.index.mirror import Mirror
from tests.support.index import load_prices

SOURCE = SourceId("r0")


def test_prices_are_found_whatever_the_case_of_a_tiers_name() -> None:
    """Engines and configuration need not agree on it."""
    mirror = Mirror(tier_prices={"CPU": 0.3}, other_price=0.7)
    mirror.begin("m", PrefixIndex(), SOURCE, [], 10, 10)
    prices = load_prices(mirror, SOURCE)
    assert prices is not None
    assert [prices.of(tier) for tier in ("cpu", "CPU", "disk")] == [0.3, 0.3, 0.7]
