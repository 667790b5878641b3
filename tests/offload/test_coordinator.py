"""The groups of a cache together: one hit for all, and blocks in each."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvevents.layout import GroupKind, KVCacheGroup
from offload.block_pool import BlockPool
from offload.config import CacheConfig
from offload.coordinator import Coordinator, resume_positions
from offload.groups.base import GroupManager, RequestNeed
from offload.groups.cross_attention import CrossAttentionManager
from offload.groups.local import ChunkedLocalManager, SlidingWindowManager
from offload.groups.mamba import MambaManager
from offload.request import CacheRequest
from tests.offload.small_cache import ids, request
from tests.support.cache_driver import positions_read
from tests.support.cache_layouts import (
    GROUPS,
    chunked,
    config_of,
    cross,
    eagle_groups,
    full,
    mamba,
    window,
)
from tests.support.engine_model import Has, defined_hit, defined_own


def coordinator_of(config: CacheConfig) -> Coordinator:
    pool = BlockPool(config.num_blocks, config.layout.groups)
    return Coordinator(config, pool)


def prompt_of(config: CacheConfig, tokens: int, request_id: str = "a") -> CacheRequest:
    return request(request_id, range(tokens), config.layout.hash_block_size)


def need_of(
    coordinator: Coordinator, tokens: int, computed: int = 0, encoder: int = 0
) -> RequestNeed:
    blocks = coordinator.no_blocks.blocks
    return RequestNeed(tokens, tokens, computed, blocks, num_encoder_tokens=encoder)


def fill(coordinator: Coordinator, prompt: CacheRequest, keep: list[set[int]]) -> None:
    """Cache the blocks of a prompt whose indices are in *keep*, group by group."""
    for manager, kept in zip(coordinator.managers, keep, strict=True):
        count = prompt.num_tokens // manager.block_size
        if manager.group.kind is not GroupKind.NOT_CACHED:
            blocks = coordinator.pool.get_new_blocks(count)
            mask = [index in kept for index in range(count)]
            coordinator.pool.cache_full_blocks(prompt, manager.group_idx, blocks, 0, count, mask)


def compute(coordinator: Coordinator, prompt: CacheRequest, tokens: int) -> None:
    """Give a request blocks for its first tokens, and cache those that may be."""
    coordinator.adopt_computed_blocks(prompt.request_id, need_of(coordinator, tokens))
    coordinator.allocate_new_blocks(prompt.request_id, need_of(coordinator, tokens))
    coordinator.cache_blocks(prompt, tokens)


def cached_ends(coordinator: Coordinator, prompt: CacheRequest) -> list[list[int]]:
    """Per group the ends of a prompt's blocks that can be found."""
    found = []
    for manager in coordinator.managers:
        cached, size = coordinator.pool.cached(manager.group_idx), manager.block_size
        found.append(
            [
                end
                for end in range(size, prompt.num_tokens + 1, size)
                if prompt.hash_at(end) in cached
            ]
        )
    return found


# --- what a configuration makes of it -------------------------------------------------------------


def test_every_kind_of_group_has_a_manager_of_its_own() -> None:
    """A wrong one would free blocks that are still read."""
    kinds = [
        type(manager)
        for manager in coordinator_of(
            config_of([full(), window(9), chunked(16), mamba(), cross()])
        ).managers
    ]
    assert kinds == [
        GroupManager,
        SlidingWindowManager,
        ChunkedLocalManager,
        MambaManager,
        CrossAttentionManager,
    ]


def test_the_schedulers_block_size_reaches_every_group_unchanged() -> None:
    """The scheduler defines where hits end; computing it again might give another value."""
    config = CacheConfig.build(
        [full(4), window(9, 8), mamba(16), cross(7)],
        num_blocks=20,
        scheduler_block_size=48,
        hash_block_size=2,
        max_model_len=77,
        max_in_flight_tokens=5,
        eagle=True,
    )
    coordinator = coordinator_of(config)
    assert coordinator.scheduler_block_size == 48
    managers = coordinator.managers
    assert [(each.group_idx, each.block_size) for each in managers] == [
        (0, 4),
        (1, 8),
        (2, 16),
        (3, 7),
    ]
    assert all(each.config is config and each.eagle for each in managers)


