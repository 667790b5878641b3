"""Is the router ready, and if not, whom does it wait for?

A router that has just started knows no cache, so it would send its first requests anywhere. It is
ready only when it knows its replicas, and their event streams have caught up. The wait is bounded
for each replica, and happens once: a replica that comes or returns later is not waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence

from router.feed.feed import Feed
from router.fleet.registry import ReplicaRegistry
from router.fleet.replica import Replica
from router.fleet.types import ReplicaState
from router.index import SourceId
from router.routing.admission import Admission

_NAMED = 8
"""Replicas in one reason."""


class Readiness:
    """Answers `/readyz`."""

    def __init__(
        self,
        admission: Admission,
        registry: ReplicaRegistry,
        feed: Feed,
        named: Callable[[], Collection[str]],
        wait_s: float,
        unknown: Callable[[], Sequence[str]] = list,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Keep the parts that know.

        Args:
            admission: Says whether some replica can serve at all.
            feed: How far their streams have caught up.
            named: Ids of the replicas to wait for.
            wait_s: The longest wait for one of them, from its first check and again from the
                moment it is healthy; 0 waits for none.
            unknown: Who has not said yet which replicas there are; waited for as long.
        """
        self._admission = admission
        self._registry = registry
        self._feed = feed
        self._named = named
        self._unknown = unknown
        self._wait_s = wait_s
        self._clock = clock
        self._made_at = clock()
        self._has_been_ready = False

    def why_not_ready(self) -> str | None:
        """Return what keeps the router from being ready; None if it is."""
        replicas = self._registry.replicas()
        reason = self._admission.why_not_ready(replicas)
        if reason is None and not self._has_been_ready:
            reason = self._waits_for(replicas)
        self._has_been_ready |= reason is None
        return reason

    def _waits_for(self, replicas: Collection[Replica]) -> str | None:
        now, named = self._clock(), self._named()
        left_s = self._wait_s - (now - self._made_at)
        providers = self._unknown() if left_s > 0 else []
        if providers:
            return f"waiting at most {left_s:.0f} s for the replicas of {', '.join(providers)}"
        waiting = [
            (self._wait_s - (now - replica.health_since), f"{replica.id} ({lag})")
            for replica in replicas
            if replica.id in named and now - replica.health_since < self._wait_s
            for lag in self._lags(replica)
        ]
        if not waiting:
            return None
        names = ", ".join(name for _, name in waiting[:_NAMED])
        more = f" and {len(waiting) - _NAMED} more" if len(waiting) > _NAMED else ""
        return f"waiting at most {max(waiting)[0]:.0f} s for the caches of {names}{more}"

    def _lags(self, replica: Replica) -> Iterator[str]:
        """Return what is not known of a replica yet; nothing of one that gets no requests
        anyhow."""
        if replica.state is ReplicaState.STARTING and not replica.record.failed_checks:
            yield "not checked yet"
        if replica.state is not ReplicaState.HEALTHY:
            return
        asks = replica.config.models is None or replica.configured_sources is None
        if asks and not replica.discoveries:
            yield "its event streams are not known yet"
        for source in replica.sources:
            if not self._feed.has_caught_up(SourceId(replica.id, source.dp_rank)):
                state = self._feed.state(SourceId(replica.id, source.dp_rank))
                rank = f"rank {source.dp_rank} " if len(replica.sources) > 1 else ""
                yield f"{rank}{state.value}"
