"""Small requests to replicas: what comes back, what does not, and what is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvevents.lookups import addresses
from router.config.origin import Header, Origin
from router.fleet import probes
from router.fleet.client import UpstreamClient
from router.fleet.client_errors import (
    ClosedBeforeResponse,
    ConnectFailed,
    ResponseBroken,
    ResponseTooLarge,
    UpstreamError,
)
from router.fleet.probes import ProbeFetch
from tests.router.raw_http import RawConnection, answer, answering, full_listener, raw_server
from tests.support.engine_stub import engines
from tests.support.vllm_publisher import free_port
from tests.support.waiting import eventually

CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.fixture
async def fetch() -> AsyncIterator[ProbeFetch]:
    client = UpstreamClient()
    fetch = ProbeFetch(client)
    yield fetch
    fetch.close()
    await client.close()


async def get(
    fetch: ProbeFetch, origin: Origin, path: str = "/health", max_bytes: int = 1 << 20
) -> tuple[int, bytes]:
    return await fetch(origin, path, (), 20.0, max_bytes)


async def test_requests_go_one_after_the_other_over_one_connection(fetch: ProbeFetch) -> None:
    """A new one takes three times as long."""
    async with raw_server(answering(answer(b"hello", "404 Not Found"))) as server:
        for _ in range(3):
            assert await get(fetch, server.origin) == (404, b"hello")
        assert server.accepted == 1


async def test_a_response_may_come_in_any_pieces(fetch: ProbeFetch) -> None:
    """Where a network cuts it is chance."""
    whole = (
        b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + CHUNKED + b"2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"
    )

    async def handle(connection: RawConnection) -> None:
        while await connection.read_request() is not None:
            for byte in whole:
                await connection.send(bytes((byte,)))
                await asyncio.sleep(0)

    async with raw_server(handle) as server:
        for _ in range(2):
            assert await get(fetch, server.origin) == (200, b"abc")
        assert server.accepted == 1


async def test_a_request_has_host_headers_and_base_path(fetch: ProbeFetch) -> None:
    """Replicas behind gateways stand below a path, and ask for keys."""
    seen = []

    async def handle(connection: RawConnection) -> None:
        while (request := await connection.read_request()) is not None:
            seen.append(request)
            await connection.send(answer())

    headers: list[Header] = [(b"authorization", b"Bearer x"), (b"x-a", b"\xe9")]
    async with raw_server(handle) as server:
        for host in ("127.0.0.1", "localhost"):
            origin = Origin.parse(f"http://{host}:{server.port}/base/")
            assert (await fetch(origin, "/metrics?a=b", headers, 20.0, 100))[0] == 200
    # A host with several addresses, as localhost is where it has an IPv6 one, is aiohttp's, which
    # writes text as UTF-8.
    by_aiohttp = len(await addresses("localhost")) > 1
    written = {"127.0.0.1": "é", "localhost": "Ã©" if by_aiohttp else "é"}
    for (host, value), request in zip(written.items(), seen, strict=True):
        assert (request.method, request.target) == ("GET", "/base/metrics?a=b")
        assert request.header("host") == f"{host}:{server.port}"
        assert request.header("authorization") == "Bearer x"
        assert request.header("x-a") == value


@pytest.mark.parametrize(
    ("path", "header"),
    [
        ("/a", (b"x", b"1\r\nevil: 2")),
        ("/a", (b"x\nevil: 2", b"1")),
        ("/a", (b"x", b"1\x00")),
        ("/a HTTP/1.1\r\nevil: 2\r\n\r\n", (b"x", b"1")),
        ("/a b", (b"x", b"1")),
        ("a", (b"x", b"1")),
    ],
)
async def test_a_request_that_would_break_its_own_framing_is_not_sent(
    fetch: ProbeFetch, path: str, header: Header
) -> None:
    """A smuggled line break is a second request in the replica's eyes."""
    async with raw_server(answering(answer())) as server:
        with pytest.raises(ValueError):
            await fetch(server.origin, path, [header], 20.0, 100)
        assert server.accepted == 0


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        CHUNKED + b"zz\r\n",
        b"HTTP/1.1 200 OK\r\na: " + b"b" * 1_000_000,
        CHUNKED + b"0\r\na: " + b"b" * 1_000_000,
    ],
)
async def test_a_malformed_or_unbounded_response_is_an_error_and_ends_the_connection(
    fetch: ProbeFetch, raw: bytes
) -> None:
    """A replica is not trusted: what it sends is bounded."""

    async def handle(connection: RawConnection) -> None:
        await connection.read_request()
        await connection.send(raw)
        await connection.wait_closed()

    async with raw_server(handle) as server:
        with pytest.raises(ResponseBroken) as caught:
            await get(fetch, server.origin)
        assert str(caught.value).startswith(server.url)
        await eventually(lambda: server.closed == 1, "the connection is closed")


