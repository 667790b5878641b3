"""Distributed tracing: to which trace a request belongs, and what it did when.

The files; each imports only what is listed above it:

    context.py   W3C Trace Context: what a client says of its trace, and what a replica is told
    spans.py     what one request does and when; handed over at its end
    otel.py      spans made of that and sent, in a thread; needs the extra `otel`
"""

from router.tracing.context import TRACEPARENT, TRACESTATE, TraceContext, read_context
from router.tracing.spans import PlacedTrace, RequestTrace, Tracer

__all__ = [
    "TRACEPARENT",
    "TRACESTATE",
    "PlacedTrace",
    "RequestTrace",
    "TraceContext",
    "Tracer",
    "read_context",
]
