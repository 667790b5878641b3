"""Which blocks are held, which can be found again, and which is evicted next."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import pytest

from kvevents.events import GPU, AllBlocksCleared, BlockRemoved
from offload.block import Block
from offload.block_pool import BlockPool, GroupPoolStatistics, PoolStatistics
from offload.errors import BlockRangeError
from offload.event_log import EventLog
from offload.request import CacheRequest
from tests.offload.small_cache import GROUP_0, GROUP_1, ids, removed, request, stored, take_events
from tests.support.cache_driver import free_ids
from tests.support.cache_layouts import full, mamba, window


def pool_of(num_blocks: int = 10, enable_events: bool = True) -> BlockPool:
    groups = [full(), window(9)]
    return BlockPool(num_blocks, groups, EventLog(groups) if enable_events else None)


def compute(pool: BlockPool, prompt: CacheRequest, group_idx: int = GROUP_0) -> list[Block]:
    """Give a prompt blocks of four tokens and cache all that are full."""
    blocks = pool.get_new_blocks(-(-prompt.num_tokens // 4))
    pool.cache_full_blocks(
        prompt, GROUP_1 if group_idx else GROUP_0, blocks, 0, prompt.num_tokens // 4
    )
    return blocks


def give_back(pool: BlockPool, blocks: Sequence[Block]) -> None:
    """Free blocks as a finished request does: its last block first."""
    pool.free_blocks(reversed(blocks))


def found(pool: BlockPool, prompt: CacheRequest, group_idx: int = GROUP_0) -> list[int | None]:
    """Ids of the blocks that serve a prompt."""
    blocks = [
        pool.cached(GROUP_1 if group_idx else GROUP_0).get(block_hash)
        for block_hash in prompt.block_hashes
    ]
    return [None if block is None else block.block_id for block in blocks]


# --- the order of eviction ---------------------------------------------------------------------


def test_blocks_without_a_hash_go_first_and_the_latest_freed_before_the_others() -> None:
    """Nothing is lost with them, and the latest one's memory is still warm."""
    pool = pool_of()
    blocks = pool.get_new_blocks(5)
    pool.free_blocks(blocks[:1])
    pool.free_blocks(blocks[2:3])
    give_back(pool, blocks[3:])
    assert free_ids(pool) == [5, 4, 3, 1, 6, 7, 8, 9]


def test_cached_blocks_go_last_the_tail_of_a_request_before_its_head() -> None:
    """The head of a prompt serves more requests than its end, and the end serves none without
    it."""
    pool = pool_of()
    give_back(pool, compute(pool, request("a", range(14))))
    assert free_ids(pool) == [4, 5, 6, 7, 8, 9, 3, 2, 1]


def test_cached_blocks_go_least_recently_used_first() -> None:
    """A prefix that was just hit will be hit again."""
    pool = pool_of(7)
    prompts = [request("a", range(8)), request("b", range(50, 58)), request("c", range(80, 88))]
    tables = [compute(pool, prompt) for prompt in prompts]
    for table in tables:
        give_back(pool, table)
    assert free_ids(pool) == [2, 1, 4, 3, 6, 5]
    pool.touch(tables[0])
    assert free_ids(pool) == [4, 3, 6, 5]
    give_back(pool, tables[0])
    assert free_ids(pool) == [4, 3, 6, 5, 2, 1]
    assert ids(pool.get_new_blocks(3)) == [4, 3, 6]
    assert [found(pool, prompt) for prompt in prompts] == [[1, 2], [None, None], [5, None]]


def test_a_block_is_free_only_when_no_request_references_it() -> None:
    """Two requests read the same prefix; the first to finish must not take it from the second."""
    pool = pool_of()
    blocks = compute(pool, request("a", range(8)))
    pool.touch(blocks)
    give_back(pool, blocks)
    assert [block.ref_count for block in blocks] == [1, 1]
    assert pool.num_free_blocks == 7
    give_back(pool, blocks)
    assert pool.num_free_blocks == 9


def test_the_null_block_is_never_given_out_counted_or_freed() -> None:
    """It is in every table at once, so a reference to it means nothing."""
    pool = pool_of(3)
    null = pool.null_block
    assert (null.block_id, null.is_null) == (0, True)
    pool.touch([null, null])
    pool.free_blocks([null])
    assert null.ref_count == 0
    assert ids(pool.get_new_blocks(2)) == [1, 2]
    pool.cache_full_blocks(request("a", range(8)), GROUP_0, [null, null], 0, 2)
    assert len(pool.cached(GROUP_0)) == 0
    assert null.block_hash is None


