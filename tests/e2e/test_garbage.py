"""Nothing that comes with a request, a connection or a replica may be left for the garbage
collector.

What refers to each other in a circle stays until all that a router remembers is looked through,
once in a million requests: until then it is memory, and then it stops every stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from tests.support.engine_stub import (
    Behaviour,
    EngineStub,
    after,
    answer,
    dying_after,
    hang_up,
    refusing,
    streaming,
    unique,
)
from tests.support.http_client import HttpClient, connect
from tests.support.router_process import QUICK_HEALTH, RouterProcess, router_process
from tests.support.waiting import eventually

HOOK = Path(__file__).parents[1] / "support" / "garbage"
TIMES = 20
"""Of each thing: what is left of a start or of a health check is less."""


class Fleet:
    """A router that tells what it leaves, and an engine."""

    def __init__(self, router: RouterProcess, stub: EngineStub, told: Path) -> None:
        self.router, self.stub, self._told = router, stub, told

    async def garbage(self) -> dict[str, int]:
        """Of which there are many, since it was last asked."""
        await self.router.until_idle()
        self._told.unlink(missing_ok=True)
        self.router.process.send_signal(signal.SIGUSR2)
        await eventually(self._told.exists, "it is told")
        found: dict[str, int] = json.loads(self._told.read_text())
        return {name: count for name, count in found.items() if count >= TIMES}

    async def ask(self, client: HttpClient, stream: bool, close: bool = False) -> None:
        """Send a request, and do not wait for its response."""
        body = {"model": self.stub.model, "prompt": list(range(300)), "max_tokens": 3}
        headers = {"content-type": "application/json"}
        if close:
            headers["connection"] = "close"
        await client.send("POST", "/v1/completions", body | {"stream": stream}, headers)

    async def times(self, act: Callable[[HttpClient], Awaitable[None]]) -> None:
        """Do it so often, on a connection of its own each."""
        for _ in range(TIMES):
            async with connect(self.router.port) as client:
                await act(client)


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    told = tmp_path / "garbage.json"
    path = os.pathsep.join([str(HOOK), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environ = {"KVROUTE_GARBAGE": str(told), "PYTHONPATH": path}
    config = {"health": QUICK_HEALTH}
    async with EngineStub(unique("model")) as stub:
        with router_process(config, environ) as router:
            async with router.serving(stub):
                await router.until_in_rotation(stub)
                found = Fleet(router, stub, told)
                await found.garbage()
                yield found


@pytest.mark.parametrize("close", [False, True], ids=["kept", "closed"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_request_that_is_served(fleet: Fleet, stream: bool, close: bool) -> None:
    async def act(client: HttpClient) -> None:
        for _ in range(1 if close else 3):
            await fleet.ask(client, stream, close)
            assert (await client.read_answer()).status == 200

    fleet.stub.behaviour = streaming(3) if stream else answer
    await fleet.times(act)
    assert await fleet.garbage() == {}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_client_that_leaves(fleet: Fleet, stream: bool) -> None:
    """Before the first byte, or in the middle."""
    release = asyncio.Event()

    async def act(client: HttpClient) -> None:
        await fleet.ask(client, stream)
        if stream:
            await client.read_head()
            await client.read_piece()
        else:
            await eventually(lambda: fleet.stub.active, "it is sent")
        client.leave()
        await eventually(lambda: not fleet.stub.active, "it is given up")

    fleet.stub.behaviour = streaming(1000, 0.05) if stream else after(release)
    await fleet.times(act)
    assert await fleet.garbage() == {}


@pytest.mark.parametrize(
    "behaviour",
    [dying_after(2), hang_up, refusing("503 Service Unavailable"), refusing("400 Bad Request")],
    ids=["dies in a stream", "hangs up", "refuses", "finds a mistake"],
)
async def test_a_replica_that_fails(fleet: Fleet, behaviour: Behaviour) -> None:
    async def act(client: HttpClient) -> None:
        await fleet.ask(client, stream=True)
        with contextlib.suppress(asyncio.IncompleteReadError):
            await client.read_answer()

    fleet.stub.behaviour = behaviour
    await fleet.times(act)
    assert await fleet.garbage() == {}


async def test_what_the_router_answers_by_itself(fleet: Fleet) -> None:
    route = {"model": fleet.stub.model, "prompt": list(range(300))}
    headers = {"content-type": "application/json"}

    async def act(client: HttpClient) -> None:
        await client.ask("POST", "/route", route, headers)
        await client.ask("POST", "/route", {"model": "another"}, headers)
        await client.ask("POST", "/v1/completions", b"{", headers)
        await client.ask("GET", "/replicas")
        await client.ask("GET", "/metrics")

    await fleet.times(act)
    assert await fleet.garbage() == {}


async def test_a_replica_that_comes_and_goes(fleet: Fleet) -> None:
    """With what was remembered of its cache."""
    async with EngineStub(fleet.stub.model) as other:
        for number in range(TIMES):
            replica = {"id": f"pod-{number}", "url": other.url, "models": [other.model]}
            assert (await fleet.router.post("/replicas", replica)).status == 201
            for _ in range(4):
                async with connect(fleet.router.port) as client:
                    await fleet.ask(client, stream=False)
                    await client.read_answer()
            assert (await fleet.router.delete(f"/replicas/pod-{number}")).status in (200, 204)
        assert await fleet.garbage() == {}
