"""Boundaries that a request names stay findable, and only they."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents.layout import KVCacheGroup
from offload.cache_manager import CacheManager
from offload.errors import EngineRequestError
from offload.request import MAX_BOUNDARIES, NO_HINTS, CacheRequest, RetentionHints
from tests.offload.small_cache import request
from tests.support.cache_layouts import config_of, full, mamba, window


def cache_of(
    *groups: KVCacheGroup, eagle: bool | tuple[int, ...] = False, blocks: int = 80
) -> CacheManager:
    config = config_of(groups, retention_interval=0, eagle=eagle, num_blocks=blocks)
    return CacheManager(config, config.scheduler_block_size)


def compute(cache: CacheManager, prompt: CacheRequest, *ends: int) -> None:
    """Compute a request in chunks that end there."""
    for end in ends:
        cache.start_step()
        assert cache.allocate_slots(prompt, end - prompt.num_computed_tokens) is not None
        prompt.num_computed_tokens = end


def hit(cache: CacheManager, prompt: CacheRequest) -> int:
    cache.start_step()
    return cache.get_computed_blocks(prompt).num_tokens


def prompt_with(boundaries: tuple[int, ...] = (), *, keep_end: bool = False) -> CacheRequest:
    prompt = request("first", range(41))
    prompt.hints = RetentionHints(boundaries, keep_end)
    return prompt


def fork(tokens: int) -> CacheRequest:
    """A request that shares the first *tokens* and no more."""
    return request("fork", [*range(tokens), *range(900, 930)])


def test_a_named_boundary_is_kept_at_the_first_prefill() -> None:
    """Whoever routes requests knows where the next one will part from this one."""
    cache = cache_of(full(), window(5))
    compute(cache, prompt_with((22,)), 41)
    assert hit(cache, fork(22)) == 20


def test_only_the_boundaries_that_were_named_are_kept() -> None:
    """Each costs a window's blocks in every group that keeps sparsely."""
    cache = cache_of(full(), window(5))
    compute(cache, prompt_with((22,)), 41)
    assert hit(cache, fork(19)) == hit(cache, fork(30)) - 20 == 0


@pytest.mark.parametrize("group", [window(5), mamba()])
@pytest.mark.parametrize("drafters", [(0,), (1,), True])
def test_with_a_drafter_a_named_boundary_is_resumed_a_block_before(
    group: KVCacheGroup, drafters: bool | tuple[int, ...]
) -> None:
    """A prompt that leaves there lacks the block behind a longer hit, in whichever group the
    drafter is. So what the other groups keep must end that block before as well."""
    cache = cache_of(full(), group, eagle=drafters)
    compute(cache, prompt_with((22,)), 16, 41)
    assert hit(cache, fork(22)) == hit(cache, fork(20)) == 16


def test_with_a_drafter_nothing_else_is_kept_for_a_boundary() -> None:
    """No prompt that leaves there can use a window a block further on."""
    cache = cache_of(full(), window(5), eagle=(0,))
    compute(cache, prompt_with((22,)), 41)
    assert hit(cache, fork(24)) == 16


@pytest.mark.parametrize("chunks", [(20, 40, 41), (40, 41)])
def test_a_state_is_kept_where_a_chunk_ended_at_the_boundary(chunks: tuple[int, ...]) -> None:
    """A state cannot be had in the middle of a chunk: the scheduler ends one there."""
    cache = cache_of(full(), mamba())
    compute(cache, prompt_with((22,)), *chunks)
    assert hit(cache, fork(22)) == (20 if 20 in chunks else 0)


@pytest.mark.parametrize("keep_end", [True, False])
@pytest.mark.parametrize("group", [window(5), window(30), mamba()])
def test_a_response_that_will_be_continued_is_kept(group: KVCacheGroup, keep_end: bool) -> None:
    """The session's next turn resumes behind it; else where its prompt ended."""
    cache, prompt = cache_of(full(), group), prompt_with(keep_end=keep_end)
    compute(cache, prompt, 40, 41)
    for token in range(500, 520):
        prompt.append([token])
        compute(cache, prompt, prompt.num_tokens)
    cache.free("first")
    turn = request("turn", [*prompt.token_ids, *range(900, 910)])
    assert hit(cache, turn) == (60 if keep_end else 40)


@pytest.mark.parametrize("group", [window(5), mamba()])
def test_a_prompt_that_ends_with_a_full_block_is_continued_behind_it(group: KVCacheGroup) -> None:
    """A response too short to fill a block leaves no other place to resume."""
    cache, prompt = cache_of(full(), group), request("first", range(40))
    prompt.hints = RetentionHints(keep_end=True)
    compute(cache, prompt, 40)
    prompt.append([500, 501])
    compute(cache, prompt, 41)
    cache.free("first")
    assert hit(cache, request("turn", [*prompt.token_ids, *range(900, 910)])) == 40


def next_to_go(cache: CacheManager) -> bytes | None:
    """What the cached block holds that is evicted first."""
    blocks = cache.pool.free_queue.blocks()
    return next(block.block_hash for block in blocks if block.block_hash is not None)


def serve(cache: CacheManager, prompt: CacheRequest) -> None:
    """Compute a request from its hit on, and end it."""
    cache.start_step()
    found, ends = cache.get_computed_blocks(prompt), prompt.num_tokens // 4 * 4
    assert cache.allocate_slots(prompt, ends - found.num_tokens, found) is not None
    prompt.num_computed_tokens = ends
    compute(cache, prompt, prompt.num_tokens)
    cache.free(prompt.request_id)


