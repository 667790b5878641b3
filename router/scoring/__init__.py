"""Hits and load in, a ranked list with reasons out. Pure: no I/O, no clock, and the only chance is
the `Random` passed in.

`types` holds what goes in and out, `cost` the estimated wait; `prefix`, `simple` and `session` are
the policies, `policies` finds them by name, and `ranking.rank` is what the router calls.
"""

from router.scoring.cost import Estimate, estimate
from router.scoring.policies import PolicySettings, make_policy, policy_names
from router.scoring.ranking import Excluded, Ranking, rank
from router.scoring.types import Candidate, Policy, Ranked, RouteRequest, Weights

__all__ = [
    "Candidate",
    "Estimate",
    "Excluded",
    "Policy",
    "PolicySettings",
    "Ranked",
    "Ranking",
    "RouteRequest",
    "Weights",
    "estimate",
    "make_policy",
    "policy_names",
    "rank",
]
