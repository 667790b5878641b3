"""A replica fails: what becomes of its requests, and of what is thought of it, is the same whether
the data plane or Python had sent them there."""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.support.engine_stub import (
    EngineStub,
    Exchange,
    after,
    answer,
    begun_until,
    engines,
    hang_up,
    prompt_ids,
    refusing,
)
from tests.support.http_client import Answer
from tests.support.router_process import QUICK_HEALTH, RouterProcess, router_process
from tests.support.waiting import eventually

pytestmark = pytest.mark.parametrize(
    "headers", [{}, {"x-vllm-priority": "0"}], ids=["core", "python"]
)
Headers = Mapping[str, str]

NEVER_UNHEALTHY = {**QUICK_HEALTH, "unhealthy_after": 1000}
NO_BURST = {"retries": {"budget_burst": 0, "budget_share": 0.25}}
"""Four requests make room for one retry at a replica that is not at ease."""


def body_for(stub: EngineStub, number: int, **fields: Any) -> dict[str, Any]:
    return {"model": stub.model, "prompt": prompt_ids(8, number), **fields}


@asynccontextmanager
async def scene(
    count: int, has_events: bool = False, **config: Any
) -> AsyncIterator[tuple[RouterProcess, list[EngineStub]]]:
    """A router that the core decides for, and its replicas."""
    async with engines(count, has_events=has_events) as stubs:
        with router_process({"health": QUICK_HEALTH, **config}) as router:
            async with router.serving(*stubs):
                await router.until_core_decides(body_for(stubs[0], 999))
                yield router, stubs


async def until_busy(router: RouterProcess, stub: EngineStub) -> None:
    """Let something wait in the queue of *stub*, and wait until the router knows."""
    stub.waiting_requests = 3
    await router.until(
        lambda now: now.sum("kvroute_engine_waiting_requests", replica=stub.name) > 0,
        "its queue is known",
    )


async def posted(router: RouterProcess, body: object, headers: Headers) -> Answer:
    return await router.post("/v1/completions", body, headers)


async def test_all_that_wait_at_a_replica_that_dies_go_elsewhere(headers: Headers) -> None:
    """They all must move, so they take nothing from the budget of retries: at a fleet under load
    most of them were refused."""
    health = {**QUICK_HEALTH, "unhealthy_after": 1}
    go = asyncio.Event()
    async with scene(2, health=health, server=NO_BURST) as (router, (dying, other)):
        await until_busy(router, other)
        dying.behaviour = after(go, hang_up)
        requests = [
            asyncio.create_task(posted(router, body_for(dying, number), headers))
            for number in range(12)
        ]
        await eventually(lambda: dying.active == 12, "they wait there")
        go.set()
        found = await asyncio.gather(*requests)
    assert collections.Counter(each.status for each in found) == {200: 12}


async def test_it_is_logged_when_it_came(headers: Headers) -> None:
    """Its time is the client's, and not only that at the replica that served it."""
    go = asyncio.Event()
    async with scene(2) as (router, (dying, other)):
        await until_busy(router, other)
        dying.behaviour = after(go, hang_up)
        began = time.time()
        request = asyncio.create_task(posted(router, body_for(dying, 1), headers))
        await eventually(lambda: dying.active == 1, "it is there")
        seen_at = time.time()
        await eventually(lambda: time.time() > seen_at + 0.3, "it has waited there")
        go.set()
        found = await request
        assert (found.status, found.headers["x-kv-replica"]) == (200, other.name)
        (entry,) = (await router.get("/requests?limit=1")).json["requests"]
        assert entry["attempts"] >= 2  # a kept connection that was cut is tried anew there
        ended_at = entry["arrived_at"] + entry["total_ms"] / 1000
        assert began - 0.01 < entry["arrived_at"] < seen_at + 0.01
        assert seen_at + 0.29 < ended_at < time.time() + 0.01


