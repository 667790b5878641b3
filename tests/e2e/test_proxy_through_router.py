"""What the proxy promises, one test per promise, kept by the whole router: a real process between
real clients and real replicas."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from async_timeout import timeout

from tests.support.engine_stub import (
    DONE,
    STREAM_HEAD,
    Behaviour,
    EngineStub,
    Exchange,
    after,
    answer,
    begun_until,
    dying_after,
    engines,
    hang,
    hang_up,
    prompt_ids,
    refusing,
    streaming,
    token_event,
)
from tests.support.http_client import HttpClient, connect
from tests.support.router_process import QUICK_HEALTH, RouterProcess, router_process
from tests.support.waiting import eventually

CONFIG = {
    "server": {
        "timeouts": {"connect_s": 10, "first_byte_s": 600, "idle_s": 600, "client_stall_s": 600}
    },
    "health": {
        "interval_s": 0.5,
        "timeout_s": 20.0,
        "unhealthy_after": 2,
        "discovery_interval_s": 1,
    },
}
PATIENT = {
    "server": {"timeouts": {"connect_s": 30}},
    "health": {"interval_s": 30, "timeout_s": 30, "engine_load_stale_after_s": 60},
}
"""For a test that keeps its own event loop busy for a while, and with it the replicas that run on
it."""
STREAMED_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/messages")


@pytest.fixture(scope="module")
def process() -> Iterator[RouterProcess]:
    with router_process(CONFIG) as started:
        yield started


@pytest.fixture
async def router(process: RouterProcess) -> AsyncIterator[RouterProcess]:
    """The router; after every test nothing may be left in flight."""
    yield process
    await process.until_idle()
    upstream = "kvroute_upstream_connections"
    idle = "kvroute_upstream_idle_connections"
    await process.until(
        lambda now: now.sum(upstream) == now.sum(idle), "no connection to a replica is at work"
    )


def body_for(
    stub: EngineStub, path: str = "/v1/completions", stream: bool = True, prompt: Any = "hello"
) -> dict[str, Any]:
    content = (
        {"prompt": prompt}
        if path == "/v1/completions"
        else {"messages": [{"role": "user", "content": prompt}]}
    )
    return {"model": stub.model, "stream": stream, "max_tokens": 8, **content}


@contextlib.asynccontextmanager
async def opened(
    router: RouterProcess, body: dict[str, Any], path: str = "/v1/completions"
) -> AsyncIterator[HttpClient]:
    """Send a request, and leave it in progress."""
    async with connect(router.port) as client:
        await client.send("POST", path, body)
        yield client


# --- byte for byte --------------------------------------------------------------------------------


async def test_an_event_stream_arrives_byte_for_byte_and_event_by_event(
    router: RouterProcess,
) -> None:
    """Each event must reach the client before the replica makes the next one, with any content and
    however it is split."""
    strange = [
        b": ping\n\n",
        b"event: x\r\ndata: \xff\xfe\r\n\r\n",
        "data: ü{}\n\n".encode() * 3000,
        b"data: x\n",
        b"\n",
        DONE,
    ]
    pieces = [token_event("/v1/completions", 0), *strange]
    arrived = asyncio.Semaphore(0)

    async def behave(exchange: Exchange) -> None:
        await exchange.send(STREAM_HEAD)
        for piece in pieces:
            await exchange.chunk(piece)
            await arrived.acquire()
        await exchange.chunk(b"")

    async with (
        engines(1, behaviour=behave) as (stub,),
        router.serving(stub),
        opened(router, body_for(stub)) as client,
    ):
        assert await client.read_head() == 200
        assert client.headers["content-type"] == "text/event-stream; charset=utf-8"
        for piece in pieces:
            received = b""
            while len(received) < len(piece):
                received += await client.read_piece()
            assert received == piece
            arrived.release()
        assert await client.read_piece() == b""


async def test_small_events_are_not_held_back_for_larger_packets(router: RouterProcess) -> None:
    """Nagle's algorithm against delayed acknowledgements costs 40 ms a token; TCP_NODELAY on all
    four ends costs none."""
    rounds = 100
    arrived = asyncio.Semaphore(0)

    async def behave(exchange: Exchange) -> None:
        await exchange.send(STREAM_HEAD)
        for index in range(rounds):
            # Two writes in a row: the second is the one that would wait for the acknowledgement of
            # the first.
            await exchange.chunk(b": a\n\n")
            await exchange.chunk(token_event("/v1/completions", index))
            await arrived.acquire()
        await exchange.chunk(b"")

    async with (
        engines(1, behaviour=behave) as (stub,),
        router.serving(stub),
        opened(router, body_for(stub)) as client,
    ):
        await client.read_head()
        took_s = []
        for index in range(rounds):
            received, began = b"", time.monotonic()
            while not received.endswith(token_event("/v1/completions", index)):
                received += await client.read_piece()
            took_s.append(time.monotonic() - began)
            arrived.release()
        assert await client.read_piece() == b""
        # A delayed acknowledgement costs every round 40 ms, but for the first few of a connection;
        # a busy machine does not slow each of them down.
        assert min(took_s[rounds // 2 :]) < 0.04


async def test_a_response_that_is_not_streamed_arrives_byte_for_byte(router: RouterProcess) -> None:
    """Even if it is not JSON, and with its original length."""
    content = bytes(range(256)) * 5000

    async def behave(exchange: Exchange) -> None:
        await exchange.whole(content, content_type="application/octet-stream")

    async with engines(1, behaviour=behave) as (stub,), router.serving(stub):
        found = await router.post("/v1/completions", body_for(stub, stream=False))
        assert found.body == content
        assert (found.headers["content-length"], found.headers["content-type"]) == (
            str(len(content)),
            "application/octet-stream",
        )


async def test_a_request_arrives_as_it_was_sent(router: RouterProcess) -> None:
    """Unknown fields, spaces, order, query and headers are the business of client and engine."""
    async with engines(1) as (stub,), router.serving(stub):
        body = (
            b'{ "new_field" : [1.50, "\\u00fc"],\n "prompt" : [1], "model":"%s" , "prompt": [1, 2]}'
            % stub.model.encode()
        )
        assert (
            await router.post("/v1/completions?trace=a%20b&x", body, {"x-tenant": "blue"})
        ).status == 200
        request = stub.requests[-1]
        assert request.body == body
        assert request.target == "/v1/completions?trace=a%20b&x"
        assert request.headers["x-tenant"] == "blue"


async def test_a_data_parallel_rank_is_not_taken_from_a_client_unless_that_is_configured(
    router: RouterProcess,
) -> None:
    """A client that names a rank would spoil the predictions for it, and could fill one rank."""
    header = {"x-data-parallel-rank": "1"}
    async with engines(1) as (stub,), router.serving(stub):
        await router.post("/v1/completions", body_for(stub), header)
        assert "x-data-parallel-rank" not in stub.requests[-1].headers
    trusting = {**CONFIG, "server": {**CONFIG["server"], "trust_client_rank": True}}
    with router_process(trusting) as other:
        async with engines(1) as (stub,), other.serving(stub):
            await other.post("/v1/completions", body_for(stub), header)
            assert stub.requests[-1].headers["x-data-parallel-rank"] == "1"


@pytest.mark.parametrize("key", ["kv_cache_report_mode", "\\u006bv_cache_report_mode"])
async def test_a_report_mode_does_not_reach_the_engine(router: RouterProcess, key: str) -> None:
    """It makes the engine announce every block of a hit again, which corrupts the counts for
    everyone."""
    async with engines(1) as (stub,), router.serving(stub):
        before = (await router.metrics()).sum("kvroute_stripped_report_modes_total")
        body = (
            b'{"model": "%s", "prompt": [1], "vllm_xargs": {"%s": "full", "mine": 1}, "seed": 7}'
            % (
                stub.model.encode(),
                key.encode(),
            )
        )
        assert (await router.post("/v1/completions", body)).status == 200
        assert stub.requests[0].json == {
            "model": stub.model,
            "prompt": [1],
            "vllm_xargs": {"mine": 1},
            "seed": 7,
        }
        assert (await router.metrics()).sum("kvroute_stripped_report_modes_total") == before + 1
        deep = body.replace(b"1}", b"[" * 90_000 + b"]" * 90_000 + b"}")
        refused = await router.post("/v1/completions", deep)
        assert (refused.status, refused.error["code"]) == (400, "invalid_value")


# --- many at once ---------------------------------------------------------------------------------


async def test_a_thousand_concurrent_streams_finish() -> None:
    """All at the same time, each with its own content."""
    with router_process(PATIENT) as router:
        await check_a_thousand_streams(router)


async def check_a_thousand_streams(router: RouterProcess) -> None:
    count, go = 1000, asyncio.Event()

    async def behave(exchange: Exchange) -> None:
        await exchange.send(STREAM_HEAD)
        await exchange.chunk(token_event("/v1/completions", 0))
        await exchange.wait(go)
        await exchange.chunk(b"data: %d\n\n" % exchange.request.json["prompt"][0])
        await exchange.chunk(DONE)
        await exchange.chunk(b"")

    async def one(number: int) -> bytes:
        async with opened(router, body_for(stubs[0], prompt=[number])) as client:
            assert await client.read_head() == 200
            return await client.read_body()

    async with engines(3, behaviour=behave) as stubs, router.serving(*stubs):
        streams = [asyncio.create_task(one(number)) for number in range(count)]
        await eventually(
            lambda: sum(stub.active for stub in stubs) == count, "all streams are under way"
        )
        assert (await router.metrics()).sum("kvroute_in_flight_requests") == count
        go.set()
        bodies = await asyncio.gather(*streams)
        first = token_event("/v1/completions", 0)
        assert bodies == [first + b"data: %d\n\n" % number + DONE for number in range(count)]
        assert min(stub.served for stub in stubs) > count // 10, "they were spread"


async def test_a_scrape_delays_no_stream() -> None:
    """A scrape of a large fleet takes a while; tokens must flow meanwhile."""
    far = [{"url": f"http://127.0.0.1:1/{number}", "id": f"far-{number}"} for number in range(400)]
    config = {"replicas": far, "health": {"interval_s": 60, "engine_load_stale_after_s": 100}}
    async with engines(1, behaviour=streaming(80, 0.01)) as (stub,):
        with router_process(config) as router:
            async with router.serving(stub):
                allowed_s = await longest_gap_s(router, stub) + 0.1
                async with scraped(router):
                    gaps_s = [await longest_gap_s(router, stub)]
                    # Other processes may cause a gap now and then; a scrape that blocks causes one
                    # in every stream.
                    while gaps_s[-1] > allowed_s and len(gaps_s) < 20:
                        gaps_s.append(await longest_gap_s(router, stub))
                assert gaps_s[-1] <= allowed_s, gaps_s


_SCRAPER = "import sys, urllib.request\nwhile True: urllib.request.urlopen(sys.argv[1]).read()"


@contextlib.asynccontextmanager
async def scraped(router: RouterProcess) -> AsyncIterator[None]:
    """One scrape after the other, from a separate process: its work must not be mistaken for the
    router's."""
    command = (sys.executable, "-c", _SCRAPER, f"{router.url}/metrics")
    scraper = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
    try:
        yield
    finally:
        scraper.kill()
        await scraper.wait()


