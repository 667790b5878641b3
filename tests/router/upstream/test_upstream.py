"""The upstream client against servers that misbehave in every way a real one can."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
import subprocess
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from router.upstream import (
    ClosedBeforeResponse,
    ConnectFailed,
    ConnectionLimitReached,
    ConnectTimeout,
    FirstByteTimeout,
    IdleTimeout,
    KeptConnectionClosed,
    Origin,
    OriginError,
    OutOfResources,
    PoolLimits,
    ResponseBroken,
    ResponseTooLarge,
    Timeouts,
    UpstreamClient,
    UpstreamError,
    UpstreamResponse,
)
from router.upstream.connection import HttpConnection
from router.upstream.turns import MAX_TURN_S, LoopTurns
from tests.router.raw_http import RawConnection, answer, answering, full_listener, raw_server
from tests.support.late_loop import LateLoop
from tests.support.waiting import eventually

PATIENT = Timeouts(connect_s=600, first_byte_s=600, idle_s=600)
"""Longer than any test waits: what ends in time has ended for another reason."""
HASTY = Timeouts(connect_s=0.1, first_byte_s=0.1, idle_s=0.1)
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.fixture
async def client() -> AsyncIterator[UpstreamClient]:
    client = UpstreamClient(tick_s=0.02)
    yield client
    await client.close()
    assert client.statistics().connections == client.statistics().active == 0


async def post(
    client: UpstreamClient, origin: Origin, body: bytes = b"{}", timeouts: Timeouts = PATIENT
) -> UpstreamResponse:
    return await client.send(
        origin, b"POST", b"/v1/x", [(b"content-type", b"application/json")], body, timeouts
    )


async def read_all(response: UpstreamResponse) -> bytes:
    body = b""
    while (chunk := await response.read_chunk()) is not None:
        body += chunk
    return body


# Origins


@pytest.mark.parametrize(
    ("url", "key", "host_header", "prefix"),
    [
        ("http://engine", "http://engine:80", b"engine", b""),
        ("HTTP://Engine:8000/", "http://engine:8000", b"engine:8000", b""),
        ("https://10.0.0.1/a/b/", "https://10.0.0.1:443", b"10.0.0.1", b"/a/b"),
        ("http://[::1]:8000", "http://[::1]:8000", b"[::1]:8000", b""),
        (
            "http://vllm_engine-1.pod.svc:8000/%7Ex",
            "http://vllm_engine-1.pod.svc:8000",
            b"vllm_engine-1.pod.svc:8000",
            b"/%7Ex",
        ),
    ],
)
def test_a_base_url_is_taken_apart(url: str, key: str, host_header: bytes, prefix: bytes) -> None:
    """Host header and pool key are made once, not for every request."""
    origin = Origin.parse(url)
    assert (origin.key, origin.host_header, origin.target_prefix) == (key, host_header, prefix)


@pytest.mark.parametrize(
    ("url", "rule"),
    [
        ("engine:8000", "http:// or https://"),
        ("ftp://engine", "http:// or https://"),
        ("http://", "name a host"),
        ("http://:8000", "name a host"),
        ("http://engine:0", "port from 1 to 65535"),
        ("http://engine:65536", "not a URL"),
        ("http://engine:x", "not a URL"),
        ("http://[::1", "not a URL"),
        ("http://a..b", "host name"),
        ("http://ex ample", "white space"),
        ("http://engine/\r\nx: y", "white space"),
        ("http://engine/a\x00", "white space"),
        ("http://engine?x=1", "query"),
        ("http://engine/#", "fragment"),
        ("http://engine/ü", "path"),
        ("http://bücher", "host name"),
        ("http://" + "a" * 300, "host name"),
    ],
)
def test_a_base_url_that_cannot_work_is_refused_with_place_value_and_rule(
    url: str, rule: str
) -> None:
    """A typo in the configuration must show at the start, not with the first request."""
    with pytest.raises(OriginError, match=rule) as caught:
        Origin.parse(url, "replicas[2].url")
    assert str(caught.value).startswith(f"replicas[2].url: {url!r}")


@pytest.mark.parametrize(
    "url",
    ["http://user:hunter2@engine", "http://user:hun/ter2@engine", "http://u:hunter2@engine:99999"],
)
def test_a_base_url_with_a_password_is_refused_without_showing_it(url: str) -> None:
    """Errors end in logs."""
    with pytest.raises(OriginError) as caught:
        Origin.parse(url)
    assert "hun" not in str(caught.value)
    assert "ter2" not in str(caught.value)


@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_a_timeout_must_be_above_zero(value: float) -> None:
    """A timeout of 0 would fail every request, not none."""
    with pytest.raises(ValueError, match="first_byte_s"):
        Timeouts(1, value, 1)


# Requests


async def test_the_request_arrives_with_host_length_and_base_path(client: UpstreamClient) -> None:
    """These three are the client's own; a caller's copy of them would be a second, wrong one."""
    seen = []

    async def handle(connection: RawConnection) -> None:
        while (request := await connection.read_request()) is not None:
            seen.append(request)
            await connection.send(answer())

    async with raw_server(handle) as server:
        origin = Origin.parse(f"http://localhost:{server.port}/base/")
        body = b"x" * 1_000_000
        await read_all(
            await client.send(
                origin, b"POST", b"/v1/x?y=%20", [(b"x-a", b"1"), (b"x-a", b"2")], body, PATIENT
            )
        )
        await read_all(await client.send(origin, b"GET", b"/models", [], b"", PATIENT))
    first, second = seen
    assert (first.method, first.target, first.body) == ("POST", "/base/v1/x?y=%20", body)
    assert first.headers == [
        ("host", f"localhost:{server.port}"),
        ("x-a", "1"),
        ("x-a", "2"),
        ("content-length", "1000000"),
    ]
    assert (second.method, second.target, second.headers) == (
        "GET",
        "/base/models",
        [("host", f"localhost:{server.port}")],
    )


@pytest.mark.parametrize(
    ("method", "target", "header"),
    [
        (b"POST", b"/a", (b"x", b"1\r\nevil: 2")),
        (b"POST", b"/a", (b"x\nevil: 2", b"1")),
        (b"POST", b"/a", (b"x", b"1\rb")),
        (b"POST", b"/a", (b"x", b"1\x00")),
        (b"POST", b"/a HTTP/1.1\r\nevil: 2\r\n\r\n", (b"x", b"1")),
        (b"POST", b"/a b", (b"x", b"1")),
        (b"HEAD", b"/a", (b"x", b"1")),
    ],
)
async def test_a_request_that_would_break_its_own_framing_is_not_sent(
    client: UpstreamClient, method: bytes, target: bytes, header: tuple[bytes, bytes]
) -> None:
    """A smuggled line break is a second request in the replica's eyes."""
    async with raw_server(answering(answer())) as server:
        with pytest.raises(ValueError, match="request head"):
            await client.send(server.origin, method, target, [header], b"", PATIENT)
        assert server.accepted == 0


