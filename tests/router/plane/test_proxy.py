"""The proxy between real clients and real servers: nothing changed, nothing lost, nothing left
behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from async_timeout import timeout
from msgspec import structs

from router.config.origin import Origin
from router.plane.attempts import Attempt, Failure
from router.plane.proxy_types import (
    Dialect,
    End,
    ProxyRequest,
)
from tests.router.proxy_server import TIMEOUTS, Recorder, proxy_server
from tests.router.raw_http import (
    EVENT_STREAM,
    Handler,
    RawClient,
    RawConnection,
    RawRequest,
    RawServer,
    answer,
    answering,
    full_listener,
    raw_client,
    raw_server,
)
from tests.support.waiting import DEADLINE_S, eventually

CHUNKED_JSON = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
)
DONE = b"data: [DONE]\n\n"


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text}]}).encode() + b"\n\n"


def attempt(server: RawServer, name: str = "r0") -> Attempt:
    return Attempt(name, server.origin)


def dead() -> Attempt:
    """A candidate whose port is closed."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return Attempt("dead", Origin.parse(f"http://127.0.0.1:{free.getsockname()[1]}"))


def streaming(*events: bytes, then: str = "end") -> Handler:
    """A handler that streams *events* and then ends the body, closes, resets, or waits until the
    peer has closed."""

    async def handle(connection: RawConnection) -> None:
        while await connection.read_request() is not None:
            await streaming_now(connection, *events)
            if then == "end":
                await connection.send_chunk(b"")
                continue
            if then == "wait":
                await connection.wait_closed()
            elif then == "reset":
                connection.reset()
            return

    return handle


async def streaming_now(connection: RawConnection, *pieces: bytes) -> None:
    """The beginning of an event stream, each piece a chunk of its own."""
    await connection.send(EVENT_STREAM)
    for piece in filter(None, pieces):
        await connection.send_chunk(piece)


@contextlib.asynccontextmanager
async def one_replica(
    handler: Handler, **options: Any
) -> AsyncIterator[tuple[Any, RawClient, RawServer]]:
    """A replica, the proxy before it, and a client."""
    async with (
        raw_server(handler) as replica,
        proxy_server([attempt(replica)], **options) as proxy,
        raw_client(proxy.port) as client,
    ):
        yield proxy, client, replica


# Unchanged


async def test_an_event_stream_arrives_byte_for_byte_and_event_by_event() -> None:
    """Each event must be at the client before the replica makes the next one: no buffering
    anywhere."""
    pieces = [
        event("a"),
        b": ping\n\n",
        b"event: x\r\ndata: \xff\xfe\r\n\r\n",
        event("ü" * 9000),
        b"data: x\n",
        b"\n",
        DONE,
    ]
    arrived = asyncio.Semaphore(0)

    async def handle(connection: RawConnection) -> None:
        await connection.read_request()
        await connection.send(EVENT_STREAM)
        for piece in pieces:
            await connection.send_chunk(piece)
            await arrived.acquire()
        await connection.send_chunk(b"")
        await connection.wait_closed()

    async with one_replica(handle) as (proxy, client, _):
        await client.request()
        assert await client.read_head() == 200
        assert client.headers["content-type"] == "text/event-stream; charset=utf-8"
        for piece in pieces:
            assert await client.read_piece(2) == piece
            arrived.release()
        assert await client.read_piece() == b""
        recorder = await proxy.recorder(End.COMPLETED)
        # a, x, the long one, the one in two pieces, and the last.
        assert recorder.events == 5


async def test_an_event_stream_cut_anywhere_arrives_byte_for_byte() -> None:
    """TCP cuts where it likes; also a stream that ends without a line end is passed on whole."""
    whole = event("héllo") + b"data: a\r\n\r\n" + DONE + b"data: no end"
    async with one_replica(
        streaming(*(whole[index : index + 1] for index in range(len(whole))))
    ) as (_, client, _):
        assert await client.ask() == whole


async def test_a_last_line_without_an_end_is_passed_on_when_the_end_of_the_body_comes_later() -> (
    None
):
    """Held back while more might follow, it was lost where the end came in a packet of its own."""
    whole, has_come = event("a") + b"data: no end", asyncio.Event()

    async def handle(connection: RawConnection) -> None:
        await connection.read_request()
        await streaming_now(connection, whole)
        await has_come.wait()
        await connection.send_chunk(b"")
        await connection.wait_closed()

    async with one_replica(handle) as (_, client, _):
        await client.request()
        await client.read_head()
        assert await client.read_piece() == event("a")
        has_come.set()
        assert await client.read_body() == b"data: no end"


