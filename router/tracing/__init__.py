"""Distributed tracing: to which trace a request belongs.

The files; each imports only what is listed above it:

    context.py   W3C Trace Context: what a client says of its trace, and what a replica is told
"""

from router.tracing.context import TRACEPARENT, TRACESTATE, TraceContext, read_context

__all__ = ["TRACEPARENT", "TRACESTATE", "TraceContext", "read_context"]
