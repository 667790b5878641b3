"""Boundaries that a request names stay findable, and only they."""

from __future__ import annotations

import pytest

from kvevents.layout import KVCacheGroup
from offload.cache_manager import CacheManager
from offload.errors import EngineRequestError
from offload.request import MAX_BOUNDARIES, CacheRequest, RetentionHints
from tests.offload.small_cache import request
from tests.support.cache_layouts import config_of, full, mamba, window


def cache_of(*groups: KVCacheGroup, eagle: bool | tuple[int, ...] = False) -> CacheManager:
    config = config_of(groups, retention_interval=0, eagle=eagle)
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
