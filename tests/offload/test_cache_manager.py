"""The engine's interface to its KV cache, as a scheduler uses it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

from kvevents.events import AllBlocksCleared
from kvevents.layout import KVCacheGroup
from offload.block_pool import GroupPoolStatistics, PoolStatistics
from offload.cache_manager import AllocatedBlocks, CacheCounts, CacheManager, CacheStatistics
from offload.coordinator import ComputedBlocks
from offload.errors import BlockRangeError, OffloadError, RequestStateError
from offload.request import CacheRequest
from tests.offload.small_cache import ids, removed, request, stored
from tests.support.cache_driver import free_ids
from tests.support.cache_layouts import chunked, config_of, cross, full, mamba, window


def cache_of(*groups: KVCacheGroup, blocks: int = 20, **settings: Any) -> CacheManager:
    """A cache in which requests can hold *blocks* blocks."""
    config = config_of(groups or [full()], num_blocks=blocks + 1, **settings)
    return CacheManager(config, config.scheduler_block_size)


def admit(
    cache: CacheManager, prompt: CacheRequest, tokens: int, **settings: Any
) -> AllocatedBlocks | None:
    """Let a new request compute *tokens* behind its hit, and record its progress."""
    hit = cache.get_computed_blocks(prompt)
    given = cache.allocate_slots(prompt, tokens, hit, **settings)
    if given is not None:
        prompt.num_computed_tokens = (
            hit.num_tokens + settings.get("num_external_tokens", 0) + tokens
        )
    return given


def advance(
    cache: CacheManager, running: CacheRequest, tokens: int, **settings: Any
) -> AllocatedBlocks | None:
    """Let a running request compute *tokens* more."""
    given = cache.allocate_slots(running, tokens, **settings)
    if given is not None:
        running.num_computed_tokens += tokens
    return given


def run_and_free(cache: CacheManager, prompt: CacheRequest) -> None:
    """Compute a prompt in one step and finish it."""
    assert (
        admit(cache, prompt, prompt.num_tokens - cache.get_computed_blocks(prompt).num_tokens)
        is not None
    )
    cache.free(prompt.request_id)


def tables(cache: CacheManager, request_id: str) -> list[list[int]]:
    return [ids(table) for table in cache.block_tables(request_id)]


def state(cache: CacheManager, *request_ids: str) -> Sequence[object]:
    """Everything that a call without effect must leave as it was."""
    blocks = [
        (block.block_id, block.ref_count, block.block_hash, block.has_slid_out)
        for table in [*map(cache.block_tables, request_ids)]
        for blocks in table
        for block in blocks
    ]
    cached = [
        {
            block_hash: cache.pool.cached(manager.group_idx).get(block_hash)
            for block_hash in cache.pool.cached(manager.group_idx)
        }
        for manager in cache.coordinator.managers
    ]
    held = [
        [manager.holds(request_id) for manager in cache.coordinator.managers]
        for request_id in request_ids
    ]
    return [blocks, cached, held, free_ids(cache.pool), cache.pool.statistics(), cache.usage]


# --- a request's way ------------------------------------------------------------------------------


def test_a_prompt_is_computed_in_chunks_and_decoded() -> None:
    """Every request goes this way:

    it gets blocks as it needs them, each full one findable at once.
    """
    cache, prompt = cache_of(), request("a", range(10))
    assert not cache.holds("a")
    given = admit(cache, prompt, 6)
    assert given is not None
    assert (given.new_block_ids, cache.holds("a"), tables(cache, "a")) == (
        ([1, 2],),
        True,
        [[1, 2]],
    )
    assert [event.block_hashes for event in stored(cache.take_events())] == [
        prompt.block_hashes[:1]
    ]
    second = advance(cache, prompt, 4)
    assert second is not None
    assert second.new_block_ids == ([3],)
    prompt.append([70])
    third = advance(cache, prompt, 1)
    assert third is not None
    assert third.new_block_ids == ([],)
    prompt.append([71])
    advance(cache, prompt, 1)
    assert [event.block_hashes for event in stored(cache.take_events())] == [
        prompt.block_hashes[1:2],
        prompt.block_hashes[2:3],
    ]
    assert cache.usage == pytest.approx(3 / 20)
    cache.free("a")
    cache.free("a")
    assert (cache.holds("a"), cache.block_tables("a"), cache.usage) == (False, ((),), 0.0)


def test_a_later_prompt_reuses_what_it_shares() -> None:
    """This is the purpose of the whole cache."""
    cache = cache_of(full(), window(9))
    run_and_free(cache, request("old", range(20)))
    prompt = request("a", [*range(16), *range(50, 56)])
    hit = cache.get_computed_blocks(prompt)
    assert (hit.num_tokens, [ids(table) for table in hit.blocks]) == (
        16,
        [[1, 2, 3, 4], [0, 0, 8, 9]],
    )
    given = cache.allocate_slots(prompt, 6, hit)
    assert given is not None
    assert [len(new) for new in given.new_block_ids] == [2, 2]
    assert [table[:4] for table in tables(cache, "a")] == [[1, 2, 3, 4], [0, 0, 8, 9]]


def test_asking_changes_nothing() -> None:
    """A scheduler looks waiting requests up in every step."""
    cache = cache_of(full(), window(9))
    run_and_free(cache, request("old", range(20)))
    prompt = request("a", range(20))
    before = (state(cache, "a"), cache.statistics())
    for _ in range(3):
        cache.get_computed_blocks(prompt)
    assert (state(cache, "a"), cache.statistics()) == before


@pytest.mark.parametrize(
    ("tokens", "limit", "hit"),
    [
        (20, None, 16),
        (21, None, 20),
        (21, 100, 20),
        (21, 19, 16),
        (21, 16, 16),
        (21, 3, 0),
        (21, 0, 0),
        (1, None, 0),
        (0, None, 0),
    ],
)
def test_a_hit_leaves_the_last_token_and_keeps_to_its_limit(
    tokens: int, limit: int | None, hit: int
) -> None:
    """The next token is computed from the last one."""
    cache = cache_of()
    run_and_free(cache, request("old", range(40)))
    assert cache.get_computed_blocks(request("a", range(tokens)), limit).num_tokens == hit


def test_a_preempted_request_finds_what_it_had_computed() -> None:
    """Preemption costs the last block, not the prompt."""
    cache, prompt = cache_of(), request("a", range(18))
    admit(cache, prompt, 18)
    cache.free("a")
    prompt.num_computed_tokens = 0
    assert cache.get_computed_blocks(prompt).num_tokens == 16
    assert admit(cache, prompt, 2) is not None
    assert cache.statistics().counts.requests == 2


def test_blocks_that_slid_out_serve_the_same_request_again() -> None:
    """With a full pool, a request whose window moves on need not be preempted."""
    cache, prompt = cache_of(window(9), blocks=4, enable_caching=False), request("a", range(40))
    admit(cache, prompt, 16)
    assert cache.usage == 1.0
    assert advance(cache, prompt, 8) is not None
    assert tables(cache, "a") == [[0, 0, 3, 4, 2, 1]]
    assert advance(cache, prompt, 9) is None
    cache.free_skipped_blocks(prompt)
    assert tables(cache, "a") == [[0, 0, 0, 0, 2, 1]]
    assert cache.statistics().slid_out == (4,)


# --- what does not fit ----------------------------------------------------------------------------


def test_a_new_request_that_does_not_fit_leaves_no_trace() -> None:
    """The scheduler tries again in the next step, as if it had never asked."""
    cache = cache_of(full(), window(9), blocks=10)
    run_and_free(cache, request("old", range(8)))
    admit(cache, request("running", range(50, 58)), 8)
    prompt = request("a", [*range(8), *range(90, 99)])
    hit = cache.get_computed_blocks(prompt)
    cache.take_events()
    before = state(cache, "a", "running")
    assert hit.num_tokens == 8
    assert cache.allocate_slots(prompt, 9, hit) is None
    assert state(cache, "a", "running") == before
    assert cache.take_events() == []
    assert (prompt.num_computed_tokens, prompt.shared_prefix_boundary) == (0, 0)
    assert (cache.statistics().counts.refused, cache.statistics().counts.requests) == (1, 2)
    assert cache.allocate_slots(prompt, 4, hit) is not None


def test_a_running_request_that_does_not_fit_keeps_also_what_could_slide_out() -> None:
    """None means preempt another request; then this one may be tried again in the same step."""
    cache, prompt = cache_of(window(9), blocks=5), request("a", range(40))
    admit(cache, prompt, 16)
    admit(cache, request("other", range(50, 54)), 4)
    cache.take_events()
    before = state(cache, "a", "other")
    assert len(cache.coordinator.managers[0].skipped_blocks("a", 16)) == 2
    assert advance(cache, prompt, 12) is None
    assert state(cache, "a", "other") == before
    assert (cache.take_events(), cache.statistics().slid_out) == ([], (0,))
    assert advance(cache, prompt, 8) is not None


@pytest.mark.parametrize(
    "groups",
    [[full()], [window(9)], [chunked(16)], [mamba()], [full(), window(9), mamba(), cross(8)]],
)
@pytest.mark.parametrize("external", [0, 8])
def test_a_request_fits_or_is_refused_at_every_size_of_the_pool(
    groups: list[KVCacheGroup], external: int
) -> None:
    """The blocks counted beforehand are those taken.

    One more, and an admission would break off half way.
    """
    outcomes = set()
    for blocks in range(2, 30):
        cache, prompt = cache_of(*groups, blocks=blocks), request("a", range(30))
        before = state(cache, "a")
        given = cache.allocate_slots(
            prompt, 30 - external, num_external_tokens=external, num_encoder_tokens=10
        )
        outcomes.add(given is None)
        assert given is not None or state(cache, "a") == before
    assert False in outcomes


def test_a_state_that_a_tier_brings_needs_a_block_besides_the_steps_own() -> None:
    """With room for one of them the result is None, not an error after the first was taken."""
    cache, prompt = cache_of(mamba(), blocks=1), request("a", range(13))
    before = state(cache, "a")
    assert cache.allocate_slots(prompt, 5, num_external_tokens=8) is None
    assert state(cache, "a") == before


@pytest.mark.parametrize(("blocks", "fits"), [(9, False), (10, True)])
def test_a_whole_prompt_must_fit_where_the_scheduler_asks_for_it(blocks: int, fits: bool) -> None:
    """Chunk after chunk of a prompt that never fits would preempt all other requests."""
    cache, prompt = cache_of(blocks=blocks), request("a", range(40))
    assert (cache.allocate_slots(prompt, 4, full_sequence_must_fit=True) is not None) is fits
    assert cache.statistics().counts.refused == (not fits)
    assert cache.holds("a") is fits
    if not fits:
        assert cache.allocate_slots(prompt, 4) is not None


def test_a_whole_prompt_of_a_window_is_what_it_holds_at_a_time() -> None:
    """A prompt of a million tokens fits if its window and one step's tokens do."""
    for blocks, fits in ((6, False), (7, True)):
        cache = cache_of(window(9), blocks=blocks, max_in_flight_tokens=16)
        given = cache.allocate_slots(request("a", range(190)), 4, full_sequence_must_fit=True)
        assert (given is not None) is fits