async def test_its_observer_counts_every_event_of_a_stream() -> None:
    """Tokens are counted by them, also while a stream goes on."""
    pieces = [event(str(number)) for number in range(50)]

    async def handle(connection: RawConnection) -> None:
        await connection.read_request()
        await connection.send(EVENT_STREAM)
        for piece in (*pieces, DONE):
            await connection.send_chunk(piece)
            # One by one: the next is sent when the client has this one.
            await arrived.acquire()
        await connection.send_chunk(b"")

    arrived = asyncio.Semaphore(0)
    async with one_replica(handle) as (proxy, client, _):
        await client.request()
        await client.read_head()
        while await client.read_piece():
            arrived.release()
        recorder = await proxy.recorder(End.COMPLETED)
        assert recorder.events == 51


async def test_any_other_body_is_flushed_piece_by_piece() -> None:
    """Not only event streams are read as they grow; half a line counts there."""
    arrived = asyncio.Semaphore(0)

    async def handle(connection: RawConnection) -> None:
        await connection.read_request()
        await connection.send(CHUNKED_JSON)
        for piece in (b"{", b'"a"', b": 1}"):
            await connection.send_chunk(piece)
            await arrived.acquire()
        await connection.send_chunk(b"")
        await connection.wait_closed()

    async with one_replica(handle) as (_, client, _):
        await client.request()
        await client.read_head()
        for piece in (b"{", b'"a"', b": 1}"):
            assert await client.read_piece(2) == piece
            arrived.release()
        assert await client.read_piece() == b""


@pytest.mark.parametrize("size", [0, 1, 65_536, 5_000_000])
async def test_a_body_with_a_length_keeps_it(size: int) -> None:
    """A client may size its buffer by it."""
    body = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    async with one_replica(answering(answer(body))) as (_, client, _):
        assert await client.ask() == body
        assert client.headers["content-length"] == str(size)
        assert "transfer-encoding" not in client.headers


@pytest.mark.parametrize("status", ["204 No Content", "304 Not Modified"])
async def test_an_answer_without_a_body_goes_through(status: str) -> None:
    """A 304 may carry the length of a body that it leaves out."""
    raw = f"HTTP/1.1 {status}\r\netag: x\r\n".encode() + (
        b"content-length: 5\r\n\r\n" if "304" in status else b"\r\n"
    )
    async with one_replica(answering(raw)) as (_, client, _):
        await client.request()
        assert await client.read_head() == int(status[:3])
        assert client.headers["etag"] == "x"


async def test_headers_go_through_but_for_those_of_the_hop() -> None:
    """RFC 9110 7.6.1, both ways, with what Connection names; everything else is not the proxy's
    business."""
    seen: list[RawRequest] = []
    hop = [
        "keep-alive: timeout=5",
        "te: trailers",
        "proxy-connection: x",
        "upgrade: h2c",
        "trailer: x-end",
    ]

    async def handle(connection: RawConnection) -> None:
        while (request := await connection.read_request()) is not None:
            seen.append(request)
            extra = [
                "Connection: keep-alive, X-Private",
                "Connection: X-Hidden",
                "X-Private: 1",
                "X-Hidden: 1",
                "X-Public: A b",
                "Server: engine",
                *hop,
            ]
            await connection.send(answer(b"{}", "200 OK", *extra, "proxy-authenticate: Basic"))

    async with one_replica(handle) as (_, client, _):
        mine = [
            "Connection: X-Secret , keep-alive",
            "connection: x-quiet",
            "X-Secret: 1",
            "X-Quiet: 1",
            "X-Open: A b",
            "Accept-Encoding: br",
            "cookie: a=b",
        ]
        await client.ask(b"{}", *mine, *hop, "proxy-authorization: Basic x", "expect: 100-continue")
    (request,) = seen
    assert sorted((name.lower(), value) for name, value in request.headers) == [
        ("accept-encoding", "br"),
        ("content-length", "2"),
        ("cookie", "a=b"),
        ("host", request.header("host")),
        ("x-open", "A b"),
    ]
    assert {name.lower(): value for name, value in client.headers.items()} == {
        "content-length": "2",
        "content-type": "application/json",
        "x-public": "A b",
        "server": "engine",
    }