async def longest_gap_s(router: RouterProcess, stub: EngineStub) -> float:
    """The longest gap between two events of a stream, as its client sees it, in seconds of the
    router's work."""
    async with opened(router, body_for(stub)) as client:
        await client.read_head()
        moments = []
        while await client.read_piece():
            moments.append(router.cpu_s)
    return max(later - before for before, later in itertools.pairwise(moments))


# --- clients that leave ---------------------------------------------------------------------------


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_first_token_ends_the_work(
    router: RouterProcess, stream: bool, reset: bool
) -> None:
    """The response is no longer wanted, and the prefill delays other requests."""
    async with engines(1, behaviour=hang) as (stub,), router.serving(stub):
        async with opened(router, body_for(stub, stream=stream)) as client:
            await eventually(lambda: stub.active == 1, "the replica has it")
            await left_for_good(client, stub, reset)
        await router.until(
            lambda now: now.sum("kvroute_in_flight_requests") == 0, "nothing is in flight"
        )


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("path", STREAMED_PATHS)
async def test_a_client_that_leaves_in_mid_stream_ends_the_work(
    router: RouterProcess, path: str, reset: bool
) -> None:
    """Whether or not the stream is silent at that moment."""
    async with engines(1, behaviour=begun_until(asyncio.Event())) as (stub,), router.serving(stub):
        async with opened(router, body_for(stub, path), path) as client:
            await client.read_head()
            await client.read_piece()
            await left_for_good(client, stub, reset)
        assert (await router.replica(stub.name))["failed_requests"] == 0


