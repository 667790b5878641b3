"""A router that the system refuses something: it says so itself, and blames no replica."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

import pytest
import trustme

from tests.support.engine_stub import EngineStub, after, always, engines, prompt_ids
from tests.support.http_client import Answer, HttpClient, ask, connect, encoded, request_bytes
from tests.support.own_network import own_network
from tests.support.router_process import QUICK_HEALTH, Metrics, router_process
from tests.support.waiting import eventually


def files_up_to(limit: int) -> Callable[[], None]:
    def allow() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))

    return allow


def body_for(stub: EngineStub, number: int) -> dict[str, Any]:
    return {"model": stub.model, "prompt": prompt_ids(8, number)}


async def test_a_router_out_of_files_says_so_and_blames_no_replica() -> None:
    """It called all its replicas unhealthy at once, and nothing told anyone that it was its own
    limit; /metrics and /healthz, by which it might have been seen, got no connection either."""
    go = asyncio.Event()
    async with engines(2) as stubs:
        with router_process({"health": QUICK_HEALTH}, limit=files_up_to(100)) as router:
            async with router.serving(*stubs), contextlib.AsyncExitStack() as clients:
                for stub in stubs:
                    stub.behaviour = after(go)
                for number in range(120):
                    with contextlib.suppress(ConnectionError):
                        client = await clients.enter_async_context(connect(router.port))
                        await client.send("POST", "/v1/completions", body_for(stubs[0], number))
                await eventually(
                    lambda: "out of file descriptors (limit 100)" in router.log(), "it says so"
                )
                checks = (await router.metrics()).sum("kvroute_health_checks_total")
                for _ in range(10):
                    assert (await router.get("/healthz")).status == 200
                overview = (await router.get("/overview")).json
                assert overview["headline"]["level"] == "bad"
                assert "out of file descriptors" in overview["headline"]["text"]
                now = await router.metrics()
                assert now.sum("kvroute_shortages_total", resource="open_files") > 0
                assert now.sum("kvroute_rejected_requests_total", code="overloaded") > 0
                assert now.sum("kvroute_replica_healthy") == 2
                assert now.sum("kvroute_replica_failures_total") == 0
                go.set()
            async with router.serving(*stubs):
                for number in range(5):
                    found = await router.post("/v1/completions", body_for(stubs[0], 500 + number))
                    assert found.status == 200
                await router.until(
                    lambda now: now.sum("kvroute_health_checks_total") > checks, "it checks again"
                )
            assert router.log().count("out of file descriptors") == 1


@pytest.mark.parametrize("is_chunked", [False, True], ids=["core", "python"])
async def test_a_router_out_of_local_ports_says_so_and_blames_no_replica(is_chunked: bool) -> None:
    """It called replica after replica unhealthy for it, and forgot what they had cached. Ports are
    short by destination: others may still be reached."""
    go, config = asyncio.Event(), {"health": PATIENT_HEALTH}
    written = in_chunks if is_chunked else in_one
    with own_network() as network:
        async with engines(2) as stubs, contextlib.AsyncExitStack() as clients:
            router = clients.enter_context(router_process(config, limit=network.enter))
            async with router.serving(*stubs):
                await router.until_core_decides(body_for(stubs[0], 1))
                watcher, *askers = [
                    await clients.enter_async_context(connect(router.port)) for _ in range(25)
                ]
                for stub in stubs:
                    stub.behaviour = after(go)
                network.use_ports(20_000, 20_003)
                for number, asker in enumerate(askers):
                    body = encoded(body_for(stubs[0], 1000 * number))
                    await asker.write(written("/v1/completions", body))
                answers = [asyncio.create_task(asker.read_answer()) for asker in askers]
                await eventually(
                    lambda: sum(stub.active for stub in stubs) + count_done(answers) == 24,
                    "all are sent on or answered",
                )
                assert all(stub.active for stub in stubs)
                refused = [each.result() for each in answers if each.done()]
                assert refused
                for each in refused:
                    assert (each.status, each.error["code"]) == (503, "overloaded")
                    assert each.headers["retry-after"] == "1"
                now = Metrics((await watcher.ask("GET", "/metrics")).body.decode())
                assert now.sum("kvroute_shortages_total", resource="ports") >= len(refused)
                assert now.sum("kvroute_replica_failures_total") == 0
                assert now.sum("kvroute_retries_total") == 0
                assert now.sum("kvroute_replica_healthy") == 2
                assert "the router is out of local ports" in router.log()
                go.set()
                served = [each for each in await asyncio.gather(*answers) if each not in refused]
                assert {each.status for each in served} == {200}
                network.use_ports(30_000, 40_000)


def count_done(tasks: Iterable[asyncio.Task[Answer]]) -> int:
    return sum(task.done() for task in tasks)


async def test_what_changed_while_there_were_no_files_is_read_afterwards(tmp_path: Path) -> None:
    """It was read once, at its change: the list stayed an old one, and a certificate would have
    run out."""
    authority, listed = trustme.CA(), tmp_path / "replicas.json"
    shown = {name: tmp_path / f"{name}.pem" for name in ("certificate", "key")}

    def issue() -> None:
        issued = authority.issue_cert("router.test")
        issued.private_key_pem.write_to_path(shown["key"])
        issued.cert_chain_pems[0].write_to_path(shown["certificate"])

    issue()
    listed.write_text("[]")
    config = {
        "discovery": {"files": [{"path": str(listed), "interval_s": 0.05}]},
        "server": {"replica_tls": {name: str(path) for name, path in shown.items()}},
    }
    with router_process(config) as router:
        of_router = router.process.pid, resource.RLIMIT_NOFILE
        before = resource.prlimit(*of_router)
        resource.prlimit(*of_router, (3, before[1]))
        listed.write_text(json.dumps([{"url": "http://127.0.0.1:1", "id": "listed"}]))
        issue()
        for what in ("cannot be read: Too many open files", "certificate is refused"):
            await eventually(lambda what=what: what in router.log(), what)
        resource.prlimit(*of_router, before)
        for what in ("replica listed added", "the renewed certificate is in use"):
            await eventually(lambda what=what: what in router.log(), what)


@pytest.mark.parametrize("said", [b"", b"GET /x HTTP/1.1\r\nx: "])
async def test_strangers_that_hold_every_descriptor_keep_no_probe_out(said: bytes) -> None:
    """Whoever could connect could have had a router that is well killed by its liveness probe, and
    blind its operators, by saying nothing, or half a request."""
    with router_process(limit=files_up_to(200)) as router:
        async with contextlib.AsyncExitStack() as strangers:
            for _ in range(400):
                with contextlib.suppress(ConnectionError):
                    stranger = await strangers.enter_async_context(connect(router.port))
                    await stranger.write(said)
            for _ in range(20):
                assert (await router.get("/healthz")).status == 200
                assert (await router.get("/replicas")).status == 200
            now = await router.metrics()
            assert now.sum("kvroute_shortages_total", resource="open_files") > 0
        assert "out of file descriptors (limit 200)" in router.log()


def in_one(path: str, data: bytes) -> bytes:
    """A request that the core decides."""
    return request_bytes("POST", path, data)


def in_chunks(path: str, data: bytes) -> bytes:
    """A request whose head does not state its length: Python decides it."""
    head = f"POST {path} HTTP/1.1\r\nhost: router\r\ntransfer-encoding: chunked\r\n\r\n"
    return head.encode() + b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data)


async def post_in_chunks(port: int, path: str, body: object) -> Answer:
    async with connect(port) as client:
        await client.write(in_chunks(path, encoded(body)))
        return await client.read_answer()


async def post_whole(port: int, path: str, body: object) -> Answer:
    return await ask(port, "POST", path, body)


@pytest.mark.parametrize("held_by", [post_whole, post_in_chunks], ids=["core", "python"])
async def test_bodies_together_have_a_bound(
    held_by: Callable[[int, str, object], Coroutine[Any, Any, Answer]],
) -> None:
    """A hundred large bodies at once would need more memory than the machine has, though each of
    them is within its own bound; wherever they are held."""
    go = asyncio.Event()
    config = {"health": QUICK_HEALTH, "server": {"max_buffered_bytes": 100_000}}
    async with engines(1) as (stub,):
        with router_process(config) as router:
            async with router.serving(stub):
                await router.until_core_decides(body_for(stub, 3))
                stub.behaviour = after(go)
                body = {**body_for(stub, 1), "user": "x" * 40_000}
                held = [
                    asyncio.create_task(held_by(router.port, "/v1/completions", body))
                    for _ in range(2)
                ]
                await eventually(lambda: stub.active == 2, "two are under way")
                for path in ("/v1/completions", "/route"):
                    refused = await router.post(path, body)
                    assert (refused.status, refused.error["code"]) == (503, "overloaded")
                    assert refused.headers["retry-after"] == "1"
                    assert "bodies of 100000 bytes" in refused.error["message"]
                small = asyncio.create_task(router.post("/v1/completions", body_for(stub, 2)))
                await eventually(lambda: stub.active == 3, "a small one has room")
                now = await router.metrics()
                assert 80_000 < now.sum("kvroute_buffered_bytes") <= 100_000
                go.set()
                answers = await asyncio.gather(*held, small)
                assert [found.status for found in answers] == [200] * 3
                assert (await router.metrics()).sum("kvroute_buffered_bytes") == 0


async def test_a_length_that_is_only_announced_takes_no_room() -> None:
    """Some hundred heads of hundred bytes had everybody else refused, for as long as they were sent
    again each second."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 4000000\r\n\r\n"
    config = {"health": QUICK_HEALTH, "server": {"max_buffered_bytes": 10_000_000}}
    async with engines(1) as (stub,):
        with router_process(config) as router:
            async with router.serving(stub), contextlib.AsyncExitStack() as clients:
                await router.until_core_decides(body_for(stub, 1))
                for _ in range(4):
                    client = await clients.enter_async_context(connect(router.port))
                    await client.write(head)
                for _ in range(10):
                    found = await router.post("/v1/completions", body_for(stub, 1))
                    assert found.status == 200, found.body


