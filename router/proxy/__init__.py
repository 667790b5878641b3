"""One request streamed to one replica, as raw ASGI: `proxy.Proxy.stream`.

`types` holds what goes in and out, `relay.Relay` the steps of one request; `headers`, `events`,
`errors` and `usage` are what they need.

The files; each imports only what is listed above it:

    types.py     what goes in and out: attempts, ends, failures
    errors.py    error bodies and error events, in the client's dialect
    events.py    an event stream by whole lines, so that it can be ended cleanly
    headers.py   which headers go through
    relay.py     the steps of one request
    proxy.py     all requests under way, and a watch on their clients
    usage.py     what a passing answer says of its own tokens
"""

from router.proxy.errors import error_body
from router.proxy.proxy import Proxy, ProxyStatistics
from router.proxy.types import (
    RETRIED,
    Attempt,
    Dialect,
    End,
    Failure,
    Observer,
    Outcome,
    ProxyRequest,
    ProxySettings,
)

__all__ = [
    "RETRIED",
    "Attempt",
    "Dialect",
    "End",
    "Failure",
    "Observer",
    "Outcome",
    "Proxy",
    "ProxyRequest",
    "ProxySettings",
    "ProxyStatistics",
    "error_body",
]