async def test_a_client_that_leaves_a_fast_stream_ends_the_work(
    router: RouterProcess,
) -> None:
    """The router is writing all the time, so it must notice the close while it writes."""
    fast = streaming(1_000_000)
    async with (
        engines(1, behaviour=fast) as (stub,),
        router.serving(stub),
        opened(router, body_for(stub)) as client,
    ):
        await client.read_head()
        await client.read_piece()
        await left_for_good(client, stub, reset=False)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_a_client_that_stops_sending_gets_its_whole_response(
    router: RouterProcess, version: str, stream: bool
) -> None:
    """As `nc` does at the end of its input, and scripts that call `shutdown`: they still read."""
    arrived = asyncio.Semaphore(0)

    async def behave(exchange: Exchange) -> None:
        pieces = [token_event("/v1/completions", index) for index in range(5)] + [DONE]
        kind = b"text/event-stream" if stream else b"application/json"
        length = b"content-length: %d" % sum(map(len, pieces))
        framing = b"connection: close" if stream else length
        await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n" % kind)
        await exchange.send(framing + b"\r\n\r\n")
        for piece in pieces:
            await exchange.send(piece)
            await arrived.acquire()
        if stream:
            exchange.close()

    async with engines(1, behaviour=behave) as (stub,), router.serving(stub):
        async with connect(router.port) as client:
            content = json.dumps(body_for(stub, stream=stream)).encode()
            head = f"POST /v1/completions HTTP/{version}\r\nhost: x\r\n"
            head += f"content-length: {len(content)}\r\n\r\n"
            await client.write(head.encode() + content)
            client.writer.write_eof()
            received = b""
            for index in range(5):
                while b"t%d " % index not in received:
                    piece = await client.reader.read(65536)
                    assert piece, received
                    received += piece
                # What came after the end of the client's own bytes has been read by then.
                assert [(await router.get("/healthz")).status for _ in range(2)] == [200, 200]
                arrived.release()
            arrived.release()
            received += await client.reader.read()
            assert b"HTTP/1.1 200 " in received
            assert DONE.strip() in received
            if stream and version == "1.1":
                assert received.endswith(b"0\r\n\r\n")
        assert stub.left == []


