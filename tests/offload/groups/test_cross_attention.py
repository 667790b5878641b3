"""Cross attention: one request's own blocks for the encoder's output."""

from __future__ import annotations

import pytest

from offload.groups.base import GroupManager, Retention
from offload.groups.cross_attention import CrossAttentionManager
from tests.offload.small_cache import ids, manager_of, need, request, take_events
from tests.support.cache_driver import free_ids
from tests.support.cache_layouts import cross


@pytest.fixture
def group() -> GroupManager:
    return manager_of(CrossAttentionManager, cross(8), max_model_len=16)


@pytest.mark.parametrize("is_admission", [False, True])
@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (8, 1), (10, 2), (100, 13)])
def test_the_encoders_tokens_get_blocks_once(
    group: GroupManager, tokens: int, blocks: int, is_admission: bool
) -> None:
    """Their number is fixed, and independent of the decoder's longest request."""
    assert group.num_blocks_to_allocate("a", need(0, encoder=tokens), is_admission) == blocks
    assert len(group.allocate_new_blocks("a", need(0, encoder=tokens))) == blocks
    assert group.num_blocks_to_allocate("a", need(0, encoder=tokens), is_admission) == 0
    assert group.allocate_new_blocks("a", need(0, encoder=tokens)) == []


def test_blocks_are_held_to_the_end(group: GroupManager) -> None:
    """Every token of the decoder looks at all of them."""
    group.allocate_new_blocks("a", need(0, encoder=10))
    group.free_skipped_blocks("a", 1000)
    assert ids(group.block_table("a")) == [1, 2]
    group.free("a")
    assert free_ids(group.pool)[:2] == [2, 1]


def test_nothing_is_shared_loaded_or_cached(group: GroupManager) -> None:
    """The same decoder tokens after another encoder's output are a different text."""
    group.adopt_computed_blocks("a", (), 40)
    assert group.holds("a")
    assert ids(group.block_table("a")) == []
    group.allocate_external_blocks("a", 40)
    assert ids(group.block_table("a")) == []
    group.allocate_new_blocks("a", need(0, encoder=10))
    group.cache_blocks(request("a", range(40), 8), 40, Retention(None))
    assert len(group.pool.cached(group.group_idx)) == 0
    assert (group.num_cached_blocks("a"), take_events(group.pool)) == (0, [])
