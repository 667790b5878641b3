"""What one client's connection may do, and cost: the compiled data plane on real sockets.

Times are short here. That one has passed is seen by a stranger's connection: it says nothing, came
later than what is looked at, and is ended when its time is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import resource
import socket
import time
import weakref
from collections.abc import Iterator

import pytest

from tests.router.plane.server import Served, one_client, plane_server
from tests.support.http_client import HttpClient, connect, request_bytes
from tests.support.waiting import DEADLINE_S, eventually

CHUNKED = b"POST /x HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
SHORT_S = 1.0
"""For what never comes; what does come is this much later on a busy machine at most."""
LONG = b"x" * 10_000_000
NEWEST = 8
"""So many silent connections stay where descriptors are short: their requests may be on the way."""


async def stranger_is_ended(served: Served) -> None:
    """Wait for as long as a connection may be silent."""
    before = len(served.refusals)
    async with connect(served.port) as stranger:
        assert await stranger.is_closed()
    assert served.refusals[before:] == ["slow_request"]


# --- time limits ----------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [b"\r\n", b"POST /x HTTP/1.1\r\nx: "])
async def test_between_two_requests_a_client_may_be_silent_but_not_within_one(start: bytes) -> None:
    """Clients keep connections for their next request; one that has begun holds what it sent."""
    async with one_client(request_s=SHORT_S) as (served, client):
        assert (await client.ask("GET", "/first")).status == 200
        await stranger_is_ended(served)
        assert (await client.ask("GET", "/second")).status == 200
        await client.write(start)
        assert await client.is_closed()
        assert served.refusals == ["slow_request"] * 2


@pytest.mark.parametrize(
    "behind", [b"", b"\r\n", b"GET /next HTTP/1.1\r\nx: ", request_bytes("GET", "/next")]
)
async def test_a_long_response_is_not_mistaken_for_a_slow_request(behind: bytes) -> None:
    """A stream may last an hour, and during it the router does not read the next request."""
    async with one_client(request_s=SHORT_S) as (served, client):
        served.goes = False
        await client.write(request_bytes("POST", "/x", b"{}"))
        request = await served.until_waiting()
        await client.write(behind)
        await stranger_is_ended(served)
        request.respond()
        assert (await client.read_answer()).body == b"ok"
        assert served.left == []


async def test_a_connection_that_sends_nothing_more_is_closed_after_a_while() -> None:
    """Each costs a file descriptor, and clients that are gone without a word are never heard of
    again. A request that is under way keeps it open, and it is nobody's fault."""
    async with one_client(keep_alive_s=SHORT_S) as (served, client):
        served.goes = False
        await client.send("GET", "/long")
        request = await served.until_waiting()
        served.goes = True
        async with connect(served.port) as other:
            assert (await other.ask("GET", "/short")).status == 200
            assert await other.is_closed()
        request.respond()
        assert (await client.read_answer()).status == 200
        assert await client.is_closed()
        assert served.refusals == []


async def test_a_finished_response_that_is_never_read_is_ended() -> None:
    """Its handler has finished, so nothing else would notice: socket and buffer would stay for
    ever."""
    async with one_client(receive_buffer=2048, client_stall_s=SHORT_S) as (served, client):
        served.goes = False
        await client.send("GET", "/x")
        (await served.until_waiting()).respond(LONG)
        await eventually(lambda: served.refusals == ["response_not_read"], "it is ended")
        await eventually(lambda: served.clients() == 0, "and closed")


async def test_a_body_that_its_handler_does_not_read_must_arrive_in_time() -> None:
    """Whoever reads a body times it, and is given five seconds to say so; this is for those that
    nobody reads."""
    async with one_client(request_s=SHORT_S) as (served, client):
        await client.write(request_bytes("POST", "/ignored", b"x" * 1000)[:-500])
        await served.until_waiting()
        assert await client.is_closed()
        assert served.refusals == ["slow_request"]
        await eventually(lambda: served.left == ["/ignored"], "its handler hears of it")


async def test_the_rest_of_a_body_that_nobody_wants_must_arrive_in_time() -> None:
    """Its request has been refused already; trickling on must not keep the connection."""
    async with one_client(request_s=SHORT_S) as (served, client):
        await client.write(request_bytes("POST", "/refused", b"x" * 1000)[:-500])
        assert (await client.read_answer()).status == 401
        assert await client.is_closed()
        assert served.refusals == ["slow_request"]


# --- the last descriptors -------------------------------------------------------------------------