@pytest.mark.parametrize(
    ("groups", "ends"),
    [([full()], [[4, 8, 12]]), ([full(), window(5)], [[4, 8], [8]])],
)
def test_only_groups_that_must_agree_leave_blocks_behind_the_last_end_of_a_hit(
    groups: list[KVCacheGroup], ends: list[list[int]]
) -> None:
    """No hit of several groups can end there; a single one announces what vLLM's announces."""
    config = CacheConfig.build(
        groups,
        num_blocks=40,
        scheduler_block_size=8,
        hash_block_size=4,
        max_model_len=200,
        retention_interval=None,
    )
    coordinator, prompt = coordinator_of(config), prompt_of(config, 12)
    compute(coordinator, prompt, 12)
    assert cached_ends(coordinator, prompt) == ends


def test_without_caching_nothing_is_found_or_cached() -> None:
    """Blocks are given out and taken back all the same."""
    coordinator = coordinator_of(config_of([full(), window(9)], enable_caching=False))
    prompt = request("a", range(20))
    compute(coordinator, prompt, 20)
    assert [ids(manager.block_table("a")) for manager in coordinator.managers] == [
        [1, 2, 3, 4, 5],
        [6, 7, 8, 9, 10],
    ]
    assert cached_ends(coordinator, prompt) == [[], []]
    assert coordinator.find_longest_hit(request("b", range(20)), 19) == coordinator.no_blocks
    assert coordinator.group_hits(request("b", range(20)), 19) == (0, 0)
    assert coordinator.no_blocks.blocks == ((), ())


# --- finding --------------------------------------------------------------------------------------


@st.composite
def caches(draw: st.DrawFn) -> tuple[CacheConfig, int, int, list[set[int]]]:
    """A layout, a prompt's length, a limit, and per group the blocks that exist: most, or few."""
    groups = GROUPS[draw(st.sampled_from(sorted(GROUPS)))]
    eagle = draw(st.sets(st.sampled_from(eagle_groups(groups)))) if eagle_groups(groups) else ()
    tokens = draw(st.integers(1, 100))
    keep = []
    for _ in groups:
        chosen = draw(st.sets(st.integers(0, 25), max_size=8))
        keep.append(set(range(26)) - chosen if draw(st.integers(0, 3)) else chosen)
    return (
        config_of(groups, eagle=eagle, num_blocks=200),
        tokens,
        draw(st.integers(0, tokens)),
        keep,
    )


def presence(coordinator: Coordinator, prompt: CacheRequest) -> Has:
    ends = cached_ends(coordinator, prompt)
    return lambda group, end: end in ends[group]


