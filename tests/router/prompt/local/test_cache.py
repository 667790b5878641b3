"""The segment cache holds what it may hold, and gives back what was put in."""

from __future__ import annotations

import gc
import tracemalloc
from array import array

from hypothesis import given
from hypothesis import strategies as st

from router.prompt.local.cache import SegmentCache


@given(
    max_bytes=st.integers(0, 5000),
    steps=st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 200)), max_size=60),
)
def test_memory_stays_within_the_bound(max_bytes: int, steps: list[tuple[str, int]]) -> None:
    """Segments are as many as clients care to send."""
    cache = SegmentCache(max_bytes)
    for text, count in steps:
        cache.put((None, text * (count + 1)), array("I", range(count)))
        assert cache.statistics().held_bytes <= max_bytes


@given(steps=st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans()), max_size=60))
def test_a_hit_is_what_was_put_and_the_counts_say_so(steps: list[tuple[str, bool]]) -> None:
    """A plain dictionary is the model."""
    cache, model, hits = SegmentCache(1_000_000), dict[str, list[int]](), 0
    for text, is_put in steps:
        if is_put:
            model.setdefault(text, [ord(text)])
            cache.put((None, text), array("I", [ord(text)]))
        else:
            (found,) = cache.get_all([(None, text)])
            assert (None if found is None else found.tolist()) == model.get(text)
            hits += found is not None
    statistics = cache.statistics()
    assert (statistics.hits, statistics.entries) == (hits, len(model))
    assert statistics.hits + statistics.misses == sum(not is_put for _, is_put in steps)


def test_the_least_recently_used_goes_first() -> None:
    """A system prompt that every request has must not be thrown out by messages that come once."""
    cache = SegmentCache(2000)
    cache.put((None, "system"), array("I", [1]))
    for index in range(50):
        cache.put((None, f"message {index}"), array("I", [2]))
        assert cache.get_all([(None, "system")])[0] is not None
    assert cache.get_all([(None, "message 0")]) == [None]
    assert cache.statistics().evictions > 0


def test_ids_lie_in_a_few_pieces_of_memory() -> None:
    """Thousands of arrays among what the library allocates make every text slower, by twice."""
    cache = SegmentCache(10_000_000)
    for index in range(5000):
        cache.put((None, f"segment {index}"), array("I", range(100)))
    assert cache.statistics().entries == 5000
    assert len(cache._slabs) <= 16
    (first,), (second,) = (cache.get_all([(None, "segment 7")]) for _ in range(2))
    assert first is not second


def test_what_is_used_again_and_again_takes_its_place_once() -> None:
    """Renewing copies: a prompt that every request has must not fill the cache with itself."""
    cache = SegmentCache(100_000)
    cache.put((None, "system"), array("I", range(1000)))
    for _ in range(1000):
        cache.get_all([(None, "system")])
    assert cache.statistics().held_bytes < 6000


def test_what_is_counted_is_what_it_costs() -> None:
    """A text that was used again was kept twice and counted once: 256 MB of cache cost 380."""
    cache, texts = SegmentCache(2_000_000), 200
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for turn in range(20):
        for number in range(texts):
            key = None, f"{number} {'text ' * 400}"
            if cache.get_all([key]) == [None]:
                cache.put(key, array("I", range(500)))
        for number in range(texts):
            cache.put((None, f"{turn} {number} {'once ' * 200}"), array("I", range(250)))
    gc.collect()
    allocated = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    ids = sum(slab.used for slab in cache._slabs)
    assert 0.8 * cache.statistics().held_bytes < allocated + ids < 1.1 * 2_000_000


def test_one_huge_segment_does_not_empty_the_cache() -> None:
    """A book sent once would cost all conversations their segments."""
    cache = SegmentCache(100_000)
    cache.put((None, "small"), array("I", [1]))
    cache.put((None, "x" * 60_000), array("I", [2]))
    assert cache.get_all([(None, "small"), (None, "x" * 60_000)]) == [array("I", [1]), None]


def test_looking_without_counting_leaves_counts_and_order() -> None:
    """A second look for the same prompt is no second request."""
    cache = SegmentCache(1000)
    cache.put((None, "a"), array("I", [1]))
    before = cache.statistics()
    assert cache.peek_all([(None, "a"), (None, "b")]) == {(None, "a"): array("I", [1])}
    assert cache.statistics() == before