async def test_host_length_and_authorization_are_the_replicas_own() -> None:
    """The router's key must not leak to a replica, and a rewritten body has another length."""
    seen: list[RawRequest] = []

    async def handle(connection: RawConnection) -> None:
        while (request := await connection.read_request()) is not None:
            seen.append(request)
            await connection.send(answer())

    def rewrite(request: ProxyRequest) -> ProxyRequest:
        return structs.replace(request, body=request.body + b" and more")

    async with raw_server(handle) as replica:
        override = ((b"authorization", b"Bearer engine"), (b"cookie", None), (b"x-new", b"1"))
        plan = [Attempt("r0", Origin.parse(replica.url + "/base"), override)]
        async with proxy_server(plan, rewrite=rewrite) as proxy, raw_client(proxy.port) as client:
            await client.ask(
                b"{}",
                "Authorization: Bearer router",
                "Cookie: a",
                target="/v1/chat/completions?a=%20b&c",
            )
    (request,) = seen
    assert request.target == "/base/v1/chat/completions?a=%20b&c"
    assert request.body == b"{} and more"
    assert request.header("content-length") == "11"
    assert request.header("host") == f"127.0.0.1:{replica.port}"
    assert request.header("authorization") == "Bearer engine"
    assert (request.header("cookie"), request.header("x-new")) == (None, "1")


async def test_the_callers_headers_are_added_once_also_to_errors() -> None:
    """`x-request-id` ties a complaint to a log line, whoever answered; a replica's own copy gives
    way."""

    def rewrite(request: ProxyRequest) -> ProxyRequest:
        return structs.replace(request, response_headers=((b"x-request-id", b"abc"),))

    async with raw_server(
        answering(answer(b"{}", "200 OK", "X-Request-Id: other", "x-kv-replica: other"))
    ) as replica:
        plan = [
            Attempt(
                "r0",
                replica.origin,
                response_headers=((b"x-kv-replica", b"r0"), (b"x-kv-hit-tokens", b"64")),
            )
        ]
        async with proxy_server(plan, rewrite=rewrite) as proxy, raw_client(proxy.port) as client:
            await client.ask()
            mine = {name: value for name, value in client.headers.items() if name.startswith("x-")}
            assert mine == {"x-kv-replica": "r0", "x-kv-hit-tokens": "64", "x-request-id": "abc"}
            proxy.plan = []
            await client.ask()
            assert (client.status, client.headers["x-request-id"]) == (503, "abc")


async def test_requests_of_one_client_share_one_kept_upstream_connection() -> None:
    """A connect per request costs a round trip and a port."""
    async with one_replica(answering(answer())) as (proxy, client, replica):
        for _ in range(50):
            assert await client.ask() == b"{}"
        assert replica.accepted == 1
        await eventually(lambda: proxy.count("reused") == 49, "49 went over a kept connection")


async def test_a_pipelining_client_gets_its_answers_in_order() -> None:
    """Rare, but legal; answers given to the wrong request would be the worst of faults."""

    async def handle(connection: RawConnection) -> None:
        while (request := await connection.read_request()) is not None:
            await connection.send(answer(request.body))

    async with one_replica(handle) as (_, client, _):
        for index in range(20):
            await client.request(b"%d" % index)
        for index in range(20):
            await client.read_head()
            assert await client.read_body() == b"%d" % index


# A replica that fails before its first byte


async def close_at_once(connection: RawConnection) -> None:
    await connection.read_request()


async def close_after_the_headers(connection: RawConnection) -> None:
    await connection.read_request()
    await connection.send(EVENT_STREAM)


async def talk_nonsense(connection: RawConnection) -> None:
    await connection.read_request()
    await connection.send(b"220 smtp ready\r\n")
    await connection.wait_closed()


async def say_nothing(connection: RawConnection) -> None:
    await connection.read_request()
    await connection.wait_closed()


async def send_headers_only(connection: RawConnection) -> None:
    await connection.read_request()
    await connection.send(EVENT_STREAM)
    await connection.wait_closed()


