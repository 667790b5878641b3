"""A real Ray Serve whose calls a router places: which replica, what is booked, and what becomes of
the books when clients leave, engines fail, or the router does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.support.actual_hits import cached_tokens, until_told
from tests.support.engine_process import simulated
from tests.support.engine_stub import engines, unique
from tests.support.http_client import Answer, ask, connect
from tests.support.router_process import QUICK_HEALTH, RouterProcess, router_process
from tests.support.two_prompts import by_gateway, play, room_for_one, share_reused
from tests.support.vllm_publisher import free_port

ray = pytest.importorskip("ray", reason="ray[serve] is not installed; make test-ray")
support: Any = pytest.importorskip("tests.support.ray_serve")
request_router_of = support.request_router_of
RequestCancelledError: Any = pytest.importorskip("ray.serve.exceptions").RequestCancelledError

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def serving() -> Iterator[Any]:
    with support.ray_serve() as running:
        yield running


@pytest.fixture(scope="module")
def router() -> Iterator[RouterProcess]:
    with router_process({"health": QUICK_HEALTH}) as process:
        yield process


async def complete(served: Any, body: dict[str, Any]) -> Answer:
    return await ask(served.port, "POST", "/v1/completions", body, JSON)


async def until_unbooked(router: RouterProcess) -> None:
    await router.until(lambda now: not now.sum("kvroute_reservations"), "nothing is booked")
    await router.until_idle()


async def last_request(router: RouterProcess) -> dict[str, Any]:
    found: dict[str, Any] = (await router.get("/requests?limit=1")).json["requests"][0]
    return found


# --- where ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
async def test_two_prompts_in_turn_are_reused(
    router: RouterProcess, serving: Any, seed: int
) -> None:
    """As through the proxy: each prompt comes once for the first time, then all but its last block
    is reused, and exactly so predicted."""
    async with serving.engines(router, *room_for_one()) as served:
        replicas = await served.listed()
        assert len(replicas) == 2
        turns = await play(router, replicas, seed, by_gateway(served.port))
        assert [turn.predicted for turn in turns] == [turn.reused for turn in turns]
        assert share_reused(turns) > 0.8
        await until_unbooked(router)
    assert await served.listed() == []


@pytest.fixture
async def quick(router: RouterProcess, serving: Any) -> Any:
    """Two engines that take almost no time, and the name of their model."""
    model = unique("quick")
    async with serving.engines(router, *simulated("full", served_model_name=model)) as served:
        yield served, model


async def test_streams_and_chats_pass_and_are_compared(router: RouterProcess, quick: Any) -> None:
    """What an engine reports in the last event of a stream is compared with the prediction."""
    served, model = quick
    chat = {"model": model, "messages": [{"role": "user", "content": "Why is the sky blue?" * 40}]}
    for _ in range(2):
        options = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 8}
        answer = await ask(served.port, "POST", "/v1/chat/completions", {**chat, **options}, JSON)
        assert answer.status == 200, answer.body
        assert answer.headers["content-type"].startswith("text/event-stream")
        await until_unbooked(router)
    logged = await last_request(router)
    assert logged["end"] == "completed"
    assert logged["actual"] == cached_tokens(answer) > 0
    assert logged["predicted"]["cached_tokens"] == logged["actual"]


async def test_calls_for_one_request_of_a_client_are_placed_each(
    router: RouterProcess, quick: Any
) -> None:
    """Ray tells them apart by nothing: they have one id."""
    served, model = quick
    request_id = "one-for-all"
    handle = served.handle()
    ray.serve.context._serve_request_context.set(
        ray.serve.context._RequestContext(
            request_id=request_id, _internal_request_id=request_id, app_name=served.name
        )
    )

    async def call(number: int) -> int:
        body = {"model": model, "prompt": [number] * 64, "max_tokens": 2}
        pieces = [each async for each in handle.forward.remote("/v1/completions", body)]
        return int(pieces[0]["status"])

    assert await asyncio.gather(*map(call, range(20))) == [200] * 20
    assert request_router_of(handle).statistics().decisions == {"router": 20}
    await until_unbooked(router)


async def test_a_replica_that_is_not_rays_gets_nothing(router: RouterProcess, quick: Any) -> None:
    """The router may list more replicas of a model than a deployment has."""
    served, model = quick
    async with engines(1, model=model) as (stranger,), router.serving(stranger):
        for number in range(8):
            body = {"model": model, "prompt": [number] * 64, "max_tokens": 1}
            assert (await complete(served, body)).status == 200
        await until_unbooked(router)
        assert stranger.requests == []


async def test_a_full_replica_is_passed_over(router: RouterProcess, serving: Any) -> None:
    """Ray gives a replica no more calls than it may; what was booked there is given back."""
    model = unique("narrow")
    slow = simulated("full", served_model_name=model, decode_tokens_per_s=20)
    async with serving.engines(router, *slow, at_once=1) as served:
        body = {"model": model, "prompt": [1] * 640, "max_tokens": 10}
        first, second, third = await asyncio.gather(*(complete(served, body) for _ in range(3)))
        assert (first.status, second.status, third.status) == (200, 200, 200)
        await until_unbooked(router)


# --- the end --------------------------------------------------------------------------------------


async def test_a_client_that_leaves_gives_back_what_is_booked(
    router: RouterProcess, serving: Any
) -> None:
    """Before the first token and in the middle of a stream."""
    model = unique("slow")
    slow = simulated("full", served_model_name=model, decode_tokens_per_s=20)
    async with serving.engines(router, *slow) as served:
        body = {"model": model, "prompt": [1] * 64, "max_tokens": 1900, "stream": True}
        for reads in (False, True):
            async with connect(served.port) as client:
                await client.send("POST", "/v1/completions", body, JSON)
                if reads:
                    await client.read_head()
                    await client.read_piece()
                await router.until(lambda now: now.sum("kvroute_reservations") == 1, "booked")
                client.leave()
            await until_unbooked(router)
            assert (await last_request(router))["end"] == "client_left"


async def test_an_engine_that_dies_gives_back_what_is_booked(
    router: RouterProcess, serving: Any
) -> None:
    """Its response is cut off; Ray starts another, which has itself listed in its place."""
    model = unique("mortal")
    slow = simulated("full", served_model_name=model, decode_tokens_per_s=20)
    async with serving.engines(router, *slow, replicas=1) as served:
        (before,) = await served.listed()
        body = {"model": model, "prompt": [1] * 64, "max_tokens": 1900, "stream": True}
        async with connect(served.port) as client:
            await client.send("POST", "/v1/completions", body, JSON)
            await client.read_head()
            await client.read_piece()
            os.kill(listening_process(before.port), signal.SIGKILL)
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await client.read_body()
        await until_unbooked(router)
        assert (await last_request(router))["end"] == "replica_died"


async def test_a_replica_that_is_killed_gives_back_what_is_booked(
    router: RouterProcess, serving: Any
) -> None:
    """It can report nothing itself."""
    model = unique("killed")
    slow = simulated("full", served_model_name=model, decode_tokens_per_s=20)
    async with serving.engines(router, *slow, replicas=1) as served:
        body = {"model": model, "prompt": [1] * 64, "max_tokens": 1900, "stream": True}
        (actor,) = [
            each["name"]
            for each in ray.util.list_named_actors(all_namespaces=True)
            if f"{served.name}#Engine#" in each["name"]
        ]
        async with connect(served.port) as client:
            await client.send("POST", "/v1/completions", body, JSON)
            await client.read_head()
            await client.read_piece()
            ray.kill(ray.get_actor(actor, namespace="serve"))
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await client.read_body()
        await until_unbooked(router)
        assert (await last_request(router))["end"] == "replica_died"


async def test_many_calls_at_once_leave_nothing_booked(router: RouterProcess, quick: Any) -> None:
    """Some are cancelled: before a replica is chosen, before it has answered, within the stream."""
    served, model = quick
    handle = served.handle()
    random, room = Random(1), asyncio.Semaphore(48)
    whole = 0

    async def call(reads: int | None) -> None:
        nonlocal whole
        body = {"model": model, "prompt": [random.randrange(256)] * 320, "max_tokens": 40}
        async with room:
            pieces = handle.forward.remote("/v1/completions", {**body, "stream": True})
            await asyncio.sleep(0)
            seen = 0
            with contextlib.suppress(RequestCancelledError, asyncio.CancelledError):
                if reads != 0:
                    async for _ in pieces:
                        seen += 1
                        if seen == reads:
                            break
                    else:
                        whole += 1
            pieces.cancel()

    plans = [random.choice((None, None, 0, 1, 5)) for _ in range(400)]
    await asyncio.gather(*map(call, plans))
    assert whole == plans.count(None)
    await until_unbooked(router)
    assert request_router_of(handle).statistics().lost_reports == 0


# --- what is refused ------------------------------------------------------------------------------


async def test_bad_input_is_refused_and_nothing_is_booked(
    router: RouterProcess, quick: Any
) -> None:
    """By the router's own words, whatever a client sends."""
    served, model = quick
    before = (await router.get("/requests?limit=1")).json["requests"]
    for prompt in ([-1], [2**40], ["x", 1], [1] * 100_000):
        answer = await complete(served, {"model": model, "prompt": prompt})
        assert answer.status == 400, answer.body
        assert answer.json["error"]["code"] in ("invalid_value", "context_length_exceeded")
    for body in (b"[1]", b"{", b"", b'{"prompt": ' + b"[" * 5000):
        answer = await ask(served.port, "POST", "/v1/completions", body, JSON)
        assert answer.status == 400, answer.body
    assert (await router.metrics()).sum("kvroute_reservations") == 0
    assert (await router.get("/requests?limit=1")).json["requests"] == before


