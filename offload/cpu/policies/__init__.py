"""Eviction policies by name: the built-in ones, and plug-ins from the entry point group
`kvroute.offload_policies`.

A plug-in is a callable that takes the number of blocks and returns an `EvictionPolicy`:

    [project.entry-points."kvroute.offload_policies"]
    fifo = "my_package:FIFOPolicy"

The files; each imports only what is listed above it:

    base.py   what a policy must do
    lru.py    least recently used
    arc.py    adaptive replacement
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

from offload.cpu.policies.arc import ARCPolicy
from offload.cpu.policies.base import EvictionPolicy
from offload.cpu.policies.lru import LRUPolicy
from offload.errors import CacheConfigError

__all__ = ["BUILT_IN", "GROUP", "EvictionPolicy", "create_policy", "policy_names"]

GROUP = "kvroute.offload_policies"

BUILT_IN: dict[str, Callable[[int], EvictionPolicy]] = {"lru": LRUPolicy, "arc": ARCPolicy}

_METHODS = ("admit", "touch", "hold", "release", "discard", "clear")


def policy_names() -> list[str]:
    """All names that `create_policy` knows, built-in ones first."""
    plug_ins = {entry.name for entry in entry_points(group=GROUP)}
    return [*BUILT_IN, *sorted(plug_ins - BUILT_IN.keys())]


def create_policy(name: str, capacity: int) -> EvictionPolicy:
    """The policy of that name for a tier of *capacity* blocks; a built-in one wins over a plug-in
    of the same name.

    Raises:
        CacheConfigError: There is none, or its plug-in cannot be loaded. What a plug-in's own code
            raises goes through.
    """
    if capacity < 1:
        raise CacheConfigError(f"cache_policy {name!r}: capacity {capacity} must be at least 1")
    if name in BUILT_IN:
        return BUILT_IN[name](capacity)
    return _from_plug_in(_entry_point(name), capacity)


def _entry_point(name: str) -> EntryPoint:
    found = {entry.value: entry for entry in entry_points(group=GROUP, name=name)}
    if not found:
        raise CacheConfigError(f"cache_policy: {name!r} is none of {', '.join(policy_names())}")
    if len(found) > 1:
        raise CacheConfigError(
            f"cache_policy: {name!r} is offered by {' and '.join(sorted(found))}; uninstall all but one"
        )
    return next(iter(found.values()))


def _from_plug_in(entry: EntryPoint, capacity: int) -> EvictionPolicy:
    place = f"cache_policy: the plug-in {entry.name!r} ({entry.value})"
    try:
        factory = entry.load()
    except (ImportError, AttributeError) as error:
        raise CacheConfigError(f"{place} cannot be imported: {error}") from error
    if not callable(factory):
        raise CacheConfigError(
            f"{place} is {type(factory).__name__}; it must be callable with the number of blocks"
        )
    policy: EvictionPolicy = factory(capacity)
    missing = [method for method in _METHODS if not callable(getattr(policy, method, None))]
    if missing:
        raise CacheConfigError(
            f"{place} made {type(policy).__name__}; it lacks the methods {', '.join(missing)}"
        )
    return policy
