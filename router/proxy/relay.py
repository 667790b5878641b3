"""One request: candidates in turn, then the answer of the one that gave a first byte."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from router.proxy.errors import error_body, error_event
from router.proxy.events import EventLines
from router.proxy.headers import client_headers, takes_events, upstream_headers
from router.proxy.types import (
    Attempt,
    End,
    Failure,
    Message,
    Observer,
    Outcome,
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
    IdleTimeout,
    ResponseBroken,
    UpstreamClient,
    UpstreamError,
    UpstreamResponse,
)

# The replica or a gateway before it says "not now": nothing was generated, so another replica may
# be asked.
_UNAVAILABLE_STATUSES = frozenset((502, 503, 504))
_FAILURES: dict[type[UpstreamError], Failure] = {
    ConnectFailed: Failure.CONNECT,
    ConnectTimeout: Failure.CONNECT,
    ClosedBeforeResponse: Failure.CLOSED,
    FirstByteTimeout: Failure.FIRST_BYTE_TIMEOUT,
    ResponseBroken: Failure.MALFORMED,
}


class _ClientGone(Exception):
    """The server's ``send`` says that the client's connection is closed."""


class Relay:
    """The state of one proxied request, and the steps that change it."""

    __slots__ = (
        "_attempt",
        "_attempts",
        "_body_bytes",
        "_client",
        "_first_byte_s",
        "_listener",
        "_loop",
        "_observer",
        "_receive",
        "_request",
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
        request: ProxyRequest,
        receive: Receive,
        send: Send,
        observer: Observer,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.end = End.ABANDONED
        self._client = client
        self._settings = settings
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
        self._attempt: Attempt | None = None
        self._attempts = 0
        self._status: int | None = None
        self._first_byte_s: float | None = None
        self._body_bytes = 0
        self._unavailable = False

    async def run(self, plan: Sequence[Attempt]) -> None:
        """Proxy the request; `end` tells how it went. Raises CancelledError if somebody else
        cancels the task."""
        try:
            self.end = await self._serve(plan)
        except _ClientGone:
            self.end = End.CLIENT_LEFT
        except asyncio.CancelledError:
            if self._verdict is None or self._cancelled_by_others():
                raise
            self.end = self._verdict
            if self.end is End.CLIENT_STALLED:
                await self._abort_client()

    def outcome(self) -> Outcome:
        return Outcome(
            self.end,
            self._status,
            self._attempt,
            self._attempts,
            self._first_byte_s,
            self._loop.time() - self._started_at,
            self._body_bytes,
        )

    # What may end it from outside: looked at by a timer of the proxy, so that a request costs no
    # timer of its own.

    def watch(self, now: float) -> None:
        """Listen for the client's leaving, and end a write that waits for too long.

        Only a request that outlives one tick gets a listening task: most short ones are over by
        then.
        """
        if self._sending_since and now - self._sending_since > self._settings.client_stall_s:
            self._interrupt(End.CLIENT_STALLED)
        elif self._listener is None and now - self._started_at >= self._settings.watch_s:
            self._listener = self._loop.create_task(self._listen())

    def stop_watching(self) -> None:
        if self._listener is not None:
            self._listener.cancel()

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

    def _cancelled_by_others(self) -> bool:
        """Take our own cancellation back; whether another one is left."""
        if sys.version_info >= (3, 11) and self._task is not None:
            return self._task.uncancel() > 0
        return False

    # Steps

    async def _serve(self, plan: Sequence[Attempt]) -> End:
        for attempt in plan:
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
        status = 503 if self._unavailable or not plan else 502
        return await self._refuse(
            End.NO_REPLICA, status, "no replica could serve the request", "no_replica_available"
        )

    async def _try(self, attempt: Attempt) -> UpstreamResponse | None:
        """Send the request to one candidate; None if it failed in a way that lets the next one be
        tried."""
        self._attempts += 1
        self._observer.on_attempt(attempt)
        request = self._request
        headers = upstream_headers(request, attempt)
        timeouts = request.timeouts or self._settings.timeouts
        try:
            response = await self._client.send(
                attempt.origin, request.method, request.target, headers, request.body, timeouts
            )
        except ConnectionLimitReached:
            raise
        except UpstreamError as error:
            self._observer.on_failure(attempt, _FAILURES[type(error)])
            return None
        if response.status in _UNAVAILABLE_STATUSES:
            response.abort()
            self._unavailable = True
            self._observer.on_failure(attempt, Failure.UNAVAILABLE)
            return None
        if response.status >= 500:
            self._observer.on_failure(attempt, Failure.SERVER_ERROR)
        return response

    async def _deliver(self, attempt: Attempt, response: UpstreamResponse) -> End:
        self._attempt = attempt
        self._status = response.status
        self._first_byte_s = self._loop.time() - self._started_at
        self._observer.on_first_byte(attempt, self._first_byte_s)
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
                self._body_bytes += len(chunk)
                self._observer.on_chunk(chunk)
            if events is not None:
                chunk = events.release(
                    chunk, final
                )  # at the end also what it holds, if the end comes alone
            if chunk or final:
                await self._emit(
                    {"type": "http.response.body", "body": chunk, "more_body": not final}
                )

    async def _break_off(
        self, attempt: Attempt, events: EventLines | None, error: UpstreamError
    ) -> End:
        """The replica died in mid-stream: say so in an event stream, and let any other body end
        visibly too early."""
        if events is not None and events.finished:
            # It died between its last event and the end of its body: the client has all of it.
            await self._emit({"type": "http.response.body", "body": b"", "more_body": False})
            return End.COMPLETED
        self._observer.on_failure(
            attempt, Failure.IDLE_TIMEOUT if isinstance(error, IdleTimeout) else Failure.DIED
        )
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
            raise _ClientGone from None
        self._sending_since = 0.0

    async def _abort_client(self) -> None:
        """Close the client's socket in mid-answer. Without a way to do so, returning unfinished
        makes the server do it."""
        if self._request.abort_client is not None:
            # The listener is about to see the client go, and must not take that for its own wish.
            self._verdict = self._verdict or End.REPLICA_DIED
            self._request.abort_client()
            # Let the server see the loss before this call returns, or it reports an application
            # that forgot to finish.
            await asyncio.sleep(0)
