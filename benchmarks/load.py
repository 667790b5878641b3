"""A load generator and a stub replica on bare asyncio protocols, so that neither dominates the
measurement."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

_HEALTH = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
_USAGE = (
    b'"usage":{"prompt_tokens":9,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":0}}'
)
_BODY = b'{"id":"1","object":"text_completion","choices":[{"index":0,"text":"."}],' + _USAGE + b"}"
_ANSWER = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(_BODY)
    + _BODY
)
_EVENT = b'data: {"id":"1","choices":[{"index":0,"text":"."}]}\n\n'
_EVENTS = 32
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)
_CHUNK = b"%x\r\n" % len(_EVENT) + _EVENT + b"\r\n"
_STREAM_END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


@dataclass(slots=True)
class Load:
    """What a run measured."""

    seconds: float = 0.0
    errors: int = 0
    latencies: list[float] = field(default_factory=list)

    @property
    def per_second(self) -> float:
        return len(self.latencies) / self.seconds

    def quantile(self, share: float) -> float:
        """The latency at a quantile, in seconds."""
        ordered = sorted(self.latencies)
        return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


class _Client(asyncio.Protocol):
    """One connection that sends the next request as soon as it has the response to the last one."""

    def __init__(
        self, load: Load, next_request: Callable[[], bytes | None], done: Callable[[], None]
    ) -> None:
        self._load = load
        self._next = next_request
        self._done = done
        self._started = 0.0
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._send()

    def data_received(self, data: bytes) -> None:
        self._received = data if not self._received else self._received + data
        if not _is_whole(self._received):
            return
        if self._received.startswith(b"HTTP/1.1 200"):
            self._load.latencies.append(time.perf_counter() - self._started)
        else:
            self._load.errors += 1
        self._received = b""
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._done()

    def _send(self) -> None:
        request = self._next()
        if request is None:
            self._transport.close()
            return
        self._started = time.perf_counter()
        self._transport.write(request)


def _is_whole(data: bytes) -> bool:
    head_end = data.find(b"\r\n\r\n")
    if head_end < 0:
        return False
    head = data[:head_end].lower()
    at = head.find(b"content-length:")
    if at < 0:
        return data.endswith(b"0\r\n\r\n")
    return len(data) - head_end - 4 >= int(head[at + 15 :].split(b"\r\n", 1)[0])


async def run_load(
    port: int, make: Callable[[int], bytes | None], concurrency: int, seconds: float
) -> Load:
    """Send requests over *concurrency* connections for a time, or until *make* returns None."""
    loop = asyncio.get_running_loop()
    load = Load()
    ended = asyncio.Event()
    open_connections = concurrency
    number = 0
    stop_at = time.perf_counter() + seconds

    def next_request() -> bytes | None:
        nonlocal number
        number += 1
        return make(number) if time.perf_counter() < stop_at else None

    def done() -> None:
        nonlocal open_connections
        open_connections -= 1
        if not open_connections:
            ended.set()

    started = time.perf_counter()
    for _ in range(concurrency):
        await loop.create_connection(lambda: _Client(load, next_request, done), "127.0.0.1", port)
    await ended.wait()
    load.seconds = time.perf_counter() - started
    return load


class _Stub(asyncio.Protocol):
    """Responds to every request once it is complete."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._received = b""

    def data_received(self, data: bytes) -> None:
        self._received = data if not self._received else self._received + data
        head_end = self._received.find(b"\r\n\r\n")
        if head_end < 0:
            return
        if not self._received.startswith(b"POST"):
            self._answer(_HEALTH)
        elif self._is_complete(head_end):
            self._answer(
                _STREAM_HEAD + _CHUNK * _EVENTS + _STREAM_END
                if b'"stream":true' in self._received[-64:]
                else _ANSWER
            )

    def _is_complete(self, head_end: int) -> bool:
        head = self._received[:head_end].lower()
        at = head.find(b"content-length:")
        return at >= 0 and len(self._received) - head_end - 4 >= int(
            head[at + 15 :].split(b"\r\n", 1)[0]
        )

    def _answer(self, answer: bytes) -> None:
        self._received = b""
        self._transport.write(answer)


async def stub_replica() -> int:
    """Start a stub that responds at once; return its port."""
    server = await asyncio.get_running_loop().create_server(_Stub, "127.0.0.1", 0, backlog=4096)
    port: int = server.sockets[0].getsockname()[1]
    return port
