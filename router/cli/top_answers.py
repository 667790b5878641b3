"""What `kvroute top` reads of a router's answers: of `GET /overview` and `GET /requests` what it
shows."""

from __future__ import annotations

import msgspec

from router.observability.problems import Problem, SourceGlance
from router.observability.request_log import Totals


class LastMinute(Totals):
    """Sums, and over how much time."""

    seconds: float = 60.0


class Group(msgspec.Struct):
    """A KV cache group."""

    kind: str
    reach: int | None


class Replica(msgspec.Struct):
    """One replica in brief."""

    id: str
    state: str
    requests: int
    gauges: tuple[float, float, float | None] | None
    """The engine's own: running, waiting, use of its KV cache."""
    sources: list[SourceGlance]
    groups: list[Group]
    blocks: list[tuple[int, str, int]]
    """(group, tier, blocks)."""
    problems: list[Problem]
    """The worst first."""


class Overview(msgspec.Struct):
    """The router at a glance."""

    now: float
    policy: str
    under_way: int
    minute: LastMinute
    replicas: list[Replica]


class Predicted(msgspec.Struct):
    """Tokens in any tier."""

    cached_tokens: int


class Request(msgspec.Struct):
    """One that was routed."""

    arrived_at: float
    prompt_tokens: int
    replica: str | None
    reason: str
    attempts: int
    predicted: Predicted
    actual: int | None
    verdict: str | None
    failed: bool
    status: int | None
    end: str | None
    first_byte_ms: float | None


class Requests(msgspec.Struct):
    """The latest first."""

    requests: list[Request]
