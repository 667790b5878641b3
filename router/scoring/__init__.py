"""Hits and load in, a ranked list with reasons out. The router calls `rank`.

Pure: no I/O, no clock, and all randomness comes from the `Random` passed in.

The files; each imports only what is listed above it:

    types.py      what goes in and out; the weights
    standings.py  the candidates of a decision as columns, and the order that a policy gives them
    delay.py      the least delay for this request and for others
    policies.py   least wait, round robin, random, least loaded, sessions; by name, plug-ins
    ranking.py    leaves out those that cannot serve; holds a policy to its rules
"""

from router.scoring.policies import (
    LEAST_DELAY,
    PolicySettings,
    estimate,
    make_policy,
    policy_names,
    waits,
)
from router.scoring.ranking import Ranker, empty_reason, rank
from router.scoring.standings import (
    IDLE,
    LEAST_TRUST,
    Lower,
    Order,
    OrdersInCore,
    OrdersStandings,
    Outlook,
    Ranking,
    Standings,
    State,
    Why,
)
from router.scoring.types import (
    PEER,
    Candidate,
    CandidateLoad,
    Policy,
    Ranked,
    RouteRequest,
    Weights,
)

__all__ = [
    "IDLE",
    "LEAST_DELAY",
    "LEAST_TRUST",
    "PEER",
    "Candidate",
    "CandidateLoad",
    "Lower",
    "Order",
    "OrdersInCore",
    "OrdersStandings",
    "Outlook",
    "Policy",
    "PolicySettings",
    "Ranked",
    "Ranker",
    "Ranking",
    "RouteRequest",
    "Standings",
    "State",
    "Weights",
    "Why",
    "empty_reason",
    "estimate",
    "make_policy",
    "policy_names",
    "rank",
    "waits",
]
