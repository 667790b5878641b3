"""The proxy behind a real uvicorn (uvloop, httptools) in a thread of its own, on a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from router.http.uvicorn_protocol import DirectHttpProtocol, Exchange
from router.proxy import (
    Attempt,
    End,
    Failure,
    Proxy,
    ProxyRequest,
    ProxySettings,
    Relay,
    RetryLimits,
    Unretried,
)
from router.upstream import Origin, PoolLimits, Timeouts, UpstreamClient, UpstreamStatistics
from tests.support.waiting import DEADLINE_S, eventually

TIMEOUTS = Timeouts(connect_s=600, first_byte_s=600, idle_s=600)


class Recorder:
    """An observer that writes everything down."""

    def __init__(self) -> None:
        self.attempts: list[str] = []
        self.failures: list[tuple[str, Failure]] = []
        self.first_bytes: list[tuple[str, float]] = []
        self.busy: list[tuple[str, int]] = []
        self.unretried: list[Unretried] = []
        self.out_of_rotation: set[str] = set()
        self.at_ease: set[str] = set()
        self.data = b""
        self.responded: Attempt | None = None
        self.ends: list[tuple[End, int | None, float]] = []

    def on_attempt(self, attempt: Attempt) -> None:
        self.attempts.append(attempt.replica_id)

    def on_failure(self, attempt: Attempt, failure: Failure) -> bool:
        self.failures.append((attempt.replica_id, failure))
        return attempt.replica_id in self.out_of_rotation

    def is_at_ease(self, attempt: Attempt) -> bool:
        return attempt.replica_id in self.at_ease

    def on_busy(self, attempt: Attempt, retry_after_s: int, is_429: bool) -> bool:
        self.busy.append((attempt.replica_id, retry_after_s))
        return True

    def on_unretried(self, reason: Unretried) -> None:
        self.unretried.append(reason)

    def on_first_byte(self, attempt: Attempt, seconds: float) -> None:
        self.first_bytes.append((attempt.replica_id, seconds))
        self.responded = attempt

    def on_chunk(self, data: bytes) -> None:
        self.data += data

    def on_end(self, end: End, status: int | None, seconds: float) -> None:
        self.ends.append((end, status, seconds))

    @property
    def end(self) -> End:
        ((end, _, _),) = self.ends
        return end

    @property
    def status(self) -> int | None:
        ((_, status, _),) = self.ends
        return status

    @property
    def seconds(self) -> float:
        ((_, _, seconds),) = self.ends
        return seconds


class Server(uvicorn.Server):
    """uvicorn that stops when told, not when it next looks."""

    stop: asyncio.Event | None = None

    async def main_loop(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.stop = asyncio.Event()
        await self.stop.wait()

    def tell_to_stop(self) -> None:
        if self.stop is not None:
            self.loop.call_soon_threadsafe(self.stop.set)


Rewrite = Callable[[ProxyRequest], ProxyRequest]


class Proxied:
    """Reads the body of one request, and proxies it."""

    def __init__(self, server: ProxyServer, exchange: Exchange) -> None:
        self._server = server
        self._exchange = exchange
        self._body = b""
        self._relay: Relay | None = None

    def proceed(self) -> None:
        self._body += self._exchange.take_body()
        if self._exchange.more_body:
            self._exchange.ask_for_body()
        elif self._relay is None:
            self._relay = self._server.start(self._exchange, self._body)

    def client_reads(self) -> None:
        if self._relay is not None:
            self._relay.client_reads()

    def client_left(self) -> None:
        if self._relay is not None:
            self._relay.client_left()

    def cancel(self) -> None:
        if self._relay is not None:
            self._relay.cancel()


@dataclass
class ProxyServer:
    """Proxies every request along one plan, and knows what came of it."""

    plan: Sequence[Attempt]
    settings: ProxySettings
    limits: PoolLimits
    rewrite: Rewrite
    out_of_rotation: set[str] = field(default_factory=set)
    at_ease: set[str] = field(default_factory=set)
    port: int = 0
    recorders: list[Recorder] = field(default_factory=list)
    relays: list[Relay] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    client: UpstreamClient | None = None
    proxy: Proxy | None = None
    server: Server | None = None

    @property
    def open_sockets(self) -> int:
        """Connections from clients."""
        assert self.server is not None
        return len(self.server.server_state.connections)

    def opens(self, method: str, path: str, query: bytes) -> Callable[[Exchange], Proxied]:
        return lambda exchange: Proxied(self, exchange)

    def start(self, exchange: Exchange, body: bytes) -> Relay:
        request = ProxyRequest(exchange.method.encode(), exchange.target, exchange.headers, body)
        recorder = Recorder()
        recorder.out_of_rotation = self.out_of_rotation
        recorder.at_ease = self.at_ease
        self.recorders.append(recorder)
        assert self.proxy is not None
        relay = self.proxy.start(self.plan, self.rewrite(request), exchange, recorder)
        self.relays.append(relay)
        return relay

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """The lifespan; no request comes this way."""
        assert scope["type"] == "lifespan"
        await receive()
        self.client = UpstreamClient(self.limits, tick_s=0.02)
        self.proxy = Proxy(self.client, self.settings)
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.client.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def recorder(self, end: End, within_s: float = DEADLINE_S) -> Recorder:
        """The first recorder, once its request has ended; it must have ended so, and once."""
        await eventually(
            lambda: self.recorders and self.recorders[0].ends,
            f"the request ends as {end}",
            within_s,
        )
        recorder = self.recorders[0]
        assert recorder.end is end
        return recorder

    def statistics(self) -> UpstreamStatistics:
        assert self.client is not None
        return self.client.statistics()

    def give_up(self, origin: Origin, silent_s: float) -> None:
        """What the registry's checks lead to; returns when it is done."""
        assert self.client is not None
        assert isinstance(self.server, Server)
        done = threading.Event()

        def now() -> None:
            assert self.client is not None
            self.client.give_up(origin, "its health checks fail", silent_s)
            done.set()

        self.server.loop.call_soon_threadsafe(now)
        assert done.wait(DEADLINE_S)

    async def check_all_is_over(self) -> None:
        """Every request ended exactly once and left nothing at work."""
        await eventually(
            lambda: all(recorder.ends for recorder in self.recorders), "every request has ended"
        )
        assert [len(recorder.ends) for recorder in self.recorders] == [1] * len(self.recorders)
        await eventually(lambda: all(relay.is_over for relay in self.relays), "all are over")
        assert self.proxy is not None
        assert not self.proxy._slow
        await eventually(lambda: self.statistics().active == 0, "no exchange is under way")
        await eventually(lambda: self.open_sockets == 0, "every client's socket is closed")
        assert self.errors == []


