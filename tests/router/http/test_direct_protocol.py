"""Requests outside ASGI beside others on one connection: uvicorn's protocol on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from router.http.connection_guard import ClientLimits, guarded_protocol
from router.http.uvicorn_protocol import Exchange
from router.upstream.turns import MAX_TURN_S, PacedJobs
from tests.support.http_client import HttpClient, connect, request_bytes
from tests.support.late_loop import LateLoop
from tests.support.waiting import eventually


class Echo:
    """Responds with the body it got, once *go* is set."""

    def __init__(self, server: DirectServer, exchange: Exchange) -> None:
        self._server = server
        self.exchange = exchange
        self.body = b""

    def proceed(self) -> None:
        self._server.begun.append(self.exchange.path)
        if self.exchange.path == "/ignored":
            self._server.waiting = [self]
            return
        self.body += self.exchange.take_body()
        if self.exchange.path == "/refused" and self.exchange.status is None:
            self.exchange.respond(401, [(b"content-length", b"2")], b"no", True)
        elif self.exchange.more_body:
            self.exchange.ask_for_body()
        elif self._server.go.is_set():
            self.respond()
        else:
            self._server.waiting.append(self)

    def respond(self) -> None:
        self.exchange.respond(200, [(b"x-by", b"direct")], self.body[:1], False)
        self.exchange.send(self.body[1:], True)

    def client_reads(self) -> None:
        pass

    def client_left(self) -> None:
        self._server.left.append(self.exchange.path)

    def cancel(self) -> None:
        self._server.cancelled.append(self.exchange.path)


class DirectServer:
    """Serves everything below / directly, and /asgi as an application."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.waiting: list[Echo] = []
        self.left: list[str] = []
        self.cancelled: list[str] = []
        self.state = ServerState()
        self.port = 0
        self.opened: list[str] = []
        self.begun: list[str] = []
        self.protocol = guarded_protocol(ClientLimits(), lambda _refusal: None, self)

    def opens(self, method: str, path: str, query: bytes) -> Callable[[Exchange], Echo] | None:
        self.opened.append(path)
        return None if path == "/asgi" else lambda exchange: Echo(self, exchange)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        headers = [(b"content-length", b"%d" % len(message["body"])), (b"x-by", b"asgi")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": message["body"]})


@contextlib.asynccontextmanager
async def direct_server() -> AsyncIterator[DirectServer]:
    app = DirectServer()
    app.go.set()
    protocol = app.protocol
    config = uvicorn.Config(app, http=protocol, ws="none", lifespan="off", log_config=None)
    config.load()
    listener = socket.create_server(("127.0.0.1", 0))
    app.port = listener.getsockname()[1]
    server = await asyncio.get_running_loop().create_server(
        lambda: protocol(config, app.state, {}), sock=listener
    )
    try:
        yield app
    finally:
        server.close()
        for connection in tuple(app.state.connections):
            connection.transport.abort()  # type: ignore[union-attr]
        await eventually(lambda: not app.state.connections, "nothing is left")


@contextlib.asynccontextmanager
async def under_way(
    *paths: str,
) -> AsyncIterator[tuple[DirectServer, HttpClient, Echo]]:
    """A server, a client that has asked for *paths*, and the first of them as it is served."""
    async with direct_server() as app, connect(app.port) as client:
        app.go.clear()
        await client.write(b"".join(request_bytes("GET", path) for path in paths))
        await eventually(lambda: app.waiting, "the first one is under way")
        yield app, client, app.waiting[0]


async def test_both_kinds_of_requests_share_a_connection_in_order() -> None:
    """A response that overtakes another would be taken for it."""
    paths = ["/a", "/asgi", "/b", "/b", "/asgi", "/asgi", "/c"]
    async with direct_server() as app, connect(app.port) as client:
        await client.write(b"".join(request_bytes("POST", path, path.encode()) for path in paths))
        found = [await client.read_answer() for _ in paths]
        assert [answer.body.decode() for answer in found] == paths
        by = [answer.headers["x-by"] for answer in found]
        assert by == ["asgi" if path == "/asgi" else "direct" for path in paths]


async def test_a_request_that_was_refused_early_does_not_spoil_the_next_one() -> None:
    """Its body still arrives, and must not be taken for a request, nor for the next one's body."""
    async with direct_server() as app, connect(app.port) as client:
        whole = request_bytes("POST", "/refused", b"x" * 1000)
        await client.write(whole[:-500])
        assert (await client.read_answer()).status == 401
        await client.write(whole[-500:] + request_bytes("POST", "/a", b"mine"))
        assert (await client.read_answer()).body == b"mine"


async def test_a_client_of_http_1_0_gets_no_chunks() -> None:
    """It does not know them: the body ends with the connection (RFC 9112 6.1)."""
    async with direct_server() as app, connect(app.port) as client:
        await client.write(b"POST /a HTTP/1.0\r\ncontent-length: 2\r\n\r\nhi")
        found = await client.reader.read()
        assert found.startswith(b"HTTP/1.1 200 OK\r\n")
        assert found.endswith(b"connection: close\r\n\r\nhi")
        assert b"chunked" not in found


async def test_a_head_request_gets_no_body() -> None:
    """What follows would be taken for the next response."""
    async with direct_server() as app, connect(app.port) as client:
        await client.write(request_bytes("HEAD", "/a") + request_bytes("POST", "/b", b"mine"))
        assert await client.read_head() == 200
        assert (await client.read_answer()).body == b"mine"


async def test_a_client_that_waits_for_it_is_asked_for_its_body() -> None:
    """curl waits a second for 100 Continue before it sends more than 1 KB."""
    async with direct_server() as app, connect(app.port) as client:
        head = b"POST /a HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n"
        await client.write(head)
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.write(b"hi")
        assert (await client.read_answer()).body == b"hi"


async def test_a_client_of_http_1_0_is_not_asked_for_its_body() -> None:
    """It knows no interim responses (RFC 9110 10.1.1)."""
    async with direct_server() as app, connect(app.port) as client:
        head = b"POST /a HTTP/1.0\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n"
        await client.write(head)
        await client.write(b"hi")
        assert (await client.reader.readuntil(b"\r\n")).endswith(b" 200 OK\r\n")


async def test_only_the_running_request_hears_that_its_client_left() -> None:
    """Those behind it have not begun."""
    async with under_way("/first", "/second") as (app, client, _):
        client.leave()
        await eventually(lambda: app.left == ["/first"], "it hears of it")


async def test_requests_that_a_turn_has_no_time_for_are_served_in_the_next_ones() -> None:
    """A burst must not stop every stream until its last request is decided. A client that leaves
    meanwhile is heard of, and its request is not begun."""
    loop = LateLoop()
    async with direct_server() as app, connect(app.port) as first, connect(app.port) as second:
        app.protocol.jobs = jobs = PacedJobs(loop)  # type: ignore[arg-type]
        jobs.run(lambda: setattr(loop, "now", loop.now + MAX_TURN_S))
        await first.write(request_bytes("POST", "/left", b"x"))
        await eventually(lambda: app.opened == ["/left"], "it has arrived")
        await second.write(request_bytes("POST", "/a", b"mine"))
        await eventually(lambda: app.opened == ["/left", "/a"], "it has arrived, too")
        first.leave()
        await eventually(lambda: app.left == ["/left"], "it has left")
        loop.get_around()
        assert (await second.read_answer()).body == b"mine"
        assert app.begun == ["/a"]


async def test_a_body_that_breaks_its_announced_length_ends_the_connection() -> None:
    """The client could not tell where it ends, and the next response would be a part of it."""
    async with under_way("/a") as (_, client, served):
        served.exchange.respond(200, [(b"content-length", b"3")], b"four", True)
        assert await client.is_closed()


async def test_a_header_that_would_break_the_framing_ends_the_connection() -> None:
    """A line break in a value of the engine's would begin a header of its choice."""
    async with under_way("/a") as (_, client, served):
        served.exchange.respond(200, [(b"x-a", b"1\r\nx-b: 2")], b"", True)
        assert await client.is_closed()


async def test_what_runs_is_cut_at_the_end_of_the_grace_period() -> None:
    """There is no task that the server could cancel."""
    async with under_way("/a") as (app, client, _):
        (connection,) = app.state.connections
        connection.cut()  # type: ignore[union-attr]
        assert app.cancelled == ["/a"]
        assert await client.is_closed()


async def test_a_body_that_nobody_takes_is_not_read_on() -> None:
    """A wrong key's refusal is held back; what its client sends meanwhile must cost no memory."""
    async with direct_server() as app, connect(app.port) as client:
        head = b"POST /ignored HTTP/1.1\r\nhost: x\r\ncontent-length: 50000000\r\n\r\n"
        await client.write(head)
        writing = asyncio.create_task(client.write(b"x" * 50_000_000))
        await eventually(lambda: app.waiting, "it has arrived")
        exchange = app.waiting[0].exchange
        await eventually(lambda: exchange.waiting_bytes > 64 * 1024, "more than enough is here")
        (connection,) = app.state.connections
        assert connection.flow.read_paused  # type: ignore[union-attr]
        before = exchange.waiting_bytes
        assert before < 1_000_000
        exchange.respond(401, [(b"content-length", b"0")], b"", True)
        await writing
        assert exchange.waiting_bytes == before, "what comes after the response is dropped"


async def test_a_body_that_nobody_took_goes_with_its_response() -> None:
    """Refused clients that keep their connections would each hold a buffer of the router's."""
    async with direct_server() as app, connect(app.port) as client:
        await client.write(request_bytes("POST", "/ignored", b"x" * 1000))
        await eventually(lambda: app.waiting, "it has arrived")
        exchange = app.waiting[0].exchange
        await eventually(lambda: not exchange.more_body, "all of it")
        exchange.respond(401, [(b"content-length", b"0")], b"", True)
        assert exchange.take_body() == b""
        assert (await client.read_answer()).status == 401


async def test_what_waits_behind_a_request_is_bounded_all_together() -> None:
    """Each of 64 bodies below the bound on one would be megabytes for a single connection."""
    async with under_way("/first") as (app, client, served):
        bodies = [b"%d" % index + b"x" * 60_000 for index in range(40)]
        (connection,) = app.state.connections
        writing = asyncio.create_task(
            client.write(b"".join(request_bytes("POST", "/x", body) for body in bodies))
        )
        await eventually(lambda: connection.flow.read_paused, "enough is here")  # type: ignore[union-attr]
        assert len(connection.pipeline) < 10  # type: ignore[union-attr]
        app.go.set()
        served.respond()
        await client.read_answer()
        assert [(await client.read_answer()).body for _ in bodies] == bodies
        await writing