async def left_for_good(client: HttpClient, stub: EngineStub, reset: bool) -> None:
    client.leave(reset)
    await eventually(lambda: stub.left, "the replica's connection is closed")
    await eventually(lambda: stub.active == 0, "the replica is rid of it")


# --- replicas that fail ---------------------------------------------------------------------------


@pytest.mark.parametrize("path", STREAMED_PATHS)
async def test_a_replica_that_dies_in_mid_stream_gives_an_error_event_and_no_other_client_notices(
    router: RouterProcess, path: str
) -> None:
    """A client raises an error at a broken line of JSON, and waits forever if the stream just
    stops."""
    go = asyncio.Event()
    async with (
        engines(2, behaviour=begun_until(go)) as (first, second),
        router.serving(first, second),
        contextlib.AsyncExitStack() as stack,
    ):
        others = [
            await stack.enter_async_context(opened(router, body_for(first, path), path))
            for _ in range(6)
        ]
        for client in others:
            assert await client.read_head() == 200
        # The less busy one: it gets what comes now.
        dying = first if first.active < second.active else second
        dying.behaviour = dying_after(2)
        broken = [body for _ in range(12) if (body := await body_from(router, dying, path))]
        go.set()
        assert broken
        for body in broken:
            check_broken_off(body, path)
        whole = b"".join(token_event(path, index) for index in range(4)) + DONE
        assert [await other.read_body() for other in others] == [whole] * 6


async def body_from(router: RouterProcess, stub: EngineStub, path: str) -> bytes | None:
    """The body of a response, if *stub* sent it."""
    async with opened(
        router, body_for(stub, path, prompt=[1] if path == "/v1/completions" else "x"), path
    ) as client:
        assert await client.read_head() == 200
        return await client.read_body() if client.headers["x-kv-replica"] == stub.name else None


