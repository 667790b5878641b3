"""Writes the router's own responses: errors, and the end of a broken event stream."""

from __future__ import annotations

import json

from router.plane.proxy_types import Dialect

# Anthropic's SDKs know these types; by our code, or else by OpenAI's type.
_ANTHROPIC_TYPES = {
    "model_not_found": "not_found_error",
    "path_not_found": "not_found_error",
    "body_too_large": "request_too_large",
    "overloaded": "overloaded_error",
    "no_replica": "overloaded_error",
    "no_replica_available": "overloaded_error",
    "queue_timeout": "overloaded_error",
    "shutting_down": "overloaded_error",
    "server_error": "api_error",
}


def error_body(dialect: Dialect, message: str, kind: str, code: str) -> bytes:
    """An error as JSON: OpenAI's form, or Anthropic's with a `type` beside it.

    Args:
        kind: The error's `type`.
    """
    body: dict[str, object] = {"error": {"message": message, "type": kind, "code": code}}
    if dialect is Dialect.ANTHROPIC:
        kind = _ANTHROPIC_TYPES.get(code) or _ANTHROPIC_TYPES.get(kind, kind)
        body = {"type": "error", "error": {"type": kind, "message": message, "code": code}}
    return json.dumps(body).encode()


def error_event(dialect: Dialect, message: str, kind: str, code: str) -> bytes:
    """The event that ends a broken stream; it goes after a blank line."""
    body = error_body(dialect, message, kind, code)
    if dialect is Dialect.ANTHROPIC:
        # These SDKs look at the event's name, and do not know [DONE].
        return b"event: error\ndata: " + body + b"\n\n"
    return b"data: " + body + b"\n\ndata: [DONE]\n\n"
