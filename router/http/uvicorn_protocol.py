"""uvicorn's protocol with two things it lacks: an abort, and one system call for what is written
together.

ASGI knows no abort. uvicorn ends an unfinished answer with ``transport.close()``, which waits until
what is buffered was sent: for a client that never reads, that is never, and the socket is lost. And
uvloop writes at once, so that headers and body of a short answer would be two system calls, two
packets and two wake-ups of the client.

To be used as ``uvicorn.Config(http=AbortableHttpProtocol)``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

ABORT_EXTENSION = "kvroute.abort"


class JoiningTransport:
    """Writes what was written in one turn of the event loop at the turn's end; is uvicorn's
    transport in all it uses."""

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
        # It may have been lost since they were written; uvloop raises where asyncio would only
        # count.
        if not pieces or self._transport.is_closing():
            return
        if len(pieces) == 1:
            self._transport.write(pieces[0])
        else:
            self._transport.writelines(pieces)

    # A __getattr__ for these would slow every look-up down, also those of the methods above.

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._transport.set_protocol(protocol)


class AbortableHttpProtocol(HttpToolsProtocol):
    """Puts the transport's ``abort`` among the extensions of every request's scope, and joins
    writes."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, JoiningTransport(transport, self.loop)))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {ABORT_EXTENSION: {"abort": self.transport.abort}}


def client_abort(scope: Mapping[str, Any]) -> Callable[[], object] | None:
    """The abort of this request's client, if the server offers one: for
    `ProxyRequest.abort_client`."""
    extension = scope.get("extensions", {}).get(ABORT_EXTENSION)
    return None if extension is None else extension["abort"]
