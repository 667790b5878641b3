"""Clients that are broken, slow, greedy or malicious: no crash, no hang, no growth, and every one
of them is counted.

Malformed events are tested in `tests/kvevents`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from random import Random
from typing import Any

import msgspec
import pytest
from async_timeout import timeout

from tests.support.engine_stub import (
    DONE,
    STREAM_HEAD,
    EngineStub,
    Exchange,
    after,
    always,
    answer,
    engines,
    refusing,
    streaming,
)
from tests.support.hostile import SENTINEL, mutated_body, mutated_request, seeds
from tests.support.http_client import Answer, HttpClient, connect, request_bytes
from tests.support.router_process import RouterProcess, router_process
from tests.support.waiting import DEADLINE_S, eventually

MIB = 1024 * 1024
REQUEST_S = 5.0
STALL_S = 5.0
CONFIG = {
    "server": {
        "max_body_bytes": 32 * MIB,
        "max_header_bytes": 16 * 1024,
        "timeouts": {"connect_s": 10, "client_body_s": REQUEST_S, "client_stall_s": STALL_S},
    },
    "health": {"interval_s": 5, "timeout_s": 5, "engine_load_stale_after_s": 10},
    "observability": {"log_level": "debug"},
}
MUTATED_BODIES = 12_000
MUTATED_REQUESTS = 4_000
WORKERS = 8
ANSWERS_OF_ITS_OWN = frozenset((400, 404, 405, 408, 409, 413, 415, 431))
REJECTED = "kvroute_rejected_requests_total"


HARDENED: dict[str, Any] = {
    "behaviour": always(b'{"usage": {"prompt_tokens": 1}}'),
    "tokenizing": always(b'{"tokens": [1, 2, 3], "count": 3}'),
}
"""A replica that accepts anything."""


@pytest.fixture(scope="module")
def process() -> Iterator[RouterProcess]:
    with router_process(CONFIG) as started:
        yield started


@pytest.fixture
async def router(process: RouterProcess) -> AsyncIterator[RouterProcess]:
    """The router; after each test it must serve as before, hold nothing, not have grown, and have
    logged no prompt."""
    rss_before, said_before = process.rss_bytes, len(process.log())
    yield process
    await process.until_idle()
    assert (await process.get("/healthz")).status == 200
    assert process.rss_bytes < rss_before + 150 * MIB
    assert SENTINEL not in process.log()
    process.check_log(said_before)


# --- requests that are nearly right ---------------------------------------------------------------


async def test_mutated_bodies_get_a_response_and_every_rejected_one_is_counted(
    router: RouterProcess,
) -> None:
    """Whatever the body, the connection stays usable, and the response is the engine's or an error
    that quotes nothing of it."""
    async with engines(1, **HARDENED) as (stub,), router.serving(stub):
        await router.post("/v1/completions", {"model": stub.model, "prompt": [1]})
        before = await router.metrics()
        statuses = sum(
            await asyncio.gather(*(send_bodies(router, stub, seed) for seed in range(WORKERS))),
            Counter(),
        )
        now = await router.metrics()
        assert statuses.total() == MUTATED_BODIES
        assert set(statuses) <= {200, 201, *ANSWERS_OF_ITS_OWN}
        rejected = sum(count for status, count in statuses.items() if status >= 400)
        assert rejected > MUTATED_BODIES // 10
        assert statuses[200] > MUTATED_BODIES // 10
        assert now.sum(REJECTED) - before.sum(REJECTED) == rejected
        assert len(now.text.splitlines()) < len(before.text.splitlines()) + 100, (
            "no label is a client's word"
        )
        await remove_strangers(router, stub)


async def send_bodies(router: RouterProcess, stub: EngineStub, seed: int) -> Counter[int]:
    random, templates, statuses = Random(seed), seeds(stub.model), Counter[int]()
    async with connect(router.port) as client:
        for _ in range(MUTATED_BODIES // WORKERS):
            path = random.choice(list(templates))
            found = await client.ask(
                "POST", path, mutated_body(random, random.choice(templates[path]))
            )
            statuses[found.status] += 1
            assert found.status < 400 or SENTINEL not in found.body.decode(errors="replace"), path
    return statuses


async def remove_strangers(router: RouterProcess, stub: EngineStub) -> None:
    """A mutation may have made a valid URL, so a replica was added."""
    for view in (await router.get("/replicas")).json["replicas"]:
        if view["id"] != stub.name:
            await router.delete(f"/replicas/{view['id']}")


async def test_mutated_requests_get_a_response_or_end_their_connection(
    router: RouterProcess,
) -> None:
    """Heads, lengths and chunks that lie: the router must neither wait for bytes that never arrive
    nor take one request for another."""
    async with engines(1, **HARDENED) as (stub,), router.serving(stub):
        before = (await router.metrics()).sum(REJECTED)
        statuses = sum(
            await asyncio.gather(*(send_requests(router, stub, seed) for seed in range(WORKERS))),
            Counter(),
        )
        # 403: a foreign name in Host is refused before the body is there.
        assert set(statuses) <= {100, 200, 201, 204, 403, 501, *ANSWERS_OF_ITS_OWN}, statuses
        assert statuses[400] > MUTATED_REQUESTS // 10
        rejected = sum(count for status, count in statuses.items() if status >= 400)
        assert (await router.metrics()).sum(REJECTED) - before >= rejected
        await remove_strangers(router, stub)


async def send_requests(router: RouterProcess, stub: EngineStub, seed: int) -> Counter[int]:
    """Send each on its own connection, and then close the client's side."""
    random, templates, statuses = Random(1000 + seed), seeds(stub.model), Counter[int]()
    for _ in range(MUTATED_REQUESTS // WORKERS):
        path = random.choice(list(templates))
        body = json.dumps(random.choice(templates[path])).encode()
        async with connect(router.port) as client:
            with contextlib.suppress(ConnectionError):
                await client.write(mutated_request(random, path, body))
                client.writer.write_eof()
            statuses.update(await statuses_until_closed(client))
    return statuses


async def statuses_until_closed(client: HttpClient) -> list[int]:
    received = b""
    with contextlib.suppress(ConnectionError):
        async with timeout(DEADLINE_S):
            while piece := await client.reader.read(MIB):
                received += piece
    heads = [line for line in received.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
    return [int(head.split(b" ")[1]) for head in heads]


# --- requests that are too much -------------------------------------------------------------------


async def test_a_prompt_of_a_million_tokens_does_not_hold_up_other_streams(
    router: RouterProcess,
) -> None:
    """In every form, while other streams continue."""
    async with engines(1) as (stub,), router.serving(stub):
        ids = [(index * 7919) % 128_000 for index in range(1_000_000)]
        stub.behaviour = streaming(100_000, 0.01)
        async with connect(router.port) as other:
            await other.send(
                "POST", "/v1/completions", {"model": stub.model, "prompt": [1], "stream": True}
            )
            await other.read_head()
            stub.behaviour = refusing("200 OK")
            reading = asyncio.create_task(read_without_a_pause(router, other))
            body = json.dumps({"model": stub.model, "prompt": ids}).encode()
            # The second time the replica, which has no events, is taken for holding some of it.
            for most in (0, len(ids)):
                found = await router.post("/v1/completions", body)
                assert found.status == 200
                assert 0 <= int(found.headers["x-kv-hit-tokens"]) <= most
                packed = msgspec.msgpack.encode({"model": stub.model, "token_ids": ids})
                route = await router.post(
                    "/route",
                    packed,
                    {"content-type": "application/msgpack", "accept": "application/json"},
                )
                assert route.json["prompt_tokens"] == 1_000_000
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading
        text = {"model": stub.model, "prompt": f"{SENTINEL} " * 600_000}
        assert (await router.post("/v1/completions", text)).status == 200
        # Encoded before it is connected: a connection that is silent for a second is ended.
        body = json.dumps({"model": stub.model, "prompt": [7] * 2_200_000}).encode()
        too_long = await router.post("/v1/completions", body)
        assert (too_long.status, too_long.error["code"]) == (400, "invalid_value")


async def read_without_a_pause(router: RouterProcess, client: HttpClient) -> None:
    """Every event of a stream must arrive within two seconds of the router's work."""
    before = router.cpu_s
    while await client.read_piece():
        before, gap_s = router.cpu_s, router.cpu_s - before
        assert gap_s < 2


@pytest.mark.parametrize("path", ["/v1/completions", "/route"])
async def test_a_length_with_very_many_zeros_in_front_is_a_length(
    router: RouterProcess, path: str
) -> None:
    """HTTP allows them; Python's int reads no number of more than 4,300 digits."""
    async with connect(router.port) as client:
        head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {'0' * 5000}2\r\n\r\n"
        await client.write(head.encode() + b"{}")
        refused = await client.read_answer()
    assert (refused.status, refused.error["code"]) == (400, "invalid_value")


@pytest.mark.parametrize("unit", ["[", '{"a":', '[{"a":'])
@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/route", "/replicas"]
)
async def test_deep_nesting_is_refused(router: RouterProcess, path: str, unit: str) -> None:
    """Parsers recurse; a stack that overflows takes the process with it."""
    async with engines(1) as (stub,), router.serving(stub):
        depth = unit * 600_000
        for text in (
            depth,
            f'{{"model": "{stub.model}", "prompt": [1], "url": {depth}',
            f'{{"messages": [{depth}',
        ):
            refused = await router.post(path, text.encode())
            assert refused.status in (400, 413), "an operator's body may be 1 MiB"
            assert len(refused.body) < 1000
        closed = depth + "1" + unit.translate(str.maketrans("[{", "]}", 'a":'))[::-1] * 600_000
        arguments = f'{{"kv_cache_report_mode": {closed}}}'
        whole = f'{{"model": "{stub.model}", "prompt": [1], "vllm_xargs": {arguments}}}'
        assert (await router.post(path, whole.encode())).status in (400, 413)


async def test_parsed_bodies_do_not_pile_up_in_memory(router: RouterProcess) -> None:
    """Small JSON may become large objects; many such bodies at once must not all be in memory."""
    async with engines(1) as (stub,), router.serving(stub):
        lists = 2 * MIB
        body = b'{"model": "x", "prompt": [' + b"[]," * lists + b"[]]}"
        before, peak = router.rss_bytes, 0
        sending = asyncio.gather(*(router.post("/v1/completions", body) for _ in range(8)))
        while not sending.done():
            peak = max(peak, router.rss_bytes)
            await asyncio.sleep(0.02)
        assert {found.status for found in sending.result()} == {400}
        assert peak - before < 8 * len(body) + 3 * 64 * lists, (
            "the bodies, and not more than three of them as objects"
        )


async def test_huge_headers_are_refused_and_not_kept(router: RouterProcess) -> None:
    """No connection may hold more than the limit."""
    before = router.rss_bytes

    async def one(number: int) -> None:
        async with connect(router.port) as client:
            with contextlib.suppress(ConnectionError):
                await client.write(b"POST /v1/completions HTTP/1.1\r\nx-%d: " % number)
                for _ in range(64):
                    await client.write(b"a" * 16_384)
            assert await statuses_until_closed(client) in ([431], [])

    now = (await router.metrics()).sum(REJECTED, code="headers_too_large")
    await asyncio.gather(*(one(number) for number in range(100)))
    assert (await router.metrics()).sum(REJECTED, code="headers_too_large") == now + 100
    assert router.rss_bytes < before + 30 * MIB


async def test_a_long_row_of_pipelined_requests_waits_its_turn(router: RouterProcess) -> None:
    """Behind a slow response they must not pile up, thousands per packet: what is not served yet is
    not read."""
    async with (
        engines(1, behaviour=streaming(50, 0.01)) as (stub,),
        router.serving(stub),
        connect(router.port) as client,
    ):
        await client.send(
            "POST", "/v1/completions", {"model": stub.model, "prompt": [1], "stream": True}
        )
        await client.read_head()
        await client.write(request_bytes("GET", "/healthz") * 200)
        assert (await client.read_body()).endswith(DONE), "the stream is not the worse for it"
        assert [(await client.read_answer()).status for _ in range(200)] == [200] * 200


async def test_a_flood_of_pipelined_requests_is_not_read(router: RouterProcess) -> None:
    """A client that sends without end may not cost more than its connection's buffer."""
    held = asyncio.Event()
    async with (
        engines(1, behaviour=after(held)) as (stub,),
        router.serving(stub),
        connect(router.port) as client,
    ):
        await client.send("POST", "/v1/completions", {"model": stub.model, "prompt": [1]})
        await eventually(lambda: stub.active == 1, "the first is under way")
        before = router.rss_bytes
        row = request_bytes("GET", "/healthz") * 600_000
        client.writer.write(row)
        with pytest.raises(asyncio.TimeoutError):
            async with timeout(1.0):
                await client.writer.drain()
        assert router.rss_bytes - before < 16 * MIB
        client.writer.transport.abort()  # or all of them would be sent now, and responded to
        held.set()


# --- clients that are slow ------------------------------------------------------------------------

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
SLOW = {
    "silence": (b"", b""),
    "a slow head": (HEAD, b"x"),
    "empty lines": (b"", b"\r\n"),
    "a slow body": (HEAD + b"content-length: 100000\r\n\r\n", b"["),
    "slow chunks": (HEAD + b"transfer-encoding: chunked\r\n\r\n", b"1\r\n[\r\n"),
    "slow trailers": (HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n[\r\n0\r\nx: ", b"y"),
    "a body that is not wanted": (
        b"GET /healthz HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n",
        b"[",
    ),
    "a refused body": (HEAD + b"content-length: 99999999999\r\n\r\n", b"["),
    "after a response": (request_bytes("GET", "/healthz"), b"\r\n"),
}


async def test_slow_clients_are_ended_in_time(router: RouterProcess) -> None:
    """Slowloris: a few bytes a second on each of many connections. Other clients are served
    meanwhile."""
    async with engines(1) as (stub,), router.serving(stub):
        began, before = time.monotonic(), (await router.metrics()).sum(REJECTED)
        names = [name for name in SLOW for _ in range(10)]
        dripping = [asyncio.create_task(drip(router, *SLOW[name])) for name in names]
        while not all(task.done() for task in dripping):
            async with timeout(DEADLINE_S):
                found = await router.post("/v1/completions", {"model": stub.model, "prompt": [1]})
            assert found.status == 200
            assert time.monotonic() - began < DEADLINE_S, unfinished(names, dripping)
            await asyncio.sleep(0.05)
        for task in dripping:
            task.result()
        assert (await router.metrics()).sum(REJECTED) - before >= len(names)


async def drip(router: RouterProcess, start: bytes, drop: bytes) -> None:
    """Send *start* and then *drop* repeatedly until the router closes the connection."""
    async with connect(router.port) as client:
        await client.write(start)
        reading = asyncio.create_task(client.is_closed())
        with contextlib.suppress(ConnectionError):
            while not reading.done():
                await client.write(drop)
                await asyncio.wait((reading,), timeout=0.1)
        assert await reading


def unfinished(names: list[str], tasks: list[asyncio.Task[None]]) -> Counter[str]:
    return Counter(name for name, task in zip(names, tasks, strict=True) if not task.done())


async def test_clients_that_never_read_are_bounded_and_ended(router: RouterProcess) -> None:
    """Neither a stream, nor a large response, nor ever more responses of the router itself."""
    async with engines(1) as (stub,), router.serving(stub):
        before, others = router.rss_bytes, router.clients
        async with contextlib.AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(connect(router.port, 4096)) for _ in range(43)
            ]
            stub.behaviour = flood
            await asyncio.gather(
                *(ask_and_do_not_read(client, stub, stream=True) for client in clients[:20])
            )
            await eventually(lambda: stub.active == 20, "the streams are under way")
            stub.behaviour = large
            await asyncio.gather(
                *(ask_and_do_not_read(client, stub, stream=False) for client in clients[20:40])
            )
            asking = asyncio.gather(*(ask_again_and_again(client) for client in clients[40:]))
            peak, deadline = 0, time.monotonic() + DEADLINE_S
            while (held := router.clients - others) > 0:
                peak = max(peak, router.rss_bytes)
                assert time.monotonic() < deadline, f"{held} are still there"
                await asyncio.sleep(0.1)
            assert peak - before < 100 * MIB
            await asking
        await eventually(lambda: stub.active == 0, "the replica is rid of all of them")


async def flood(exchange: Exchange) -> None:
    await exchange.send(STREAM_HEAD)
    while True:
        await exchange.chunk(b"data: " + b"x" * 65_536 + b"\n\n")


async def large(exchange: Exchange) -> None:
    await exchange.whole(b"x" * (8 * MIB))


async def ask_and_do_not_read(client: HttpClient, stub: EngineStub, stream: bool) -> None:
    await client.send(
        "POST", "/v1/completions", {"model": stub.model, "prompt": [1], "stream": stream}
    )


async def ask_again_and_again(client: HttpClient) -> None:
    """Send requests without reading a response, as long as the connection lasts."""
    with contextlib.suppress(ConnectionError):
        while True:
            await client.write(request_bytes("GET", "/openapi.json") * 20)
            await asyncio.sleep(0.01)


# --- what must not be seen ------------------------------------------------------------------------


async def test_no_prompt_is_in_a_log_or_in_an_error(router: RouterProcess) -> None:
    """Also at debug level, and whatever goes wrong on the way; the fixture searches the log."""
    async with engines(2) as stubs, router.serving(*stubs):
        chat = {"messages": [{"role": "user", "content": SENTINEL}]}
        ways = [
            answer,
            refusing("500 Internal Server Error"),
            refusing("400 Bad Request"),
            refusing("503 Service Unavailable"),
        ]
        for way in (
            *ways,
            lambda exchange: exchange.send(b"HTTP/1.1 " + SENTINEL.encode() + b"\r\n\r\n"),
        ):
            for stub in stubs:
                stub.behaviour = stub.tokenizing = way
            for path, body in (
                ("/v1/chat/completions", chat),
                ("/v1/completions", {"prompt": SENTINEL}),
                ("/route", chat),
            ):
                for model in (stubs[0].model, f"model {path}", None):
                    found: Answer = await router.post(path, {"model": model, **body})
                    assert SENTINEL not in found.body.decode(errors="replace")
        for text in (
            f'{{"prompt": "{SENTINEL}',
            f'{{"prompt": ["{SENTINEL}", 1]}}',
            f'{{"messages": [{{"{SENTINEL}": 1}}]}}',
        ):
            for path in (
                "/v1/completions",
                "/v1/chat/completions",
                "/v1/messages",
                "/tokenize",
                "/route",
                "/replicas",
            ):
                refused = await router.post(path, text.encode())
                assert refused.status >= 400
                assert SENTINEL not in refused.body.decode()
    assert SENTINEL not in (await router.metrics()).text
