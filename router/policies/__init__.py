"""Ranks replicas, with reasons: the policies of the compiled core by name, the interface of
plug-ins, and the reasons in words.

Pure: no I/O, no clock, and all randomness comes from the `Random` passed in.

The files; each imports only what is listed above it:

    types.py      what goes in and out; the weights
    reasons.py    why candidates are in their places, as sentences
    policies.py   the policies by name, plug-ins among them
    standings.py  the candidates of a decision as columns, and the order that a plug-in gives them
    plug_ins.py   lets a plug-in order the candidates, and checks its rules
"""

from router.policies.plug_ins import PlugIn
from router.policies.policies import (
    LEAST_DELAY,
    BuiltInPolicy,
    PolicySettings,
    make_policy,
    policy_names,
    session_bytes,
)
from router.policies.reasons import Why, empty_reason
from router.policies.standings import (
    Lower,
    Order,
    OrdersStandings,
    Outlook,
    Ranking,
    Standings,
    State,
)
from router.policies.types import (
    PEER,
    Candidate,
    CandidateLoad,
    Policy,
    Ranked,
    RouteRequest,
    Weights,
)

__all__ = [
    "LEAST_DELAY",
    "PEER",
    "BuiltInPolicy",
    "Candidate",
    "CandidateLoad",
    "Lower",
    "Order",
    "OrdersStandings",
    "Outlook",
    "PlugIn",
    "Policy",
    "PolicySettings",
    "Ranked",
    "Ranking",
    "RouteRequest",
    "Standings",
    "State",
    "Weights",
    "Why",
    "empty_reason",
    "make_policy",
    "policy_names",
    "session_bytes",
]
