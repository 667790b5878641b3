"""Caches without events: the core estimates what they hold, and learns from what engines report, as
Python does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import msgspec
import pytest

from tests.support.engine_stub import (
    EngineStub,
    answer,
    engines,
    prompt_ids,
    refusing,
    unique,
)
from tests.support.http_client import Answer, ask
from tests.support.router_process import QUICK_HEALTH, RouterProcess, router_process

BY_PYTHON = {"x-vllm-priority": "0"}
"""With this header, a gateway's question is answered in Python."""
AS_MSGPACK = {"accept": "application/msgpack"}
"""In which Python answers."""
DECIDED_BY_PYTHON = {"x-vllm-priority": "0"}
"""With this header, a request is decided in Python."""
SMALL = {"approximate": {"cache_tokens": 2048, "after_s": 0.2}}


@pytest.fixture(scope="module")
def process() -> Iterator[RouterProcess]:
    with router_process({"server": {"threads": 2}, "health": QUICK_HEALTH, **SMALL}) as started:
        yield started


@pytest.fixture
async def router(process: RouterProcess) -> AsyncIterator[RouterProcess]:
    """The router; after every test nothing may be left in flight."""
    yield process
    await process.until_idle()


@asynccontextmanager
async def silent(router: RouterProcess, count: int = 1) -> AsyncIterator[list[EngineStub]]:
    """Replicas of one model that publish nothing, and that the core knows."""
    async with engines(count) as stubs, router.serving(*stubs, kv_events=[]):
        body = {"model": stubs[0].model, "token_ids": [1]}
        while True:
            found = (await router.post("/select_and_reserve", body)).json
            await ask(router.port, "DELETE", f"/reservations/{found['selection_id']}")
            if is_of_core((await logged(router, stubs[0].model, 1))[0]):
                break
        for stub in stubs:
            stub.requests.clear()
        yield stubs


async def logged(router: RouterProcess, model: str, count: int) -> list[dict[str, Any]]:
    """The last requests for a model, once they are over."""
    while True:
        all_of_them = (await router.get("/requests")).json["requests"]
        found = [each for each in all_of_them if each["model"] == model][:count]
        if len(found) == count and all(each["end"] for each in found):
            return found
        await asyncio.sleep(0.01)


async def logged_as(router: RouterProcess, request_id: str) -> dict[str, Any]:
    """The request of an id, once it is over: what the core decides is logged a moment later."""
    while True:
        for each in (await router.get("/requests")).json["requests"]:
            if each["request_id"] == request_id and each["end"]:
                return dict(each)
        await asyncio.sleep(0.01)


def is_of_core(entry: dict[str, Any]) -> bool:
    return str(entry["reason"]).endswith("; decided by the data plane")


NOT_EQUAL = (
    *("number", "change", "arrived_at", "request_id", "trace_id", "model", "replica", "reason"),
    *("first_byte_ms", "total_ms"),
)


async def estimate(router: RouterProcess, stub: EngineStub) -> list[dict[str, Any]]:
    """What is estimated of a replica."""
    return list((await router.replica(stub.name))["approximate"])


async def counts(router: RouterProcess, stub: EngineStub) -> dict[str, float]:
    """What metrics say of its predictions."""
    now = await router.metrics()
    return {
        name: now.sum(name, replica=stub.name)
        for name in (
            *("kvroute_approximate_predictions_total", "kvroute_predictions_total"),
            "kvroute_approximate_predicted_cached_tokens_total",
            "kvroute_approximate_actual_cached_tokens_total",
            *("kvroute_expected_predictions_total", "kvroute_in_flight_prefill_tokens"),
        )
    } | now.by("outcome", "kvroute_approximate_predictions_total")


def told(found: Answer) -> dict[str, str]:
    names = ("x-kv-hit-tokens", "x-kv-hit-approximate")
    return {name: found.headers[name] for name in names if name in found.headers}