@pytest.mark.parametrize("path", ["/nowhere", "/replicas"])
async def test_bodies_for_no_replica_have_the_same_bound(path: str) -> None:
    """Nobody needs a key to send them. What the data plane holds of one counts until it is passed
    on, when its reader counts it."""
    limits = {"max_body_bytes": 2_000_000, "max_buffered_bytes": 1_000_000}
    head = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
    async with contextlib.AsyncExitStack() as clients:
        router = clients.enter_context(router_process({"server": limits}))

        async def begun(announced: int, sent: int) -> HttpClient:
            client = await clients.enter_async_context(connect(router.port))
            await client.write(head % (path.encode(), announced) + b" " * sent)
            return client

        async def until_held(least: int, most: int) -> None:
            while not least <= (await router.metrics()).sum("kvroute_buffered_bytes") <= most:
                pass

        holder = await begun(700_000, 600_000)
        await until_held(500_000, 600_000)
        for _ in range(3):
            refused = await (await begun(700_000, 700_000)).read_answer()
            assert (refused.status, refused.error["code"]) == (503, "overloaded")
            assert refused.headers["retry-after"] == "1"
            assert "bodies of 1000000 bytes" in refused.error["message"]
        now = await router.metrics()
        assert now.sum("kvroute_rejected_requests_total", code="overloaded") == 3
        too_long = await (await begun(2_000_001, 0)).read_answer()
        assert (too_long.status, too_long.error["code"]) == (413, "body_too_large")
        await until_held(500_000, 600_000)
        await holder.write(b" " * 100_000)
        assert (await holder.read_answer()).status in (404, 415)
        await until_held(0, 0)
        (await begun(700_000, 600_000)).leave()
        await until_held(0, 0)
        assert (await (await begun(700_000, 700_000)).read_answer()).status in (404, 415)