async def test_upstream_sockets_have_tcp_nodelay(client: UpstreamClient) -> None:
    """Nagle would hold the end of a prompt back for a round trip."""
    async with raw_server(answering(answer())) as server:
        await read_all(await post(client, server.origin))
        (connection,) = client._connections
        sock = connection._transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


# Responses


@pytest.mark.parametrize(
    ("raw", "body"),
    [
        (answer(b"hello"), b"hello"),
        (answer(b""), b""),
        (CHUNKED + b"5\r\nhello\r\n6;ext=1\r\n world\r\n0\r\ntrailer: x\r\n\r\n", b"hello world"),
        (
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
            + answer(b"hello"),
            b"hello",
        ),
        (b"HTTP/1.1 204 No Content\r\nx-a: 1\r\n\r\n", b""),
        (b"HTTP/1.0 200 OK\r\nconnection: keep-alive\r\ncontent-length: 2\r\n\r\nhi", b"hi"),
    ],
    ids=["length", "empty", "chunked", "interim", "no content", "http/1.0"],
)
async def test_every_framing_is_read_whole_and_keeps_the_connection(
    client: UpstreamClient, raw: bytes, body: bytes
) -> None:
    """Servers and gateways use them all; also one byte at a time."""

    async def handle(connection: RawConnection) -> None:
        while await connection.read_request() is not None:
            await connection.send(raw)
            if await connection.read_request() is None:
                return
            for index in range(len(raw)):
                await connection.send(raw[index : index + 1])

    async with raw_server(handle) as server:
        for _ in range(4):
            response = await post(client, server.origin)
            assert await read_all(response) == body
            assert response.at_end
            assert b"link" not in dict(response.headers)
        assert server.accepted == 1
    assert client.statistics().reused == 3


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.0 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n",
    ],
)
async def test_a_body_may_end_with_the_connection(client: UpstreamClient, head: bytes) -> None:
    """Without a length the close is the end, and the connection is spent."""

    async def handle(connection: RawConnection) -> None:
        await connection.read_request()
        await connection.send(head + b"hello")

    async with raw_server(handle) as server:
        for _ in range(2):
            assert await read_all(await post(client, server.origin)) == b"hello"
        assert server.accepted == 2


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nTransfer-Encoding: Chunked\r\n\r\n5\r\nhello\r\n",
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 6\r\n\r\nhello",
        b"HTTP/1.0 200 OK\r\ncontent-length: 6\r\n\r\nhello",
    ],
)
async def test_a_body_that_marks_its_end_is_cut_where_the_connection_ends_before(
    client: UpstreamClient, raw: bytes
) -> None:
    """Also where the server has said that it will close: half a response must not pass for a
    whole one."""

    async def handle(connection: RawConnection) -> None:
        await connection.read_request()
        await connection.send(raw)

    async with raw_server(handle) as server:
        response = await post(client, server.origin)
        assert await response.read_chunk() == b"hello"
        with pytest.raises(ResponseBroken):
            await response.read_chunk()
        assert not response.complete