def check_broken_off(body: bytes, path: str) -> None:
    begun = b"".join(token_event(path, index) for index in range(2))
    assert body.startswith(begun)
    rest = body.removeprefix(begun)
    if path == "/v1/messages":
        name, data = rest.removesuffix(b"\n\n").split(b"\n")
        assert name == b"event: error"
        assert json.loads(data.removeprefix(b"data: "))["type"] == "error"
    else:
        assert rest.endswith(b"\n\n" + DONE)
        assert (
            json.loads(rest.removesuffix(DONE).removeprefix(b"data: "))["error"]["code"]
            == "replica_died"
        )


@pytest.mark.parametrize(
    "how", ["killed", "hangs up", "503 Service Unavailable", "502 Bad Gateway"]
)
async def test_with_a_dead_replica_no_request_fails_that_another_could_serve(
    router: RouterProcess, how: str
) -> None:
    """Least of all those with a hit there, which are sent to it first."""
    async with engines(3, has_events=True) as stubs, router.serving(*stubs):
        dead, ids = stubs[0], prompt_ids(256, 5)
        dead.store(ids)
        await router.until_applied(dead)
        body = {"model": dead.model, "prompt": [*ids, 1]}
        assert (await router.post("/v1/completions", body)).headers["x-kv-replica"] == dead.name
        if how == "killed":
            await dead.stop()
        else:
            dead.behaviour = hang_up if how == "hangs up" else refusing(how)
        for _ in range(10):
            found = await asyncio.gather(*(router.post("/v1/completions", body) for _ in range(6)))
            assert [answered.status for answered in found] == [200] * 6
            assert dead.name not in {answered.headers["x-kv-replica"] for answered in found}
        assert (await router.metrics()).sum("kvroute_retries_total", replica=dead.name) >= 1


@pytest.fixture(scope="module")
def checking() -> Iterator[RouterProcess]:
    """A router with the default retries, whose next check of a replica is never far."""
    with router_process({"health": {"interval_s": 0.02}}) as started:
        yield started


async def test_one_of_two_replicas_that_resets_each_request_costs_no_client_a_response(
    checking: RouterProcess,
) -> None:
    """Its checks pass, so it comes back again and again. Some clients got 502, since too many
    requests were being tried again, while the other replica was idle."""
    async with engines(2) as (broken, good), checking.serving(broken, good):
        broken.behaviour = hang_up
        body = {"model": good.model, "prompt": [1]}
        for _ in range(100):
            while (await checking.replica(broken.name))["health"] != "healthy":
                pass
            assert (await checking.post("/v1/completions", body)).status == 200
        assert len(good.requests) == 100
        assert len(broken.requests) > 20


async def test_retries_are_no_storm_where_all_replicas_fail() -> None:
    """Each request tried thrice would be three times the load on what is failing under it."""
    with router_process({"health": {"unhealthy_after": 100}}) as lenient:
        async with engines(4) as stubs, lenient.serving(*stubs):
            for stub in stubs:
                stub.behaviour = refusing("503 Service Unavailable")
            body = {"model": stubs[0].model, "prompt": [1]}
            for _ in range(100):
                assert (await lenient.post("/v1/completions", body)).status == 503
            of_budget, at_ease = 10 + 100 // 10, 4 * 4
            assert sum(len(stub.requests) for stub in stubs) <= 100 + of_budget + at_ease


@pytest.fixture(scope="module")
def forgiving() -> Iterator[RouterProcess]:
    """A router that may retry all its requests."""
    with router_process({"server": {"retries": {"budget_burst": 100}}}) as started:
        yield started


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\n" + b"".join(b"x-%d: 1\r\n" % number for number in range(300)),
        b"HTTP/1.1 999 Odd\r\n",
        b"HTTP/1.1 099 Odd\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n",
        b"HTTP/1.1 200 OK\r\n: no name\r\n",
        b"nonsense\r\n",
    ],
    ids=["too many headers", "status 999", "status 99", "two lengths", "no name", "no HTTP"],
)
async def test_a_broken_head_with_its_body_in_one_segment_goes_to_another_replica(
    forgiving: RouterProcess, head: bytes, stream: bool
) -> None:
    """The body is parsed in the same call as the head that is refused: the client got an empty
    response, and no other replica was asked."""

    async def broken(exchange: Exchange) -> None:
        await exchange.send(head + b"content-length: 2\r\n\r\n{}")
        await exchange.wait(asyncio.Event())

    async with engines(2, has_events=True) as (bad, good), forgiving.serving(bad, good):
        ids = prompt_ids(64, 5)
        bad.store(ids)
        await forgiving.until_applied(bad)
        bad.behaviour = broken
        body = {"model": bad.model, "prompt": [*ids, 1], "stream": stream}
        found = await forgiving.post("/v1/completions", body)
        assert (found.status, found.headers.get("x-kv-replica")) == (200, good.name), found
        assert found.body.endswith(DONE) if stream else found.json["served_by"] == good.name
        assert [len(stub.requests) for stub in (bad, good)] == [1, 1]
        assert (await forgiving.replica(bad.name))["failed_requests"] == 1
    forgiving.check_log()


