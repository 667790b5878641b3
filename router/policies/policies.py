"""The policies, and how one is found by name.

A plug-in is a callable that takes a `PolicySettings` and returns a `Policy`:

    [project.entry-points."kvroute.policies"]
    cheapest = "my_package:CheapestPolicy"
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from kvevents.plugins import PlugIns
from router._core import Policy as CorePolicy
from router._core import built_in_policies
from router.errors import PolicyError
from router.policies.reasons import Why, reasons_of
from router.policies.types import Candidate, Policy, Ranked, RouteRequest, Weights

LEAST_DELAY = "least_delay"


class BuiltInPolicy:
    """A policy of the compiled core (`core/decide/`; `tests/oracle/scoring/` has it in Python)."""

    def __init__(self, name: str, settings: PolicySettings) -> None:
        self.name = name
        self.weights = settings.weights
        self.needs_outlook = name == LEAST_DELAY
        """True if it reads what caches are doing."""
        self._random = settings.random.random
        self._core = CorePolicy(name, settings.weights)

    def rank(self, request: RouteRequest, candidates: Sequence[Candidate]) -> list[Ranked]:
        """Order candidates, outside of the core's decisions: for a plug-in that changes something.

        Args:
            candidates: May be empty.
        """
        if not candidates:
            return []
        costs, numbers, _, mean_congestion = self._core.order(
            request.model,
            session_bytes(request),
            request.prompt_tokens,
            request.prefill_tokens_per_s,
            request.keys,
            list(candidates),
            [self._random() for _ in candidates],
        )
        why = self.why(request, mean_congestion)
        chosen = [(candidates[number], costs[number]) for number in numbers]
        return [
            Ranked(candidate, cost, partial(why, candidate, cost, place))
            for place, (candidate, cost) in enumerate(chosen)
        ]

    def why(self, request: RouteRequest, mean_congestion: float) -> Why:
        """Why candidates are in their places.

        Args:
            mean_congestion: The value that the order was found with.
        """
        return reasons_of(self.name, self._core, request, mean_congestion)


def session_bytes(request: RouteRequest) -> bytes:
    """Return the client's session as bytes; it may have a lone surrogate."""
    return b"" if not request.session else request.session.encode("utf-8", "surrogatepass")


# --- by name --------------------------------------------------------------------------------------


GROUP = "kvroute.policies"


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """Holds the parts of a new policy."""

    weights: Weights = field(default_factory=Weights)
    """Costs, for policies that estimate."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """`policy.options` of the configuration, for plug-ins; the plug-in checks it."""
    random: Random = field(default_factory=Random)
    """The source of every random choice, so that tests can repeat one."""


BUILT_IN: dict[str, Callable[[PolicySettings], Policy]] = {
    name: partial(BuiltInPolicy, name) for name in built_in_policies
}


_policies = PlugIns(GROUP, "policy.name", BUILT_IN, ("rank",), PolicyError)


def policy_names() -> list[str]:
    """All names that `make_policy` knows, built-in ones first."""
    return _policies.names()


def make_policy(name: str, settings: PolicySettings | None = None) -> Policy:
    """Make the policy of that name.

    Args:
        name: A built-in policy or a plug-in; a built-in one wins over a plug-in of the same name.

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
