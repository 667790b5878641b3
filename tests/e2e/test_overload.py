"""A router whose replicas have no room for more: who waits, who goes first, and what those are told
who get no turn."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import pytest

from tests.support.engine_stub import (
    EngineStub,
    Exchange,
    after,
    answer,
    engines,
    hang_up,
    refusing,
)
from tests.support.http_client import Answer, connect
from tests.support.router_process import QUICK_HEALTH, RouterProcess, router_process
from tests.support.waiting import eventually

FREE = {"authorization": "Bearer free-key"}
TIGHT = {"authorization": "Bearer tight-key"}
CONFIG = {
    "health": QUICK_HEALTH,
    "server": {
        "client_api_keys": [
            {"name": "free", "key": "free-key"},
            {
                "name": "tight",
                "key": "tight-key",
                "requests_per_minute": 2,
                "max_in_flight": 1,
                "models": ["test-*"],
            },
        ]
    },
    "overload": {
        "max_in_flight": 1,
        "max_waiting": 3,
        "priority_header": "x-priority",
        "tenant_header": "x-tenant",
        "breaker_failures": 2,
        "breaker_open_s": 0.2,
        "max_back_off_s": 0.3,
    },
}


@pytest.fixture(scope="module")
def router() -> Iterator[RouterProcess]:
    with router_process(CONFIG) as process:
        yield process


class Crowd:
    """Requests that are sent one after another, each once the one before it waits."""

    def __init__(self, router: RouterProcess, stub: EngineStub) -> None:
        self._router = router
        self._stub = stub
        self.tasks: list[asyncio.Task[Answer]] = []

    async def send(self, tokens: int, headers: Mapping[str, str] | None = None) -> None:
        """Send a prompt of so many tokens; its answer is awaited later."""
        body = {"model": self._stub.model, "prompt": [7] * tokens}
        before = await self.seen()
        headers = {**FREE, **(headers or {})}
        task = asyncio.create_task(self._router.post("/v1/completions", body, headers))
        self.tasks.append(task)
        while not task.done() and await self.seen() == before:
            pass

    async def seen(self) -> float:
        """Requests that wait, got no turn, or have reached the replica."""
        now = await self._router.metrics()
        names = "kvroute_queue_requests", "kvroute_queue_refusals_total"
        lined_up = sum(now.sum(name, model=self._stub.model) for name in names)
        return lined_up + len(self._stub.requests)

    async def waiting(self) -> float:
        return (await self._router.metrics()).sum("kvroute_queue_requests", model=self._stub.model)

    async def answers(self) -> list[Answer]:
        return await asyncio.gather(*self.tasks)

    def served_lengths(self) -> list[int]:
        """Prompt lengths in the order in which the replica got them."""
        return [len(request.json["prompt"]) for request in self._stub.requests]


@contextlib.asynccontextmanager
async def full(router: RouterProcess) -> AsyncIterator[tuple[Crowd, EngineStub, asyncio.Event]]:
    """A replica that has its one request until the event is set."""
    go = asyncio.Event()
    async with engines(1) as (stub,), router.serving(stub):
        stub.behaviour = after(go)
        crowd = Crowd(router, stub)
        await crowd.send(1)
        yield crowd, stub, go


async def test_what_waits_goes_by_priority_and_length_and_each_gets_its_response(
    router: RouterProcess,
) -> None:
    """No request beyond the limit reaches the replica, and none is lost."""
    async with full(router) as (crowd, stub, go):
        await crowd.send(9000)
        await crowd.send(20)
        await crowd.send(800, {"x-priority": "high"})
        assert (stub.active, await crowd.waiting()) == (1, 3)
        go.set()
        assert [each.status for each in await crowd.answers()] == [200] * 4
        assert crowd.served_lengths() == [1, 800, 20, 9000]
        assert stub.peak == 1
        found = await router.metrics()
        assert found.sum("kvroute_queue_wait_seconds_count", model=stub.model) == 4
        assert found.sum("kvroute_time_to_first_byte_seconds_count", model=stub.model) == 4


async def test_a_full_line_refuses_whoever_has_most_in_it_and_says_when_to_come_back(
    router: RouterProcess,
) -> None:
    """A client that floods the router takes its own places, not those of others."""
    async with full(router) as (crowd, _, go):
        for _ in range(3):
            await crowd.send(50, {"x-tenant": "loud"})
        refused = await router.post(
            "/v1/messages",
            {
                "model": crowd._stub.model,
                "max_tokens": 9,
                "messages": [{"role": "user", "content": "x" * 2000}],
            },
            {**FREE, "x-tenant": "loud"},
        )
        assert refused.status == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json["error"]["type"] == "rate_limit_error"
        await crowd.send(60, {"x-tenant": "quiet"})
        displaced = next(task.result() for task in crowd.tasks if task.done())
        assert (displaced.status, displaced.error["code"]) == (429, "queue_full")
        assert f"try again in {displaced.headers['retry-after']} s" in displaced.error["message"]
        go.set()
        assert sorted(each.status for each in await crowd.answers()) == [200] * 4 + [429]


async def test_who_left_and_whose_deadline_passed_never_reach_a_replica(
    router: RouterProcess,
) -> None:
    """A replica's time is for responses that someone reads."""
    async with full(router) as (crowd, stub, go):
        async with connect(router.port) as client:
            body = {"model": stub.model, "prompt": [7] * 30}
            await client.send("POST", "/v1/completions", body, FREE)
            await router.until(
                lambda now: now.sum("kvroute_queue_requests", model=stub.model) == 1, "it waits"
            )
        await router.until(
            lambda now: now.sum(
                "kvroute_queue_refusals_total", model=stub.model, reason="client_left"
            ),
            "it has left",
        )
        late = await router.post(
            "/v1/completions",
            {"model": stub.model, "prompt": [7] * 40},
            {**FREE, "x-request-timeout": "0.05"},
        )
        assert (late.status, late.error["code"]) == (503, "queue_timeout")
        assert int(late.headers["retry-after"]) >= 1
        go.set()
        assert [each.status for each in await crowd.answers()] == [200]
        assert crowd.served_lengths() == [1]


