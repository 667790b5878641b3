"""The requests routed last."""

from __future__ import annotations

from typing import Literal

from router.doors.http.route_views import HitView, hit_view
from router.doors.http.views import View
from router.telemetry.request_log import RequestFacts, RequestLog, RoutedRequest


class RequestView(RequestFacts, kw_only=True):
    """One request, as far as it is known by now."""

    reason: str
    predicted: HitView
    """Tokens predicted to be cached, by the state when it was sent."""
    expected: int | None
    """Tokens predicted to be cached when the engine admits it: requests ahead of it store their
    prompts and evict others. Null where that is not known."""
    actual: int | None
    """Cached tokens as the engine reported them; null where it did not."""
    verdict: Literal["exact", "near", "over", "under"] | None
    """The prediction compared with the report; `over` promised too much. An approximate one is
    never `exact`, but `near` where less than 64 tokens are between the two."""
    failed: bool
    """True if it failed through no fault of the client."""
    first_byte_ms: float | None
    total_ms: float | None


class RequestsView(View, frozen=True, kw_only=True):
    """The requests routed last."""

    started_at: float
    """Unix time the router started: numbers and changes of another start mean nothing."""
    change: int
    """The last change; pass it as `after` to get only what is new."""
    requests: list[RequestView]
    """The latest change first."""


def requests_view(log: RequestLog, after: int, limit: int) -> RequestsView:
    """The requests that changed last.

    Args:
        after: Only those that changed after this change.
    """
    return RequestsView(
        started_at=round(log.started_at, 3),
        change=log.last_change,
        requests=[_request(request) for request in log.since(after, limit)],
    )


def _request(request: RoutedRequest) -> RequestView:
    return RequestView(
        **{name: getattr(request, name) for name in RequestFacts.__struct_fields__},
        reason=request.reason,
        predicted=hit_view(request.candidate),
        expected=request.expected_tokens,
        actual=request.actual_tokens,
        verdict=request.verdict,
        failed=request.has_failed,
        first_byte_ms=_milliseconds(request.first_byte_s),
        total_ms=_milliseconds(request.seconds),
    )


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)
