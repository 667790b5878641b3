"""uvicorn's protocol with two additions: an abort, and one system call for everything written
together.

ASGI has no abort. uvicorn ends an unfinished response with `transport.close()`, which first sends
everything buffered: to a client that never reads, that takes for ever, and the socket leaks. And
uvloop writes at once, so the headers and the body of a short response would be two system calls,
two packets and two wake-ups of the client.

Use it as `uvicorn.Config(http=AbortableHttpProtocol)`.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, ClassVar, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

ABORT_EXTENSION = "kvroute.abort"
RESERVE_EXTENSION = "kvroute.reserve"


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


class AbortableHttpProtocol(HttpToolsProtocol):
    """Adds the transport's `abort` to the extensions of every request's scope, and joins writes.

    The last file descriptors are a reserve for probes, scrapes and operators: a connection that
    gets one of them serves a single request, marked with `RESERVE_EXTENSION`.
    """

    reserved_from: ClassVar[int | None] = None
    """The first number of the reserve. The system hands out the lowest that is free."""
    on_reserve: ClassVar[Callable[[], None]]
    """Called when a connection has to take one of it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        bound = self.reserved_from
        self._is_of_reserve = (
            bound is not None and transport.get_extra_info("socket").fileno() >= bound
        )
        if self._is_of_reserve:
            type(self).on_reserve()
        super().connection_made(cast(asyncio.Transport, JoiningTransport(transport, self.loop)))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {ABORT_EXTENSION: {"abort": self.transport.abort}}
        if self._is_of_reserve:
            self.scope["extensions"][RESERVE_EXTENSION] = {}

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self._is_of_reserve:
            self.cycle.keep_alive = False

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if cycle.scope["http_version"] == "1.0":
            app = functools.partial(_without_chunks, app, cycle)
        super()._start_asgi_task(cycle, app)


def is_of_reserve(scope: Mapping[str, Any]) -> bool:
    """Whether the request came on one of the last file descriptors, so that nothing that needs
    another one can be done for it."""
    return RESERVE_EXTENSION in scope.get("extensions", ())


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


def client_abort(scope: Mapping[str, Any]) -> Callable[[], object] | None:
    """What closes the connection of this request's client at once; None if the server cannot."""
    extension = scope.get("extensions", {}).get(ABORT_EXTENSION)
    return None if extension is None else extension["abort"]
