"""Policies by name: the built-in ones, and plug-ins.

A plug-in is a callable that takes a `PolicySettings` and returns a `Policy`:

    [project.entry-points."kvroute.policies"]
    cheapest = "my_package:CheapestPolicy"
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from kvevents.plugins import PlugIns
from router.errors import PolicyError
from router.scoring.prefix import PrefixPolicy
from router.scoring.session import SessionPolicy
from router.scoring.simple import LeastLoadedPolicy, RandomPolicy, RoundRobinPolicy
from router.scoring.types import Policy, Weights

GROUP = "kvroute.policies"


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """What a policy is made from."""

    weights: Weights = field(default_factory=Weights)
    """Costs, for policies that estimate."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """`policy.options` of the configuration, for plug-ins; the plug-in checks it."""
    random: Random = field(default_factory=Random)
    """The source of every random choice, so that tests can repeat one."""


BUILT_IN: dict[str, Callable[[PolicySettings], Policy]] = {
    "prefix": lambda settings: PrefixPolicy(settings.weights, settings.random),
    "round_robin": lambda _settings: RoundRobinPolicy(),
    "random": lambda settings: RandomPolicy(settings.random),
    "least_loaded": lambda settings: LeastLoadedPolicy(settings.weights, settings.random),
    "session": lambda settings: SessionPolicy(settings.weights, settings.random),
}


_policies = PlugIns(GROUP, "policy.name", BUILT_IN, ("rank",), PolicyError)


def policy_names() -> list[str]:
    """All names that `make_policy` knows, built-in ones first."""
    return _policies.names()


def make_policy(name: str, settings: PolicySettings | None = None) -> Policy:
    """Make the policy of that name.

    Args:
        name: A built-in policy or a plug-in; a built-in one wins over a plug-in of the same name.
        settings: What it is made from; None: the defaults.

    Raises:
        PolicyError: The name is unknown, its plug-in cannot be used, or a built-in policy has
            options. What a plug-in's own code raises goes through.
    """
    settings = settings or PolicySettings()
    if name in BUILT_IN and settings.options:
        raise PolicyError(
            f"policy.options: {sorted(settings.options)}; the built-in policy {name!r} takes none"
        )
    return _policies.make(name, settings)