async def test_a_replica_is_back_with_the_first_check_after_its_return(
    router: RouterProcess,
) -> None:
    """Every further interval wastes capacity."""
    async with engines(2) as (stub, other), router.serving(stub, other):
        checks = []
        for _ in range(3):
            await stub.stop()
            while (await router.replica(stub.name))["state"] != "unhealthy":
                await router.post("/v1/completions", body_for(stub, stream=False))
            await stub.start()
            before = stub.health_checks
            while (await router.replica(stub.name))["state"] != "healthy":
                await asyncio.sleep(0.01)
            checks.append(stub.health_checks - before)
            await served_by(router, stub)
        assert min(checks) == 1, "on a busy machine a second one may come before we look"


async def served_by(router: RouterProcess, stub: EngineStub) -> None:
    for number in range(100):
        found = await router.post(
            "/v1/completions", body_for(stub, stream=False, prompt=prompt_ids(64, number))
        )
        if found.headers["x-kv-replica"] == stub.name:
            return
    raise AssertionError(f"{stub.name} gets nothing")


async def test_a_prompt_that_closes_connections_reaches_two_of_twelve_replicas() -> None:
    """A prompt that kills engines would otherwise kill them all, twice over where connections are
    kept."""
    async with engines(12) as fleet:
        with router_process(CONFIG) as router:
            async with router.serving(*fleet):
                async with connect(router.port) as client:
                    for number in range(36):
                        await client.ask("POST", "/v1/completions", small(fleet[0], number))
                for engine in fleet:
                    engine.behaviour = hang_up
                before = sum(len(engine.requests) for engine in fleet)
                found = await router.post("/v1/completions", small(fleet[0], 100))
                assert (found.status, found.error["code"]) == (502, "no_replica_available")
                assert sum(len(engine.requests) for engine in fleet) - before <= 3
                now = await router.metrics()
                assert now.sum("kvroute_unretried_requests_total") == 1
                assert now.sum("kvroute_replica_healthy") == 12


@contextlib.asynccontextmanager
async def quickly_checking() -> AsyncIterator[RouterProcess]:
    """A router that notices within seconds that a replica is silent."""
    health = {**CONFIG["health"], "timeout_s": 3.0}
    with router_process({**CONFIG, "health": health}) as started:
        yield started


async def test_what_was_sent_to_a_replica_that_freezes_does_not_wait_for_its_timeout() -> None:
    """first_byte_s is ten minutes: requests without a first byte go
    elsewhere as soon as checks have failed, and begun streams end with the error event."""
    goes_on = asyncio.Event()
    async with (
        engines(2) as (frozen, other),
        quickly_checking() as router,
        router.serving(frozen, other),
        connect(router.port) as streaming_client,
    ):
        await router.post(f"/replicas/{other.name}/drain")
        frozen.behaviour = begun_until(goes_on)
        await streaming_client.send("POST", "/v1/completions", body_for(frozen))
        assert await streaming_client.read_head() == 200
        frozen.behaviour = hang
        waiting = [
            asyncio.create_task(router.post("/v1/completions", small(frozen, number)))
            for number in range(2, 22)
        ]
        await eventually(lambda: frozen.active == 21, "all of them wait there")
        await router.post(f"/replicas/{other.name}/undrain")
        frozen.silent_paths = ("/health",)
        answers = await asyncio.gather(*waiting)
        body = await streaming_client.read_body()
        assert {(found.status, found.headers["x-kv-replica"]) for found in answers} == {
            (200, other.name)
        }
        assert b'"replica_died"' in body
        assert body.endswith(DONE)
        now = await router.metrics()
        moved = now.sum("kvroute_retries_total", replica=frozen.name, reason="unhealthy")
        assert moved == 20


