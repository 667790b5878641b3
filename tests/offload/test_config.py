"""Sizes of a cache, checked when the configuration is built."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kvevents.layout import GroupKind, KVCacheGroup
from offload.config import CacheConfig
from offload.errors import CacheConfigError
from tests.support.cache_layouts import chunked, cross, full, mamba, window


def build(
    *groups: KVCacheGroup, scheduler: int = 4, hashes: int = 4, **settings: Any
) -> CacheConfig:
    return CacheConfig.build(
        groups,
        **{
            "num_blocks": 10,
            "max_model_len": 100,
            "scheduler_block_size": scheduler,
            "hash_block_size": hashes,
            **settings,
        },
    )


def test_a_configuration_keeps_what_it_was_given() -> None:
    """Nothing is rounded or derived behind the scheduler's back."""
    config = build(
        full(4),
        window(9, 8),
        cross(7),
        scheduler=16,
        hashes=2,
        max_in_flight_tokens=32,
        enable_caching=False,
        enable_events=True,
        eagle=True,
        retention_interval=48,
    )
    assert config.layout.groups == (full(4), window(9, 8), cross(7))
    assert (
        config.scheduler_block_size,
        config.layout.scheduler_block_size,
        config.layout.hash_block_size,
    ) == (16, 16, 2)
    assert (config.num_blocks, config.max_model_len, config.max_in_flight_tokens) == (10, 100, 32)
    assert (config.enable_caching, config.enable_events, config.layout.eagle) == (
        False,
        True,
        {0, 1, 2},
    )
    assert config.retention_interval == 48


def test_defaults_are_the_safe_choice() -> None:
    """By default a whole prompt may be in flight, and the cache caches; events that nobody takes
    would pile up."""
    config = build(full())
    assert config.max_in_flight_tokens == config.max_model_len == 100
    assert (config.enable_caching, config.enable_events, config.layout.eagle) == (
        True,
        False,
        set(),
    )
    assert config.retention_interval == 0  # as vLLM's own default


MULTIPLE = "scheduler_block_size {} must be a multiple of {}"


@pytest.mark.parametrize(
    ("groups", "sizes", "message"),
    [
        (
            [full()],
            {"scheduler": 0},
            "scheduler_block_size 0 must be at least 1: hits end at its multiples",
        ),
        (
            [full()],
            {"scheduler": -4},
            "scheduler_block_size -4 must be at least 1: hits end at its multiples",
        ),
        (
            [full()],
            {"hashes": 0},
            "hash_block_size 0 must be at least 1: hashes end at its multiples",
        ),
        (
            [full()],
            {"hashes": -1},
            "hash_block_size -1 must be at least 1: hashes end at its multiples",
        ),
        ([full()], {"scheduler": 6}, MULTIPLE.format(6, "hash_block_size 4")),
        ([full()], {"scheduler": 4, "hashes": 8}, MULTIPLE.format(4, "hash_block_size 8")),
        (
            [full(), full(8)],
            {"scheduler": 12},
            MULTIPLE.format(12, "group 1 (full_attention): block_size 8"),
        ),
        ([full(), window(9, 8)], {}, MULTIPLE.format(4, "group 1 (sliding_window): block_size 8")),
        (
            [full(), chunked(32, 8)],
            {},
            MULTIPLE.format(4, "group 1 (chunked_local_attention): block_size 8"),
        ),
        ([mamba(16), full()], {}, MULTIPLE.format(4, "group 0 (mamba): block_size 16")),
        ([full(0)], {}, MULTIPLE.format(4, "group 0 (full_attention): block_size 0")),
        ([full(), full(-4)], {}, MULTIPLE.format(4, "group 1 (full_attention): block_size -4")),
        (
            [full(4), window(9, 6)],
            {"scheduler": 12},
            "group 1 (sliding_window): block_size 6 must be a multiple of hash_block_size 4",
        ),
        ([cross(0), full()], {}, "group 0 (not_cached): block_size 0 must lie in [1, 1048576]"),
        ([window(0)], {}, "group 0 (sliding_window): sliding_window 0 must lie in [1, 2147483648]"),
        (
            [KVCacheGroup(GroupKind.SLIDING_WINDOW, 4)],
            {},
            "group 0 (sliding_window): sliding_window None must lie in",
        ),
        (
            [full(), chunked(0)],
            {},
            "group 1 (chunked_local_attention): attention_chunk_size 0 must lie in [1, 2147483648]",
        ),
        (
            [KVCacheGroup(GroupKind.CHUNKED_LOCAL, 4)],
            {},
            "group 0 (chunked_local_attention): attention_chunk_size None must",
        ),
        (
            [full()],
            {"scheduler": 2**22, "hashes": 2**22},
            "layout: hash_block_size 4194304 must lie in [1, 1048576]",
        ),
        ([], {}, "groups: a layout needs at least one group that caches"),
        ([cross()], {}, "groups: a layout needs at least one group that caches"),
    ],
)
def test_block_sizes_that_contradict_each_other_are_named_with_place_value_and_rule(
    groups: list[KVCacheGroup], sizes: dict[str, int], message: str
) -> None:
    """The user must find the line; an assert would vanish under `python -O`."""
    with pytest.raises(CacheConfigError, match=f"^{re.escape(message)}"):
        build(*groups, **sizes)


