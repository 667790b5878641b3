"""One request streamed to one replica, as raw ASGI: `proxy.Proxy.stream`.

`types` holds what goes in and out, `relay.Relay` the steps of one request, `headers`, `events` and
`errors` what they need; `server` is the one piece that knows uvicorn.
"""

from router.proxy.errors import error_body
from router.proxy.proxy import Proxy, ProxyStatistics
from router.proxy.server import AbortableHttpProtocol, client_abort
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
    "AbortableHttpProtocol",
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
    "client_abort",
    "error_body",
]
