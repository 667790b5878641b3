"""HTTP by hand, for tests that need control of every byte and of every close."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from async_timeout import timeout

from router.config.origin import Origin
from tests.support.resets import abort_by_reset


@dataclass(frozen=True)
class RawRequest:
    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        """The only value of that header; None if it is absent."""
        values = [value for key, value in self.headers if key.lower() == name]
        assert len(values) <= 1, values
        return values[0] if values else None


@dataclass
class RawConnection:
    """One accepted connection, in the hands of a test's handler."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    async def read_request(self) -> RawRequest | None:
        """The next request; None if the peer closed before one began."""
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        first, *lines = head.decode("latin-1").split("\r\n")[:-2]
        method, target, _ = first.split(" ")
        headers = [(name, value) for name, _, value in (line.partition(": ") for line in lines)]
        length = int(
            next((value for name, value in headers if name.lower() == "content-length"), "0")
        )
        return RawRequest(method, target, headers, await self.reader.readexactly(length))

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def send_chunk(self, data: bytes) -> None:
        """One chunk of a chunked body; the empty one ends it."""
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))

    async def wait_closed(self) -> None:
        """Return when the peer has closed; fail if it says anything more."""
        with contextlib.suppress(ConnectionError):
            assert await self.reader.read(1) == b"", "more bytes instead of a close"
        self.gone.set()

    def reset(self) -> None:
        abort_by_reset(self.writer)


Handler = Callable[[RawConnection], Awaitable[None]]


@dataclass
class RawServer:
    """A listening server whose handler owns each connection; what it received and how often stands
    here."""

    port: int
    accepted: int = 0
    closed: int = 0
    failures: list[BaseException] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def origin(self) -> Origin:
        return Origin.parse(self.url)


@contextlib.asynccontextmanager
async def raw_server(
    handler: Handler, port: int = 0, tls: object = None
) -> AsyncIterator[RawServer]:
    """Serve until the block ends; an assertion that failed in the handler fails the test."""
    tasks: set[asyncio.Task[None]] = set()
    writers: set[asyncio.StreamWriter] = set()

    async def run(connection: RawConnection) -> None:
        server.accepted += 1
        try:
            await handler(connection)
        except ConnectionError:
            pass
        except AssertionError as error:
            server.failures.append(error)
        except asyncio.CancelledError:
            connection.reset()
            raise
        finally:
            server.closed += 1
            connection.writer.close()
            with contextlib.suppress(ConnectionError, OSError):
                await connection.writer.wait_closed()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.add(writer)
        task = asyncio.get_running_loop().create_task(run(RawConnection(reader, writer)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    listener = await asyncio.start_server(accept, "127.0.0.1", port, ssl=tls, backlog=2048)  # type: ignore[arg-type]
    server = RawServer(listener.sockets[0].getsockname()[1])
    try:
        yield server
    finally:
        listener.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # Connections that were just being accepted have closed nothing; neither have tasks that
        # were cancelled before they began.
        for _ in range(3):
            for writer in writers:
                writer.transport.abort()
            await asyncio.sleep(0)
        await listener.wait_closed()
    if server.failures:
        raise server.failures[0]


@contextlib.contextmanager
def full_listener() -> Iterator[Origin]:
    """An address where connections neither come about nor are refused, as with a host that drops
    packets.

    Linux takes backlog + 1 connections that are not accepted, and leaves further ones unanswered.
    """
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as listener,
        contextlib.ExitStack() as stack,
    ):
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield Origin.parse(f"http://127.0.0.1:{listener.getsockname()[1]}")


def answer(body: bytes = b"{}", status: str = "200 OK", *headers: str) -> bytes:
    """A whole answer with a content-length."""
    lines = [
        f"HTTP/1.1 {status}",
        f"content-length: {len(body)}",
        "content-type: application/json",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def answering(*answers: bytes) -> Handler:
    """A handler that gives the same bytes to every request, keeping the connection."""

    async def handle(connection: RawConnection) -> None:
        while await connection.read_request() is not None:
            for part in answers:
                await connection.send(part)

    return handle


EVENT_STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


@dataclass
class RawClient:
    """A client connection that shows what was really sent."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)

    async def request(
        self, body: bytes = b"{}", *headers: str, target: str = "/v1/completions"
    ) -> None:
        lines = [
            f"POST {target} HTTP/1.1",
            "host: router",
            f"content-length: {len(body)}",
            *headers,
        ]
        self.writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        await self.writer.drain()

    async def read_head(self) -> int:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")[:-2]
        pairs = [line.split(": ", 1) for line in head[1:]]
        self.headers = dict(pairs)
        assert len(self.headers) == len(pairs), f"a header is there twice: {pairs}"
        self.status = int(head[0].split(" ")[1])
        return self.status if self.status >= 200 else await self.read_head()

    async def read_piece(self, within_s: float | None = None) -> bytes:
        """One chunk as the server wrote it; b"" is the regular end."""
        async with timeout(within_s):
            size = int(await self.reader.readuntil(b"\r\n"), 16)
            return (await self.reader.readexactly(size + 2))[:-2]

    async def read_body(self) -> bytes:
        """The whole body. Raises IncompleteReadError where it ends too early."""
        if "content-length" in self.headers:
            return await self.reader.readexactly(int(self.headers["content-length"]))
        body = b""
        while piece := await self.read_piece():
            body += piece
        return body

    async def ask(
        self, body: bytes = b"{}", *headers: str, target: str = "/v1/completions"
    ) -> bytes:
        await self.request(body, *headers, target=target)
        await self.read_head()
        return await self.read_body()

    def leave(self) -> None:
        self.writer.close()

    def reset(self) -> None:
        abort_by_reset(self.writer)


@contextlib.asynccontextmanager
async def raw_client(port: int) -> AsyncIterator[RawClient]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield RawClient(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
