"""How the router asks servers about themselves: replicas, peers, Kubernetes. Requests of clients go
through the data plane.

What it raises: `UpstreamError` for everything that the network or the server does, `ValueError`
for a request that would break its own framing, `RuntimeError` after `close`. Any other exception
is a bug in this package; please report it.

The files; each imports only what is listed above it:

    errors.py       exception tree
    origin.py       where a server is; timeouts
    client.py       aiohttp's client, with bounds, time limits and these errors
"""

from router.upstream.client import UpstreamClient, UpstreamResponse
from router.upstream.errors import (
    ClosedBeforeResponse,
    ConnectFailed,
    ConnectTimeout,
    FirstByteTimeout,
    IdleTimeout,
    KeptConnectionClosed,
    OutOfResources,
    ResponseBroken,
    ResponseTooLarge,
    UpstreamError,
)
from router.upstream.origin import KEPT_S, Allows, Header, Origin, OriginError, Timeouts

__all__ = [
    "KEPT_S",
    "Allows",
    "ClosedBeforeResponse",
    "ConnectFailed",
    "ConnectTimeout",
    "FirstByteTimeout",
    "Header",
    "IdleTimeout",
    "KeptConnectionClosed",
    "Origin",
    "OriginError",
    "OutOfResources",
    "ResponseBroken",
    "ResponseTooLarge",
    "Timeouts",
    "UpstreamClient",
    "UpstreamError",
    "UpstreamResponse",
]
