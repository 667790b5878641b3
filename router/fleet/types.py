"""The plain values of the registry."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, NamedTuple

import msgspec

from kvevents.field_docs import counter, flag, gauge
from router.config.section import Role
from router.fleet.engine_load import EngineLoad
from router.fleet.load import ReplicaLoad


class ReplicaState(Enum):
    """The health of a replica by its checks and requests, or that it is draining."""

    STARTING = "starting"
    """Added, and no check has passed yet."""
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    DRAINING = "draining"
    """Gets no new requests, whatever its health; running ones continue."""


class EventSource(msgspec.Struct, frozen=True):
    """The addresses of one data-parallel rank's KV events, to connect to: without wildcards."""

    dp_rank: int
    endpoint: str
    """Its PUB address; `listen` where it connects to us; `http://` where it is polled."""
    replay_endpoint: str | None = None
    """Its ROUTER address."""
    topic: str = ""
    """Its exact topic; an empty one takes every topic."""
    snapshot_endpoint: str | None = None
    """Its address for snapshots alone, if it has one."""
    server_key: str | None = None
    """The publisher's own public key, if it has one."""


class ServedModels(msgspec.Struct, frozen=True):
    """Holds the models and adapters of a replica."""

    models: tuple[str, ...] = ()
    adapters: tuple[tuple[str, str], ...] = ()
    """(LoRA adapter, the model it adapts)."""


SharedCount = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
"""A number that routers publish to each other."""


class KeyCounts(NamedTuple):
    """Holds the counts of one key at one router, as it publishes them."""

    requests: SharedCount
    """Requests of the last minute."""
    tokens: SharedCount
    """Tokens of the last minute, of prompts and of responses."""
    in_flight: SharedCount


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a replica at one moment, for operators. Secrets are left out."""

    id: str
    url: str
    state: str
    health: str
    draining: bool
    models: tuple[str, ...]
    adapters: dict[str, str]
    models_configured: bool
    sources: tuple[EventSource, ...]
    sources_configured: bool
    notes: tuple[str, ...]
    """Errors and assumptions of the last discovery."""
    speed: float
    max_concurrent_requests: int | None
    role: Role = "both"
    """`prefill` gets no requests of its own, and computes prompts for others."""
    load: ReplicaLoad
    """This router's requests in flight there."""
    others: ReplicaLoad = msgspec.field(default_factory=ReplicaLoad)
    """Other routers' requests there, as far as known."""
    engine_load: EngineLoad | None
    engine_load_age_s: float | None
    foreign_requests: int
    last_error: str | None
    """The error of the last failed check or request, since it was last healthy."""
    seconds_in_health: float
    seconds_since_check: float | None
    checks: Annotated[int, counter("kvroute_health_checks")]
    """Health checks of a replica."""
    failed_checks: Annotated[int, counter("kvroute_health_checks_failed")]
    """Health checks of a replica that failed."""
    failed_requests: Annotated[int, counter("kvroute_replica_failures")]
    """Requests that failed through the replica's fault; a 4xx or a plain 500 never counts."""
    times_unhealthy: Annotated[int, counter("kvroute_replica_outages")]
    """Times a replica became unhealthy."""
    discoveries: int
    failed_discoveries: int
    failed_scrapes: int
    breaker: str = "closed"
    """The state of its circuit breaker: `closed`, `open` or `half_open`."""
    times_opened: Annotated[int, counter("kvroute_replica_breaker_opened")] = 0
    """Times a replica's circuit breaker opened, after failed tries too."""
    times_told_off: Annotated[int, counter("kvroute_replica_busy")] = 0
    """Times a replica answered 429 or 503 with `Retry-After`."""
    backs_off_s: Annotated[
        float,
        flag(
            "kvroute_replica_backing_off",
            "1 while a replica gets nothing because it answered 429 or 503 with `Retry-After` "
            "(`overload.max_back_off_s`).",
        ),
    ] = 0.0
    """Seconds for which it still gets no requests after a busy answer."""
    slow_start: Annotated[float, gauge("kvroute_replica_slow_start")] = 1.0
    """The share of a replica's speed and limits that count since it joined: 0.1 to 1."""