def test_usage_is_the_share_of_blocks_that_requests_hold() -> None:
    """Cached blocks that no request holds are available at any time."""
    pool = pool_of(11)
    assert pool.usage == 0.0
    blocks = compute(pool, request("a", range(12)))
    assert pool.usage == pytest.approx(0.3)
    give_back(pool, blocks)
    assert pool.usage == 0.0
    pool.get_new_blocks(10)
    assert pool.usage == 1.0


def test_a_block_given_out_again_is_new() -> None:
    """Its old hash would serve its new holder's tokens to another request."""
    pool = pool_of(3)
    prompt = request("a", range(8))
    give_back(pool, compute(pool, prompt))
    blocks = pool.get_new_blocks(2)
    assert {(block.block_hash, block.ref_count, block.has_slid_out) for block in blocks} == {
        (None, 1, False)
    }
    assert found(pool, prompt) == [None, None]


# --- caching --------------------------------------------------------------------------------------


def test_each_group_finds_its_own_blocks() -> None:
    """The same prefix has the same hash in every group, but different bytes."""
    pool = pool_of()
    prompt = request("a", range(8))
    compute(pool, prompt, GROUP_0)
    assert (found(pool, prompt, GROUP_0), found(pool, prompt, GROUP_1)) == ([1, 2], [None, None])
    compute(pool, prompt, GROUP_1)
    assert (found(pool, prompt, GROUP_0), found(pool, prompt, GROUP_1)) == ([1, 2], [3, 4])


def test_only_requested_blocks_that_the_mask_keeps_are_cached() -> None:
    """A mask has one flag per block of the requested range."""
    pool = pool_of()
    prompt = request("a", range(32))
    blocks = pool.get_new_blocks(8)
    pool.cache_full_blocks(prompt, GROUP_0, blocks, 2, 7, [True, False, True, True, False])
    assert found(pool, prompt) == [None, None, 3, None, 5, 6, None, None]
    assert [
        (event.block_hashes, event.parent_block_hash) for event in stored(take_events(pool))
    ] == [
        (prompt.block_hashes[2:3], prompt.block_hashes[1]),
        (prompt.block_hashes[4:6], prompt.block_hashes[3]),
    ]


def test_a_block_that_is_cached_keeps_its_hash_and_is_not_counted_again() -> None:
    """A request that adopted a hit caches from its start, and must not announce the hit again."""
    pool = pool_of()
    prompt = request("a", range(16))
    blocks = compute(pool, prompt)
    take_events(pool)
    pool.evict_blocks([2])
    pool.cache_full_blocks(prompt, GROUP_0, blocks, 0, 4)
    assert found(pool, prompt) == [1, 2, 3, 4]
    assert pool.statistics().groups[0] == GroupPoolStatistics(cached=4, stored=5, evicted=1)
    assert take_events(pool) == []


def test_runs_end_at_null_blocks() -> None:
    """Blocks of a window that slid out are null blocks in the middle of a table."""
    pool = pool_of()
    prompt = request("a", range(16))
    first, last, behind = pool.get_new_blocks(3)
    pool.cache_full_blocks(prompt, GROUP_1, [first, pool.null_block, last, behind], 0, 4)
    assert found(pool, prompt, GROUP_1) == [1, None, 2, 3]
    events = stored(take_events(pool))
    assert [event.token_ids for event in events] == [[0, 1, 2, 3], [8, 9, 10, 11, 12, 13, 14, 15]]
    assert [event.group_idx for event in events] == [1, 1]


def test_a_group_with_larger_blocks_is_cached_by_the_hash_at_their_end() -> None:
    """A state after eight tokens has the hash of the second of its two hash blocks."""
    groups = [full(4), mamba(8)]
    pool = BlockPool(10, groups, EventLog(groups))
    prompt = request("a", range(20))
    pool.cache_full_blocks(prompt, GROUP_1, pool.get_new_blocks(2), 0, 2)
    assert found(pool, prompt, GROUP_1) == [None, 1, None, 2, None]
    (event,) = stored(take_events(pool))
    assert (event.block_hashes, event.token_ids) == (
        [prompt.block_hashes[1], prompt.block_hashes[3]],
        list(range(16)),
    )


