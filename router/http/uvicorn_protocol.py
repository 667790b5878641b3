"""uvicorn's protocol with a way around ASGI for the requests that need to be fast.

An ASGI application costs a task, an event, a queue of messages and some dictionaries per request,
and a task's turn for every piece of a stream. The requests that an `ExchangeHandler` takes go
without: each is an `Exchange`, told about what arrives by plain calls, and what it sends goes to
the socket in one call. All other requests, and everything else about connections, are uvicorn's.

    uvicorn's parser ──> on_headers_complete ──┬─> Exchange ──> ExchangeHandler
                                               └─> RequestResponseCycle ──> the ASGI application

The protocol also has an abort, which uvicorn has not: it ends an unfinished response with
`transport.close()`, which first sends everything buffered: to a client that never reads, that takes
for ever, and the socket leaks. And it joins what an ASGI application writes in one turn of the
event loop, since uvloop would make two system calls and two packets of headers and body.
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, ClassVar, Protocol, TypeAlias, cast
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from router.upstream import Header
from router.upstream.turns import PacedJobs

_MAX_WAITING_BYTES = 64 * 1024
"""Of a body that nobody takes: its turn has not come, or its request was refused and the refusal is
held back. The connection is not read beyond it."""
_WITHOUT_BODY = frozenset((204, 304))
_UNSAFE = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


class ExchangeHandler(Protocol):
    """Takes requests off a connection, and serves them."""

    def opens(
        self, method: str, path: str, query: bytes
    ) -> Callable[[Exchange], ExchangeServer] | None:
        """What serves a request; None leaves it to the ASGI application.

        Args:
            method: Of the request.
            path: Of the request, decoded.
            query: As on the wire.
        """


class ExchangeServer(Protocol):
    """Serves one exchange. No call may raise."""

    def proceed(self) -> None:
        """More of the request has arrived. Called first when it is the request's turn."""

    def client_reads(self) -> None:
        """The client has read most of what waited for it."""

    def client_left(self) -> None:
        """The client's connection is closed, and the response is not complete."""

    def cancel(self) -> None:
        """End it at once: the router stops."""