class _Errors(logging.Handler):
    def __init__(self, errors: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._errors = errors

    def emit(self, record: logging.LogRecord) -> None:
        self._errors.append(record.getMessage() + str(record.exc_info or ""))


@contextlib.asynccontextmanager
async def proxy_server(
    plan: Sequence[Attempt],
    timeouts: Timeouts = TIMEOUTS,
    client_stall_s: float = 600.0,
    limits: PoolLimits | None = None,
    rewrite: Rewrite = lambda request: request,
    retries: RetryLimits | None = None,
) -> AsyncIterator[ProxyServer]:
    """Serve until the block ends; then every request must be over, and uvicorn must have had
    nothing to complain of."""
    retries = retries or RetryLimits()
    settings = ProxySettings(timeouts, client_stall_s, retries=retries)
    app = ProxyServer(plan, settings, limits or PoolLimits(), rewrite)
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    app.port = listener.getsockname()[1]

    class Protocol(DirectHttpProtocol):
        handler = app

    config = uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        loop="uvloop",
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=1,
    )
    server = app.server = Server(config)
    handler = _Errors(app.errors)
    logging.getLogger("uvicorn.error").addHandler(handler)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        await eventually(lambda: server.stop is not None, "uvicorn has started")
        yield app
        await app.check_all_is_over()
    finally:
        server.tell_to_stop()
        await asyncio.get_running_loop().run_in_executor(None, thread.join)
        logging.getLogger("uvicorn.error").removeHandler(handler)
        listener.close()