@pytest.mark.parametrize("start", [b"", b"GET /x HTTP/1.1\r\nx: "])
async def test_on_one_of_the_last_descriptors_a_head_has_two_seconds(start: bytes) -> None:
    """There are a few dozen of them, and probes wait for one: a minute for each stranger would keep
    all of them out."""
    began = time.monotonic()
    async with one_client(reserved_from=0) as (served, client):
        await client.write(start)
        assert await client.is_closed()
        assert time.monotonic() - began >= 2
        assert served.refusals == ["reserve", "slow_request"]


async def test_one_of_the_last_descriptors_serves_one_request() -> None:
    """The next probe waits for it."""
    async with one_client(reserved_from=0) as (served, client):
        found = await client.ask("GET", "/healthz")
        assert (found.status, found.headers["connection"]) == (200, "close")
        assert await client.is_closed()
        assert served.refusals == ["reserve"], "that is no fault of its own"


async def test_where_files_are_short_those_make_room_that_never_asked_for_anything() -> None:
    """The oldest first. Whoever has been of use, and whose request may just not be there yet,
    stays."""
    # Above all that are open: a lower one that is free says nothing of how many there are.
    reserved_from = max(map(int, os.listdir("/proc/self/fd"))) + 200
    async with (
        plane_server(reserved_from=reserved_from) as served,
        contextlib.AsyncExitStack() as stack,
    ):

        async def accepted() -> HttpClient:
            before = served.clients()
            client = await stack.enter_async_context(connect(served.port))
            await eventually(lambda: served.clients() == before + 1, "it is accepted")
            return client

        idle = await accepted()
        assert (await idle.ask("GET", "/first")).status == 200
        busy = await accepted()
        served.goes = False
        await busy.send("GET", "/under-way")
        request = await served.until_waiting(2)
        served.goes = True
        oldest = [await accepted() for _ in range(2)]
        await oldest[0].write(b"GET /half HTTP/1.1\r\nx: ")
        newest = [await accepted() for _ in range(NEWEST)]
        stack.enter_context(all_taken_below(reserved_from))
        probe = await stack.enter_async_context(connect(served.port))
        assert [await client.is_closed() for client in oldest] == [True] * 2
        assert (await probe.ask("GET", "/healthz")).status == 200
        assert served.refusals == ["reserve"], "that is no fault of theirs"
        request.respond()
        assert (await busy.read_answer()).status == 200
        for client in (idle, busy, *newest):
            assert (await client.ask("GET", "/again")).status == 200


async def test_where_no_descriptor_is_left_kept_connections_make_room() -> None:
    """Clients that keep every connection would otherwise keep all others out for as long as they
    are idle. The one that has been idle longest goes first; what is being served stays."""
    async with plane_server() as served, contextlib.AsyncExitStack() as stack:
        kept = [await stack.enter_async_context(connect(served.port)) for _ in range(70)]
        for client in kept:
            assert (await client.ask("GET", "/first")).status == 200
        served.goes = False
        await kept[0].send("GET", "/under-way")
        request = await served.until_waiting(len(kept) + 1)
        served.goes = True
        with socket.socket() as newcomer:
            newcomer.settimeout(DEADLINE_S)
            with no_descriptor_left():
                newcomer.connect(("127.0.0.1", served.port))
                newcomer.sendall(request_bytes("GET", "/new"))
                assert (await asyncio.to_thread(newcomer.recv, 100)).startswith(b"HTTP/1.1 200 ")
        assert await kept[1].is_closed(), "it was idle longest"
        assert (await kept[-1].ask("GET", "/again")).status == 200
        request.respond()
        assert (await kept[0].read_answer()).status == 200


