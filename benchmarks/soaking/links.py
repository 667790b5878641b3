"""TCP that can be cut or held up, and a balancer on top of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from enum import Enum
from typing import cast

from tests.support.http_client import ask

_FULL_BYTES = 1 << 20


class Line(Enum):
    """The way in which a link treats its connections."""

    OPEN = "open"
    SILENT = "silent"
    """Connections are accepted, and no byte passes until it is open again."""
    CUT = "cut"
    """Connections are reset."""


class _End(asyncio.Protocol):
    """One side of a connection; what it receives goes to the other side."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.other: _End | None = None
        self.transport: asyncio.Transport | None = None
        self._early = bytearray()
        self.has_ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._link.opened(self)

    def join(self, other: _End) -> None:
        """Pass on what came before the other side was connected, and all that follows."""
        self.other = other
        if self._early and other.transport is not None:
            other.transport.write(bytes(self._early))

    def data_received(self, data: bytes) -> None:
        if self.other is None or self.other.transport is None:
            self._early += data
        else:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self._link.line is Line.OPEN and self.other is not None and self.other.transport:
            self.other.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self.has_ended = True
        self._link.closed(self)
        if self.other is not None:
            self.other.close() if error is None else self.other.abort()

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()


class Link:
    """Listens, and connects on to *port*."""

    def __init__(self, port: int) -> None:
        self.target = port
        self.port = 0
        self.line = Line.OPEN
        self._ends: set[_End] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Accepted(self), "127.0.0.1", self.port, backlog=1024
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        self.set(Line.CUT)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def set(self, line: Line) -> None:
        """Change what becomes of the connections, those that are open included."""
        self.line = line
        for end in list(self._ends):
            if line is Line.CUT:
                end.abort()
            elif end.transport is not None and not end.transport.is_closing():
                if line is Line.SILENT:
                    end.transport.pause_reading()
                else:
                    end.transport.resume_reading()

    def accepted(self, end: _End) -> None:
        task = asyncio.get_running_loop().create_task(self._connect(end))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, end: _End) -> None:
        try:
            far = await self._far(end)
        except OSError:
            end.abort()
            return
        if end.has_ended or far.has_ended:
            end.abort()
            far.abort()
            return
        far.join(end)
        end.join(far)

    async def _far(self, end: _End) -> _End:
        del end
        return await self.connect_to(self.target)

    async def connect_to(self, port: int) -> _End:
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(lambda: _End(self), "127.0.0.1", port))[1]

    def opened(self, end: _End) -> None:
        self._ends.add(end)
        assert end.transport is not None
        end.transport.set_write_buffer_limits(_FULL_BYTES)
        if self.line is Line.CUT:
            end.abort()
        elif self.line is Line.SILENT:
            end.transport.pause_reading()

    def closed(self, end: _End) -> None:
        self._ends.discard(end)


class _Accepted(_End):
    """The side that connected to the link."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._link.accepted(self)


class Balancer(Link):
    """Gives connections in turn to those of *ports* whose /readyz says that they are ready.

    Args:
        ports: Where each target listens, by its name.
    """

    def __init__(self, ports: Mapping[str, Callable[[], int]]) -> None:
        super().__init__(0)
        self._ports = dict(ports)
        self.ready: dict[str, bool] = dict.fromkeys(ports, False)
        """The last answer of each to `/readyz`."""
        self._withdrawn: set[str] = set()
        self._turn = 0
        self.chosen: dict[int, str] = {}
        """The target chosen for a client, by the client's port, until the client forgets it."""

    async def start(self) -> None:
        await super().start()
        for name in self._ports:
            task = asyncio.get_running_loop().create_task(self._watch(name))
            self._tasks.add(task)

    def withdraw(self, name: str, is_withdrawn: bool = True) -> None:
        """Give a target no more connections, as is done before it is told to stop."""
        (self._withdrawn.add if is_withdrawn else self._withdrawn.discard)(name)

    async def _watch(self, name: str) -> None:
        while True:
            self.ready[name] = await self._is_ready(name)
            await asyncio.sleep(0.2)

    async def _is_ready(self, name: str) -> bool:
        with contextlib.suppress(OSError, EOFError, asyncio.TimeoutError):
            return (await ask(self._ports[name](), "GET", "/readyz")).status == 200
        return False

    async def _far(self, end: _End) -> _End:
        assert end.transport is not None
        client = end.transport.get_extra_info("peername")[1]
        names = list(self._ports)
        # Others take their turns while this one connects.
        self._turn = first = (self._turn + 1) % len(names)
        for name in names[first:] + names[:first]:
            if self.ready[name] and name not in self._withdrawn:
                with contextlib.suppress(ConnectionRefusedError):
                    self.chosen[client] = name
                    return await self.connect_to(self._ports[name]())
        raise ConnectionRefusedError("no router is ready")