def test_a_whole_sequence_is_never_less_than_the_tokens_asked_for() -> None:
    """Drafts may extend behind the prompt."""
    assert (
        cache_of(blocks=2).allocate_slots(request("a", range(4)), 12, full_sequence_must_fit=True)
        is None
    )
    assert (
        cache_of(blocks=3).allocate_slots(request("a", range(4)), 12, full_sequence_must_fit=True)
        is not None
    )


@pytest.mark.parametrize(("reserved", "fits"), [(0, True), (6, True), (7, False)])
def test_reserved_blocks_are_left_to_others(reserved: int, fits: bool) -> None:
    """A load in progress must find its blocks."""
    cache = cache_of(blocks=10)
    assert (
        cache.allocate_slots(request("a", range(16)), 16, reserved_blocks=reserved) is not None
    ) is fits


def test_a_state_written_in_this_step_makes_its_reader_wait_for_the_next() -> None:
    """The reader would be computed in the same batch, before the state is there."""
    cache = cache_of(full(), mamba())
    admit(cache, request("a", range(8)), 8)
    reader = request("b", range(12))
    hit = cache.get_computed_blocks(reader)
    before = state(cache, "a", "b")
    assert hit.num_tokens == 8
    assert cache.allocate_slots(reader, 4, hit) is None
    assert state(cache, "a", "b") == before
    cache.start_step()
    assert cache.allocate_slots(reader, 4, hit) is not None


