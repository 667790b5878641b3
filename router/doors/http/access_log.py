"""Logs one line for each request at its end: fields for a log collector, and the same as text."""

from __future__ import annotations

import logging
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.telemetry.request_log import RoutedRequest

logger = logging.getLogger(__name__)

_LINE = "kvroute.access_line"


async def logged(application: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Run an application for one request, then write its line."""
    line = scope[_LINE] = AccessLine(scope)
    status: int | None = None
    body_bytes = 0

    async def counted(message: Message) -> None:
        nonlocal status, body_bytes
        status = message.get("status", status)
        body_bytes += len(message.get("body", b""))
        await send(message)

    try:
        await application(scope, receive, counted)
    finally:
        line.write(status, body_bytes)


def note_refused(scope: Scope, code: str) -> None:
    """Log with the request's line which of the router's own errors ended it."""
    line = scope.get(_LINE)
    if line is not None:
        line.error = code


class AccessLine:
    """Collects the fields of one request's line. The query string is left out: some put keys
    there."""

    routed: RoutedRequest | None = None
    error: str | None = None
    trace_id: str | None = None

    def __init__(self, scope: Scope) -> None:
        self._started = time.perf_counter()
        host, port = scope.get("client") or ("", 0)
        self._fields: dict[str, Any] = {
            "client": f"{host}:{port}",
            "method": scope["method"],
            "path": scope["path"],
            "status": None,
        }

    def write(
        self,
        status: int | None,
        body_bytes: int,
        request_id: bytes = b"",
        seconds: float | None = None,
    ) -> None:
        """Write the line: the request has ended.

        Args:
            request_id: Ties the logs of client, router and engine together; requests that ASGI
                served have none.
            seconds: Its duration; None: since the line was begun.
        """
        fields = self._fields
        fields["status"] = status
        if request_id:
            fields["request_id"] = request_id.decode("latin-1")
        if self.trace_id is not None:
            fields["trace_id"] = self.trace_id
        fields["bytes"] = body_bytes
        took = time.perf_counter() - self._started if seconds is None else seconds
        fields["seconds"] = round(took, 6)
        if self.error is not None:
            fields["error"] = self.error
        if (routed := self.routed) is not None:
            fields |= {
                "model": routed.model,
                "replica": routed.replica,
                "prompt_tokens": routed.prompt_tokens,
                "predicted_tokens": routed.cached_tokens,
                "expected_tokens": routed.expected_tokens,
                "cached_tokens": routed.actual_tokens,
                "first_byte_seconds": routed.first_byte_s,
                "attempts": routed.attempts,
                "end": routed.end,
            }
        text = " ".join(f"{name}={_shown(value)}" for name, value in fields.items())
        logger.info("%s", text, extra={"fields": fields})


def _shown(value: object) -> str:
    """Return a value as one word; a client's text cannot end the line or the word."""
    if value is None:
        return "-"
    text = str(value)
    return text if text.isprintable() and not set(text) & set(' "=') else ascii(text)