async def test_who_follows_the_log_sees_it_end(headers: Headers) -> None:
    """Under its number: else the live page shows all that waited at a replica that died as running,
    beside what became of them."""
    go = asyncio.Event()
    async with scene(2) as (router, (dying, other)):
        await until_busy(router, other)
        dying.behaviour = after(go, hang_up)
        seen: dict[int, Any] = {}
        change = 0

        async def follow() -> list[Any]:
            nonlocal change
            log = (await router.get(f"/requests?after={change}")).json
            change = log["change"]
            seen.update((each["number"], each) for each in log["requests"])
            return [each for each in seen.values() if each["end"] is None]

        request = asyncio.create_task(posted(router, body_for(dying, 1), headers))
        while not await follow():
            await asyncio.sleep(0.01)
        go.set()
        found = await request
        assert (found.status, found.headers["x-kv-replica"]) == (200, other.name)
        while not (ended := [*seen.values()]) or ended[-1]["end"] is None:
            await follow()
        assert await follow() == []
        assert seen[max(seen)]["request_id"] == found.headers["x-request-id"]
        sent = [stub.requests[-1] for stub in (dying, other)]
        assert [each.names.count("x-request-id") for each in sent] == [1, 1]
        ids = [each.headers["x-request-id"] for each in sent]
        assert ids == 2 * [found.headers["x-request-id"]], "the logs of both replicas have it"


async def test_what_is_served_makes_room_for_retries(headers: Headers) -> None:
    """The budget is a share of all requests: as it only counted those that failed, a fleet that
    loses one in a hundred had no retries left after an hour."""
    async with scene(2, health=NEVER_UNHEALTHY, server=NO_BURST) as (router, (weak, other)):
        await until_busy(router, other)
        for number in range(3):
            for each in range(4):
                body = body_for(weak, 10 * number + each)
                assert (await posted(router, body, headers)).status == 200
            weak.behaviour = refusing("503 Service Unavailable")
            found = await posted(router, body_for(weak, 500 + number), headers)
            assert (found.status, found.headers["x-kv-replica"]) == (200, other.name)
            weak.behaviour = answer


async def test_streams_lost_to_health_checks_are_not_held_against_a_replica(
    headers: Headers,
) -> None:
    """The checks have their say already: its breaker opened besides, and a replica that was well
    again got nothing."""
    config = {
        "health": {**QUICK_HEALTH, "timeout_s": 0.25},
        "overload": {"breaker_failures": 1, "breaker_open_s": 3600, "breaker_max_open_s": 3600},
    }
    never = asyncio.Event()
    async with scene(1, **config) as (router, (stub,)):
        stub.behaviour = begun_until(never)
        streams = [
            asyncio.create_task(posted(router, body_for(stub, n, stream=True), headers))
            for n in range(4)
        ]
        await eventually(lambda: stub.active == 4, "they are under way")
        stub.silent_paths = ("/health",)
        await asyncio.gather(*streams)
        stub.silent_paths, stub.behaviour = (), answer
        await router.until_in_rotation(stub)
        assert (await router.replica(stub.name))["breaker"] == "closed"
        assert (await posted(router, body_for(stub, 7), headers)).status == 200


async def test_one_request_at_a_time_probes_a_replica_that_failed(headers: Headers) -> None:
    """If it still hangs, what is sent there waits for its time limit."""
    config = {
        "health": NEVER_UNHEALTHY,
        "overload": {"breaker_failures": 2, "breaker_open_s": 2, "breaker_max_open_s": 3600},
    }
    go = asyncio.Event()
    async with scene(2, **config) as (router, (failing, other)):
        failing.behaviour = refusing("503 Service Unavailable")
        number = 0
        while (await router.replica(failing.name))["breaker"] == "closed":
            await posted(router, body_for(failing, number), headers)
            number += 1
        failing.behaviour, other.behaviour, failing.peak = after(go), after(go), 0
        while (await router.replica(failing.name))["breaker"] != "half_open":
            await asyncio.sleep(0.01)
        requests = [
            asyncio.create_task(posted(router, body_for(failing, 1000 + each), headers))
            for each in range(20)
        ]
        await eventually(lambda: failing.active + other.active == 20, "all were sent")
        assert failing.peak == 1
        go.set()
        assert [each.status for each in await asyncio.gather(*requests)] == [200] * 20


async def test_a_request_under_way_goes_elsewhere_also_once_the_router_stops(
    headers: Headers,
) -> None:
    """Routers and engines are renewed together: it was refused as if it had come too late."""
    fails = asyncio.Event()
    async with scene(2) as (router, stubs):
        for stub in stubs:
            stub.behaviour = after(fails, hang_up)
        request = asyncio.create_task(posted(router, body_for(stubs[0], 1), headers))
        await eventually(lambda: sum(stub.active for stub in stubs) == 1, "it is there")
        (other,) = [stub for stub in stubs if not stub.active]
        other.behaviour = answer
        router.tell_to_stop()
        await eventually(lambda: "shutting down" in router.log(), "it stops")
        fails.set()
        found = await request
        assert (found.status, found.headers["x-kv-replica"]) == (200, other.name)
        assert await router.ended() == 0