async def test_a_request_whose_replica_fails_need_not_wait_again(router: RouterProcess) -> None:
    """It had its turn; under overload it would else be the one that is refused."""
    go = asyncio.Event()
    async with engines(2) as (first, second), router.serving(first, second):
        first.behaviour = second.behaviour = after(go)
        body: dict[str, Any] = {"model": first.model, "prompt": [1, 2, 3]}
        held = [asyncio.create_task(router.post("/v1/completions", body, FREE)) for _ in range(2)]
        await eventually(lambda: first.active == second.active == 1, "both are full")
        await first.stop()
        await eventually(lambda: second.peak == 2, "the request of the dead one is here")
        go.set()
        assert [each.status for each in await asyncio.gather(*held)] == [200, 200]


@pytest.mark.parametrize(
    ("headers", "place"),
    [({"x-priority": "urgent"}, "x-priority"), ({"x-request-timeout": "-1"}, "x-request-timeout")],
)
async def test_a_header_that_says_nonsense_is_an_error(
    router: RouterProcess, headers: dict[str, str], place: str
) -> None:
    """A gateway that misspells a class must learn of it."""
    async with engines(1) as (stub,), router.serving(stub):
        body = {"model": stub.model, "prompt": [1]}
        refused = await router.post("/v1/completions", body, {**FREE, **headers})
        assert (refused.status, refused.error["code"]) == (400, "invalid_value")
        assert refused.error["message"].startswith(place)