async def test_headers_come_as_they_are_with_names_in_lower_case(client: UpstreamClient) -> None:
    """Values, order and duplicates are the replica's business."""
    raw = (
        b"HTTP/1.1 418 Teapot\r\nX-One:  Two\r\nSet-Cookie: a\r\nset-cookie: b\r\n"
        b"X-Latin: \xe9\r\nContent-Length: 0\r\n\r\n"
    )
    async with raw_server(answering(raw)) as server:
        response = await post(client, server.origin)
    assert response.status == 418
    assert response.headers[:4] == [
        (b"x-one", b"Two"),
        (b"set-cookie", b"a"),
        (b"set-cookie", b"b"),
        (b"x-latin", b"\xe9"),
    ]


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999999999999999\r\n\r\n",
        CHUNKED + b"zz\r\n",
        CHUNKED + b"fffffffffffffffffffff\r\n",
        b"HTTP/1.1 200 OK\r\nx: a\x01b\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        b"HTTP/1.1 600 Odd\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 199 Odd\r\n\r\n" * 5000,
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 300 + b"content-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\na: " + b"b" * 1_000_000,
        b"HTTP/1.1 200 OK\r\n" + b"b" * 1_000_000,
        CHUNKED + b"0\r\n" + b"a: b\r\n" * 100_000,
        CHUNKED + b"0\r\na: " + b"b" * 1_000_000,
        CHUNKED + b"1;" + b"b" * 1_000_000,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n1\r\na\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
)
async def test_a_malformed_or_unbounded_response_is_an_error_and_ends_the_connection(
    client: UpstreamClient, raw: bytes
) -> None:
    """A replica is not trusted: what it sends is bounded, and what cannot be framed is not passed
    on."""

    async def handle(connection: RawConnection) -> None:
        await connection.read_request()
        await connection.send(raw)
        await connection.wait_closed()

    async with raw_server(handle) as server:
        with pytest.raises(ResponseBroken) as caught:
            await read_all(await post(client, server.origin))
        assert caught.value.received
        assert str(caught.value).startswith(server.url)
        await eventually(lambda: server.closed == 1, "the connection is closed")
    assert client.statistics().broken == 1


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 999 Odd\r\ncontent-length: 4\r\n\r\nbody",
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 300 + b"content-length: 4\r\n\r\nbody",
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 300 + b"content-length: 9\r\n\r\nbody",
        CHUNKED + b"4\r\nbody\r\nno size\r\n",
    ],
)
async def test_a_response_that_is_broken_in_its_first_segment_is_never_begun(
    client: UpstreamClient, raw: bytes
) -> None:
    """Another server may still be asked; the body that came with a broken head hid that."""

    async def handle(connection: RawConnection) -> None:
        await connection.read_request()
        await connection.send(raw)
        await connection.wait_closed()

    async with raw_server(handle) as server:
        with pytest.raises(ResponseBroken):
            await post(client, server.origin)
    assert client.statistics().broken == 1


@pytest.mark.parametrize("extra", [answer(b"smuggled"), b"garbage", b"\x00"])
async def test_bytes_after_the_response_never_reach_the_next_request(
    client: UpstreamClient, extra: bytes
) -> None:
    """A second response to one request would be given to another client."""
    seen = []

    async def handle(connection: RawConnection) -> None:
        while await connection.read_request() is not None:
            seen.append(connection)
            await connection.send(answer(b"mine") + extra)

    async with raw_server(handle) as server:
        for _ in range(3):
            assert await read_all(await post(client, server.origin)) == b"mine"
        assert server.accepted == 3


async def test_bytes_on_an_idle_connection_close_it(client: UpstreamClient) -> None:
    """They would be taken for the next response."""
    more = asyncio.Event()

    async def handle(connection: RawConnection) -> None:
        await connection.read_request()
        await connection.send(answer(b"mine"))
        await more.wait()
        await connection.send(answer(b"smuggled"))
        await connection.wait_closed()

    async with raw_server(handle) as server:
        await read_all(await post(client, server.origin))
        assert client.statistics().idle == 1
        more.set()
        await eventually(lambda: client.statistics().connections == 0, "the connection is closed")


