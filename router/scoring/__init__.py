"""Hits and load in, a ranked list with reasons out. Pure: no I/O, no clock, and the only chance is
the `Random` passed in.

`types` holds what goes in and out, `cost` the estimated wait; `prefix`, `simple` and `session` are
the policies, `policies` finds them by name, and `ranking.rank` is what the router calls.

The files; each imports only what is listed above it:

    types.py      what goes in and out; the weights
    cost.py       the estimated wait
    prefix.py     the default policy: least wait
    simple.py     round robin, random, least loaded
    session.py    consistent hashing of sessions
    policies.py   policies by name, plug-ins
    ranking.py    leaves out who cannot; holds a policy to its rules
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
