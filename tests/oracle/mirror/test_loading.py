"""What loading costs is learned from loads, one tier from the other."""

from __future__ import annotations

import pytest

from tests.oracle.mirror.loading import LoadPrices

GUESSES = {"CPU": 0.1, "FS": 0.5}


@pytest.fixture
def prices() -> LoadPrices:
    return LoadPrices(lambda tier: GUESSES.get(tier, 0.3))


def test_before_any_load_the_price_is_the_configured_one(prices: LoadPrices) -> None:
    """A tier that was never used has to be worth something, or it would never be used."""
    assert prices.of("CPU") == 0.1
    assert prices.mean([("CPU", 3000), ("FS", 1000)]) == pytest.approx(0.2)
    assert prices.mean([]) == 0.3, "nobody tells the tiers apart"


def test_the_price_becomes_what_loads_took(prices: LoadPrices) -> None:
    """Four loads of 8,000 tokens outweigh a guess; the other tier keeps its own."""
    for _ in range(4):
        prices.loaded([("CPU", 8000)], 320.0)
    assert prices.of("CPU") == pytest.approx(0.04, rel=0.2)
    assert prices.of("FS") == 0.5


def test_of_a_hit_from_two_tiers_the_larger_part_learns(prices: LoadPrices) -> None:
    """What the smaller one takes is known, and belongs to it."""
    for _ in range(40):
        prices.loaded([("CPU", 2000), ("FS", 6000)], 200 + 4800.0)
    assert prices.of("FS") == pytest.approx(0.8, rel=0.02)
    assert prices.of("CPU") == 0.1


def test_a_short_load_teaches_nothing(prices: LoadPrices) -> None:
    """Its time is that of a step of the engine."""
    prices.loaded([("CPU", LoadPrices.LEAST_TOKENS - 1)], 5000.0)
    prices.loaded([("CPU", 1500), ("FS", 1500), ("disk", 1500)], 5000.0)
    assert prices.of("CPU") == 0.1


def test_a_load_that_took_no_time_costs_nothing(prices: LoadPrices) -> None:
    """The estimate of what the rest of the prompt took may be too high: no price is negative."""
    for _ in range(200):
        prices.loaded([("CPU", 8000)], -500.0)
    assert 0 <= prices.of("CPU") < 0.001
