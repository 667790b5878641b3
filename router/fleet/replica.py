"""One replica: its configuration, its reports, and its state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeAlias

from router.config.origin import Allows, Header
from router.config.replica import ReplicaConfig, key_bytes
from router.config.section import PriorityOrder
from router.config.values import reachable
from router.fleet.engine_load import EngineLoad
from router.fleet.gate import AT_LIMIT, GateOptions, ReplicaGate
from router.fleet.health import HealthRecord
from router.fleet.load import ReplicaLoad
from router.fleet.self_description import ServerInfo
from router.fleet.types import EventSource, ReplicaState, ReplicaView, ServedModels
from router.index.base import SourceId


class Replica:
    """The state of one replica. The registry and its watcher write it; everything else reads it.

    Args:
        record: Its health, still unknown.
        now: On the registry's clock.
        gate: Decides whether it may get requests; None: always.
    """

    def __init__(
        self,
        config: ReplicaConfig,
        record: HealthRecord,
        now: float,
        allows: Allows | None = None,
        gate: ReplicaGate | None = None,
    ) -> None:
        self.config = config
        self.gate = gate or ReplicaGate(GateOptions())
        self.id = config.replica_id
        self.listeners: list[Callable[[Replica], None]] = []
        """Called at every change that matters to decisions."""
        self.origin = replace(config.origin, allows=allows)
        self.headers = _authorization(config)
        self.record = record
        self._is_open = self._draining = False
        self.stays_drained = False
        """True if it was an operator that drained it."""
        self.removed = False
        self.served = ServedModels(config.models or ())
        self.configured_sources = _configured_sources(config)
        """Its event sources, if they are configured."""
        self.sources = ()
        self.model_entries: dict[str, dict[str, Any]] = {}
        """Its entries in `GET /v1/models`, by name."""
        self.owners: set[str] = set()
        """Who owns its models, by the last discovery."""
        self.server_info = ServerInfo()
        """Its `GET /server_info`."""
        self.notes: tuple[str, ...] = ()
        """Errors and assumptions of the last discovery."""
        self.engine_load: EngineLoad | None = None
        self.engine_load_at = now
        self.foreign_requests = 0
        """Requests there when its load was read that were not this router's, nor known to be
        another's soon after."""
        self.foreign_requests_by_rank: dict[int, int] = {}
        """The same, for each rank that the engine distinguishes."""
        self.health_since = now
        """When it last became healthy or unhealthy."""
        self.checked_at: float | None = None
        self.checks_fail_since: float | None = None
        """The end of the first of the checks that have failed in a row."""
        self.discoveries = self.failed_discoveries = self.failed_scrapes = 0
        self.look_at_gate()
        record.on_changed = self.gate.on_changed = self._notify

    def look_at_gate(self) -> None:
        """Check the gate, if it is watching or something has happened: most replicas need no check
        for each request."""
        self._is_open = self.config.max_concurrent_requests is None and not self.gate.is_watching

    @property
    def draining(self) -> bool:
        """Return whether it is to get no new requests."""
        return self._draining

    @draining.setter
    def draining(self, draining: bool) -> None:
        self._draining = draining
        self._notify()

    def reconfigure(self, config: ReplicaConfig) -> None:
        """Take over other options: its key, role, speed and limit. Its address, models and event
        sources must be the same."""
        self.config = config
        self.headers = _authorization(config)
        self.look_at_gate()
        self._notify()

    @property
    def sources(self) -> tuple[EventSource, ...]:
        """Event sources that were announced; none before its models are known."""
        return self._sources

    @sources.setter
    def sources(self, sources: tuple[EventSource, ...]) -> None:
        self._sources = sources
        self.cache = SourceId(self.id, sources[0].dp_rank if sources else 0)
        """Its only cache, or the first of several."""
        self.has_ranks = len(sources) > 1
        self._notify()

    @property
    def takes_requests(self) -> bool:
        """Return whether requests may be sent there; else it computes prompts for others only."""
        return self.config.role != "prefill"

    @property
    def address(self) -> str:
        """Its `host:port`, IPv6 in brackets."""
        return self.origin.key.partition("://")[2]

    @property
    def peer_address(self) -> tuple[str, int] | None:
        """Host and port at which other engines pull from its memory; None where they cannot."""
        tier = self.config.p2p
        if tier is None or self.has_ranks:
            return None
        return (self.config.origin.host if tier.host == "*" else tier.host), tier.port

    @property
    def state(self) -> ReplicaState:
        """Its health, or that it is draining."""
        return ReplicaState.DRAINING if self.draining else self.record.health

    def cache_at(self, dp_rank: int | None) -> SourceId:
        """The cache whose hit a candidate of this replica stands for.

        Args:
            dp_rank: The candidate's rank; None: the first, or its only one.
        """
        return self.cache if dp_rank is None else SourceId(self.id, dp_rank)

    @property
    def is_healthy(self) -> bool:
        """Return whether checks and requests succeed, draining or not."""
        return self.record.health is ReplicaState.HEALTHY

    def is_of(self, owner: str) -> bool:
        """Return whether it is an engine of some kind, by the owner of its models.

        Args:
            owner: `vllm` or `sglang`.
        """
        return any(entry.get("owned_by") == owner for entry in self.model_entries.values())

    @property
    def priority_order(self) -> PriorityOrder | None:
        """The priority number that goes first in its engine; None: it gets none."""
        order = self.config.priority_order
        return self.server_info.priority_order if order == "ask" else order

    def serves(self, model: str) -> bool:
        """Return whether it takes requests for this model or adapter, which may be named with its
        model before it (`MODEL:ADAPTER`)."""
        if model in self.served.models:
            return True
        adapters = [adapter for adapter, _ in self.served.adapters]
        return model in adapters or (
            ":" in model and any(model.endswith(f":{adapter}") for adapter in adapters)
        )

    def take_engine_load(
        self,
        load: EngineLoad,
        own_requests: int,
        now: float,
        own_by_rank: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """Keep what the engine's metrics report.

        Args:
            own_requests: This router's requests there at that time.
            now: That time, on the registry's clock.
            own_by_rank: Those at each rank; a rank without any may be missing.
        """
        self.engine_load = load
        self.engine_load_at = now
        self.foreign_requests, self.foreign_requests_by_rank = _foreign(
            load, own_requests, own_by_rank
        )
        self._notify()

    def claim(self, own_requests: int, own_by_rank: Mapping[int, int]) -> None:
        """Other routers have reported requests which the engine's metrics may have counted: these
        are foreign no longer. Those that are over by now never become foreign again.

        Args:
            own_requests: Those of this router and of others that are known there now.
            own_by_rank: Those at each rank; a rank without any may be missing.
        """
        if self.engine_load is None:
            return
        before = self.foreign_requests, self.foreign_requests_by_rank
        requests, by_rank = _foreign(self.engine_load, own_requests, own_by_rank)
        self.foreign_requests = min(self.foreign_requests, requests)
        self.foreign_requests_by_rank = {
            rank: min(count, by_rank[rank]) for rank, count in self.foreign_requests_by_rank.items()
        }
        if before != (self.foreign_requests, self.foreign_requests_by_rank):
            self._notify()

    def _notify(self) -> None:
        for listener in self.listeners:
            listener(self)

    def obstacle(self, load: ReplicaLoad, is_new: bool = True, tenant: str = "") -> str | None:
        """Return why it cannot take a request; None if it can.

        Args:
            is_new: True if the request can wait for room. One that failed elsewhere has waited.
        """
        if self.record.health is not ReplicaState.HEALTHY:
            return "not healthy"
        if self.draining:
            return "draining"
        if self._is_open:
            return None
        self.look_at_gate()
        most = self.config.max_concurrent_requests
        if most is not None and load.requests >= most:
            return AT_LIMIT
        shut = self.gate.shut(tenant)
        if shut is not None or not is_new:
            return shut
        return self.gate.full(load.requests, load.prefill_tokens)

    def is_at_ease(self, load: ReplicaLoad, now: float, engine_load_stale_after_s: float) -> bool:
        """Return whether it serves its requests and has room for another, as far as is known.

        Args:
            engine_load_stale_after_s: The engine's own load is left out when it is older.
        """
        engine_load = self.engine_load
        is_known = engine_load and now - self.engine_load_at <= engine_load_stale_after_s
        waiting = engine_load.waiting if engine_load and is_known else 0
        return self.record.serves_requests and not waiting and self.obstacle(load) is None

    def view(self, load: ReplicaLoad, now: float, others: ReplicaLoad) -> ReplicaView:
        record = self.record
        return ReplicaView(
            id=self.id,
            url=str(self.origin),
            state=self.state.value,
            health=record.health.value,
            draining=self.draining,
            models=self.served.models,
            adapters=dict(self.served.adapters),
            models_configured=self.config.models is not None,
            sources=self.sources,
            sources_configured=self.config.kv_events is not None,
            notes=self.notes,
            speed=self.config.speed,
            max_concurrent_requests=self.config.max_concurrent_requests,
            role=self.config.role,
            load=load,
            others=others,
            engine_load=self.engine_load,
            engine_load_age_s=None if self.engine_load is None else now - self.engine_load_at,
            foreign_requests=self.foreign_requests,
            last_error=record.last_error,
            seconds_in_health=now - self.health_since,
            seconds_since_check=None if self.checked_at is None else now - self.checked_at,
            checks=record.checks,
            failed_checks=record.failed_checks,
            failed_requests=record.failed_requests,
            times_unhealthy=record.times_unhealthy,
            discoveries=self.discoveries,
            failed_discoveries=self.failed_discoveries,
            failed_scrapes=self.failed_scrapes,
            breaker=self.gate.breaker.value,
            times_opened=self.gate.opened,
            times_told_off=self.gate.times_busy,
            backs_off_s=self.gate.backs_off_s(),
            slow_start=self.gate.speed,
        )


IsEligible: TypeAlias = Callable[[Replica], bool]
"""Returns whether a replica may be chosen for a request."""


def _foreign(
    load: EngineLoad, own_requests: int, own_by_rank: Mapping[int, int]
) -> tuple[int, dict[int, int]]:
    """Return how many of the requests that an engine counts are not these, and how many of those
    at each rank."""
    by_rank = {
        rank.dp_rank: max(0, rank.requests - own_by_rank.get(rank.dp_rank, 0))
        for rank in load.ranks
    }
    return max(0, load.running + load.waiting - own_requests), by_rank


def _configured_sources(config: ReplicaConfig) -> tuple[EventSource, ...] | None:
    """Event sources as the configuration gives them, by rank."""
    if config.kv_events is None:
        return None
    host = config.origin.host
    return tuple(
        EventSource(
            entry.dp_rank,
            reachable(entry.endpoint, host),
            None if entry.replay_endpoint is None else reachable(entry.replay_endpoint, host),
            entry.topic,
            None if entry.snapshot_endpoint is None else reachable(entry.snapshot_endpoint, host),
            entry.server_key,
        )
        for entry in sorted(config.kv_events, key=lambda entry: entry.dp_rank)
    )


def _authorization(config: ReplicaConfig) -> tuple[Header, ...]:
    key = key_bytes(config.api_key)
    return () if key is None else ((b"authorization", b"Bearer " + key),)
