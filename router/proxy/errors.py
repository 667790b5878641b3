"""What the router itself writes into responses: errors, and the end of a broken event stream."""

from __future__ import annotations

import json

from router.proxy.types import Dialect

MAX_HELD_BYTES = 64 * 1024
_LINE_ENDS = (b"\n", b"\r")
_BLANK_LINES = (b"\n\n", b"\r\n\r\n", b"\r\r")
# How the last event of a finished stream ends, OpenAI's and Anthropic's.
_LAST_EVENTS = (b"data: [DONE]", b"data:[DONE]", b'"message_stop"}', b'"message_stop" }')
_TAIL_BYTES = 32
# Anthropic's SDKs know these types; by our code, or else by OpenAI's type.
_ANTHROPIC_TYPES = {
    "model_not_found": "not_found_error",
    "path_not_found": "not_found_error",
    "body_too_large": "request_too_large",
    "overloaded": "overloaded_error",
    "no_replica": "overloaded_error",
    "no_replica_available": "overloaded_error",
    "shutting_down": "overloaded_error",
    "server_error": "api_error",
}


def error_body(dialect: Dialect, message: str, kind: str, code: str) -> bytes:
    """An error as JSON: OpenAI's form, or Anthropic's with a `type` beside it.

    Args:
        dialect: Which of the two.
        message: For people.
        kind: The error's `type`.
        code: The error's `code`.
    """
    body: dict[str, object] = {"error": {"message": message, "type": kind, "code": code}}
    if dialect is Dialect.ANTHROPIC:
        kind = _ANTHROPIC_TYPES.get(code) or _ANTHROPIC_TYPES.get(kind, kind)
        body = {"type": "error", "error": {"type": kind, "message": message, "code": code}}
    return json.dumps(body).encode()


def error_event(dialect: Dialect, message: str, kind: str, code: str) -> bytes:
    """The event that ends a broken stream; it goes after a blank line.

    Args:
        dialect: As for `error_body`, like the others.
        message: For people.
        kind: The error's `type`.
        code: The error's `code`.
    """
    body = error_body(dialect, message, kind, code)
    if dialect is Dialect.ANTHROPIC:
        # These SDKs look at the event's name, and do not know [DONE].
        return b"event: error\ndata: " + body + b"\n\n"
    return b"data: " + body + b"\n\ndata: [DONE]\n\n"


class EventLines:
    r"""Lets an event stream through in whole lines, unchanged, so that it can end with an error.

    A reader can do nothing with half a line, so holding it back delays no client; but once half a
    line of JSON is sent, an error event could only follow that broken half. Engines write whole
    events, so usually nothing is held. A line over `MAX_HELD_BYTES` is let through in pieces.

        from the replica         sent on at once          held back
        data: {"a":1}\n\nda      data: {"a":1}\n\n        da
        ta: {"b":                                         data: {"b":
        2}\n\n                   data: {"b":2}\n\n
    """

    __slots__ = ("_held", "_tail")

    def __init__(self) -> None:
        self._held = b""
        self._tail = b""

    def release(self, chunk: bytes, final: bool) -> bytes:
        """Return what may be sent now.

        Args:
            chunk: The next piece of the stream, cut anywhere.
            final: It is the last one: everything may be sent.
        """
        if self._held:
            chunk = self._held + chunk
            self._held = b""
        if not final and not chunk.endswith(_LINE_ENDS):
            chunk = self._hold(chunk)
        self._tail = chunk if len(chunk) >= _TAIL_BYTES else (self._tail + chunk)[-_TAIL_BYTES:]
        return chunk

    @property
    def finished(self) -> bool:
        """Whether the last event that was let through is one that ends a stream."""
        return self._tail[-_TAIL_BYTES:].rstrip().endswith(_LAST_EVENTS)

    @property
    def separator(self) -> bytes:
        """The line ends still missing before another event may begin."""
        if not self._tail or self._tail.endswith(_BLANK_LINES):
            return b""
        return b"\n" if self._tail.endswith(_LINE_ENDS) else b"\n\n"

    def _hold(self, chunk: bytes) -> bytes:
        end = max(chunk.rfind(b"\n"), chunk.rfind(b"\r")) + 1
        if len(chunk) - end > MAX_HELD_BYTES:
            return chunk
        self._held = chunk[end:]
        return chunk[:end]
