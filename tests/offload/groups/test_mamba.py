"""Mamba and linear attention: at most two states, of which those at a block's end serve hits."""

from __future__ import annotations

import pytest

from offload.groups.base import GroupManager, Retention
from offload.groups.mamba import MambaManager
from offload.request import CacheRequest
from tests.offload.small_cache import KEEP_ALL, cached_and_free, ids, manager_of, need, request
from tests.support.cache_layouts import mamba


def manager(scheduler: int = 4, eagle: bool = False) -> GroupManager:
    return manager_of(MambaManager, mamba(), scheduler_block_size=scheduler, eagle=eagle)


def run(
    group: GroupManager, prompt: CacheRequest, *ends: int, retention: Retention = KEEP_ALL
) -> None:
    """Compute a prompt in steps that end at *ends*, and cache after each."""
    computed = 0
    for end in ends:
        group.free_skipped_blocks(prompt.request_id, computed)
        group.allocate_new_blocks(prompt.request_id, need(end, computed))
        group.cache_blocks(prompt, end, retention)
        computed = end


def found(group: GroupManager, prompt: CacheRequest) -> list[int]:
    """Token positions whose state can be found."""
    cached = group.pool.cached(group.group_idx)
    return [
        end
        for end in range(4, len(prompt.block_hashes) * 4 + 1, 4)
        if prompt.hash_at(end) in cached
    ]


# --- what is held ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ends", "table"),
    [
        ([3], [1]),
        ([4], [1]),
        ([10], [0, 0, 1]),
        ([40], [0] * 9 + [1]),
        ([4, 8], [1, 2]),
        ([4, 8, 12], [0, 2, 3]),
        ([10, 12], [0, 0, 1]),
        ([10, 13], [0, 0, 1, 2]),
        ([10, 30], [0, 0, 1, 0, 0, 0, 0, 2]),
        ([10, 30, 33], [0] * 7 + [2, 1]),
        ([8, 9, 10, 11, 12, 13], [0, 0, 2, 3]),
    ],
)
def test_a_step_holds_the_state_it_starts_from_and_the_one_it_ends_with(
    ends: list[int], table: list[int]
) -> None:
    """A state summarises all tokens before it, so a request runs in two blocks at any length."""
    group, prompt = manager(), request("a", range(40))
    run(group, prompt, *ends)
    assert ids(group.block_table("a")) == table


def test_the_state_before_the_last_goes_when_the_step_is_over() -> None:
    """Until then the step reads it."""
    group = manager()
    run(group, request("a", range(40)), 8, 20)
    assert ids(group.skipped_blocks("a", 8)) == []
    assert ids(group.skipped_blocks("a", 20)) == [1]
    group.free_skipped_blocks("a", 20)
    assert ids(group.block_table("a")) == [0, 0, 0, 0, 2]
    assert (group.slid_out, group.skipped_blocks("a", 20)) == (1, [])


def test_a_state_is_given_back_once() -> None:
    """Given back twice, it would belong to two requests at the same time."""
    group = manager()
    run(group, request("a", range(40)), 8, 20, 40)
    group.free_skipped_blocks("a", 40)
    group.free_skipped_blocks("a", 20)
    assert ids(group.block_table("a")) == [0] * 9 + [3]
    assert group.slid_out == 2


def test_a_request_that_starts_over_starts_with_nothing() -> None:
    """A preempted request returns under its id."""
    group, prompt = manager(), request("a", range(40))
    run(group, prompt, 8, 20, 40)
    group.free("a")
    assert not group.holds("a")
    group.pool.evict_blocks([1, 2, 3])
    run(group, prompt, 4, 8, 12)
    assert ids(group.block_table("a")) == [0, 5, 6]
    assert found(group, prompt) == [4, 8, 12]


def test_a_preempted_requests_old_states_do_not_count_for_its_new_ones() -> None:
    """Its first run ended with a block, its second inside it.

    That state must not be found under the block's hash.
    """
    group, prompt = manager(), request("a", range(20))
    group.allocate_new_blocks("a", need(8))
    group.free("a")
    run(group, prompt, 6, 10)
    assert found(group, prompt) == []