def test_an_encoders_blocks_need_not_fit_the_schedulers() -> None:
    """They take no part in hits."""
    assert build(full(), cross(7)).scheduler_block_size == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_blocks": 1}, "num_blocks 1 must be at least 2: the null block and one to hold"),
        ({"max_model_len": 0}, "max_model_len 0 must be at least 1: a request has a token"),
        (
            {"max_in_flight_tokens": 0},
            "max_in_flight_tokens 0 must be at least 1: a step computes a token",
        ),
        (
            {"max_in_flight_tokens": -1},
            "max_in_flight_tokens -1 must be at least 1: a step computes a token",
        ),
    ],
)
def test_a_cache_that_could_hold_nothing_is_refused(settings: dict[str, int], message: str) -> None:
    """It would refuse every request later, as if only for lack of room."""
    with pytest.raises(CacheConfigError, match=f"^{re.escape(message)}$"):
        build(full(), **settings)


def test_the_smallest_cache_is_allowed() -> None:
    """The limits themselves are valid."""
    assert build(full(), num_blocks=2, max_model_len=1, max_in_flight_tokens=1).num_blocks == 2


@pytest.mark.parametrize(
    ("interval", "message"),
    [
        (-16, "retention_interval -16 must be 0 or a multiple of scheduler_block_size 16"),
        (8, "retention_interval 8 must be 0 or a multiple of scheduler_block_size 16"),
        (40, "retention_interval 40 must be 0 or a multiple of scheduler_block_size 16"),
    ],
)
def test_an_interval_must_meet_ends_of_hits(interval: int, message: str) -> None:
    """Blocks kept at other positions could serve no hit."""
    with pytest.raises(CacheConfigError, match=f"^{message}$"):
        build(full(), window(9), scheduler=16, retention_interval=interval)


@pytest.mark.parametrize("groups", [[full()], [full(), chunked(16)]])
def test_an_interval_without_a_group_it_concerns_is_refused(groups: list[KVCacheGroup]) -> None:
    """It would do nothing, while the user believes that it saves memory."""
    message = (
        "retention_interval 16 needs a sliding-window or Mamba group: "
        "all other kinds keep every block; leave it unset"
    )
    with pytest.raises(CacheConfigError, match=f"^{message}$"):
        build(*groups, retention_interval=16)


@pytest.mark.parametrize("group", [window(9), mamba()])
@pytest.mark.parametrize("interval", [None, 0, 16, 32])
def test_an_interval_is_none_zero_or_a_multiple(group: KVCacheGroup, interval: int | None) -> None:
    """Each of the three retains something else."""
    assert (
        build(full(), group, scheduler=16, retention_interval=interval).retention_interval
        == interval
    )


@pytest.mark.parametrize(("chunk", "scheduler"), [(24, 16), (6, 4), (8, 16)])
def test_chunks_that_end_between_hits_are_refused(chunk: int, scheduler: int) -> None:
    """A hit could need blocks of a chunk that was never checked."""
    place = "group 1 (chunked_local_attention)"
    message = (
        f"{place}: attention_chunk_size {chunk} must be a multiple of "
        f"scheduler_block_size {scheduler}"
    )
    with pytest.raises(CacheConfigError, match=f"^{re.escape(message)}$"):
        build(full(), chunked(chunk), scheduler=scheduler)


def test_eagle_with_chunks_is_refused() -> None:
    """The block it needs beyond a hit may belong to the next chunk, proving nothing of this one."""
    message = (
        "group 0 (chunked_local_attention): eagle must not name it: "
        "like vLLM, this cache does not support EAGLE with chunked local attention"
    )
    with pytest.raises(CacheConfigError, match=f"^{re.escape(message)}$"):
        build(chunked(16), full(), eagle=True)
    assert build(chunked(16), full(), eagle=[1]).layout.eagle == {1}
    assert build(chunked(16), full()).layout.groups[0] == chunked(16)
