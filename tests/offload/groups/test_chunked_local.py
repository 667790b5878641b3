"""Chunked local attention: a chunk's blocks go when the next chunk begins."""

from __future__ import annotations

import pytest

from offload.groups.base import GroupManager, Retention
from offload.groups.local import ChunkedLocalManager
from tests.offload.small_cache import KEEP_ALL, ids, manager_of, need, request, table_after
from tests.support.cache_driver import free_ids
from tests.support.cache_layouts import chunked


def manager(in_flight: int = 8, longest: int = 200) -> GroupManager:
    return manager_of(
        ChunkedLocalManager, chunked(16), max_in_flight_tokens=in_flight, max_model_len=longest
    )


@pytest.mark.parametrize(
    ("tokens", "table"),
    [
        (4, [1]),
        (15, [1, 2, 3, 4]),
        (16, [0, 0, 0, 0]),
        (17, [0, 0, 0, 0, 5]),
        (31, [0, 0, 0, 0, 5, 6, 7, 8]),
        (32, [0] * 8),
        (37, [0] * 8 + [9, 10]),
    ],
)
def test_a_request_holds_the_blocks_of_its_next_tokens_chunk(tokens: int, table: list[int]) -> None:
    """The first token of a chunk looks at nothing before it."""
    assert table_after(manager(), tokens) == table


def test_a_chunk_goes_at_once_and_its_last_block_first() -> None:
    """Until the chunk is over, each of its tokens looks at its first block."""
    group = manager()
    group.allocate_new_blocks("a", need(20))
    assert group.skipped_blocks("a", 15) == []
    assert ids(group.skipped_blocks("a", 16)) == ids(group.skipped_blocks("a", 20)) == [4, 3, 2, 1]
    group.free_skipped_blocks("a", 20)
    assert (group.slid_out, free_ids(group.pool)[:4]) == (4, [4, 3, 2, 1])


def test_a_hit_brings_only_the_blocks_of_its_last_chunk() -> None:
    """Null blocks replace those of chunks that are over."""
    group = manager()
    group.allocate_new_blocks("old", need(24))
    group.cache_blocks(request("old", range(24)), 24, KEEP_ALL)
    hit = [group.pool.null_block] * 4 + list(group.block_table("old"))[4:]
    group.free("old")
    assert group.num_blocks_to_allocate("a", need(30, 24, hit)) == 4
    group.adopt_computed_blocks("a", hit, 24)
    assert ids(group.block_table("a")) == [0, 0, 0, 0, 5, 6]
    assert group.num_blocks_to_allocate("b", need(20, 16, [group.pool.null_block] * 4)) == 1


@pytest.mark.parametrize(
    ("in_flight", "longest", "blocks"),
    [(8, 200, 6), (9, 200, 7), (1, 200, 5), (200, 40, 10), (8, 18, 5)],
)
def test_a_request_is_admitted_for_a_chunk_and_what_is_in_flight(
    in_flight: int, longest: int, blocks: int
) -> None:
    """A step may begin inside one chunk and end in the next."""
    group = manager(in_flight, longest)
    assert group.max_held_blocks() == blocks
    assert group.num_blocks_to_allocate("a", need(4000), is_admission=True) == blocks


@pytest.mark.parametrize("in_flight", [1, 3, 4, 7, 16, 20])
def test_no_request_ever_holds_more_than_it_was_admitted_for(in_flight: int) -> None:
    """An admitted request must not be preempted for its own blocks."""
    group, most = manager(in_flight), 0
    for computed in range(0, 190 - in_flight, in_flight):
        group.free_skipped_blocks("a", computed)
        group.allocate_new_blocks("a", need(computed + in_flight, computed))
        most = max(most, sum(not block.is_null for block in group.block_table("a")))
    assert most <= group.max_held_blocks()


@pytest.mark.parametrize("retention", [KEEP_ALL, Retention(0, (20,)), Retention(32)])
def test_every_block_of_a_chunk_is_kept(retention: Retention) -> None:
    """A hit may end anywhere in it and needs all blocks before; retention does not apply."""
    assert manager().keep_mask("a", 0, 10, retention) is None