# --- drafts, loads, encoders ----------------------------------------------------------------------


def test_drafts_get_slots_up_to_the_longest_request() -> None:
    """Nothing is ever written behind that."""
    cache, prompt = cache_of(blocks=20, max_model_len=20), request("a", range(15))
    given = admit(cache, prompt, 15, num_lookahead_tokens=3)
    assert given is not None
    assert given.new_block_ids == ([1, 2, 3, 4, 5],)
    last = advance(cache, prompt, 1, num_lookahead_tokens=50)
    assert last is not None
    assert last.new_block_ids == ([],)


def test_a_block_is_not_cached_while_drafts_fill_it() -> None:
    """A rejected draft leaves the block with other tokens than its hash covers."""
    cache, prompt = cache_of(), request("a", range(6))
    admit(cache, prompt, 10)
    assert len(cache.pool.cached(cache.coordinator.managers[0].group_idx)) == 1
    cache.cache_blocks(prompt, 100)
    assert len(cache.pool.cached(cache.coordinator.managers[0].group_idx)) == 1


@pytest.mark.parametrize("groups", [[full()], [full(), window(9)], [full(), mamba()]])
def test_blocks_of_a_load_are_found_only_after_it_has_completed(groups: list[KVCacheGroup]) -> None:
    """A load may fail, and another request would have read data that never arrived."""
    cache, prompt = cache_of(*groups), request("a", range(20))
    given = cache.allocate_slots(prompt, 0, num_external_tokens=16, delay_caching=True)
    assert given is not None
    assert cache.take_events() == []
    assert cache.get_computed_blocks(request("b", range(20))).num_tokens == 0
    prompt.num_computed_tokens = 16
    cache.cache_blocks(prompt, 16)
    cache.start_step()
    assert cache.get_computed_blocks(request("b", range(20))).num_tokens == 16
    assert {event.group_idx for event in stored(cache.take_events())} == set(range(len(groups)))


