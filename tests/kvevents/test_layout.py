"""Layouts: which are refused, and how they are read from the wire."""

from __future__ import annotations

from typing import Any

import pytest

from kvevents.errors import LayoutError
from kvevents.events import CacheLayout, GroupSpec
from kvevents.layout import GroupKind, KVCacheGroup, KVCacheLayout, kind_from_wire

FULL = KVCacheGroup(GroupKind.FULL, 16)
NOT_CACHED = KVCacheGroup(GroupKind.NOT_CACHED, 1)


def window(size: int, block_size: int = 16) -> KVCacheGroup:
    return KVCacheGroup(GroupKind.SLIDING_WINDOW, block_size, sliding_window=size)


def chunked(size: int, block_size: int = 16) -> KVCacheGroup:
    return KVCacheGroup(GroupKind.CHUNKED_LOCAL, block_size, attention_chunk_size=size)


# --- layouts that are refused ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "sizes", "message"),
    [
        ([], {}, "at least one group that caches"),
        ([NOT_CACHED], {}, "at least one group that caches"),
        (
            [KVCacheGroup(GroupKind.FULL, 0)],
            {},
            r"group 0 \(full_attention\): block_size 0 must lie in \[1, 1048576\]",
        ),
        (
            [FULL, KVCacheGroup(GroupKind.FULL, -16)],
            {},
            r"group 1 \(full_attention\): block_size -16",
        ),
        (
            [KVCacheGroup(GroupKind.FULL, 2**20 + 1)],
            {},
            r"group 0 \(full_attention\): block_size 1048577",
        ),
        (
            [KVCacheGroup(GroupKind.SLIDING_WINDOW, 16)],
            {},
            r"group 0 \(sliding_window\): sliding_window None must lie in",
        ),
        (
            [window(0)],
            {},
            r"group 0 \(sliding_window\): sliding_window 0 must lie in \[1, 2147483648\]",
        ),
        (
            [KVCacheGroup(GroupKind.CHUNKED_LOCAL, 16)],
            {},
            r"group 0 \(chunked_local_attention\): attention_chunk_size None",
        ),
        ([chunked(0)], {}, r"group 0 \(chunked_local_attention\): attention_chunk_size 0"),
        (
            [FULL],
            {"hash_block_size": 24},
            "scheduler_block_size 16 must be a multiple of hash_block_size 24",
        ),
        (
            [FULL, window(64, 24)],
            {"hash_block_size": 16},
            r"group 1 \(sliding_window\): block_size 24 must be a multiple of hash_block_size 16",
        ),
        ([FULL], {"hash_block_size": -1}, r"layout: hash_block_size -1 must lie in \[1, 1048576\]"),
        (
            [FULL],
            {"scheduler_block_size": 2**21},
            "layout: scheduler_block_size 2097152 must lie in",
        ),
        (
            [KVCacheGroup(GroupKind.FULL, 2**19 + 1), KVCacheGroup(GroupKind.FULL, 2**19 - 1)],
            {},
            "layout: scheduler_block_size 274877906943 must lie in",
        ),
    ],
)
def test_a_layout_that_contradicts_itself_is_refused_with_group_value_and_rule(
    groups: list[KVCacheGroup], sizes: dict[str, Any], message: str
) -> None:
    """Whoever configured it must find the line."""
    with pytest.raises(LayoutError, match=message):
        KVCacheLayout.build(groups, **sizes)


def test_sizes_left_out_follow_from_the_groups() -> None:
    """Hashes at the greatest common divisor, hits at the least common multiple."""
    layout = KVCacheLayout.build([KVCacheGroup(GroupKind.FULL, 48), window(100, 32), NOT_CACHED])
    assert (layout.hash_block_size, layout.scheduler_block_size) == (16, 96)


