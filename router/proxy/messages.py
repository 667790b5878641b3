"""What the proxy changes in passing messages, and what it adds: headers, errors, and the end of a
broken event stream."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable

from router.proxy.attempts import Attempt
from router.proxy.types import Dialect, ProxyRequest
from router.upstream import Header, UpstreamResponse

# RFC 9110 7.6.1 names the first five; the others apply to one hop by their own definitions (7.6.1
# calls them "connection options"): 11.7 proxy authentication, 6.6.2 trailer (trailers are not
# passed on), RFC 7540 3.2.1.
HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"proxy-connection",
        b"keep-alive",
        b"te",
        b"transfer-encoding",
        b"upgrade",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"trailer",
        b"http2-settings",
    )
)
# The upstream client writes its own host and content-length. The body is here already, so
# 100 Continue has no purpose.
_REQUEST_DROPPED = HOP_BY_HOP | {b"host", b"content-length", b"expect"}
OUR_PREFIX = b"x-kv-"
"""Of the headers that say what this router predicted; no others of that kind reach a client."""
_WITHOUT_BODY = frozenset((204, 304))
_COMMON_OPTIONS = frozenset((b"", b",keep-alive", b",close"))

_MAX_SECONDS_DIGITS = 6
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
    "queue_timeout": "overloaded_error",
    "shutting_down": "overloaded_error",
    "server_error": "api_error",
}


def upstream_headers(request: ProxyRequest, attempt: Attempt) -> list[Header]:
    """The headers to send to a candidate, without host and content-length.

    Args:
        request: The client's.
        attempt: The candidate, whose own headers win.
    """
    override = attempt.request_headers
    replaced = tuple([name for name, _ in override]) if override else ()
    kept = _end_to_end(request.headers, _kept_back(request.dropped, replaced))
    kept += request.added
    kept += [(name, value) for name, value in override if value is not None]
    return kept


@functools.lru_cache(maxsize=64)
def _kept_back(dropped: frozenset[bytes], replaced: tuple[bytes, ...]) -> frozenset[bytes]:
    return _REQUEST_DROPPED.union(dropped, replaced)


def client_headers(
    response: UpstreamResponse, attempt: Attempt, request: ProxyRequest
) -> list[Header]:
    """The headers to send to the client.

    Args:
        response: The replica's.
        attempt: The candidate; its headers replace those of the response, like those of *request*.
        request: The client's.
    """
    added = attempt.response_headers + request.response_headers
    dropped = _hop_by_hop_and(tuple(dict(added)))
    if response.status in _WITHOUT_BODY:
        # A 304 may carry the length of the body it leaves out; uvicorn, which counts the bytes
        # sent, would find it wrong.
        dropped |= {b"content-length"}
    # What a router behind this one says of its caches may not be for this router's clients.
    kept = _end_to_end(response.headers, dropped, OUR_PREFIX)
    kept += added
    return kept


@functools.lru_cache(maxsize=64)
def _hop_by_hop_and(names: tuple[bytes, ...]) -> frozenset[bytes]:
    return HOP_BY_HOP.union(names)


def takes_events(headers: Iterable[Header]) -> bool:
    """Whether an event may be appended to this body: it is an event stream, not encoded and of
    open length."""
    found = False
    for name, value in headers:
        if name == b"content-type":
            found = value[:17].lower() == b"text/event-stream"
        elif name == b"content-length" or (
            name == b"content-encoding" and value.lower() != b"identity"
        ):
            return False
    return found


def retry_after_of(headers: Iterable[Header]) -> int | None:
    """The seconds that `Retry-After` says; None where it is missing, or a date."""
    found = next((value.strip() for name, value in headers if name == b"retry-after"), b"")
    return int(found) if found.isdigit() and len(found) <= _MAX_SECONDS_DIGITS else None


def _end_to_end(
    headers: Iterable[Header], dropped: frozenset[bytes], prefix: bytes | None = None
) -> list[Header]:
    """Those that are neither *dropped*, nor about the connection, nor begin with *prefix*."""
    kept = []
    options = b""
    for header in headers:
        name = header[0]
        if name not in dropped:
            if prefix is None or not name.startswith(prefix):
                kept.append(header)
        elif name == b"connection":
            options += b"," + header[1].lower()
    if options not in _COMMON_OPTIONS:
        named = {option.strip() for option in options.split(b",")}
        kept = [header for header in kept if header[0] not in named]
    return kept


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
    def holds(self) -> bool:
        """Whether a part of a line is held back."""
        return bool(self._held)

    def pass_whole(self, chunk: bytes) -> None:
        """As `release`, for whole lines while none is held back; at least as many bytes as the end
        of a stream may have."""
        self._tail = chunk

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