@pytest.mark.parametrize(
    ("handler", "failure"),
    [
        (close_at_once, Failure.CLOSED),
        (close_after_the_headers, Failure.MALFORMED),
        (talk_nonsense, Failure.MALFORMED),
        (say_nothing, Failure.FIRST_BYTE_TIMEOUT),
        (send_headers_only, Failure.FIRST_BYTE_TIMEOUT),
        (answering(answer(b"busy", "503 Service Unavailable")), Failure.UNAVAILABLE),
        (answering(answer(b"no engine", "502 Bad Gateway")), Failure.UNAVAILABLE),
        (answering(answer(b"no engine", "504 Gateway Timeout")), Failure.UNAVAILABLE),
    ],
    ids=[
        "closes",
        "closes after headers",
        "nonsense",
        "silent",
        "silent after headers",
        "503",
        "502",
        "504",
    ],
)
async def test_a_replica_that_fails_before_its_first_byte_is_followed_by_the_next(
    handler: Handler, failure: Failure
) -> None:
    """The client has seen nothing yet, so it need not know."""
    async with raw_server(handler) as bad, raw_server(streaming(event("a"), DONE)) as good:
        plan = [attempt(bad, "bad"), attempt(good, "good"), attempt(bad, "never asked")]
        async with (
            proxy_server(plan, replace(TIMEOUTS, first_byte_s=2.0)) as proxy,
            raw_client(proxy.port) as client,
        ):
            assert await client.ask() == event("a") + DONE
            recorder = await proxy.recorder(End.COMPLETED)
            assert recorder.attempts == ["bad", "good"]
            assert recorder.failures == [("bad", failure)]
            assert [name for name, _ in recorder.first_bytes] == ["good"]
            assert (len(recorder.attempts), recorder.responded) == (2, plan[1])
            if "answer" not in handler.__qualname__:
                await eventually(
                    lambda: bad.closed == bad.accepted, "the failed replica's connection is closed"
                )


async def test_a_dead_replica_is_followed_by_the_next() -> None:
    """With a dead replica no request fails that another could serve."""
    async with raw_server(answering(answer())) as good:
        plan = [dead(), dead(), attempt(good, "good")]
        async with proxy_server(plan) as proxy, raw_client(proxy.port) as client:
            assert await client.ask() == b"{}"
            recorder = await proxy.recorder(End.COMPLETED)
            assert recorder.failures == [("dead", Failure.CONNECT)] * 2


@pytest.mark.parametrize(
    "status",
    ["400 Bad Request", "401 Unauthorized", "404 Not Found", "422 X", "429 Too Many Requests"],
)
async def test_a_4xx_goes_through_and_never_counts_against_the_replica(status: str) -> None:
    """A client must not be able to get a replica taken out of rotation."""
    async with one_replica(answering(answer(b'{"error": "yours"}', status))) as (
        proxy,
        client,
        replica,
    ):
        assert await client.ask() == b'{"error": "yours"}'
        assert client.status == int(status[:3])
        recorder = await proxy.recorder(End.COMPLETED)
        assert (recorder.failures, recorder.status) == ([], client.status)
        assert replica.accepted == 1


async def test_a_500_goes_through_and_counts_against_the_replica() -> None:
    """The engine tried and failed: another would be asked to fail as well, but operators want to
    know."""
    async with one_replica(answering(answer(b"oops", "500 Internal Server Error"))) as (
        proxy,
        client,
        _,
    ):
        assert await client.ask() == b"oops"
        assert client.status == 500
        recorder = await proxy.recorder(End.COMPLETED)
        assert recorder.failures == [("r0", Failure.SERVER_ERROR)]


@pytest.mark.parametrize("dialect", Dialect)
async def test_when_every_candidate_fails_the_client_gets_an_error_it_can_read(
    dialect: Dialect,
) -> None:
    """The shape that SDKs parse, and Retry-After, which they obey."""
    async with (
        raw_server(close_at_once) as bad,
        raw_server(answering(answer(b"", "503 X"))) as busy,
    ):
        plans: list[tuple[list[Attempt], int]] = [
            ([dead(), attempt(bad)], 502),
            ([attempt(busy), dead()], 503),
            ([], 503),
        ]
        for plan, status in plans:
            rewrite = lambda request: structs.replace(request, dialect=dialect)  # noqa: E731
            async with (
                proxy_server(plan, rewrite=rewrite) as proxy,
                raw_client(proxy.port) as client,
            ):
                body = json.loads(await client.ask())
                assert client.status == status
                assert (client.headers["content-type"], client.headers["retry-after"]) == (
                    "application/json",
                    "1",
                )
                assert body["error"].keys() == {"message", "type", "code"}
                assert body["error"]["code"] == "no_replica_available"
                assert body.get("type") == (None if dialect is Dialect.OPENAI else "error")
                recorder = await proxy.recorder(End.NO_REPLICA)
                assert (recorder.status, recorder.responded, len(recorder.attempts)) == (
                    status,
                    None,
                    len(plan),
                )