def small(stub: EngineStub, number: int) -> dict[str, Any]:
    """A request that is not streamed; of each *number* another prompt."""
    return body_for(stub, stream=False, prompt=prompt_ids(8, number))


async def test_when_every_replica_fails_the_client_is_asked_to_retry(
    router: RouterProcess,
) -> None:
    """The client needs an error that it can act on, not a closed connection."""
    async with (
        engines(2, behaviour=refusing("503 Service Unavailable")) as stubs,
        router.serving(*stubs),
    ):
        for path in STREAMED_PATHS:
            refused = await router.post(path, body_for(stubs[0], path))
            assert (refused.status, refused.headers["retry-after"]) == (503, "1")
            is_anthropic = path == "/v1/messages"
            assert (refused.json.get("type") == "error") is is_anthropic
            assert refused.error["type"] == ("overloaded_error" if is_anthropic else "server_error")


async def test_a_truncated_response_looks_truncated(router: RouterProcess) -> None:
    """Half a JSON response that looks complete would be taken for a complete one."""

    async def behave(exchange: Exchange) -> None:
        await exchange.send(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n"
            + b"{" * 50
        )
        exchange.reset()

    async with (
        engines(1, behaviour=behave) as (stub,),
        router.serving(stub),
        connect(router.port) as client,
    ):
        await client.send("POST", "/v1/completions", body_for(stub, stream=False))
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await client.read_answer()


@pytest.mark.parametrize(
    "status",
    ["400 Bad Request", "404 Not Found", "422 Unprocessable Entity", "429 Too Many Requests"],
)
async def test_a_4xx_response_never_counts_against_a_replica(
    router: RouterProcess, status: str
) -> None:
    """Otherwise one client with a bad request could take the fleet down."""
    async with engines(2, behaviour=refusing(status)) as stubs, router.serving(*stubs):
        for stream in (False, True) * 10:
            found = await router.post("/v1/completions", body_for(stubs[0], stream=stream))
            assert found.status == int(status[:3])
            assert found.json["error"]["message"] == "the engine says no", (
                "it is passed on as it came"
            )
        now = await router.metrics()
        for stub in stubs:
            view = await router.replica(stub.name)
            assert (view["state"], view["failed_requests"], view["times_unhealthy"]) == (
                "healthy",
                0,
                0,
            )
            assert now.sum("kvroute_retries_total", replica=stub.name) == 0
        assert sum(len(stub.requests) for stub in stubs) - tokenised(*stubs) == 20, (
            "none was tried twice"
        )


def tokenised(*stubs: EngineStub) -> int:
    return sum(request.path == "/tokenize" for stub in stubs for request in stub.requests)


async def test_in_flight_counts_return_to_zero_after_any_end(router: RouterProcess) -> None:
    """A count that leaks keeps traffic away from a replica forever."""
    ways: list[Behaviour] = [
        answer,
        hang,
        hang_up,
        dying_after(2),
        streaming(3),
        refusing("500 Internal Server Error"),
    ]
    ways += [
        refusing("503 Service Unavailable"),
        refusing("400 Bad Request"),
        begun_until(asyncio.Event()),
    ]

    async def one(stub: EngineStub, number: int) -> None:
        async with opened(
            router, body_for(stub, stream=number % 2 == 0, prompt=prompt_ids(100, number))
        ) as client:
            with contextlib.suppress(
                asyncio.TimeoutError, asyncio.IncompleteReadError, ConnectionError
            ):
                await client.read_head(0.3 + number % 5 / 10)
                async with timeout(0.5):
                    await client.read_body()
            client.leave(reset=number % 3 == 0)

    async with engines(3) as stubs, router.serving(*stubs):
        for index, way in enumerate(ways):
            stubs[index % 3].behaviour = way
            stubs[(index + 1) % 3].behaviour = ways[-index]
            await asyncio.gather(*(one(stubs[0], number) for number in range(12)))
        await router.until_idle()
        for stub in stubs:
            assert (await router.replica(stub.name))["load"] == {
                "prefilling_requests": 0,
                "prefill_tokens": 0,
                "decoding_requests": 0,
                "tokenizing_requests": 0,
                "context_tokens": 0,
            }
            await eventually(lambda stub=stub: stub.active == 0, "the replica is rid of all")  # type: ignore[misc]