async def test_a_large_body_is_held_by_python_and_the_core_and_no_third_time() -> None:
    """It counts once: a machine that has room for twice the bound must not run out of memory."""
    go, count = asyncio.Event(), 4
    async with engines(1) as (stub,):
        with router_process({"health": PATIENT_HEALTH}) as router:
            async with router.serving(stub), contextlib.AsyncExitStack() as clients:
                await router.until_core_decides(body_for(stub, 1))
                stub.behaviour = after(go)
                sent = encoded({**body_for(stub, 1), "user": "x" * 19_000_000})
                held = []
                for number in range(1, count + 1):
                    client = await clients.enter_async_context(connect(router.port))
                    await client.send("POST", "/v1/completions", sent)
                    await eventually(lambda most=number: stub.active == most, "it is sent on")
                    held.append(router.rss_bytes)
                assert held[-1] - held[0] < 2.8 * (count - 1) * len(sent)
                go.set()


async def test_replicas_that_leave_take_their_tasks_with_them() -> None:
    """A task that never ends shows in nothing else until memory runs out."""
    async with engines(3, has_events=True) as stubs:
        with router_process({"health": QUICK_HEALTH}) as router:
            at_first = (await router.metrics()).sum("kvroute_event_loop_tasks")
            for _ in range(2):
                async with router.serving(*stubs):
                    await router.until(
                        lambda now: now.sum("kvroute_event_loop_tasks") >= at_first + 3,
                        "each has one at least",
                    )
                await router.until(
                    lambda now: now.sum("kvroute_event_loop_tasks") <= at_first, "all have ended"
                )


