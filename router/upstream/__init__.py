"""A small pooled HTTP/1.1 client for the router's data path: asyncio protocols around httptools'
parser.

The path of a request: `UpstreamClient.start` takes a kept `HttpConnection` or opens one and writes
the request, the connection's parser fills an `UpstreamResponse`, and the connection goes back to
the client as soon as the response is complete. Any other end closes the socket, which is what
cancels the work at the server.

Why not a library: every request pays for it. Processor time of the sender per request (`python -m
benchmarks.http_clients`: POST of 1 KB, response of 0.2 KB read whole, 16 at a time over kept
connections, uvloop, Python 3.11, a virtual machine with 2 cores and other load on it):

    ours             17 us
    aiohttp 3.14     73 us
    httpx2 2.16     470 us
    httpx 0.28    1,740 us

The whole router spends some 290 us on a request, its bare proxy 80 to 110. This client also has
what a proxy needs: bounds on headers and framing, a timeout for the first body byte, backpressure,
and errors that say whether the server can have seen the request.

What it raises: `UpstreamError` for everything that the network or the server does, `ValueError`
for a request that would break its own framing, `RuntimeError` after `close`. Any other exception
is a bug in this package; please report it.

The files; each imports only what is listed above it:

    errors.py       exception tree
    origin.py       where a server is; timeouts
    response.py     one response: filled by its connection, read by its caller
    turns.py        keeps turns of the event loop short, and notices those that are overdue
    connection.py   one socket, one exchange at a time
    client.py       the pool, a request's head, and the clock of all deadlines
"""

from router.upstream.client import PoolLimits, UpstreamClient, UpstreamStatistics
from router.upstream.errors import (
    ClosedBeforeResponse,
    ConnectFailed,
    ConnectionLimitReached,
    ConnectTimeout,
    FirstByteTimeout,
    GivenUp,
    IdleTimeout,
    KeptConnectionClosed,
    OutOfResources,
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
    "GivenUp",
    "Header",
    "IdleTimeout",
    "KeptConnectionClosed",
    "Origin",
    "OriginError",
    "OutOfResources",
    "PoolLimits",
    "ResponseBroken",
    "ResponseTooLarge",
    "Timeouts",
    "UpstreamClient",
    "UpstreamError",
    "UpstreamResponse",
    "UpstreamStatistics",
]