# --- two requests that compute the same -----------------------------------------------------------


def test_two_copies_are_stored_once_and_removed_with_the_last() -> None:
    """A router that counts would lose the block with the first copy, or keep it after the last."""
    pool = pool_of(5)
    prompt = request("a", range(8))
    first, second = compute(pool, prompt), compute(pool, request("b", range(8)))
    events = take_events(pool)
    assert [event.block_hashes for event in stored(events)] == [prompt.block_hashes]
    assert len(events) == 1
    give_back(pool, first)
    pool.get_new_blocks(2)
    assert take_events(pool) == []
    assert found(pool, prompt) == [3, 4]
    give_back(pool, second)
    pool.get_new_blocks(1)
    assert take_events(pool) == [BlockRemoved([prompt.block_hashes[1]], GPU, 0)]
    assert found(pool, prompt) == [3, None]


def test_the_later_copy_may_go_first() -> None:
    """Either of two equal requests may end first."""
    pool = pool_of(5)
    prompt = request("a", range(8))
    first, second = compute(pool, prompt), compute(pool, request("b", range(8)))
    take_events(pool)
    give_back(pool, second)
    pool.get_new_blocks(2)
    assert (take_events(pool), found(pool, prompt)) == ([], [1, 2])
    give_back(pool, first)
    pool.get_new_blocks(2)
    assert take_events(pool) == [BlockRemoved([*reversed(prompt.block_hashes)], GPU, 0)]


def test_the_part_that_two_prompts_share_is_reported_by_the_first() -> None:
    """The second's event starts behind the shared blocks and refers to them by its parent."""
    pool = pool_of()
    one, other = request("a", range(8)), request("b", [*range(8), 50, 51, 52, 53])
    compute(pool, one)
    compute(pool, other)
    first, second = stored(take_events(pool))
    assert (first.block_hashes, first.parent_block_hash, first.token_ids) == (
        one.block_hashes,
        None,
        list(range(8)),
    )
    assert (second.block_hashes, second.token_ids) == (other.block_hashes[2:], [50, 51, 52, 53])
    assert second.parent_block_hash == one.block_hashes[1]


def test_a_block_evicted_for_its_own_content_is_not_reported() -> None:
    """The last free block held the very prefix that is computed into it again."""
    pool = pool_of(3)
    give_back(pool, compute(pool, request("a", range(8))))
    take_events(pool)
    compute(pool, request("b", range(8)))
    assert take_events(pool) == []
    assert [group.evicted for group in pool.statistics().groups] == [2, 0]


def test_an_eviction_names_its_group_also_where_it_is_the_first() -> None:
    """A window's eviction costs nothing where a full group's ends the prefix.

    Group 0 differs from no group.
    """
    pool = pool_of(4)
    prompt = request("a", range(4))
    for group_idx in (GROUP_1, GROUP_0):
        give_back(pool, compute(pool, prompt, group_idx))
    take_events(pool)
    pool.get_new_blocks(3)
    assert removed(take_events(pool)) == [
        BlockRemoved([*prompt.block_hashes], GPU, 0),
        BlockRemoved([*prompt.block_hashes], GPU, 1),
    ]


# --- eviction by hand, and reset ------------------------------------------------------------------


def test_a_block_evicted_by_hand_is_kept_by_its_holder_and_no_longer_found() -> None:
    """A load failed: its request computes the block again, and no other may start from it."""
    pool = pool_of()
    prompt = request("a", range(12))
    blocks = compute(pool, prompt)
    take_events(pool)
    pool.evict_blocks([2, 2, 9])
    assert found(pool, prompt) == [1, None, 3]
    assert blocks[1].ref_count == 1
    assert take_events(pool) == [BlockRemoved([prompt.block_hashes[1]], GPU, 0)]
    assert pool.statistics().groups[0].evicted == 1
    give_back(pool, blocks)
    assert free_ids(pool)[:2] == [2, 4]