async def test_where_nothing_makes_room_the_plane_does_not_spin() -> None:
    """The connection that cannot be accepted stays in the queue, and is reported again and
    again: the thread that serves all others would have half a core for them."""
    async with plane_server() as served, contextlib.AsyncExitStack() as stack:
        served.goes = False
        busy = await stack.enter_async_context(connect(served.port))
        await busy.send("GET", "/under-way")
        request = await served.until_waiting()
        with socket.socket() as newcomer:
            with no_descriptor_left():
                newcomer.connect(("127.0.0.1", served.port))
                began = time.process_time()
                assert not await busy.is_closed(within_s=1.0)
                assert time.process_time() - began < 0.2
            served.goes = True
            newcomer.settimeout(DEADLINE_S)
            newcomer.sendall(request_bytes("GET", "/new"))
            assert (await asyncio.to_thread(newcomer.recv, 100)).startswith(b"HTTP/1.1 200 ")
        request.respond()
        assert (await busy.read_answer()).status == 200


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    """This process can open no file and accept no connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    taken: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)


async def test_a_plane_that_has_ended_leaves_no_descriptor() -> None:
    """Its port would still take connections that nobody serves."""
    async with plane_server(threads=3) as served:
        port = served.port
    with socket.socket() as late:
        assert late.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED


async def test_connections_are_shared_evenly_by_the_threads() -> None:
    """The kernel wakes one thread for a burst, and whoever takes it has all of a gateway's few kept
    connections: two threads served no more than one did."""
    async with plane_server(threads=3) as served, contextlib.AsyncExitStack() as stack:

        async def accepted() -> HttpClient:
            before = served.clients()
            client = await stack.enter_async_context(connect(served.port))
            await eventually(lambda: served.clients() == before + 1, "it is accepted")
            return client

        clients = [await accepted() for _ in range(12)]
        assert served.clients_by_thread() == [4, 4, 4]
        for client in clients[:6]:
            assert (await client.ask("GET", "/served")).status == 200
            client.leave()
        await eventually(lambda: served.clients() == 6, "half of them left")
        clients[:6] = [await accepted() for _ in range(6)]
        assert served.clients_by_thread() == [4, 4, 4]
        for client in clients:
            assert (await client.ask("GET", "/served")).status == 200


@contextlib.contextmanager
def all_taken_below(limit: int) -> Iterator[None]:
    """No new descriptor of this process is below it."""
    gc.collect()  # a socket that is collected later would make room again
    taken = [os.dup(0)]
    while taken[-1] < limit:
        taken.append(os.dup(0))
    try:
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)


# --- several requests on one connection -----------------------------------------------------------


@pytest.mark.parametrize("behind", [3, 3000])
@pytest.mark.parametrize("reset", [False, True])
async def test_only_the_running_request_hears_that_its_client_left(
    reset: bool, behind: int
) -> None:
    """The engine would work on for no one; those behind it have not begun, and not all are read."""
    waits = request_bytes("GET", "/waits") * behind
    async with one_client() as (served, client):
        served.goes = False
        await client.write(request_bytes("GET", "/under-way") + waits)
        await served.until_waiting()
        client.leave(reset)
        await eventually(lambda: served.left == ["/under-way"], "it hears that its client has left")
        await eventually(lambda: served.clients() == 0, "its socket is closed")
        assert served.begun == ["/under-way"]


async def test_a_request_that_was_refused_early_does_not_spoil_the_next_one() -> None:
    """Its body still arrives, and must not be taken for a request, nor for the next one's body."""
    async with one_client() as (served, client):
        whole = request_bytes("POST", "/refused", b"x" * 1000)
        await client.write(whole[:-500])
        assert (await client.read_answer()).status == 401
        await client.write(whole[-500:] + request_bytes("POST", "/a", b"mine"))
        assert (await client.read_answer()).body == b"mine"
        assert [request.path for request in served.requests] == ["/a"]


async def test_a_head_request_gets_no_body() -> None:
    """What follows would be taken for the next response."""
    async with one_client() as (_, client):
        await client.write(request_bytes("HEAD", "/a") + request_bytes("POST", "/b", b"mine"))
        assert await client.read_head() == 200
        assert client.headers["content-length"] == "2"
        assert (await client.read_answer()).body == b"mine"


async def test_a_head_behind_trailers_is_framed_as_strictly_as_any() -> None:
    """Trailers may say anything, as they are dropped; a head that says it smuggles a request."""
    first = CHUNKED + b"2\r\nab\r\n0\r\ncontent-length: 9\r\n\r\n"
    both = CHUNKED.replace(b"\r\n\r\n", b"\r\ncontent-length: 2\r\n\r\n") + b"ab"
    async with one_client() as (served, client):
        await client.write(first + both)
        assert [(await client.read_answer()).status for _ in range(2)] == [200, 400]
        assert [(request.path, request.body) for request in served.requests] == [("/x", b"ab")]


# --- bodies that nobody takes ---------------------------------------------------------------------


