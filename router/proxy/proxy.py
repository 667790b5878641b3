"""The proxy: each request goes to its candidates in turn until one gives a first byte; that one's
response is streamed to the client."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable

from router.proxy.attempts import Attempt, Failure, RequestRetries, RetryBudget, Unretried
from router.proxy.messages import (
    EventLines,
    client_headers,
    error_body,
    error_event,
    takes_events,
    upstream_headers,
)
from router.proxy.types import (
    End,
    Message,
    ProxyObserver,
    ProxyRequest,
    ProxySettings,
    Receive,
    Send,
)
from router.upstream import (
    ClosedBeforeResponse,
    ConnectFailed,
    ConnectionLimitReached,
    ConnectTimeout,
    FirstByteTimeout,
    GivenUp,
    IdleTimeout,
    KeptConnectionClosed,
    ResponseBroken,
    UpstreamClient,
    UpstreamError,
    UpstreamResponse,
)

# The replica, or a gateway in front of it, says "not now": nothing was generated, so the next
# candidate may be tried.
_UNAVAILABLE_STATUSES = frozenset((502, 503, 504))
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
_NOT_SERVED = {
    None: "no replica could serve the request",
    Unretried.LIMIT: "no replica could serve the request in the attempts it may have",
    Unretried.BUDGET: "its replica failed, and too many requests are being tried again already",
    Unretried.CLOSED: "two replicas closed the connection over the request; no other gets it",
}


class _ClientLeft(Exception):
    """The server's `send` reports that the client's connection is closed."""


class Proxy:
    """Raw ASGI in front, `UpstreamClient` behind. Belongs to one event loop."""

    def __init__(self, client: UpstreamClient, settings: ProxySettings) -> None:
        """Make a proxy.

        Args:
            client: Sends to the replicas.
            settings: Bounds on every request.
        """
        self._client = client
        self._settings = settings
        self._retry_budget = RetryBudget(settings.retries)
        self._relays: set[_Relay] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def stream(
        self,
        plan: Iterable[Attempt],
        request: ProxyRequest,
        receive: Receive,
        send: Send,
        observer: ProxyObserver,
    ) -> End:
        """Send a request to the first candidate of *plan* that gives a first byte, and its response
        to the client.

        The response to the client begins with the first body byte, not with the headers: until then
        another candidate may serve, within the limits on retries. After the last one failed, the
        client gets 502, or 503 where a replica responded with that or *plan* is empty.

        Args:
            plan: Candidates, best first; each is taken from it when it is needed.
            request: The client's request, its body read to the end.
            receive: The server's; asked only whether the client is still there.
            send: The server's; while it waits for a slow client, the replica is paused.
            observer: Hears what happens; `on_end` exactly once, in every case.
        Returns:
            How it ended.
        Raises:
            asyncio.CancelledError: The task was cancelled from outside. The replica's connection is
                closed.
        """
        loop = self._loop = self._loop or asyncio.get_running_loop()
        self._retry_budget.add_request()
        retries = RequestRetries(self._retry_budget)
        relay = _Relay(
            self._client, self._settings, retries, request, receive, send, observer, loop
        )
        self._relays.add(relay)
        if self._timer is None:
            self._timer = loop.call_later(self._settings.watch_s, self._watch, loop)
        try:
            await relay.run(plan)
        finally:
            self._relays.discard(relay)
            relay.finish()
        return relay.end

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for relay in self._relays:
            relay.watch(now)
        self._timer = (
            loop.call_later(self._settings.watch_s, self._watch, loop) if self._relays else None
        )


class _Relay:
    """The state of one proxied request, and the steps that change it."""

    __slots__ = (
        "_client",
        "_listener",
        "_loop",
        "_observer",
        "_receive",
        "_request",
        "_retries",
        "_send",
        "_sending_since",
        "_settings",
        "_started_at",
        "_status",
        "_task",
        "_unavailable",
        "_verdict",
        "end",
    )

    def __init__(
        self,
        client: UpstreamClient,
        settings: ProxySettings,
        retries: RequestRetries,
        request: ProxyRequest,
        receive: Receive,
        send: Send,
        observer: ProxyObserver,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.end = End.ABANDONED
        self._client = client
        self._settings = settings
        self._retries = retries
        self._request = request
        self._receive = receive
        self._send = send
        self._observer = observer
        self._loop = loop
        self._started_at = loop.time()
        self._task = asyncio.current_task(loop)
        self._listener: asyncio.Task[None] | None = None
        self._sending_since = 0.0
        self._verdict: End | None = None
        self._status: int | None = None
        self._unavailable = False

    async def run(self, plan: Iterable[Attempt]) -> None:
        """Proxy the request; `end` then says how it ended. Raises CancelledError if the task is
        cancelled from outside."""
        try:
            self.end = await self._serve(plan)
        except _ClientLeft:
            self.end = End.CLIENT_LEFT
        except MemoryError:
            if self._status is not None:
                raise
            self.end = await self._refuse(
                End.OVERLOADED, 503, "the router is out of memory", "overloaded"
            )
        except asyncio.CancelledError:
            if self._verdict is None or self._is_cancelled_from_outside():
                raise
            self.end = self._verdict
            if self.end is End.CLIENT_STALLED:
                await self._abort_client()

    def finish(self) -> None:
        """Stop listening, and report the end."""
        if self._listener is not None:
            self._listener.cancel()
        self._observer.on_end(self.end, self._status, self._loop.time() - self._started_at)

    # --- what may end it from outside -------------------------------------------------------------

    def watch(self, now: float) -> None:
        """Listen for the client's leaving, and end a write that has waited for too long.

        The proxy's timer calls this for all requests, so that a request costs no timer of its own;
        and only one that outlives a tick gets a listening task: most are over by then.
        """
        if self._sending_since and now - self._sending_since > self._settings.client_stall_s:
            self._interrupt(End.CLIENT_STALLED)
        elif self._listener is None and now - self._started_at >= self._settings.watch_s:
            self._listener = self._loop.create_task(self._listen())

    async def _listen(self) -> None:
        # The body was read to its end, so only a disconnect can follow.
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._interrupt(End.CLIENT_LEFT)

    def _interrupt(self, verdict: End) -> None:
        # The request's task is waiting somewhere below `run` whenever this is called, so the
        # cancellation surfaces there.
        if self._verdict is None and self._task is not None:
            self._verdict = verdict
            self._task.cancel()

    def _is_cancelled_from_outside(self) -> bool:
        """Take our own cancellation back, and return whether another one is left."""
        if sys.version_info >= (3, 11) and self._task is not None:
            return self._task.uncancel() > 0
        return False

    # --- steps ------------------------------------------------------------------------------------

    async def _serve(self, plan: Iterable[Attempt]) -> End:
        tried = False
        for attempt in plan:
            if not self._retries.start():
                break
            tried = True
            try:
                response = await self._try(attempt)
            except ConnectionLimitReached:
                return await self._refuse(
                    End.OVERLOADED, 503, "the router is at its limit of connections", "overloaded"
                )
            if response is not None:
                try:
                    return await self._deliver(attempt, response)
                finally:
                    response.abort()
        refused = self._retries.refused
        if refused is not None:
            self._observer.on_unretried(refused)
        status = 502 if tried and not self._unavailable else 503
        return await self._refuse(
            End.NO_REPLICA, status, _NOT_SERVED[refused], "no_replica_available"
        )

    async def _try(self, attempt: Attempt) -> UpstreamResponse | None:
        """Send the request to one candidate; None if it failed in a way that lets the next one be
        tried."""
        try:
            return await self._send_to(attempt)
        except KeptConnectionClosed:
            if not self._retries.start():
                return None
        return await self._send_to(attempt, may_reuse=False)

    async def _send_to(self, attempt: Attempt, may_reuse: bool = True) -> UpstreamResponse | None:
        """One attempt; None as for `_try`. Raises `KeptConnectionClosed`, after it was counted."""
        self._observer.on_attempt(attempt)
        request = self._request
        headers = upstream_headers(request, attempt)
        timeouts = request.timeouts or self._settings.timeouts
        try:
            response = await self._client.send(
                attempt.origin,
                request.method,
                request.target,
                headers,
                request.body,
                timeouts,
                may_reuse=may_reuse,
            )
        except ConnectionLimitReached:
            raise
        except UpstreamError as error:
            self._failed(attempt, _FAILURES[type(error)])
            if isinstance(error, KeptConnectionClosed):
                raise
            return None
        if response.status in _UNAVAILABLE_STATUSES:
            response.abort()
            self._unavailable = True
            self._failed(attempt, Failure.UNAVAILABLE)
            return None
        if response.status >= 500:
            self._observer.on_failure(attempt, Failure.SERVER_ERROR)
        return response

    def _failed(self, attempt: Attempt, failure: Failure) -> None:
        is_replica_lost = self._observer.on_failure(attempt, failure)
        self._retries.failed(attempt.replica_id, failure, is_replica_lost)

    async def _deliver(self, attempt: Attempt, response: UpstreamResponse) -> End:
        self._status = response.status
        self._observer.on_first_byte(attempt, self._loop.time() - self._started_at)
        headers = client_headers(response, attempt, self._request)
        events = EventLines() if takes_events(response.headers) else None
        await self._emit(
            {"type": "http.response.start", "status": response.status, "headers": headers}
        )
        try:
            await self._copy(response, events)
        except UpstreamError as error:
            return await self._break_off(attempt, events, error)
        return End.COMPLETED

    async def _copy(self, response: UpstreamResponse, events: EventLines | None) -> None:
        final = False
        while not final:
            chunk = await response.read_chunk() or b""
            final = response.at_end
            if chunk:
                self._observer.on_chunk(chunk)
            if events is not None:
                chunk = events.release(chunk, final)
            if chunk or final:
                await self._emit(
                    {"type": "http.response.body", "body": chunk, "more_body": not final}
                )

    async def _break_off(
        self, attempt: Attempt, events: EventLines | None, error: UpstreamError
    ) -> End:
        """The replica died in mid-stream: end an event stream with an error event, and any other
        body visibly too early."""
        if events is not None and events.finished:
            # It died between its last event and the end of its body: the client has everything.
            await self._emit({"type": "http.response.body", "body": b"", "more_body": False})
            return End.COMPLETED
        self._observer.on_failure(attempt, _BREAKS.get(type(error), Failure.DIED))
        if events is None:
            await self._abort_client()
            return End.REPLICA_DIED
        message = "the replica ended the stream before it was complete"
        event = error_event(self._request.dialect, message, "server_error", "replica_died")
        await self._emit(
            {"type": "http.response.body", "body": events.separator + event, "more_body": False}
        )
        return End.REPLICA_DIED

    async def _refuse(self, end: End, status: int, message: str, code: str) -> End:
        self._status = status
        body = error_body(self._request.dialect, message, "server_error", code)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"retry-after", b"%d" % self._settings.retry_after_s),
            *self._request.response_headers,
        ]
        await self._emit({"type": "http.response.start", "status": status, "headers": headers})
        await self._emit({"type": "http.response.body", "body": body, "more_body": False})
        return end

    async def _emit(self, message: Message) -> None:
        self._sending_since = self._loop.time()
        try:
            await self._send(message)
        except OSError:
            raise _ClientLeft from None
        self._sending_since = 0.0

    async def _abort_client(self) -> None:
        """Close the client's socket in mid-response. Without a way to do so, returning unfinished
        makes the server do it."""
        if self._request.abort_client is not None:
            # The listener is about to see the client's socket close, and must not report it as
            # CLIENT_LEFT.
            self._verdict = self._verdict or End.REPLICA_DIED
            self._request.abort_client()
            # Let the server see the closed socket before this call returns, or it logs an
            # application that returned without completing its response.
            await asyncio.sleep(0)