# --- where the load goes --------------------------------------------------------------------------


async def test_a_burst_of_equal_prompts_stays_together_before_the_first_event(
    router: RouterProcess,
) -> None:
    """Waiting for a prefix that is being computed is cheaper than computing it everywhere."""
    go = asyncio.Event()
    async with engines(3, behaviour=after(go)) as stubs, router.serving(*stubs):
        body = {"model": stubs[0].model, "prompt": prompt_ids(1024, 6)}
        asking = [asyncio.create_task(router.post("/v1/completions", body)) for _ in range(12)]
        await eventually(lambda: sum(stub.active for stub in stubs) == 12, "all are under way")
        go.set()
        assert (
            len(Counter(found.headers["x-kv-replica"] for found in await asyncio.gather(*asking)))
            == 1
        )


async def test_a_burst_of_different_prompts_is_spread(router: RouterProcess) -> None:
    """Prompts that share nothing have no reason to wait in the same queue."""
    go = asyncio.Event()
    async with engines(3, behaviour=after(go)) as stubs, router.serving(*stubs):
        asking = [
            asyncio.create_task(
                router.post(
                    "/v1/completions", {"model": stubs[0].model, "prompt": prompt_ids(1024, 10 + n)}
                )
            )
            for n in range(12)
        ]
        await eventually(lambda: sum(stub.active for stub in stubs) == 12, "all are under way")
        go.set()
        counts = Counter(found.headers["x-kv-replica"] for found in await asyncio.gather(*asking))
        assert sorted(counts.values()) == [4, 4, 4]


@pytest.mark.parametrize("saturation", ["requests in decode", "its own queue", "a limit"])
async def test_one_hot_prefix_spills_over_once_its_own_replica_is_saturated(
    router: RouterProcess, saturation: str
) -> None:
    """One replica overloaded while the others idle is the classic failure of prefix routing."""
    settings = {"max_concurrent_requests": 40} if saturation == "a limit" else {}
    endless = begun_until(asyncio.Event())
    async with (
        engines(3, has_events=True, behaviour=endless) as stubs,
        router.serving(*stubs, **settings),
    ):
        hot, ids = stubs[2], prompt_ids(2048, 7)
        hot.store(ids)
        await router.until_applied(hot)
        async with contextlib.AsyncExitStack() as stack:
            early = [await placed(stack, router, hot, ids, number) for number in range(5)]
            assert early == [hot.name] * 5, "as long as it has room, it serves them"
            if saturation == "its own queue":
                hot.waiting_requests = 50
                await gauge_is_read(router, hot, 50)
            late = Counter(
                [await placed(stack, router, hot, ids, number) for number in range(5, 100)]
            )
            assert len(late) > 1, "it spilled over"
            assert (
                late[hot.name]
                <= {"its own queue": 0, "a limit": 35, "requests in decode": 80}[saturation]
            )


async def placed(
    stack: contextlib.AsyncExitStack,
    router: RouterProcess,
    stub: EngineStub,
    ids: list[int],
    number: int,
) -> str:
    """Send a prompt with the hot prefix, leave it running, and return where it was sent."""
    client = await stack.enter_async_context(
        opened(router, body_for(stub, prompt=[*ids, *prompt_ids(20, 100 + number)]))
    )
    assert await client.read_head() == 200
    await client.read_piece()
    return client.headers["x-kv-replica"]


async def test_the_gauges_of_an_engine_that_is_gone_do_not_stay_as_they_were() -> None:
    """An autoscaler would start more engines for requests that wait nowhere any more."""
    health = {**QUICK_HEALTH, "engine_load_stale_after_s": 1.0}
    async with engines(1) as (stub,):
        stub.waiting_requests = 7
        with router_process({"health": health}) as router:
            async with router.serving(stub):
                await gauge_is_read(router, stub, 7)
                await stub.stop()
                await gauge_is_read(router, stub, 0)
                assert (await router.replica(stub.name))["engine_load_age_s"] > 1.0
                await stub.start()


async def gauge_is_read(router: RouterProcess, stub: EngineStub, waiting: int) -> None:
    name = "kvroute_engine_waiting_requests"
    await router.until(
        lambda now: now.sum(name, replica=stub.name) == waiting,
        "the router has read the engine's gauge",
    )