# --- from the wire --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("full_attention", GroupKind.FULL),
        ("mla_attention", GroupKind.FULL),
        ("sink_full_attention", GroupKind.FULL),
        ("sliding_window", GroupKind.SLIDING_WINDOW),
        ("sliding_window_mla", GroupKind.SLIDING_WINDOW),
        ("chunked_local_attention", GroupKind.CHUNKED_LOCAL),
        ("mamba", GroupKind.MAMBA),
        ("linear_attention", GroupKind.MAMBA),
        ("cross_attention", GroupKind.NOT_CACHED),
        ("encoder_only_attention", GroupKind.NOT_CACHED),
        ("attention of next year", None),
        (None, None),
    ],
)
def test_the_kinds_engines_name_are_known(name: str | None, kind: GroupKind | None) -> None:
    """An unknown kind is not guessed."""
    assert kind_from_wire(name) is kind


@pytest.mark.parametrize("kind", GroupKind)
def test_our_own_names_of_kinds_are_read_again(kind: GroupKind) -> None:
    """A publisher of ours writes them into its layout."""
    assert kind_from_wire(kind.value) is kind


def test_an_announced_layout_is_taken_as_it_is() -> None:
    """The sizes are the engine's own, not derived."""
    specs = [
        GroupSpec("full_attention", 32),
        GroupSpec("sliding_window", 16, sliding_window=64),
        GroupSpec("chunked_local_attention", 16, attention_chunk_size=128),
        GroupSpec("cross_attention", 7),
    ]
    layout = KVCacheLayout.from_event(CacheLayout("publisher-1", specs, 8, 16, eagle=True))
    groups = (
        KVCacheGroup(GroupKind.FULL, 32),
        window(64),
        chunked(128),
        KVCacheGroup(GroupKind.NOT_CACHED, 7),
    )
    assert layout == KVCacheLayout(groups, 8, 16, frozenset(range(4)))


@pytest.mark.parametrize(
    ("eagle", "named", "drafting"),
    [
        (False, None, set()),
        (True, None, {0, 1}),
        (True, [1], {1}),
        (True, [], set()),
        (False, [0], {0}),
    ],
)
def test_an_announced_drafter_is_in_the_groups_named_or_else_in_all_or_none(
    eagle: bool, named: list[int] | None, drafting: set[int]
) -> None:
    """Publishers before the list wrote only the flag."""
    specs = [GroupSpec("full_attention", 16), GroupSpec("sliding_window", 16, 64)]
    event = CacheLayout("publisher-1", specs, 16, 16, eagle=eagle, eagle_groups=named)
    assert KVCacheLayout.from_event(event).eagle == drafting


@pytest.mark.parametrize("index", [-1, 2])
def test_a_drafter_in_a_group_that_is_not_there_is_refused(index: int) -> None:
    """A list by other numbers than the groups' would shorten the wrong hits."""
    with pytest.raises(LayoutError, match=f"eagle names group {index}: it must be one of 2 groups"):
        KVCacheLayout.build([KVCacheGroup(GroupKind.FULL, 16), window(64)], eagle=[0, index])


def test_a_window_of_replay_below_zero_is_refused() -> None:
    """Sizes are tokens."""
    with pytest.raises(LayoutError, match=r"prefix_replay_tokens -1 must lie in \[0, "):
        KVCacheLayout.build([window(64)], prefix_replay_tokens=-1)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (GroupSpec("wavelet", 16), "group 1: kind 'wavelet' must be one of full_attention, "),
        (GroupSpec("w" * 1000, 16), "group 1: kind 'w{40}' must be one of"),
        (GroupSpec("sliding_window", 16), r"group 1 \(sliding_window\): sliding_window None"),
        (GroupSpec("full_attention", 0), r"group 1 \(full_attention\): block_size 0"),
        (
            GroupSpec("full_attention", 24),
            r"group 1 \(full_attention\): block_size 24 must be a multiple of hash_block_size 16",
        ),
    ],
)
def test_an_announced_layout_that_contradicts_itself_is_refused(
    spec: GroupSpec, message: str
) -> None:
    """It comes from outside, so all of it is checked."""
    with pytest.raises(LayoutError, match=message):
        KVCacheLayout.from_event(
            CacheLayout("publisher-1", [GroupSpec("full_attention", 16), spec], 16, 48)
        )