async def test_a_key_is_held_to_its_limits_and_told_what_is_left(router: RouterProcess) -> None:
    """One team's runaway job must not use up what all share, and its clients back off by these
    headers."""
    async with full(router) as (_, stub, go):
        body = {"model": stub.model, "prompt": [1]}
        refused = await router.post("/v1/completions", body, TIGHT)
        assert (refused.status, refused.error["code"]) == (403, "model_not_allowed")
        listed = (await router.get("/v1/models", TIGHT)).json["data"]
        assert [entry["id"] for entry in listed] == []
        assert (await router.get(f"/v1/models/{stub.model}", TIGHT)).status == 404
        assert (await router.get(f"/v1/models/{stub.model}", FREE)).status == 200
        go.set()
    async with engines(1, model="test-model") as (stub,), router.serving(stub):
        go = asyncio.Event()
        stub.behaviour = after(go)
        body = {"model": stub.model, "prompt": [1]}
        served = asyncio.create_task(router.post("/v1/completions", body, TIGHT))
        await eventually(lambda: stub.active == 1, "it is under way")
        second = await router.post("/v1/completions", body, TIGHT)
        assert (second.status, second.error["code"]) == (429, "rate_limit_exceeded")
        assert "1 requests at a time" in second.error["message"]
        go.set()
        answer = await served
        assert answer.status == 200
        assert answer.headers["x-ratelimit-limit-requests"] == "2"
        assert answer.headers["x-ratelimit-remaining-requests"] == "0"
        third = await router.post("/v1/completions", body, TIGHT)
        assert third.status == 429
        assert 1 <= int(third.headers["retry-after"]) <= 61
        now = await router.metrics()
        assert now.sum("kvroute_key_refusals_total", key="tight") == 3
        assert now.sum("kvroute_key_tokens_total", key="tight") == 2
        assert now.sum("kvroute_key_in_flight") == 0


async def test_a_replica_that_asks_for_it_is_left_alone_and_nobody_else_notices(
    router: RouterProcess,
) -> None:
    """What it would have refused goes to another one, or waits until its time is over."""
    async with engines(2) as (full, other), router.serving(full, other):
        refusal = b"HTTP/1.1 503 X\r\nretry-after: 60\r\ncontent-length: 0\r\n\r\n"

        async def refuse(exchange: Exchange) -> None:
            await exchange.send(refusal)

        full.behaviour = refuse
        body = {"model": full.model, "prompt": [1]}
        answers = [await router.post("/v1/completions", body, FREE) for _ in range(6)]
        assert [each.status for each in answers] == [200] * 6
        view = await router.replica(full.name)
        assert (view["health"], view["failed_requests"]) == ("healthy", 0)
        assert view["times_told_off"] == len(full.requests) >= 1
        full.behaviour = answer
        await router.until(
            lambda now: now.sum("kvroute_replica_backing_off", replica=full.name) == 0,
            "its time is over",
        )


@contextlib.asynccontextmanager
async def rate_limiting(
    count: int, tenants: dict[str, Any]
) -> AsyncIterator[tuple[RouterProcess, list[EngineStub]]]:
    """Replicas that let nobody named "noisy" in, as the `user` of a body says."""

    async def limit(exchange: Exchange) -> None:
        if exchange.request.json["user"] == "noisy":
            await exchange.send(b"HTTP/1.1 429 X\r\nretry-after: 60\r\ncontent-length: 0\r\n\r\n")
        else:
            await answer(exchange)

    with router_process({"health": QUICK_HEALTH, **tenants}) as started:
        async with engines(count) as stubs, started.serving(*stubs):
            for stub in stubs:
                stub.behaviour = limit
            yield started, stubs


KEYS = {
    "server": {
        "client_api_keys": [
            {"name": "noisy", "key": "noisy-key"},
            {"name": "quiet", "key": "quiet-key"},
        ],
        "clients_see_hits": True,
    }
}
BY_HEADER = {"overload": {"max_in_flight": 8, "tenant_header": "x-tenant"}}


