"""The upstream client against servers that misbehave in every way a real one can."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
import subprocess
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from router.config.origin import Origin, OriginError, Timeouts
from router.fleet.client import UpstreamClient, UpstreamResponse
from router.fleet.client_errors import (
    ClosedBeforeResponse,
    ConnectFailed,
    ConnectTimeout,
    FirstByteTimeout,
    IdleTimeout,
    KeptConnectionClosed,
    OutOfResources,
    ResponseBroken,
    ResponseTooLarge,
    UpstreamError,
)
from tests.router.raw_http import RawConnection, answer, answering, full_listener, raw_server
from tests.support.waiting import eventually

PATIENT = Timeouts(connect_s=600, first_byte_s=600, idle_s=600)
"""Longer than any test waits: what ends in time has ended for another reason."""
HASTY = Timeouts(connect_s=0.1, first_byte_s=0.1, idle_s=0.1)
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.fixture
async def client() -> AsyncIterator[UpstreamClient]:
    client = UpstreamClient()
    yield client
    await client.close()


async def post(
    client: UpstreamClient, origin: Origin, body: bytes = b"{}", timeouts: Timeouts = PATIENT
) -> UpstreamResponse:
    return await client.send(
        origin, b"POST", b"/v1/x", [(b"content-type", b"application/json")], body, timeouts
    )


def lower(headers: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Names differ in case only."""
    return [(name.lower(), value) for name, value in headers]


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
    assert lower(first.headers) == [
        ("host", f"localhost:{server.port}"),
        ("x-a", "1"),
        ("x-a", "2"),
        ("content-length", "1000000"),
    ]
    assert (second.method, second.target, lower(second.headers)) == (
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
        (b"POST", b"/a#b", (b"x", b"1")),
        (b"POST", b"@elsewhere:1/", (b"x", b"1")),
    ],
)
async def test_a_request_that_would_break_its_own_framing_is_not_sent(
    client: UpstreamClient, method: bytes, target: bytes, header: tuple[bytes, bytes]
) -> None:
    """A smuggled line break is a second request in the replica's eyes."""
    seen = []

    async def handle(connection: RawConnection) -> None:
        seen.append(await connection.read_request())

    async with raw_server(handle) as server:
        with pytest.raises(ValueError):
            await client.send(server.origin, method, target, [header], b"", PATIENT)
        await client.close()
        await eventually(lambda: server.closed == server.accepted, "nothing is open")
    assert seen in ([], [None])


# Responses


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
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 300 + b"content-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\na: " + b"b" * 1_000_000,
        b"HTTP/1.1 200 OK\r\n" + b"b" * 1_000_000,
        CHUNKED + b"0\r\n" + b"a: b\r\n" * 100_000,
        CHUNKED + b"0\r\na: " + b"b" * 1_000_000,
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
        assert str(caught.value).startswith(server.url)
        await eventually(lambda: server.closed == 1, "the connection is closed")


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
            with contextlib.suppress(UpstreamError):
                assert await read_all(await post(client, server.origin)) == b"mine"
        assert server.accepted == 3


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
        _, body = await client.fetch(server.origin, b"/", PATIENT, 100, method=b"POST")
        assert body == b"2"
        assert server.accepted == 3
        await client.close()


@pytest.mark.parametrize(("method", "most"), [(b"POST", 1), (b"GET", 2)])
async def test_a_server_that_closes_on_every_request_is_not_asked_for_ever(
    client: UpstreamClient, method: bytes, most: int
) -> None:
    """A prompt that kills its engine must not be sent to it again; the library repeats a GET."""

    async def handle(connection: RawConnection) -> None:
        await connection.read_request()

    async with raw_server(handle) as server:
        with pytest.raises(ClosedBeforeResponse):
            await client.fetch(server.origin, b"/", PATIENT, 100, method=method)
        assert server.accepted == most


