"""A fleet in which some replicas publish events and others do not, or not any more: every hit is
predicted, and nobody takes an estimate for more than it is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, closing

import pytest

from tests.support.actual_hits import hits
from tests.support.engine_stub import EngineStub, unique
from tests.support.http_client import Answer, ask
from tests.support.relay import TamperingRelay
from tests.support.router_process import QUICK_HEALTH, RouterProcess, router_process
from tests.support.waiting import DEADLINE_S

IDS = list(range(1, 401))
SETTINGS = {"health": QUICK_HEALTH, "approximate": {"after_s": 0.2}}
MARK = "x-kv-hit-approximate"


class Mixed:
    """One replica with events, which can be cut off, and one without."""

    def __init__(
        self, router: RouterProcess, told: EngineStub, silent: EngineStub, relays: AsyncExitStack
    ) -> None:
        self.router = router
        self.told, self.silent = told, silent
        self.cut_events = relays.aclose

    async def ask(self, engine: EngineStub, ids: list[int]) -> Answer:
        """Send a prompt to one of the two."""
        (other,) = {self.told.name, self.silent.name} - {engine.name}
        await self.router.post(f"/replicas/{other}/drain", {})
        answer = await self.router.post("/v1/completions", {"model": engine.model, "prompt": ids})
        await self.router.post(f"/replicas/{other}/undrain", {})
        assert (answer.status, answer.headers["x-kv-replica"]) == (200, engine.name)
        return answer

    async def hits(self) -> dict[str, tuple[int, bool]]:
        """Where how much of the prompt is cached, and whether that is an estimate."""
        question = {"model": self.told.model, "token_ids": IDS}
        answer = await self.router.post("/route?explain=true", question)
        return {
            ranked["replica"]: (ranked["hit"]["cached_tokens"], ranked["hit"]["approximate"])
            for ranked in answer.json["ranking"]
        }


async def relayed(told: EngineStub, relays: AsyncExitStack) -> dict[str, str]:
    """Where its events are, on a way that can be cut."""
    found = (await ask(told.port, "GET", "/kv_event_sources")).json["0"]
    relay = relays.enter_context(
        closing(TamperingRelay(found["endpoint"], found["replay_endpoint"]))
    )
    addresses = {"endpoint": relay.endpoint, "replay_endpoint": relay.replay_endpoint}
    return {**addresses, "topic": found["topic"]}


@pytest.fixture
async def mixed() -> AsyncIterator[Mixed]:
    model = unique("model")
    with router_process(SETTINGS) as router:
        told, silent = (EngineStub(model, has_events=True) for _ in range(2))
        async with told, silent, AsyncExitStack() as relays:
            source = await relayed(told, relays)
            added = await router.post(
                "/replicas", {"url": silent.url, "id": silent.name, "kv_events": []}
            )
            assert added.status == 201
            async with router.serving(told, kv_events=[source]):
                yield Mixed(router, told, silent, relays)


async def test_hits_without_events_are_estimated_and_marked_as_such(mixed: Mixed) -> None:
    """In the response, in `/route`, in the log of requests, in metrics and on the page."""
    router, told, silent = mixed.router, mixed.told, mixed.silent
    for engine in (told, silent):
        assert hits(await mixed.ask(engine, IDS)) == (0, 0)
        engine.store(IDS)
    await router.until_applied(told)
    assert await mixed.hits() == {told.name: (384, False), silent.name: (384, True)}
    exact, estimated = await mixed.ask(told, IDS), await mixed.ask(silent, IDS)
    assert hits(exact) == hits(estimated) == (384, 384)
    assert (exact.headers.get(MARK), estimated.headers.get(MARK)) == (None, "true")
    requests = (await router.get("/requests")).json["requests"]
    verdicts = {each["replica"]: each["verdict"] for each in requests}
    assert verdicts == {told.name: "exact", silent.name: "near"}
    metrics = await router.metrics()
    assert metrics.sum("kvroute_predictions_total", replica=silent.name) == 0
    name = "kvroute_approximate_predictions_total"
    assert metrics.sum(name, replica=silent.name, outcome="near") == 2
    assert metrics.sum("kvroute_approximate_sources") == 1
    assert metrics.sum("kvroute_approximate_tokens", replica=silent.name) == 384
    minute = (await router.get("/overview")).json["minute"]
    assert (minute["compared"], minute["estimated"]) == (4, 2)

    await mixed.cut_events()
    deadline = time.monotonic() + DEADLINE_S
    while (await mixed.hits())[told.name] != (384, True):
        assert time.monotonic() < deadline, "the lost events are not replaced"
        await asyncio.sleep(0.02)
    overview = (await router.get("/overview")).json
    texts = [each["text"] for replica in overview["replicas"] for each in replica["problems"]]
    assert "its events have been missing for long: its hits are approximate" in texts


async def test_what_the_data_plane_decides_is_estimated_once_its_events_are_lost() -> None:
    """It goes on deciding, by what it sent there before."""
    with router_process(SETTINGS) as router:
        async with EngineStub(unique("model"), has_events=True) as stub, AsyncExitStack() as relays:
            source = await relayed(stub, relays)
            async with router.serving(stub, kv_events=[source]):
                body = {"model": stub.model, "prompt": IDS}
                request: dict[str, str] = {}
                while not request.get("reason", "").endswith("decided by the data plane"):
                    answer = await router.post("/v1/completions", body)
                    assert (answer.status, answer.headers.get(MARK)) == (200, None)
                    (request, *_) = (await router.get("/requests")).json["requests"]
                await relays.aclose()
                deadline = time.monotonic() + DEADLINE_S
                while answer.headers.get(MARK) != "true":
                    assert time.monotonic() < deadline, "the lost events are not replaced"
                    answer = await router.post("/v1/completions", body)
                assert answer.headers["x-kv-hit-tokens"] == "384"
                while request["predicted"]["approximate"] is False or not request["end"]:
                    (request, *_) = (await router.get("/requests")).json["requests"]
                assert request["reason"].endswith("decided by the data plane")
