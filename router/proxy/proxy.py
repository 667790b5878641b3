"""The proxy: each request goes to its candidates in turn until one gives a first byte; that one's
response is passed on to the client.

Nothing here waits. The connection to the replica calls back when there is something to read, and
the client's when it can take more; each call takes the next steps and returns.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from enum import Enum

from typing_extensions import override

from router.proxy.attempts import Attempt, Failure, RequestRetries, RetryBudget
from router.proxy.messages import (
    EventLines,
    client_headers,
    error_body,
    error_event,
    retry_after_of,
    takes_events,
    upstream_headers,
)
from router.proxy.trying import Trying
from router.proxy.types import (
    End,
    ProxyObserver,
    ProxyRequest,
    ProxySettings,
    Recipient,
)
from router.upstream import (
    ClosedBeforeResponse,
    ConnectFailed,
    ConnectionLimitReached,
    ConnectTimeout,
    FirstByteTimeout,
    GivenUp,
    Header,
    IdleTimeout,
    KeptConnectionClosed,
    ResponseBroken,
    UpstreamClient,
    UpstreamError,
    UpstreamResponse,
)

logger = logging.getLogger(__name__)

# The replica, or a gateway in front of it, says "not now": nothing was generated, so the next
# candidate may be tried.
_NOT_NOW_STATUSES = frozenset((429, 502, 503, 504))
_FAILURES: dict[type[UpstreamError], Failure] = {
    ConnectFailed: Failure.CONNECT,
    ConnectTimeout: Failure.CONNECT,
    ClosedBeforeResponse: Failure.CLOSED,
    KeptConnectionClosed: Failure.KEPT_CLOSED,
    FirstByteTimeout: Failure.FIRST_BYTE_TIMEOUT,
    ResponseBroken: Failure.MALFORMED,
    GivenUp: Failure.UNHEALTHY,
}
_BREAKS: dict[type[UpstreamError], Failure] = {
    IdleTimeout: Failure.IDLE_TIMEOUT,
    GivenUp: Failure.LOST,
}


class Proxy:
    """Starts relays, and ends those whose clients have stopped reading. Belongs to one event
    loop."""

    def __init__(self, client: UpstreamClient, settings: ProxySettings) -> None:
        """Make a proxy.

        Args:
            client: Sends to the replicas.
            settings: Bounds on every request.
        """
        self.client = client
        self.settings = settings
        self._retry_budget = RetryBudget(settings.retries)
        self._slow: set[Relay] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(
        self,
        plan: Iterable[Attempt],
        request: ProxyRequest,
        recipient: Recipient,
        observer: ProxyObserver,
        on_over: Callable[[], object] = lambda: None,
    ) -> Relay:
        """Send a request to the first candidate of *plan* that gives a first byte, and its response
        to the client.

        The response to the client begins with the first body byte, not with the headers: until then
        another candidate may serve, within the limits on retries. After the last one failed, the
        client gets 502, or 503 where a replica responded with that or *plan* is empty.

        Args:
            plan: Candidates, best first; each is taken from it when it is needed.
            request: The client's request, its body read to the end.
            recipient: Gets the response.
            observer: Hears what happens; `on_end` exactly once, in every case.
            on_over: Called when that has been said.
        Returns:
            The relay, to be told what the client does. It may be over already.
        """
        self._loop = self._loop or asyncio.get_running_loop()
        self._retry_budget.add_request()
        retries = RequestRetries(self._retry_budget)
        relay = Relay(self, self._loop, retries, iter(plan), request, recipient, observer, on_over)
        relay.start()
        return relay

    def watch(self, relay: Relay) -> None:
        """End *relay* if its client reads nothing for too long."""
        self._slow.add(relay)
        if self._timer is None and self._loop is not None:
            self._timer = self._loop.call_later(self.settings.watch_s, self._look, self._loop)

    def unwatch(self, relay: Relay) -> None:
        """Its client reads again, or it is over."""
        self._slow.discard(relay)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        before = loop.time() - self.settings.client_stall_s
        for relay in [relay for relay in self._slow if relay.slow_since < before]:
            relay.client_stalled()
        self._timer = (
            loop.call_later(self.settings.watch_s, self._look, loop) if self._slow else None
        )


class _RelayState(Enum):
    """What a relay waits for.

        state      when the replica's response is ready             when the client reads
        TRYING     its first byte: RELAYING; else try another one
        RELAYING   pass it on; client slow: HELD; at its end: OVER
        HELD                                                        RELAYING

    Whenever the client leaves, stalls, or the router shuts down: OVER.
    """

    TRYING = "trying"
    RELAYING = "relaying"
    HELD = "held"
    OVER = "over"


class Relay(Trying):
    """One proxied request, and the steps that it takes."""

    __slots__ = (
        "_events",
        "_headers",
        "_loop",
        "_on_over",
        "_proxy",
        "_recipient",
        "_request",
        "_response",
        "_started_at",
        "_state",
        "_status",
        "slow_since",
    )

    def __init__(
        self,
        proxy: Proxy,
        loop: asyncio.AbstractEventLoop,
        retries: RequestRetries,
        plan: Iterator[Attempt],
        request: ProxyRequest,
        recipient: Recipient,
        observer: ProxyObserver,
        on_over: Callable[[], object],
    ) -> None:
        super().__init__(retries, plan, observer)
        self.slow_since = 0.0
        """When the client stopped reading; on the loop's clock."""
        self._proxy = proxy
        self._loop = loop
        self._request = request
        self._recipient = recipient
        self._on_over = on_over
        self._state = _RelayState.TRYING
        self._started_at = loop.time()
        self._response: UpstreamResponse | None = None
        self._headers: list[Header] | None = None
        self._events: EventLines | None = None
        self._status: int | None = None

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self._state is _RelayState.OVER

    # --- what happens to it -----------------------------------------------------------------------

    def start(self) -> None:
        """Take the first steps."""
        if self._recipient.is_gone:
            self._finish(End.CLIENT_LEFT)
        else:
            self._take(self._try_next)

    def client_left(self) -> None:
        """The client has closed its connection."""
        if self._state is not _RelayState.OVER:
            self._finish(End.CLIENT_LEFT)

    def client_reads(self) -> None:
        """The client has read most of what waited for it."""
        if self._state is _RelayState.HELD:
            self._state = _RelayState.RELAYING
            self._proxy.unwatch(self)
            self._take(self._pass_on)

    def client_stalled(self) -> None:
        """The client has read nothing for too long."""
        self._cut(End.CLIENT_STALLED)

    def cancel(self) -> None:
        """The router will not finish it."""
        self._cut(End.ABANDONED)

    def _on_ready(self) -> None:
        """There is something to read of the replica's response."""
        if self._state is _RelayState.TRYING:
            self._take(self._begin)
        elif self._state is _RelayState.RELAYING:
            self._take(self._pass_on)

    # --- the attempts -----------------------------------------------------------------------------

    @override
    def _send_to(self, attempt: Attempt, may_reuse: bool = True) -> None:
        self._attempt = attempt
        self._observer.on_attempt(attempt)
        request = self._request
        try:
            response = self._proxy.client.start(
                attempt.origin,
                request.method,
                request.target,
                upstream_headers(request, attempt),
                request.body if attempt.body is None else attempt.body,
                request.timeouts or self._proxy.settings.timeouts,
                may_reuse=may_reuse,
            )
        except ConnectionLimitReached:
            self._refuse_for_connections()
            return
        self._response = response
        if response.is_ready:
            self._begin()
        else:
            response.when_ready(self._on_ready)

    def _begin(self) -> None:
        """The first byte is here, or the attempt has failed."""
        response, attempt = self._response, self._attempt
        assert response is not None
        assert attempt is not None
        try:
            response.begin()
        except ConnectionLimitReached:
            self._refuse_for_connections()
            return
        except UpstreamError as error:
            self._failed(attempt, _FAILURES[type(error)])
            if isinstance(error, KeptConnectionClosed) and self._may_try(attempt):
                self._send_to(attempt, may_reuse=False)
            else:
                self._try_next()
            return
        if response.status in _NOT_NOW_STATUSES and self._go_elsewhere(
            attempt, response.status, retry_after_of(response.headers)
        ):
            return
        if response.status >= 500:
            self._observer.on_failure(attempt, Failure.SERVER_ERROR)
        self._status = response.status
        self._state = _RelayState.RELAYING
        self._observer.on_first_byte(attempt, self._loop.time() - self._started_at)
        self._headers = client_headers(response, attempt, self._request)
        self._events = EventLines() if takes_events(response.headers) else None
        self._pass_on()

    @property
    @override
    def _has_begun(self) -> bool:
        return self._status is not None

    @override
    def _let_go(self) -> None:
        assert self._response is not None
        self._response.abort()

    @override
    def _abandon(self) -> None:
        self._cut(End.ABANDONED)

    # --- the response -----------------------------------------------------------------------------

    def _pass_on(self) -> None:
        """Pass on what has arrived, and wait for more."""
        response, events = self._response, self._events
        assert response is not None
        while True:
            try:
                chunk = response.take()
            except UpstreamError as error:
                self._break_off(error)
                return
            is_last = response.at_end
            if chunk:
                self._observer.on_chunk(chunk)
            if events is not None:
                chunk = events.release(chunk, is_last)
            self._emit(chunk, is_last)
            if is_last:
                self._finish(End.COMPLETED)
                return
            if self._recipient.is_slow:
                self._hold()
                return
            if not response.is_ready:
                takes_chunks = events is not None and not events.holds
                response.when_ready(self._on_ready, self._on_chunk if takes_chunks else None)
                return

    def _on_chunk(self, chunk: bytes, size: int) -> bool:
        """Pass on one whole chunk of an event stream as it came; return whether to go on."""
        events, data = self._events, chunk[-2 - size : -2]
        assert events is not None
        try:
            self._observer.on_chunk(data)
            events.pass_whole(data)
            self._recipient.send_chunk(chunk, data)
            if self._recipient.is_slow:
                self._hold()
        except Exception as error:  # noqa: BLE001 - logged there
            self._fail(error)
        return self._state is _RelayState.RELAYING

    def _emit(self, chunk: bytes, is_last: bool) -> None:
        headers = self._headers
        if headers is not None:
            assert self._status is not None
            self._headers = None
            self._recipient.respond(self._status, headers, chunk, is_last)
        elif chunk or is_last:
            self._recipient.send(chunk, is_last)

    def _hold(self) -> None:
        """Wait for the client. The replica's connection is not read meanwhile."""
        self._state = _RelayState.HELD
        self.slow_since = self._loop.time()
        self._proxy.watch(self)

    def _break_off(self, error: UpstreamError) -> None:
        """The replica died in mid-stream: end an event stream with an error event, and any other
        body visibly too early."""
        events, attempt = self._events, self._attempt
        assert attempt is not None
        if events is not None and events.finished:
            # It died between its last event and the end of its body: the client has everything.
            self._emit(b"", True)
            self._finish(End.COMPLETED)
            return
        self._observer.on_failure(attempt, _BREAKS.get(type(error), Failure.DIED))
        if events is None:
            self._cut(End.REPLICA_DIED)
            return
        message = "the replica ended the stream before it was complete"
        event = error_event(self._request.dialect, message, "server_error", "replica_died")
        self._emit(events.separator + event, True)
        self._finish(End.REPLICA_DIED)

    # --- the end ----------------------------------------------------------------------------------

    def _refuse_for_connections(self) -> None:
        message = "the router is at its limit of connections"
        self._refuse(End.OVERLOADED, 503, message, "overloaded")

    @override
    def _refuse(self, end: End, status: int, message: str, code: str) -> None:
        """End with an error of the router's own."""
        self._status = status
        body = error_body(self._request.dialect, message, "server_error", code)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"retry-after", b"%d" % (self._retry_after_s or self._proxy.settings.retry_after_s)),
            *self._request.response_headers,
        ]
        self._recipient.respond(status, headers, body, True)
        self._finish(end)

    def _cut(self, end: End) -> None:
        """End, and close the client's connection in mid-response."""
        if self._state is not _RelayState.OVER:
            self._finish(end)
            self._recipient.abort()

    def _finish(self, end: End) -> None:
        """Let the replica go, and report the end."""
        if self._state is _RelayState.HELD:
            self._proxy.unwatch(self)
        self._state = _RelayState.OVER
        if self._response is not None:
            self._response.abort()
        try:
            self._observer.on_end(end, self._status, self._loop.time() - self._started_at)
        except Exception:
            # Whoever ends it has more to do: close the connection, look at the next one.
            logger.exception("the end of a request could not be recorded")
        try:
            self._on_over()
        except Exception:
            logger.exception("what a request held could not be given back")