class Twins:
    """Two models with one replica each that get the same requests: one from the core, one from
    Python. Whatever is seen of them must be equal."""

    def __init__(self, router: RouterProcess, core: EngineStub, python: EngineStub) -> None:
        self.router = router
        self.stubs = core, python

    def both(self, method: str, *arguments: Any) -> None:
        for stub in self.stubs:
            getattr(stub, method)(*arguments)

    async def complete(self, ids: list[int], **fields: Any) -> dict[str, Any]:
        """A completion of both; what is logged of the core's."""
        seen = []
        ways: tuple[dict[str, str], ...] = ({}, DECIDED_BY_PYTHON)
        for stub, headers in zip(self.stubs, ways, strict=True):
            body = {"model": stub.model, "prompt": ids, "max_tokens": 1, **fields}
            named = {"x-request-id": unique("request")}
            found = await self.router.post("/v1/completions", body, headers | named)
            entry = await logged_as(self.router, named["x-request-id"])
            assert is_of_core(entry) == (not headers)
            seen.append((found.status, told(found), self._of(entry)))
        assert seen[0] == seen[1]
        await self.check()
        return dict(seen[0][2])

    async def reserve(self, ids: list[int], usage: dict[str, Any] | None) -> None:
        """A reservation of both, from its beginning to its end."""
        seen: list[Any] = []
        ways: tuple[dict[str, str], ...] = ({}, BY_PYTHON)
        for stub, headers in zip(self.stubs, ways, strict=True):
            body = {"model": stub.model, "token_ids": ids}
            named = {"x-request-id": unique("request")}
            found = (await self.router.post("/select_and_reserve", body, headers | named)).json
            path = f"/reservations/{found['selection_id']}"
            assert (await self.router.post(f"{path}/prefill_complete")).status == 200
            assert (await ask(self.router.port, "DELETE", path, usage or b"")).status == 200
            entry = await logged_as(self.router, named["x-request-id"])
            assert is_of_core(entry) == (not headers)
            hit = {name: found[name] for name in ("hit", "overlap", "expected_tokens")}
            words = found["reason"].partition(": a delay of ")[0].split("; ")[:2]
            seen.append((hit, words, self._of(entry)))
        assert seen[0] == seen[1]
        await self.check()

    async def check(self) -> None:
        """What is estimated, and what is counted."""
        estimates = [await estimate(self.router, stub) for stub in self.stubs]
        assert estimates[0] == estimates[1]
        counted = [await counts(self.router, stub) for stub in self.stubs]
        assert counted[0] == counted[1]

    @staticmethod
    def _of(entry: dict[str, Any]) -> dict[str, Any]:
        assert entry["predicted"]["approximate"]
        return {name: value for name, value in entry.items() if name not in NOT_EQUAL}


@asynccontextmanager
async def twins(router: RouterProcess) -> AsyncIterator[Twins]:
    async with silent(router) as (core,), silent(router) as (python,):
        yield Twins(router, core, python)


@pytest.mark.parametrize("seed", range(3))
async def test_an_estimate_of_the_core_is_python_s(router: RouterProcess, seed: int) -> None:
    """Prompts that begin alike, evictions that nobody tells of, responses without usage, failures:
    hit, verdict, trust and assumed size stay equal, request by request."""
    random = Random(seed)
    prefixes = [prompt_ids(900, 1000 * seed + number) for number in range(3)]
    verdicts = set()
    async with twins(router) as pair:
        for number in range(40):
            kept = random.choice((130, 450, 900))
            ids = [
                *random.choice(prefixes)[:kept],
                *prompt_ids(random.choice((1, 200, 600)), 100 + number),
            ]
            if random.random() < 0.15:
                pair.both("forget")
            behaviour = refusing("500 Internal Server Error") if random.random() < 0.1 else answer
            for stub in pair.stubs:
                stub.behaviour = behaviour
            if random.random() < 0.3:
                cached = pair.stubs[0].cached_tokens(ids)
                await pair.reserve(ids, random.choice((None, {"cached_tokens": cached})))
            else:
                entry = await pair.complete(ids, stream=random.random() < 0.4)
                verdicts.add(entry["verdict"])
            if random.random() < 0.8:
                pair.both("store", ids)
    assert verdicts >= {"near", "over", None}


