"""Records the steps of a request and their times; the trace is handed over at the request's end.
Only times and names are recorded here. Spans are made of them later, in another thread, so a traced
request costs the event loop little; one that is not traced costs it nothing."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace
from typing_extensions import override

from router.config.origin import Header
from router.plane.attempts import Attempt, Failure, Unretried
from router.plane.proxy_types import End, ProxyObserver
from router.plane.usage import UsageReader
from router.telemetry.request_log import RoutedRequest
from router.telemetry.request_observer import RequestObserver
from router.telemetry.settled import Settled
from router.telemetry.trace_context import TRACEPARENT, TRACESTATE, TraceContext

_MAX_ATTEMPTS = 64
"""The most recorded of one request; the proxy's own bound is lower by default."""


class Step(NamedTuple):
    """A step of a request before it was sent. Times are the monotonic clock's, in nanoseconds."""

    name: str
    began: int
    ended: int


class TracedAttempt:
    """One attempt at a replica."""

    __slots__ = (
        "attempt",
        "began",
        "ended",
        "failure",
        "first_byte",
        "predicted_tokens",
        "resent",
        "span_id",
    )

    def __init__(self, attempt: Attempt, span_id: str, began: int) -> None:
        self.attempt = attempt
        self.span_id = span_id
        self.began = began
        self.first_byte: int | None = None
        self.ended: int | None = None
        self.failure: str | None = None
        self.predicted_tokens = 0
        self.resent = 0
        """Times it was sent again since a kept connection had been closed."""


class RequestTrace:
    """One request's place in its trace, and what happened to it."""

    __slots__ = (
        "_next_id",
        "_sink",
        "attempts_made",
        "began",
        "context",
        "ended",
        "error",
        "is_sampled",
        "method",
        "path",
        "request",
        "route",
        "span_id",
        "started_at",
        "status",
        "steps",
        "trace_id",
        "usage",
    )

    def __init__(
        self,
        trace_id: str,
        context: TraceContext | None,
        is_sampled: bool,
        sink: Callable[[RequestTrace], object],
    ) -> None:
        """
        Args:
            trace_id: 32 hexadecimal digits.
            is_sampled: True if it is recorded; if not, only its ids are passed on.
        """
        self.trace_id = trace_id
        self.span_id = _new_id(16)
        self.context = context
        self.is_sampled = is_sampled
        self.started_at = time.time_ns()
        """Unix time, in nanoseconds."""
        self.began = time.perf_counter_ns()
        self.ended = 0
        self.method = self.path = ""
        self.route: str | None = None
        self.steps: list[Step] = []
        self.attempts_made: list[TracedAttempt] = []
        self.request: RoutedRequest | None = None
        self.usage: UsageReader | None = None
        self.status: int | None = None
        self.error: str | None = None
        self._next_id = ""
        self._sink = sink

    @property
    def state(self) -> tuple[Header, ...]:
        """Return its `tracestate`, to pass on."""
        state = b"" if self.context is None else self.context.state
        return ((TRACESTATE, state),) if state else ()

    def parent(self, span_id: str) -> bytes:
        """The header that names one of its spans as the parent of what follows."""
        return f"00-{self.trace_id}-{span_id}-0{self.is_sampled:d}".encode()

    def headers(self) -> tuple[Header, ...]:
        """The headers for a replica, unless the attempt has its own."""
        return (TRACEPARENT, self.parent(self.span_id)), *self.state

    def decided(self, tokenization_s: float | None, routing_s: float) -> None:
        """Record the decision.

        Args:
            tokenization_s: How long its token ids took; None without a prompt.
            routing_s: How long the rest took, after that.
        """
        now = time.perf_counter_ns()
        began = now - int(routing_s * 1e9)
        if tokenization_s is not None:
            self.steps.append(Step("tokenise", began - int(tokenization_s * 1e9), began))
        self.steps.append(Step("route", began, now))

    def waited(self, name: str, seconds: float) -> None:
        """Record a wait that ends now."""
        now = time.perf_counter_ns()
        self.steps.append(Step(name, now - int(seconds * 1e9), now))

    def plan(self, attempts: Iterable[Attempt]) -> Iterator[Attempt]:
        """The same attempts, each with the headers of its own span."""
        for attempt in attempts:
            self._next_id = _new_id(16)
            parent = (TRACEPARENT, self.parent(self._next_id))
            yield replace(attempt, request_headers=(*attempt.request_headers, parent))

    def observing(self, observer: RequestObserver) -> ProxyObserver:
        """Return an observer that records the attempts, too; *observer* where nothing is
        recorded."""
        if not self.is_sampled:
            return observer
        self.request, self.usage = observer.request, observer.usage
        observer.exemplar = self.trace_id
        return _TracingObserver(observer, self)

    def sent(self, attempt: Attempt) -> None:
        """Record an attempt."""
        made = self.attempts_made
        if made and made[-1].attempt is attempt:
            made[-1].resent += 1
            made[-1].failure = made[-1].ended = None
        elif len(made) < _MAX_ATTEMPTS:
            made.append(TracedAttempt(attempt, self._next_id, time.perf_counter_ns()))

    def end(self, status: int | None, at: int | None = None) -> None:
        """It is over.

        Args:
            at: When, by the monotonic clock in nanoseconds; None: now.
        """
        if self.is_sampled:
            self.status, self.ended = status, at or time.perf_counter_ns()
            self._sink(self)


