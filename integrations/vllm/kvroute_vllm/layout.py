"""Describes the layout of a vLLM scheduler's cache."""

from __future__ import annotations

from typing import Any

from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from kvevents import GroupSpec, HashChain, KVCacheLayout, hash_algorithms
from kvevents.errors import LayoutError
from kvevents.layout import group_from_spec

_EAGLE_SEES_LAST_TOKEN = (0, 32)
"""Before this release EAGLE's look-ups end one token earlier, which no event shows."""


def describe(scheduler: Any, release: tuple[int, int]) -> KVCacheLayout:
    """Return the layout that a publisher announces.

    Args:
        scheduler: vLLM's, made.
        release: Of vLLM.

    Raises:
        LayoutError: The cache has something for which the announcement has no word.
    """
    coordinator = scheduler.kv_cache_manager.coordinator
    managers = coordinator.single_type_managers
    eagle = drafter_groups(coordinator)
    if eagle and release < _EAGLE_SEES_LAST_TOKEN:
        raise LayoutError("a drafter: its hits are known from vLLM 0.32 on")
    if getattr(scheduler, "prefix_replay_tokens", 0):
        raise LayoutError("a window that is rebuilt after a hit cannot be announced")
    specs = [_group_spec(manager) for manager in managers]
    return KVCacheLayout.build(
        [group_from_spec(index, spec) for index, spec in enumerate(specs)],
        managers[0].block_pool.hash_block_size,
        hit_step(coordinator),
        eagle,
    )


def hash_chain(scheduler: Any) -> HashChain | None:
    """vLLM's hash function; None where nothing is hashed, or `kvevents` does not know it."""
    algorithm = scheduler.cache_config.prefix_caching_hash_algo
    if not scheduler.cache_config.enable_prefix_caching or algorithm not in hash_algorithms():
        return None
    return HashChain(algorithm, bytes(kv_cache_utils.NONE_HASH))


def drafter_groups(coordinator: Any) -> frozenset[int]:
    """Return the groups of vLLM's cache coordinator whose last block of a hit is computed again."""
    newer = getattr(coordinator, "drop_eagle_group_ids", None)
    return frozenset(coordinator.eagle_group_ids if newer is None else newer)


def hit_step(coordinator: Any) -> int:
    """Hits of vLLM's cache coordinator are multiples of it, in tokens."""
    managers = filter(_is_cached, coordinator.single_type_managers)
    return min(int(manager.cache_hit_alignment_tokens) for manager in managers)


def _is_cached(manager: Any) -> bool:
    return bool(getattr(manager.kv_cache_spec, "prefix_cacheable", True))


def _group_spec(manager: Any) -> GroupSpec:
    spec = manager.kv_cache_spec
    return GroupSpec(
        get_kv_cache_spec_kind(spec).value if _is_cached(manager) else "not_cached",
        manager.block_size,
        get_kv_cache_spec_sliding_window(spec),
        getattr(spec, "attention_chunk_size", None),
    )