@given(caches())
@settings(max_examples=400, deadline=None)
def test_the_hit_is_the_longest_that_every_group_accepts(
    case: tuple[CacheConfig, int, int, list[set[int]]],
) -> None:
    """Whatever was evicted: the rule by its definition, over the blocks that exist."""
    config, tokens, limit, keep = case
    coordinator = coordinator_of(config)
    fill(coordinator, prompt_of(config, tokens, "old"), keep)
    prompt = prompt_of(config, tokens)
    has, reach = (
        presence(coordinator, prompt),
        len(prompt.block_hashes) * config.layout.hash_block_size,
    )
    hit = coordinator.find_longest_hit(prompt, limit)
    assert hit.num_tokens == defined_hit(config.layout, has, limit, reach)
    groups = range(len(config.layout.groups))
    assert coordinator.group_hits(prompt, limit) == tuple(
        defined_own(config.layout, i, has, limit, reach) for i in groups
    )
    for manager, table in zip(coordinator.managers, hit.blocks, strict=True):
        group = manager.group
        if group.kind is GroupKind.NOT_CACHED or not hit.num_tokens:
            assert list(table) == []
            continue
        read = positions_read(group, hit.num_tokens)
        needed = {position // group.block_size for position in read}
        cached, null = coordinator.pool.cached(manager.group_idx), coordinator.pool.null_block
        ends = range(group.block_size, hit.num_tokens + 1, group.block_size)
        expected = [
            cached.get(prompt.hash_at(end)) if index in needed else null
            for index, end in enumerate(ends)
        ]
        assert list(table) == expected


@pytest.mark.parametrize(
    ("groups", "tables"),
    [
        ([full()], [[1, 2, 3, 4, 5, 6]]),
        ([window(9)], [[0, 0, 0, 0, 5, 6]]),
        ([window(1)], [[0, 0, 0, 0, 0, 0]]),
        ([chunked(16)], [[0, 0, 0, 0, 5, 6]]),
        ([mamba()], [[0, 0, 0, 0, 0, 6]]),
        ([full(), cross(8)], [[1, 2, 3, 4, 5, 6], []]),
        ([full(), mamba(8)], [[1, 2, 3, 4, 5, 6], [0, 0, 9]]),
    ],
)
def test_a_hits_tables_have_null_blocks_where_nothing_is_needed(
    groups: list[KVCacheGroup], tables: list[list[int]]
) -> None:
    """A block that is not read must not be kept from others."""
    config = config_of(groups)
    coordinator = coordinator_of(config)
    fill(coordinator, prompt_of(config, 24, "old"), [set(range(6)) for _ in groups])
    hit = coordinator.find_longest_hit(prompt_of(config, 25), 24)
    assert (hit.num_tokens, [ids(table) for table in hit.blocks]) == (24, tables)


def test_a_hit_that_ends_with_a_chunk_needs_no_blocks_of_it() -> None:
    """The next token opens a new chunk and reads nothing of the old one."""
    config = config_of([chunked(16), full()])
    coordinator = coordinator_of(config)
    fill(coordinator, prompt_of(config, 32, "old"), [set(), set(range(8))])
    hit = coordinator.find_longest_hit(prompt_of(config, 40), 39)
    assert (hit.num_tokens, ids(hit.blocks[0])) == (32, [0] * 8)


@pytest.mark.parametrize(
    ("group", "tokens", "blocks"),
    [
        (full(), 12, [0, 1, 2]),
        (full(), 0, []),
        (window(9), 12, [1, 2]),
        (window(9), 4, [0]),
        (window(6), 12, [1, 2]),
        (window(5), 12, [2]),
        (window(2), 12, [2]),
        (window(1), 12, []),
        (chunked(16), 24, [4, 5]),
        (chunked(16), 16, []),
        (mamba(), 12, [2]),
        (mamba(), 0, []),
        (mamba(), 400, [99]),
    ],
)
def test_a_request_behind_a_hit_reads_these_blocks(
    group: KVCacheGroup, tokens: int, blocks: list[int]
) -> None:
    """Offloading loads exactly these."""
    (manager,) = coordinator_of(config_of([group])).managers
    assert list(manager.needed_blocks(tokens)) == blocks


# --- what is worth keeping ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "eagle", "tokens", "ends"),
    [
        ([full()], False, 23, [[4, 8, 12, 16, 20]]),
        ([full()], True, 23, [[4, 8, 12, 16, 20]]),
        ([full(4), window(9, 16)], False, 15, [[], []]),
        ([full(4), window(9, 16)], False, 31, [[4, 8, 12, 16], [16]]),
        # With EAGLE one block behind the last possible hit proves it.
        ([full(4), window(9, 16)], True, 15, [[], []]),
        ([full(4), window(9, 16)], True, 19, [[4, 8, 12, 16], [16]]),
        ([full(4), window(9, 16)], True, 31, [[4, 8, 12, 16, 20], [16]]),
        ([full(4), window(9, 16)], True, 32, [[4, 8, 12, 16, 20, 24, 28, 32], [16, 32]]),
        ([full(16), window(5, 4)], False, 33, [[16, 32], [16, 32]]),
        ([full(16), window(5, 4)], True, 36, [[16, 32], [16, 20, 32, 36]]),
        # Only in the groups that hold the drafter's layers.
        ([full(4), window(9, 16)], [0], 31, [[4, 8, 12, 16, 20], [16]]),
        ([full(4), window(9, 16)], [1], 32, [[4, 8, 12, 16, 20, 24, 28, 32], [16, 32]]),
        ([full(4), window(9, 16)], [1], 31, [[4, 8, 12, 16], [16]]),
        ([full(16), window(5, 4)], [0], 36, [[16, 32], [16, 32]]),
        ([full(16), window(5, 4)], [1], 36, [[16, 32], [16, 20, 32, 36]]),
    ],
)
def test_several_groups_keep_blocks_up_to_where_a_hit_can_end(
    groups: list[KVCacheGroup], eagle: bool | list[int], tokens: int, ends: list[list[int]]
) -> None:
    """A block of one group that no hit of all groups can reach wastes memory."""
    config = config_of(groups, eagle=eagle)
    coordinator = coordinator_of(config)
    prompt = prompt_of(config, 40)
    compute(coordinator, prompt, tokens)
    assert cached_ends(coordinator, prompt) == ends


