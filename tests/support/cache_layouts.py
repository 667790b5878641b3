"""Caches of every kind, small enough to compare with a model after every step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvevents.layout import GroupKind, KVCacheGroup
from offload.config import CacheConfig


def full(block_size: int = 4) -> KVCacheGroup:
    return KVCacheGroup(GroupKind.FULL, block_size)


def window(size: int, block_size: int = 4) -> KVCacheGroup:
    return KVCacheGroup(GroupKind.SLIDING_WINDOW, block_size, sliding_window=size)


def chunked(size: int, block_size: int = 4) -> KVCacheGroup:
    return KVCacheGroup(GroupKind.CHUNKED_LOCAL, block_size, attention_chunk_size=size)


def mamba(block_size: int = 4) -> KVCacheGroup:
    return KVCacheGroup(GroupKind.MAMBA, block_size)


def cross(block_size: int = 4) -> KVCacheGroup:
    return KVCacheGroup(GroupKind.NOT_CACHED, block_size)


GROUPS: dict[str, list[KVCacheGroup]] = {
    "full": [full()],
    "a window": [window(10)],
    "full and a window": [full(), window(9)],
    "a window of one token": [full(), window(1)],
    "a window before full": [window(6), full()],
    "two windows": [window(5), window(17)],
    "full and two windows": [full(), window(5), window(17)],
    "full and four equal windows": [full(), *[window(9)] * 4],
    "chunks": [chunked(16)],
    "full and chunks": [full(), chunked(16)],
    "states": [mamba()],
    "full and states": [full(), mamba()],
    "states, a window and full": [mamba(), window(9), full()],
    "every kind": [full(), window(9), chunked(32), mamba()],
    "blocks of three sizes": [full(16), window(10, 4), window(13, 8)],
    "coarse windows": [full(4), window(20, 8)],
    "coarse states": [full(4), mamba(8)],
    "cross attention": [full(), cross(8), window(9)],
}


def is_sparse(groups: Sequence[KVCacheGroup]) -> bool:
    """Whether a retention interval has an effect on these groups."""
    return any(group.kind in (GroupKind.SLIDING_WINDOW, GroupKind.MAMBA) for group in groups)


def eagle_groups(groups: Sequence[KVCacheGroup]) -> list[int]:
    """Those that may hold a drafter's layers, by index."""
    kinds = (GroupKind.FULL, GroupKind.SLIDING_WINDOW)
    return [index for index, group in enumerate(groups) if group.kind in kinds]


def allows_eagle(groups: Sequence[KVCacheGroup]) -> bool:
    """Whether all may at once."""
    return all(group.kind is not GroupKind.CHUNKED_LOCAL for group in groups)


def config_of(groups: Sequence[KVCacheGroup], **settings: Any) -> CacheConfig:
    """Configure a cache of these groups; sizes that are left out follow from them."""
    sizes = [group.block_size for group in groups if group.kind is not GroupKind.NOT_CACHED]
    settings.setdefault("num_blocks", 40 * len(groups))
    settings.setdefault("max_model_len", 200)
    settings.setdefault("enable_events", True)
    settings.setdefault("retention_interval", None)  # all that can serve a hit: the rule is bare
    return CacheConfig.build(
        groups,
        scheduler_block_size=math.lcm(*sizes),
        hash_block_size=settings.pop("hash_block_size", math.gcd(*sizes)),
        **settings,
    )


def with_blocks(config: CacheConfig, num_blocks: int) -> CacheConfig:
    """The same cache, larger or smaller."""
    return replace(config, num_blocks=num_blocks)


def variants() -> list[tuple[str, CacheConfig]]:
    """Every layout, with and without EAGLE, with every retention that affects it; and one without
    caching.
    """
    found: list[tuple[str, CacheConfig]] = []
    for name, groups in GROUPS.items():
        for eagle in (False, True) if allows_eagle(groups) else (False,):
            for interval in (None, 0, 32) if is_sparse(groups) else (None,):
                retention = "" if interval is None else f", interval {interval}"
                label = f"{name}{', eagle' if eagle else ''}{retention}"
                found.append(
                    (
                        label,
                        config_of(
                            groups,
                            eagle=eagle,
                            retention_interval=interval,
                            max_in_flight_tokens=32,
                        ),
                    )
                )
    found.append(
        (
            "no caching",
            config_of(GROUPS["every kind"], enable_caching=False, max_in_flight_tokens=32),
        )
    )
    return found
