"""The proxy with the compiled data plane, in a thread of its own, on a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import uvloop

from router.config.origin import Header, Origin, Timeouts
from router.plane.attempts import (
    Attempt,
    Failure,
    RetryLimits,
    Unretried,
)
from router.plane.data_plane import DataPlane, PlaneListener, PlaneOptions
from router.plane.exchanges import FailedFirst, PlaneExchange
from router.plane.proxy_types import End, ProxyRequest
from router.plane.relays import PlaneProxy, PlaneRelay
from router.plane.secured import Secured
from tests.support.waiting import DEADLINE_S, eventually

TIMEOUTS = Timeouts(connect_s=600, first_byte_s=600, idle_s=600)
_RETRIES = RetryLimits()


class Recorder:
    """An observer that writes everything down."""

    wants_beginning = True

    def __init__(self) -> None:
        self.attempts: list[str] = []
        self.failures: list[tuple[str, Failure]] = []
        self.first_bytes: list[tuple[str, float]] = []
        self.busy: list[tuple[str, int]] = []
        self.unretried: list[Unretried] = []
        self.out_of_rotation: set[str] = set()
        self.at_ease: set[str] = set()
        self.events = 0
        self.beginning = b""
        self.usage: tuple[bool, bytes, bytes] | None = None
        self.responded: Attempt | None = None
        self.ends: list[tuple[End, int | None, float]] = []

    def on_attempt(self, attempt: Attempt) -> None:
        self.attempts.append(attempt.replica_id)

    def on_tried(self, failed: FailedFirst) -> tuple[Failure, bool]:
        raise AssertionError("nothing is decided by the data plane here")

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

    def on_first_byte(
        self, attempt: Attempt, seconds: float, status: int, is_whole: bool | None = None
    ) -> None:
        self.first_bytes.append((attempt.replica_id, seconds))
        self.responded = attempt

    def on_events(self, count: int) -> None:
        self.events += count

    def on_beginning(self, data: bytes) -> None:
        self.beginning += data

    def on_usage(self, is_json: bool, last: bytes, first: bytes) -> None:
        self.usage = is_json, last, first

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


Rewrite = Callable[[ProxyRequest], ProxyRequest]

NOBODY_LISTENS = PlaneListener(
    on_summed=lambda *what: None,
    sum_bounds=None,
    on_refusal=lambda reason: None,
    on_running=lambda *what: None,
    on_settled=lambda *what: None,
    on_left=lambda number: None,
    on_handed_over=lambda number, failed: None,
    on_looked_up=lambda model, seconds: None,
    on_reserved=lambda *what: None,
    on_reported=lambda *what: None,
    on_second_attempt=lambda outcome: None,
    on_long_prompt=lambda: None,
)


class NothingPrepared:
    """Reads no prompt, since nothing is decided by the data plane."""

    def prepare(self, number: int, path: int, headers: list[Header], body: bytes) -> None:
        raise AssertionError("nothing is decided by the data plane here")

    def prepare_question(self, number: int, kind: int, headers: list[Header], body: bytes) -> None:
        raise AssertionError("nothing is decided by the data plane here")

    def hand_over(self, number: int) -> None:
        """Nothing is begun before."""

    def left(self, number: int) -> None:
        """Nothing is kept of it."""


def plane_options(client_stall_s: float = 600.0, max_connections: int = 0) -> PlaneOptions:
    """Of a data plane that decides nothing."""
    return PlaneOptions(
        head_bytes=65_536,
        max_body_bytes=64 << 20,
        max_held_bytes=1 << 30,
        request_s=600.0,
        client_stall_s=client_stall_s,
        keep_alive_s=600.0,
        idle_s=4.0,
        max_idle=256,
        max_connections=max_connections,
        reserved_from=2**31 - 1,
        dropped=frozenset(),
        second_share=0.0,
    )


class Proxied:
    """Reads the body of one request, and proxies it."""

    def __init__(self, server: ProxyServer, exchange: PlaneExchange) -> None:
        self._server = server
        self._exchange = exchange
        self._body = b""
        self._relay: PlaneRelay | None = None

    def proceed(self) -> None:
        self._body += self._exchange.take_body()
        if self._exchange.more_body:
            self._exchange.ask_for_body()
        elif self._relay is None:
            self._relay = self._server.start(self._exchange, self._body)

    def client_left(self) -> None:
        """The plane tells the relay of it, as an end."""


@dataclass
class ProxyServer:
    """Proxies every request along one plan, and knows what came of it."""

    plan: Sequence[Attempt]
    timeouts: Timeouts
    retries: RetryLimits
    client_stall_s: float
    max_connections: int
    rewrite: Rewrite
    recorder_class: type[Recorder] = Recorder
    out_of_rotation: set[str] = field(default_factory=set)
    at_ease: set[str] = field(default_factory=set)
    port: int = 0
    recorders: list[Recorder] = field(default_factory=list)
    relays: list[PlaneRelay] = field(default_factory=list)
    overs: list[int] = field(default_factory=list)
    """Which of the requests have let go of what they held."""
    errors: list[str] = field(default_factory=list)
    plane: DataPlane | None = None
    proxy: PlaneProxy | None = None
    loop: asyncio.AbstractEventLoop | None = None

    @property
    def open_sockets(self) -> int:
        """Connections from clients."""
        assert self.plane is not None
        return sum(self.plane.plane.clients())

    def opens(self, method: str, path: str, query: bytes) -> Callable[[PlaneExchange], Proxied]:
        return lambda exchange: Proxied(self, exchange)

    def start(self, exchange: PlaneExchange, body: bytes) -> PlaneRelay:
        request = ProxyRequest(body)
        recorder = self.recorder_class()
        recorder.out_of_rotation = self.out_of_rotation
        recorder.at_ease = self.at_ease
        number = len(self.recorders)
        self.recorders.append(recorder)
        assert self.proxy is not None
        relay = self.proxy.start(
            self.plan,
            self.rewrite(request),
            exchange,
            recorder,
            lambda: self.overs.append(number),
        )
        self.relays.append(relay)
        return relay

    def run(self, listener: socket.socket, is_ready: threading.Event) -> None:
        """The thread: serve until told to stop."""
        uvloop.new_event_loop().run_until_complete(self._run(listener, is_ready))

    async def _run(self, listener: socket.socket, is_ready: threading.Event) -> None:
        self.loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self.proxy = PlaneProxy(self.timeouts, self.retries, lambda what: None)
        self.plane = DataPlane(
            self,
            self.proxy,
            plane_options(self.client_stall_s, self.max_connections),
            "",
            NOBODY_LISTENS,
            NothingPrepared(),
        )
        self.plane.start([os.dup(listener.fileno())], Secured(None, None))
        is_ready.set()
        await self._stop.wait()
        await self.plane.close()

    def tell_to_stop(self) -> None:
        assert self.loop is not None
        self.loop.call_soon_threadsafe(self._stop.set)

    def soon(self, call: Callable[[], object]) -> None:
        """Call it where the proxy lives."""
        assert self.loop is not None
        self.loop.call_soon_threadsafe(call)

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

    def count(self, name: str) -> int:
        """Of connections to replicas; see `Plane.counts`."""
        assert self.plane is not None
        return self.plane.counts()[name]

    def give_up(self, origin: Origin, silent_s: float) -> None:
        """What the registry's checks lead to."""
        assert self.plane is not None
        self.plane.give_up(origin.key, silent_s)

    async def check_all_is_over(self) -> None:
        """Every request ended exactly once and left nothing at work."""
        await eventually(
            lambda: all(recorder.ends for recorder in self.recorders), "every request has ended"
        )
        assert [len(recorder.ends) for recorder in self.recorders] == [1] * len(self.recorders)
        await eventually(lambda: all(relay.is_over for relay in self.relays), "all are over")
        await eventually(
            lambda: sorted(self.overs) == list(range(len(self.relays))), "all have let go"
        )
        assert self.proxy is not None
        assert not self.proxy.relays
        await eventually(lambda: self.count("active") == 0, "no exchange is under way")
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
    max_connections: int = 0,
    rewrite: Rewrite = lambda request: request,
    retries: RetryLimits = _RETRIES,
    recorder_class: type[Recorder] = Recorder,
    may_fail: bool = False,
) -> AsyncIterator[ProxyServer]:
    """Serve until the block ends; then every request must be over, and nothing may have been logged
    as an error unless it *may_fail*."""
    app = ProxyServer(
        plan, timeouts, retries, client_stall_s, max_connections, rewrite, recorder_class
    )
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    listener.setblocking(False)
    app.port = listener.getsockname()[1]
    handler = _Errors([] if may_fail else app.errors)
    logging.getLogger("router").addHandler(handler)
    is_ready = threading.Event()
    thread = threading.Thread(target=app.run, args=(listener, is_ready))
    thread.start()
    try:
        assert await asyncio.to_thread(is_ready.wait, DEADLINE_S), "it serves"
        yield app
        await app.check_all_is_over()
    finally:
        app.tell_to_stop()
        await asyncio.to_thread(thread.join)
        logging.getLogger("router").removeHandler(handler)
        listener.close()
