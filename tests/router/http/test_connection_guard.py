"""What one client's connection may cost: uvicorn's protocol on real sockets, with the clock in the
test's hands."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from router.http.connection_guard import (
    MADE_ROOM,
    MAX_PIPELINED,
    OUT_OF_MEMORY,
    RESERVED_S,
    ClientLimits,
    GuardedHttpProtocol,
    Refusal,
    guarded_protocol,
)
from tests.support.http_client import HttpClient, connect, request_bytes
from tests.support.waiting import eventually

LIMITS = ClientLimits(head_bytes=4096, request_s=10, stall_s=20, slack_s=5)
KEEP_ALIVE_S = 3000
CHUNKED = b"POST /x HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass
class GuardedServer:
    """An application behind the protocol; it responds with *body* once *go* is set, and with
    *first* before."""

    body: bytes = b"ok"
    first: bytes = b""
    has_length: bool = True
    port: int = 0
    go: asyncio.Event = field(default_factory=asyncio.Event)
    state: ServerState = field(default_factory=ServerState)
    refusals: list[Refusal] = field(default_factory=list)
    requests: list[tuple[str, bytes, dict[bytes, bytes]]] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    received_bytes: int = 0
    protocol: type[GuardedHttpProtocol] = GuardedHttpProtocol
    shortages: int = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.requests.append((scope["path"], body, dict(scope["headers"])))
        length = len(self.first + self.body)
        headers = [(b"content-length", b"%d" % length)] if self.has_length else []
        start = {"type": "http.response.start", "status": 200, "headers": headers}
        if self.first:
            await send(start)
            await send({"type": "http.response.body", "body": self.first, "more_body": True})
        gone = asyncio.ensure_future(receive())
        going = asyncio.ensure_future(self.go.wait())
        await asyncio.wait((gone, going), return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            self.gone.append(scope["path"])
        gone.cancel()
        going.cancel()
        if not self.first:
            await send(start)
        await send({"type": "http.response.body", "body": self.body})

    @property
    def connection(self) -> GuardedHttpProtocol:
        (only,) = self.state.connections
        assert isinstance(only, GuardedHttpProtocol)
        return only

    @property
    def has_probed(self) -> bool:
        """Whether everything has been sent that a client which has left would reset."""
        return self.connection.probes_left == 0

    @property
    def unsent_bytes(self) -> int:
        return self.connection._raw_transport.get_write_buffer_size()

    def run_short_of_files(self) -> None:
        """From now on every connection gets one of the last descriptors."""

        def note() -> None:
            self.shortages += 1

        self.protocol.reserved_from = 0
        self.protocol.on_reserve = staticmethod(note)

    def look(self, later_s: float) -> None:
        """Check as if *later_s* had passed, once for each second until then."""
        now = asyncio.get_running_loop().time()
        for second in range(int(later_s) + 1):
            for connection in tuple(self.state.connections):
                assert isinstance(connection, GuardedHttpProtocol)
                connection.look_after(now + second)


@contextlib.asynccontextmanager
async def guarded_server(body: bytes = b"ok") -> AsyncIterator[GuardedServer]:
    app = GuardedServer(body)
    config = uvicorn.Config(
        app,
        http=guarded_protocol(LIMITS, app.refusals.append),
        ws="none",
        lifespan="off",
        log_config=None,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    config.load()
    listener = socket.create_server(("127.0.0.1", 0))
    # Connections inherit it: what the kernel does not take stays where the protocol can see it.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

    class Counting(config.http_protocol_class):  # type: ignore[name-defined, misc]
        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            app.received_bytes += len(data)

    app.protocol = Counting

    def protocol() -> asyncio.Protocol:
        return Counting(config=config, server_state=app.state, app_state={})

    server = await asyncio.get_running_loop().create_server(protocol, sock=listener)
    app.port = listener.getsockname()[1]
    try:
        yield app
    finally:
        app.go.set()
        server.close()
        for connection in tuple(app.state.connections):
            assert isinstance(connection, GuardedHttpProtocol)
            connection.abort()
        await eventually(
            lambda: not app.state.connections and not app.state.tasks, "nothing is left"
        )


async def until_received(app: GuardedServer, count: int) -> None:
    await eventually(lambda: app.received_bytes == count, f"the server has read {count} bytes")


async def until_connected(app: GuardedServer) -> None:
    await eventually(lambda: app.state.connections, "the server has accepted")


async def test_a_silent_connection_is_ended() -> None:
    """uvicorn would keep it for ever: its keep-alive timer starts with the first response."""
    async with guarded_server() as app, connect(app.port) as client:
        await until_connected(app)
        app.look(LIMITS.request_s - 1)
        assert not app.refusals
        app.look(LIMITS.request_s + 1)
        assert app.refusals == ["slow_request"]
        assert await client.is_closed()


@pytest.mark.parametrize("start", [b"", b"GET /x HTTP/1.1\r\nx: "])
async def test_on_one_of_the_last_descriptors_a_head_has_two_seconds(start: bytes) -> None:
    """There are a few dozen of them, and probes wait for one: a minute for each stranger would keep
    all of them out."""
    async with guarded_server() as app:
        app.run_short_of_files()
        async with connect(app.port) as client:
            await client.write(start)
            await eventually(lambda: app.shortages, "it has one of them")
            await until_received(app, len(start))
            app.look(RESERVED_S - 1)
            assert not app.refusals
            app.look(RESERVED_S + 1)
            assert app.refusals == ["slow_request"]
            assert await client.is_closed()


async def test_where_files_are_short_those_make_room_that_never_asked_for_anything() -> None:
    """The oldest first. Whoever has been of use, or has sent what is not read yet, stays."""
    async with guarded_server() as app, contextlib.AsyncExitStack() as stack:

        async def client() -> HttpClient:
            before = set(app.state.connections)
            found = await stack.enter_async_context(connect(app.port))
            await eventually(lambda: app.state.connections - before, "it is accepted")
            return found

        app.go.set()
        idle = await client()
        assert (await idle.ask("GET", "/first")).status == 200
        app.go.clear()
        served = await client()
        await served.send("GET", "/served")
        await eventually(lambda: len(app.requests) == 2, "it is under way")
        before = set(app.state.connections)
        unread = await client()
        (unread_here,) = app.state.connections - before
        assert isinstance(unread_here, GuardedHttpProtocol)
        unread_here._raw_transport.pause_reading()
        await unread.send("GET", "/unread")
        strangers = [await client() for _ in range(MADE_ROOM + 2)]
        await strangers[0].write(b"GET /half HTTP/1.1\r\nx: ")

        app.run_short_of_files()
        probe = await client()
        for stranger in strangers[:MADE_ROOM]:
            assert await stranger.is_closed()
        app.go.set()
        assert (await probe.ask("GET", "/healthz")).status == 200
        unread_here._raw_transport.resume_reading()
        for asked in (unread, served):
            assert (await asked.read_answer()).status == 200
        assert not app.refusals, "that is no fault of theirs"
        for other in (idle, *strangers[MADE_ROOM:]):
            assert (await other.ask("GET", "/again")).status == 200


@pytest.mark.parametrize("start", [b"", b"POST /x HTTP/1.1\r\nx: ", b"\r\n"])
async def test_a_head_must_arrive_in_time(start: bytes) -> None:
    """However it trickles in; also on a connection that has been used before."""
    async with guarded_server() as app, connect(app.port) as client:
        app.go.set()
        assert (await client.ask("GET", "/first")).status == 200
        app.look(10 * LIMITS.request_s)
        assert not app.refusals, "between two requests there is no time limit"
        await client.write(start + b"\r\n" if start == b"" else start)
        await eventually(lambda: app.connection._receiving_since is not None, "it has begun")
        app.look(LIMITS.request_s + 1)
        assert app.refusals == ["slow_request"]
        assert await client.is_closed()


async def test_a_body_must_arrive_in_time() -> None:
    """The application times the bodies it reads; this is for those it no longer reads."""
    async with guarded_server() as app, connect(app.port) as client:
        await client.write(CHUNKED + b"1\r\nx\r\n")
        await eventually(lambda: app.state.tasks, "the application has it")
        app.look(2 * LIMITS.request_s + LIMITS.slack_s - 1)
        assert not app.refusals
        app.look(2 * LIMITS.request_s + LIMITS.slack_s + 2)
        assert app.refusals == ["slow_request"]
        assert await client.is_closed()


@pytest.mark.parametrize(
    "behind", [b"", b"\r\n", b"GET /next HTTP/1.1\r\nx: ", request_bytes("GET", "/next")]
)
async def test_a_long_response_is_not_mistaken_for_a_slow_request(behind: bytes) -> None:
    """A stream may last an hour, and during it the router does not read the next request."""
    async with guarded_server() as app, connect(app.port) as client:
        request = request_bytes("POST", "/x", b"{}")
        await client.write(request)
        await eventually(lambda: app.requests, "the request is there")
        await client.write(behind)
        await until_received(app, len(request + behind))
        app.look(3600)
        assert not app.refusals
        app.go.set()
        assert (await client.read_answer()).body == b"ok"
        app.look(1)
        assert not app.refusals


async def test_a_finished_response_that_is_never_read_is_ended() -> None:
    """The application has finished, so nothing else would notice: socket and buffer would stay for
    ever."""
    async with (
        guarded_server(b"x" * 60_000) as app,
        connect(app.port, receive_buffer=2048) as client,
    ):
        app.go.set()
        client.reader._limit = 1  # type: ignore[attr-defined]
        await client.send("GET", "/x")
        await eventually(lambda: app.requests and not app.state.tasks, "it is answered")
        await eventually(lambda: app.unsent_bytes, "the kernel takes no more")
        app.look(LIMITS.stall_s + LIMITS.slack_s - 1)
        assert not app.refusals
        app.look(LIMITS.stall_s + LIMITS.slack_s + 2)
        assert app.refusals == ["response_not_read"]


async def test_a_connection_that_sends_nothing_more_is_closed_after_a_while() -> None:
    """Each costs a file descriptor, and clients that are gone without a word are never heard of
    again. A request, or a response that is under way, keeps it open."""
    async with guarded_server() as server, connect(server.port) as client:
        server.go.set()
        await client.write(request_bytes("GET", "/one"))
        assert (await client.read_answer()).status == 200
        await eventually(lambda: server.connection.idle_since is not None, "it is idle")
        server.look(KEEP_ALIVE_S - 100)
        await client.write(request_bytes("GET", "/two"))
        assert (await client.read_answer()).status == 200
        server.go.clear()
        await client.write(request_bytes("GET", "/three"))
        await eventually(lambda: len(server.requests) == 3, "it is under way")
        server.look(KEEP_ALIVE_S + 100)
        server.go.set()
        assert (await client.read_answer()).status == 200
        await eventually(lambda: server.connection.idle_since is not None, "it is idle again")
        server.look(KEEP_ALIVE_S + 1)
        assert await client.is_closed()


async def test_a_response_that_is_read_slowly_is_not_ended() -> None:
    """A slow connection is legitimate."""
    async with (
        guarded_server(b"x" * 60_000) as app,
        connect(app.port, receive_buffer=2048) as client,
    ):
        app.go.set()
        await client.send("GET", "/x")
        await client.read_head()
        now, received = asyncio.get_running_loop().time(), 0
        while received < 60_000:
            unsent = app.unsent_bytes
            while received < 60_000 and unsent and app.unsent_bytes >= unsent:
                received += len(await client.reader.read(5000))
            if not unsent:
                received += len(await client.reader.read(5000))
            now += LIMITS.stall_s
            for connection in tuple(app.state.connections):
                assert isinstance(connection, GuardedHttpProtocol)
                connection.look_after(now)
        assert not app.refusals


async def test_the_running_request_notices_that_its_client_left_with_others_pipelined() -> None:
    """uvicorn marks only the last one it has read; the engine would work on for no one."""
    async with guarded_server() as app, connect(app.port) as client:
        await client.write(request_bytes("GET", "/under-way") + request_bytes("GET", "/waits") * 3)
        await eventually(lambda: app.requests, "the first one is under way")
        client.leave()
        await eventually(lambda: app.gone == ["/under-way"], "it hears that its client has left")


async def test_pipelined_requests_get_their_responses_in_order() -> None:
    """The bound must not hinder clients that pipeline for a reason."""
    async with guarded_server() as app, connect(app.port) as client:
        app.go.set()
        await client.write(b"".join(request_bytes("GET", f"/{index}") for index in range(60)))
        assert [(await client.read_answer()).body for _ in range(60)] == [b"ok"] * 60
        assert [path for path, _, _ in app.requests] == [f"/{index}" for index in range(60)]


async def test_too_many_pipelined_requests_are_refused() -> None:
    """Thousands of them fit into one packet, and each costs kilobytes."""
    async with guarded_server() as app, connect(app.port) as client:
        await client.write(request_bytes("GET", "/x") * 2000)
        await eventually(lambda: app.refusals, "the excess is refused")
        app.go.set()
        statuses = [(await client.read_answer()).status for _ in range(MAX_PIPELINED + 2)]
        assert statuses == [200] * (MAX_PIPELINED + 1) + [400], "what came before it is served"
        assert await client.is_closed()
        assert app.refusals == ["too_many_pipelined"]


@pytest.mark.parametrize("cut", [1, 30, 100, 150])
async def test_an_offer_to_upgrade_is_declined_and_the_body_read(cut: int) -> None:
    """httptools takes what follows such a head for another protocol (Java's client offers h2c with
    its first request)."""
    offer = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAAA"}
    data = request_bytes("POST", "/x", b"the body", offer)
    async with guarded_server() as app, connect(app.port) as client:
        app.go.set()
        await client.write(data[:cut])
        await until_received(app, len(data[:cut]))
        await client.write(data[cut:])
        found = await client.read_answer()
        assert (found.status, found.headers["connection"]) == (200, "close")
        ((path, body, headers),) = app.requests
        assert (path, body, headers[b"upgrade"]) == ("/x", b"the body", b"h2c")
        assert await client.is_closed()


@pytest.mark.parametrize(
    "framing",
    ["transfer-encoding: chunked\r\ncontent-length: 5", "content-length: 5\r\ncontent-length: 6"],
)
async def test_invalid_framing_is_refused_behind_an_offer_to_upgrade(framing: str) -> None:
    """Two readers of one message that disagree about its end are how requests are smuggled (RFC
    9112 6.3)."""
    async with guarded_server() as app, connect(app.port) as client:
        app.go.set()
        head = f"POST /x HTTP/1.1\r\nconnection: upgrade\r\nupgrade: x\r\n{framing}\r\n\r\n"
        await client.write(head.encode() + b"0\r\n\r\n")
        assert await client.is_closed()
        assert app.refusals == ["malformed_http"]


@pytest.mark.parametrize("cut", [0, 1])
@pytest.mark.parametrize("offer", [b"", b"connection: upgrade\r\nupgrade: h2c\r\n"])
@pytest.mark.parametrize(
    "trailers",
    [
        b"x: 1\r\n",
        b"content-length: 9\r\n",
        b"transfer-encoding: gzip\r\n",
        b"content-length: 0\r\ntransfer-encoding: chunked\r\n",
    ],
)
async def test_trailers_are_dropped_whatever_they_say(
    trailers: bytes, offer: bytes, cut: int
) -> None:
    """Some clients repeat there what they could not say in the head; other servers drop it, and
    what follows must still be read as its own head frames it."""
    head = CHUNKED.replace(b"host: x\r\n", b"host: x\r\n" + offer)
    first = head + b"2\r\nab\r\n0\r\n" + trailers + b"\r\n"
    second = b"" if offer else request_bytes("POST", "/y", b"cd")
    async with guarded_server() as app, connect(app.port) as client:
        app.go.set()
        data = first + second
        for piece in [data[at : at + 1] for at in range(len(data))] if cut else [data]:
            await client.write(piece)
        for _ in range(1 if offer else 2):
            assert (await client.read_answer()).status == 200
    assert [(path, body) for path, body, _ in app.requests] == [
        ("/x", b"ab"),
        *([] if offer else [("/y", b"cd")]),
    ]


async def test_a_head_after_trailers_is_framed_as_strictly_as_any() -> None:
    """What is let pass in trailers would be request smuggling in a head."""
    first = CHUNKED + b"2\r\nab\r\n0\r\ncontent-length: 9\r\n\r\n"
    both = CHUNKED.replace(b"\r\n\r\n", b"\r\ncontent-length: 2\r\n\r\n") + b"ab"
    async with guarded_server() as app, connect(app.port) as client:
        app.go.set()
        await client.write(first + both)
        assert [(await client.read_answer()).status for _ in range(2)] == [200, 400]
    assert [path for path, _, _ in app.requests] == ["/x"]


async def test_a_refused_client_can_read_why() -> None:
    """If it were closed at once, the bytes still being sent would reset it, and the response would
    be lost."""
    async with guarded_server() as app, connect(app.port) as client:
        writing = asyncio.create_task(write_on(client))
        assert await client.read_head() == 431
        assert b"4096 bytes" in await client.read_body()
        assert client.headers["connection"] == "close"
        app.look(LIMITS.slack_s + 1)
        with contextlib.suppress(ConnectionError):
            await writing
        assert app.refusals == ["headers_too_large"]


async def write_on(client: HttpClient) -> None:
    await client.write(b"GET /x HTTP/1.1\r\nx: ")
    for _ in range(1000):
        await client.write(b"y" * 10_000)
        await asyncio.sleep(0)


async def test_a_malformed_body_gets_an_error_as_its_requests_response() -> None:
    """The application has the request, but cannot respond before the body is complete."""
    async with guarded_server() as app, connect(app.port) as client:
        await client.write(CHUNKED + b"5\r\nhello\r\n")
        await eventually(lambda: app.state.tasks, "the application has it")
        await client.write(b"no size\r\n")
        found = await client.read_answer()
        assert (found.status, found.error["code"]) == (400, "malformed_http")
        assert await client.is_closed()
        await eventually(
            lambda: not app.state.tasks, "the application has heard that nothing more will come"
        )


async def test_an_error_after_a_request_is_not_sent_as_its_response() -> None:
    """The client would take the error for the response to the request."""
    async with guarded_server() as app, connect(app.port) as client:
        await client.write(request_bytes("GET", "/x"))
        await eventually(lambda: app.requests, "the request is under way")
        await client.write(b"nonsense\r\n\r\n")
        await eventually(lambda: app.refusals == ["malformed_http"], "the nonsense is refused")
        app.go.set()
        assert [(await client.read_answer()).status for _ in range(2)] == [200, 400]
        assert await client.is_closed()


async def test_a_request_is_not_lost_for_bad_bytes_in_its_own_segment() -> None:
    """A client that forgets content-length would otherwise see nothing but the end."""
    async with guarded_server() as app, connect(app.port) as client:
        app.go.set()
        await client.write(b'POST /x HTTP/1.1\r\nhost: x\r\n\r\n{"model": "m"}\r\n\r\n')
        assert [(await client.read_answer()).status for _ in range(2)] == [200, 400]
        assert await client.is_closed()


async def test_a_pipelined_request_with_a_malformed_body_is_not_served() -> None:
    """The one before it is."""
    async with guarded_server() as app, connect(app.port) as client:
        await client.write(request_bytes("GET", "/whole") + CHUNKED + b"no size\r\n")
        await eventually(lambda: app.refusals, "the body is refused")
        app.go.set()
        assert [(await client.read_answer()).status for _ in range(2)] == [200, 400]
        assert await client.is_closed()
        assert [path for path, _, _ in app.requests] == ["/whole"]


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        (b"", 400, "bad_host"),
        (b"host: a\r\nhost: a\r\n", 400, "bad_host"),
        (b"host: a\r\nHOST: b\r\n", 400, "bad_host"),
        (b"host: a\r\ntransfer-encoding: gzip, chunked\r\n", 501, "unknown_transfer_coding"),
        (b"host: a\r\ntransfer-encoding: x\r\ntransfer-encoding: chunked\r\n", 501, None),
    ],
)
async def test_a_head_that_two_readers_may_take_differently_is_refused(
    headers: bytes, status: int, code: str | None
) -> None:
    """RFC 9112 3.2 and 6.1."""
    async with guarded_server() as app, connect(app.port) as client:
        app.go.set()
        await client.write(b"POST /x HTTP/1.1\r\n" + headers + b"\r\n0\r\n\r\n")
        found = await client.read_answer()
        assert found.status == status
        assert found.error["code"] == (code or "unknown_transfer_coding")
        assert app.requests == []


@pytest.mark.parametrize("host", [b"", b"host: x\r\n"])
async def test_a_client_of_http_1_0_gets_its_body_without_chunks(host: bytes) -> None:
    """It does not know them (RFC 9112 6.1); the connection's end is the body's."""
    async with guarded_server() as app, connect(app.port) as client:
        app.go.set()
        app.has_length = False
        await client.write(b"GET /x HTTP/1.0\r\n" + host + b"\r\n")
        raw = await client.reader.read()
        head, _, body = raw.partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head
        assert b"connection: close" in head
        assert body == b"ok"


# --- clients that stop sending --------------------------------------------------------------------


async def test_a_client_that_stops_sending_gets_its_response() -> None:
    """netcat does so at the end of its input, and so do scripts that call `shutdown`."""
    async with guarded_server() as app, connect(app.port) as client:
        await client.write(request_bytes("GET", "/x") * 3)
        client.writer.write_eof()
        await eventually(lambda: app.requests, "the request is under way")
        await eventually(lambda: app.has_probed, "the server has sent its probes")
        app.go.set()
        assert [(await client.read_answer()).body for _ in range(3)] == [b"ok"] * 3
        assert await client.is_closed()
        assert app.gone == []


@pytest.mark.parametrize("first", [b"", b"begun "])
@pytest.mark.parametrize("has_length", [False, True])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_a_client_that_stops_sending_loses_nothing_of_its_response(
    version: str, has_length: bool, first: bytes
) -> None:
    """Neither before its first byte nor in the middle, for whatever is sent to find out who has
    left."""
    async with guarded_server() as app, connect(app.port) as client:
        app.first, app.has_length = first, has_length
        await client.write(f"GET /x HTTP/{version}\r\nhost: x\r\n\r\n".encode())
        await eventually(lambda: app.requests, "the request is under way")
        client.writer.write_eof()
        await eventually(lambda: app.has_probed, "the server has sent its probes")
        app.go.set()
        if version == "1.1":
            assert (await client.read_answer()).body == first + b"ok"
        else:
            raw = await client.reader.read()
            assert raw.startswith(b"HTTP/1.1 200 ")
            assert raw.partition(b"\r\n\r\n")[2] == first + b"ok"
        assert await client.is_closed()
        assert (app.gone, app.refusals) == ([], [])


@pytest.mark.parametrize("reset", [False, True])
async def test_a_client_that_closes_is_noticed_in_mid_stream(reset: bool) -> None:
    """Also while the stream is silent, when nothing is written to it."""
    async with guarded_server() as app, connect(app.port) as client:
        app.first, app.has_length = b"begun ", False
        await client.write(request_bytes("GET", "/x"))
        await client.read_head()
        client.leave(reset)
        await eventually(lambda: app.gone == ["/x"], "it hears that its client has left")


@pytest.mark.parametrize("has_length", [False, True])
@pytest.mark.parametrize("first", [b"", b"begun "])
async def test_a_client_that_stops_sending_and_then_breaks_off_is_noticed(
    first: bytes, has_length: bool
) -> None:
    """The reset comes on a connection that has nothing more to be read."""
    async with guarded_server() as app, connect(app.port) as client:
        app.first, app.has_length = first, has_length
        await client.write(request_bytes("GET", "/x"))
        await eventually(lambda: app.requests, "the request is under way")
        client.writer.write_eof()
        await eventually(lambda: app.has_probed, "the server has sent its probes")
        client.leave(reset=True)
        await eventually(lambda: app.look(0) or app.gone == ["/x"], "it hears that it has left")


@pytest.mark.parametrize("reset", [False, True])
async def test_a_client_that_closes_is_noticed_before_its_response(reset: bool) -> None:
    """With FIN it looks like one that only stops sending, and the engine would work for nobody."""
    async with guarded_server() as app, connect(app.port) as client:
        await client.write(request_bytes("GET", "/x"))
        await eventually(lambda: app.requests, "the request is under way")
        client.leave(reset)
        await eventually(lambda: app.gone == ["/x"], "it hears that its client has left")


@pytest.mark.parametrize(
    "data", [b"\x16\x03\x01\x02\x00", b"GET / HTTP/9.9\r\n\r\n", b"nonsense\r\n\r\n"]
)
async def test_bytes_that_are_not_http_get_one_error_and_are_counted(data: bytes) -> None:
    """Scanners and TLS clients on the wrong port connect every day."""
    async with guarded_server() as app, connect(app.port) as client:
        await client.write(data)
        found = await client.read_answer()
        assert (found.status, found.error["code"]) == (400, "malformed_http")
        assert await client.is_closed()
        assert app.refusals == ["malformed_http"]


class _NoRoom(bytearray):
    def __iadd__(self, more: object) -> _NoRoom:
        raise MemoryError


async def test_a_body_that_there_is_no_memory_for_is_the_routers_own_failure() -> None:
    """Its client was told that the request is malformed, so that it would never try again."""
    async with guarded_server() as server, connect(server.port) as client:
        await client.write(b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nbegin")
        await eventually(lambda: server.connection.cycle is not None, "the head is read")
        server.connection.cycle.body = _NoRoom()
        await client.write(b"more")
        found = await client.read_answer()
        assert (found.status, found.error["code"]) == (503, "overloaded")
        assert found.headers["retry-after"] == "1"
        assert server.refusals == [OUT_OF_MEMORY]
        assert await client.is_closed()
