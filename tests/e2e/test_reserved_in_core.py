"""What gateways reserve without Python: as Python reserves it, from the answer to the end."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from tests.support.engine_stub import EngineStub, engines, prompt_ids
from tests.support.http_client import Answer, ask, connect, encoded, request_bytes
from tests.support.router_process import QUICK_HEALTH, Metrics, RouterProcess, router_process

BY_PYTHON = {"x-vllm-priority": "0"}
"""With this header, a question is answered in Python."""
PATH = "/select_and_reserve"
BOUNDED = {"health": QUICK_HEALTH, "doors": {"max_reservations": 3}}
HASTY = {"health": QUICK_HEALTH, "doors": {"reservation_idle_s": 0.5}}


@pytest.fixture(scope="module")
def router() -> Iterator[RouterProcess]:
    with router_process({"server": {"threads": 2}, "health": QUICK_HEALTH}) as process:
        yield process


async def logged(router: RouterProcess) -> dict[str, Any]:
    """The request that changed last."""
    found = (await router.get("/requests?limit=1")).json["requests"]
    return dict(found[0])


def is_of_core(entry: dict[str, Any]) -> bool:
    return str(entry["reason"]).endswith("; decided by the data plane")


async def reserve(
    router: RouterProcess, body: dict[str, Any], headers: dict[str, str] | None = None
) -> dict[str, Any]:
    answer = await router.post(PATH, body, headers)
    assert answer.status == 200, answer.body
    return dict(answer.json)


async def report(
    router: RouterProcess, found: dict[str, Any], step: str, what: Any = b""
) -> Answer:
    return await ask(router.port, "POST", f"/reservations/{found['selection_id']}/{step}", what)


async def end(router: RouterProcess, found: dict[str, Any], what: Any = b"") -> Answer:
    return await ask(router.port, "DELETE", f"/reservations/{found['selection_id']}", what)


async def until_core(router: RouterProcess, stub: EngineStub) -> None:
    """Ask until the core answers."""
    while True:
        found = await reserve(router, {"model": stub.model, "token_ids": prompt_ids(64, 900)})
        await end(router, found)
        if is_of_core(await logged(router)):
            return


async def booked(router: RouterProcess) -> dict[str, float]:
    """What the books say of all replicas."""
    now = await router.metrics()
    names = (
        *("kvroute_in_flight_prefill_tokens", "kvroute_in_flight_prefills"),
        *("kvroute_in_flight_decodes", "kvroute_reservations"),
    )
    return {name: now.sum(name) for name in names}


def without_times(found: dict[str, Any]) -> dict[str, Any]:
    """An answer without its name, and what depends on the moment."""
    kept = {name: value for name, value in found.items() if name not in ("selection_id", "cost")}
    words = str(found["reason"]).partition(": a delay of ")[0].split("; ")
    kept["reason"] = [each for each in words if not re.match(r"[\d,]+ (for|ahead)", each)]
    return kept


async def life(
    router: RouterProcess, body: dict[str, Any], headers: dict[str, str], cached: int
) -> list[Any]:
    """One reservation from its beginning to its end, and what is seen of it."""
    found = await reserve(router, body, headers)
    seen: list[Any] = [without_times(found), await booked(router)]
    assert (await report(router, found, "prefill_complete")).status == 200
    assert (await report(router, found, "output", {"tokens": 5})).status == 200
    seen.append(await booked(router))
    details = {"prompt_tokens_details": {"cached_tokens": cached}, "prompt_tokens": 1000}
    assert (await end(router, found, {"usage": details})).status == 200
    assert (await end(router, found)).status == 404
    entry = await logged(router)
    assert is_of_core(entry) == (not headers), body
    times = ("number", "change", "arrived_at", "request_id", "trace_id", "reason")
    timed = ("first_byte_ms", "total_ms")
    assert all(entry[name] is not None for name in timed)
    seen.append({name: entry[name] for name in entry if name not in (*times, *timed)})
    seen.append(await booked(router))
    return seen


@pytest.mark.parametrize("seed", range(2))
async def test_a_reservation_of_the_core_lives_as_one_of_python(
    router: RouterProcess, seed: int
) -> None:
    """Answer, books and log are equal, whoever has answered."""
    random = Random(seed)
    # So fast that their work weighs nothing, however long a busy machine takes: the second one of a
    # pair would rightly avoid what the first one has made seem busy.
    async with engines(3, has_events=True) as stubs, router.serving(*stubs, speed=1000):
        await until_core(router, stubs[0])
        prefixes = [prompt_ids(640, 10 * seed + first) for first in range(1, 4)]
        for stub, prefix in zip(stubs, prefixes, strict=True):
            stub.store(prefix)
            await router.until_applied(stub)
        for number in range(12):
            prefix, kept = random.choice(prefixes), random.choice([64, 320, 640])
            more = random.randrange(100, 900)
            name = random.choice(["model", "model_name"])
            prompt = random.choice(["token_ids", "token_ids", "prompt"])
            fields = {name: stubs[0].model, "stream": random.random() < 0.5}
            ways: list[dict[str, str]] = [{}, BY_PYTHON]
            random.shuffle(ways)
            found = []
            for way, headers in enumerate(ways):
                # What the first one computes, the second one must not find.
                ids = [*prefix[:kept], *prompt_ids(more, 100 + 50 * seed + 2 * number + way)]
                body = {**fields, prompt: ids}
                found.append(await life(router, body, headers, kept))
            for first, second in zip(*found, strict=True):
                assert first == second, (ways, number)
    await router.until_idle()


async def test_what_is_said_of_where_it_may_go_is_left_to_python(router: RouterProcess) -> None:
    """The core does not read it."""
    async with engines(2, has_events=True) as stubs, router.serving(*stubs):
        await until_core(router, stubs[0])
        body = {"model": stubs[0].model, "token_ids": prompt_ids(64, 7)}
        for more in (
            {"replicas": [stubs[1].name]},
            {"avoid": [stubs[0].name]},
            {"session_id": "s"},
            {"cache_salt": "s"},
        ):
            found = await reserve(router, {**body, **more})
            assert not is_of_core(await logged(router)), more
            assert found["replica"] == stubs[1].name or not {"replicas", "avoid"} & set(more)
            await end(router, found)
    await router.until_idle()


async def test_a_gateway_may_name_its_reservation(router: RouterProcess) -> None:
    """A name is one reservation's, whoever has made it, until that is over."""
    async with engines(1, has_events=True) as (stub,), router.serving(stub):
        await until_core(router, stub)
        body = {"model": stub.model, "token_ids": prompt_ids(64, 8), "selection_id": "a.b:c-1_"}
        for first, second in (({}, BY_PYTHON), (BY_PYTHON, {}), ({}, {})):
            found = await reserve(router, body, first)
            assert found["selection_id"] == "a.b:c-1_"
            assert is_of_core(await logged(router)) == (not first)
            again = await router.post(PATH, body, second)
            assert (again.status, again.error["code"]) == (409, "reservation_exists")
            assert (await end(router, found)).status == 200
            assert (await end(router, found)).status == 404
    await router.until_idle()


