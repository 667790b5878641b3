"""A request that goes to a replica: what goes in, where it is tried, what is reported of it.

The files; each imports only what is listed above it:

    attempts.py   where a request may be sent, how that fails, and how often it is tried again
    types.py      what goes in, and what is reported
    messages.py   errors of the router's own, and the end of a broken event stream
    usage.py      the token counts and the id in a passing response
"""

from router.proxy.attempts import RETRIED, Attempt, Failure, RetryLimits, Unretried
from router.proxy.messages import error_body
from router.proxy.types import (
    Dialect,
    End,
    ProxyObserver,
    ProxyRequest,
    ProxySettings,
)

__all__ = [
    "RETRIED",
    "Attempt",
    "Dialect",
    "End",
    "Failure",
    "ProxyObserver",
    "ProxyRequest",
    "ProxySettings",
    "RetryLimits",
    "Unretried",
    "error_body",
]
