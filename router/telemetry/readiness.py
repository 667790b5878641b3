"""Decides whether the router is ready, and what it waits for.

A router that has just started knows no cache, so it would send its first requests anywhere. It is
ready only when it knows its replicas, and their event streams have caught up. The wait is bounded
for each replica, and happens once: a replica that comes or returns later is not waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from router.feed.feed import Feed
from router.fleet.registry import ReplicaRegistry
from router.fleet.replica import Replica
from router.fleet.types import ReplicaState
from router.index.base import SourceId
from router.routing.admission import Admission

_NAMED = 8
"""The most replicas named in one reason."""


@dataclass(eq=False, repr=False)
class Readiness:
    """Answers `/readyz`."""

    admission: Admission
    """Knows whether some replica can serve at all."""
    registry: ReplicaRegistry
    feed: Feed
    """How far their streams have caught up."""
    named: Callable[[], Collection[str]]
    """Ids of the replicas to wait for."""
    wait_s: float
    """The longest wait for one of them, from its first check and again from the moment it is
    healthy; 0 waits for none."""
    unknown: Callable[[], Sequence[str]] = list
    """Returns the providers that have not listed their replicas yet; waited for as long."""
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._made_at = self.clock()
        self._has_been_ready = False

    def why_not_ready(self) -> str | None:
        """Return why the router is not ready; None if it is."""
        replicas = self.registry.replicas()
        reason = self.admission.why_not_ready(replicas)
        if reason is None and not self._has_been_ready:
            reason = self._waits_for(replicas)
        self._has_been_ready |= reason is None
        return reason

    def _waits_for(self, replicas: Collection[Replica]) -> str | None:
        now, named = self.clock(), self.named()
        left_s = self.wait_s - (now - self._made_at)
        providers = self.unknown() if left_s > 0 else []
        if providers:
            return f"waiting at most {left_s:.0f} s for the replicas of {', '.join(providers)}"
        waiting = [
            (self.wait_s - (now - replica.health_since), f"{replica.id} ({lag})")
            for replica in replicas
            if replica.id in named and now - replica.health_since < self.wait_s
            for lag in self._lags(replica)
        ]
        if not waiting:
            return None
        names = ", ".join(name for _, name in waiting[:_NAMED])
        more = f" and {len(waiting) - _NAMED} more" if len(waiting) > _NAMED else ""
        return f"waiting at most {max(waiting)[0]:.0f} s for the caches of {names}{more}"

    def _lags(self, replica: Replica) -> Iterator[str]:
        """Yield what a replica still lacks; nothing of one that gets no requests anyhow."""
        if replica.state is ReplicaState.STARTING and not replica.record.failed_checks:
            yield "not checked yet"
        if replica.state is not ReplicaState.HEALTHY:
            return
        asks = replica.config.models is None or replica.configured_sources is None
        if asks and not replica.discoveries:
            yield "its event streams are not known yet"
        for source in replica.sources:
            if not self.feed.has_caught_up(SourceId(replica.id, source.dp_rank)):
                state = self.feed.state(SourceId(replica.id, source.dp_rank))
                rank = f"rank {source.dp_rank} " if len(replica.sources) > 1 else ""
                yield f"{rank}{state.value}"