@pytest.mark.parametrize("tenants", [KEYS, BY_HEADER], ids=["keys", "a header"])
async def test_a_client_that_is_told_off_by_a_replica_does_not_take_it_from_the_others(
    tenants: dict[str, Any],
) -> None:
    """One tenant over its limit there took the replica out for everybody."""
    async with rate_limiting(2, tenants) as (router, stubs):

        async def ask(name: str, path: str = "/v1/completions") -> Answer:
            body = {"model": stubs[0].model, "prompt": [1], "user": name}
            headers = {"authorization": f"Bearer {name}-key", "x-tenant": name}
            return await router.post(path, body, headers)

        refused = [await ask("noisy") for _ in range(4)]
        assert [each.status for each in refused] == [429] * 4
        assert refused[-1].error["code"] == "rate_limit_exceeded"
        assert 1 <= int(refused[-1].headers["retry-after"]) <= 10
        assert [len(stub.requests) for stub in stubs] == [1, 1], "it is left alone"
        for path in "/route", "/route?explain=true", "/select":
            told = [(await ask(name, path)).status for name in ("noisy", "quiet")]
            assert told == [429, 200], path
        served = [await ask("quiet") for _ in range(10)]
        assert [each.status for each in served] == [200] * 10
        assert {each.headers["x-kv-replica"] for each in served} == {one.name for one in stubs}
        for stub in stubs:
            view = await router.replica(stub.name)
            assert (view["times_told_off"], view["backs_off_s"]) == (1, 0)


async def test_without_keys_a_429_is_about_the_engine() -> None:
    """Nothing tells clients apart, so the next request would only be refused as well."""
    async with rate_limiting(1, {}) as (router, (stub,)):
        body = {"model": stub.model, "prompt": [1], "user": "noisy"}
        assert (await router.post("/v1/completions", body)).status == 429
        other = await router.post("/v1/completions", {**body, "user": "quiet"})
        assert (other.status, other.error["code"]) == (503, "no_replica")
        assert (await router.replica(stub.name))["backs_off_s"] > 0


async def test_a_replica_that_fails_requests_gets_one_to_try_after_a_while(
    router: RouterProcess,
) -> None:
    """Its checks pass, so health alone would send it requests again and again."""
    async with engines(2) as (broken, other), router.serving(broken, other):
        broken.behaviour = hang_up
        body = {"model": broken.model, "prompt": [1]}
        while not (await router.replica(broken.name))["times_opened"]:
            assert (await router.post("/v1/completions", body, FREE)).status == 200
        broken.behaviour = answer
        tried = len(broken.requests)
        while (await router.replica(broken.name))["breaker"] != "closed":
            assert (await router.post("/v1/completions", body, FREE)).status == 200
        assert len(broken.requests) > tried


async def test_who_leaves_a_second_queue_is_seen_to_have_left() -> None:
    """The data plane had sent it to a replica that failed; its client leaves while it waits for
    room at another one. The live page showed it as running for good."""
    fails, go = asyncio.Event(), asyncio.Event()
    health = {**QUICK_HEALTH, "unhealthy_after": 1}
    config = {"health": health, "overload": {"max_in_flight": 1}}
    with router_process(config) as router:
        async with engines(2) as stubs, router.serving(*stubs):
            bodies = [{"model": stubs[0].model, "prompt": [each]} for each in range(3)]
            await router.until_core_decides(bodies[2])
            for stub in stubs:
                stub.behaviour = after(go)
            kept = asyncio.create_task(router.post("/v1/completions", bodies[0]))
            await eventually(lambda: sum(stub.active for stub in stubs) == 1, "one is there")
            (dying,) = [stub for stub in stubs if not stub.active]
            dying.behaviour = after(fails, refusing("503 Service Unavailable"))
            async with connect(router.port) as client:
                await client.send("POST", "/v1/completions", bodies[1])
                await eventually(lambda: dying.active == 1, "one is at the other")
                running: list[Any] = []
                while len(running) < 2:
                    log = (await router.get("/requests")).json["requests"]
                    running = [each["number"] for each in log if each["end"] is None]
                dying.silent_paths = ("/health",)
                fails.set()
                await router.until(lambda now: now.sum("kvroute_queue_requests") == 1, "it waits")
            await router.until(lambda now: not now.sum("kvroute_queue_requests"), "it has left")
            log = (await router.get("/requests")).json["requests"]
            ends = {each["number"]: each["end"] for each in log if each["number"] in running}
            assert sorted(ends.values(), key=str) == [None, "client_left"]
            go.set()
            assert (await kept).status == 200