class Exchange:
    """One request outside ASGI: what has arrived of it, and the way back.

    In its connection it stands where uvicorn has a `RequestResponseCycle`. Of that it has what
    uvicorn and the connection guard read and write: the first group of attributes.
    """

    __slots__ = (
        "_connection",
        "_left_bytes",
        "_pieces",
        "body_bytes",
        "chunked_encoding",
        "client",
        "disconnected",
        "expects_continue",
        "headers",
        "is_of_reserve",
        "keep_alive",
        "message_event",
        "method",
        "more_body",
        "path",
        "response_complete",
        "response_started",
        "scope",
        "server",
        "status",
        "target",
        "waiting_bytes",
    )

    def __init__(
        self,
        connection: DirectHttpProtocol,
        method: str,
        path: str,
        target: bytes,
        keep_alive: bool,
    ) -> None:
        self.scope: MutableMapping[str, Any] = connection.scope  # type: ignore[assignment]
        self.keep_alive = keep_alive
        self.more_body = True
        self.disconnected = False
        self.response_started = False
        self.response_complete = False
        self.message_event = _NOBODY_WAITS

        self.method = method
        self.path = path
        """Decoded."""
        self.target = target
        """Path and query as on the wire."""
        self.headers: list[Header] = connection.headers
        """As received, names in lower case."""
        self.client = connection.client_host
        """The client's address."""
        self.is_of_reserve = connection.is_of_reserve
        """Whether it came on one of the last file descriptors, so that nothing that needs another
        one can be done for it."""
        self.status: int | None = None
        self.body_bytes = 0
        """Sent so far."""
        self.waiting_bytes = 0
        """Of the body, received and not taken."""
        self.server: ExchangeServer | None = None
        self.expects_continue = connection.expect_100_continue
        self.chunked_encoding = False
        self._connection = connection
        self._pieces: list[bytes] = []
        self._left_bytes: int | None = None

    # --- the request ------------------------------------------------------------------------------

    def receive(self, piece: bytes) -> None:
        """Keep a piece of the body until it is taken. While too much waits, nothing is read."""
        self._pieces.append(piece)
        self.waiting_bytes += len(piece)
        if self.waiting_bytes > _MAX_WAITING_BYTES:
            self._connection.flow.pause_reading()

    def take_body(self) -> bytes:
        """What has arrived of the body since the last call."""
        if self.waiting_bytes > _MAX_WAITING_BYTES:
            self._connection.flow.resume_reading()
        self.waiting_bytes = 0
        pieces, self._pieces = self._pieces, []
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def ask_for_body(self) -> None:
        """Tell a client that waits for it that its body is wanted."""
        is_understood = self.scope["http_version"] != "1.0"  # RFC 9110 10.1.1
        if self.expects_continue and is_understood and not self.response_started:
            self.expects_continue = False
            self._connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    # --- the response -----------------------------------------------------------------------------

    @property
    def is_gone(self) -> bool:
        """Whether the client has closed its connection."""
        return self.disconnected

    @property
    def is_slow(self) -> bool:
        """Whether more waits for the client to read it than should."""
        return self._connection.flow.write_paused

    def respond(self, status: int, headers: Sequence[Header], body: bytes, is_whole: bool) -> None:
        """Begin the response.

        Args:
            status: Its status.
            headers: All but those of the framing, names in lower case.
            body: The first piece of its body, or nothing yet.
            is_whole: Whether that is all of it.
        """
        if self.disconnected or self.response_started:
            return
        self.response_started = True
        self.status = status
        head = self._head(status, headers)
        if head is None:
            self.abort()
            return
        self._write(head, body, is_whole)

    def send(self, body: bytes, is_last: bool) -> None:
        """Go on with its body.

        Args:
            body: The next piece.
            is_last: Whether it is the last one.
        """
        if not self.disconnected and not self.response_complete:
            self._write(b"", body, is_last)

    def send_chunk(self, chunk: bytes, body: bytes) -> None:
        """As `send`, of a piece that came as one chunk of HTTP/1.1: it goes on as it is.

        Args:
            chunk: The piece with its framing.
            body: The piece; never the last one.
        """
        if not self.chunked_encoding or self.method == "HEAD":
            self.send(body, False)
        elif not self.disconnected and not self.response_complete:
            self.body_bytes += len(body)
            self._connection.transport.write_through(chunk)

    def abort(self) -> None:
        """Close the client's connection at once, whatever is still buffered."""
        self._connection.abort()

    def _head(self, status: int, headers: Sequence[Header]) -> bytes | None:
        """Status line and headers; None if one of them would break the framing."""
        head = STATUS_LINE[status] + b"".join([b"%b: %b\r\n" % header for header in headers])
        # Every header is one line, so any other number of line breaks means that one smuggles some.
        breaks = len(headers) + 1
        if head.count(b"\n") != breaks or head.count(b"\r") != breaks or _UNSAFE.search(head):
            return None
        known = dict(headers)
        if (length := known.get(b"content-length")) is not None:
            self._left_bytes = int(length)
        closes = b"close" in known.get(b"connection", b"").lower()
        self.keep_alive = self.keep_alive and not closes
        if self._left_bytes is None and self.method != "HEAD" and status not in _WITHOUT_BODY:
            # A client of HTTP/1.0 knows no chunks (RFC 9112 6.1): the body ends with the
            # connection.
            self.chunked_encoding = self.scope["http_version"] != "1.0"
            if self.chunked_encoding:
                head += b"transfer-encoding: chunked\r\n"
        if not self.keep_alive and not closes:
            head += b"connection: close\r\n"
        return head + b"\r\n"

    def _write(self, head: bytes, body: bytes, is_last: bool) -> None:
        self.body_bytes += len(body)
        if self._left_bytes is not None:
            self._left_bytes -= len(body)
            if self._left_bytes < 0 or (is_last and self._left_bytes and self.method != "HEAD"):
                # More or less than was announced: the client could not tell where it ends.
                self.abort()
                return
        if self.method == "HEAD":
            data = head
        elif self.chunked_encoding:
            end = b"0\r\n\r\n" if is_last else b""
            data = b"%b%x\r\n%b\r\n%b" % (head, len(body), body, end) if body else head + end
        else:
            data = head + body
        if data:
            self._connection.transport.write_through(data)
        if is_last:
            self.response_complete = True
            # The connection keeps this exchange until its next request.
            self._pieces.clear()
            if not self.keep_alive:
                self._connection.transport.close()
            self._connection.on_response_complete()