async def test_a_key_and_what_comes_with_it_hold_for_calls(serving: Any) -> None:
    """The engine salts as the router does, or predictions are wrong; a limit is the caller's to
    hear of."""
    key = {"name": "alice", "key": support.KEY, "cache_salt": "of-alice", "max_in_flight": 1}
    server = {"clients_see_hits": True, "client_api_keys": [key]}
    model = unique("locked")
    slow = simulated("full", served_model_name=model, decode_tokens_per_s=100)
    with router_process({"health": QUICK_HEALTH, "server": server}) as locked:
        async with serving.engines(locked, *slow, api_key_env=support.KEY_VARIABLE) as served:
            body = {"model": model, "prompt": [1] * 640, "max_tokens": 2}
            for cached in (0, 624):
                assert cached_tokens(await complete(served, body)) == cached
                await until_unbooked(locked)
                logged = await last_request(locked)
                assert logged["predicted"]["cached_tokens"] == logged["actual"] == cached
                (replica,) = (e for e in await served.listed() if e.name == logged["replica"])
                await until_told(locked, replica)
            async with connect(served.port) as client:
                long = {**body, "max_tokens": 1200, "stream": True}
                await client.send("POST", "/v1/completions", long, JSON)
                await client.read_head()
                refused = await complete(served, body)
                assert refused.status == 429
                assert refused.json["error"]["code"] == "rate_limit_exceeded"
                assert int(refused.headers["retry-after"]) > 0
                client.leave()
            await until_unbooked(locked)


