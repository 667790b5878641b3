"""The compiled data plane before a small handler, on a real socket."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from router.plane.attempts import RetryLimits
from router.plane.data_plane import DataPlane
from router.plane.exchanges import PlaneExchange
from router.plane.relays import PlaneProxy
from router.plane.secured import Secured
from tests.router.proxy_server import NOBODY_LISTENS, TIMEOUTS, NothingPrepared, plane_options
from tests.support.http_client import HttpClient, connect
from tests.support.waiting import eventually


@dataclass(frozen=True)
class Seen:
    """A whole request."""

    path: str
    body: bytes
    headers: dict[bytes, bytes]


class Waiting:
    """A request; it is responded to when the test says so, or at once where `Served.goes` is set.

    At /refused it gets 401 before its body is read, at /ignored its body is never read, at
    /large there is no memory for it, and /other leaves no trace.
    """

    def __init__(self, served: Served, exchange: PlaneExchange) -> None:
        self._served = served
        self.exchange = exchange
        self._body = b""

    def proceed(self) -> None:
        """More of the body is there."""
        exchange, served = self.exchange, self._served
        if exchange.path == "/other":
            self.respond()
            return
        if exchange.path == "/ignored":
            served.waiting = [self]
            return
        if exchange.path == "/large":
            raise MemoryError
        self._body += exchange.take_body()
        if exchange.path == "/refused":
            self.respond(b"no", 401)
        elif exchange.more_body:
            exchange.ask_for_body()
        else:
            served.requests.append(Seen(exchange.path, self._body, dict(exchange.headers)))
            served.waiting.append(self)
            if served.goes:
                self.respond(self._body or b"ok")

    def respond(self, body: bytes = b"ok", status: int = 200, has_length: bool = True) -> None:
        """Respond; without a length the plane frames the body as the client knows it."""
        length = [(b"content-length", b"%d" % len(body))] if has_length else []
        self.exchange.respond(status, length, body)

    def client_left(self) -> None:
        """The plane says so."""
        self._served.left.append(self.exchange.path)


@dataclass
class Served:
    """What came of the requests."""

    goes: bool = True
    port: int = 0
    begun: list[str] = field(default_factory=list)
    requests: list[Seen] = field(default_factory=list)
    waiting: list[Waiting] = field(default_factory=list)
    """Those that are whole, responded to or not."""
    left: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    clients_by_thread: Callable[[], list[int]] = list
    plane: DataPlane = field(init=False)

    def clients(self) -> int:
        """Return the open connections of clients."""
        return sum(self.clients_by_thread())

    def opens(
        self, method: str, path: str, query: bytes
    ) -> Callable[[PlaneExchange], Waiting] | None:
        """Every request is for the handler, but for those to /application."""
        if path == "/application":
            return None
        if path != "/other":
            self.begun.append(path)
        return lambda exchange: Waiting(self, exchange)

    async def until_waiting(self, count: int = 1) -> Waiting:
        """The newest of so many requests, once they are there."""
        await eventually(lambda: len(self.waiting) == count, "the request is under way")
        return self.waiting[-1]

    async def gets_around(self) -> None:
        """The plane's thread has looked at everything that was there before."""
        async with connect(self.port) as other:
            assert (await other.ask("GET", "/other")).status == 200


@contextlib.asynccontextmanager
async def plane_server(
    threads: int = 1, control_path: str = "", **options: Any
) -> AsyncIterator[Served]:
    """A plane, until the block ends; then no connection and no request is left.

    Args:
        threads: How many it has.
        control_path: The socket of the application behind.
        options: Of `PlaneOptions`.
    """
    served = Served()
    listener = NOBODY_LISTENS._replace(on_refusal=served.refusals.append)
    chosen = replace(plane_options(), **options)
    proxy = PlaneProxy(TIMEOUTS, RetryLimits(), lambda what: None)
    plane = served.plane = DataPlane(
        served, proxy, chosen, control_path, listener, NothingPrepared()
    )
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        plane.start([os.dup(listening.fileno()) for _ in range(threads)], Secured(None, None))
        served.port = listening.getsockname()[1]
        served.clients_by_thread = plane.plane.clients
        try:
            yield served
        finally:
            plane.cut_all()
            await eventually(lambda: served.clients() == 0, "every client's socket is closed")
            await plane.close()


@contextlib.asynccontextmanager
async def one_client(
    receive_buffer: int | None = None, **options: Any
) -> AsyncIterator[tuple[Served, HttpClient]]:
    """A plane, and a client that has just been accepted.

    Args:
        receive_buffer: What the kernel takes for a client that does not read.
        options: Of `PlaneOptions`.
    """
    async with plane_server(**options) as served, connect(served.port, receive_buffer) as client:
        await eventually(lambda: served.clients() == 1, "it is accepted")
        yield served, client