def test_a_load_continues_a_hit() -> None:
    """The GPU's blocks come first, the tier's behind them, the new ones last."""
    cache = cache_of(full(), window(9))
    run_and_free(cache, request("old", range(8)))
    prompt = request("a", range(21))
    hit = cache.get_computed_blocks(prompt)
    given = cache.allocate_slots(prompt, 5, hit, num_external_tokens=8)
    assert given is not None
    full_table, window_table = tables(cache, "a")
    assert (full_table[:2], window_table[:2], len(full_table), len(window_table)) == (
        [1, 2],
        [0, 0],
        6,
        6,
    )
    assert len({*full_table, *window_table}) == 6 + 4 + 1
    counts = cache.statistics().counts
    assert (counts.queried_tokens, counts.hit_tokens, counts.external_tokens) == (8 + 21, 8, 8)


def test_an_encoders_tokens_are_given_once() -> None:
    """The scheduler passes them in the first call only."""
    cache, prompt = cache_of(full(), cross(8)), request("a", range(8))
    given = admit(cache, prompt, 4, num_encoder_tokens=10)
    assert given is not None
    assert [len(new) for new in given.new_blocks] == [1, 2]
    advance(cache, prompt, 4)
    assert [len(table) for table in tables(cache, "a")] == [2, 2]


