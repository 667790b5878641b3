"""Holds the parts that the endpoints read and change."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from router.doors.desk import Desk
from router.doors.http.access import Guard
from router.doors.http.overview import Overview, overview
from router.doors.http.proxied_paths import ProxiedPaths
from router.doors.http.replica_views import Fleet, ReplicaDetails, replica_details
from router.fleet.replica import Replica
from router.fleet.types import ReplicaView
from router.telemetry.parts import RouterParts


@dataclass(frozen=True, slots=True)
class ApiParts:
    """The router, and the parts between it and its clients."""

    router: RouterParts
    guard: Guard
    proxied_paths: ProxiedPaths
    desk: Desk
    render_metrics: Callable[[bool], Awaitable[bytes]]
    """All metrics as text; with True in OpenMetrics' format, which has exemplars."""
    has_exemplars: bool
    """True if there are any."""

    def fleet(self) -> Fleet:
        """All replicas and their caches, now."""
        return self._fleet_of(self.router.registry.snapshot())

    def details(self, replica_id: str) -> ReplicaDetails:
        """One replica, now."""
        only = [view for view in self.router.registry.snapshot() if view.id == replica_id]
        return replica_details(self._fleet_of(only))[0]

    def overview(self) -> Overview:
        """The router at a glance, now."""
        router = self.router
        policy, under_way = router.config.policy.name, router.admission.under_way
        return overview(self.fleet(), router.request_log, policy, under_way)

    def healthy(self) -> list[Replica]:
        """The healthy replicas that take requests."""
        replicas = self.router.registry.replicas()
        return [each for each in replicas if each.is_healthy and each.takes_requests]

    def _fleet_of(self, replicas: Sequence[ReplicaView]) -> Fleet:
        router = self.router
        return Fleet(
            replicas,
            router.models.index_statistics(),
            router.feed.statistics(),
            router.tokenizer_check.disagreements,
            trusts=router.repair.statistics(),
            approximate=None if router.approximate is None else router.approximate.statistics(),
            listeners=router.feed.listeners(),
            tokenizers=router.models.tokenizers(),
            shortages=router.shortages.present(),
            hint_tokens=sum(model.steering.statistics().hit_tokens for model in router.models),
        )