async def test_a_body_that_nobody_takes_is_not_read_on() -> None:
    """A wrong key's refusal is held back; what its client sends meanwhile must cost no memory."""
    head = b"POST /ignored HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(LONG)
    async with one_client() as (served, client):
        writing = asyncio.create_task(client.write(head + LONG))
        request = await served.until_waiting()
        for _ in range(len(LONG) // 65_536):  # at each it could read as much
            await served.gets_around()
        assert not writing.done(), "most of it is still with its client"
        request.respond(b"no", 401)
        await writing
        assert (await client.read_answer()).status == 401
        assert (await client.ask("POST", "/a", b"mine")).body == b"mine"


@pytest.mark.usefixtures("no_garbage_collection")
async def test_a_body_that_nobody_took_goes_with_its_response() -> None:
    """Refused clients that keep their connections would each hold a buffer of the router's."""
    async with one_client() as (served, client):
        await client.write(request_bytes("POST", "/ignored", b"x" * 1000))
        request = weakref.ref(await served.until_waiting())
        served.waiting.pop().respond(b"no", 401)
        assert (await client.read_answer()).status == 401
        assert request() is None, "nobody holds it"


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """It would hide circles."""
    gc.disable()
    yield
    gc.enable()


async def test_a_body_that_there_is_no_memory_for_is_the_routers_own_failure() -> None:
    """A client that was told that its request is malformed would never try again, and whoever
    serves it must let go of what it holds."""
    async with one_client() as (served, client):
        found = await client.ask("POST", "/large", b"x")
        assert (found.status, found.error["code"]) == (503, "overloaded")
        assert found.headers["retry-after"] == "1"
        assert served.refusals == ["overloaded"]
        await eventually(lambda: served.left == ["/large"], "its handler hears that it is over")
        assert (await client.ask("POST", "/a", b"mine")).body == b"mine"


@pytest.mark.parametrize("path", ["/x", "/ignored"])
async def test_a_client_that_expects_it_is_asked_for_its_body(path: str) -> None:
    """curl waits a second for 100 Continue before it sends more than 1 KB. Where the body is not
    wanted it may send it or not, so that its connection has to end (RFC 9110 10.1.1)."""
    head = request_bytes("POST", path, b"hi", {"expect": "100-continue"}).removesuffix(b"hi")
    async with one_client() as (served, client):
        await client.write(head)
        if path == "/x":
            assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            await client.write(b"hi")
            assert (await client.read_answer()).body == b"hi"
            assert (await client.ask("GET", "/next")).status == 200
        else:
            (await served.until_waiting()).respond(b"no", 401)
            raw = await client.reader.read()
            assert raw.startswith(b"HTTP/1.1 401 ")
            assert b"connection: close\r\n" in raw


# --- HTTP/1.0 -------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", [b"", b"host: x\r\n"])
@pytest.mark.parametrize("has_length", [False, True])
async def test_a_client_of_http_1_0_gets_its_body_without_chunks(
    host: bytes, has_length: bool
) -> None:
    """It knows neither them nor interim responses (RFC 9112 6.1, RFC 9110 10.1.1); the connection's
    end is the body's."""
    async with one_client() as (served, client):
        served.goes = False
        head = b"POST /x HTTP/1.0\r\n" + host + b"expect: 100-continue\r\ncontent-length: 2\r\n\r\n"
        await client.write(head)
        await served.gets_around()
        await client.write(b"hi")
        (await served.until_waiting()).respond(has_length=has_length)
        raw = await client.reader.read()
        assert raw.startswith(b"HTTP/1.1 200 OK\r\n")
        assert raw.endswith(b"connection: close\r\n\r\nok")
        assert b"transfer-encoding" not in raw


# --- what is no request ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data", [b"\x16\x03\x01\x02\x00", b"GET / HTTP/1.9\r\n\r\n", b"nonsense\r\n\r\n"]
)
async def test_bytes_that_are_not_http_get_one_error_and_are_counted(data: bytes) -> None:
    """Scanners and TLS clients on the wrong port connect every day."""
    async with one_client() as (served, client):
        await client.write(data)
        found = await client.read_answer()
        assert (found.status, found.error["code"]) == (400, "malformed_http")
        assert found.headers["connection"] == "close"
        assert await client.is_closed()
        assert (served.refusals, served.begun) == (["malformed_http"], [])


async def test_a_refused_client_can_read_why() -> None:
    """If it were closed at once, the bytes still being sent would reset it, and the response would
    be lost."""
    async with one_client(head_bytes=4096) as (served, client):
        writing = asyncio.create_task(client.write(b"GET /x HTTP/1.1\r\nx: " + LONG))
        assert await client.read_head() == 431
        assert b"4096 bytes" in await client.read_body()
        assert client.headers["connection"] == "close"
        await writing
        assert served.refusals == ["headers_too_large"]


@pytest.mark.parametrize("head", ["1.0\r\n", "1.1\r\nconnection: close\r\n"])
async def test_a_client_that_keeps_no_connection_can_read_why_it_is_refused(head: str) -> None:
    """Its body is still on the way, and closing at once would reset it."""
    async with one_client() as (served, client):
        start = f"POST /refused HTTP/{head}host: x\r\ncontent-length: {len(LONG)}\r\n\r\n"
        await client.write(start.encode() + LONG)
        assert (await client.read_answer()).status == 401
        assert client.headers["connection"] == "close"
        assert await client.reader.read() == b""
        client.leave()
        await eventually(lambda: served.clients() == 0, "and closed")
        assert served.refusals == []