async def test_a_client_cannot_choose_the_replica_or_name_the_booking(
    router: RouterProcess, quick: Any
) -> None:
    """These fields of a question are the router's, not part of a prompt."""
    served, model = quick
    own = {"replicas": ["none"], "avoid": [], "selection_id": "mine", "dp_rank": 7}
    answer = await complete(served, {"model": model, "prompt": [1, 2], "max_tokens": 1, **own})
    assert answer.status == 200, answer.body
    await until_unbooked(router)
    assert (await last_request(router))["end"] == "completed"


async def test_what_the_router_does_not_know_goes_where_ray_says(quick: Any) -> None:
    """The engine has the last word on what is no model of it, and on what has no prompt."""
    served, model = quick
    handle = served.handle()

    async def status(path: str, body: dict[str, Any]) -> int:
        pieces = [each async for each in handle.forward.remote(path, body)]
        return int(pieces[0]["status"])

    assert await status("/v1/completions", {"model": "nobody-has-it", "prompt": [1]}) == 404
    assert await status("/detokenize", {"model": model, "tokens": [1]}) == 200
    found = request_router_of(handle).statistics()
    assert found.decisions == {"model_not_found": 1, "no_prompt": 1}


# --- engines without a server ---------------------------------------------------------------------


@pytest.fixture
async def in_process(router: RouterProcess, serving: Any) -> Any:
    """A handle of engines that run in Ray's replicas, and the name of their model."""
    model = unique("inside")
    name = unique("ray")
    await asyncio.to_thread(serving.run_in_process, router.url, model, name)
    for each in await listed(router, f"{name}:InProcess:"):
        await until_healthy(router, each)
    handle = ray.serve.get_deployment_handle("InProcess", app_name=name)
    yield handle, model
    await support.let_go(handle)
    await asyncio.to_thread(ray.serve.delete, name)


