"""W3C Trace Context (https://www.w3.org/TR/trace-context/): read from a client's request, strictly,
and written into a replica's.

What a client sends here reaches logs, traces and replicas: a header that breaks the standard's
grammar or its bounds goes nowhere, as if it had not been sent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from router.config.origin import Header

TRACEPARENT = b"traceparent"
TRACESTATE = b"tracestate"
MAX_STATE_BYTES = 512
"""The length that the standard asks everyone to pass on (3.3.1.5)."""
MAX_STATE_MEMBERS = 32

# 3.2.2: lower-case hexadecimal; an id of zeros is invalid, and so is version ff. Versions after 00
# may add fields.
_PARENT = re.compile(
    rb"(?!ff)(?P<version>[0-9a-f]{2})"
    rb"-(?!0{32})(?P<trace>[0-9a-f]{32})-(?!0{16})(?P<parent>[0-9a-f]{16})"
    rb"-(?P<flags>[0-9a-f]{2})(?P<more>-[!-~]{0,64})?"
)
# 3.3.1.3
_MEMBER = re.compile(
    rb"(?:[a-z0-9][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})"
    rb"=[ -+\--<>-~]{0,255}[!-+\--<>-~]"
)
_SAMPLED = 1


class TraceContext(NamedTuple):
    """The trace that a request belongs to, by its sender."""

    trace_id: str
    """32 hexadecimal digits."""
    parent_id: str
    """The sender's span, 16 hexadecimal digits."""
    is_sampled: bool
    """True if the sender may have recorded its span."""
    parent: bytes
    """The header as it came."""
    state: bytes = b""
    """The additions of tracing systems; empty where they have not, or too much."""

    def headers(self) -> tuple[Header, ...]:
        """To pass on, unchanged: the router adds no span of its own."""
        if not self.state:
            return ((TRACEPARENT, self.parent),)
        return (TRACEPARENT, self.parent), (TRACESTATE, self.state)


def read_context(headers: Iterable[Header]) -> TraceContext | None:
    """Read a request's trace context; None where it has none that is valid."""
    parents, states = [], []
    for name, value in headers:
        if name == TRACEPARENT:
            parents.append(value)
        elif name == TRACESTATE:
            states.append(value)
    found = _PARENT.fullmatch(parents[0]) if len(parents) == 1 else None
    if found is None or (found["version"] == b"00" and found["more"] is not None):
        return None
    return TraceContext(
        found["trace"].decode(),
        found["parent"].decode(),
        bool(int(found["flags"], 16) & _SAMPLED),
        parents[0],
        _state(b",".join(states)),
    )


def _state(given: bytes) -> bytes:
    """The list as it came; nothing of one that breaks a rule."""
    members = [member for part in given.split(b",") if (member := part.strip(b" \t"))]
    is_valid = len(given) <= MAX_STATE_BYTES and len(members) <= MAX_STATE_MEMBERS
    return b",".join(members) if is_valid and all(map(_MEMBER.fullmatch, members)) else b""