@pytest.mark.parametrize("block_id", [0, -1, 10])
def test_an_id_outside_the_pool_evicts_nothing(block_id: int) -> None:
    """Nothing is done by half; the null block cannot be evicted either."""
    pool = pool_of()
    prompt = request("a", range(8))
    compute(pool, prompt)
    take_events(pool)
    with pytest.raises(
        BlockRangeError, match=rf"^evict_blocks: block id {block_id} must lie in \[1, 9\]$"
    ):
        pool.evict_blocks([1, block_id])
    assert found(pool, prompt) == [1, 2]
    assert take_events(pool) == []


@pytest.mark.parametrize("count", [-1, 8, 100])
def test_more_blocks_than_are_free_are_refused_and_none_is_given_out(count: int) -> None:
    """A caller that did not check first must not leave the pool half empty."""
    pool = pool_of()
    prompt = request("a", range(8))
    blocks = compute(pool, prompt)
    free = free_ids(pool)
    with pytest.raises(
        BlockRangeError,
        match=re.escape(f"get_new_blocks: count {count} must lie in [0, 7], the free blocks"),
    ):
        pool.get_new_blocks(count)
    assert free_ids(pool) == free
    assert ids(blocks) == found(pool, prompt) == [1, 2]
    assert pool.get_new_blocks(0) == []


def test_evictions_and_resets_only_ever_count_up() -> None:
    """A hit is stale when the count has changed: a reset may not undo what an eviction added."""
    pool = pool_of()
    give_back(pool, compute(pool, request("a", range(8))))
    pool.evict_blocks([1])
    assert pool.evictions == 1
    assert pool.reset_prefix_cache()
    assert pool.evictions == 2


def test_a_reset_is_refused_while_a_block_is_held_and_changes_nothing() -> None:
    """After new weights a running request's blocks are wrong, and it would cache more of them."""
    pool = pool_of()
    prompt = request("a", range(8))
    blocks = compute(pool, prompt)
    pool.free_blocks(blocks[1:])
    take_events(pool)
    before = (pool.statistics(), free_ids(pool), found(pool, prompt))
    assert not pool.reset_prefix_cache()
    assert (pool.statistics(), free_ids(pool), found(pool, prompt)) == before
    assert take_events(pool) == []


def test_a_reset_forgets_everything_and_is_one_event() -> None:
    """Lower tiers survive, so the GPU's blocks have an event of their own."""
    pool = pool_of()
    prompt = request("a", range(8))
    for group_idx in (GROUP_0, GROUP_0, GROUP_1):
        give_back(pool, compute(pool, prompt, group_idx))
    assert pool.reset_prefix_cache()
    assert take_events(pool) == [AllBlocksCleared()]
    assert found(pool, prompt, GROUP_0) == found(pool, prompt, GROUP_1) == [None, None]
    assert [group.cached for group in pool.statistics().groups] == [0, 0]
    pool.get_new_blocks(9)
    assert take_events(pool) == []


def test_what_is_stored_after_a_reset_in_the_same_step_is_reported_behind_it() -> None:
    """Reported before it, it would be cleared at the router and stay in the engine."""
    pool = pool_of()
    prompt = request("a", range(8))
    give_back(pool, compute(pool, prompt))
    pool.reset_prefix_cache()
    compute(pool, request("b", range(8)))
    cleared, event = take_events(pool)
    assert cleared == AllBlocksCleared()
    assert stored([event])[0].block_hashes == prompt.block_hashes


# --- what it reports ------------------------------------------------------------------------------


def test_without_an_event_log_everything_else_is_the_same() -> None:
    """An engine that publishes nothing must not pay with memory that grows."""
    pool = pool_of(3, enable_events=False)
    prompt = request("a", range(8))
    give_back(pool, compute(pool, prompt))
    assert found(pool, prompt) == [1, 2]
    given = pool.get_new_blocks(1)
    assert found(pool, prompt) == [1, None]
    pool.evict_blocks([1])
    assert found(pool, prompt) == [None, None]
    pool.free_blocks(given)
    assert pool.reset_prefix_cache()


def test_statistics_count_what_happened_in_each_group() -> None:
    """An operator sees which group's blocks are evicted, and whether that cost hits."""
    pool = pool_of(7)
    prompt = request("a", range(8))
    full_blocks, window_blocks = compute(pool, prompt, GROUP_0), compute(pool, prompt, GROUP_1)
    compute(pool, request("b", range(8)), GROUP_1)
    assert pool.statistics() == PoolStatistics(
        num_blocks=6,
        free=0,
        groups=(GroupPoolStatistics(cached=2, stored=2), GroupPoolStatistics(cached=2, stored=4)),
    )
    pool.free_blocks(window_blocks, have_slid_out=True)
    give_back(pool, full_blocks)
    pool.get_new_blocks(3)
    assert pool.statistics() == PoolStatistics(
        num_blocks=6,
        free=1,
        groups=(
            GroupPoolStatistics(cached=1, stored=2, evicted=1),
            GroupPoolStatistics(cached=2, stored=4, evicted=2, evicted_after_sliding=2),
        ),
    )