async def test_a_router_out_of_connections_blames_no_replica() -> None:
    """Its own bound must not take healthy replicas out of rotation."""
    async with (
        raw_server(streaming(event("a"), then="wait")) as replica,
        proxy_server([attempt(replica), dead()], max_connections=1) as proxy,
        raw_client(proxy.port) as first,
        raw_client(proxy.port) as second,
    ):
        await first.request()
        await first.read_head()
        body = json.loads(await second.ask())
        assert (second.status, body["error"]["code"]) == (503, "overloaded")
        assert proxy.recorders[1].end is End.OVERLOADED
        assert proxy.recorders[1].failures == []
        first.leave()


# A replica that dies in mid-stream


def split_events(body: bytes) -> list[bytes]:
    """The data of every event, as a reader of event streams sees them."""
    return [part.removeprefix(b"data: ") for part in body.split(b"\n\n") if part]


CUTS = [
    b"",
    b'data: {"choi',
    b"data: ",
    b"d",
    b": comment\n",
    b'data: {"x": 1}',
    b'data: {"x": 1}\n',
    b'data: {"x": 1}\r\n',
]


@pytest.mark.parametrize("then", ["close", "reset"])
async def test_a_replica_that_dies_in_mid_stream_gives_an_error_event_and_done(then: str) -> None:
    """Wherever it was cut: every event the client sees is whole, the last two are the error and
    [DONE]."""

    async def handle(connection: RawConnection) -> None:
        request = await connection.read_request()
        assert request is not None
        await streaming_now(connection, event("a"), event("b"), request.body)
        if then == "reset":
            connection.reset()

    async with one_replica(handle) as (proxy, client, _):
        for index, cut in enumerate(CUTS):
            body = await client.ask(cut)
            assert body.startswith(event("a") + event("b"))
            *seen, error, done = split_events(body.replace(b"\r\n", b"\n"))
            assert (json.loads(error)["error"]["code"], done) == ("replica_died", b"[DONE]")
            assert json.loads(error)["error"].keys() == {"message", "type", "code"}
            assert all(json.loads(data) for data in seen if not data.startswith(b":"))
            assert body.endswith(DONE)
            await eventually(
                lambda: len(proxy.recorders) == index + 1 and proxy.recorders[index].ends,  # noqa: B023
                "it has ended",
            )
            assert proxy.recorders[index].end is End.REPLICA_DIED
            assert proxy.recorders[index].failures == [("r0", Failure.DIED)]


async def test_a_stream_that_falls_silent_ends_with_an_error_event() -> None:
    """A hung replica must not hang its clients."""
    timeouts = replace(TIMEOUTS, idle_s=2.0)
    async with one_replica(streaming(event("a"), then="wait"), timeouts=timeouts) as (
        proxy,
        client,
        replica,
    ):
        body = await client.ask()
        assert body.startswith(event("a") + b'data: {"error": {')
        assert body.endswith(b"}}\n\n" + DONE)
        recorder = await proxy.recorder(End.REPLICA_DIED)
        assert recorder.failures == [("r0", Failure.IDLE_TIMEOUT)]
        await eventually(lambda: replica.closed == 1, "the replica's connection is closed")


async def test_an_anthropic_stream_ends_with_an_error_event_of_that_form() -> None:
    """Those SDKs go by the event's name and would take anything else for a regular end."""
    rewrite = lambda request: structs.replace(request, dialect=Dialect.ANTHROPIC)  # noqa: E731
    async with one_replica(
        streaming(b"event: ping\ndata: {}\n\n", then="close"), rewrite=rewrite
    ) as (_, client, _):
        body = await client.ask()
    *_, name, data = body.rstrip().split(b"\n")
    assert name == b"event: error"
    assert json.loads(data.removeprefix(b"data: "))["type"] == "error"


@pytest.mark.parametrize("last", [DONE, b'event: message_stop\ndata: {"type":"message_stop"}\n\n'])
async def test_a_replica_that_dies_after_its_last_event_has_completed(last: bytes) -> None:
    """An error after [DONE] would turn a whole answer into a failed one."""
    async with one_replica(streaming(event("a"), last, then="close")) as (proxy, client, _):
        assert await client.ask() == event("a") + last
        await proxy.recorder(End.COMPLETED)