@pytest.mark.parametrize(
    "head", [b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n", CHUNKED + b"a\r\n"]
)
@pytest.mark.parametrize("how", ["close", "reset"])
async def test_a_response_cut_in_mid_body_gives_what_arrived_and_then_an_error(
    client: UpstreamClient, head: bytes, how: str
) -> None:
    """A short body must never pass for a whole one."""
    read = asyncio.Event()

    async def handle(connection: RawConnection) -> None:
        await connection.read_request()
        await connection.send(head + b"hello")
        await read.wait()
        if how == "reset":
            connection.reset()

    async with raw_server(handle) as server:
        response = await post(client, server.origin)
        assert await response.read_chunk() == b"hello"
        read.set()
        with pytest.raises(ResponseBroken, match="before the end"):
            await response.read_chunk()


async def test_a_reset_is_no_end_of_a_body_that_ends_with_the_connection(
    client: UpstreamClient,
) -> None:
    """A crashed server resets; only an orderly close may stand for the end."""
    read = asyncio.Event()

    async def handle(connection: RawConnection) -> None:
        await connection.read_request()
        await connection.send(b"HTTP/1.1 200 OK\r\n\r\nhello")
        await read.wait()
        connection.reset()

    async with raw_server(handle) as server:
        response = await post(client, server.origin)
        assert await response.read_chunk() == b"hello"
        read.set()
        with pytest.raises(ResponseBroken):
            await response.read_chunk()


async def test_a_server_that_hangs_up_on_accepting_is_noticed_at_once(
    client: UpstreamClient,
) -> None:
    """The close may be known before the request is written; no timeout may be needed to see it."""

    async def handle(connection: RawConnection) -> None:
        connection.reset()

    async with raw_server(handle) as server:
        results = await asyncio.gather(
            *(post(client, server.origin) for _ in range(100)), return_exceptions=True
        )
        assert {type(result) for result in results} <= {ClosedBeforeResponse, ConnectFailed}


async def test_a_close_before_any_byte_says_that_none_was_received(client: UpstreamClient) -> None:
    """Only then does the caller know that nothing of a response is lost."""

    async def handle(connection: RawConnection) -> None:
        await connection.read_request()

    async with raw_server(handle) as server:
        with pytest.raises(ClosedBeforeResponse) as caught:
            await post(client, server.origin)
    assert not caught.value.received


# The pool


async def test_a_kept_connection_that_was_closed_is_told_from_a_fresh_one(
    client: UpstreamClient,
) -> None:
    """The server may close an idle connection in the very moment a request is written to it, or
    because of the request: the caller decides whether to send it again. A fetch does, once."""
    served = []

    async def handle(connection: RawConnection) -> None:
        await connection.read_request()
        await connection.send(answer(b"%d" % len(served)))
        served.append(connection)
        if len(served) < 3:
            # Close only once the next request is under way: the race itself, not a close that was
            # noticed before.
            await connection.read_request()
        else:
            await connection.wait_closed()

    async with raw_server(handle) as server:
        assert await read_all(await post(client, server.origin)) == b"0"
        with pytest.raises(KeptConnectionClosed):
            await post(client, server.origin)
        assert await read_all(await post(client, server.origin)) == b"1"
        _, _, body = await client.fetch(server.origin, b"GET", b"/", b"", PATIENT, 100)
        assert body == b"2"
        assert server.accepted == 3
        await client.close()
    statistics = client.statistics()
    assert (statistics.kept_closed, statistics.opened, statistics.broken) == (2, 3, 0)


async def test_a_fresh_connection_that_is_closed_is_not_tried_again(client: UpstreamClient) -> None:
    """A server that closes on every request would otherwise be asked for ever."""

    async def handle(connection: RawConnection) -> None:
        await connection.read_request()

    async with raw_server(handle) as server:
        with pytest.raises(ClosedBeforeResponse):
            await post(client, server.origin)
        assert server.accepted == 1


async def test_idle_connections_are_bounded_in_number_and_age() -> None:
    """A burst must not leave its sockets behind."""
    client = UpstreamClient(PoolLimits(max_idle_per_origin=3, idle_s=0.2), tick_s=0.02)
    async with raw_server(answering(answer())) as server:
        responses = await asyncio.gather(*(post(client, server.origin) for _ in range(10)))
        assert [await read_all(response) for response in responses] == [b"{}"] * 10
        assert client.statistics().idle == 3
        await eventually(
            lambda: client.statistics().connections == 0, "idle connections grow too old"
        )
        await eventually(lambda: server.closed == 10, "the server sees them closed")
    await client.close()


async def test_connections_are_bounded_and_idle_ones_make_room() -> None:
    """The bound holds over all origins; an unused connection must not keep a replica out."""
    client = UpstreamClient(PoolLimits(max_connections=2), tick_s=0.02)

    async def hang(connection: RawConnection) -> None:
        await connection.read_request()
        await connection.send(CHUNKED + b"1\r\na\r\n")
        await connection.wait_closed()

    async with raw_server(answering(answer())) as quick, raw_server(hang) as slow:
        await read_all(await post(client, quick.origin))
        held = [await post(client, slow.origin), await post(client, slow.origin)]
        assert client.statistics().connections == 2
        with pytest.raises(ConnectionLimitReached, match="max_connections 2"):
            await post(client, quick.origin)
        held[0].abort()
        await eventually(lambda: client.statistics().connections == 1, "the aborted one is gone")
        assert await read_all(await post(client, quick.origin)) == b"{}"
        await client.close()


async def test_the_last_file_descriptors_are_left_to_others() -> None:
    """Probes and scrapes need some when requests have taken all others. The server is not to
    blame, so the error is not one of those that count against it."""
    noted: list[str] = []
    with socket.socket() as probe:
        lowest_free = probe.fileno()
    client = UpstreamClient(PoolLimits(reserved_from=lowest_free), on_shortage=noted.append)
    async with raw_server(answering(answer())) as server:
        with pytest.raises(OutOfResources, match="out of open_files") as caught:
            await post(client, server.origin)
        assert isinstance(caught.value, ConnectionLimitReached)
        assert (caught.value.resource, noted) == ("open_files", ["open_files"])
    await client.close()
    assert client.statistics().connect_failures == 0


@pytest.mark.parametrize(
    ("number", "has_been_reached", "resource"),
    [
        (errno.EMFILE, False, "open_files"),
        (errno.ENFILE, False, "open_files"),
        (errno.ENOBUFS, False, "buffers"),
        (errno.ENOMEM, False, "buffers"),
        (errno.EADDRNOTAVAIL, True, "ports"),
        # An address of a kind that this host does not have.
        (errno.EADDRNOTAVAIL, False, None),
        (errno.ECONNREFUSED, True, None),
        (errno.EHOSTUNREACH, True, None),
    ],
)
async def test_what_the_system_refuses_is_told_from_what_the_server_refuses(
    number: int, has_been_reached: bool, resource: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of ports, a router would call every replica dead."""
    client = UpstreamClient()
    async with raw_server(answering(answer())) as server:
        if has_been_reached:
            await post(client, server.origin)

        async def refuse(*_: object, **__: object) -> None:
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patch:
            patch.setattr(asyncio.get_running_loop(), "create_connection", refuse)
            expected = ConnectFailed if resource is None else OutOfResources
            with pytest.raises(expected) as caught:
                await client.send(server.origin, b"POST", b"/", [], b"", PATIENT, may_reuse=False)
        assert getattr(caught.value, "resource", None) == resource
        await client.close()


@pytest.mark.parametrize(
    ("error", "expected", "resource"),
    [
        (MemoryError(), OutOfResources, "memory"),
        (RuntimeError("a fault of our own"), ConnectFailed, None),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_whatever_stops_an_attempt_to_connect_is_the_responses_error_at_once(
    error: Exception,
    expected: type[Exception],
    resource: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or the client waits for connect_s, and the log speaks of a slow network."""
    noted: list[str] = []
    client = UpstreamClient(on_shortage=noted.append)

    async def fail(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(asyncio.get_running_loop(), "create_connection", fail)
        with pytest.raises(expected) as caught:
            await client.send(Origin.parse("http://127.0.0.1"), b"POST", b"/", [], b"", PATIENT)
    assert type(caught.value) is expected
    assert noted == ([] if resource is None else [resource])
    assert client.statistics().active == 0
    await client.close()


async def test_a_thousand_requests_at_once_leave_no_connection_at_work(
    client: UpstreamClient,
) -> None:
    """Counts that drift are found first under load."""
    async with raw_server(answering(answer(b"x" * 5000))) as server:

        async def one() -> int:
            return len(await read_all(await post(client, server.origin)))

        assert set(await asyncio.gather(*(one() for _ in range(1000)))) == {5000}
        statistics = client.statistics()
        assert (statistics.active, statistics.broken, statistics.aborted) == (0, 0, 0)
        assert statistics.idle <= 256


# Time


async def test_a_name_that_does_not_resolve_and_a_closed_port_are_connect_failures(
    client: UpstreamClient,
) -> None:
    """The request was not sent, so any other replica may have it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for url in (f"http://127.0.0.1:{port}", "http://does-not-exist.invalid"):
        with pytest.raises(ConnectFailed, match=url) as caught:
            await post(client, Origin.parse(url))
        assert not caught.value.received
    assert client.statistics().connect_failures == 2


async def test_a_name_that_comes_to_stand_for_a_foreign_address_is_not_connected_to(
    client: UpstreamClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who owns a name decides at any time where it leads; a check when it is added is not enough
    (DNS rebinding)."""
    look_up, found = socket.getaddrinfo, ["127.0.0.1"]

    def rebound(host: str, *rest: Any, **options: Any) -> Any:
        hosts = found if host == "rebound.test" else [host]
        return [entry for each in hosts for entry in look_up(each, *rest, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", rebound)
    async with raw_server(answering(answer())) as server:
        with socket.create_server(("127.0.0.2", server.port)) as foreign:
            foreign.setblocking(False)
            origin = Origin.parse(f"http://rebound.test:{server.port}")
            confined = replace(origin, allows={"127.0.0.1"}.__contains__)
            assert await read_all(await post(client, confined)) == b"{}"
            found[:] = ["127.0.0.2"]
            with pytest.raises(ConnectFailed, match=r"127\.0\.0\.2"):
                await client.send(confined, b"POST", b"/", [], b"", PATIENT, may_reuse=False)
            found[:] = ["127.0.0.2", "127.0.0.1"]
            await client.send(confined, b"POST", b"/", [], b"", PATIENT, may_reuse=False)
            with pytest.raises(BlockingIOError):
                foreign.accept()
            await client.close()


async def test_a_name_that_is_looked_up_already_is_not_looked_up_again(
    client: UpstreamClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where DNS is silent, lookups that were given up piled up, and kept a router from ending."""
    may_answer, asked = threading.Event(), []

    def look_up(host: str, *_: Any, **__: Any) -> list[Any]:
        asked.append(host)
        may_answer.wait()
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    try:
        for _ in range(3):
            with pytest.raises(ConnectTimeout):
                await post(client, Origin.parse("http://silent.test:8000"), timeouts=HASTY)
    finally:
        may_answer.set()
    assert asked == ["silent.test"]


async def test_a_connection_that_does_not_come_about_is_given_up(client: UpstreamClient) -> None:
    """A host that drops packets must cost connect_s, not minutes."""
    with full_listener() as origin, pytest.raises(ConnectTimeout, match=r"0\.1 s"):
        await post(client, origin, timeouts=HASTY)
    assert client.statistics().connections == 0


@pytest.mark.parametrize("begun", [b"", CHUNKED], ids=["nothing", "headers only"])
async def test_the_first_byte_of_the_body_has_its_own_timeout(
    client: UpstreamClient, begun: bytes
) -> None:
    """Engines send the headers before the prefill: they are no sign of life."""

    async def handle(connection: RawConnection) -> None:
        await connection.read_request()
        await connection.send(begun)
        await connection.wait_closed()

    async with raw_server(handle) as server:
        with pytest.raises(FirstByteTimeout) as caught:
            await post(client, server.origin, timeouts=HASTY)
        assert caught.value.received is bool(begun)
        await eventually(lambda: server.closed == 1, "the server sees the connection closed")
    assert client.statistics().timeouts == 1


async def test_silence_in_mid_body_ends_in_an_idle_timeout(client: UpstreamClient) -> None:
    """A replica that hangs must not hold its clients."""

    async def handle(connection: RawConnection) -> None:
        await connection.read_request()
        await connection.send(CHUNKED + b"1\r\na\r\n")
        await connection.wait_closed()

    async with raw_server(handle) as server:
        response = await post(client, server.origin, timeouts=HASTY)
        assert await response.read_chunk() == b"a"
        with pytest.raises(IdleTimeout):
            await response.read_chunk()
        await eventually(lambda: server.closed == 1, "the server sees the connection closed")


async def test_a_slow_but_steady_body_outlives_the_idle_timeout(client: UpstreamClient) -> None:
    """The timeout is for silence, not for length."""

    async def handle(connection: RawConnection) -> None:
        await connection.read_request()
        await connection.send(CHUNKED)
        for _ in range(10):
            await connection.send_chunk(b"a")
            await asyncio.sleep(0.15)
        await connection.send_chunk(b"")

    async with raw_server(handle) as server:
        assert (
            await read_all(await post(client, server.origin, timeouts=Timeouts(600, 600, 1)))
            == b"a" * 10
        )


async def test_a_reader_that_pauses_is_not_taken_for_a_silent_server(
    client: UpstreamClient,
) -> None:
    """Behind a slow client the upstream is silent because we do not read."""

    async def handle(connection: RawConnection) -> None:
        await connection.read_request()
        await connection.send(answer(b"x" * 5_000_000))

    async with raw_server(handle) as server:
        response = await post(client, server.origin, timeouts=Timeouts(600, 600, 1))
        first = await response.read_chunk()
        await asyncio.sleep(1.5)
        assert first is not None
        assert len(first) + len(await read_all(response)) == 5_000_000


# Backpressure and leaving


async def test_a_reader_that_stops_stops_the_server_within_a_bound(client: UpstreamClient) -> None:
    """The memory behind a client that never reads is this buffer, not the response."""
    sent, servers = 0, []

    async def handle(connection: RawConnection) -> None:
        nonlocal sent
        servers.append(connection.writer.transport)
        await connection.read_request()
        await connection.send(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            await connection.send(b"x" * 65536)
            sent += 65536

    def is_stopped() -> bool:
        # The client has paused, and the kernel has taken nothing of what the server waits to send.
        (held,) = client._connections
        return held._paused and servers[0].get_write_buffer_size() > 65536

    async with raw_server(handle) as server:
        response = await post(client, server.origin)
        await eventually(is_stopped, "neither side goes on")
        last = sent
        # Two kernel buffers and both event loops' own; an unbounded client takes gigabytes in the
        # same time.
        assert sent < 32_000_000
        assert response.buffered_bytes < 1_000_000
        while sent == last:
            assert await response.read_chunk(), "reading on lets the server go on"
        response.abort()
        await eventually(lambda: server.closed == 1, "the server sees the abort")
    assert client.statistics().aborted == 1


async def test_cancelling_a_send_closes_the_connection(client: UpstreamClient) -> None:
    """The close is what ends the work at the replica."""
    asked = asyncio.Event()

    async def handle(connection: RawConnection) -> None:
        await connection.read_request()
        asked.set()
        await connection.wait_closed()

    async with raw_server(handle) as server:
        task = asyncio.create_task(post(client, server.origin))
        await asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await eventually(lambda: server.closed == 1, "the server sees the connection closed")
    assert client.statistics().active == 0


async def test_cancelling_a_send_that_connects_leaves_nothing_behind(
    client: UpstreamClient,
) -> None:
    """Clients leave in that moment too, and a replica that hangs sees many of them."""
    with full_listener() as origin:
        before = asyncio.all_tasks()
        task = asyncio.create_task(post(client, origin))
        await eventually(lambda: len(asyncio.all_tasks()) > len(before) + 1, "it is connecting")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await eventually(lambda: asyncio.all_tasks() == before, "the attempt to connect is over")
        assert client.statistics().connections == 0


async def test_a_connection_nobody_wants_any_more_is_closed_when_it_comes_about(
    client: UpstreamClient,
) -> None:
    """The cancellation and the end of the handshake may meet."""
    async with raw_server(RawConnection.wait_closed) as server:
        connection = HttpConnection(client, server.origin)
        connection.abort()
        await asyncio.get_running_loop().create_connection(
            lambda: connection, "127.0.0.1", server.port
        )
        await eventually(lambda: server.closed == 1, "the server sees it closed")


async def test_aborting_a_complete_response_keeps_its_connection(client: UpstreamClient) -> None:
    """Nothing is left to cancel."""
    async with raw_server(answering(answer(b"x"))) as server:
        for _ in range(3):
            response = await post(client, server.origin)
            response.abort()
        assert server.accepted == 1
    assert client.statistics().aborted == 0


async def test_closing_the_client_ends_exchanges_under_way(client: UpstreamClient) -> None:
    """A shutdown must not wait for a stream without an end."""

    async def handle(connection: RawConnection) -> None:
        await connection.read_request()
        await connection.send(CHUNKED + b"1\r\na\r\n")
        await connection.wait_closed()

    async with raw_server(handle) as server:
        response = await post(client, server.origin)
        assert await response.read_chunk() == b"a"
        await client.close()
        with pytest.raises(ResponseBroken):
            await response.read_chunk()
        with pytest.raises(RuntimeError, match="closed"):
            await post(client, server.origin)


async def test_closing_the_client_also_ends_what_is_being_connected() -> None:
    """Otherwise a connection would come about after the last look at them."""
    client = UpstreamClient()
    async with raw_server(answering(answer())) as server:
        before = asyncio.all_tasks()
        task = asyncio.create_task(post(client, server.origin))
        while len(asyncio.all_tasks()) == len(before) + 1:
            await asyncio.sleep(0)
        await client.close()
        with pytest.raises(UpstreamError):
            await task
        await eventually(lambda: client.statistics().connections == 0, "no connection is left")


# Fetching


async def test_fetch_returns_status_headers_and_body(client: UpstreamClient) -> None:
    """Health checks, /tokenize and scrapes want one small whole response."""
    async with raw_server(answering(answer(b"hello", "404 Not Found", "x-a: b"))) as server:
        status, headers, body = await client.fetch(
            server.origin, b"GET", b"/health", b"", PATIENT, max_bytes=5
        )
    assert (status, dict(headers)[b"x-a"], body) == (404, b"b", b"hello")


async def test_fetch_refuses_a_body_over_its_bound(client: UpstreamClient) -> None:
    """A scrape must not fill the memory."""

    async def handle(connection: RawConnection) -> None:
        await connection.read_request()
        await connection.send(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            await connection.send(b"x" * 65536)

    async with raw_server(handle) as server:
        with pytest.raises(ResponseTooLarge, match="max_bytes 100000"):
            await client.fetch(server.origin, b"GET", b"/metrics", b"", PATIENT, max_bytes=100_000)
        await eventually(lambda: server.closed == 1, "the server sees the connection closed")


async def test_fetch_ends_in_time_however_slowly_the_body_trickles(client: UpstreamClient) -> None:
    """A byte every now and then defeats every timeout for silence."""

    async def handle(connection: RawConnection) -> None:
        await connection.read_request()
        await connection.send(CHUNKED)
        while True:
            await connection.send_chunk(b"a")
            await asyncio.sleep(0.05)

    async with raw_server(handle) as server:
        with pytest.raises(UpstreamError, match="not complete"):
            await client.fetch(server.origin, b"GET", b"/metrics", b"", HASTY, max_bytes=100_000)
        await eventually(lambda: server.closed == 1, "the server sees the connection closed")


# TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for localhost, with its key in the same file."""
    path = tmp_path_factory.mktemp("tls") / "localhost.pem"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1"
        " -subj /CN=localhost"
    )
    name = ["-addext", "subjectAltName=DNS:localhost"]
    subprocess.run(
        [*command.split(), *name, "-keyout", path, "-out", f"{path}.cert"],
        check=True,
        capture_output=True,
    )
    path.write_bytes(path.read_bytes() + Path(f"{path}.cert").read_bytes())
    return path


async def test_an_https_origin_is_reached_over_verified_tls(certificate: Path) -> None:
    """A replica behind a gateway is https; an unverified server may be any."""
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(certificate)
    client = UpstreamClient(ssl_context=ssl.create_default_context(cafile=f"{certificate}.cert"))
    distrusting = UpstreamClient()
    async with raw_server(answering(answer(b"x" * 300_000)), tls=serving) as server:
        origin = Origin.parse(f"https://localhost:{server.port}")
        for _ in range(3):
            assert len(await read_all(await post(client, origin))) == 300_000
        assert client.statistics().opened == 1
        with pytest.raises(ConnectFailed):
            await post(distrusting, origin)
        await client.close()
        await distrusting.close()


# --- turns of the event loop ----------------------------------------------------------------------


async def test_a_stream_is_not_read_while_the_event_loop_does_not_get_around_to_the_rest(
    client: UpstreamClient,
) -> None:
    """With a thousand streams that are always ready, libuv does nothing but read them for seconds:
    new connections and time limits waited for 14 s."""
    loop, go = LateLoop(), asyncio.Event()
    client.turns = LoopTurns(loop)  # type: ignore[arg-type]

    async def handle(connection: RawConnection) -> None:
        await connection.read_request()
        await connection.send(CHUNKED)
        for piece in (b"one", b"two", b"three"):
            await connection.send_chunk(piece)
            await go.wait()
            go.clear()
        await connection.send_chunk(b"")
        await connection.wait_closed()

    async with raw_server(handle) as server:
        response = await client.send(server.origin, b"POST", b"/", (), b"", PATIENT)
        source = response.source
        assert isinstance(source, HttpConnection)
        transport = source._transport
        assert isinstance(transport, asyncio.Transport)
        assert await response.read_chunk() == b"one"
        assert transport.is_reading(), "a turn was asked for, and may still come in time"
        loop.now += 2 * MAX_TURN_S
        go.set()
        assert await response.read_chunk() == b"two"
        assert not transport.is_reading()
        go.set()
        loop.get_around()
        assert transport.is_reading()
        assert await response.read_chunk() == b"three"
        assert transport.is_reading(), "turns come again"
        go.set()
        assert await response.read_chunk() is None


async def test_a_connection_that_is_held_when_it_is_closed_is_left_alone(
    client: UpstreamClient,
) -> None:
    """The turn comes after the end, and a closed socket must not be read."""
    loop = LateLoop()
    client.turns = LoopTurns(loop)  # type: ignore[arg-type]

    async def handle(connection: RawConnection) -> None:
        await connection.read_request()
        await connection.send(CHUNKED)
        await connection.send_chunk(b"one")
        await connection.wait_closed()

    async with raw_server(handle) as server:
        assert not client.turns.is_overdue()
        loop.now += 2 * MAX_TURN_S
        response = await client.send(server.origin, b"POST", b"/", (), b"", PATIENT)
        response.abort()
        await eventually(lambda: server.closed, "it is closed")
        loop.get_around()
