"""Bounds on what one client's connection may cost before the application sees a request, and after
it has responded.

uvicorn bounds neither the size of a head or of trailers, nor the time that a request takes to
arrive, nor the time for which a finished response waits to be read, nor how many pipelined requests
may wait behind a slow one.
"""

from __future__ import annotations

import asyncio
import socket
import termios
from collections.abc import Callable
from dataclasses import dataclass, replace
from fcntl import ioctl
from itertools import islice
from typing import ClassVar

import httptools
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from router.http.uvicorn_protocol import (
    DirectHttpProtocol,
    Exchange,
    ExchangeHandler,
    mark_disconnected,
)
from router.proxy.messages import error_body
from router.proxy.types import Dialect

MAX_PIPELINED = 64
"""Requests that may wait behind the one being served. Few clients pipeline at all."""
MAX_PIPELINED_BYTES = 64 * 1024
"""Of their heads and bodies, all together. The connection is not read beyond it."""
RESERVED_S = 2.0
"""For a head to arrive on one of the last file descriptors, and for its client to read nothing."""
MADE_ROOM = 64
"""Connections that are closed at once where file descriptors are short: as many as the reserve has
at most. The event loop accepts fewer before those are free."""


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Bounds on each connection of a client."""

    head_bytes: int = 64 * 1024
    """Of request line and headers; and of everything between two pieces of a body: chunk
    extensions, trailers."""
    request_s: float = 60.0
    """For a head to arrive, and as long again for the body."""
    stall_s: float = 60.0
    """For which a client may read nothing of a response that waits."""
    slack_s: float = 5.0
    """Added to the times that the application watches as well: it ends such requests with a
    response, and this file without one."""

    def of_reserve(self) -> ClientLimits:
        """Those of a connection that has one of the last file descriptors."""
        return replace(
            self,
            request_s=min(self.request_s, RESERVED_S),
            stall_s=min(self.stall_s, RESERVED_S),
        )


class Refusal(str):
    """Why a connection was ended: a metric's label, one of the fixed set below."""

    __slots__ = ()


MALFORMED = Refusal("malformed_http")
HEAD_TOO_LARGE = Refusal("headers_too_large")
PIPELINED = Refusal("too_many_pipelined")
SLOW_REQUEST = Refusal("slow_request")
BAD_HOST = Refusal("bad_host")
UNKNOWN_CODING = Refusal("unknown_transfer_coding")
NOT_READ = Refusal("response_not_read")
OUT_OF_MEMORY = Refusal("overloaded")

_STATUS_LINES = {
    MALFORMED: b"HTTP/1.1 400 Bad Request\r\n",
    HEAD_TOO_LARGE: b"HTTP/1.1 431 Request Header Fields Too Large\r\n",
    PIPELINED: b"HTTP/1.1 400 Bad Request\r\n",
    BAD_HOST: b"HTTP/1.1 400 Bad Request\r\n",
    UNKNOWN_CODING: b"HTTP/1.1 501 Not Implemented\r\n",
    OUT_OF_MEMORY: b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\n",
}


_PROBE_DELAYS_S = (0.0, 0.05, 0.25)
"""After a client's FIN: the reset that one probe brings about must have come by the next."""
_TCP_CLOSE = 7
"""The state of a connection after a reset, as Linux numbers it."""
_FRAMING = (b"content-length", b"transfer-encoding")


class _OverBound(Exception):
    """Raised through the parser to stop it."""