async def listed(router: RouterProcess, prefix: str) -> list[str]:
    every = (await router.get("/replicas")).json["replicas"]
    return [each["id"] for each in every if each["id"].startswith(prefix)]


async def until_healthy(router: RouterProcess, name: str) -> None:
    while (await router.replica(name))["state"] != "healthy":
        await asyncio.sleep(0.02)


async def test_an_engine_without_a_server_is_listed_and_reports(
    router: RouterProcess, in_process: Any
) -> None:
    """As Ray's own engines are: what a call returns is one object, with its usage."""
    handle, model = in_process
    answer = await handle.complete.remote({"model": model, "prompt": [1] * 64})
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}
    await until_unbooked(router)
    logged = await last_request(router)
    assert (logged["end"], logged["actual"]) == ("completed", 16)
    assert request_router_of(handle).statistics().decisions == {"router": 1}


async def test_an_exception_of_a_replica_gives_back_what_is_booked(
    router: RouterProcess, in_process: Any
) -> None:
    """It reaches the caller as it is."""
    handle, model = in_process
    before = (await router.metrics()).sum("kvroute_reservation_ends_total", end="failed")
    with pytest.raises(ZeroDivisionError):
        await handle.complete.remote({"model": model, "prompt": [1] * 64, "fails": True})
    await until_unbooked(router)
    after = (await router.metrics()).sum("kvroute_reservation_ends_total", end="failed")
    assert after == before + 1
    assert request_router_of(handle).statistics().lost_reports == 0


# --- without a router -----------------------------------------------------------------------------


async def test_without_its_router_ray_chooses_until_it_is_back(serving: Any) -> None:
    """A router that is gone costs reuse, and no request; one that comes back is told of all
    replicas by themselves."""
    model = unique("alone")
    body = {"model": model, "prompt": [1] * 64, "max_tokens": 1}
    config = {"health": QUICK_HEALTH, "server": {"port": free_port()}}
    options = simulated("full", served_model_name=model)
    with router_process(config) as before:
        async with serving.engines(before, *options, pause_s=0.2) as served:
            handle = served.handle()

            async def call() -> int:
                pieces = [each async for each in handle.forward.remote("/v1/completions", body)]
                return int(pieces[0]["status"])

            def decisions() -> dict[str, int]:
                return dict(request_router_of(handle).statistics().decisions)

            assert await call() == 200
            assert decisions() == {"router": 1}
            before.stop()
            assert [await call() for _ in range(20)] == [200] * 20
            assert (await complete(served, body)).status == 200
            assert decisions()["no_answer"] >= 1
            assert decisions()["no_answer"] + decisions()["paused"] == 20
            with router_process(config) as again:
                served.router = again
                while len(await served.listed()) < 2:
                    assert await call() == 200
                await served.until_listed()
                while decisions()["router"] == 1:
                    assert await call() == 200
                await until_unbooked(again)


async def test_a_deployment_with_wrong_options_is_routed_by_ray(
    router: RouterProcess, serving: Any
) -> None:
    """Its calls would wait for ever if the request router could not be made."""
    name = unique("ray")
    wrong = {"url": "router:8000"}
    await asyncio.to_thread(serving.run_in_process, router.url, unique("wrong"), name, wrong)
    handle = ray.serve.get_deployment_handle("InProcess", app_name=name)
    answer = await handle.complete.remote({"model": "any", "prompt": [1] * 64})
    assert answer["usage"]["prompt_tokens"] == 64
    assert request_router_of(handle).statistics().decisions == {"misconfigured": 1}
    await support.let_go(handle)
    await asyncio.to_thread(ray.serve.delete, name)


def listening_process(port: int) -> int:
    """The process that listens at a port of this machine."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    sockets = {
        f"socket:[{fields[9]}]"
        for fields in lines
        if fields[1].endswith(f":{port:04X}") and fields[3] == "0A"
    }
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(os.readlink(held) in sockets for held in (process / "fd").iterdir()):
                return int(process.name)
    raise AssertionError(f"nothing listens at {port}")