@pytest.mark.parametrize(("status", "passes"), [(429, True), (503, False)])
async def test_where_no_back_off_is_wanted_busy_answers_are_none(
    headers: Headers, status: int, passes: bool
) -> None:
    """`overload.max_back_off_s: 0`: a 429 is the client's, and a 503 counts as a failure."""
    config = {"health": NEVER_UNHEALTHY, "overload": {"max_back_off_s": 0}}
    reason = {429: "Too Many Requests", 503: "Service Unavailable"}[status]

    async def busy(exchange: Exchange) -> None:
        await exchange.send(
            f"HTTP/1.1 {status} {reason}\r\nretry-after: 1\r\n".encode()
            + b"content-length: 2\r\n\r\n{}"
        )

    async with scene(2, **config) as (router, (full, _)):
        full.behaviour = busy
        full.requests.clear()
        number = 0
        while len(full.requests) < 2:
            found = await posted(router, body_for(full, number), headers)
            is_passed = found.headers["x-kv-replica"] == full.name
            assert found.status == (status if is_passed else 200)
            assert passes or not is_passed
            number += 1
        failed = (await router.replica(full.name))["failed_requests"]
        assert failed == (0 if passes else 2)


async def test_a_kept_connection_that_was_closed_is_no_reason_to_leave_a_cache(
    headers: Headers,
) -> None:
    """Whatever closes idle connections, a gateway or NAT, would send a request away from its
    prefix, and end it with 502 where a second one is closed."""
    used: set[asyncio.Transport] = set()

    async def once_a_connection(exchange: Exchange) -> None:
        if exchange.transport in used:
            exchange.reset()
        else:
            used.add(exchange.transport)
            await answer(exchange)

    async with scene(3, has_events=True) as (router, stubs):
        home, ids = stubs[0], prompt_ids(640, 1)
        home.store(ids)
        await router.until_applied(home)
        for stub in stubs:
            stub.behaviour = once_a_connection
        for last in range(6):
            body = {"model": home.model, "prompt": [*ids, last]}
            found = await posted(router, body, headers)
            assert (found.status, found.headers["x-kv-replica"]) == (200, home.name)
        now = await router.metrics()
        assert now.sum("kvroute_retries_total", reason="kept_closed") > 0


async def test_a_request_that_kills_replicas_reaches_two_of_them(headers: Headers) -> None:
    """Also where the second one got it since the first was late."""
    both = asyncio.Event()
    hit: list[str] = []

    async def kill(exchange: Exchange) -> None:
        hit.append(exchange.stub.name)
        if len(hit) == 1 and not headers:
            await exchange.wait(both)
        both.set()
        exchange.reset()

    async with scene(5, health=NEVER_UNHEALTHY) as (router, stubs):
        for number in range(400):  # until it knows when a first byte is late
            body = body_for(stubs[0], number, stream=True)
            assert (await posted(router, body, headers)).status == 200
        for stub in stubs:
            stub.behaviour = kill
        found = await posted(router, body_for(stubs[0], 1000, stream=True), headers)
        assert found.status == 502
        assert len(set(hit)) == 2, hit


async def test_what_is_sent_again_to_the_same_replica_counts_there_as_before(
    headers: Headers,
) -> None:
    """Its own first attempt was taken for another request that computes its prompt: the replica
    seemed to have nothing to do, and the whole prompt was expected to be cached."""
    go = asyncio.Event()
    async with scene(1, has_events=True) as (router, (stub,)):

        async def closes_the_first(exchange: Exchange) -> None:
            stub.behaviour = after(go)
            await hang_up(exchange)

        stub.behaviour = closes_the_first
        body = {**body_for(stub, 1), "prompt": prompt_ids(640, 1)}
        request = asyncio.create_task(posted(router, body, headers))
        await eventually(lambda: stub.active == 1 and len(stub.requests) > 1, "it waits there")
        await router.until(
            lambda now: now.sum("kvroute_in_flight_prefill_tokens") == 640, "all is to be computed"
        )
        (entry,) = (await router.get("/requests?limit=1")).json["requests"]
        assert (entry["attempts"], entry["expected"]) == (2, 0)
        go.set()
        assert (await request).status == 200