async def test_a_reservation_is_known_to_whoever_asks_next(router: RouterProcess) -> None:
    """The core tells of it in a batch, and a gateway may be quicker than that."""
    async with engines(1, has_events=True) as (stub,), router.serving(stub):
        await until_core(router, stub)
        body = {"model": stub.model, "token_ids": prompt_ids(64, 8)}
        for _ in range(20):
            many = await asyncio.gather(*(reserve(router, body) for _ in range(8)))
            answers = await asyncio.gather(*(end(router, found) for found in many))
            assert [answer.status for answer in answers] == [200] * 8
        assert (await booked(router))["kvroute_reservations"] == 0
        now = await router.metrics()
        counted = now.sum("kvroute_request_ends_total", end="completed")
        assert counted >= 160
    await router.until_idle()


async def test_a_wrong_report_is_refused_and_changes_nothing(router: RouterProcess) -> None:
    """The core leaves it to Python, which says what is wrong."""
    async with engines(1, has_events=True) as (stub,), router.serving(stub):
        await until_core(router, stub)
        found = await reserve(router, {"model": stub.model, "token_ids": prompt_ids(64, 8)})
        for wrong in (b"[]", {"tokens": -1}, {"outcome": "lost"}, {"status": 99}, {"usage": 7}):
            refused = await end(router, found, wrong)
            assert (refused.status, refused.error["type"]) == (400, "invalid_request_error"), wrong
        assert (await booked(router))["kvroute_in_flight_prefill_tokens"] == 64
        assert (await end(router, found, {"outcome": "client_left"})).status == 200
        assert (await report(router, found, "output", {"tokens": 1})).status == 404
        entry = await logged(router)
        assert (entry["end"], entry["first_byte_ms"]) == ("client_left", None)
    await router.until_idle()


