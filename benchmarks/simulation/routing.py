"""The router's own decision code, wired for a simulation: index, load, recent prefixes, gauges,
policy, ranking."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from random import Random
from types import MappingProxyType

from benchmarks.simulation.blind import BLIND_INDEXES
from benchmarks.simulation.contract import Routed
from benchmarks.simulation.misjudging import Misjudgment
from kvevents.events import EventBatch
from router.config.replica import PeerTierConfig
from router.config.replica import ReplicaConfig as RouterReplicaConfig
from router.fleet.engine_load import EngineLoad
from router.fleet.health import HealthRecord
from router.fleet.load import LoadTracker
from router.fleet.quiet_moments import QuietMoments
from router.fleet.replica import Replica
from router.index.base import SourceId
from router.index.index import PrefixIndex
from router.index.mirror import Mirror
from router.index.prompt import HashedPrompt
from router.policies import (
    PolicySettings,
    RouteRequest,
    Weights,
    make_policy,
)
from router.prompt.prompts import NO_ENDS, MessageEnds
from router.routing.booking import Bookings
from router.routing.planner import Known, RoutePlanner
from router.routing.question import Placement, RankQuestion, uncached_tokens
from router.routing.recent_prefixes import RECENT_STEP, RecentPrefixes
from router.routing.steering import NO_HINTS, Hints, Steering

MODEL = "simulated"
LEAST_DELAY = "least_delay"
POLICIES = (
    LEAST_DELAY,
    f"{LEAST_DELAY}, learned",
    f"{LEAST_DELAY}, told",
    f"{LEAST_DELAY}, pulling",
    "prefix",
    *BLIND_INDEXES,
    "session",
    "least_loaded",
    "round_robin",
    "random",
)
"""The router's own; those over a blind index are `prefix`. Engines are told what to keep where the
fleet has seen prompts part (learned), and at the ends of messages besides (told), or to pull what
another's memory holds (pulling)."""


class SimulatedRouter:
    """Decides as the router does. The clock is passed in."""

    def __init__(
        self,
        policy: str,
        replica_ids: Sequence[str],
        clock: Callable[[], float],
        weights: Weights | None = None,
        seed: int = 0,
        cache_blocks: int | None = None,
        joins_s: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self._clock = clock
        self._cache_blocks = cache_blocks
        self._joins_s = joins_s
        policy, _, told = policy.partition(", ")
        self._steering = Steering() if told in ("learned", "told") else None
        self._knows_ends = told == "told"
        self.index = BLIND_INDEXES.get(policy, _index)()
        for replica_id in replica_ids:
            self.index.add(SourceId(replica_id))
        peers = told == "pulling"
        self._replicas = [_healthy(replica_id, peers) for replica_id in replica_ids]
        misjudgment = Misjudgment("prefix" if policy in BLIND_INDEXES else policy)
        settings = PolicySettings(misjudgment.weights(weights or Weights()), random=Random(seed))
        chosen = misjudgment.around(make_policy(misjudgment.policy, settings))
        mirror = Mirror(clock=clock) if misjudgment.policy == LEAST_DELAY else None
        self.load = LoadTracker(None if mirror is None else mirror.books)
        self._planner = RoutePlanner(
            chosen,
            Known(
                self.load,
                recent=RecentPrefixes(self.load.books) if mirror is None else None,
                mirror=mirror,
            ),
            clock=clock,
            random=Random(seed),
        )
        self._bookings = Bookings(self.load, self._planner.visits, QuietMoments(math.inf), clock)

    def take_batch(self, replica_id: str, batch: EventBatch) -> None:
        """A replica's events."""
        self.index.apply(SourceId(replica_id), batch)

    def take_engine_load(
        self, replica_id: str, running: int, waiting: int, usage: float | None = None
    ) -> None:
        """A replica's own metrics, as if they had been scraped now."""
        replica = next(replica for replica in self._replicas if replica.id == replica_id)
        replica.take_engine_load(
            EngineLoad(running, waiting, usage, cache_blocks=self._cache_blocks),
            self.load.load_of(replica_id).requests,
            self._clock(),
        )

    def route(
        self, session: str, token_ids: Sequence[int], message_ends: Sequence[int] = ()
    ) -> Routed:
        """Decide where a request goes; its share of the load counts from now on."""
        prompts = [self.index.prepare(token_ids, extra_steps=(RECENT_STEP,))]
        request = RouteRequest(model=MODEL, prompt_tokens=len(token_ids), session=session)
        joined = [each for each in self._replicas if self._joins_s.get(each.id, 0) <= self._clock()]
        question = RankQuestion(request, self.index, prompts)
        ranking, _ = self._planner.rank(question, joined)
        chosen = ranking[0].candidate
        count, source = len(token_ids), SourceId(chosen.replica_id)
        uncached = uncached_tokens(count, chosen)
        hints = self._hints(prompts[0], token_ids, message_ends)
        at = Placement(question, chosen, source, uncached, hints.keep)
        booking = self._bookings.book(at)
        expected = booking.expected_tokens
        return Routed(
            chosen.replica_id,
            chosen.cached_tokens,
            chosen.cached_tokens if expected is None else expected,
            booking,
            hints,
            chosen.pull_from,
        )

    def _hints(
        self, prompt: HashedPrompt, token_ids: Sequence[int], message_ends: Sequence[int]
    ) -> Hints:
        if self._steering is None:
            return NO_HINTS
        ends = MessageEnds(tuple(message_ends)) if self._knows_ends else NO_ENDS
        return self._steering.hints(prompt.prefix_keys(RECENT_STEP), token_ids, ends)


def _index() -> PrefixIndex:
    # Homes are drawn from the keys: with a secret of its own each run would draw others.
    return PrefixIndex(secret=b"simulation")


def _healthy(replica_id: str, has_peers: bool) -> Replica:
    record = HealthRecord(1, 1)
    record.check_passed()
    p2p = PeerTierConfig(port=7777) if has_peers else None
    config = RouterReplicaConfig(url="http://127.0.0.1:8000", id=replica_id, p2p=p2p)
    return Replica(config, record, 0.0)