def test_the_state_behind_a_rejected_draft_is_not_that_of_the_tokens_that_came_instead() -> None:
    """The next step may pass the block's end without another state there."""
    group, prompt = manager(), request("a", range(20))
    run(group, prompt, 6)
    group.allocate_new_blocks("a", need(8, 6))  # a token and a draft
    group.cache_blocks(prompt, 7, KEEP_ALL)  # the draft is rejected
    group.allocate_new_blocks("a", need(10, 7))
    group.cache_blocks(prompt, 10, KEEP_ALL)
    assert found(group, prompt) == []


# --- what is needed -------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 4, 5, 400])
def test_a_new_request_needs_one_block_whatever_its_length(tokens: int) -> None:
    """Also when the whole of it must fit."""
    group = manager()
    assert group.num_blocks_to_allocate("a", need(tokens)) == 1
    assert group.num_blocks_to_allocate("a", need(tokens), is_admission=True) == 1


def test_a_running_request_needs_a_block_when_it_leaves_its_last() -> None:
    """Within a block the state is overwritten in place."""
    group = manager()
    run(group, request("a", range(40)), 10)
    assert [
        group.num_blocks_to_allocate("a", need(tokens, 10)) for tokens in (11, 12, 13, 100)
    ] == [0, 0, 1, 1]


def test_drafts_get_no_state_of_their_own() -> None:
    """Only the last verified token's state counts."""
    group = manager()
    assert ids(group.allocate_new_blocks("a", need(4, slots=9))) == [1]
    assert ids(group.block_table("a")) == [1]
    assert group.num_blocks_to_allocate("a", need(4, slots=20)) == 0


def test_a_hits_state_counts_while_no_other_request_references_it() -> None:
    """Null blocks before it count nothing."""
    group = manager()
    state = cached_and_free(group, request("old", range(16)), 16)[-1]
    hit = [group.pool.null_block] * 3 + [state]
    assert group.num_blocks_to_allocate("a", need(20, 16, hit)) == 2
    assert group.num_blocks_to_allocate("a", need(16, 16, hit)) == 1
    group.pool.touch([state])
    assert group.num_blocks_to_allocate("a", need(20, 16, hit)) == 1
    group.adopt_computed_blocks("a", hit, 16)
    assert ids(group.block_table("a")) == [0, 0, 0, 1]
    assert state.ref_count == 2


@pytest.mark.parametrize(
    ("hit_tokens", "external", "total", "table"),
    [
        (0, 8, 8, [0, 2]),
        (0, 8, 9, [0, 2, 3]),
        (0, 8, 30, [0, 2, 0, 0, 0, 0, 0, 3]),
        (4, 4, 12, [0, 2, 3]),
        (4, 8, 12, [0, 0, 2]),
    ],
)
def test_a_state_that_a_tier_brings_is_counted_besides_the_one_the_step_makes(
    hit_tokens: int, external: int, total: int, table: list[int]
) -> None:
    """A block that is taken but was not counted is missing in the middle of an admission."""
    group = manager()
    state = cached_and_free(group, request("old", range(4)), 4)
    computed, hit = hit_tokens + external, state[: hit_tokens // 4]
    promised = group.num_blocks_to_allocate("a", need(total, computed, hit))
    free = group.pool.num_free_blocks
    group.adopt_computed_blocks("a", hit, computed)
    group.allocate_external_blocks("a", computed)
    group.allocate_new_blocks("a", need(total, computed))
    assert ids(group.block_table("a")) == table
    assert promised == free - group.pool.num_free_blocks


def test_a_whole_request_is_admitted_for_one_state_also_where_a_tier_brings_another() -> None:
    """As for every request, the second is held only while a step goes from one to the other."""
    group = manager()
    assert group.num_blocks_to_allocate("a", need(30, 8)) == 2
    assert group.num_blocks_to_allocate("a", need(30, 8), is_admission=True) == 1
    assert group.num_blocks_to_allocate("a", need(8, 8), is_admission=True) == 1


# --- what is kept ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ends", "states"),
    [
        ([20], [20]),
        ([8, 20], [8, 20]),
        ([4, 8, 12, 16, 20], [4, 8, 12, 16, 20]),
        ([10, 20], [20]),
        ([10, 12, 20], [12, 20]),
        ([3, 6, 9], []),
        ([3, 4, 5, 6, 7, 8], [4, 8]),
        ([19], []),
    ],
)
def test_only_states_of_whole_blocks_can_be_found(ends: list[int], states: list[int]) -> None:
    """A block's hash covers its last token.

    A state that stopped before it would continue another prompt wrongly.
    """
    group, prompt = manager(), request("a", range(20))
    run(group, prompt, *ends)
    assert found(group, prompt) == states