@pytest.mark.parametrize(
    ("tokens", "step", "eagle", "positions"),
    [
        (33, 16, False, (32,)),
        (32, 16, False, (31,)),
        (1, 16, False, (0,)),
        (33, 16, True, (16,)),
        (32, 16, True, (0, 16)),
        (31, 16, True, (0,)),
        (48, 16, True, (16, 32)),
        (10, 16, True, (0,)),
    ],
)
def test_a_later_prompt_resumes_at_the_end_of_this_one(
    tokens: int, step: int, eagle: bool, positions: tuple[int, ...]
) -> None:
    """The same prompt again stops before its last token, a longer one does not.

    EAGLE gives a block back.
    """
    assert resume_positions(tokens, step, eagle) == positions


@pytest.mark.parametrize(
    ("prompt_tokens", "output", "ends"), [(21, 0, [16, 20]), (20, 0, [12, 16]), (21, 9, [16, 20])]
)
def test_sparse_retention_keeps_the_window_before_the_prompts_end(
    prompt_tokens: int, output: int, ends: list[int]
) -> None:
    """The same prompt will resume there; with interval 0 the response's end is not retained."""
    config = config_of([full(), window(9)], retention_interval=0)
    coordinator = coordinator_of(config)
    prompt = prompt_of(config, prompt_tokens)
    prompt.append([7] * output)
    compute(coordinator, prompt, prompt_tokens + output)
    assert cached_ends(coordinator, prompt)[1] == ends


def test_an_interval_keeps_windows_along_the_way() -> None:
    """The memory it costs saves recomputation for prompts that share less."""
    config = config_of([full(), window(5)], retention_interval=16)
    coordinator = coordinator_of(config)
    prompt = prompt_of(config, 41)
    compute(coordinator, prompt, 41)
    assert cached_ends(coordinator, prompt)[1] == [16, 32, 40]


def test_the_end_of_a_shared_prefix_is_found_where_sparse_retention_cut_a_hit() -> None:
    """Full attention shows that prompts share this prefix.

    From the second request on, its end is worth a window.
    """
    config = config_of([full(), window(5)], retention_interval=0)
    coordinator = coordinator_of(config)
    compute(coordinator, request("old", range(41)), 41)
    fork = request("a", [*range(22), *range(900, 930)])
    hit = coordinator.find_longest_hit(fork, 51)
    assert (hit.num_tokens, hit.shared_prefix_boundary) == (0, 20)
    fork.shared_prefix_boundary = hit.shared_prefix_boundary
    compute(coordinator, fork, 52)
    assert cached_ends(coordinator, fork)[1] == [20, 48]
    third = coordinator.find_longest_hit(request("b", [*range(22), *range(500, 520)]), 41)
    assert (third.num_tokens, third.shared_prefix_boundary) == (20, 0)


def test_with_eagle_the_window_one_block_before_a_shared_prefixs_end_is_kept_too() -> None:
    """A request that leaves the prefix right at its end lacks the block behind it.

    It resumes a block earlier.
    """
    config = config_of([full(), window(5)], retention_interval=0, eagle=True)
    coordinator = coordinator_of(config)
    compute(coordinator, request("old", range(60)), 60)
    fork = request("a", [*range(42), *range(900, 940)])
    hit = coordinator.find_longest_hit(fork, 81)
    assert (hit.num_tokens, hit.shared_prefix_boundary) == (0, 36)
    fork.shared_prefix_boundary = hit.shared_prefix_boundary
    compute(coordinator, fork, 82)
    # 32 and 36 with EAGLE's block behind each, and the end of the prompt the same way: 76 and 80.
    assert cached_ends(coordinator, fork)[1] == [32, 36, 40, 76, 80]
    third = coordinator.find_longest_hit(request("b", [*range(42), *range(500, 520)]), 61)
    assert third.num_tokens == 36


