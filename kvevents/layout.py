"""The groups of a cache, checked: the part of the past that their layers need, and their block
sizes.

Layers that need the same part of the past share block tables: they are one group. How much of a
prompt such a cache can serve is in `kvevents/hit_rule.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from kvevents.errors import LayoutError
from kvevents.events import CacheLayout, GroupSpec

MAX_BLOCK_SIZE = 2**20


class GroupKind(Enum):
    """Names what a group's layers need of the past."""

    FULL = "full_attention"
    SLIDING_WINDOW = "sliding_window"
    CHUNKED_LOCAL = "chunked_local_attention"
    MAMBA = "mamba"
    NOT_CACHED = "not_cached"
    """Cross and encoder-only attention: blocks are never shared and take no part in a hit."""


_WIRE_KINDS = {
    "full_attention": GroupKind.FULL,
    "mla_attention": GroupKind.FULL,
    "sink_full_attention": GroupKind.FULL,
    "sliding_window": GroupKind.SLIDING_WINDOW,
    "sliding_window_mla": GroupKind.SLIDING_WINDOW,
    "chunked_local_attention": GroupKind.CHUNKED_LOCAL,
    "mamba": GroupKind.MAMBA,
    "linear_attention": GroupKind.MAMBA,
    "cross_attention": GroupKind.NOT_CACHED,
    "encoder_only_attention": GroupKind.NOT_CACHED,
    "not_cached": GroupKind.NOT_CACHED,
}


def kind_from_wire(name: str | None) -> GroupKind | None:
    """The kind behind a `kv_cache_spec_kind`; None for an unknown name."""
    return None if name is None else _WIRE_KINDS.get(name)


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """One group of layers that share block tables. All sizes in tokens."""

    kind: GroupKind
    block_size: int
    sliding_window: int | None = None
    attention_chunk_size: int | None = None

    def window_blocks(self, extra_blocks: int = 0) -> int:
        """How many blocks a sliding window needs, and *extra_blocks* for EAGLE.

        A window of 1 sees no other token, but vLLM asks for one block all the same.
        """
        assert self.sliding_window is not None
        return max(1, -(-(self.sliding_window - 1) // self.block_size) + extra_blocks)


@dataclass(frozen=True, slots=True)
class KVCacheLayout:
    """All groups of one cache, checked. All sizes in tokens."""

    groups: tuple[KVCacheGroup, ...]
    hash_block_size: int
    scheduler_block_size: int
    eagle: frozenset[int] = frozenset()
    """Groups, by index, whose last block of a hit is computed again: those that hold layers of an
    EAGLE or MTP drafter, or all where the engine does not know which do."""
    eagle_sees_last_token: bool = True
    """True if EAGLE's extra block may hold the prompt's last token, where several groups must
    agree: vLLM >= 0.32."""
    prefix_replay_tokens: int = 0
    """Tokens at the end of a hit that the engine computes again; it reuses nothing of a hit that
    has no more."""

    @classmethod
    def build(
        cls,
        groups: Sequence[KVCacheGroup],
        hash_block_size: int | None = None,
        scheduler_block_size: int | None = None,
        eagle: bool | Iterable[int] = False,
        eagle_sees_last_token: bool = True,
        prefix_replay_tokens: int = 0,
    ) -> KVCacheLayout:
        """Make a checked layout.

        Args:
            groups: In the order of their index in events.
            hash_block_size: Tokens between two block hashes; None: the greatest common divisor of
                the groups' block sizes.
            scheduler_block_size: Granularity of hits; None: the least common multiple of the
                groups' block sizes.
            eagle: The groups that hold layers of an EAGLE or MTP drafter; True: all.

        Raises:
            LayoutError: A size is out of range or contradicts another; the message names group,
                value and rule.
        """
        for index, group in enumerate(groups):
            _check_group(index, group)
        sizes = [group.block_size for group in groups if group.kind is not GroupKind.NOT_CACHED]
        if not sizes:
            raise LayoutError("groups: a layout needs at least one group that caches")
        layout = cls(
            groups=tuple(groups),
            hash_block_size=hash_block_size or math.gcd(*sizes),
            scheduler_block_size=scheduler_block_size or math.lcm(*sizes),
            eagle=_indexes(eagle, len(groups)),
            eagle_sees_last_token=eagle_sees_last_token,
            prefix_replay_tokens=prefix_replay_tokens,
        )
        _check_layout(layout)
        return layout

    @classmethod
    def from_event(cls, event: CacheLayout) -> KVCacheLayout:
        """The layout that a publisher announced.

        Raises:
            LayoutError: A kind is unknown, or sizes contradict each other.
        """
        groups = [group_from_spec(index, spec) for index, spec in enumerate(event.groups)]
        eagle = event.eagle if event.eagle_groups is None else event.eagle_groups
        return cls.build(groups, event.hash_block_size, event.scheduler_block_size, eagle)


def group_from_spec(index: int, spec: GroupSpec) -> KVCacheGroup:
    """A checked group from its wire form.

    Args:
        index: The group's index, for error messages.

    Raises:
        LayoutError: The kind is unknown, or a size is out of range.
    """
    kind = kind_from_wire(spec.kind)
    if kind is None:
        raise LayoutError(
            f"group {index}: kind {spec.kind[:40]!r} must be one of {', '.join(_WIRE_KINDS)}"
        )
    group = KVCacheGroup(kind, spec.block_size, spec.sliding_window, spec.attention_chunk_size)
    _check_group(index, group)
    return group


def _indexes(eagle: bool | Iterable[int], count: int) -> frozenset[int]:
    if isinstance(eagle, bool):
        return frozenset(range(count) if eagle else ())
    return frozenset(eagle)


def _check_group(index: int, group: KVCacheGroup) -> None:
    place = f"group {index} ({group.kind.value})"
    _check_size(place, "block_size", group.block_size)
    if group.kind is GroupKind.SLIDING_WINDOW:
        _check_size(place, "sliding_window", group.sliding_window)
    if group.kind is GroupKind.CHUNKED_LOCAL:
        _check_size(place, "attention_chunk_size", group.attention_chunk_size)


def _check_size(place: str, name: str, value: int | None) -> None:
    limit = MAX_BLOCK_SIZE if name.endswith("block_size") else 2**31
    if value is None or not 1 <= value <= limit:
        raise LayoutError(f"{place}: {name} {value} must lie in [1, {limit}]")


def _check_layout(layout: KVCacheLayout) -> None:
    _check_size("layout", "hash_block_size", layout.hash_block_size)
    _check_size("layout", "scheduler_block_size", layout.scheduler_block_size)
    if layout.scheduler_block_size % layout.hash_block_size:
        raise LayoutError(
            f"layout: scheduler_block_size {layout.scheduler_block_size} must be a multiple of "
            f"hash_block_size {layout.hash_block_size}"
        )
    for index in sorted(layout.eagle):
        if not 0 <= index < len(layout.groups):
            raise LayoutError(
                f"layout: eagle names group {index}: "
                f"it must be one of {len(layout.groups)} groups, counted from 0"
            )
    if not 0 <= layout.prefix_replay_tokens < 2**31:
        raise LayoutError(
            f"layout: prefix_replay_tokens {layout.prefix_replay_tokens} must lie in [0, {2**31})"
        )
    for index, group in enumerate(layout.groups):
        if group.block_size % layout.hash_block_size and group.kind is not GroupKind.NOT_CACHED:
            raise LayoutError(
                f"group {index} ({group.kind.value}): block_size {group.block_size} must be a "
                f"multiple of hash_block_size {layout.hash_block_size}"
            )
