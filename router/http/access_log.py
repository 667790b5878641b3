"""One line for each request, with what became of it: fields for a log collector, and the same as
text."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from router.observability.request_log import RoutedRequest

_Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_Application: TypeAlias = Callable[[MutableMapping[str, Any], _Receive, _Send], Awaitable[None]]

logger = logging.getLogger(__name__)

_LINE = "kvroute.access_line"


async def logged(
    application: _Application, scope: MutableMapping[str, Any], receive: _Receive, send: _Send
) -> None:
    """Run an application for one request, then write its line.

    Args:
        application: What responds.
        scope: Of the request.
        receive: Gives its body.
        send: Takes the response.
    """
    line = scope[_LINE] = _AccessLine(scope)

    async def counted(message: MutableMapping[str, Any]) -> None:
        line.sent(message)
        await send(message)

    try:
        await application(scope, receive, counted)
    finally:
        line.write()


def note_routed(scope: MutableMapping[str, Any], request: RoutedRequest) -> None:
    """Let the request's line say where it went.

    Args:
        scope: Of the request.
        request: Filled in by the time the line is written.
    """
    line = scope.get(_LINE)
    if line is not None:
        line.routed = request


def note_refused(scope: MutableMapping[str, Any], code: str) -> None:
    """Let the request's line say which of the router's own errors ended it.

    Args:
        scope: Of the request.
        code: The error's.
    """
    line = scope.get(_LINE)
    if line is not None:
        line.error = code


class _AccessLine:
    """What is known of one request by now. The query string is left out: some put keys there."""

    routed: RoutedRequest | None = None
    error: str | None = None

    def __init__(self, scope: MutableMapping[str, Any]) -> None:
        self._started = time.perf_counter()
        host, port = scope.get("client") or ("", 0)
        self._fields: dict[str, Any] = {
            "client": f"{host}:{port}",
            "method": scope["method"],
            "path": scope["path"],
            "status": None,
        }
        self._bytes = 0

    def sent(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self._fields["status"] = message["status"]
            for name, value in message.get("headers", ()):
                if name == b"x-request-id":
                    self._fields["request_id"] = value.decode("latin-1")
        else:
            self._bytes += len(message.get("body", b""))

    def write(self) -> None:
        fields = self._fields
        fields["bytes"] = self._bytes
        fields["seconds"] = round(time.perf_counter() - self._started, 6)
        if self.error is not None:
            fields["error"] = self.error
        if (routed := self.routed) is not None:
            fields |= {
                "request_id": routed.request_id,
                "model": routed.model,
                "replica": routed.replica,
                "prompt_tokens": routed.prompt_tokens,
                "predicted_tokens": routed.cached_tokens,
                "cached_tokens": routed.actual_tokens,
                "first_byte_seconds": routed.first_byte_s,
                "attempts": routed.attempts,
                "end": routed.end,
            }
        text = " ".join(f"{name}={_shown(value)}" for name, value in fields.items())
        logger.info("%s", text, extra={"fields": fields})


def _shown(value: object) -> str:
    """A value of one word; what a client chose cannot end the line or the word."""
    if value is None:
        return "-"
    text = str(value)
    return text if text.isprintable() and not set(text) & set(' "=') else ascii(text)