# --- calls that do not fit ------------------------------------------------------------------------


def hit_of(cache: CacheManager, tokens: int) -> ComputedBlocks:
    run_and_free(cache, request("old", range(tokens)))
    return cache.get_computed_blocks(request("new", range(tokens + 1)))


@pytest.mark.parametrize(
    ("new", "settings", "message"),
    [
        (-1, {}, "request 'a': num_new_tokens -1 must not be negative"),
        (
            4,
            {"num_external_tokens": -4},
            "request 'a': num_external_tokens -4 must not be negative",
        ),
        (
            4,
            {"num_lookahead_tokens": -9},
            "request 'a': num_lookahead_tokens -9 must not be negative",
        ),
        (4, {"num_encoder_tokens": -1}, "request 'a': num_encoder_tokens -1 must not be negative"),
        (4, {"reserved_blocks": -1}, "request 'a': reserved_blocks -1 must not be negative"),
        (0, {}, "request 'a': no tokens to allocate for"),
        (201, {}, "request 'a': 201 tokens exceed max_model_len 200"),
        (5, {"num_external_tokens": 196}, "request 'a': 201 tokens exceed max_model_len 200"),
    ],
)
def test_a_new_requests_call_that_makes_no_sense_is_refused_before_anything_changes(
    new: int, settings: dict[str, int], message: str
) -> None:
    """A scheduler's bug must show where it is, not later as a page of another request."""
    cache, prompt = cache_of(blocks=60), request("a", range(8))
    before = (state(cache, "a"), cache.statistics())
    with pytest.raises(RequestStateError, match=f"^{re.escape(message)}$") as caught:
        cache.allocate_slots(prompt, new, **settings)  # type: ignore[arg-type]
    assert isinstance(caught.value, OffloadError)
    assert (state(cache, "a"), cache.statistics()) == before


def test_the_longest_request_is_allowed() -> None:
    """The limit itself is still valid."""
    assert cache_of(blocks=60).allocate_slots(request("a", range(8)), 200) is not None
    assert (
        cache_of(blocks=60).allocate_slots(request("a", range(8)), 0, num_external_tokens=200)
        is not None
    )


@pytest.mark.parametrize("how", ["another request took them", "they were evicted", "all was reset"])
def test_a_hit_whose_blocks_were_lost_since_is_refused(how: str) -> None:
    """Their pages may belong to another request by now; the two would overwrite each other."""
    cache = cache_of(blocks=6)
    hit = hit_of(cache, 8)
    assert hit.num_tokens == 8
    if how == "another request took them":
        admit(cache, request("other", range(100, 124)), 24)
        cache.free("other")
    elif how == "they were evicted":
        cache.evict_blocks(range(1, 7))
    else:
        assert cache.reset()
    with pytest.raises(RequestStateError, match="its hit is out of date"):
        cache.allocate_slots(request("new", range(9)), 1, hit)
    assert cache.pool.num_free_blocks == 6


def test_a_hit_outlives_the_eviction_of_other_blocks() -> None:
    """Between a request's lookup and its admission other requests are given blocks all the time."""
    cache = cache_of(blocks=6)
    hit = hit_of(cache, 8)
    run_and_free(cache, request("other", range(100, 104)))
    others = cache.get_computed_blocks(request("again", range(100, 105))).blocks[0]
    cache.evict_blocks(ids(others))
    assert cache.allocate_slots(request("new", range(9)), 1, hit) is not None


