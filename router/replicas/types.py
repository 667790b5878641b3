"""The plain values of the registry, and what it needs of others."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

import msgspec

from router.replicas.engine_load import EngineLoad
from router.replicas.load import ReplicaLoad
from router.upstream import Header, Origin


class Health(Enum):
    """What checks and requests say of a replica."""

    STARTING = "starting"
    """Added, and no check has passed yet."""
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"


class ReplicaState(Enum):
    """Health and the operator's will in one word."""

    STARTING = "starting"
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    DRAINING = "draining"
    """Gets no new requests, whatever its health; the running ones go on."""


class EventSource(msgspec.Struct, frozen=True):
    """Where one data-parallel rank publishes its KV events. Addresses are ones to connect to: no
    wildcards."""

    dp_rank: int
    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""


class ServedModels(msgspec.Struct, frozen=True):
    """What a replica serves."""

    models: tuple[str, ...] = ()
    adapters: tuple[tuple[str, str], ...] = ()
    """(LoRA adapter, the model it adapts)."""


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that an operator wants to know of a replica, as of now. Ages are seconds; secrets
    are left out."""

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
    """What went wrong in the last discovery, and what was assumed."""
    speed: float
    max_concurrent_requests: int | None
    load: ReplicaLoad
    engine_load: EngineLoad | None
    engine_load_age_s: float | None
    foreign_requests: int
    last_error: str | None
    """Of the last failed check or request, since it was last healthy."""
    seconds_in_health: float
    seconds_since_check: float | None
    checks: int
    failed_checks: int
    failed_requests: int
    times_unhealthy: int
    discoveries: int
    failed_discoveries: int
    failed_scrapes: int


class Fetch(Protocol):
    """One small GET."""

    async def __call__(
        self, origin: Origin, path: str, headers: Sequence[Header], timeout_s: float, max_bytes: int
    ) -> tuple[int, bytes]:
        """Status and body of `GET <origin><path>`, within *timeout_s* altogether.

        Raises:
            UpstreamError, OSError, asyncio.TimeoutError: There is no such answer, or it is longer
                than *max_bytes*.
        """