FIRST, TURN, OTHER = range(41), [*range(41), *range(500, 530)], range(700, 741)


@pytest.mark.parametrize("group", [window(5), mamba()])
@pytest.mark.parametrize(
    ("hints", "goes_first"),
    [
        (RetentionHints(keep_end=True), FIRST),
        (RetentionHints((40,), keep_end=True), OTHER),
        (RetentionHints(), OTHER),
    ],
)
def test_where_a_turn_began_is_evicted_first_unless_it_is_named(
    group: KVCacheGroup, hints: RetentionHints, goes_first: Sequence[int]
) -> None:
    """A session that goes on is resumed behind its last turn, so that the window or state before
    it only takes the place of others'; where prompts part, others resume."""
    cache, turn = cache_of(group, full()), request("turn", TURN)
    serve(cache, request("other", OTHER))
    serve(cache, request("first", FIRST))
    turn.hints = hints
    serve(cache, turn)
    assert next_to_go(cache) == request("any", goes_first).hash_at(40)


def test_on_engines_that_keep_densely_nothing_is_evicted_before_its_turn() -> None:
    """There a hit may end anywhere, and whoever chose that wanted it."""
    config = config_of([window(5), full()], retention_interval=None)
    cache, turn = CacheManager(config, config.scheduler_block_size), request("turn", TURN)
    serve(cache, request("other", OTHER))
    serve(cache, request("first", FIRST))
    turn.hints = RetentionHints(keep_end=True)
    serve(cache, turn)
    assert next_to_go(cache) in {request("any", OTHER).hash_at(end) for end in range(4, 41, 4)}


@pytest.mark.parametrize("named", [(), (20,)])
def test_a_boundary_that_is_named_again_is_kept_as_long_as_what_is_used(
    named: tuple[int, ...],
) -> None:
    """Each turn uses full attention from the start; without its windows it would be no hit for
    the next session that begins alike."""
    cache, first, turn = cache_of(window(5), full()), request("first", FIRST), request("turn", TURN)
    first.hints = RetentionHints((20,))
    serve(cache, first)
    serve(cache, request("other", OTHER))
    turn.hints = RetentionHints(named)
    serve(cache, turn)
    assert (next_to_go(cache) == first.hash_at(20)) == (not named)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 60),
            st.integers(1, 30),
            st.integers(0, 12),
            st.lists(st.integers(1, 80), max_size=3),
            st.booleans(),
        ),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from([window(5), window(9), mamba()]),
)
def test_where_nothing_is_evicted_hints_only_add_hits(
    turns: list[tuple[int, int, int, list[int], bool]], group: KVCacheGroup
) -> None:
    """What nobody is expected to ask for goes first, but not before its memory is needed."""
    hinted, plain = cache_of(full(), group, blocks=2000), cache_of(full(), group, blocks=2000)
    said = list[int]()
    for number, (kept, asked, answered, keep, keep_end) in enumerate(turns):
        said = [*said[:kept], *range(1000 * number + 1000, 1000 * number + 1000 + asked)]
        answer = range(1000 * number + 1500, 1000 * number + 1500 + answered)
        hits = []
        for cache, hints in ((hinted, RetentionHints(tuple(keep), keep_end)), (plain, NO_HINTS)):
            prompt = request(f"turn {number}", said)
            prompt.hints = hints
            hits.append(hit(cache, prompt))
            found = cache.get_computed_blocks(prompt)
            cache.allocate_slots(prompt, prompt.num_tokens - found.num_tokens, found)
            prompt.num_computed_tokens = prompt.num_tokens
            for token in answer:
                prompt.append([token])
                compute(cache, prompt, prompt.num_tokens)
            cache.free(prompt.request_id)
            cache.check_integrity()
        assert hits[0] >= hits[1]
        said += answer


def test_hints_are_read_from_a_requests_parameters() -> None:
    """They come with the request, beside what the tiers are told."""
    params = {"kvroute": {"keep": [700, 64, 64, 5000], "keep_end": True}, "other": 1}
    assert RetentionHints.of(params, 1000) == RetentionHints((64, 700), keep_end=True)
    assert RetentionHints.of({"other": 1}, 1000) == RetentionHints.of(None, 5) == RetentionHints()


@pytest.mark.parametrize(
    ("hints", "place"),
    [
        ([], "kv_transfer_params.kvroute: list"),
        ({"keep": "abc"}, "keep must be at most 8 lengths"),
        ({"keep": [1] * (MAX_BOUNDARIES + 1)}, "keep must be at most 8 lengths"),
        ({"keep": [64, 0]}, r"keep\[1\]: 0 must be a whole number of at least 1"),
        ({"keep": [True]}, r"keep\[0\]: True must be"),
        ({"keep": [1.5]}, r"keep\[0\]: 1.5 must be"),
        ({"keep_end": "yes"}, "keep_end: 'yes' must be true or false"),
    ],
)
def test_hints_of_another_form_are_refused(hints: object, place: str) -> None:
    """A client may send anything; an engine that ignored it would seem to keep it."""
    with pytest.raises(EngineRequestError, match=place):
        RetentionHints.of({"kvroute": hints}, 1000)
