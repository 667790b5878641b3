"""Engines that connect to the router: one address, topics `kv@pod@model`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import zmq

from kvevents.codec import encode
from kvevents.events import EventBatch
from tests.support.blocks import FULL, Prefix
from tests.support.connecting_publisher import Pod
from tests.support.engine_stub import EngineStub, engines, prompt_ids
from tests.support.router_process import QUICK_HEALTH, RouterProcess, router_process
from tests.support.vllm_publisher import free_port
from tests.support.waiting import DEADLINE_S

LISTENED = [{"endpoint": "listen"}]


@pytest.fixture(scope="module")
def address() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def router(address: str) -> Iterator[RouterProcess]:
    config = {"health": QUICK_HEALTH, "events": {"listen": address, "listen_ranks": 2}}
    with router_process(config) as process:
        yield process


@pytest.fixture
def connect() -> Iterator[Callable[[str, str], Pod]]:
    """Makes publishers that connect to an address, and closes them at the end."""
    made: list[Pod] = []
    context: zmq.Context[Any] = zmq.Context()

    def connected(endpoint: str, topic: str) -> Pod:
        made.append(Pod(context, endpoint, topic))
        return made[-1]

    yield connected
    for pod in made:
        pod.socket.close(linger=0)
    context.term()


async def eventually(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not await condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.02)


def stored(ids: list[int]) -> bytes:
    return encode(EventBatch(0.0, [Prefix(ids).stored(0, FULL)], 0))


async def add(router: RouterProcess, stub: EngineStub, sources: list[dict[str, Any]]) -> None:
    body = {"url": stub.url, "id": stub.name, "models": [stub.model], "kv_events": sources}
    assert (await router.post("/replicas", body)).status == 201


async def state_of(router: RouterProcess, stub: EngineStub, rank: int = 0) -> str:
    found = (await router.replica(stub.name))["sources"]
    feed = next((each["feed"] for each in found if each["dp_rank"] == rank), None)
    return str(feed and feed["state"])


async def until_state(router: RouterProcess, stub: EngineStub, state: str, rank: int = 0) -> None:
    async def is_in_it() -> bool:
        return await state_of(router, stub, rank) == state

    await eventually(is_in_it, f"rank {rank} of {stub.name} is {state}")


async def hit_of(router: RouterProcess, stub: EngineStub, ids: list[int]) -> int:
    found = await router.post("/route", {"model": stub.model, "token_ids": [*ids, 7]})
    return int(found.json["hit"]["cached_tokens"])


async def test_their_caches_are_known_by_their_topics(
    router: RouterProcess, address: str, connect: Callable[[str, str], Pod]
) -> None:
    """By id and by address; each rank at a port of its own."""
    async with engines(2) as stubs:
        one, other = stubs
        await add(router, one, LISTENED)
        await add(router, other, [*LISTENED, {"endpoint": "listen", "dp_rank": 1}])
        ids = prompt_ids(64, 1)
        second = f"tcp://127.0.0.1:{int(address.rpartition(':')[2]) + 1}"
        host_and_port = other.url.removeprefix("http://")
        pods = [
            connect(address, f"kv@{one.name}@{one.model}"),
            connect(address, f"kv@{host_and_port}@{other.model}"),
            connect(second, f"kv@{host_and_port}@{other.model}"),
        ]
        for pod in pods:
            await pod.subscribed()
        assert await state_of(router, one) == "connecting"
        pods[0].publish(stored(ids))
        await until_state(router, one, "live")
        assert await hit_of(router, one, ids) == 64
        pods[2].publish(stored(ids[:32]))
        await until_state(router, other, "live", rank=1)
        assert await state_of(router, other) == "connecting"
        pods[1].publish(stored(ids), skip=3)
        await until_state(router, other, "suspect")
        pods[0].socket.close()
        await until_state(router, one, "connecting")


async def test_topics_of_nobody_are_shown(
    router: RouterProcess, address: str, connect: Callable[[str, str], Pod]
) -> None:
    """On the router's own overview, in the metrics and once in the log."""
    pod = await connect(address, "kv@10.9.9.9@some-model").subscribed()

    async def is_shown() -> bool:
        pod.publish()
        first = (await router.get("/overview")).json["listeners"][0]
        return any(
            each["topic"] == "kv@10.9.9.9@some-model"
            and each["reason"] == "no replica of this name listens for it"
            for each in first["unknown"]
        )

    await eventually(is_shown, "the topic")
    metrics = await router.metrics()
    assert metrics.sum("kvroute_listen_messages_total", outcome="unknown") >= 1
    assert router.log().count("no replica takes topic kv@10.9.9.9@some-model") == 1


async def test_a_source_where_nothing_listens_is_named() -> None:
    """In the configuration at the start, and in the log for a replica that is added later."""
    async with engines(1) as (stub,):
        with router_process({"health": QUICK_HEALTH}) as router:
            await add(router, stub, LISTENED)

            async def is_named() -> bool:
                return "nothing listens for it; configure events.listen" in router.log()

            await eventually(is_named, "the reason")