class _NobodyWaits:
    """For uvicorn, which wakes who waits for a cycle's messages."""

    def set(self) -> None:
        """Nobody waits for an exchange: it is called."""


_NOBODY_WAITS = _NobodyWaits()


class JoiningTransport:
    """Collects the writes of one turn of the event loop and sends them together at its end. Has
    every method of a transport that uvicorn calls."""

    __slots__ = ("_loop", "_pieces", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._pieces: list[bytes] = []

    def write(self, data: bytes) -> None:
        if not self._pieces:
            self._loop.call_soon(self._flush)
        self._pieces.append(data)

    def write_through(self, data: bytes) -> None:
        """Send what was collected, and *data* behind it, now."""
        if self._pieces:
            self._flush()
        if not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        self._pieces.clear()
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def _flush(self) -> None:
        pieces, self._pieces = self._pieces, []
        # The connection may have been lost since; uvloop raises where asyncio would only count.
        if not pieces or self._transport.is_closing():
            return
        if len(pieces) == 1:
            self._transport.write(pieces[0])
        else:
            self._transport.writelines(pieces)

    # A __getattr__ for these would slow down every attribute access, also to the methods above.

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """As `asyncio.BaseTransport` has it.

        Args:
            name: What to look up: `peername`, `sockname`, `socket` ...
            default: Returned where the transport does not have it.
        """
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._transport.set_protocol(protocol)


_Opening: TypeAlias = "tuple[Callable[[Exchange], ExchangeServer] | None, str, str, bytes]"
"""What serves a request, its method, its path, and both path and query as on the wire."""


class DirectHttpProtocol(HttpToolsProtocol):
    """Serves requests outside ASGI where `handler` takes them. Joins what others write.

    The last file descriptors are a reserve for probes, scrapes and operators: a connection that
    gets one of them serves a single request.
    """

    handler: ClassVar[ExchangeHandler | None] = None
    jobs: ClassVar[PacedJobs]
    """Of all connections of one server together; every subclass has its own."""
    reserved_from: ClassVar[int | None] = None
    """The first number of the reserve. The system hands out the lowest that is free."""
    on_reserve: ClassVar[Callable[[], None]]
    """Called when a connection has to take one of it."""
    transport: JoiningTransport  # type: ignore[assignment]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.jobs = PacedJobs()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        bound = self.reserved_from
        self.is_of_reserve = (
            bound is not None and transport.get_extra_info("socket").fileno() >= bound
        )
        if self.is_of_reserve:
            type(self).on_reserve()
        self._running: RequestResponseCycle | Exchange | None = None
        self._last_opening: tuple[tuple[bytes, bytes], _Opening | None] = (b"", b""), None
        self.idle_since: float | None = None
        """When the last response was complete, while nothing has come since; on the loop's clock.
        Whoever owns the connection closes it after `timeout_keep_alive`."""
        super().connection_made(cast(asyncio.Transport, JoiningTransport(transport, self.loop)))
        self.client_host = str((self.client or ("",))[0])

    def data_received(self, data: bytes) -> None:
        self.idle_since = None
        super().data_received(data)
        self._proceed()

    def connection_lost(self, exc: Exception | None) -> None:
        # uvicorn marks only the last request it has read as disconnected, which may be far behind
        # the one being served.
        running = self._running
        try:
            if running is not None and not running.response_complete:
                mark_disconnected(running)
        finally:
            super().connection_lost(exc)
            # Requests refer to their connection, too: see `Passage._close`.
            self._running = self.cycle = None  # type: ignore[assignment]
            self.pipeline.clear()

    def resume_writing(self) -> None:
        super().resume_writing()
        running = self._running
        if isinstance(running, Exchange) and running.server is not None:
            running.server.client_reads()

    def abort(self) -> None:
        """Close the connection, whatever is under way on it."""
        self.transport.abort()

    def cut(self) -> None:
        """End the exchange under way, if there is one."""
        running = self._running
        if isinstance(running, Exchange) and not running.response_complete:
            if running.server is not None:
                running.server.cancel()
            self.abort()

    # --- what the parser calls --------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        exchange = self._exchange()
        if exchange is None:
            super().on_headers_complete()
        else:
            before, self.cycle = self.cycle, exchange  # type: ignore[assignment]
            if before is not None and not before.response_complete:
                self.pipeline.appendleft((self.cycle, self.app))
        if not self.pipeline:
            self._running = self.cycle
        elif isinstance(self._running, Exchange):
            # uvicorn stops reading until the application asks for more. Without reading, nobody
            # would see the client leave.
            self.flow.resume_reading()
        if self.is_of_reserve:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        exchange = self.cycle
        if not isinstance(exchange, Exchange):
            super().on_body(body)
        elif not exchange.response_complete:
            exchange.receive(body)

    def on_message_complete(self) -> None:
        exchange = self.cycle
        if isinstance(exchange, Exchange):
            exchange.more_body = False
        else:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        self._running = self.pipeline[-1][0] if self.pipeline else None
        if self._running is not None or self.transport.is_closing():
            super().on_response_complete()
            return
        # uvicorn's own would set a timer for each response.
        self.server_state.total_requests += 1
        self.idle_since = self.loop.time()
        if self.flow.read_paused:
            self.flow.resume_reading()

    # --- steps ------------------------------------------------------------------------------------

    def _exchange(self) -> Exchange | None:
        """The request whose head has arrived, if it is to be served outside ASGI."""
        if self.handler is None:
            return None
        opens, method, path, target = self._opening(self.handler, self.parser.get_method())
        if opens is None:
            return None
        version = self.parser.get_http_version()
        self.scope["method"] = method
        self.scope["path"] = path
        self.scope["http_version"] = version
        keep_alive = version != "1.0" and self.parser.should_keep_alive()
        exchange = Exchange(self, method, path, target, keep_alive)
        exchange.server = opens(exchange)
        return exchange

    def _opening(self, handler: ExchangeHandler, method: bytes) -> _Opening:
        """What is to be done with the request; most have the method and URL of the one before."""
        asked, found = self._last_opening
        if found is None or asked != (method, self.url):
            url = httptools.parse_url(self.url)
            path = url.path.decode("ascii")
            if "%" in path:
                path = unquote(path)
            name, query = method.decode("ascii"), url.query or b""
            target = url.path + b"?" + query if query else url.path
            found = handler.opens(name, path, query), name, path, target
            self._last_opening = (method, self.url), found
        return found

    def _proceed(self) -> None:
        """Let the running exchange look at what has arrived, now or soon."""
        running = self._running
        if isinstance(running, Exchange) and running.server is not None:
            self.jobs.run(self._proceed_now)

    def _proceed_now(self) -> None:
        running = self._running
        if isinstance(running, Exchange) and not running.disconnected:
            server = running.server
            if server is not None:
                server.proceed()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if isinstance(cycle, Exchange):
            # Its turn has come. Later, since the one before it may still be about to end.
            self.loop.call_soon(self._proceed)
            return
        if cycle.scope["http_version"] == "1.0":
            app = functools.partial(_without_chunks, app, cycle)
        super()._start_asgi_task(cycle, functools.partial(_until_cancelled, app, cycle))


def mark_disconnected(request: RequestResponseCycle | Exchange) -> None:
    """Let whoever serves a request know that its client has left."""
    request.disconnected = True
    request.message_event.set()
    if isinstance(request, Exchange) and request.server is not None:
        request.server.client_left()


async def _until_cancelled(
    app: Any, cycle: RequestResponseCycle, scope: Any, receive: Any, send: Any
) -> None:
    """Run *app*. uvicorn cancels what still runs when the process ends, and would log that as a
    failure of the application."""
    try:
        await app(scope, receive, send)
    except asyncio.CancelledError:
        mark_disconnected(cycle)
        cycle.transport.abort()


async def _without_chunks(
    app: Any, cycle: RequestResponseCycle, scope: Any, receive: Any, send: Any
) -> None:
    """Run *app* for a client of HTTP/1.0, which knows no chunks (RFC 9112 6.1): a body of unknown
    length ends with the connection."""
    is_open_ended = False

    async def send_plain(message: MutableMapping[str, Any]) -> None:
        nonlocal is_open_ended
        if message["type"] == "http.response.start":
            is_open_ended = all(name != b"content-length" for name, _ in message["headers"])
            cycle.chunked_encoding = False if is_open_ended else None
        elif is_open_ended:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    await app(scope, receive, send_plain)
