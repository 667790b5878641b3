"""Records the steps of a request and their times; the trace is handed over at the request's end.
Only times and names are recorded here. Spans are made of them later, in another thread, so a traced
request costs the event loop little; one that is not traced costs it nothing."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from router.config.origin import Header
from router.plane.attempts import Attempt, Failure
from router.plane.usage import UsageReader
from router.telemetry.request_log import RoutedRequest
from router.telemetry.settled import Settled
from router.telemetry.trace_context import TRACEPARENT, TRACESTATE, TraceContext

_MAX_ATTEMPTS = 64
"""The most recorded of one request; the proxy's own bound is lower by default."""


class Step(NamedTuple):
    """A step of a request before it was sent. Times are the monotonic clock's, in nanoseconds."""

    name: str
    began: int
    ended: int


@dataclass(slots=True, eq=False)
class TracedAttempt:
    """One attempt at a replica."""

    attempt: Attempt
    span_id: str
    """The replica's parent span."""
    began: int
    first_byte: int | None = None
    ended: int | None = None
    failure: str | None = None
    predicted_tokens: int = 0
    resent: int = 0
    """Times it was sent again since a kept connection had been closed."""


@dataclass(slots=True, eq=False)
class RequestTrace:
    """One request's place in its trace, and what happened to it."""

    trace_id: str
    """32 hexadecimal digits."""
    context: TraceContext | None
    is_sampled: bool
    """True if it is recorded; if not, only its ids are passed on."""
    _sink: Callable[[RequestTrace], object]
    method: str
    path: str
    route: str | None
    """The path's label of a fixed set, if it has one."""
    span_id: str = field(default_factory=lambda: random_id(16))
    started_at: int = field(default_factory=time.time_ns)
    """Unix time, in nanoseconds."""
    began: int = field(default_factory=time.perf_counter_ns)
    ended: int = 0
    steps: list[Step] = field(default_factory=list)
    attempts_made: list[TracedAttempt] = field(default_factory=list)
    request: RoutedRequest | None = None
    usage: UsageReader | None = None
    status: int | None = None
    error: str | None = None
    _next_id: str = ""
    """The span of the next attempt."""
    _tokenised: Step | None = None
    """In Python, for the compiled data plane; a step once that has tried a replica."""

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
        began = now - _ns(routing_s)
        if tokenization_s is not None:
            self.steps.append(Step("tokenise", began - _ns(tokenization_s), began))
        self.steps.append(Step("route", began, now))

    def waited(self, name: str, seconds: float) -> None:
        """Record a wait that ends now."""
        now = time.perf_counter_ns()
        self.steps.append(Step(name, now - _ns(seconds), now))

    def plan(self, attempts: Iterable[Attempt]) -> Iterator[Attempt]:
        """The same attempts, each with the headers of its own span."""
        for attempt in attempts:
            self._next_id = random_id(16)
            parent = (TRACEPARENT, self.parent(self._next_id))
            yield replace(attempt, request_headers=(*attempt.request_headers, parent))

    def sent(self, attempt: Attempt, predicted_tokens: int) -> None:
        made = self.attempts_made
        if made and made[-1].attempt is attempt:
            made[-1].resent += 1
            made[-1].failure = made[-1].ended = None
        elif len(made) < _MAX_ATTEMPTS:
            made.append(TracedAttempt(attempt, self._next_id, time.perf_counter_ns()))
        if made:
            made[-1].predicted_tokens = predicted_tokens

    def failed(self, failure: Failure) -> None:
        last = self.attempts_made[-1]
        last.failure, last.ended = failure.value, time.perf_counter_ns()

    def began_response(self) -> None:
        """Record the first byte of the last attempt."""
        self.attempts_made[-1].first_byte = time.perf_counter_ns()

    def ended_response(self) -> None:
        """Record the end of the last attempt, if there was one and it has not failed."""
        last = self.attempts_made[-1] if self.attempts_made else None
        if last is not None and last.ended is None:
            last.ended = time.perf_counter_ns()

    def end(self, status: int | None, at: int | None = None) -> None:
        """It is over.

        Args:
            at: When, by the monotonic clock in nanoseconds; None: now.
        """
        if self.is_sampled:
            self.status, self.ended = status, at or time.perf_counter_ns()
            self._sink(self)

    # --- where the compiled data plane sends it, which reports attempts when they are over --------

    def placed(self, tokenization_s: float) -> tuple[Header, ...]:
        """Record that its token ids are known and it is about to be sent.

        Returns:
            The headers for the replica.
        """
        now = time.perf_counter_ns()
        self._tokenised = Step("tokenise", now - _ns(tokenization_s), now)
        self._next_id = random_id(16)
        return (TRACEPARENT, self.parent(self._next_id)), *self.state

    def failed_in_core(self, attempt: Attempt, failure: str) -> None:
        """Record an attempt that a replica did not serve."""
        now = time.perf_counter_ns()
        made = self._attempt(attempt, now if self._tokenised is None else self._tokenised.ended)
        made.failure, made.ended = failure, now

    def settled(self, attempt: Attempt | None, settled: Settled, request: RoutedRequest) -> None:
        """It is over.

        Args:
            attempt: The last; None if it is not known any more.
        """
        if not self.is_sampled:
            return
        began = _ns(settled.began_at)
        ended = began + _ns(settled.seconds)
        self.steps.append(Step("route", began - _ns(settled.routing_s), began))
        if attempt is not None:
            made = self._attempt(attempt, began)
            made.failure, made.ended = settled.failure, ended
            made.predicted_tokens = request.cached_tokens
            if settled.first_byte_s:
                made.first_byte = began + _ns(settled.first_byte_s)
        self.request, self.usage = request, settled.usage_reader
        self.end(request.status, ended)

    def _attempt(self, attempt: Attempt, began: int) -> TracedAttempt:
        """Return one more attempt, which has the next id."""
        if not self.attempts_made and self._tokenised is not None:
            self.steps.insert(0, self._tokenised)
        made = TracedAttempt(attempt, self._next_id, began)
        self.attempts_made.append(made)
        self._next_id = random_id(16)
        return made


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
        trace_id = random_id(32) if context is None else context.trace_id
        is_sampled = self.is_sampled(trace_id, context)
        return RequestTrace(trace_id, context, is_sampled, self.sink, method, path, route)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def random_id(digits: int) -> str:
    """Return a random id that is not zero, which would be invalid."""
    return f"{random.getrandbits(4 * digits) or 1:0{digits}x}"