def test_a_state_that_a_tier_brought_can_be_found_once_it_is_cached() -> None:
    """It covers whole blocks, like one computed here."""
    group, prompt = manager(), request("a", range(20))
    group.adopt_computed_blocks("a", (), 8)
    group.allocate_external_blocks("a", 8)
    group.allocate_new_blocks("a", need(14, 8))
    assert found(group, prompt) == []
    group.cache_blocks(prompt, 14, KEEP_ALL)
    assert found(group, prompt) == [8]


def test_a_state_recorded_before_caching_was_allowed_is_cached_later() -> None:
    """A load that may still fail delays caching."""
    group, prompt = manager(), request("a", range(20))
    group.allocate_new_blocks("a", need(8))
    group.allocate_new_blocks("a", need(16, 8))
    group.cache_blocks(prompt, 16, KEEP_ALL)
    assert found(group, prompt) == [8, 16]


def test_a_state_behind_the_last_possible_hit_is_cached_when_hits_can_reach_it() -> None:
    """Several groups cache up to where all can agree; states behind that must not be forgotten."""
    group, prompt = manager(8), request("a", range(20))
    group.allocate_new_blocks("a", need(12))
    group.cache_blocks(prompt, 8, KEEP_ALL)
    group.allocate_new_blocks("a", need(16, 12))
    group.cache_blocks(prompt, 16, KEEP_ALL)
    assert found(group, prompt) == [12, 16]


@pytest.mark.parametrize(
    ("scheduler", "retention", "states"),
    [
        (4, KEEP_ALL, [4, 8, 12, 16, 20, 24, 28, 32]),
        (8, KEEP_ALL, [4, 8, 12, 16, 20, 24, 28, 32]),
        (8, Retention(None, (20,)), [4, 8, 12, 16, 20, 24, 28, 32]),
        (8, Retention(16), [16, 32]),
        (8, Retention(0), []),
        (8, Retention(0, (21,)), [16]),
        (8, Retention(0, (24, 7)), [24]),
        (8, Retention(16, (29,)), [16, 24, 32]),
        (4, Retention(16, (29,)), [16, 28, 32]),
    ],
)
@pytest.mark.parametrize("eagle", [False, True])
def test_sparse_retention_keeps_states_at_the_interval_and_at_boundaries(
    scheduler: int, retention: Retention, states: list[int], eagle: bool
) -> None:
    """A state is as large as many blocks of attention: one in a thousand tokens is often enough.

    EAGLE changes nothing.
    """
    group, prompt = manager(scheduler, eagle), request("a", range(32))
    run(group, prompt, *range(4, 33, 4), retention=retention)
    assert found(group, prompt) == states


# --- what is readable -----------------------------------------------------------------------------


def test_a_state_cannot_be_read_in_the_step_that_writes_it() -> None:
    """Two prompts that share a prefix arrive together.

    The second would start from a state that is not written yet.
    """
    group, prompt = manager(), request("a", range(16))
    run(group, prompt, 8)
    hit = [group.pool.null_block, group.block_table("a")[1]]
    assert not group.can_read(hit)
    group.start_step()
    assert group.can_read(hit)


def test_a_step_makes_only_its_own_states_unreadable() -> None:
    """Those of earlier steps are ready, and a request without a hit reads none."""
    group, prompt = manager(), request("a", range(16))
    run(group, prompt, 8)
    earlier = list(group.block_table("a"))
    group.start_step()
    group.allocate_new_blocks("a", need(16, 8))
    group.cache_blocks(prompt, 16, KEEP_ALL)
    assert group.can_read(earlier)
    assert group.can_read(())
    assert not group.can_read(group.block_table("a"))
