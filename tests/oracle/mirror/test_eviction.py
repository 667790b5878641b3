"""What goes next, and how many blocks prompts take."""

from __future__ import annotations

import pytest

from router.index.mirror_types import STEP
from tests.oracle.mirror.eviction import STEP_TOKENS, EvictionOrder, Forecast
from tests.oracle.mirror.layout import UNKNOWN, Layout, Tail
from tests.oracle.mirror.ownership import Ownership, Taken, Use

PER_KEY = 4.0
"""Blocks of 16 tokens."""
FULL = UNKNOWN._replace(hit_tokens=16, groups=1, full_blocks_per_key=PER_KEY)
WINDOW = FULL._replace(
    has_gaps=True,
    is_sparse=True,
    groups=2,
    tails=(Tail(64, 16),),
    least_tail=64,
    longest_tail=64,
    window_blocks_per_key=PER_KEY,
)
STATE = FULL._replace(has_gaps=True, is_sparse=True, groups=2, tails=(Tail(0, 16),), states=1)


def used(ownership: Ownership, order: EvictionOrder, *keys: int, hit_keys: int = 0) -> Use:
    """A request that begins, ends and owns its keys then."""
    use, taken = ownership.begin(keys)
    order.take(taken, hit_keys, PER_KEY)
    order.take(ownership.end(use, 0.0), hit_keys, PER_KEY)
    order.end(use, PER_KEY)
    return use


def test_what_was_given_back_first_goes_first() -> None:
    """Windows have places of their own: one that was used again goes later than its prompt."""
    ownership, order = Ownership(), EvictionOrder()
    order.leave(71, 8.0)
    first = used(ownership, order, 1, 2, 3)
    order.leave(72, 8.0)
    second = used(ownership, order, 4, 5)
    order.hold(71)
    order.leave(71, 8.0)
    assert order.blocks == (3 + 2) * PER_KEY + 16.0
    found = order.first(10.0, PER_KEY)
    assert (found.keys, found.boundaries) == ({first.number: 2.5}, set())
    found = order.first(12.0 + 8.0 + 4.0, PER_KEY)
    assert (found.keys, found.boundaries) == ({first.number: 3.0, second.number: 1.0}, {72})
    assert order.first(1000.0, PER_KEY).boundaries == {71, 72}


def test_what_another_request_took_over_goes_with_that() -> None:
    """A prompt that goes on where another ended leaves nothing of it behind."""
    ownership, order = Ownership(), EvictionOrder()
    first = used(ownership, order, 1, 2)
    last = used(ownership, order, 1, 2, 3, hit_keys=2)
    assert first not in order
    assert order.first(1.0, PER_KEY).keys == {last.number: 0.25}
    assert order.blocks == 3 * PER_KEY


def test_what_was_computed_again_is_there_twice() -> None:
    """A hit that was cut short: the earlier blocks stay where they are, without an owner."""
    ownership, order = Ownership(), EvictionOrder()
    first = used(ownership, order, 1, 2, 3)
    last = used(ownership, order, 1, 2, 4, hit_keys=1)
    assert order.copied_keys == 1
    found = order.first(1000.0, PER_KEY)
    assert found.keys == {first.number: 2.0, last.number: 3.0}, "its own key, and a copy of 2"
    order.gone(first)
    assert (order.copied_keys, order.blocks) == (0, 3 * PER_KEY)


def test_what_lies_before_something_that_was_evicted_was_evicted() -> None:
    """Of boundaries no event can be asked for."""
    ownership, order = Ownership(), EvictionOrder()
    order.leave(71, 8.0)
    first = used(ownership, order, 1)
    order.leave(72, 8.0)
    order.gone(first)
    assert 71 not in order
    assert 72 in order
    order.gone(first)
    assert 72 in order, "it was forgotten already"
    order.clear()
    assert order.blocks == 0


def test_no_more_is_remembered_than_a_cache_holds() -> None:
    """A conversation that goes on for ever: each turn leaves a boundary, and nothing that could be
    found gone."""
    order = EvictionOrder()
    for boundary in range(1000):
        order.leave(boundary, 8.0)
    order.fit(100.0)
    assert order.blocks == 96.0
    assert 987 not in order
    assert 988 in order


def test_a_request_that_is_not_in_the_order_is_left_out() -> None:
    """It runs, or was forgotten for lack of room."""
    order = EvictionOrder()
    order.weigh(Use(1, [1, 2]), PER_KEY)
    order.take([Taken(Use(2, [1]), 1)], 0, PER_KEY)
    assert (order.blocks, order.copied_keys) == (0, 0)


@pytest.mark.parametrize(
    ("layout", "free", "evicted"),
    [
        (FULL, 0.0, [16.0, 32.0]),
        (FULL, 20.0, [0.0, 12.0]),
        (WINDOW, 0.0, [32.0, 64.0]),
        (STATE, 0.0, [17.0, 34.0]),
    ],
)
def test_prompts_evict_what_they_take_beyond_what_is_free(
    layout: Layout, free: float, evicted: list[float]
) -> None:
    """Two of 256 tokens, in the same step: each has blocks in every group."""
    forecast, found = Forecast(layout, free), []
    for _ in range(2):
        forecast.compute(4 * STEP, 4)
        found.append(forecast.evicted)
    assert found == evicted


def test_windows_that_have_moved_on_are_free_in_the_next_step() -> None:
    """All but the tail, which is kept. Full attention takes new blocks all the same."""
    forecast, keys = Forecast(WINDOW, 0.0), STEP_TOKENS // STEP
    forecast.compute(STEP_TOKENS, 4)
    first = forecast.evicted
    assert first == keys * 2 * PER_KEY
    forecast.compute(STEP_TOKENS, 4)
    assert forecast.evicted - first == keys * 2 * PER_KEY - (keys * PER_KEY - 4)


def test_a_window_that_is_kept_densely_is_not_free_again() -> None:
    """It can be found until it is evicted."""
    forecast = Forecast(WINDOW._replace(is_sparse=False), 0.0)
    forecast.compute(2 * STEP_TOKENS, 0)
    assert forecast.evicted == 2 * STEP_TOKENS / STEP * 2 * PER_KEY
