"""Full attention: everything is held to the end."""

from __future__ import annotations

import pytest

from kvevents.layout import KVCacheGroup
from offload.groups.base import GroupManager, blocks_for
from tests.offload.small_cache import (
    KEEP_ALL,
    cached_and_free,
    ids,
    manager_of,
    need,
    request,
    table_after,
)
from tests.support.cache_driver import free_ids
from tests.support.cache_layouts import full


def manager(
    group: KVCacheGroup | None = None, max_model_len: int = 200, num_blocks: int = 50
) -> GroupManager:
    return manager_of(
        GroupManager, group or full(), max_model_len=max_model_len, num_blocks=num_blocks
    )


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_tokens_need_whole_blocks(tokens: int, blocks: int) -> None:
    """One token more than a block has needs another block."""
    assert blocks_for(tokens, 4) == blocks
    assert table_after(manager(), tokens) == list(range(1, blocks + 1))


def test_every_block_is_held_while_the_request_runs() -> None:
    """Every later token looks at all of them."""
    group = manager()
    for tokens in (10, 11, 13, 40):
        group.free_skipped_blocks("a", tokens)
        group.allocate_new_blocks("a", need(tokens))
    assert ids(group.block_table("a")) == list(range(1, 11))
    assert (group.num_skipped_tokens(1000), group.skipped_blocks("a", 40), group.slid_out) == (
        0,
        [],
        0,
    )


def test_every_table_that_lists_a_block_refers_to_it() -> None:
    """Against these sums the pool's own counts are checked."""
    group = manager()
    group.allocate_new_blocks("a", need(10))
    group.adopt_computed_blocks("b", list(group.block_table("a"))[:2], 8)
    assert group.references() == {1: 2, 2: 2, 3: 1}


def test_only_the_missing_blocks_are_given() -> None:
    """The scheduler passes only these on to the worker."""
    group = manager()
    assert ids(group.allocate_new_blocks("a", need(10))) == [1, 2, 3]
    assert ids(group.allocate_new_blocks("a", need(12))) == []
    assert ids(group.allocate_new_blocks("a", need(13))) == [4]


def test_slots_for_drafts_are_given_with_the_tokens() -> None:
    """Drafts are written before they are accepted or rejected."""
    group = manager()
    assert group.num_blocks_to_allocate("a", need(4, slots=9)) == 3
    assert ids(group.allocate_new_blocks("a", need(4, slots=9))) == [1, 2, 3]
    assert group.num_blocks_to_allocate("a", need(5, slots=10)) == 0


def test_blocks_come_back_the_last_first_and_twice_is_no_error() -> None:
    """A request may be aborted after it has finished."""
    group = manager(num_blocks=6)
    group.allocate_new_blocks("a", need(10))
    assert group.holds("a")
    group.free("a")
    group.free("a")
    assert not group.holds("a")
    assert (group.block_table("a"), group.num_cached_blocks("a")) == ((), 0)
    assert free_ids(group.pool) == [3, 2, 1, 4, 5]


def test_a_request_counts_what_it_lacks() -> None:
    """The cache manager adds these up before anything is given."""
    group = manager()
    assert [group.num_blocks_to_allocate("a", need(tokens)) for tokens in (1, 4, 5, 40)] == [
        1,
        1,
        2,
        10,
    ]
    group.allocate_new_blocks("a", need(10))
    assert [group.num_blocks_to_allocate("a", need(tokens)) for tokens in (4, 10, 12, 13, 40)] == [
        0,
        0,
        0,
        1,
        7,
    ]


def test_a_hits_blocks_count_while_no_other_request_references_them() -> None:
    """They leave the free queue just as new ones do."""
    group = manager()
    hit = cached_and_free(group, request("old", range(8)), 8)
    assert group.num_blocks_to_allocate("a", need(12, 8, hit)) == 3
    group.pool.touch(hit[:1])
    assert group.num_blocks_to_allocate("a", need(12, 8, hit)) == 2
    group.pool.touch(hit[1:])
    assert group.num_blocks_to_allocate("a", need(12, 8, hit)) == 1


def test_a_hits_blocks_head_the_table_and_count_as_cached() -> None:
    """They must not be cached a second time under the new request."""
    group = manager()
    hit = cached_and_free(group, request("old", range(8)), 8)
    group.adopt_computed_blocks("a", hit, 8)
    assert ids(group.allocate_new_blocks("a", need(12, 8))) == [3]
    assert ids(group.block_table("a")) == [1, 2, 3]
    assert [block.ref_count for block in group.block_table("a")] == [1, 1, 1]
    assert group.num_cached_blocks("a") == 2


def test_tokens_from_a_lower_tier_get_blocks_behind_the_hit() -> None:
    """The copy writes into them before the step runs."""
    group = manager()
    hit = cached_and_free(group, request("old", range(4)), 4)
    assert group.num_blocks_to_allocate("a", need(17, 12, hit)) == 5
    group.adopt_computed_blocks("a", hit, 12)
    group.allocate_external_blocks("a", 12)
    assert ids(group.block_table("a")) == [1, 2, 3]
    assert group.num_cached_blocks("a") == 1
    group.allocate_external_blocks("a", 12)
    assert ids(group.allocate_new_blocks("a", need(17, 12))) == [4, 5]


def test_full_blocks_can_be_found_as_soon_as_they_are_cached_and_only_those() -> None:
    """Half a block cannot serve a hit."""
    group, prompt = manager(), request("a", range(20))
    group.allocate_new_blocks("a", need(20))
    group.cache_blocks(prompt, 7, KEEP_ALL)
    assert (len(group.pool.cached(group.group_idx)), group.num_cached_blocks("a")) == (1, 1)
    group.cache_blocks(prompt, 7, KEEP_ALL)
    group.cache_blocks(prompt, 3, KEEP_ALL)
    assert group.num_cached_blocks("a") == 1
    group.cache_blocks(prompt, 20, KEEP_ALL)
    assert [
        block_hash in group.pool.cached(group.group_idx) for block_hash in prompt.block_hashes
    ] == [True] * 5


@pytest.mark.parametrize(("max_model_len", "blocks"), [(200, 50), (198, 50), (20, 5), (1, 1)])
def test_a_request_is_admitted_for_as_much_as_the_longest_can_hold(
    max_model_len: int, blocks: int
) -> None:
    """Nothing is given back on the way, so the whole of it must fit."""
    group = manager(max_model_len=max_model_len)
    assert group.max_held_blocks() == blocks
    assert group.num_blocks_to_allocate("a", need(400), is_admission=True) == blocks
    assert group.num_blocks_to_allocate("a", need(400)) == 100


def test_every_block_is_kept_and_readable() -> None:
    """A later prompt may share any part from the head on."""
    group = manager()
    assert group.keep_mask("a", 0, 10, KEEP_ALL) is None
    assert group.can_read(())
    hit = cached_and_free(group, request("old", range(8)), 8)
    assert group.can_read(hit)
