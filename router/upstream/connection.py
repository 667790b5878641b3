"""One socket to one origin, carrying one exchange at a time.

httptools parses. This file decides what its events mean: which response they belong to, whether the
connection can be kept, and which bounds were exceeded.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Protocol, cast

import httptools

from router.upstream.errors import (
    ClosedBeforeResponse,
    KeptConnectionClosed,
    ResponseBroken,
)
from router.upstream.origin import Origin
from router.upstream.response import UpstreamResponse
from router.upstream.turns import LoopTurns

MAX_HEADERS = 256
# Bytes that may arrive without one byte of body among them: headers, interim responses, chunk
# framing, trailers.
MAX_UNFRAMED_BYTES = 64 * 1024
# The socket is not read while its reader is this far behind. One read of the event loop may exceed
# it.
HIGH_WATER_BYTES = 64 * 1024
MIN_PASSED_BYTES = 32
"""Of a chunk that is handed on as it came. Shorter ones may be a part of a stream's last event,
which a reader may have to see together."""
_MAX_PASSED_BYTES = 0xFFF
"""A size of more than three digits is left to the parser."""


class ConnectionPool(Protocol):
    """What a connection needs of the client that pools it."""

    turns: LoopTurns

    def connection_opened(self, connection: HttpConnection) -> None:
        """The socket is open."""

    def exchange_ended(self, response: UpstreamResponse) -> None:
        """The response is complete, failed, or was cut."""

    def recycle(self, connection: HttpConnection) -> None:
        """The connection is free for another exchange."""

    def connection_closed(self, connection: HttpConnection) -> None:
        """The socket is closed."""


class HttpConnection(asyncio.Protocol):
    """Writes a request, fills an `UpstreamResponse`, and returns itself to its pool.

    Args:
        pool: Hears of every step.
        origin: Where the socket leads.
    """

    __slots__ = (
        "_between_chunks",
        "_in_head",
        "_interim",
        "_is_held",
        "_is_in_chunk",
        "_is_kept",
        "_keep_alive",
        "_parser",
        "_paused",
        "_pool",
        "_response",
        "_transport",
        "_unframed_bytes",
        "_until_close",
        "_unwanted",
        "_violation",
        "closed",
        "idle_since",
        "origin",
    )

    def __init__(self, pool: ConnectionPool, origin: Origin) -> None:
        self.origin = origin
        self.closed = False
        self.idle_since = 0.0
        self._pool = pool
        self._parser: httptools.HttpResponseParser
        """While it is open: both refer to each other."""
        self._response: UpstreamResponse | None = None
        self._transport: asyncio.Transport | None = None
        self._violation = ""
        self._paused = False
        self._is_held = False
        self._unwanted = False
        self._is_kept = False
        self._in_head = self._interim = self._keep_alive = self._until_close = False
        self._between_chunks = False
        """What was parsed last ended with a chunk's end."""
        self._is_in_chunk = True
        """Or there are none."""
        self._unframed_bytes = 0

    def start(self, response: UpstreamResponse, head: bytes, body: bytes) -> None:
        """Write a request, and fill its response from now on.

        The connection must be idle. If it was closed in the meantime, the response fails at once.

        Args:
            response: Still empty.
            head: Request line and headers, up to and including the blank line.
            body: Follows the head.
        """
        assert self._transport is not None
        assert self._response is None
        if response.source is not self:
            response.sent(self)
        if self.closed:
            response.fail(self._closed_early("closed before the request was sent"))
            return
        self._response = response
        self._begin_head()
        if body:
            self._transport.writelines((head, body))
        else:
            self._transport.write(head)

    @property
    def file_number(self) -> int:
        """Of the open socket."""
        assert self._transport is not None
        return int(self._transport.get_extra_info("socket").fileno())

    def abort(self) -> None:
        """Close the socket at once, even if it is still being opened."""
        self._unwanted = True
        if self._transport is not None:
            self._transport.abort()

    # For its response

    def resume(self) -> None:
        """Continue to read from the socket, now that the buffer is empty."""
        if self._paused:
            self._paused = False
            self._read_on()

    def release(self) -> None:
        """The event loop has got around to what was scheduled."""
        self._is_held = False
        self._read_on()

    def cut(self) -> None:
        """Close the socket; the rest of the response is not wanted."""
        response, self._response = self._response, None
        self.abort()
        if response is not None:
            self._pool.exchange_ended(response)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpResponseParser(self)
        if self._unwanted:
            self._transport.abort()
            return
        # A request's last segment must not wait for the acknowledgement of the one before (Nagle).
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._pool.connection_opened(self)

    def data_received(self, data: bytes) -> None:
        response = self._response
        if response is None:
            # Unsolicited bytes. They could pass for the next response, so the connection cannot be
            # used again.
            self.abort()
            return
        if not (self._between_chunks and self._pass_chunk(response, data)):
            self._parse(response, data)
        if self._pool.turns.is_overdue() and not self._is_held:
            self._hold()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        del self._parser
        response, self._response = self._response, None
        self._pool.connection_closed(self)
        if response is None:
            return
        if self._until_close and exc is None:
            response.complete = True
        elif response.received:
            response.fail(
                ResponseBroken(
                    f"{self.origin}: closed before the end of its response", received=True
                )
            )
        else:
            response.fail(self._closed_early("closed before the first byte of its response"))
        self._pool.exchange_ended(response)
        response.wake()

    def _pass_chunk(self, response: UpstreamResponse, data: bytes) -> bool:
        """Hand one whole chunk to a reader that takes it as it came; False for anything else. The
        parser need not see it: it stands between two chunks, before and after.

        That is one token of a stream, so it is what a router does most.
        """
        # Its size has two digits, or three: `1f CRLF`, the chunk, CRLF.
        size = len(data) - (6 if len(data) < 262 else 7)
        if (
            not MIN_PASSED_BYTES <= size <= _MAX_PASSED_BYTES
            or not data.endswith(b"\n\r\n")
            or not data.startswith(b"%x\r\n" % size)
        ):
            return False
        if not response.offer(data, size):
            return False
        self._unframed_bytes = 0
        return True

    def _parse(self, response: UpstreamResponse, data: bytes) -> None:
        response.received = True
        self._unframed_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._violation = "an upgrade that was not requested"
        except httptools.HttpParserError:
            # Its text may quote the response; the kind of fault is enough.
            self._violation = "not a well-formed HTTP/1.1 response"
        # Digits of a size may have been parsed behind a chunk; then this does not end a line.
        self._between_chunks = not self._is_in_chunk and data.endswith(b"\r\n")
        if response.complete:
            self._finish(response)
        elif self._violation or self._unframed_bytes > MAX_UNFRAMED_BYTES:
            self._break(response)
        elif response.buffered_bytes >= HIGH_WATER_BYTES and not self._paused:
            self._pause()
        response.wake()

    # httptools.HttpResponseParser

    def on_message_begin(self) -> None:
        if self._response is not None and self._response.complete:
            self._violation = "a second response to one request"

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep one header of the final response.

        Args:
            name: As sent.
            value: Without the white space around it.
        """
        # A header after the head is a trailer (RFC 9110 6.5) and is dropped, as is everything after
        # the message.
        if self._in_head and self._response is not None:
            self._response.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if not self._in_head or self._response is None:
            return
        status = self._parser.get_status_code()
        self._interim = 100 <= status < 200
        if self._interim:
            return
        self._in_head = False
        self._response.status = status
        self._keep_alive = self._parser.should_keep_alive()
        self._until_close = not self._keep_alive and not _is_delimited(self._response)
        if not 200 <= status <= 599:
            self._violation = f"status {status} is not from 200 to 599"
        elif len(self._response.headers) > MAX_HEADERS:
            self._violation = f"more than {MAX_HEADERS} headers"
        elif not _is_plain(self._response):
            self._violation = "a transfer coding other than chunked"

    def on_chunk_header(self) -> None:
        self._is_in_chunk = True

    def on_chunk_complete(self) -> None:
        self._is_in_chunk = False

    def on_body(self, data: bytes) -> None:
        self._unframed_bytes = 0
        if self._response is not None and not self._response.complete:
            self._response.add(data)

    def on_message_complete(self) -> None:
        if self._response is None:
            return
        if self._interim:
            # 100 Continue, 102, 103: the final response follows (RFC 9110 15.2).
            self._response.headers.clear()
        elif not self._violation:
            self._response.complete = True

    # Steps

    def _closed_early(self, rule: str) -> ClosedBeforeResponse:
        kind = KeptConnectionClosed if self._is_kept else ClosedBeforeResponse
        return kind(f"{self.origin}: {rule}")

    def _begin_head(self) -> None:
        self._in_head = True
        self._interim = False
        self._keep_alive = False
        self._until_close = False
        self._between_chunks = False
        self._is_in_chunk = True
        self._unframed_bytes = 0

    def _finish(self, response: UpstreamResponse) -> None:
        self._response = None
        self._pool.exchange_ended(response)
        if self._keep_alive and not self._violation:
            if self._paused:
                self.resume()
            self._is_kept = True
            self._pool.recycle(self)
        else:
            self.abort()

    def _break(self, response: UpstreamResponse) -> None:
        rule = (
            self._violation
            or f"more than {MAX_UNFRAMED_BYTES} bytes of headers or framing in a row"
        )
        response.fail(ResponseBroken(f"{self.origin}: {rule}", received=True))
        if not response.started:
            # Nobody has seen any of it: another server may be asked.
            response.discard()
        self.cut()

    def _pause(self) -> None:
        self._stop_reading()
        self._paused = True

    def _hold(self) -> None:
        self._stop_reading()
        self._is_held = True
        self._pool.turns.hold(self)

    def _stop_reading(self) -> None:
        is_read = not (self._paused or self._is_held or self._unwanted or self.closed)
        if is_read and self._transport is not None:
            self._transport.pause_reading()

    def _read_on(self) -> None:
        is_read = not (self._paused or self._is_held or self._unwanted or self.closed)
        if is_read and self._transport is not None:
            self._transport.resume_reading()


def _is_plain(response: UpstreamResponse) -> bool:
    """Whether the body needs no decoding but that of chunks: nobody asked for more."""
    return all(
        value.strip().lower() == b"chunked"
        for name, value in response.headers
        if name == b"transfer-encoding"
    )


def _is_delimited(response: UpstreamResponse) -> bool:
    """Whether the body marks its own end, so that closing the connection earlier truncates it."""
    for name, value in response.headers:
        if name == b"content-length":
            return True
        if name == b"transfer-encoding":
            return value.lower().endswith(b"chunked")
    return False