@pytest.mark.parametrize("then", ["close", "reset"])
@pytest.mark.parametrize(
    "head",
    [
        CHUNKED_JSON + b"5\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\ncontent-type: application/json\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\ncontent-type: text/event-stream\r\n\r\n",
        EVENT_STREAM[:-2] + b"content-encoding: gzip\r\n\r\n5\r\n",
    ],
    ids=["chunked", "length", "event stream with a length", "compressed event stream"],
)
async def test_any_other_body_cut_short_is_seen_to_be_cut(head: bytes, then: str) -> None:
    """A well-formed short body would be taken for the whole answer."""

    has_begun = asyncio.Event()

    async def handle(connection: RawConnection) -> None:
        await connection.read_request()
        await connection.send(head + b'{"a":')
        await has_begun.wait()
        if then == "reset":
            connection.reset()

    async with one_replica(handle) as (proxy, client, _):
        await client.request()
        await client.read_head()
        # The end of the client's connection must not be taken for its leaving.
        has_begun.set()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await client.read_body()
        recorder = await proxy.recorder(End.REPLICA_DIED)
        assert recorder.failures == [("r0", Failure.DIED)]


async def test_none_of_the_other_streams_notices_a_death() -> None:
    """One replica dies under several streams; those of another go on undisturbed."""
    go_on = asyncio.Event()

    async def handle(connection: RawConnection) -> None:
        request = await connection.read_request()
        await connection.send(EVENT_STREAM)
        await connection.send_chunk(event("a"))
        await go_on.wait()
        if request and request.body == b"die":
            connection.reset()
            return
        await connection.send_chunk(event("b") + DONE)
        await connection.send_chunk(b"")
        await connection.wait_closed()

    async with (
        raw_server(handle) as replica,
        proxy_server([attempt(replica)]) as proxy,
        contextlib.AsyncExitStack() as stack,
    ):
        clients = [await stack.enter_async_context(raw_client(proxy.port)) for _ in range(20)]
        for index, client in enumerate(clients):
            await client.request(b"die" if index % 2 else b"live")
            await client.read_head()
            assert await client.read_piece() == event("a")
        go_on.set()
        bodies = await asyncio.gather(*(client.read_body() for client in clients))
        assert bodies[::2] == [event("b") + DONE] * 10
        assert all(b'"replica_died"' in body for body in bodies[1::2])


# A client that leaves


@pytest.mark.parametrize(
    "handler", [say_nothing, send_headers_only, streaming(event("a"), then="wait")]
)
@pytest.mark.parametrize("how", ["close", "reset"])
async def test_a_client_that_leaves_ends_the_work_at_the_replica(
    handler: Handler, how: str
) -> None:
    """Before the first token, streaming or not, and in mid-stream: tokens that are not read cost a
    GPU."""
    async with one_replica(handler) as (proxy, client, replica):
        await client.request()
        await eventually(
            lambda: proxy.recorders and proxy.recorders[0].attempts, "the replica is asked"
        )
        await eventually(lambda: replica.accepted == 1, "the replica is at work")
        if "streaming" in handler.__qualname__:
            await client.read_head()
        {"close": client.leave, "reset": client.reset}[how]()
        await eventually(lambda: replica.closed == 1, "the replica sees its connection closed")
        recorder = await proxy.recorder(End.CLIENT_LEFT)
        assert recorder.failures == []


async def test_a_client_that_leaves_a_stream_at_full_speed_ends_it() -> None:
    """The replica writes all the time, so nothing ever waits; the leaving must be seen all the
    same."""

    async def handle(connection: RawConnection) -> None:
        await connection.read_request()
        await connection.send(EVENT_STREAM)
        while True:
            await connection.send_chunk(event("a"))
            await asyncio.sleep(0)

    async with one_replica(handle) as (proxy, client, replica):
        await client.request()
        await client.read_head()
        client.reset()
        await eventually(lambda: replica.closed == 1, "the replica sees its connection closed")
        await proxy.recorder(End.CLIENT_LEFT)


