"""The router's own decision code, wired for a simulation: index, load, recent prefixes, gauges,
policy, ranking."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from kvevents.events import EventBatch
from router.config import ReplicaConfig as RouterReplicaConfig
from router.demo.blind import GroupBlindIndex
from router.index import SourceId, create_index
from router.mirror import Mirror
from router.replicas.engine_load import EngineLoad
from router.replicas.health import HealthRecord
from router.replicas.load import InFlight, LoadTracker
from router.replicas.replica import Replica
from router.routing.planner import RECENT_STEP, RoutePlanner, uncached_tokens
from router.routing.recent_prefixes import RecentPrefixes
from router.scoring import PolicySettings, RouteRequest, Weights, make_policy

MODEL = "simulated"
GROUP_BLIND = "group_blind"
"""The default policy with an index that ignores groups."""
BLIND_AND_FORGETFUL = "group_blind_no_recent"
"""The same in a router that does not remember what it has just sent where."""
LEAST_DELAY = "least_delay"
POLICIES = (
    LEAST_DELAY,
    "prefix",
    GROUP_BLIND,
    BLIND_AND_FORGETFUL,
    "session",
    "least_loaded",
    "round_robin",
    "random",
)

_AT_ONCE_S = 1e-9


class SimulatedRouter:
    """Decides as the router does. The clock is passed in."""

    def __init__(
        self,
        policy: str,
        replica_ids: Sequence[str],
        clock: Callable[[], float],
        weights: Weights | None = None,
        seed: int = 0,
    ) -> None:
        self._clock = clock
        is_blind = policy in (GROUP_BLIND, BLIND_AND_FORGETFUL)
        self.index = GroupBlindIndex() if is_blind else create_index()
        self.load = LoadTracker()
        self._replicas = [_healthy(replica_id) for replica_id in replica_ids]
        name = "prefix" if is_blind else policy
        chosen = make_policy(name, PolicySettings(weights or Weights(), random=Random(seed)))
        recent = RecentPrefixes(_AT_ONCE_S) if policy == BLIND_AND_FORGETFUL else RecentPrefixes()
        mirror = Mirror(clock=clock) if policy == LEAST_DELAY else None
        self._planner = RoutePlanner(
            chosen,
            self.load,
            None if policy == LEAST_DELAY else recent,
            lambda _source: False,
            clock=clock,
            mirror=mirror,
        )

    def take_batch(self, replica_id: str, batch: EventBatch) -> None:
        """A replica's events."""
        self.index.apply(SourceId(replica_id), batch)

    def take_engine_load(self, replica_id: str, running: int, waiting: int) -> None:
        """A replica's own metrics, as if they had been scraped now."""
        replica = next(replica for replica in self._replicas if replica.id == replica_id)
        replica.take_engine_load(
            EngineLoad(running, waiting, None),
            self.load.load_of(replica_id).requests,
            self._clock(),
        )

    def route(self, session: str, token_ids: Sequence[int]) -> tuple[str, int, InFlight]:
        """Decide where a request goes; return the replica, the tokens predicted to be reused there,
        and its share of the load, which counts from now on."""
        prompts = [self.index.prepare(token_ids, extra_steps=(RECENT_STEP,))]
        request = RouteRequest(model=MODEL, prompt_tokens=len(token_ids), session=session)
        ranking, _ = self._planner.rank(request, self.index, prompts, self._replicas)
        chosen = ranking[0].candidate
        count, source = len(token_ids), SourceId(chosen.replica_id)
        uncached = uncached_tokens(count, chosen)
        self._planner.remember(prompts, source)
        visit = self._planner.visit(MODEL, self.index, prompts, source, count, uncached)
        in_flight = self.load.started(chosen.replica_id, uncached, count, visit=visit)
        return chosen.replica_id, chosen.cached_tokens, in_flight


def _healthy(replica_id: str) -> Replica:
    record = HealthRecord(1, 1)
    record.check_passed()
    return Replica(RouterReplicaConfig(url="http://127.0.0.1:8000", id=replica_id), record, 0.0)
