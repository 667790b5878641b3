"""Least recently used."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from offload.cpu.manager import CPUOffloadingManager
from tests.offload.cpu.keys import REQUEST, access, hits, key, keys, store


@given(capacity=st.integers(1, 6), trace=st.lists(st.integers(0, 9), max_size=80))
def test_one_access_at_a_time_is_textbook_lru(capacity: int, trace: list[int]) -> None:
    """Hits and contents after every access equal those of the well-known ten lines."""
    tier = CPUOffloadingManager(capacity, "lru")
    cached: OrderedDict[int, None] = OrderedDict()
    for number in trace:
        assert access(tier, number) == (number in cached)
        cached[number] = None
        cached.move_to_end(number)
        if len(cached) > capacity:
            cached.popitem(last=False)
        assert hits(tier, range(10)) == set(cached)


def test_the_last_key_touched_is_the_last_to_go() -> None:
    """The protocol requires it, and the caller orders a prompt's blocks accordingly."""
    tier = CPUOffloadingManager(3, "lru")
    store(tier, 1, 2, 3)
    tier.touch(keys(3, 1, 2), REQUEST)
    output = tier.prepare_store(keys(4, 5), REQUEST)
    assert output is not None
    assert list(output.evicted_keys) == keys(3, 1)


def test_a_stored_prompt_goes_from_its_tail() -> None:
    """The rest of a prompt is useless without its head, while the head serves without the rest."""
    tier = CPUOffloadingManager(4, "lru")
    store(tier, 1, 2, 3, 4)
    store(tier, 5, 6)
    assert hits(tier, range(9)) == {1, 2, 5, 6}


def test_a_loaded_prompt_goes_from_its_tail_and_after_what_was_idle() -> None:
    """A block that was read until now is more recent than one that was not used meanwhile."""
    tier = CPUOffloadingManager(5, "lru")
    store(tier, 1, 2, 3)
    store(tier, 8, 9)
    tier.prepare_load(keys(1, 2, 3), REQUEST)
    tier.complete_load(keys(1, 2, 3), REQUEST)
    store(tier, 5, 6, 7)
    assert hits(tier, range(10)) == {1, 2, 5, 6, 7}


def test_a_touch_during_a_load_changes_nothing() -> None:
    """The block stays out of the order until its release.

    Otherwise it could be evicted during the copy.
    """
    tier = CPUOffloadingManager(2, "lru")
    store(tier, 1, 2)
    tier.prepare_load(keys(1), REQUEST)
    tier.touch(keys(1, 2), REQUEST)
    output = tier.prepare_store([key(3)], REQUEST)
    assert output is not None
    assert list(output.evicted_keys) == keys(2)
    assert tier.prepare_store([key(4)], REQUEST) is None


def test_a_prompt_offered_again_goes_from_its_tail_and_after_what_was_idle() -> None:
    """A request with this prefix has just run.

    Its blocks are protected during the call and are recent after it.
    """
    tier = CPUOffloadingManager(5, "lru")
    store(tier, 1, 2, 3)
    store(tier, 8, 9)
    store(tier, 1, 2, 3)
    store(tier, 5, 6, 7)
    assert hits(tier, range(10)) == {1, 2, 5, 6, 7}
