"""An HTTP client over one plain connection: the test decides when a request is written and its
response is read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from async_timeout import timeout

from tests.support.resets import abort_by_reset
from tests.support.waiting import DEADLINE_S


@dataclass(frozen=True)
class Answer:
    """A whole response, with header names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, str]:
        """The error in the body, which must have OpenAI's shape and nothing else."""
        answer = self.json
        assert set(answer) - {"type"} == {"error"}, answer
        assert set(answer["error"]) == {"message", "type", "code"}, answer
        return dict(answer["error"])


def encoded(body: object) -> bytes:
    """A body as bytes; anything but bytes becomes JSON."""
    return body if isinstance(body, bytes) else json.dumps(body).encode()


def request_bytes(
    method: str, target: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> bytes:
    """One whole request."""
    lines = [f"{method} {target} HTTP/1.1", "host: router"]
    if body or method == "POST":
        lines.append(f"content-length: {len(body)}")
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


@dataclass
class HttpClient:
    """One connection. After `send`, read with `read_head` and then `read_piece` or `read_body`."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)

    async def send(
        self, method: str, target: str, body: object = b"", headers: Mapping[str, str] | None = None
    ) -> None:
        await self.write(request_bytes(method, target, encoded(body), headers))

    async def write(self, data: bytes) -> None:
        """Write bytes unchanged."""
        self.writer.write(data)
        await self.writer.drain()

    async def ask(
        self, method: str, target: str, body: object = b"", headers: Mapping[str, str] | None = None
    ) -> Answer:
        await self.send(method, target, body, headers)
        return await self.read_answer()

    async def read_answer(self) -> Answer:
        await self.read_head()
        return Answer(self.status, self.headers, await self.read_body())

    async def read_head(self, within_s: float = DEADLINE_S) -> int:
        async with timeout(within_s):
            raw = await self.reader.readuntil(b"\r\n\r\n")
        first, *lines = raw.decode("latin-1").split("\r\n")[:-2]
        self.status = int(first.split(" ")[1])
        pairs = [line.split(": ", 1) for line in lines]
        self.headers = {name.lower(): value for name, value in pairs}
        assert len(self.headers) == len(pairs), f"a header is there twice: {pairs}"
        return self.status if self.status >= 200 else await self.read_head(within_s)

    async def read_piece(self, within_s: float = DEADLINE_S) -> bytes:
        """One chunk as the server wrote it; b"" is the regular end."""
        async with timeout(within_s):
            size = int(await self.reader.readuntil(b"\r\n"), 16)
            return (await self.reader.readexactly(size + 2))[:-2]

    async def read_body(self) -> bytes:
        """The whole body. Raises IncompleteReadError if it ends too early."""
        if self.status in (204, 304):
            return b""
        if "content-length" in self.headers:
            async with timeout(DEADLINE_S):
                return await self.reader.readexactly(int(self.headers["content-length"]))
        body = b""
        while piece := await self.read_piece():
            body += piece
        return body

    async def is_closed(self, within_s: float = DEADLINE_S) -> bool:
        """Wait until the server has closed, or for *within_s*."""
        try:
            async with timeout(within_s):
                while await self.reader.read(65_536):
                    pass
        except ConnectionError:
            return True
        except asyncio.TimeoutError:
            return False
        return True

    def leave(self, reset: bool = False) -> None:
        """Close at once; *reset*: with RST, as a crashed host does."""
        if reset:
            abort_by_reset(self.writer)
        else:
            self.writer.close()


@contextlib.asynccontextmanager
async def connect(port: int, receive_buffer: int | None = None) -> AsyncIterator[HttpClient]:
    """Connect to 127.0.0.1; *receive_buffer* bounds what the kernel accepts for a client that does
    not read."""
    sock = socket.socket()
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    except OSError:
        sock.close()
        raise
    reader, writer = await asyncio.open_connection(
        sock=sock, limit=2**16 if receive_buffer is None else 1024
    )
    try:
        yield HttpClient(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def ask(
    port: int,
    method: str,
    target: str,
    body: object = b"",
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """Send one request on a new connection."""
    async with connect(port) as client:
        return await client.ask(method, target, body, headers)
