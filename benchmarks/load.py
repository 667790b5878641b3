"""A load generator and a stub replica on bare asyncio protocols, so that neither dominates the
measurement."""

from __future__ import annotations

import asyncio
import functools
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

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
_NextRequest = Callable[[], bytes | None]
_PACE = re.compile(rb'"pace_ms":([0-9]+),"tokens":([0-9]+)')


@dataclass(slots=True)
class Load:
    """The measurements of a run."""

    seconds: float = 0.0
    errors: int = 0
    latencies: list[float] = field(default_factory=list)

    @property
    def per_second(self) -> float:
        return len(self.latencies) / self.seconds

    def quantile(self, share: float) -> float:
        """Return the latency at a quantile, in seconds."""
        ordered = sorted(self.latencies)
        return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


class _Client(asyncio.Protocol):
    """One connection that sends the next request as soon as it has the response to the last one."""

    def __init__(self, load: Load, next_request: _NextRequest, done: Callable[[], None]) -> None:
        self._load = load
        self._next = next_request
        self._done = done
        self._started = 0.0
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
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
    load = Load()
    load.seconds = await _run(port, make, functools.partial(_Client, load), concurrency, seconds)
    return load


async def _run(
    port: int,
    make: Callable[[int], bytes | None],
    client: Callable[[_NextRequest, Callable[[], None]], asyncio.Protocol],
    count: int,
    seconds: float,
    apart_s: float = 0.0,
) -> float:
    """Run *count* clients, which begin *apart_s* after each other; return how long it took."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    left, number = count, 0
    started = time.perf_counter()

    def next_request() -> bytes | None:
        nonlocal number
        number += 1
        return make(number) if time.perf_counter() < started + seconds else None

    def done() -> None:
        nonlocal left
        left -= 1
        if not left:
            ended.set()

    for index in range(count):
        await asyncio.sleep(max(0.0, started + index * apart_s - time.perf_counter()))
        await loop.create_connection(lambda: client(next_request, done), "127.0.0.1", port)
    await ended.wait()
    return time.perf_counter() - started


@dataclass(slots=True)
class PacedLoad:
    """The measurements of a run of paced streams; seconds."""

    first_tokens: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    errors: int = 0
    seconds: float = 0.0


class _Reader(asyncio.Protocol):
    """One client that reads a paced stream, and then another one."""

    def __init__(
        self, load: PacedLoad, next_request: _NextRequest, done: Callable[[], None]
    ) -> None:
        self._load = load
        self._next = next_request
        self._done = done
        self._last = 0.0
        self._has_begun = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._send()

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        tokens = data.count(b'"text"')
        if tokens:
            (self._load.gaps if self._has_begun else self._load.first_tokens).append(
                now - self._last
            )
            self._has_begun, self._last = True, now
            self._load.tokens += tokens
        elif not self._has_begun and not data.startswith(b"HTTP/1.1 200"):
            self._load.errors += 1
        if data.endswith(b"0\r\n\r\n"):
            self._send()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._done()

    def _send(self) -> None:
        request = self._next()
        if request is None:
            self._transport.close()
            return
        self._has_begun, self._last = False, time.perf_counter()
        self._transport.write(request)


async def run_paced(
    port: int, make: Callable[[int], bytes], streams: int, seconds: float, begin_s: float = 1.0
) -> PacedLoad:
    """Keep *streams* streams going for a time; they begin one after the other within *begin_s*."""
    load = PacedLoad()
    reader = functools.partial(_Reader, load)
    load.seconds = await _run(port, make, reader, streams, seconds, apart_s=begin_s / streams)
    return load


class _Pacer:
    """Sends one token on each of its streams at an even pace, with one timer for all."""

    def __init__(self) -> None:
        self._streams: dict[_Stub, int] = {}
        self._is_running = False

    def add(self, stub: _Stub, pace_s: float, tokens: int) -> None:
        self._streams[stub] = tokens
        if not self._is_running:
            self._is_running = True
            asyncio.get_running_loop().call_later(pace_s, self._tick, pace_s)

    def drop(self, stub: _Stub) -> None:
        self._streams.pop(stub, None)

    def _tick(self, pace_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._is_running = bool(self._streams)
        if self._is_running:
            loop.call_later(pace_s, self._tick, pace_s)
        for stub, left in list(self._streams.items()):
            self._streams[stub] = left - 1
            stub.write(_CHUNK if left > 1 else _CHUNK + _STREAM_END)
            if left <= 1:
                del self._streams[stub]


_PACERS = [_Pacer() for _ in range(16)]
"""So that not all streams get their tokens in the same moment."""


class _Stub(asyncio.Protocol):
    """Responds to every request once it is complete."""

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        for pacer in _PACERS:
            pacer.drop(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._received = b""

    def data_received(self, data: bytes) -> None:
        self._received = data if not self._received else self._received + data
        head_end = self._received.find(b"\r\n\r\n")
        if head_end < 0:
            return
        if not self._received.startswith(b"POST"):
            self._answer(_HEALTH)
        elif not self._is_complete(head_end):
            return
        elif (pace := _PACE.search(self._received, max(len(self._received) - 96, 0))) is not None:
            self._answer(_STREAM_HEAD)
            _PACERS[id(self) // 64 % len(_PACERS)].add(self, int(pace[1]) / 1000, int(pace[2]))
        else:
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
