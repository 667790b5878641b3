"""Keeps the replicas, their health, and the models they serve. Nothing is kept on disk."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from router.config.origin import Allows
from router.config.replica import ReplicaConfig
from router.config.watch import HealthConfig
from router.errors import BadRequest, ReplicaExists, ShuttingDown, UnknownReplica
from router.fleet.gate import GateOptions, ReplicaGate
from router.fleet.health import HealthRecord
from router.fleet.load import LoadTracker
from router.fleet.replica import Replica
from router.fleet.types import EventSource, ReplicaState, ReplicaView, ServedModels

logger = logging.getLogger(__name__)

MAX_REPLICAS = 4096


class ReplicaListener:
    """Receives changes, on the event loop and in their order. It must not block and must not raise.

    A listener that inherits from this class overrides only the calls it needs.
    """

    def on_state_changed(self, replica: Replica, before: ReplicaState) -> None:
        """`replica.state` has changed."""

    def on_unresponsive(self, replica: Replica, for_s: float) -> None:
        """Another check failed, after enough in a row to make the replica unhealthy.

        Args:
            replica: Unhealthy already, perhaps since an earlier call.
            for_s: Since the first of these checks failed.
        """

    def on_models_changed(self, replica: Replica, before: ServedModels) -> None:
        """`replica.served` has changed."""

    def on_sources_changed(self, replica: Replica, before: tuple[EventSource, ...]) -> None:
        """`replica.sources` have changed.

        They are announced only after the replica's models, and are empty once it is removed. A
        restart at the same addresses is not a change: the streams themselves show it.
        """

    def on_reconfigured(self, replica: Replica) -> None:
        """Other options of it were taken over, such as its role."""

    def on_removed(self, replica: Replica) -> None:
        """The replica has left the registry; requests may still run there."""


class Watching(Protocol):
    """Asks replicas about themselves, and reports to the registry; `Watchers` says how."""

    def watch(self, replica: Replica, listener: ReplicaRegistry) -> None: ...

    def leave(self, replica_id: str) -> None: ...

    def check_soon(self, replica_id: str) -> None: ...

    def became_healthy(self, replica_id: str) -> None: ...

    def became_unhealthy(self, replica_id: str) -> None: ...

    async def close(self) -> None: ...


@dataclass(eq=False, repr=False)
class ReplicaRegistry:
    """All replicas. Belongs to one event loop."""

    watching: Watching
    """Ended with the registry."""
    health: HealthConfig
    load: LoadTracker
    """Read for views."""
    clock: Callable[[], float] = time.monotonic
    gates: GateOptions = field(default_factory=GateOptions)
    """Bounds of their gates; without one every healthy replica gets requests."""

    def __post_init__(self) -> None:
        self._listeners: list[ReplicaListener] = []
        self._replicas: dict[str, Replica] = {}
        self._by_model: dict[str, tuple[Replica, ...]] = {}
        self.generation = 0
        """Rises with every change of `serving`'s result, and of the engines there."""
        self._closed = False

    def subscribe(self, listener: ReplicaListener) -> None:
        """Report every change from now on to *listener*, after those that subscribed before it."""
        self._listeners.append(listener)

    # --- the operator's side ----------------------------------------------------------------------

    def add(self, config: ReplicaConfig, allows: Allows | None = None) -> Replica:
        """Add a replica and begin to watch it. It gets requests once a check has passed and its
        models are known.

        Raises:
            ReplicaExists: Its id or its URL is taken.
            BadRequest: `MAX_REPLICAS` is reached.
            ShuttingDown: The registry was closed.
        """
        if self._closed:
            raise ShuttingDown
        self._check_free(config)
        now = self.clock()
        replica = Replica(
            config,
            HealthRecord(self.health.unhealthy_after, self.health.healthy_after),
            now,
            allows,
            ReplicaGate(self.gates, self.clock),
        )
        self._replicas[replica.id] = replica
        self.watching.watch(replica, self)
        logger.info("replica %s added: %s", replica.id, replica.origin)
        self._announce_configured(replica)
        return replica

    def reconfigure(self, replica_id: str, config: ReplicaConfig) -> None:
        """Take over other options of a replica; see `Replica.reconfigure`. Raises
        `UnknownReplica`."""
        replica = self.get(replica_id)
        replica.reconfigure(config)
        self.generation += 1  # its role may be another
        for listener in self._listeners:
            listener.on_reconfigured(replica)

    def drain(self, replica_id: str) -> Replica:
        """Send it nothing new until it is undrained; running requests continue. Raises
        `UnknownReplica`."""
        self.get(replica_id).stays_drained = True
        return self._set_draining(replica_id, True)

    def undrain(self, replica_id: str) -> Replica:
        """Send it requests again. Raises `UnknownReplica`."""
        self.get(replica_id).stays_drained = False
        return self._set_draining(replica_id, False)

    def suspend(self, replica_id: str) -> None:
        """Drain it until it is resumed, or undrained. Raises `UnknownReplica`."""
        self._set_draining(replica_id, True)

    def resume(self, replica_id: str) -> None:
        """Send it requests again, unless an operator has drained it, before or meanwhile. Raises
        `UnknownReplica`."""
        self._set_draining(replica_id, self.get(replica_id).stays_drained)

    def remove(self, replica_id: str) -> Replica:
        """Remove a replica; requests that run there continue. Raises `UnknownReplica`."""
        replica = self.get(replica_id)
        self.watching.leave(replica_id)
        del self._replicas[replica_id]
        replica.removed = True
        self._index_models()
        self._take_sources(replica, ())
        logger.info("replica %s removed", replica_id)
        for listener in self._listeners:
            listener.on_removed(replica)
        return replica

    async def close(self) -> None:
        """Stop watching, and return when every task has ended. The replicas stay listed."""
        self._closed = True
        await self.watching.close()

    # --- the router's side ------------------------------------------------------------------------

    def __contains__(self, replica_id: str) -> bool:
        return replica_id in self._replicas

    def get(self, replica_id: str) -> Replica:
        """The replica of that id; raises `UnknownReplica`."""
        replica = self._replicas.get(replica_id)
        if replica is None:
            raise UnknownReplica(replica_id)
        return replica

    def is_healthy(self, replica_id: str) -> bool:
        """Return whether the replica exists, and checks and requests succeed there."""
        replica = self._replicas.get(replica_id)
        return replica is not None and replica.is_healthy

    def is_at_ease(self, replica_id: str) -> bool:
        """Return whether the replica exists, serves its requests, and has room for another: one
        more does it no harm."""
        replica = self._replicas.get(replica_id)
        return replica is not None and replica.is_at_ease(
            self.load.look_at(replica_id), self.clock(), self.health.engine_load_stale_after_s
        )

    def replicas(self) -> tuple[Replica, ...]:
        """All replicas, in the order in which they were added."""
        return tuple(self._replicas.values())

    def serving(self, model: str) -> tuple[Replica, ...]:
        """Return the replicas that serve a model or an adapter, in any state."""
        return self._by_model.get(model, ())

    @property
    def backs_off(self) -> bool:
        """Return whether replicas that ask for it are left alone."""
        return self.gates.max_back_off_s > 0

    @property
    def undiscovered(self) -> int:
        """How many replicas have neither configured models nor reported any yet. One that has been
        unhealthy for longer than `ready_wait_s` is not waited for, unless nothing is known of any
        other: then every model would be unknown."""
        unknown = [
            replica
            for replica in self._replicas.values()
            if not replica.served.models and replica.discoveries == replica.failed_discoveries
        ]
        if len(unknown) == len(self._replicas):
            return len(unknown)
        waits_since = self.clock() - self.health.ready_wait_s
        return sum(
            replica.record.health is not ReplicaState.UNHEALTHY
            or replica.health_since >= waits_since
            for replica in unknown
        )

    def models(self) -> dict[str, str | None]:
        """All served names: each model's -> None, each adapter's -> its model."""
        names: dict[str, str | None] = {}
        for replica in self._replicas.values():
            names.update(dict.fromkeys(replica.served.models))
            for adapter, model in replica.served.adapters:
                names.setdefault(adapter, model)
        return names

    def report_failure(self, replica_id: str, why: str) -> None:
        """A request failed through the replica's fault: no connection, no response, a broken
        response, or a status of 502 to 504. A 4xx is the client's fault.

        Args:
            replica_id: The replica may have been removed since.
            why: Shown to operators, so it holds no prompt and no key.
        """
        replica = self._replicas.get(replica_id)
        if replica is None:
            return
        before = replica.state
        replica.gate.failed()
        replica.look_at_gate()
        if replica.record.request_failed(why):
            self._became_unhealthy(replica, before)
        self.watching.check_soon(replica_id)

    def report_served(self, replica_id: str) -> None:
        """A request got a response there, even a 4xx."""
        replica = self._replicas.get(replica_id)
        if replica is not None:
            replica.record.request_served()
            replica.gate.answered()

    def report_sent(self, replica_id: str) -> None:
        replica = self._replicas.get(replica_id)
        if replica is not None:
            replica.gate.sent()

    def report_busy(self, replica_id: str, retry_after_s: float, tenant: str = "") -> None:
        """It answered that it can take no request now.

        Args:
            replica_id: It may have been removed since.
            tenant: Whose requests it cannot take; empty: all.
        """
        replica = self._replicas.get(replica_id)
        if replica is not None:
            replica.gate.busy(retry_after_s, tenant)
            replica.look_at_gate()

    def mark_suspect(self, replica_id: str) -> None:
        """Another router found it unhealthy: check it now, and believe the check if it fails."""
        replica = self._replicas.get(replica_id)
        if replica is not None and replica.record.mark_suspect():
            self.watching.check_soon(replica_id)

    def others_reported(self, replica_ids: Iterable[str], within_s: float) -> None:
        """Other routers have published their load at these replicas, and the load tracker has it.

        Args:
            replica_ids: Unknown ones are left out.
            within_s: The delay of their reports: what an engine counted longer ago is not among
                them.
        """
        for replica in filter(None, map(self._replicas.get, replica_ids)):
            counted = replica.engine_load
            if counted is None or not replica.foreign_requests:
                continue
            if self.clock() - replica.engine_load_at <= within_s:
                own = self.load.look_at(replica.id).requests
                replica.claim(own, self.load.requests_by_rank(replica.id, counted.dp_ranks))

    def snapshot(self) -> tuple[ReplicaView, ...]:
        """Everything about every replica at this moment."""
        now = self.clock()
        return tuple(
            replica.view(self.load.load_of(replica.id), now, self.load.others_at(replica.id))
            for replica in self._replicas.values()
        )

    # --- what watchers report -------------------------------------------------------------------

    def on_check(self, replica: Replica, error: str | None) -> None:
        """Count a check."""
        before = replica.state
        if error is None:
            replica.checks_fail_since = None
            if replica.record.check_passed():
                self._became_healthy(replica, before)
            return
        now = self.clock()
        since = replica.checks_fail_since = replica.checks_fail_since or now
        if replica.record.check_failed(error):
            self._became_unhealthy(replica, before)
        if replica.record.checks_fail:
            for listener in self._listeners:
                listener.on_unresponsive(replica, now - since)

    def on_discovered(
        self,
        replica: Replica,
        served: ServedModels | None,
        sources: tuple[EventSource, ...] | None,
        notes: tuple[str, ...],
    ) -> None:
        if notes and notes != replica.notes:
            logger.warning("replica %s: %s", replica.id, "; ".join(notes))
        replica.notes = notes
        if served is not None:
            self._take_models(replica, served)
        self._note_owners(replica)
        # A source belongs to a model's index, so it cannot be followed before the model is known.
        if sources is not None and replica.served.models:
            self._take_sources(replica, sources)

    # --- steps ------------------------------------------------------------------------------------

    def _check_free(self, config: ReplicaConfig) -> None:
        if len(self._replicas) >= MAX_REPLICAS:
            raise BadRequest(
                "replicas", f"{len(self._replicas)} of them", "remove one before you add another"
            )
        if config.replica_id in self._replicas:
            raise ReplicaExists("id", config.replica_id, config.replica_id)
        for other in self._replicas.values():
            if other.origin == config.origin:
                raise ReplicaExists("url", str(config.origin), other.id)

    def _announce_configured(self, replica: Replica) -> None:
        """Announce models and sources that need no discovery."""
        self._index_models()
        if replica.served.models:
            for listener in self._listeners:
                listener.on_models_changed(replica, ServedModels())
            self._take_sources(replica, replica.configured_sources or ())

    def _set_draining(self, replica_id: str, draining: bool) -> Replica:
        replica = self.get(replica_id)
        before = replica.state
        replica.draining = draining
        if replica.state is not before:
            self._announce_state(replica, before, "drained" if draining else "no longer drained")
        return replica

    def _became_healthy(self, replica: Replica, before: ReplicaState) -> None:
        replica.health_since = self.clock()
        if any(other.is_healthy for other in self._replicas.values() if other is not replica):
            replica.gate.start_slowly()
            replica.look_at_gate()
        self.watching.became_healthy(replica.id)
        self._announce_state(replica, before, "the check passed")

    def _became_unhealthy(self, replica: Replica, before: ReplicaState) -> None:
        replica.health_since = self.clock()
        self.watching.became_unhealthy(replica.id)
        self._announce_state(replica, before, replica.record.last_error or "")

    def _announce_state(self, replica: Replica, before: ReplicaState, why: str) -> None:
        if replica.state is before:
            return
        level = logging.WARNING if replica.state is ReplicaState.UNHEALTHY else logging.INFO
        logger.log(
            level, "replica %s: %s, was %s: %s", replica.id, replica.state.value, before.value, why
        )
        for listener in self._listeners:
            listener.on_state_changed(replica, before)

    def _take_models(self, replica: Replica, served: ServedModels) -> None:
        before = replica.served
        if served != before:
            replica.served = served
            self._index_models()
            for listener in self._listeners:
                listener.on_models_changed(replica, before)

    def _note_owners(self, replica: Replica) -> None:
        owners = {str(entry.get("owned_by")) for entry in replica.model_entries.values()}
        if owners != replica.owners:
            replica.owners = owners
            self.generation += 1

    def _take_sources(self, replica: Replica, sources: tuple[EventSource, ...]) -> None:
        before = replica.sources
        if sources != before:
            replica.sources = sources
            for listener in self._listeners:
                listener.on_sources_changed(replica, before)

    def _index_models(self) -> None:
        """Rebuild the look-up by model, which every request uses."""
        by_model: dict[str, list[Replica]] = {}
        for replica in self._replicas.values():
            for name in (
                *replica.served.models,
                *(adapter for adapter, _ in replica.served.adapters),
            ):
                by_model.setdefault(name, []).append(replica)
        self.generation += 1
        self._by_model = {name: tuple(replicas) for name, replicas in by_model.items()}
