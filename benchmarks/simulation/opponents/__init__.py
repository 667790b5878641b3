"""Routers of other projects, each with its own rule and its own index, from its publication or
documentation. They are written anew: what a rule leaves open was decided in its favour.

    base.py           what they count, and an index of events that knows no groups
    histories.py      those that know only what they have sent
    event_driven.py   those that hear events
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.simulation.layouts import ReplicaConfig
from benchmarks.simulation.opponents.base import Opponent
from benchmarks.simulation.opponents.event_driven import Dynamo, LlmD, LMetric, Mooncake, Preble
from benchmarks.simulation.opponents.histories import AIBrix, GatewayApi, SGLangRouter

OPPONENTS: dict[str, type[Opponent]] = {
    "sglang": SGLangRouter,
    "gateway_api": GatewayApi,
    "aibrix": AIBrix,
    "dynamo": Dynamo,
    "llm_d": LlmD,
    "preble": Preble,
    "mooncake": Mooncake,
    "lmetric": LMetric,
}


def make_opponent(
    name: str,
    replica_ids: Sequence[str],
    clock: Callable[[], float],
    replica: ReplicaConfig,
    seed: int,
) -> Opponent:
    """Return a router by its name in `OPPONENTS`; see `Opponent`."""
    return OPPONENTS[name](replica_ids, clock, replica, seed)
