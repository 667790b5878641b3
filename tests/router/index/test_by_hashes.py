"""Prompts of which there are only the engine's hashes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvevents.events import BlockStored, CacheLayout, Event, GroupSpec
from kvevents.hashing import HashChain
from kvevents.layout import KVCacheGroup
from kvevents.sealing import HashKey, hold_key, sealed
from router.index.base import SourceId
from router.index.index import PrefixIndex
from tests.support.blocks import FULL, SOURCE, Prefix, apply, mamba, tokens, window
from tests.support.index import match_source

GROUPS = (FULL, window(48), mamba(32))
PROMPT = Prefix(tokens(160))


@st.composite
def histories(draw: st.DrawFn) -> list[Event]:
    """Blocks of one prompt that come to several groups and tiers, and go."""
    count = draw(st.integers(1, len(GROUPS)))
    events: list[Event] = [
        PROMPT.stored(index, group) for index, group in enumerate(GROUPS[:count])
    ]
    for _ in range(draw(st.integers(0, 8))):
        index = draw(st.integers(0, count - 1))
        ends = range(GROUPS[index].block_size, 161, GROUPS[index].block_size)
        chosen = draw(st.lists(st.sampled_from(ends), min_size=1, unique=True))
        kind = draw(st.sampled_from(["removed", "offloaded", "gone from CPU"]))
        if kind == "offloaded":
            events.append(PROMPT.offloaded(index, sorted(chosen)))
        else:
            medium = "GPU" if kind == "removed" else "CPU"
            events.append(PROMPT.removed(index, chosen, medium))
    return events


@given(histories(), st.integers(1, 10))
def test_hashes_find_what_tokens_find(events: list[Event], blocks: int) -> None:
    """There is one hit rule, whatever a prompt is known by."""
    index = PrefixIndex()
    apply(index, *events)
    prompt = index.prepare([*PROMPT.tokens[: blocks * 16], 1])
    found = index.match_hashes(SOURCE, PROMPT.hashes[:blocks])
    assert found.hit == match_source(index, prompt, SOURCE)
    assert found.groups == index.explain(prompt, SOURCE)
    assert (found.problem is None) == (found.held > 0)


@pytest.mark.parametrize("as_int", [True, False])
def test_hashes_have_the_form_of_the_events(as_int: bool) -> None:
    """A number and the digest that it was cut from are two hashes, as on the wire."""
    prompt, index = Prefix(tokens(64), as_int=as_int), PrefixIndex()
    apply(index, prompt.stored(0, FULL))
    assert index.match_hashes(SOURCE, prompt.hashes).hit.gpu_cached_tokens == 64
    other = Prefix(tokens(64), as_int=not as_int)
    assert index.match_hashes(SOURCE, other.hashes).held == 0


def test_what_is_sealed_is_found_by_what_is_not() -> None:
    """Who asks has the engine's hashes, and the router the key."""
    key, index = HashKey(b"k" * 32), PrefixIndex()
    hold_key(key)
    prompt, chain = Prefix(tokens(64), as_int=False), HashChain.from_seed("sha256")
    groups = [GroupSpec("full_attention", 16)]
    layout = CacheLayout("p", groups, 16, 16, chain.algorithm, chain.none_hash)
    apply(index, replace(layout, hash_key_id=key.key_id), sealed(prompt.stored(0, FULL), key))
    found = index.match_hashes(SOURCE, prompt.hashes)
    assert (found.hit.gpu_cached_tokens, found.problem) == (64, None)


def test_hashes_under_a_key_that_is_not_here_are_named() -> None:
    """Nobody can ask for them."""
    prompt, index, chain = Prefix(tokens(64), as_int=False), PrefixIndex(), HashChain.from_seed()
    groups = [GroupSpec("full_attention", 16)]
    layout = CacheLayout("p", groups, 16, 16, chain.algorithm, chain.none_hash)
    key = HashKey(b"z" * 32)
    apply(index, replace(layout, hash_key_id=key.key_id), sealed(prompt.stored(0, FULL), key))
    assert "hash key" in (index.match_hashes(SOURCE, prompt.hashes).problem or "")


def test_a_source_without_a_layout_says_so() -> None:
    """Nothing is known of it yet."""
    index = PrefixIndex()
    index.add(SOURCE)
    assert index.match_hashes(SOURCE, [1]).problem == "its cache layout is not known yet"
    assert index.match_hashes(SourceId("nobody"), [1]).problem is not None


def test_a_tier_with_blocks_of_its_own_is_named() -> None:
    """Its hashes are of larger blocks: those of the GPU do not lead there."""
    index, large = PrefixIndex(), KVCacheGroup(FULL.kind, 64)
    below = Prefix(PROMPT.tokens, hash_block_size=64).stored(0, large, end=128, medium="CPU")
    apply(index, PROMPT.stored(0, FULL, end=64), below)
    assert isinstance(below, BlockStored)
    found = index.match_hashes(SOURCE, PROMPT.hashes)
    assert found.hit.gpu_cached_tokens == 64
    assert found.problem == "a tier below its GPU has blocks of its own, under other hashes"
