"""A small pooled HTTP/1.1 client for the router's data path: asyncio protocols around httptools'
parser.

The path of a request: `client.UpstreamClient.send` takes a kept `connection.Connection` or opens
one, `request.request_head` makes the bytes, the connection's parser fills a
`response.UpstreamResponse`, and the connection goes back to the client as soon as the answer is
complete. Whatever ends otherwise closes its socket, which is what cancels the work at the server.

The files; each imports only what is listed above it:

    errors.py       exception tree
    origin.py       where a server is; timeouts
    request.py      the bytes of a request's head
    response.py     one answer: filled by its connection, read by its caller
    connection.py   one socket, one exchange at a time
    client.py       the pool, and the clock of all deadlines
"""

from router.upstream.client import PoolLimits, UpstreamClient, UpstreamStatistics
from router.upstream.errors import (
    ClosedBeforeResponse,
    ConnectFailed,
    ConnectionLimitReached,
    ConnectTimeout,
    FirstByteTimeout,
    IdleTimeout,
    ResponseBroken,
    ResponseTooLarge,
    UpstreamError,
)
from router.upstream.origin import Origin, OriginError, Timeouts
from router.upstream.response import Header, UpstreamResponse

__all__ = [
    "ClosedBeforeResponse",
    "ConnectFailed",
    "ConnectTimeout",
    "ConnectionLimitReached",
    "FirstByteTimeout",
    "Header",
    "IdleTimeout",
    "Origin",
    "OriginError",
    "PoolLimits",
    "ResponseBroken",
    "ResponseTooLarge",
    "Timeouts",
    "UpstreamClient",
    "UpstreamError",
    "UpstreamResponse",
    "UpstreamStatistics",
]
