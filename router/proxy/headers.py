"""Which headers go through, and which end at the proxy."""

from __future__ import annotations

from collections.abc import Iterable

from router.proxy.attempts import Attempt
from router.proxy.types import ProxyRequest
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


def upstream_headers(request: ProxyRequest, attempt: Attempt) -> list[Header]:
    """The headers to send to a candidate, without host and content-length.

    Args:
        request: The client's.
        attempt: The candidate, whose own headers win.
    """
    override = attempt.request_headers
    if not override:
        return _end_to_end(request.headers, _REQUEST_DROPPED)
    kept = _end_to_end(request.headers, _REQUEST_DROPPED.union([name for name, _ in override]))
    kept += [(name, value) for name, value in override if value is not None]
    return kept


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
    dropped = HOP_BY_HOP.union([name for name, _ in added])
    if response.status in _WITHOUT_BODY:
        # A 304 may carry the length of the body it leaves out; uvicorn, which counts the bytes
        # sent, would find it wrong.
        dropped |= {b"content-length"}
    # What a router behind this one says of its caches may not be for this router's clients.
    kept = [
        header for header in _end_to_end(response.headers, dropped) if header[0][:5] != OUR_PREFIX
    ]
    kept += added
    return kept


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


def _end_to_end(headers: Iterable[Header], dropped: frozenset[bytes]) -> list[Header]:
    kept = []
    options = b""
    for header in headers:
        name = header[0]
        if name not in dropped:
            kept.append(header)
        elif name == b"connection":
            options += b"," + header[1].lower()
    if options not in _COMMON_OPTIONS:
        named = {option.strip() for option in options.split(b",")}
        kept = [header for header in kept if header[0] not in named]
    return kept