async def test_the_bound_holds_for_both_together() -> None:
    """Neither may fill the memory."""
    with router_process(BOUNDED) as router:
        async with engines(1, has_events=True) as (stub,), router.serving(stub):
            await until_core(router, stub)
            body = {"model": stub.model, "token_ids": prompt_ids(64, 9)}
            made = [await reserve(router, body, way) for way in ({}, BY_PYTHON, {})]
            for way in ({}, BY_PYTHON):
                refused = await router.post(PATH, body, way)
                assert (refused.status, refused.error["code"]) == (503, "overloaded")
            for each in made:
                assert (await end(router, each)).status == 200
            await end(router, await reserve(router, body))
            assert is_of_core(await logged(router))


async def test_the_silent_expire_whoever_has_reserved() -> None:
    """Neither may hold its load for ever."""
    with router_process(HASTY) as router:
        async with engines(1, has_events=True) as (stub,), router.serving(stub):
            await until_core(router, stub)
            while (await booked(router))["kvroute_reservations"]:
                await asyncio.sleep(0.02)
            before = (await router.metrics()).sum("kvroute_reservation_ends_total", end="expired")
            body = {"model": stub.model, "token_ids": prompt_ids(64, 9)}
            made = [await reserve(router, body, way) for way in ({}, BY_PYTHON, {})]
            while (await booked(router))["kvroute_reservations"]:
                await asyncio.sleep(0.02)
            now = await router.metrics()
            assert now.sum("kvroute_reservation_ends_total", end="expired") == before + 3
            assert [(await end(router, each)).status for each in made] == [404] * 3
            assert (await booked(router))["kvroute_in_flight_prefill_tokens"] == 0
            await end(router, await reserve(router, body))
            assert is_of_core(await logged(router))


async def test_a_removed_replica_ends_what_the_core_has_reserved_there(
    router: RouterProcess,
) -> None:
    """Its gateway may never come back to say so."""
    async with engines(1, has_events=True) as (stub,):
        async with router.serving(stub):
            await until_core(router, stub)
            before = (await router.metrics()).sum(
                "kvroute_reservation_ends_total", end="replica_gone"
            )
            found = await reserve(router, {"model": stub.model, "token_ids": prompt_ids(64, 8)})
        await router.until_idle()
        assert (await report(router, found, "prefill_complete")).status == 404
        now = await router.metrics()
        assert now.sum("kvroute_reservation_ends_total", end="replica_gone") == before + 1


async def test_a_failure_counts_against_the_replica(router: RouterProcess) -> None:
    """The gateway is who sees that nothing listens there."""
    async with engines(1, has_events=True) as (stub,), router.serving(stub):
        await until_core(router, stub)
        found = await reserve(router, {"model": stub.model, "token_ids": prompt_ids(64, 8)})
        assert is_of_core(await logged(router))
        await end(router, found, {"outcome": "failed", "failure": "connect"})
        entry = await logged(router)
        assert (entry["last_failure"], entry["end"]) == ("connect", "no_replica")
        now = await router.metrics()
        assert now.sum("kvroute_retries_total", replica=stub.name, reason="connect") == 1
    await router.until_idle()