@pytest.mark.parametrize("end", ["length", "chunks", "close"])
async def test_a_body_over_its_bound_is_refused(fetch: ProbeFetch, end: str) -> None:
    """A scrape must not fill the memory."""
    heads = {"length": b"HTTP/1.1 200 OK\r\ncontent-length: 101\r\n\r\n", "chunks": CHUNKED}
    sizes = {"chunks": b"65\r\n"}

    async def handle(connection: RawConnection) -> None:
        await connection.read_request()
        await connection.send(heads.get(end, b"HTTP/1.1 200 OK\r\n\r\n") + sizes.get(end, b""))
        await connection.send(b"x" * 101)
        await connection.wait_closed()

    async with raw_server(handle) as server:
        with pytest.raises(ResponseTooLarge, match="max_bytes 100"):
            await get(fetch, server.origin, max_bytes=100)
        await eventually(lambda: server.closed == 1, "the connection is closed")


async def test_a_body_that_trickles_ends_in_time(fetch: ProbeFetch) -> None:
    """A byte every now and then defeats every timeout for silence."""

    async def handle(connection: RawConnection) -> None:
        await connection.read_request()
        await connection.send(CHUNKED)
        while True:
            await connection.send_chunk(b"a")
            await asyncio.sleep(0.01)

    async with raw_server(handle) as server:
        with pytest.raises(asyncio.TimeoutError):
            await fetch(server.origin, "/metrics", (), 0.1, 100_000)
        await eventually(lambda: server.closed == 1, "the connection is closed")


async def test_a_body_may_end_with_its_connection(fetch: ProbeFetch) -> None:
    """Without a length the close is the end, and the connection is spent."""

    async def handle(connection: RawConnection) -> None:
        await connection.read_request()
        await connection.send(b"HTTP/1.1 200 OK\r\n\r\nhello")

    async with raw_server(handle) as server:
        for _ in range(2):
            assert await get(fetch, server.origin) == (200, b"hello")
        assert server.accepted == 2