@pytest.mark.parametrize("interval", [None, 32])
def test_without_a_cut_there_is_no_shared_prefix_boundary(interval: int | None) -> None:
    """Blocks that are kept anyway need no exception, and unshared ones deserve none."""
    config = config_of([full(), window(9)], retention_interval=interval)
    coordinator = coordinator_of(config)
    compute(coordinator, request("old", range(65)), 65)
    assert coordinator.find_longest_hit(request("a", range(65)), 64).shared_prefix_boundary == 0
    assert (
        coordinator.find_longest_hit(request("b", range(500, 540)), 39).shared_prefix_boundary == 0
    )


def test_an_eviction_sets_no_shared_prefix_boundary_where_everything_is_kept() -> None:
    """Without sparse retention a hit was cut short by pressure; keeping more would add to it."""
    config = config_of([full(), window(9)])
    coordinator = coordinator_of(config)
    compute(coordinator, request("old", range(33)), 33)
    coordinator.pool.evict_blocks(
        block.block_id for block in coordinator.managers[1].block_table("old")
    )
    hit = coordinator.find_longest_hit(request("a", range(33)), 32)
    assert (hit.num_tokens, hit.shared_prefix_boundary) == (0, 0)


# --- blocks for a request -------------------------------------------------------------------------


def test_groups_counts_are_added_up() -> None:
    """One pool serves them all; the encoder's tokens concern one group only."""
    coordinator = coordinator_of(
        config_of([full(), window(9), mamba(), cross(8)], max_in_flight_tokens=16)
    )
    need = need_of(coordinator, 41, encoder=20)
    assert coordinator.num_blocks_to_allocate("a", need) == 11 + 11 + 1 + 3
    assert coordinator.num_blocks_to_allocate("a", need, is_admission=True) == 11 + 7 + 1 + 3
    coordinator.adopt_computed_blocks("a", need)
    given = coordinator.allocate_new_blocks("a", need)
    assert [len(blocks) for blocks in given] == [11, 11, 1, 3]
    assert [manager.holds("a") for manager in coordinator.managers] == [True] * 4
    assert coordinator.num_blocks_to_free("a", 41) == 8
    coordinator.free_skipped_blocks(request("a", range(41)), 41)
    assert coordinator.num_blocks_to_free("a", 41) == 0
    coordinator.free("a")
    assert coordinator.pool.num_free_blocks == coordinator.pool.statistics().num_blocks


def test_a_skipped_block_that_another_request_reads_is_not_free() -> None:
    """Counting it as free would admit a request that does not fit."""
    coordinator = coordinator_of(config_of([window(9)]))
    compute(coordinator, request("a", range(20)), 20)
    coordinator.pool.touch(coordinator.managers[0].block_table("a")[:2])
    assert len(coordinator.managers[0].skipped_blocks("a", 20)) == 3
    assert coordinator.num_blocks_to_free("a", 20) == 1


def test_all_groups_hits_are_taken_before_anything_new() -> None:
    """A new block for one group's load must not be another group's hit, first in the free queue."""
    config = config_of([full(), window(9)], num_blocks=9)
    coordinator = coordinator_of(config)
    for prompt in (request("old", range(8)), request("newer", range(50, 58))):
        compute(coordinator, prompt, 8)
        coordinator.free(prompt.request_id)
    prompt = request("a", range(13))
    hit = coordinator.find_longest_hit(prompt, 12)
    assert (hit.num_tokens, [ids(table) for table in hit.blocks]) == (8, [[1, 2], [3, 4]])
    need = RequestNeed(13, 13, 12, hit.blocks, num_external_tokens=4)
    coordinator.adopt_computed_blocks("a", need)
    coordinator.allocate_new_blocks("a", need)
    tables = [ids(manager.block_table("a")) for manager in coordinator.managers]
    assert [table[:2] for table in tables] == [[1, 2], [0, 4]]
    # The window moves on over the load, so its first block is free to be used.
    assert len(set(tables[0][2:] + tables[1][2:]) - {1, 2, 4}) == 4


def test_a_step_begins_in_every_group() -> None:
    """States of the step before can be read from now on."""
    coordinator = coordinator_of(config_of([full(), mamba()]))
    compute(coordinator, request("a", range(8)), 8)
    hit = coordinator.find_longest_hit(request("b", range(9)), 8)
    need = RequestNeed(9, 9, 8, hit.blocks)
    assert hit.num_tokens == 8
    assert not coordinator.can_read(need)
    coordinator.start_step()
    assert coordinator.can_read(need)