async def test_a_client_that_leaves_while_its_replica_is_being_connected_to_is_noticed() -> None:
    """A replica that does not answer the knock must not hold the request, nor be blamed."""
    with full_listener() as origin:
        plan = [Attempt("r0", origin), dead()]
        async with (
            proxy_server(plan, TIMEOUTS) as proxy,
            raw_client(proxy.port) as client,
        ):
            await client.request()
            await eventually(
                lambda: proxy.recorders and proxy.recorders[0].attempts, "the replica is knocked at"
            )
            client.leave()
            recorder = await proxy.recorder(End.CLIENT_LEFT)
            assert (recorder.attempts, recorder.failures) == (["r0"], [])
            await eventually(lambda: proxy.count("connections") == 0, "none is left")


async def test_a_client_that_never_reads_is_bounded_and_ended() -> None:
    """It must cost a bounded amount of memory for a bounded time, and its socket must not stay
    behind."""
    sent = 0

    async def handle(connection: RawConnection) -> None:
        nonlocal sent
        await connection.read_request()
        await connection.send(EVENT_STREAM)
        piece = event("x" * 60_000)
        while True:
            await connection.send_chunk(piece)
            sent += len(piece)

    async with one_replica(handle, client_stall_s=0.5) as (proxy, client, replica):
        client.writer.transport.pause_reading()
        await client.request()
        recorder = await proxy.recorder(End.CLIENT_STALLED)
        await eventually(lambda: replica.closed == 1, "the replica sees its connection closed")
        # Two pairs of kernel buffers; without backpressure it would be gigabytes.
        assert sent < 64_000_000
        assert recorder.failures == []
        await eventually(
            lambda: proxy.open_sockets == 0, "its socket is gone, although it has not read"
        )
        client.writer.transport.resume_reading()
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await client.reader.readexactly(100_000_000)


async def test_a_replica_that_breaks_off_behind_a_slow_client_costs_no_cpu_time() -> None:
    """The reset waits until the client has taken what came before it, and would be reported at
    every look until then."""
    is_over = asyncio.Event()

    async def handle(connection: RawConnection) -> None:
        await connection.read_request()
        await connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: 100000000\r\n\r\n")
        with contextlib.suppress(asyncio.TimeoutError):
            async with timeout(1.0):
                await connection.send(b"x" * 50_000_000)
        connection.reset()
        is_over.set()

    async with one_replica(handle) as (_, client, _):
        client.writer.transport.pause_reading()
        await client.request()
        async with timeout(DEADLINE_S):
            await is_over.wait()
        began = time.process_time()
        with pytest.raises(asyncio.TimeoutError):
            async with timeout(1.0):
                await client.reader.readexactly(100_000_000)
        assert time.process_time() - began < 0.2
        client.reset()


async def test_a_client_that_reads_slowly_is_not_taken_for_a_stalled_one() -> None:
    """Mobile networks are slow; what counts is that it goes on."""
    body = b"x" * 8_000_000
    async with one_replica(answering(answer(body)), client_stall_s=3) as (_, client, _):
        await client.request()
        await client.read_head()
        for _ in range(80):
            await client.reader.readexactly(100_000)
            await asyncio.sleep(0.05)


# Counts and load


async def test_a_thousand_concurrent_streams_finish() -> None:
    """More than a select() or a small pool can hold; each stream is under way while all the others
    are."""
    count = 1000
    all_asked = asyncio.Event()
    asked = 0

    async def handle(connection: RawConnection) -> None:
        nonlocal asked
        request = await connection.read_request()
        assert request is not None
        asked += 1
        if asked == count:
            all_asked.set()
        await connection.send(EVENT_STREAM)
        await connection.send_chunk(event("a"))
        await all_asked.wait()
        for _ in range(3):
            await connection.send_chunk(event(request.body.decode()))
        await connection.send_chunk(DONE)
        await connection.send_chunk(b"")
        await connection.read_request()

    async def one(port: int, index: int) -> None:
        async with raw_client(port) as client:
            body = await client.ask(b"%d" % index)
            assert body == event("a") + event(str(index)) * 3 + DONE

    patient = replace(TIMEOUTS, connect_s=60, first_byte_s=120, idle_s=120)
    async with (
        raw_server(handle) as replica,
        proxy_server([attempt(replica)], patient) as proxy,
    ):
        await asyncio.gather(*(one(proxy.port, index) for index in range(count)))
        await eventually(
            lambda: (
                sum(End.COMPLETED in end for each in proxy.recorders for end in each.ends) == count
            ),
            "all are completed",
        )


