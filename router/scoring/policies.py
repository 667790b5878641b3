"""Policies by name: the built-in ones, and plug-ins from the entry point group `kvroute.policies`.

A plug-in is a callable that takes a `PolicySettings` and returns a `Policy`:

    [project.entry-points."kvroute.policies"]
    cheapest = "my_package:CheapestPolicy"
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from random import Random
from typing import Any

from router.errors import PolicyError
from router.scoring.prefix import PrefixPolicy
from router.scoring.session import SessionPolicy
from router.scoring.simple import LeastLoadedPolicy, RandomPolicy, RoundRobinPolicy
from router.scoring.types import Policy, Weights

GROUP = "kvroute.policies"


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """What a policy is made from.

    Attributes:
        weights: Costs, for policies that estimate.
        options: `policy.options` of the configuration, for plug-ins; the plug-in checks it.
        random: The source of every random choice, so that tests can repeat one.
    """

    weights: Weights = field(default_factory=Weights)
    options: Mapping[str, Any] = field(default_factory=dict)
    random: Random = field(default_factory=Random)


BUILT_IN: dict[str, Callable[[PolicySettings], Policy]] = {
    "prefix": lambda settings: PrefixPolicy(settings.weights, settings.random),
    "round_robin": lambda _settings: RoundRobinPolicy(),
    "random": lambda settings: RandomPolicy(settings.random),
    "least_loaded": lambda settings: LeastLoadedPolicy(settings.weights, settings.random),
    "session": lambda settings: SessionPolicy(settings.weights, settings.random),
}


def policy_names() -> list[str]:
    """All names that `make_policy` knows, built-in ones first."""
    plug_ins = {entry.name for entry in entry_points(group=GROUP)}
    return [*BUILT_IN, *sorted(plug_ins - BUILT_IN.keys())]


def make_policy(name: str, settings: PolicySettings | None = None) -> Policy:
    """The policy of that name; a built-in one wins over a plug-in of the same name.

    Raises:
        PolicyError: There is none, or its plug-in cannot be loaded. What a plug-in's own code
            raises goes through.
    """
    settings = settings or PolicySettings()
    if name in BUILT_IN:
        if settings.options:
            raise PolicyError(
                f"policy.options: {sorted(settings.options)}; the built-in policy {name!r} takes none"
            )
        return BUILT_IN[name](settings)
    return _from_plug_in(_entry_point(name), settings)


def _entry_point(name: str) -> EntryPoint:
    found = {entry.value: entry for entry in entry_points(group=GROUP, name=name)}
    if not found:
        raise PolicyError(f"policy.name: {name!r} is none of {', '.join(policy_names())}")
    if len(found) > 1:
        raise PolicyError(
            f"policy.name: {name!r} is offered by {' and '.join(sorted(found))}; uninstall all but one"
        )
    return next(iter(found.values()))


def _from_plug_in(entry: EntryPoint, settings: PolicySettings) -> Policy:
    place = f"policy.name: the plug-in {entry.name!r} ({entry.value})"
    try:
        factory = entry.load()
    except (ImportError, AttributeError) as error:
        raise PolicyError(f"{place} cannot be imported: {error}") from error
    if not callable(factory):
        raise PolicyError(
            f"{place} is {type(factory).__name__}; it must be callable with PolicySettings"
        )
    policy: Policy = factory(settings)
    if not callable(getattr(policy, "rank", None)):
        raise PolicyError(
            f"{place} made {type(policy).__name__}; it must have a method rank(request, candidates)"
        )
    return policy