async def test_a_router_begins_no_thread_while_it_runs() -> None:
    """Python waits for a thread to say that it began, and one that finds no memory never does: the
    event loop waited with it, for ever."""
    async with engines(1) as (stub,):
        stub.tokenizing = always(b'{"tokens": [1, 2, 3]}')
        with router_process() as router:
            async with router.serving(stub):
                begun = threads_of(router.process.pid)
                text = "word " * 2**19
                body = {"model": stub.model, "prompt": text}
                chat = {"model": stub.model, "messages": [USER | {"content": text}]}
                for path, sent in [("/route", body), ("/v1/chat/completions", chat)]:
                    found = await asyncio.gather(*(router.post(path, sent) for _ in range(12)))
                    assert {each.status for each in found} == {200}
                await router.metrics()
                assert (await router.get("/overview")).status == 200
                assert threads_of(router.process.pid) == begun


def threads_of(pid: int) -> set[str]:
    return {
        f"{each.name} {(each / 'comm').read_text()}" for each in Path(f"/proc/{pid}/task").iterdir()
    }


SOME, NONE = 300, 20


@pytest.mark.parametrize("room_mb", [SOME, NONE])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/route", "/v1/score"])
async def test_a_router_short_of_memory_says_so_and_goes_on(path: str, room_mb: int) -> None:
    """Wherever it runs out: in the server, in a thread, in a child that reads the body, in the
    tokenizer. A bare 500 tells a client that its request is at fault, or the router broken.

    With no room at all the event loop may fail to allocate what it reads into, and resets the
    connection before any of our code runs; it is counted like the others.
    """
    async with engines(1) as (stub,):
        stub.behaviour = stub.paths["/v1/score"] = always(b"{}")
        stub.tokenizing = always(b'{"tokens": [' + b"12345, " * 2**21 + b"1]}")
        with router_process({"health": PATIENT_HEALTH}) as router:
            async with router.serving(stub):
                small = {"model": stub.model, "prompt": "a", "messages": [USER | {"content": "a"}]}
                assert (await router.post(path, small)).status == 200
                limit_memory(router.process.pid, room_mb * 2**20)
                text = "word " * (8 * 2**20 // 5)
                large = {**small, "prompt": text, "messages": [USER | {"content": text}]}
                sent = json.dumps(large).encode()
                found = await asyncio.gather(
                    *(router.post(path, sent) for _ in range(12)), return_exceptions=True
                )
                for each in found:
                    if room_mb == NONE and isinstance(each, (ConnectionError, EOFError)):
                        continue
                    assert isinstance(each, Answer), (each, router.log()[-9000:])
                    assert each.status in (200, 413, 503), (each, router.log()[-9000:])
                    if each.status != 200:
                        assert each.error["type"] in ("server_error", "invalid_request_error")
                assert router.process.poll() is None
                limit_memory(router.process.pid, resource.RLIM_INFINITY)
                assert (await router.post(path, small)).status == 200
                if any(not isinstance(each, Answer) or each.status == 503 for each in found):
                    now = await router.metrics()
                    assert now.sum("kvroute_shortages_total", resource="memory") > 0


USER = {"role": "user"}
PATIENT_HEALTH = {"interval_s": 20, "timeout_s": 20, "engine_load_stale_after_s": 60}
"""The replica runs in this process, which is busy with large bodies."""


def limit_memory(pid: int, room: int) -> None:
    """Let a process have so many more bytes than it has."""
    used = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    limit = room if room == resource.RLIM_INFINITY else used + room
    _, hard = resource.prlimit(pid, resource.RLIMIT_AS)
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, hard))
