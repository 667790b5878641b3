"""Sliding windows: blocks that slid out are given back, and only windows before hits are kept."""

from __future__ import annotations

import pytest

from kvevents.layout import KVCacheGroup
from offload.groups.base import GroupManager, Retention
from offload.groups.local import SlidingWindowManager
from tests.offload.small_cache import KEEP_ALL, ids, manager_of, need, request, table_after
from tests.support.cache_driver import free_ids
from tests.support.cache_layouts import window


def manager(
    size: int = 9,
    *,
    scheduler: int = 4,
    in_flight: int = 16,
    longest: int = 200,
    eagle: bool = False,
) -> GroupManager:
    return manager_of(
        SlidingWindowManager,
        window(size),
        scheduler_block_size=scheduler,
        max_in_flight_tokens=in_flight,
        max_model_len=longest,
        eagle=eagle,
    )


# --- what is held ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "tokens", "table"),
    [
        (9, 8, [1, 2]),
        (9, 11, [1, 2, 3]),
        (9, 12, [0, 2, 3]),
        (9, 13, [0, 2, 3, 4]),
        (9, 15, [0, 2, 3, 4]),
        (9, 16, [0, 0, 3, 4]),
        (9, 17, [0, 0, 3, 4, 5]),
        (9, 20, [0, 0, 0, 4, 5]),
        (1, 3, [1]),
        (1, 4, [0]),
        (1, 5, [0, 2]),
        (1, 8, [0, 0]),
        (2, 4, [1]),
        (2, 5, [0, 2]),
        (5, 8, [0, 2]),
        (6, 8, [1, 2]),
        (6, 9, [0, 2, 3]),
        (100, 40, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
    ],
)
def test_a_request_holds_the_blocks_its_next_token_looks_at(
    size: int, tokens: int, table: list[int]
) -> None:
    """The next token sees `size - 1` tokens before it.

    One block fewer and it reads another request's; one more is waste.
    """
    assert table_after(manager(size), tokens) == table


def test_blocks_slide_out_one_after_the_other_and_are_used_again() -> None:
    """A long answer runs in as many blocks as its window has, whatever its length."""
    group = manager()
    tables = []
    for tokens in range(4, 33, 4):
        group.free_skipped_blocks("a", tokens - 4)
        group.allocate_new_blocks("a", need(tokens, tokens - 4))
        tables.append([block_id for block_id in ids(group.block_table("a")) if block_id])
    assert tables == [[1], [1, 2], [1, 2, 3], [2, 3, 1], [3, 1, 2], [1, 2, 3], [2, 3, 1], [3, 1, 2]]
    assert group.slid_out == 5


def test_what_slides_out_at_once_goes_the_latest_first() -> None:
    """Cached blocks nearer to the head serve more prompts, so they stay longer."""
    group, prompt = manager(), request("a", range(20))
    group.allocate_new_blocks("a", need(20))
    group.cache_blocks(prompt, 20, KEEP_ALL)
    assert ids(group.skipped_blocks("a", 20)) == [3, 2, 1]
    group.free_skipped_blocks("a", 20)
    assert free_ids(group.pool)[-3:] == [3, 2, 1]
    assert (group.slid_out, group.skipped_blocks("a", 20)) == (3, [])
    group.pool.get_new_blocks(len(free_ids(group.pool)))
    assert group.pool.statistics().groups[0].evicted_after_sliding == 3


def test_nothing_slides_out_of_a_request_that_holds_nothing() -> None:
    """A request is checked before it is admitted."""
    group = manager()
    group.free_skipped_blocks("a", 100)
    assert (group.skipped_blocks("a", 100), group.holds("a"), group.slid_out) == ([], False, 0)


# --- what is needed -------------------------------------------------------------------------------


def test_a_hits_blocks_outside_the_window_are_neither_counted_nor_taken() -> None:
    """EAGLE or a longer load may give a hit's table more blocks than the next token looks at."""
    group = manager()
    group.allocate_new_blocks("old", need(16))
    group.cache_blocks(request("old", range(16)), 16, KEEP_ALL)
    hit = list(group.block_table("old"))
    group.free("old")
    assert group.num_blocks_to_allocate("a", need(20, 16, hit)) == 3
    group.adopt_computed_blocks("a", hit, 16)
    assert ids(group.block_table("a")) == [0, 0, 3, 4]
    assert [block.ref_count for block in hit] == [0, 0, 1, 1]
    assert len(group.allocate_new_blocks("a", need(20, 16))) == 1
    assert group.num_cached_blocks("a") == 4