async def test_first_byte_and_total_times_are_reported() -> None:
    """Time to first token is what a router is judged by."""

    async def handle(connection: RawConnection) -> None:
        await connection.read_request()
        await connection.send(EVENT_STREAM)
        await asyncio.sleep(0.1)
        await connection.send_chunk(event("a"))
        await asyncio.sleep(0.1)
        await connection.send_chunk(b"")
        await connection.wait_closed()

    async with one_replica(handle) as (proxy, client, _):
        await client.ask()
        recorder = await proxy.recorder(End.COMPLETED)
    ((name, first_byte_s),) = recorder.first_bytes
    assert name == "r0"
    assert 0.09 < first_byte_s < recorder.seconds
    assert recorder.seconds > 0.19


# The relay itself, without a server in front


# What only a proxy that misbehaves shows


async def test_a_cancelled_request_ends_once_and_closes_the_replicas_connection() -> None:
    """A shutdown cancels what still runs; the counts must return to zero."""
    async with one_replica(say_nothing) as (proxy, client, replica):
        await client.request()
        await eventually(lambda: replica.accepted == 1, "the replica is at work")
        await eventually(lambda: proxy.relays, "it was sent")
        proxy.soon(proxy.relays[0].cancel)
        proxy.soon(proxy.relays[0].cancel)
        await eventually(lambda: replica.closed == 1, "the replica sees its connection closed")
        await proxy.recorder(End.ABANDONED)
        with contextlib.suppress(ConnectionResetError):
            assert await client.reader.read() == b""


async def test_a_client_that_leaves_before_it_is_sent_for_costs_no_replica_anything() -> None:
    """It left while it was decided where its request goes."""
    left, loop = threading.Event(), asyncio.get_running_loop()
    is_asked = asyncio.Event()

    def leaves(request: ProxyRequest) -> ProxyRequest:
        loop.call_soon_threadsafe(is_asked.set)
        assert left.wait(DEADLINE_S)
        return request

    async with one_replica(answering(answer()), rewrite=leaves) as (proxy, client, _):
        await client.request()
        await is_asked.wait()  # by now its socket is open
        client.leave()
        await eventually(lambda: proxy.open_sockets == 0, "the client has left")
        left.set()
        recorder = await proxy.recorder(End.CLIENT_LEFT)
        assert recorder.ends[0][1] is None


class FailsAtTheFirstByte(Recorder):
    def on_first_byte(
        self, attempt: Attempt, seconds: float, status: int, is_whole: bool | None = None
    ) -> None:
        raise KeyError("bug")


async def test_a_fault_of_the_observer_ends_the_request_once_and_is_not_hidden(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Our own bugs must neither leak connections nor vanish."""
    handler = streaming(event("a"), then="wait")
    async with one_replica(handler, recorder_class=FailsAtTheFirstByte, may_fail=True) as (
        proxy,
        client,
        replica,
    ):
        await client.request()
        await proxy.recorder(End.ABANDONED)
        assert "KeyError: 'bug'" in caplog.text
        await eventually(lambda: replica.closed == 1, "the replica sees its connection closed")


class FailsAtTheSecondAttempt(Recorder):
    def on_attempt(self, attempt: Attempt) -> None:
        super().on_attempt(attempt)
        if len(self.attempts) == 2:
            raise KeyError("bug")


async def test_a_fault_before_the_first_byte_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    """The client would find its connection closed, and think that the router is gone."""
    async with (
        raw_server(answering(answer())) as replica,
        proxy_server(
            [dead(), attempt(replica)], recorder_class=FailsAtTheSecondAttempt, may_fail=True
        ) as proxy,
        raw_client(proxy.port) as client,
    ):
        assert b"internal_error" in await client.ask()
        assert client.status == 500
        recorder = await proxy.recorder(End.ABANDONED)
        assert "KeyError: 'bug'" in caplog.text
        assert recorder.status == 500


class FailsAtTheEnd(Recorder):
    def on_end(self, end: End, status: int | None, seconds: float) -> None:
        super().on_end(end, status, seconds)
        raise KeyError("bug")


async def test_a_fault_at_the_end_of_a_request_keeps_no_client_waiting(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whoever ends requests goes on with the next one."""
    async with one_replica(answering(answer()), recorder_class=FailsAtTheEnd, may_fail=True) as (
        proxy,
        client,
        _,
    ):
        assert await client.ask() == b"{}"
        assert await client.ask() == b"{}"
        await eventually(lambda: proxy.overs == [0, 1], "both have let go of what they held")
        assert "KeyError: 'bug'" in caplog.text