@pytest.mark.parametrize(
    "sent",
    [b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhello", CHUNKED + b"a\r\nhello", b"HTTP"],
)
async def test_a_response_that_is_cut_off_is_an_error(fetch: ProbeFetch, sent: bytes) -> None:
    """A short body must never pass for a whole one."""

    async def handle(connection: RawConnection) -> None:
        await connection.read_request()
        await connection.send(sent)

    async with raw_server(handle) as server:
        with pytest.raises(ResponseBroken, match="before the end"):
            await get(fetch, server.origin)


@pytest.mark.parametrize("extra", [answer(b"smuggled"), b"\x00"])
async def test_bytes_behind_a_response_are_nobodys_answer(fetch: ProbeFetch, extra: bytes) -> None:
    """They would be taken for what another path responds."""
    async with raw_server(answering(answer(b"mine") + extra)) as server:
        for _ in range(3):
            assert await get(fetch, server.origin) == (200, b"mine")
        assert server.accepted == 3


async def test_a_kept_connection_that_was_closed_does_not_fail_a_check(fetch: ProbeFetch) -> None:
    """A server closes what was unused for a while, perhaps just now."""
    asked: list[int] = []

    async def handle(connection: RawConnection) -> None:
        answers = 0
        while await connection.read_request() is not None:
            asked.append(answers)
            if answers == 1:
                return  # without a word: it met the request
            await connection.send(answer(b"mine"))
            answers += 1

    async with raw_server(handle) as server:
        for _ in range(3):
            assert await get(fetch, server.origin) == (200, b"mine")
        assert asked == [0, 1, 0, 1, 0]


async def test_a_new_connection_that_is_closed_at_once_is_an_error(fetch: ProbeFetch) -> None:
    """Asking again for ever would hide a server that is broken."""

    async def handle(connection: RawConnection) -> None:
        await connection.read_request()

    async with raw_server(handle) as server:
        with pytest.raises(ClosedBeforeResponse):
            await get(fetch, server.origin)
        assert server.accepted == 1


async def test_no_connection_is_told_with_its_reason(fetch: ProbeFetch) -> None:
    """Operators see it beside the replica."""
    with pytest.raises(ConnectFailed, match=r"[Cc]onnection refused"):
        await get(fetch, Origin.parse(f"http://127.0.0.1:{free_port()}"))
    with pytest.raises(ConnectFailed, match="no connection"):
        await get(fetch, Origin.parse("http://nobody.invalid"))
    with full_listener() as origin, pytest.raises(asyncio.TimeoutError):
        await fetch(origin, "/health", (), 0.1, 100)


async def test_an_address_that_may_not_be_connected_to_is_not(fetch: ProbeFetch) -> None:
    """Whoever may name replicas must not reach the router's own network by it."""
    async with raw_server(answering(answer())) as server:
        for host in ("127.0.0.1", "localhost"):
            origin = Origin("http", host, server.port, allows=lambda _: False)
            with pytest.raises(ConnectFailed, match="nothing may be connected to"):
                await get(fetch, origin)
        assert server.accepted == 0


async def test_an_unused_connection_is_closed_after_a_while(
    fetch: ProbeFetch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of replicas that come and go something would stay for ever."""
    monkeypatch.setattr(probes, "KEPT_S", 0.05)
    async with raw_server(answering(answer())) as server:
        await get(fetch, server.origin)
        await eventually(lambda: server.closed == 1, "the connection is closed")
        await get(fetch, server.origin)
        fetch.close()
        await eventually(lambda: server.closed == 2, "the other one as well")


async def test_a_request_cancelled_while_it_fails_leaves_no_unread_error() -> None:
    """At a shutdown beside a dead replica it would be logged as a crash of the router."""
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    client = UpstreamClient()
    fetch, no_server = ProbeFetch(client), Origin.parse(f"http://127.0.0.1:{free_port()}")
    for passes in range(30):
        request = asyncio.create_task(fetch(no_server, "/health", (), 1.0, 1024))
        for _ in range(passes):
            await asyncio.sleep(0)
        request.cancel()
        with contextlib.suppress(asyncio.CancelledError, UpstreamError):
            await request
        gc.collect()
    fetch.close()
    await client.close()
    assert not complaints


async def test_a_request_cancelled_while_its_response_arrives_is_cancelled() -> None:
    """Before Python 3.12 `asyncio.wait_for` swallows a cancellation that meets the end of what it
    waits for."""
    client = UpstreamClient()
    fetch = ProbeFetch(client)
    ends: Counter[str] = Counter()
    async with engines(1) as (stub,):
        origin = Origin.parse(stub.url)
        for passes in range(40):
            await fetch(
                origin, "/health", (), 5.0, 1024
            )  # the next takes its connection, which makes it quick
            request = asyncio.create_task(fetch(origin, "/health", (), 5.0, 1024))
            for _ in range(passes):
                await asyncio.sleep(0)
            if request.cancel():
                with pytest.raises(asyncio.CancelledError):
                    await request
                ends["cancelled"] += 1
            else:
                assert (await request)[0] == 200
                ends["completed"] += 1
    fetch.close()
    await client.close()
    assert min(ends["cancelled"], ends["completed"]) > 0
