"""Eviction policies by name: the built-in ones, and plug-ins.

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

from kvevents.plugins import PlugIns
from offload.cpu.policies.arc import ARCPolicy
from offload.cpu.policies.base import EvictionPolicy
from offload.cpu.policies.lru import LRUPolicy
from offload.errors import CacheConfigError

__all__ = ["BUILT_IN", "GROUP", "EvictionPolicy", "create_policy", "policy_names"]

GROUP = "kvroute.offload_policies"

BUILT_IN: dict[str, Callable[[int], EvictionPolicy]] = {"lru": LRUPolicy, "arc": ARCPolicy}

_METHODS = ("admit", "touch", "hold", "release", "discard", "clear")
_policies = PlugIns(GROUP, "cache_policy", BUILT_IN, _METHODS, CacheConfigError)


def policy_names() -> list[str]:
    """All names that `create_policy` knows, built-in ones first."""
    return _policies.names()


def create_policy(name: str, capacity: int) -> EvictionPolicy:
    """Make the policy of that name.

    Args:
        name: A built-in policy or a plug-in; a built-in one wins over a plug-in of the same name.
        capacity: Blocks in the tier, at least 1.

    Raises:
        CacheConfigError: The name is unknown, or its plug-in cannot be used. A plug-in's own errors
            go through.
    """
    return _policies.make(name, capacity)
