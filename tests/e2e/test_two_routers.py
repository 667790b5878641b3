"""Four routers, which share their load over a real Valkey or Redis."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import socket
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from tests.support.engine_stub import EngineStub, after, unique
from tests.support.http_client import Answer, ask
from tests.support.router_process import QUICK_HEALTH, RouterProcess, router_process
from tests.support.valkey_server import ValkeyServer
from tests.support.waiting import DEADLINE_S, eventually

PROMPT_TOKENS = 4000
"""To compute a fifth of them elsewhere costs more than to wait behind eight requests that nobody is
known to have sent: an engine that is asked during a burst counts some before their routers tell."""


class Balancer:
    """Passes TCP connections on to servers in turn; one that refuses is passed over."""

    def __init__(self, ports: Sequence[int]) -> None:
        self._ports = list(ports)
        self._turns = itertools.count()
        self._connections: set[asyncio.Task[None]] = set()
        self.port = 0

    async def __aenter__(self) -> Balancer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await _end(self._connections)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.ensure_future(self._connect(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            # Others take their turns while this one connects.
            first = next(self._turns) % len(self._ports)
            for port in self._ports[first:] + self._ports[:first]:
                with contextlib.suppress(ConnectionRefusedError):
                    there = await asyncio.open_connection("127.0.0.1", port)
                    with contextlib.closing(there[1]):
                        await asyncio.gather(_pump(reader, there[1]), _pump(there[0], writer))
                    return


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await source.read(65_536):
            sink.write(data)
            await sink.drain()
    sink.close()


def refuses(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED


async def _end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in (left := list(tasks)):
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


@contextlib.asynccontextmanager
async def under_way(
    count: int, port: int, stub: EngineStub, first: int, apart: int = 0
) -> AsyncIterator[list[asyncio.Task[Answer]]]:
    """So many requests, whose prompts begin *apart* token ids from each other."""
    tasks = [
        asyncio.create_task(complete(port, stub, first + apart * number)) for number in range(count)
    ]
    try:
        yield tasks
    finally:
        await _end(tasks)


async def complete(port: int, stub: EngineStub, first: int) -> Answer:
    body = {
        "model": stub.model,
        "prompt": list(range(first, first + PROMPT_TOKENS)),
        "max_tokens": 1,
    }
    return await ask(port, "POST", "/v1/completions", body, {"content-type": "application/json"})


@contextlib.asynccontextmanager
async def fleet() -> AsyncIterator[tuple[ValkeyServer, list[RouterProcess], Any]]:
    model = unique("model")
    with contextlib.closing(ValkeyServer()) as server, contextlib.ExitStack() as stack:
        async with contextlib.AsyncExitStack() as engines:
            stubs = [await engines.enter_async_context(EngineStub(model)) for _ in range(4)]
            config = {
                "health": QUICK_HEALTH,
                "replicas": [{"url": stub.url, "id": stub.name} for stub in stubs],
                "board": {"url": server.url, "secret": "shared-by-both"},
            }
            routers = [stack.enter_context(router_process(config)) for _ in range(4)]
            for router in routers:
                await router.until(
                    lambda now: now.sum("kvroute_replica_healthy") == len(stubs), "all healthy"
                )
                await router.until(
                    lambda now: now.sum("kvroute_board_writers", board="valkey") == 3, "all hear"
                )
            yield server, routers, stubs


async def test_four_routers_are_one() -> None:
    """A burst stays together, load is known, and what dies takes only its own with it."""
    async with (
        fleet() as (server, routers, stubs),
        Balancer([router.port for router in routers]) as balancer,
    ):
        await _what_one_computes_all_wait_for(balancer, routers, stubs)
        await _load_is_known_everywhere(routers, stubs)
        await _without_the_server_each_goes_on(server, routers, balancer, stubs)
        await _one_is_killed_under_load(routers, balancer, stubs)


async def _what_one_computes_all_wait_for(
    balancer: Balancer, routers: Sequence[RouterProcess], stubs: Sequence[EngineStub]
) -> None:
    """Once all have heard of a prompt in prefill, none sends it elsewhere; how long that takes
    is measured by `benchmarks.board_delay`."""
    for burst in range(3):
        await _all_is_heard(routers, stubs)
        release = asyncio.Event()
        for stub in stubs:
            stub.behaviour = after(release)
            stub.requests.clear()
        first = 1 + 10_000 * burst
        async with (
            under_way(1, balancer.port, stubs[0], first) as asked,
            _heard_by_all(routers, stubs),
            under_way(7, balancer.port, stubs[0], first) as more,
        ):
            await eventually(lambda: sum(stub.active for stub in stubs) == 8, "all are sent")
            assert sum(bool(stub.requests) for stub in stubs) == 1
            release.set()
            answers = await asyncio.gather(*asked, *more)
            assert {answer.status for answer in answers} == {200}


@contextlib.asynccontextmanager
async def _heard_by_all(
    routers: Sequence[RouterProcess], stubs: Sequence[EngineStub]
) -> AsyncIterator[None]:
    await eventually(lambda: sum(stub.active for stub in stubs) == 1, "the first is sent")
    for router in routers:
        await _agrees(router, stubs, [stub.active for stub in stubs])
    yield


async def _all_is_heard(routers: Sequence[RouterProcess], stubs: Sequence[EngineStub]) -> None:
    """Until none believes that something is under way."""
    for router in routers:
        busy = True
        while busy:
            known = [await router.replica(stub.name) for stub in stubs]
            busy = any(
                each[whose]["prefilling_requests"] + each[whose]["decoding_requests"]
                for each in known
                for whose in ("load", "others")
            )


async def _load_is_known_everywhere(
    routers: Sequence[RouterProcess], stubs: Sequence[EngineStub]
) -> None:
    """All four agree on it."""
    release = asyncio.Event()
    for stub in stubs:
        stub.behaviour = after(release)
    async with under_way(4, routers[0].port, stubs[0], 100_000, apart=1000) as asked:
        await eventually(lambda: sum(stub.active for stub in stubs) == 4, "all are sent")
        expected = [stub.active for stub in stubs]
        for router in routers:
            await _agrees(router, stubs, expected)
        release.set()
        assert {answer.status for answer in await asyncio.gather(*asked)} == {200}


async def _agrees(
    router: RouterProcess, stubs: Sequence[EngineStub], expected: Sequence[int]
) -> None:
    deadline = time.monotonic() + DEADLINE_S
    seen: list[int] = []
    states: list[list[int]] = []
    while seen != expected:
        known = [await router.replica(stub.name) for stub in stubs]
        seen = [
            each["load"]["prefilling_requests"] + each["others"]["prefilling_requests"]
            for each in known
        ]
        if seen not in states:  # at the deadline the clients have given up: what was before counts
            states.append(seen)
        assert time.monotonic() < deadline, f"not {expected} but {states} were known, in turn"


async def _without_the_server_each_goes_on(
    server: ValkeyServer,
    routers: Sequence[RouterProcess],
    balancer: Balancer,
    stubs: Sequence[EngineStub],
) -> None:
    """It is killed and comes back under load: what is under way goes on, and what comes is
    served."""
    release = asyncio.Event()
    for stub in stubs:
        stub.behaviour = after(release)
    async with under_way(8, balancer.port, stubs[0], 200_000, apart=1000) as before:
        await eventually(lambda: sum(stub.active for stub in stubs) == 8, "all are sent")
        server.kill()
        for router in routers:
            await router.until(
                lambda now: now.sum("kvroute_board_up", board="valkey") == 0, "it is away"
            )
        async with under_way(8, balancer.port, stubs[0], 220_000, apart=1000) as meanwhile:
            await eventually(lambda: sum(stub.active for stub in stubs) == 16, "all are sent")
            server.start()
            for router in routers:
                await router.until(
                    lambda now: now.sum("kvroute_board_writers", board="valkey") == 3,
                    "all hear again",
                )
                await _agrees(router, stubs, [stub.active for stub in stubs])
            release.set()
            answers = await asyncio.gather(*before, *meanwhile)
            assert [answer.status for answer in answers] == [200] * 16


async def _one_is_killed_under_load(
    routers: Sequence[RouterProcess], balancer: Balancer, stubs: Sequence[EngineStub]
) -> None:
    dying, *others = routers
    release = asyncio.Event()
    for stub in stubs:
        stub.behaviour = after(release)
    async with under_way(8, balancer.port, stubs[0], 300_000, apart=1000) as asked:
        await eventually(lambda: sum(stub.active for stub in stubs) == 8, "all are sent")
        dying.process.kill()
        await eventually(
            lambda: sum(stub.active for stub in stubs) == 6, "those of the dead one end"
        )
        await eventually(lambda: refuses(dying.port), "nothing of it listens any more")
        async with under_way(1, balancer.port, stubs[0], 400_000) as (later,):
            release.set()
            ended = await asyncio.gather(*asked, return_exceptions=True)
            assert (await later).status == 200
    served = [each for each in ended if isinstance(each, Answer)]
    assert [answer.status for answer in served] == [200] * 6, "the balancer deals them out in turn"
    for other in others:
        await other.until(
            lambda now: now.sum("kvroute_board_writers", board="valkey") == 2,
            "the dead is forgotten",
        )
    dying.process.wait()
