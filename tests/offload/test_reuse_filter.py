"""The reuse filter, in front of a real CPU tier."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.base import LookupResult, OffloadKey, RequestContext
from offload.cpu.manager import CPUOffloadingManager
from offload.errors import CacheConfigError, TierStateError
from offload.reuse_filter import ReuseFilter
from tests.offload.cpu.keys import key, keys, replayed


def filtered(min_uses: int = 2, max_tracked: int = 100, num_blocks: int = 10) -> ReuseFilter:
    return ReuseFilter(CPUOffloadingManager(num_blocks, enable_events=True), min_uses, max_tracked)


def offer(tier: ReuseFilter, request_id: str, *numbers: int) -> list[OffloadKey]:
    """Offer blocks for a request and store what is taken."""
    output = tier.prepare_store(keys(*numbers), RequestContext(request_id))
    assert output is not None
    tier.complete_store(output.keys_to_store, RequestContext(request_id))
    return list(output.keys_to_store)


@pytest.mark.parametrize("min_uses", [1, 2, 3, 5])
def test_a_block_is_taken_when_enough_requests_used_it(min_uses: int) -> None:
    """The number is the evidence of reuse that a copy must have."""
    tier = filtered(min_uses)
    for turn in range(min_uses - 1):
        assert offer(tier, f"r{turn}", 1) == []
    assert offer(tier, "last", 1) == keys(1)
    assert tier.lookup(key(1), RequestContext("x")) is LookupResult.HIT


def test_one_request_counts_once_however_often_it_returns() -> None:
    """It offers again after a refusal or a preemption, which shows no demand from others."""
    tier = filtered()
    for _ in range(5):
        assert offer(tier, "a", 1) == []
        tier.touch(keys(1), RequestContext("a"))
    assert offer(tier, "b", 1) == keys(1)


def test_interleaved_requests_count_once_each() -> None:
    """Two waiting requests must not prove each other's blocks by taking turns."""
    tier = filtered(min_uses=3)
    for turn in range(6):
        assert offer(tier, "ab"[turn % 2], 1) == []
    assert offer(tier, "c", 1) == keys(1)


def test_a_touch_is_a_use_and_a_lookup_is_not() -> None:
    """A request whose prefix is on the GPU touches it without an offer.

    One that waits is looked up in every step.
    """
    tier = filtered()
    tier.lookup(key(1), RequestContext("a"))
    assert offer(tier, "b", 1) == []
    tier.touch(iter(keys(2)), RequestContext("a"))
    assert offer(tier, "b", 2) == keys(2)


def test_only_the_part_that_was_seen_is_taken() -> None:
    """A system prompt goes to the tier; the question behind it waits until it is repeated."""
    tier = filtered()
    assert offer(tier, "a", 1, 2, 3) == []
    assert offer(tier, "b", 1, 2, 4, 5, 1) == keys(1, 2)
    assert (tier.statistics().let_through, tier.statistics().held_back) == (2, 3 + 2)


def test_the_least_recently_used_block_is_forgotten() -> None:
    """Memory is bounded, and keys in use stay."""
    tier = filtered(max_tracked=3)
    offer(tier, "a", 1)
    offer(tier, "a", 2)
    offer(tier, "a", 3)
    tier.touch(keys(1), RequestContext("a"))
    offer(tier, "a", 4)
    assert tier.statistics().forgotten == 1
    assert offer(tier, "b", 2) == [], "forgotten"
    assert offer(tier, "b", 1) == keys(1)


def test_a_prompts_tail_is_forgotten_before_its_head() -> None:
    """A prompt longer than the filter's memory must not displace its own head every time."""
    tier = filtered(max_tracked=3)
    assert offer(tier, "a", 1, 2, 3, 4, 5) == []
    assert offer(tier, "b", 1, 2, 3) == keys(1, 2, 3)


@given(
    calls=st.lists(
        st.tuples(st.sampled_from(["touch", "offer"]), st.lists(st.integers(0, 30), max_size=9))
    )
)
def test_memory_is_bounded(calls: list[tuple[str, list[int]]]) -> None:
    """It sees every prompt, most of them once."""
    tier = filtered(max_tracked=7)
    for turn, (action, numbers) in enumerate(calls):
        if action == "touch":
            tier.touch(keys(*numbers), RequestContext(str(turn)))
        else:
            offer(tier, str(turn), *numbers)
        assert tier.statistics().tracked_keys == len(tier._users) <= 7
        assert all(len(users) <= 2 for users in tier._users.values())


def test_a_full_tiers_refusal_is_passed_on() -> None:
    """The caller tries again later, and the uses still count."""
    tier = filtered(num_blocks=1)
    offer(tier, "a", 1, 2)
    assert tier.prepare_store(keys(1, 2), RequestContext("b")) is None
    assert offer(tier, "b", 2) == keys(2)


def test_everything_else_reaches_the_tier() -> None:
    """To its caller the filter is a tier: loads, failures, events and reset are passed on."""
    tier = filtered(min_uses=1)
    context = RequestContext("a")
    assert tier.medium == "CPU"
    offer(tier, "a", 1, 2)
    events = tier.take_events()
    assert replayed(events, set()) == set(keys(1, 2))
    assert tier.prepare_load(keys(2), context) == tier.manager.prepare_load(keys(2), context)
    tier.complete_load(keys(2, 2), context, success=False)
    with pytest.raises(TierStateError):
        tier.complete_load(keys(2), context)
    output = tier.prepare_store(keys(3), context)
    assert output is not None
    tier.complete_store(keys(3), context, success=False)
    tier.reset()
    assert replayed(events + tier.take_events(), set()) == set()
    assert tier.lookup(key(1), context) is LookupResult.MISS


def test_a_touch_reaches_the_tiers_order() -> None:
    """Otherwise the tier would evict what is in use."""
    tier = filtered(min_uses=1, num_blocks=2)
    offer(tier, "a", 1)
    offer(tier, "a", 2)
    tier.touch(iter(keys(1)), RequestContext("b"))
    offer(tier, "c", 3)
    assert tier.lookup(key(1), RequestContext("d")) is LookupResult.HIT


def test_a_reset_forgets_the_uses() -> None:
    """After it everything starts again, as in the tier."""
    tier = filtered()
    offer(tier, "a", 1)
    tier.reset()
    assert tier.statistics().tracked_keys == 0
    assert offer(tier, "b", 1) == []


@pytest.mark.parametrize(
    ("min_uses", "max_tracked", "message"),
    [(0, 5, "min_uses 0 must be at least 1"), (2, 0, "max_tracked 0 must be at least 1")],
)
def test_numbers_below_one_are_refused(min_uses: int, max_tracked: int, message: str) -> None:
    """They would silently let everything or nothing through."""
    with pytest.raises(CacheConfigError, match=f"reuse filter: {message}"):
        filtered(min_uses, max_tracked)
