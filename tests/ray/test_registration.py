"""A replica is listed at the router as long as it lives."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from async_timeout import timeout

from tests.support.engine_stub import EngineStub, engines, unique
from tests.support.router_process import QUICK_HEALTH, RouterProcess, router_process
from tests.support.vllm_publisher import free_port
from tests.support.waiting import DEADLINE_S

pytest.importorskip("ray", reason="ray[serve] is not installed; make test-ray")
registration: Any = pytest.importorskip("kvroute_ray.registration")


@pytest.fixture(scope="module")
def router() -> Iterator[RouterProcess]:
    with router_process({"health": QUICK_HEALTH}) as process:
        yield process


async def registered(
    router: RouterProcess, stub: EngineStub, prefix: str, name: str, end: str = "", **options: Any
) -> Any:
    config = {"url": stub.url + end, "id": prefix + name}
    return await asyncio.to_thread(
        registration.Registration, [router.url], config, prefix, every_s=0.05, **options
    )


async def ids(router: RouterProcess) -> set[str]:
    return {each["id"] for each in (await router.get("/replicas")).json["replicas"]}


async def test_a_replica_is_listed_until_it_closes(router: RouterProcess) -> None:
    """And again if the router has forgotten it, as after its restart."""
    prefix = f"{unique('app')}:Engine:"
    async with engines(1) as (stub,):
        listed = await registered(router, stub, prefix, "a")
        assert await ids(router) == {f"{prefix}a"}
        assert (await router.delete(f"/replicas/{prefix}a")).status == 200
        while await ids(router) != {f"{prefix}a"}:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(listed.close)
        await asyncio.to_thread(listed.close)
        assert await ids(router) == set()


@pytest.mark.parametrize("end", ["", "/"])
async def test_a_replica_takes_the_place_of_one_that_did_not_leave(
    router: RouterProcess, end: str
) -> None:
    """A killed one leaves its address to the next, however that is written; but only within its
    deployment."""
    prefix = f"{unique('app')}:Engine:"
    async with engines(2) as (stub, other):
        for name, each in ((f"{prefix}dead", stub), ("anothers", other)):
            assert (await router.post("/replicas", {"url": each.url, "id": name})).status == 201
        listed = await registered(router, stub, prefix, "b", end)
        assert await ids(router) == {f"{prefix}b", "anothers"}
        refused = await registered(router, other, prefix, "c", end)
        assert await ids(router) == {f"{prefix}b", "anothers"}
        for each in (listed, refused):
            await asyncio.to_thread(each.close)
        await router.delete("/replicas/anothers")


async def test_what_is_gone_for_long_is_removed_by_the_others(router: RouterProcess) -> None:
    """A killed replica cannot leave, and there may be none that comes in its place."""
    prefix = f"{unique('app')}:Engine:"
    async with engines(1) as (stub,):
        for name in (f"{prefix}killed", "anothers"):
            url = f"http://127.0.0.1:{free_port()}"
            assert (await router.post("/replicas", {"url": url, "id": name})).status == 201
        for name in (f"{prefix}killed", "anothers"):
            while (await router.replica(name))["health"] != "unhealthy":
                await asyncio.sleep(0.01)
        listed = await registered(router, stub, prefix, "lives", gone_after_s=0.1)
        while await ids(router) != {f"{prefix}lives", "anothers"}:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(listed.close)
        await router.delete("/replicas/anothers")


async def test_a_replica_serves_though_its_router_refuses_or_is_gone(
    router: RouterProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """One line says why it is not listed, once."""
    async with engines(1) as (stub,):
        gone = f"http://127.0.0.1:{free_port()}"
        config = {"url": stub.url, "id": "x", "sped": 2}
        with caplog.at_level(logging.WARNING):
            listed = await asyncio.to_thread(
                registration.Registration, [router.url, gone], config, "x", every_s=0.01
            )
            async with timeout(DEADLINE_S):
                while listed.looks < 5:
                    await asyncio.sleep(0.01)
        lines = [each.getMessage() for each in caplog.records]
        assert len(lines) == 2
        assert "unknown key" in lines[0]
        assert "does not answer" in lines[1]
        await asyncio.to_thread(listed.close)


@pytest.mark.parametrize("url", ["10.0.0.7:8000", "ftp://x", "http://x/y"])
def test_an_address_that_is_none_is_refused_at_once(url: str) -> None:
    """A replica would never be listed, and nobody would see why."""
    with pytest.raises(ValueError, match="url: "):
        registration.Registration(["http://router:8000"], {"url": url, "id": "x"}, "x")