def test_a_running_request_takes_no_second_hit() -> None:
    """Its table would have two beginnings."""
    cache = cache_of()
    hit, prompt = hit_of(cache, 8), request("a", range(50, 62))
    admit(cache, prompt, 4)
    before = (state(cache, "a"), cache.statistics())
    message = "^request 'a' holds blocks already: a hit is for a request that holds none$"
    with pytest.raises(RequestStateError, match=message):
        cache.allocate_slots(prompt, 4, hit)
    with pytest.raises(RequestStateError, match=message):
        cache.allocate_slots(prompt, 4, num_external_tokens=4)
    with pytest.raises(RequestStateError, match=r"^request 'a': no tokens to allocate for$"):
        cache.allocate_slots(prompt, 0)
    assert (state(cache, "a"), cache.statistics()) == before
    assert cache.allocate_slots(prompt, 4, cache.coordinator.no_blocks) is not None


def test_a_request_without_blocks_has_computed_nothing() -> None:
    """Its tokens would be read from blocks that it does not have."""
    cache, prompt = cache_of(), request("a", range(12))
    prompt.num_computed_tokens = 4
    with pytest.raises(
        RequestStateError,
        match=r"^request 'a' holds no blocks, so its num_computed_tokens 4 must be 0$",
    ):
        cache.allocate_slots(prompt, 4)


def test_a_running_request_stays_within_the_longest() -> None:
    """Computed tokens count too."""
    cache, prompt = cache_of(max_model_len=10), request("a", range(10))
    admit(cache, prompt, 8)
    with pytest.raises(
        RequestStateError, match=r"^request 'a': 11 tokens exceed max_model_len 10$"
    ):
        cache.allocate_slots(prompt, 3)
    assert cache.allocate_slots(prompt, 2) is not None


def test_a_hit_alone_is_enough_to_be_admitted() -> None:
    """A request may wait with its prefix until there is room for more."""
    cache = cache_of()
    hit, prompt = hit_of(cache, 8), request("a", range(12))
    with pytest.raises(
        RequestStateError, match=r"^request 'a': 208 tokens exceed max_model_len 200$"
    ):
        cache.allocate_slots(prompt, 200, hit)
    given = cache.allocate_slots(prompt, 0, hit)
    assert given is not None
    assert (given.new_block_ids, tables(cache, "a")) == (([],), [[1, 2]])


def test_only_a_request_that_holds_blocks_can_cache_them() -> None:
    """After a preemption a late load must not hash blocks of another request."""
    cache, prompt = cache_of(), request("a", range(8))
    with pytest.raises(
        RequestStateError,
        match=r"^request 'a' holds no blocks to cache: call allocate_slots first$",
    ):
        cache.cache_blocks(prompt, 8)


def test_the_scheduler_and_the_configuration_must_mean_the_same_block_size() -> None:
    """Two sizes would disagree on where hits end."""
    with pytest.raises(
        OffloadError, match=r"^scheduler_block_size 8 must be the configuration's, 4$"
    ):
        CacheManager(config_of([full()]), 8)


# --- the cache as a whole -------------------------------------------------------------------------


def test_a_reset_is_refused_while_a_request_runs() -> None:
    """It would go on caching results of the old weights."""
    cache, prompt = cache_of(full(), window(9)), request("a", range(12))
    run_and_free(cache, request("old", range(50, 60)))
    admit(cache, prompt, 12)
    cache.take_events()
    before = state(cache, "a")
    assert not cache.reset()
    assert state(cache, "a") == before
    assert (cache.take_events(), cache.statistics().counts.resets) == ([], 0)
    cache.free("a")
    assert cache.reset()
    assert cache.take_events() == [AllBlocksCleared()]
    assert cache.get_computed_blocks(request("b", range(12))).num_tokens == 0
    assert cache.statistics().counts.resets == 1


def test_a_block_whose_load_failed_is_no_longer_found() -> None:
    """Its bytes do not match its hash."""
    cache, prompt = cache_of(), request("a", range(12))
    admit(cache, prompt, 12)
    cache.take_events()
    cache.evict_blocks([2])
    assert cache.get_computed_blocks(request("b", range(12))).num_tokens == 4
    assert [event.block_hashes for event in removed(cache.take_events())] == [
        prompt.block_hashes[1:2]
    ]
    with pytest.raises(BlockRangeError):
        cache.evict_blocks([21])