class PlacedTrace:
    """The trace of a request that the compiled data plane serves, which reports attempts when they
    are over."""

    __slots__ = ("_span_id", "_tokenised", "trace")

    def __init__(self, trace: RequestTrace) -> None:
        self.trace = trace
        self._span_id = _new_id(16)
        self._tokenised: Step | None = None

    def placed(self, tokenization_s: float) -> tuple[Header, ...]:
        """Record that its token ids are known and it is about to be sent.

        Returns:
            The headers for the replica.
        """
        now = time.perf_counter_ns()
        self._tokenised = Step("tokenise", now - _ns(tokenization_s), now)
        return (TRACEPARENT, self.trace.parent(self._span_id)), *self.trace.state

    def failed(self, attempt: Attempt, failure: str) -> None:
        """Record an attempt that a replica did not serve."""
        now = time.perf_counter_ns()
        began = now if self._tokenised is None else self._tokenised.ended
        made = self._attempt(attempt, began)
        made.failure, made.ended = failure, now

    def served(self, attempt: Attempt | None, settled: Settled, request: RoutedRequest) -> None:
        """It is over.

        Args:
            attempt: The last; None if it is not known any more.
        """
        if not self.trace.is_sampled:
            return
        began = _ns(settled.began_at)
        ended = began + _ns(settled.seconds)
        self.trace.steps.append(Step("route", began - _ns(settled.routing_s), began))
        if attempt is not None:
            made = self._attempt(attempt, began)
            made.failure, made.ended = settled.failure, ended
            made.predicted_tokens = request.cached_tokens
            if settled.first_byte_s:
                made.first_byte = began + _ns(settled.first_byte_s)
        self.trace.request, self.trace.usage = request, settled.usage_reader
        self.trace.end(request.status, ended)

    def _attempt(self, attempt: Attempt, began: int) -> TracedAttempt:
        """Return one more attempt, which has the next id."""
        if not self.trace.attempts_made and self._tokenised is not None:
            self.trace.steps.insert(0, self._tokenised)
        made = TracedAttempt(attempt, self._span_id, began)
        self.trace.attempts_made.append(made)
        self._span_id = _new_id(16)
        return made


class _TracingObserver(ProxyObserver):
    """Records when the attempts of a request begin, get their first byte, and end."""

    __slots__ = ("_inner", "_trace")

    def __init__(self, inner: RequestObserver, trace: RequestTrace) -> None:
        self._inner = inner
        self._trace = trace

    @override
    def on_attempt(self, attempt: Attempt) -> None:
        self._inner.on_attempt(attempt)
        self._trace.sent(attempt)
        if self._trace.attempts_made:
            self._trace.attempts_made[-1].predicted_tokens = self._inner.request.cached_tokens

    @override
    def on_failure(self, attempt: Attempt, failure: Failure) -> bool:
        last = self._trace.attempts_made[-1]
        last.failure, last.ended = failure.value, time.perf_counter_ns()
        return self._inner.on_failure(attempt, failure)

    @override
    def is_at_ease(self, attempt: Attempt) -> bool:
        return self._inner.is_at_ease(attempt)

    @override
    def on_busy(self, attempt: Attempt, retry_after_s: int, is_429: bool) -> bool:
        return self._inner.on_busy(attempt, retry_after_s, is_429)

    @override
    def on_unretried(self, reason: Unretried) -> None:
        self._inner.on_unretried(reason)

    @override
    def on_tried(self, failure: Failure) -> None:
        self._inner.on_tried(failure)

    @override
    def on_first_byte(self, attempt: Attempt, seconds: float) -> None:
        self._trace.attempts_made[-1].first_byte = time.perf_counter_ns()
        self._inner.on_first_byte(attempt, seconds)

    @override
    def on_chunk(self, data: bytes) -> None:
        self._inner.on_chunk(data)

    @property
    @override
    def wants_beginning(self) -> bool:  # type: ignore[override]
        return self._inner.wants_beginning

    @override
    def on_beginning(self, data: bytes) -> None:
        self._inner.on_beginning(data)

    @override
    def on_events(self, count: int) -> None:
        self._inner.on_events(count)

    @override
    def on_usage(self, is_json: bool, last: bytes, first: bytes) -> None:
        self._inner.on_usage(is_json, last, first)

    @override
    def on_end(self, end: End, status: int | None, seconds: float) -> None:
        last = self._trace.attempts_made[-1] if self._trace.attempts_made else None
        if last is not None and last.ended is None:
            last.ended = time.perf_counter_ns()
        self._inner.on_end(end, status, seconds)


@dataclass(eq=False, repr=False)
class Tracer:
    """Begins the trace of each request, or goes on with its client's."""

    is_sampled: Callable[[str, TraceContext | None], bool]
    """Returns whether a request is recorded, by its trace's id and its client's context."""
    sink: Callable[[RequestTrace], object]
    """Takes recorded requests at their end; it must not wait."""

    def begin(
        self, context: TraceContext | None, method: str, path: str, route: str | None
    ) -> RequestTrace:
        """Begin the trace of a request.

        Args:
            route: The path's label of a fixed set, if it has one.
        """
        trace_id = _new_id(32) if context is None else context.trace_id
        trace = RequestTrace(trace_id, context, self.is_sampled(trace_id, context), self.sink)
        trace.method, trace.path, trace.route = method, path, route
        return trace


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _new_id(digits: int) -> str:
    """Return a random id that is not zero, which would be invalid."""
    return f"{random.getrandbits(4 * digits) or 1:0{digits}x}"
