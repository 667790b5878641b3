"""Leaves out who cannot take a request, and holds a policy to its rules."""

from __future__ import annotations

from collections.abc import Iterable

from router.policies import (
    Candidate,
    Policy,
    Ranked,
    RouteRequest,
)
from router.policies.plug_ins import check


def rank(
    policy: Policy, request: RouteRequest, candidates: Iterable[Candidate]
) -> tuple[tuple[Ranked, ...], tuple[Candidate, ...]]:
    """Let a policy order those that can take a request.

    Args:
        policy: Any.
        request: What the policy may know of it.
        candidates: All replicas that serve the model, whatever their state.
    Returns:
        Who could serve the request, best first; and who cannot, each with its `obstacle`.
    Raises:
        PolicyError: The policy broke a rule.
    """
    candidates = list(candidates)
    able = [each for each in candidates if each.obstacle is None]
    ranked = policy.rank(request, able)
    check(policy, able, ranked)
    return tuple(ranked), tuple(each for each in candidates if each.obstacle is not None)