def test_without_events_nothing_is_reported() -> None:
    """An engine that publishes nothing keeps no events in memory."""
    cache = cache_of(enable_events=False)
    run_and_free(cache, request("a", range(12)))
    assert cache.take_events() == []
    assert cache.get_computed_blocks(request("b", range(12))).num_tokens == 8
    cache.evict_blocks([3])
    assert cache.take_events() == []
    assert cache.reset()
    assert cache.take_events() == []


def test_the_end_of_a_shared_prefix_is_set_on_the_request_that_is_admitted() -> None:
    """Caching retains blocks there as well as at the prompt's end."""
    cache = cache_of(full(), window(5), retention_interval=0, blocks=60)
    run_and_free(cache, request("old", range(41)))
    fork = request("a", [*range(22), *range(900, 930)])
    admit(cache, fork, 52)
    assert fork.shared_prefix_boundary == 20
    assert cache.get_computed_blocks(request("b", [*range(22), *range(500, 520)])).num_tokens == 20


def test_statistics_count_what_happened() -> None:
    """Every field is a metric by which operators judge the cache."""
    cache = cache_of(full(), window(5), blocks=14)
    first, second = request("a", range(20)), request("b", range(16))
    admit(cache, first, 20)
    advance(cache, first, 1)  # three of the window's blocks and the fourth slide out
    hit = cache.get_computed_blocks(second)
    assert cache.allocate_slots(second, 60, hit) is None
    assert cache.allocate_slots(second, 4, hit, num_external_tokens=0) is not None
    cache.free("a")
    cache.free("b")
    third = request("c", range(100, 156))
    assert cache.allocate_slots(third, 24, num_external_tokens=4) is not None
    cache.free("c")
    assert cache.reset()
    statistics = cache.statistics()
    counts = statistics.counts
    assert (counts.requests, counts.refused, counts.resets) == (3, 1, 1)
    assert (counts.queried_tokens, counts.hit_tokens) == (20 + 16 + 56, 12)
    assert counts.external_tokens == 4
    assert statistics.slid_out == (0, 4)
    assert [group.stored for group in statistics.pool.groups] == [5 + 1 + 7, 5 + 1 + 7]
    assert [group.cached for group in statistics.pool.groups] == [0, 0]
    assert (statistics.pool.num_blocks, statistics.pool.free) == (14, 14)


def test_a_new_caches_statistics_are_all_zero() -> None:
    """A counter that starts elsewhere reports work that was never done."""
    pool = PoolStatistics(num_blocks=20, free=20, groups=(GroupPoolStatistics(cached=0),))
    assert cache_of().statistics() == CacheStatistics(
        pool=pool,
        slid_out=(0,),
        counts=CacheCounts(
            requests=0,
            queried_tokens=0,
            hit_tokens=0,
            external_tokens=0,
            refused=0,
            resets=0,
        ),
    )


def test_evictions_behind_a_window_are_counted_apart_from_those_that_cost_a_hit() -> None:
    """Evicting a window's old blocks costs nothing:

    an operator who sees it needs no more memory.
    """
    cache, prompt = cache_of(window(5), blocks=6), request("a", range(24))
    admit(cache, prompt, 16)
    assert (
        advance(cache, prompt, 8) is not None
    )  # blocks 1 to 3 slide out, and two others are given
    assert advance(cache, prompt, 4) is not None
    (group,) = cache.statistics().pool.groups
    assert (group.evicted, group.evicted_after_sliding) == (1, 1)
    cache.free("a")
    assert admit(cache, request("b", range(50, 74)), 24) is not None
    (group,) = cache.statistics().pool.groups
    assert (group.stored, group.evicted, group.evicted_after_sliding) == (12, 6, 5)