@pytest.mark.parametrize(
    ("hit_tokens", "external", "total", "count", "table"),
    [
        (0, 16, 20, 3, [0, 0, 5, 6, 7]),
        (8, 8, 20, 3, [0, 0, 5, 6, 7]),
        (16, 4, 24, 3, [0, 0, 0, 4, 5, 6]),
        (8, 4, 12, 2, [0, 2, 5]),
        (4, 4, 9, 3, [1, 5, 6]),
    ],
)
def test_only_what_the_window_needs_of_a_load_gets_blocks(
    hit_tokens: int, external: int, total: int, count: int, table: list[int]
) -> None:
    """Blocks that no later token looks at would be copied for nothing."""
    group = manager()
    group.allocate_new_blocks("old", need(16))
    group.cache_blocks(request("old", range(16)), 16, KEEP_ALL)
    hit = list(group.block_table("old"))[: hit_tokens // 4]
    group.free("old")
    computed = hit_tokens + external
    free = group.pool.num_free_blocks
    promised = group.num_blocks_to_allocate("a", need(total, computed, hit))
    group.adopt_computed_blocks("a", hit, computed)
    group.allocate_external_blocks("a", computed)
    group.allocate_new_blocks("a", need(total, computed))
    assert promised == free - group.pool.num_free_blocks == count
    assert ids(group.block_table("a")) == table


@pytest.mark.parametrize(
    ("size", "in_flight", "longest", "blocks"),
    [
        (9, 16, 200, 7),  # 8 tokens of the window, 16 new ones, and a start inside a block
        (9, 17, 200, 8),
        (9, 16, 20, 6),
        (1, 1, 200, 2),
        (1000, 16, 200, 51),
    ],
)
def test_a_request_is_admitted_for_its_window_and_what_is_in_flight(
    size: int, in_flight: int, longest: int, blocks: int
) -> None:
    """A prompt a hundred times as long as the window must be admitted where the window fits."""
    group = manager(size, in_flight=in_flight, longest=longest)
    assert group.max_held_blocks() == blocks
    assert group.num_blocks_to_allocate("a", need(4000), is_admission=True) == blocks
    assert group.num_blocks_to_allocate("a", need(4), is_admission=True) == 1


@pytest.mark.parametrize("size", [1, 2, 4, 5, 6, 9, 13])
@pytest.mark.parametrize("in_flight", [1, 3, 4, 7, 16])
def test_no_request_ever_holds_more_than_it_was_admitted_for(size: int, in_flight: int) -> None:
    """An admitted request must not be preempted for its own blocks."""
    group, most = manager(size, in_flight=in_flight), 0
    for computed in range(0, 190 - in_flight, in_flight):
        group.free_skipped_blocks("a", computed)
        group.allocate_new_blocks("a", need(computed + in_flight, computed))
        most = max(most, sum(not block.is_null for block in group.block_table("a")))
    assert most <= group.max_held_blocks()


# --- what is kept ---------------------------------------------------------------------------------


def kept(
    group: GroupManager, retention: Retention, start: int = 0, stop: int = 20
) -> list[int] | None:
    """Indices of the blocks that are kept; None for all."""
    mask = group.keep_mask("a", start, stop, retention)
    assert mask is None or len(mask) == stop - start
    return None if mask is None else [index for index, is_kept in enumerate(mask, start) if is_kept]


@pytest.mark.parametrize(
    ("size", "scheduler", "eagle", "blocks"),
    [
        # Hits end at 16, 32, 48 tokens, which are blocks 4, 8, 12.
        (9, 16, False, [2, 3, 6, 7, 10, 11, 14, 15, 18, 19]),
        (1, 16, False, [3, 7, 11, 15, 19]),
        (5, 16, False, [3, 7, 11, 15, 19]),
        (6, 16, False, [2, 3, 6, 7, 10, 11, 14, 15, 18, 19]),
        (5, 16, True, [3, 4, 7, 8, 11, 12, 15, 16, 19]),
        (9, 16, True, [2, 3, 4, 6, 7, 8, 10, 11, 12, 14, 15, 16, 18, 19]),
        # No gap is left between two tails.
        (13, 16, True, None),
        (17, 16, False, None),
        (9, 8, False, None),
        (5, 8, True, None),
        (9, 4, False, None),
    ],
)
def test_the_tails_before_every_possible_hit_are_kept(
    size: int, scheduler: int, eagle: bool, blocks: list[int] | None
) -> None:
    """A block that no hit can need wastes memory; a missing one costs the hit."""
    assert kept(manager(size, scheduler=scheduler, eagle=eagle), KEEP_ALL) == blocks


def test_boundaries_have_no_effect_while_everything_that_can_serve_is_kept() -> None:
    """They are the exceptions of sparse retention."""
    assert kept(manager(5, scheduler=16), Retention(None, (37,))) == [3, 7, 11, 15, 19]


@pytest.mark.parametrize(
    ("interval", "boundaries", "eagle", "blocks"),
    [
        (0, (), False, []),
        (0, (37,), False, [6, 7]),
        (0, (32,), False, [6, 7]),
        (0, (31,), False, [2, 3]),
        (0, (15,), False, []),
        (0, (37, 70), False, [6, 7, 14, 15]),
        (0, (37,), True, [6, 7, 8]),
        (32, (), False, [6, 7, 14, 15]),
        (32, (20,), False, [2, 3, 6, 7, 14, 15]),
        (32, (32,), False, [6, 7, 14, 15]),
        (32, (), True, [6, 7, 8, 14, 15, 16]),
        (32, (20,), True, [2, 3, 4, 6, 7, 8, 14, 15, 16]),
        (64, (), False, [14, 15]),
    ],
)
def test_sparse_retention_keeps_the_tails_at_the_interval_and_at_boundaries(
    interval: int, boundaries: tuple[int, ...], eagle: bool, blocks: list[int]
) -> None:
    """Hits end at multiples of 16 here: a boundary counts as the last of them before it."""
    assert kept(manager(9, scheduler=16, eagle=eagle), Retention(interval, boundaries)) == blocks


def test_an_interval_no_longer_than_the_window_keeps_everything() -> None:
    """Every block is in some tail."""
    assert kept(manager(17, scheduler=16), Retention(16)) is None
    assert kept(manager(16, scheduler=16), Retention(32)) == [4, 5, 6, 7, 12, 13, 14, 15]


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (5, 8), (7, 9), (8, 8), (3, 20), (15, 17)])
@pytest.mark.parametrize("eagle", [False, True])
@pytest.mark.parametrize("retention", [KEEP_ALL, Retention(0, (37, 70)), Retention(32, (20,))])
def test_it_does_not_matter_in_how_many_pieces_blocks_are_cached(
    start: int, stop: int, eagle: bool, retention: Retention
) -> None:
    """Prefill runs in chunks of any size."""
    group = manager(9, scheduler=16, eagle=eagle)
    everything = kept(group, retention)
    assert everything is not None
    assert kept(group, retention, start, stop) == [
        index for index in everything if start <= index < stop
    ]


def test_only_what_the_mask_keeps_can_be_found() -> None:
    """Other blocks are freed without a hash, and are reused first."""
    group, prompt = manager(9, scheduler=16), request("a", range(32))
    group.allocate_new_blocks("a", need(32))
    group.cache_blocks(prompt, 32, KEEP_ALL)
    found = [block_hash in group.pool.cached(group.group_idx) for block_hash in prompt.block_hashes]
    assert found == [False, False, True, True, False, False, True, True]
    assert group.num_cached_blocks("a") == 8
    group.free("a")
    assert free_ids(group.pool)[:4] == [6, 5, 2, 1]
    assert free_ids(group.pool)[-4:] == [8, 7, 4, 3]


def test_groups_of_other_block_sizes_count_in_their_own_blocks() -> None:
    """Two blocks of eight tokens lie between hits at multiples of 16."""
    group = manager_of(
        SlidingWindowManager, KVCacheGroup(window(9).kind, 8, 9), scheduler_block_size=16
    )
    assert kept(group, KEEP_ALL, 0, 8) == [1, 3, 5, 7]
    assert kept(group, Retention(32), 0, 8) == [3, 7]
