"""TensorRT-LLM behind the router: its events are asked for, and its cache is known."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.e2e.test_listening import eventually, hit_of, until_state
from tests.support.engine_stub import EngineStub, engines, prompt_ids
from tests.support.router_process import QUICK_HEALTH, RouterProcess, router_process
from tests.support.trtllm_engine import PATH, TrtllmCache, TrtllmEvents


@pytest.fixture(scope="module")
def router() -> Iterator[RouterProcess]:
    with router_process({"health": QUICK_HEALTH}) as process:
        yield process


def prepared(stub: EngineStub) -> TrtllmCache:
    """An engine of that kind: it is asked, and reports no sources."""
    cache = TrtllmCache((1024, 8192), names_groups=True)
    stub.paths[PATH] = TrtllmEvents([cache])
    return cache


async def add(router: RouterProcess, stub: EngineStub, endpoint: str) -> int:
    source = {"endpoint": endpoint}
    body = {"url": stub.url, "id": stub.name, "models": [stub.model], "kv_events": [source]}
    return (await router.post("/replicas", body)).status


async def until_healthy(router: RouterProcess, stub: EngineStub) -> None:
    async def is_healthy() -> bool:
        return (await router.replica(stub.name))["state"] == "healthy"

    await eventually(is_healthy, f"{stub.name} is healthy")


async def test_a_request_goes_where_its_prompt_is_and_the_prediction_says_how_much(
    router: RouterProcess,
) -> None:
    """Of two replicas that are asked for their events; a wildcard is the replica's own host."""
    async with engines(2) as stubs:
        caches = [prepared(stub) for stub in stubs]
        for stub in stubs:
            assert await add(router, stub, f"http://*:{stub.port}{PATH}") == 201
        ids = prompt_ids(256, 3)
        caches[1].store(ids)
        other = stubs[1]
        for stub in stubs:
            await until_state(router, stub, "live")
            await until_healthy(router, stub)

        async def is_known() -> bool:
            return await hit_of(router, other, ids) == 256

        await eventually(is_known, "the prompt")
        asked = {"model": other.model, "token_ids": [*ids, 5]}
        found = (await router.post("/route", asked)).json
        assert (found["replica"], found["hit"]["cached_tokens"]) == (other.name, 256)
        caches[1].remove(1, *caches[1].hashes(ids)[4:])

        async def is_gone() -> bool:
            return await hit_of(router, other, ids) == 128

        await eventually(is_gone, "what was removed")
        metrics = await router.metrics()
        assert metrics.sum("kvroute_event_polls_total", outcome="events") >= 3


async def test_a_reload_that_changes_the_key_changes_that_of_the_polls() -> None:
    """An engine with a new key refuses the old one, and nothing more would be known of it."""
    async with engines(1) as (stub,):
        events = stub.paths[PATH] = TrtllmEvents([TrtllmCache()])

        def configured(key: str) -> dict[str, object]:
            source = {"endpoint": f"http://*:{stub.port}{PATH}"}
            replica = {"url": stub.url, "id": stub.name, "api_key": key}
            return {"replicas": [{**replica, "models": [stub.model], "kv_events": [source]}]}

        with router_process(configured("old")) as router:
            await until_state(router, stub, "live")
            router.configure(configured("new"))
            router.process.send_signal(signal.SIGHUP)

            async def has_new_key() -> bool:
                return bool(events.keys[-1] == "Bearer new")

            await eventually(has_new_key, "a poll with the new key")
            assert set(events.keys) == {"Bearer old", "Bearer new"}


async def test_an_address_outside_the_replicas_networks_is_refused(router: RouterProcess) -> None:
    """As that of any stream of a replica that is added at run time."""
    async with engines(1) as (stub,):
        body = {
            "url": stub.url,
            "kv_events": [{"endpoint": f"http://169.254.169.254:80{PATH}"}],
        }
        found = await router.post("/replicas", body)
        assert found.status == 400
        assert "kv_events[0].endpoint" in found.error["message"]