def test_a_block_used_again_after_it_slid_out_is_an_ordinary_one() -> None:
    """Its eviction costs a hit, and must not be counted as harmless."""
    pool = pool_of(3)
    blocks = compute(pool, request("a", range(8)))
    pool.free_blocks(blocks, have_slid_out=True)
    pool.touch(blocks[:1])
    pool.free_blocks(blocks[:1])
    pool.get_new_blocks(2)
    assert pool.statistics().groups[0] == GroupPoolStatistics(
        cached=0, stored=2, evicted=2, evicted_after_sliding=1
    )


def test_a_block_in_use_again_has_not_slid_out() -> None:
    """Its reader would miss it after an eviction."""
    pool = pool_of(3)
    blocks = compute(pool, request("a", range(8)))
    pool.free_blocks(blocks, have_slid_out=True)
    pool.touch(blocks[:1])
    pool.evict_blocks([1, 2])
    assert pool.statistics().groups[0] == GroupPoolStatistics(
        cached=0, stored=2, evicted=2, evicted_after_sliding=1
    )


def test_a_block_another_request_still_holds_has_not_slid_out() -> None:
    """The other request decides when it goes."""
    pool = pool_of(2)
    blocks = compute(pool, request("a", range(4)))
    pool.touch(blocks)
    pool.free_blocks(blocks, have_slid_out=True)
    pool.free_blocks(blocks)
    pool.get_new_blocks(1)
    assert pool.statistics().groups[0].evicted_after_sliding == 0


def test_a_block_of_one_request_given_to_another_does_not_count_as_slid() -> None:
    """The flag belongs to the content, which is gone."""
    pool = pool_of(2)
    pool.free_blocks(compute(pool, request("a", range(4))), have_slid_out=True)
    compute(pool, request("b", range(4, 8)))
    pool.evict_blocks([1])
    assert pool.statistics().groups[0] == GroupPoolStatistics(
        cached=0, stored=2, evicted=2, evicted_after_sliding=1
    )


# --- the integrity check --------------------------------------------------------------------------


def held_once(blocks: Sequence[Block]) -> Counter[int]:
    return Counter(ids(blocks))


def test_a_sound_pool_passes_the_integrity_check() -> None:
    """Held, free and cached blocks, copies of one hash, and the null block."""
    pool = pool_of()
    first = compute(pool, request("a", range(8)))
    second = compute(pool, request("b", range(8)))
    give_back(pool, first)
    pool.check_integrity(held_once(second))


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        ("a lost reference", "2 references exist"),
        ("a forgotten holder", "0 references exist"),
        ("a held block in the queue", "wrongly free"),
        ("a free block outside the queue", "wrongly free"),
        ("a hash that is not listed", "missing or stale"),
        ("a listed hash that is gone", "missing or stale"),
        ("another hash than its own", "another hash than its own"),
        ("a hash on the null block", "the null block"),
    ],
)
def test_the_integrity_check_finds_damage(damage: str, complaint: str) -> None:
    """The property tests rely on it."""
    pool = pool_of()
    blocks = compute(pool, request("a", range(8)))
    references = held_once(blocks)
    if damage == "a lost reference":
        references[blocks[0].block_id] += 1
    elif damage == "a forgotten holder":
        del references[blocks[0].block_id]
    elif damage == "a held block in the queue":
        pool.free_queue.append(blocks[:1])
    elif damage == "a free block outside the queue":
        pool.free_queue.pop(1)
    elif damage == "a hash that is not listed":
        pool.cached(GROUP_0).clear()
    elif damage == "a listed hash that is gone":
        blocks[0].block_hash = None
    elif damage == "another hash than its own":
        blocks[0].block_hash = b"another"
    else:
        pool.null_block.block_hash = b"a hash"
    with pytest.raises(AssertionError, match=complaint):
        pool.check_integrity(references)