@pytest.mark.parametrize("headers", [{}, DECIDED_BY_PYTHON], ids=["core", "python"])
async def test_what_an_engine_refuses_was_not_computed(
    router: RouterProcess, headers: dict[str, str]
) -> None:
    """A refusal comes within a millisecond. That was taken for the time of the prefill, so that the
    model's replicas seemed a hundred times as fast, and the prompt was estimated to be cached."""
    async with silent(router) as (stub,):
        stub.behaviour = refusing("400 Bad Request")
        body = {"model": stub.model, "prompt": prompt_ids(2000, 1)}
        for number in range(8):
            assert (await router.post("/v1/completions", body, headers)).status == 400
            await logged(router, stub.model, 2 + number)
        assert await speed_of(router, stub.model) == 10_000
        stub.behaviour = answer
        found = await router.post("/v1/completions", body, headers)
        assert (found.status, found.headers["x-kv-hit-tokens"]) == (200, "0")
        await logged(router, stub.model, 10)


async def speed_of(router: RouterProcess, model: str) -> float:
    """What was learned of how fast a model's replicas compute prompts; 10,000 before that."""
    return (await router.metrics()).sum("kvroute_prefill_tokens_per_second", model=model)


@pytest.mark.parametrize("headers", [{}, DECIDED_BY_PYTHON], ids=["core", "python"])
async def test_streams_show_how_fast_prompts_are_computed(
    router: RouterProcess, headers: dict[str, str]
) -> None:
    """Any other response begins when all of it has been generated: seconds of decoding were taken
    for the time of the prefill. They count only as long as nothing better is known."""
    async with silent(router) as (stub,):
        speeds = [10_000.0]
        for number, stream in enumerate((False, True, False, False)):
            body = {"model": stub.model, "prompt": prompt_ids(2000, number), "stream": stream}
            assert (await router.post("/v1/completions", body, headers)).status == 200
            await logged(router, stub.model, 2 + number)
            speeds.append(await speed_of(router, stub.model))
        assert len(set(speeds)) == 3
        assert speeds[2] == speeds[3] == speeds[4]


@pytest.mark.parametrize("more", [{}, {"avoid": []}], ids=["core", "python"])
async def test_a_report_of_the_first_token_shows_how_fast_a_prompt_was_computed(
    router: RouterProcess, more: dict[str, Any]
) -> None:
    """The end of a response that a gateway reports alone is not that."""
    async with silent(router) as (stub,):
        speeds = [10_000.0]
        for number, reports in enumerate(((), ("prefill_complete",), ())):
            body = {"model": stub.model, "token_ids": prompt_ids(2000, number), **more}
            found = (await router.post("/select_and_reserve", body)).json
            path = f"/reservations/{found['selection_id']}"
            for report in reports:
                assert (await router.post(f"{path}/{report}")).status == 200
            assert (await ask(router.port, "DELETE", path)).status == 200
            await router.until_idle()
            speeds.append(await speed_of(router, stub.model))
        assert len(set(speeds)) == 3
        assert speeds[2] == speeds[3]


@pytest.mark.parametrize("report", [{"status": 400}, {"status": 400, "usage": None}])
async def test_what_a_gateway_says_was_refused_was_not_computed(
    router: RouterProcess, report: dict[str, Any]
) -> None:
    """Whether the core reads the report or Python."""
    async with silent(router) as (stub,):
        body = {"model": stub.model, "token_ids": prompt_ids(2000, 1)}
        for number in range(8):
            found = (await router.post("/select_and_reserve", body)).json
            assert found["hit"]["cached_tokens"] == 0
            path = f"/reservations/{found['selection_id']}"
            assert (await ask(router.port, "DELETE", path, report)).status == 200
            await logged(router, stub.model, 2 + number)
        assert await speed_of(router, stub.model) == 10_000


async def test_what_never_ends_well_leaves_nothing_in_use(router: RouterProcess) -> None:
    """Of a client that left nobody says what was cached: what its request had stored can be evicted
    all the same, as others need room."""
    async with silent(router) as (stub,):
        for seed in range(3):
            body = {"model": stub.model, "token_ids": prompt_ids(1000, seed)}
            found = (await router.post("/select_and_reserve", body)).json
            path = f"/reservations/{found['selection_id']}"
            assert (await router.post(f"{path}/prefill_complete")).status == 200
            await ask(router.port, "DELETE", path, {"outcome": "client_left"})
        (entry, *_) = await logged(router, stub.model, 3)
        assert is_of_core(entry)
        (known,) = await estimate(router, stub)
        assert known["tokens"] <= known["capacity_tokens"] == 2048