@pytest.mark.parametrize(
    ("error", "message"),
    [(UnicodeError("no name"), "no name"), (MemoryError(), "the router is out of memory")],
)
async def test_a_lookup_that_cannot_be_made_is_a_connect_failure(
    client: UpstreamClient, error: Exception, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anything else would end the health checks of that replica for good."""

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(ConnectFailed, match=message):
        await post(client, Origin.parse("http://somewhere.test"))


async def test_a_refused_connection_says_so(client: UpstreamClient) -> None:
    """An operator sees only this of a replica that is gone."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ConnectFailed, match="Connection refused"):
        await post(client, Origin.parse(f"http://127.0.0.1:{port}"))


async def test_a_body_that_is_cut_off_before_its_first_byte_says_so(client: UpstreamClient) -> None:
    """It was HTTP, and within all bounds."""

    async def handle(connection: RawConnection) -> None:
        await connection.read_request()
        await connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n")

    async with raw_server(handle) as server:
        with pytest.raises(ResponseBroken, match="before the end of the response"):
            await post(client, server.origin)


async def test_a_close_before_any_byte_says_that_none_was_received(client: UpstreamClient) -> None:
    """Only then does the caller know that nothing of a response is lost."""

    async def handle(connection: RawConnection) -> None:
        await connection.read_request()

    async with raw_server(handle) as server:
        with pytest.raises(ClosedBeforeResponse):
            await post(client, server.origin)


# The pool


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
    async with raw_server(answering(answer(b"{}", "200 OK", "connection: close"))) as server:
        if has_been_reached:
            await post(client, server.origin)

        async def refuse(*_: object, **__: object) -> None:
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patch:
            patch.setattr(asyncio.get_running_loop(), "sock_connect", refuse)
            expected = ConnectFailed if resource is None else OutOfResources
            with pytest.raises(expected) as caught:
                await client.send(server.origin, b"POST", b"/", [], b"", PATIENT)
        assert getattr(caught.value, "resource", None) == resource
        await client.close()


async def test_a_thousand_requests_at_once_leave_no_connection_at_work(
    client: UpstreamClient,
) -> None:
    """Counts that drift are found first under load."""
    async with raw_server(answering(answer(b"x" * 5000))) as server:

        async def one() -> int:
            return len(await read_all(await post(client, server.origin)))

        assert set(await asyncio.gather(*(one() for _ in range(1000)))) == {5000}


# Time


async def test_a_name_that_does_not_resolve_and_a_closed_port_are_connect_failures(
    client: UpstreamClient,
) -> None:
    """The request was not sent, so any other replica may have it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for url in (f"http://127.0.0.1:{port}", "http://does-not-exist.invalid"):
        with pytest.raises(ConnectFailed, match=url):
            await post(client, Origin.parse(url))


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
    async with raw_server(answering(answer(b"{}", "200 OK", "connection: close"))) as server:
        with socket.create_server(("127.0.0.2", server.port)) as foreign:
            foreign.setblocking(False)
            origin = Origin.parse(f"http://rebound.test:{server.port}")
            confined = replace(origin, allows={"127.0.0.1"}.__contains__)
            assert await read_all(await post(client, confined)) == b"{}"
            found[:] = ["127.0.0.2"]
            with pytest.raises(ConnectFailed, match=r"127\.0\.0\.2"):
                await client.send(confined, b"POST", b"/", [], b"", PATIENT)
            found[:] = ["127.0.0.2", "127.0.0.1"]
            await client.send(confined, b"POST", b"/", [], b"", PATIENT)
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
        with pytest.raises(FirstByteTimeout):
            await post(client, server.origin, timeouts=HASTY)
        await eventually(lambda: server.closed == 1, "the server sees the connection closed")


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
        for _ in range(15):
            await connection.send_chunk(b"a")
            await asyncio.sleep(0.25)
        await connection.send_chunk(b"")

    async with raw_server(handle) as server:
        assert (
            await read_all(await post(client, server.origin, timeouts=Timeouts(600, 600, 3)))
            == b"a" * 15
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


async def test_cancelling_a_send_that_connects_leaves_nothing_behind(
    client: UpstreamClient,
) -> None:
    """Clients leave in that moment too, and a replica that hangs sees many of them."""
    with full_listener() as origin:
        before = asyncio.all_tasks()
        task = asyncio.create_task(post(client, origin))
        await eventually(lambda: client._sessions, "it is connecting")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await eventually(lambda: asyncio.all_tasks() == before, "the attempt to connect is over")


async def test_aborting_a_complete_response_keeps_its_connection(client: UpstreamClient) -> None:
    """Nothing is left to cancel."""
    async with raw_server(answering(answer(b"x"))) as server:
        for _ in range(3):
            response = await post(client, server.origin)
            response.abort()
        assert server.accepted == 1


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


# Fetching


async def test_fetch_returns_status_and_body(client: UpstreamClient) -> None:
    """Health checks, /tokenize and scrapes want one small whole response."""
    async with raw_server(answering(answer(b"hello", "404 Not Found"))) as server:
        found = await client.fetch(server.origin, b"/health", PATIENT, max_bytes=5)
    assert found == (404, b"hello")


async def test_fetch_refuses_a_body_over_its_bound(client: UpstreamClient) -> None:
    """A scrape must not fill the memory."""

    async def handle(connection: RawConnection) -> None:
        await connection.read_request()
        await connection.send(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            await connection.send(b"x" * 65536)

    async with raw_server(handle) as server:
        with pytest.raises(ResponseTooLarge, match="max_bytes 100000"):
            await client.fetch(server.origin, b"/metrics", PATIENT, max_bytes=100_000)
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
            await client.fetch(server.origin, b"/metrics", HASTY, max_bytes=100_000)
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
    trusted = ssl.create_default_context(cafile=f"{certificate}.cert")
    client = UpstreamClient(lambda: trusted)
    distrusting = UpstreamClient()
    async with raw_server(answering(answer(b"x" * 300_000)), tls=serving) as server:
        origin = Origin.parse(f"https://localhost:{server.port}")
        for _ in range(3):
            assert len(await read_all(await post(client, origin))) == 300_000
        with pytest.raises(ConnectFailed):
            await post(distrusting, origin)
        await client.close()
        await distrusting.close()
