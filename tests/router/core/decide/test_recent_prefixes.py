"""The core remembers recent prefixes as the form that can be read does."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from router.index.base import SourceId
from tests.oracle.recent_prefixes import ReferenceRecent

core = import_module("router._core")

caches = st.integers(0, 3)
# Prompts that share prefixes: keys count from their roots.
prompts = st.tuples(st.sampled_from([0, 100]), st.integers(0, 12)).map(
    lambda prompt: list(range(prompt[0], prompt[0] + prompt[1]))
)
steps = st.one_of(
    st.tuples(st.just("remember"), caches, prompts),
    st.tuples(st.just("match"), prompts),
    st.tuples(st.just("wait"), st.floats(0, 12)),
    st.tuples(st.just("forget"), caches),
)


@given(history=st.lists(steps, max_size=40), most=st.sampled_from([3, 12, 30, 1000]))
def test_every_answer_is_that_of_the_readable_form(history: list[Any], most: int) -> None:
    """It stands in for events: too long a prefix sends prompts where nothing is cached."""
    readable, in_core, now = (
        ReferenceRecent(5.0, most),
        core.RecentPrefixes(core.Books(), 5.0, most),
        0.0,
    )
    for step in history:
        match step:
            case ("remember", cache, keys):
                readable.remember(SourceId(str(cache)), keys, now)
                in_core.remember(cache, keys, now)
            case ("match", keys):
                found = {
                    SourceId(str(cache)): count for cache, count in in_core.match(keys, 64, now)
                }
                assert found == readable.match(keys, 64, now)
            case ("wait", seconds):
                now += seconds
            case ("forget", cache):
                readable.forget(str(cache))
                in_core.forget(cache)
        known = readable.statistics()
        assert in_core.counts() == (known.entries, known.evicted, known.truncated)
