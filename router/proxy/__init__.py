"""One request sent to one replica, and its response to the client: `Proxy.start`.

The files; each imports only what is listed above it:

    attempts.py   where a request may be sent, how that fails, and how often it is tried again
    types.py      what goes in, and what is reported
    trying.py     which candidate is next, and what becomes of a request that none serves
    messages.py   which headers go through; errors; the end of a broken event stream
    proxy.py      the steps of one request; the end of those whose clients have stopped reading
    usage.py      the token counts and the id in a passing response
"""

from router.proxy.attempts import RETRIED, Attempt, Failure, RetryLimits, Unretried
from router.proxy.messages import error_body
from router.proxy.proxy import Proxy, Relay
from router.proxy.types import (
    Dialect,
    End,
    ProxyObserver,
    ProxyRequest,
    ProxySettings,
    Recipient,
    RunningRelay,
    SendsOn,
)

__all__ = [
    "RETRIED",
    "Attempt",
    "Dialect",
    "End",
    "Failure",
    "Proxy",
    "ProxyObserver",
    "ProxyRequest",
    "ProxySettings",
    "Recipient",
    "Relay",
    "RetryLimits",
    "RunningRelay",
    "SendsOn",
    "Unretried",
    "error_body",
]
