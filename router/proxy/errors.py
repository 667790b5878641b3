"""The router's own words to a client: error bodies and the event that ends a broken stream."""

from __future__ import annotations

import json

from router.proxy.types import Dialect


def error_body(dialect: Dialect, message: str, kind: str, code: str) -> bytes:
    """An error as JSON. The OpenAI form; Anthropic's SDKs want a ``type`` beside it."""
    body: dict[str, object] = {"error": {"message": message, "type": kind, "code": code}}
    if dialect is Dialect.ANTHROPIC:
        body = {"type": "error", **body}
    return json.dumps(body).encode()


def error_event(dialect: Dialect, message: str, kind: str, code: str) -> bytes:
    """The end of an event stream that broke off, to be put after a blank line."""
    body = error_body(dialect, message, kind, code)
    if dialect is Dialect.ANTHROPIC:
        # These SDKs look at the event's name, and know no [DONE].
        return b"event: error\ndata: " + body + b"\n\n"
    return b"data: " + body + b"\n\ndata: [DONE]\n\n"