async def test_a_malformed_body_gets_an_error_as_its_requests_response() -> None:
    """Its handler cannot respond before the body is complete, and learns that it will not be."""
    async with one_client() as (served, client):
        await client.write(CHUNKED + b"5\r\nhello\r\n")
        await eventually(lambda: served.begun, "the handler has it")
        await client.write(b"no size\r\n")
        found = await client.read_answer()
        assert (found.status, found.error["code"]) == (400, "malformed_http")
        assert await client.is_closed()
        await eventually(lambda: served.left == ["/x"], "nothing more will come")
        assert served.refusals == ["malformed_http"]


async def test_an_error_after_a_request_is_not_sent_as_its_response() -> None:
    """The client would take the error for the response to the request."""
    async with one_client() as (served, client):
        served.goes = False
        await client.write(request_bytes("GET", "/x"))
        request = await served.until_waiting()
        await client.write(b"nonsense\r\n\r\n")
        await served.gets_around()
        request.respond()
        assert [(await client.read_answer()).status for _ in range(2)] == [200, 400]
        assert await client.is_closed()
        assert served.refusals == ["malformed_http"]


async def test_a_request_is_not_lost_for_bad_bytes_in_its_own_segment() -> None:
    """A client that forgets content-length would otherwise see nothing but the end."""
    async with one_client() as (_, client):
        await client.write(b'POST /x HTTP/1.1\r\nhost: x\r\n\r\n{"model": "m"}\r\n\r\n')
        assert [(await client.read_answer()).status for _ in range(2)] == [200, 400]
        assert await client.is_closed()


async def test_a_pipelined_request_with_a_malformed_body_is_not_served() -> None:
    """The one before it is."""
    async with one_client() as (served, client):
        await client.write(request_bytes("GET", "/whole") + CHUNKED + b"no size\r\n")
        assert [(await client.read_answer()).status for _ in range(2)] == [200, 400]
        assert await client.is_closed()
        assert [request.path for request in served.requests] == ["/whole"]


async def test_a_body_that_breaks_its_announced_length_ends_the_connection() -> None:
    """The client could not tell where it ends, and the next response would be a part of it."""
    async with one_client() as (served, client):
        served.goes = False
        await client.send("GET", "/x")
        exchange = (await served.until_waiting()).exchange
        exchange.respond(200, [(b"content-length", b"3")], b"four")
        assert await client.is_closed()


# --- clients that stop sending --------------------------------------------------------------------


@pytest.mark.parametrize("half", [b"", b"GET /half HTTP/1.1\r\n", CHUNKED + b"2\r\na"])
async def test_a_client_that_stops_sending_gets_its_responses(half: bytes) -> None:
    """netcat does so at the end of its input, and so do scripts that call `shutdown`. What has
    no end yet is no request."""
    async with one_client() as (served, client):
        served.goes = False
        await client.write(request_bytes("GET", "/x") * 3 + half)
        client.writer.write_eof()
        (await served.until_waiting()).respond()
        (await served.until_waiting(2)).respond()
        (await served.until_waiting(3)).respond()
        assert [(await client.read_answer()).body for _ in range(3)] == [b"ok"] * 3
        assert await client.is_closed()
        await eventually(lambda: served.clients() == 0, "nothing is left")
        assert [request.path for request in served.requests] == ["/x"] * 3
        assert served.refusals == []


async def test_a_client_that_stops_sending_behind_many_requests_gets_all_responses() -> None:
    """That it sends no more is seen before all of them are read."""
    count = 3000
    async with one_client() as (served, client):
        served.goes = False
        await client.write(request_bytes("GET", "/x") * count)
        client.writer.write_eof()
        first = await served.until_waiting()
        await served.gets_around()
        served.goes = True
        first.respond()
        assert [(await client.read_answer()).body for _ in range(count)] == [b"ok"] * count
        assert await client.is_closed()
        await eventually(lambda: served.clients() == 0, "nothing is left")
        assert (len(served.requests), served.left, served.refusals) == (count, [], [])


async def test_a_client_that_stops_sending_within_a_request_is_gone() -> None:
    """The rest of its body will never come."""
    async with one_client() as (served, client):
        await client.write(CHUNKED + b"2\r\na")
        await eventually(lambda: served.begun, "the handler has it")
        client.writer.write_eof()
        assert await client.is_closed()
        await eventually(lambda: served.left == ["/x"], "the handler hears of it")