def counted(now: Metrics) -> dict[str, float]:
    """What is counted of reservations that were served whole and report what was cached."""
    names = (
        *("kvroute_requests_total", "kvroute_predictions_total"),
        *("kvroute_admission_predictions_total", "kvroute_actual_cached_tokens_total"),
        *("kvroute_compared_prompt_tokens_total", "kvroute_time_to_first_byte_seconds_count"),
        *("kvroute_request_seconds_count", "kvroute_routing_seconds_count"),
        "kvroute_prediction_error_tokens_count",
    )
    ends = {
        name: now.sum(name, end="completed")
        for name in ("kvroute_request_ends_total", "kvroute_reservation_ends_total")
    }
    return {**{name: now.sum(name) for name in names}, **ends}


async def test_many_that_end_in_a_moment_are_counted_and_few_are_told_of(
    router: RouterProcess,
) -> None:
    """Nothing may be missing from the metrics because it was summed up on its way there."""
    many, cached = 200, 32
    async with engines(2, has_events=True) as stubs, router.serving(*stubs):
        await until_core(router, stubs[0])
        body = {"model": stubs[0].model, "token_ids": prompt_ids(64, 12)}
        last = (await logged(router))["number"]
        before = counted(await router.metrics())
        burst = b""
        for number in range(many):
            name = f"burst-{number}"
            burst += request_bytes("POST", PATH, encoded({**body, "selection_id": name}))
            burst += request_bytes("POST", f"/reservations/{name}/prefill_complete")
            usage = {"tokens": 2, "cached_tokens": cached}
            burst += request_bytes("DELETE", f"/reservations/{name}", encoded(usage))
        async with connect(router.port) as client:
            await client.write(burst)
            for _ in range(3 * many):
                assert (await client.read_answer()).status == 200
        await router.until_idle()
        after = counted(await router.metrics())
        found = {name: after[name] - before[name] for name in after}
        assert found.pop("kvroute_actual_cached_tokens_total") == many * cached
        assert found.pop("kvroute_compared_prompt_tokens_total") == many * 64
        assert found == dict.fromkeys(found, many)
        assert 0 < (await logged(router))["number"] - last < many
        assert set((await booked(router)).values()) == {0}


async def test_what_the_core_keeps_to_itself_is_shown_to_whoever_looks(
    router: RouterProcess,
) -> None:
    """Operators look for the request that hangs, with all that its gateway has said."""
    async with engines(1, has_events=True) as (stub,), router.serving(stub):
        await until_core(router, stub)
        body = {"model": stub.model, "token_ids": prompt_ids(64, 13)}
        waiting, running = [await reserve(router, body) for _ in range(2)]
        await report(router, running, "prefill_complete")
        await report(router, running, "output", {"tokens": 7})
        entries = (await router.get("/requests?limit=2")).json["requests"]
        assert [each["end"] for each in entries] == [None, None]
        assert sorted(each["first_byte_ms"] is not None for each in entries) == [False, True]
        assert (await booked(router))["kvroute_in_flight_decodes"] == 1
        for found in (waiting, running):
            assert (await end(router, found, {"tokens": 1})).status == 200
        entries = (await router.get("/requests?limit=2")).json["requests"]
        assert [each["end"] for each in entries] == ["completed", "completed"]
    await router.until_idle()


async def test_a_report_that_only_python_reads_finds_what_was_said_before_it(
    router: RouterProcess,
) -> None:
    """The core kept that to itself until then."""
    async with engines(1, has_events=True) as (stub,), router.serving(stub):
        await until_core(router, stub)
        found = await reserve(router, {"model": stub.model, "token_ids": prompt_ids(64, 14)})
        assert (await report(router, found, "output", {"cached_tokens": 48})).status == 200
        assert (await end(router, found, {"a field": "of another version"})).status == 200
        entry = await logged(router)
        assert is_of_core(entry)
        assert (entry["actual"], entry["end"], entry["status"]) == (48, "completed", 200)
        assert entry["first_byte_ms"] < entry["total_ms"]
        assert (await end(router, found)).status == 404
    await router.until_idle()