async def in_both_ways(
    router: RouterProcess, path: str, body: dict[str, Any], by_python: dict[str, str]
) -> dict[str, Any]:
    """The answer to a question, which core and Python must give alike."""
    by_core = (await router.post(path, body)).json
    asked = await router.post(path, body, by_python)
    is_packed = asked.headers["content-type"] == "application/msgpack"
    other = msgspec.msgpack.decode(asked.body) if is_packed else asked.json
    for each in (by_core, other):
        each.pop("routing_seconds", None)
    assert by_core == other
    return dict(by_core)


async def test_what_gateways_are_told_of_estimates_is_the_same(router: RouterProcess) -> None:
    """The hit, how much of it counts and why, what it costs; whoever answers."""
    async with silent(router, 2) as stubs:
        ids = prompt_ids(640, 77)
        for stub, other in (stubs, stubs[::-1]):
            await router.post(f"/replicas/{other.name}/drain", {})
            for _ in range(2):
                body = {"model": stub.model, "prompt": ids, "max_tokens": 1}
                assert (await router.post("/v1/completions", body)).status == 200
                await logged(router, stub.model, 1)
            await router.post(f"/replicas/{other.name}/undrain", {})
            stub.store(ids)
        await router.until_idle()
        question = {"model": stubs[0].model, "token_ids": [*ids, 7]}
        for path, by_python in (("/route", AS_MSGPACK), ("/select", BY_PYTHON)):
            found = await in_both_ways(router, path, question, by_python)
            assert found["hit"]["approximate"], path
            assert found["hit"]["cached_tokens"] == 640, path
            words = "640 of 641 tokens estimated to be cached; counted by "
            assert found["reason"].startswith(words), path
            assert "groups" not in found, path


async def test_without_estimates_the_core_routes_by_load() -> None:
    """Where they are turned off, a replica without events holds nothing, and is no reason to ask
    Python."""
    with router_process({"health": QUICK_HEALTH, "approximate": {"enabled": False}}) as router:
        async with silent(router) as (stub,):
            ids = prompt_ids(640, 5)
            stub.store(ids)
            for _ in range(2):
                body = {"model": stub.model, "prompt": ids, "max_tokens": 1}
                found = await router.post("/v1/completions", body)
                assert told(found) == {"x-kv-hit-tokens": "0"}
                (entry,) = await logged(router, stub.model, 1)
                assert is_of_core(entry)
                assert entry["verdict"] == "under"
            assert await estimate(router, stub) == []


async def test_a_replica_without_events_beside_one_with_them_is_the_core_s(
    router: RouterProcess,
) -> None:
    """Both are ranked in one decision, and each hit is what it is: known or estimated."""
    model = unique("model")
    known, guessed = EngineStub(model, has_events=True), EngineStub(model)
    async with known, guessed, router.serving(known), router.serving(guessed, kv_events=[]):
        first, second = prompt_ids(640, 8), prompt_ids(640, 9)
        known.store(first)
        await router.until_applied(known)
        guessed.store(second)
        prompts = (first, known, guessed), (second, guessed, known)
        for ids, _, other in prompts:
            await router.post(f"/replicas/{other.name}/drain", {})
            body = {"model": model, "prompt": [*ids, 7], "max_tokens": 1}
            assert (await router.post("/v1/completions", body)).status == 200
            await router.post(f"/replicas/{other.name}/undrain", {})
        for ids, stub, _ in prompts:
            body = {"model": model, "prompt": [*ids, 7], "max_tokens": 1}
            while True:
                found = await router.post("/v1/completions", body)
                assert found.headers["x-kv-replica"] == stub.name
                (entry,) = await logged(router, model, 1)
                if is_of_core(entry):
                    break
            is_guess = stub is guessed
            assert told(found)["x-kv-hit-tokens"] == "640"
            assert ("x-kv-hit-approximate" in told(found)) == is_guess
            assert entry["verdict"] == ("near" if is_guess else "exact")