class GuardedHttpProtocol(DirectHttpProtocol):
    """`DirectHttpProtocol` within `ClientLimits`. Call `look_after` about once a second.

    A refused connection gets an error response, and whatever else its client sends is discarded for
    a moment: if it were closed at once, the client would see a reset before it read the response.

    Where file descriptors are short, connections that never brought a request make room for those
    that come: nobody can keep probes out by connecting and saying nothing.
    """

    limits: ClientLimits = ClientLimits()
    on_refusal: ClassVar[Callable[[Refusal], None]]
    strangers: ClassVar[dict[GuardedHttpProtocol, None]] = {}
    """Connections of this server on which no head has come whole yet, oldest first: each server
    has a class of its own."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.strangers = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._raw_transport = transport
        self._receiving_since: float | None = self.loop.time()
        self._is_in_head = True
        self._unframed_bytes = 0
        self._violation = MALFORMED
        self._refused_at: float | None = None
        self._deferred: Refusal | None = None
        self._has_left_half = False
        self.probes_left = len(_PROBE_DELAYS_S)
        self._unsent_bytes = 0
        self._stalled_since: float | None = None
        self._has_declined_upgrade = False
        self._drops_trailers = False
        self._is_cut = False
        super().connection_made(transport)
        if self.is_of_reserve:
            self.limits = self.limits.of_reserve()
            self._make_room()
        self.strangers[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        self.strangers.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused_at is not None or self._deferred is not None:
            return
        self.idle_since = None
        if self._receiving_since is None:
            self._receiving_since = self.loop.time()
        self._unframed_bytes += len(data)
        is_well_formed = self._feed(data)
        self._proceed()
        if self.pipeline:
            self._hold_back()
        if not is_well_formed:
            self._refuse(self._violation)
        elif self._unframed_bytes > self.limits.head_bytes:
            self._refuse(HEAD_TOO_LARGE)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Serve the requests that are complete, unless the client has left altogether.

        A client that only stops sending (`shutdown`, netcat) cannot be told at once from one that
        has closed its socket: both send FIN. But the kernel of the latter resets the connection
        when something comes, and the next write meets that reset. While the response is silent,
        probes take the place of what it would write:

            not begun          an interim response, which every client must skip (RFC 9110 15.2)
            between chunks     a leading zero of the next chunk's length (RFC 9112 7.1)
            of known length,   nothing can be sent: a client that has left is noticed by the next
            or HTTP/1.0        byte of the response
        """
        running = self._running
        if running is None or running.response_complete or running.more_body:
            return False
        self._has_left_half = True
        self._receiving_since = None
        for delay_s in _PROBE_DELAYS_S:
            self.loop.call_later(delay_s, self._probe, running)
        return True

    def look_after(self, now: float) -> None:
        """End the connection if it is over its time, or was reset since its client stopped
        sending: nothing is read from it any more that would tell."""
        if self._has_left_half and _is_reset(self._raw_transport):
            self.abort()
        if self.idle_since is not None and now - self.idle_since > self.timeout_keep_alive:
            self.transport.close()
        reason = None if self._is_cut else self._overdue(now)
        if reason is not None:
            if self._refused_at is None:
                type(self).on_refusal(reason)
            self.abort()

    def abort(self) -> None:
        """Close the connection, whatever is under way on it."""
        self._is_cut = True
        super().abort()

    # --- what the parser calls --------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._receiving_since is None:
            self._receiving_since = self.loop.time()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if (
            self._unframed_bytes > self.limits.head_bytes
            and self._head_bytes() > self.limits.head_bytes
        ):
            self._violation = HEAD_TOO_LARGE
            raise _OverBound
        if len(self.pipeline) >= MAX_PIPELINED:
            self._violation = PIPELINED
            raise _OverBound
        self._check_head()
        self.strangers.pop(self, None)
        self._is_in_head = False
        super().on_headers_complete()
        if self.parser.should_upgrade():
            self.cycle.keep_alive = False
        # Trailers follow, which must not be merged into the headers (RFC 9110 6.5.1), so not into
        # the scope either.
        self.headers = []

    def on_body(self, body: bytes) -> None:
        self._unframed_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # only the head is complete, see `_BodyReader`
        self._unframed_bytes = 0
        self._receiving_since = None
        self._is_in_head = True
        if self._drops_trailers:
            self._drop_trailers(False)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.pipeline:
            self._hold_back()
        if self._running is not None or self.transport.is_closing():
            return
        if self._deferred is not None:
            self._respond_with(self._deferred)
        elif self._has_left_half:
            self.transport.close()

    # --- steps ------------------------------------------------------------------------------------

    def _make_room(self) -> None:
        """Close the oldest connections that have brought no request."""
        silent = (each for each in self.strangers if not each._has_unread_bytes())
        for stranger in list(islice(silent, MADE_ROOM)):
            del self.strangers[stranger]
            stranger.abort()

    def _has_unread_bytes(self) -> bool:
        """Whether the kernel has something of the client's that the event loop has not read yet."""
        descriptor = self._raw_transport.get_extra_info("socket").fileno()
        return ioctl(descriptor, termios.FIONREAD, bytes(4)) != bytes(4)

    def _feed(self, data: bytes) -> bool:
        """Parse *data*; False if it is malformed or over a bound."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            return self._decline_upgrade() and self._feed_body(data[upgrade.args[0] :])
        except MemoryError:
            self._violation = OUT_OF_MEMORY
            return False
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, MemoryError):
                self._violation = OUT_OF_MEMORY
            return False
        return True

    def _feed_body(self, data: bytes) -> bool:
        """Parse the body behind a declined upgrade; whatever follows it is ignored."""
        try:
            self.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            return False
        return True

    def _hold_back(self) -> None:
        """Read nothing more while enough waits behind the request being served."""
        if self._has_left_half or self.transport.is_closing():
            return
        if sum(_waiting_bytes(request) for request, _ in self.pipeline) > MAX_PIPELINED_BYTES:
            self.flow.pause_reading()

    def _decline_upgrade(self) -> bool:
        """Install a parser that starts right behind the head. It reads one body; the connection is
        not kept.

        Returns:
            False if the framing is invalid, which httptools does not check where a head asks for
                an upgrade.
        """
        if self._has_declined_upgrade:
            return False
        self._has_declined_upgrade = True
        framing = [
            b"%b: %b\r\n" % (name, value)
            for name, value in self.scope["headers"]
            if name in _FRAMING
        ]
        self.parser = httptools.HttpRequestParser(_BodyReader(self))
        is_valid = self._feed_body(b"POST / HTTP/1.1\r\n" + b"".join(framing) + b"\r\n")
        self._drop_trailers(True)
        return is_valid

    def _head_bytes(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def _check_head(self) -> None:
        """Raise `_OverBound` for a head that must be refused before anyone sees it."""
        hosts = 0
        for name, value in self.headers:
            if name == b"host":
                hosts += 1
            elif name == b"transfer-encoding":
                if any(coding.strip().lower() != b"chunked" for coding in value.split(b",")):
                    # RFC 9112 6.1: only chunks are decoded here.
                    self._violation = UNKNOWN_CODING
                    raise _OverBound
                self._drop_trailers(True)
        if hosts > 1 or (not hosts and self.parser.get_http_version() == "1.1"):
            # RFC 9112 3.2: two readers of one message may take two hosts for the one meant.
            self._violation = BAD_HOST
            raise _OverBound

    def _drop_trailers(self, is_body: bool) -> None:
        """Let trailers say what they will until the body ends: all are dropped, and none changes
        the framing that its head gave it (RFC 9112 7.1.2). In a head the same fields are refused.

        Args:
            is_body: Whether what follows is chunks and trailers; if not, a head.
        """
        self._drops_trailers = is_body
        self.parser.set_dangerous_leniencies(
            lenient_chunked_length=is_body, lenient_transfer_encoding=is_body
        )

    def _probe(self, running: RequestResponseCycle | Exchange) -> None:
        """Send what a client that has left will not take."""
        self.probes_left -= 1
        if running is not self._running or running.response_complete:
            return
        if not running.response_started:
            if running.scope["http_version"] == "1.1":
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        elif running.chunked_encoding and running.scope["method"] != "HEAD":
            self.transport.write(b"0")

    def _refuse(self, reason: Refusal) -> None:
        """Respond with an error and take nothing more. Requests that came whole before it get their
        responses first."""
        type(self).on_refusal(reason)
        running = self._running
        if running is None or running.response_complete:
            self._respond_with(reason)
        elif not running.more_body:
            self._deferred = reason
            self._receiving_since = None
            self._drop_incomplete()
        elif running.response_started:
            self._refused_at = self.loop.time()
            self.abort()
        else:
            # The malformed bytes are the body of the running request itself.
            mark_disconnected(running)
            self._respond_with(reason)

    def _drop_incomplete(self) -> None:
        """Do not serve a request whose own body is malformed."""
        if self.pipeline and self.pipeline[0][0].more_body:
            self.pipeline.popleft()

    def _respond_with(self, reason: Refusal) -> None:
        self._refused_at = self.loop.time()
        kind = "server_error" if reason is OUT_OF_MEMORY else "invalid_request_error"
        body = error_body(Dialect.OPENAI, self._message(reason), kind, reason)
        head = (
            b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            % len(body)
        )
        self.transport.write(_STATUS_LINES[reason] + head + body)
        # After what the transport still holds back for this turn of the loop.
        self.loop.call_soon(self._end_writing)

    def _end_writing(self) -> None:
        if not self._raw_transport.is_closing():
            self._raw_transport.write_eof()

    @property
    def _is_serving(self) -> bool:
        return self._running is not None and not self._running.response_complete

    def _message(self, reason: Refusal) -> str:
        if reason is HEAD_TOO_LARGE:
            return f"headers: longer than the limit of {self.limits.head_bytes} bytes"
        if reason is PIPELINED:
            return (
                f"request: more than {MAX_PIPELINED} requests wait on this connection; "
                "wait for responses"
            )
        if reason is OUT_OF_MEMORY:
            return "the router is out of memory; try again"
        if reason is UNKNOWN_CODING:
            return "transfer-encoding: only chunked is decoded here; send the body without others"
        if reason is BAD_HOST:
            return "host: missing, or there twice; an HTTP/1.1 request has one"
        return "request: not a well-formed HTTP/1.1 request"

    def _overdue(self, now: float) -> Refusal | None:
        limits = self.limits
        if self._refused_at is not None:
            return MALFORMED if now - self._refused_at > limits.slack_s else None
        if (
            self._receiving_since is not None
            and self._is_serving
            and (self._is_in_head or self.pipeline)
        ):
            # The next request may wait for as long as this one is being served: it is the router
            # that does not read it.
            self._receiving_since = now
        allowed_s = limits.request_s if self._is_in_head else 2 * limits.request_s + limits.slack_s
        if self._receiving_since is not None and now - self._receiving_since > allowed_s:
            return SLOW_REQUEST
        return NOT_READ if self._is_stalled(now) else None

    def _is_stalled(self, now: float) -> bool:
        """Whether the client has read nothing of what waits for it for too long.

        The clock restarts whenever the client reads, and while the application can still write:

            unsent   2 MB       4 MB       4 MB   3 MB       3 MB   ...   3 MB
            writing  yes        yes        no     no         no           no
            clock    starts     restarts   runs   restarts   runs   ...   past the bound: stalled
        """
        before, self._unsent_bytes = self._unsent_bytes, self._raw_transport.get_write_buffer_size()
        if not self._unsent_bytes:
            self._stalled_since = None
            return False
        is_writing = self._is_serving and not self.flow.write_paused
        if self._stalled_since is None or self._unsent_bytes < before or is_writing:
            self._stalled_since = now
        return now - self._stalled_since > self.limits.stall_s + self.limits.slack_s


def _waiting_bytes(request: RequestResponseCycle | Exchange) -> int:
    body_bytes = request.waiting_bytes if isinstance(request, Exchange) else len(request.body)
    return body_bytes + sum(len(name) + len(value) for name, value in request.scope["headers"])


def _is_reset(transport: asyncio.Transport) -> bool:
    if not hasattr(socket, "TCP_INFO"):
        return False
    sock = transport.get_extra_info("socket")
    state = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    return bool(state == _TCP_CLOSE)


class _BodyReader:
    """The callbacks of a parser for the body behind a head that asked for an upgrade.

    httptools takes such a head for the whole message, and the bytes after it for another protocol.
    But the router offers no upgrade, so they are the body (RFC 9110 7.8). Java's own client asks
    for HTTP/2 in this way with every first request.
    """

    def __init__(self, protocol: GuardedHttpProtocol) -> None:
        self._protocol = protocol
        self._is_complete = False

    def on_body(self, body: bytes) -> None:
        if not self._is_complete:
            self._protocol.on_body(body)

    def on_message_complete(self) -> None:
        if not self._is_complete:
            self._is_complete = True
            self._protocol.on_message_complete()


def guarded_protocol(
    client_limits: ClientLimits,
    on_refusal: Callable[[Refusal], None],
    exchange_handler: ExchangeHandler | None = None,
) -> type[GuardedHttpProtocol]:
    """Make the protocol class for `uvicorn.Config(http=...)`.

    Args:
        client_limits: Of every connection.
        on_refusal: Called with the reason for each connection that is ended.
        exchange_handler: Takes the requests that are served outside ASGI.
    """

    class Configured(GuardedHttpProtocol):
        limits = client_limits
        handler = exchange_handler

    Configured.on_refusal = staticmethod(on_refusal)
    return Configured
