"""Gateways that send requests themselves: they ask where, and report what became of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from tests.support.engine_stub import Exchange, answer, engines, prompt_ids, unique
from tests.support.http_client import ask, connect
from tests.support.router_process import QUICK_HEALTH, RouterProcess, router_process
from tests.support.waiting import eventually

ALICE = {"authorization": "Bearer alice-key"}
BOB = {"authorization": "Bearer bob-key"}
IDLE_S = 5.0
"""Many times what passes between two reports on a busy machine."""
KEYS = {
    "health": QUICK_HEALTH,
    "server": {
        "clients_see_hits": True,
        "client_api_keys": [
            {"name": "alice", "key": "alice-key", "cache_salt": "of-alice", "max_in_flight": 2},
            {"name": "bob", "key": "bob-key", "models": ["bobs-*"]},
        ],
    },
    "doors": {"max_reservations": 3, "reservation_idle_s": IDLE_S},
}


@pytest.fixture(scope="module")
def router() -> Iterator[RouterProcess]:
    with router_process({"health": QUICK_HEALTH}) as process:
        yield process


@pytest.fixture(scope="module")
def locked() -> Iterator[RouterProcess]:
    """A router with keys, room for three reservations, and little patience."""
    with router_process(KEYS) as process:
        yield process


async def reserve(
    router: RouterProcess, body: dict[str, Any], headers: dict[str, str] | None = None
) -> dict[str, Any]:
    answer = await router.post("/select_and_reserve", body, headers)
    assert answer.status == 200, answer.body
    found: dict[str, Any] = answer.json
    return found


async def end(
    router: RouterProcess,
    reservation: dict[str, Any],
    report: dict[str, Any] | None = None,
    headers: dict[str, str] | None = None,
) -> None:
    path = f"/reservations/{reservation['selection_id']}"
    answer = await ask(router.port, "DELETE", path, report or b"", headers)
    assert answer.status == 200, answer.body


async def held(router: RouterProcess) -> float:
    return (await router.metrics()).sum("kvroute_reservations")


# --- a decision -----------------------------------------------------------------------------------


async def test_a_selection_says_where_and_why_and_books_nothing(router: RouterProcess) -> None:
    """A gateway needs an address it can connect to, not an id of ours."""
    async with engines(2, has_events=True) as stubs, router.serving(*stubs):
        holder, ids = stubs[1], prompt_ids(80, 1)
        holder.store(ids)
        await router.until_applied(holder)
        answer = await router.post("/select", {"model_name": holder.model, "token_ids": [*ids, 7]})
        found = answer.json
        assert answer.status == 200, found
        assert (found["replica"], found["endpoint"]) == (holder.name, holder.url)
        assert found["address"] == f"127.0.0.1:{holder.port}"
        assert found["overlap"] == {
            "longest_matched": 80,
            "gpu": 80,
            "dp": {"0": 80},
            "cpu": 80,
            "disk": 80,
        }
        assert (found["isl_tokens"], found["effective_prefill_tokens"]) == (81, 1)
        assert (found["expected_tokens"], found["block_size"]) == (80, 16)
        assert [group["tokens"] for group in found["groups"][0]] == [80]
        assert "headers" not in found
        await router.until_idle()
        assert await held(router) == 0


async def test_a_reservation_is_load_until_it_is_ended(router: RouterProcess) -> None:
    """Without it a gateway's next question would be answered as if nothing had been sent."""
    async with engines(2) as stubs, router.serving(*stubs):
        model = stubs[0].model
        first, second = [
            await reserve(router, {"model": model, "token_ids": prompt_ids(4000, seed)})
            for seed in (2, 20_000)
        ]
        assert {first["replica"], second["replica"]} == {stub.name for stub in stubs}
        now = await router.metrics()
        assert now.sum("kvroute_in_flight_prefill_tokens", replica=first["replica"]) == 4000
        path = f"/reservations/{first['selection_id']}"
        assert (await router.post(f"{path}/prefill_complete")).status == 200
        assert (await router.post(f"{path}/output", {"tokens": 12})).status == 200
        now = await router.metrics()
        assert now.sum("kvroute_in_flight_prefill_tokens", replica=first["replica"]) == 0
        assert now.sum("kvroute_in_flight_decodes", replica=first["replica"]) == 1
        await end(router, first)
        await end(router, second, {"outcome": "client_left"})
        await router.until_idle()
        now = await router.metrics()
        assert now.sum("kvroute_reservations") == 0
        assert now.sum("kvroute_reservation_ends_total", end="completed") >= 1
        assert now.sum("kvroute_reservation_ends_total", end="client_left") >= 1
        logged = (await router.get("/requests?limit=2")).json["requests"]
        assert {entry["path"] for entry in logged} == {"/select_and_reserve"}
        assert {entry["end"] for entry in logged} == {"completed", "client_left"}


async def test_only_and_avoid_restrict_the_choice(router: RouterProcess) -> None:
    """A gateway can reach some replicas only, and tries another one after a failure."""
    async with engines(3) as stubs, router.serving(*stubs):
        ids, (one, two, three) = prompt_ids(64, 3), stubs
        body: dict[str, Any] = {"model": one.model, "token_ids": ids}
        for wanted in ({"replicas": [two.name]}, {"replicas": [two.url]}):
            assert (await router.post("/select", {**body, **wanted})).json["replica"] == two.name
        by_address = {"replicas": [f"127.0.0.1:{two.port}"], "avoid": []}
        chosen = (await router.post("/select", {**body, **by_address})).json
        assert chosen["replica"] == two.name
        by_number = {"allowed_worker_ids": [chosen["worker_id"]]}
        assert (await router.post("/select", {**body, **by_number})).json["replica"] == two.name
        avoiding = {"avoid": [one.name, three.url]}
        assert (await router.post("/select", {**body, **avoiding})).json["replica"] == two.name
        refused = await router.post("/select", {**body, "replicas": ["10.0.0.9:1"]})
        assert (refused.status, refused.error["code"]) == (503, "no_replica")
        # Others do serve the model.
        assert "none that the request may go to serves it" in refused.error["message"]


async def test_a_selection_can_be_reserved_later_once(router: RouterProcess) -> None:
    """A gateway may look before it books."""
    async with engines(1) as (stub,), router.serving(stub):
        name = unique("selection")
        body = {"model": stub.model, "token_ids": prompt_ids(64, 4), "selection_id": name}
        assert (await router.post("/select", body)).json["selection_id"] == name
        answer = await router.post("/reservations", {"selection_id": name})
        assert answer.status == 201
        assert answer.json["selection_id"] == name
        again = await router.post("/reservations", {"selection_id": name})
        assert (again.status, again.error["code"]) == (404, "reservation_not_found")
        same = await router.post("/select_and_reserve", body)
        assert (same.status, same.error["code"]) == (409, "reservation_exists")
        await end(router, answer.json)
        gone = await ask(router.port, "DELETE", f"/reservations/{name}")
        assert (gone.status, gone.error["code"]) == (404, "reservation_not_found")


async def test_a_selection_is_not_booked_where_the_replica_was_drained_since(
    router: RouterProcess,
) -> None:
    """An operator who drains a replica waits for its last request: there must be no new one."""
    async with engines(1) as (stub,), router.serving(stub):
        name = unique("selection")
        body = {"model": stub.model, "token_ids": prompt_ids(64, 4), "selection_id": name}
        assert (await router.post("/select", body)).status == 200
        assert (await router.post(f"/replicas/{stub.name}/drain", {})).status == 200
        refused = await router.post("/reservations", {"selection_id": name})
        assert (refused.status, refused.error["code"]) == (503, "no_replica")
        assert "draining" in refused.error["message"]
        assert (await router.metrics()).sum("kvroute_reservations") == 0


async def test_a_refusal_with_503_is_a_failure_of_the_last_minute() -> None:
    """A router that refuses everything must not look as if nothing failed."""
    with router_process({"health": QUICK_HEALTH}) as router:
        async with engines(1) as (stub,), router.serving(stub):
            body = {"model": stub.model, "token_ids": [1], "replicas": ["10.0.0.9:1"]}
            assert (await router.post("/select", body)).status == 503
            assert (await router.get("/overview")).json["minute"]["failed"] == 1
            assert (await router.post("/select", {**body, "model": "no-such"})).status == 404
            assert (await router.get("/overview")).json["minute"]["failed"] == 1


async def test_a_request_sent_elsewhere_can_be_booked_where_it_went(router: RouterProcess) -> None:
    """A gateway with a mind of its own still makes its load known."""
    async with engines(2) as stubs, router.serving(*stubs):
        body = {"model": stubs[0].model, "token_ids": prompt_ids(64, 5), "replica": stubs[1].name}
        answer = await router.post("/reservations", body)
        assert answer.json["replica"] == stubs[1].name
        await end(router, answer.json)


# --- what becomes of it ---------------------------------------------------------------------------


async def test_the_report_is_compared_with_the_prediction(router: RouterProcess) -> None:
    """Predicted beside actual is what exposes a wrong tokenizer, through a gateway as well."""
    async with engines(1, has_events=True) as (stub,), router.serving(stub):
        ids = prompt_ids(80, 6)
        stub.store(ids)
        await router.until_applied(stub)
        found = await reserve(router, {"model": stub.model, "token_ids": [*ids, 7]})
        usage = {"prompt_tokens": 81, "prompt_tokens_details": {"cached_tokens": 64}}
        await end(router, found, {"usage": usage})
        short = await reserve(router, {"model": stub.model, "token_ids": [*ids, 7]})
        await end(router, short, {"cached_tokens": 80})
        logged = (await router.get("/requests?limit=2")).json["requests"]
        found_out = [(each["predicted"]["cached_tokens"], each["actual"]) for each in logged]
        assert found_out == [(80, 80), (80, 64)]


async def test_what_fails_counts_against_the_replica(router: RouterProcess) -> None:
    """The gateway is who sees that nothing listens there."""
    async with engines(1) as (stub,), router.serving(stub):
        body = {"model": stub.model, "token_ids": prompt_ids(64, 7)}
        found = await reserve(router, body)
        await end(router, found, {"outcome": "failed", "failure": "connect"})
        now = await router.metrics()
        assert now.sum("kvroute_retries_total", replica=stub.name, reason="connect") == 1
        assert now.sum("kvroute_reservation_ends_total", end="failed") >= 1
        await router.until_idle()


async def test_a_removed_replica_ends_what_is_reserved_there(router: RouterProcess) -> None:
    """Its gateway may never come back to say so."""
    async with engines(1) as (stub,):
        async with router.serving(stub):
            found = await reserve(router, {"model": stub.model, "token_ids": prompt_ids(64, 8)})
        await router.until_idle()
        gone = await router.post(f"/reservations/{found['selection_id']}/prefill_complete")
        assert gone.status == 404
        assert (await router.metrics()).sum("kvroute_reservation_ends_total", end="replica_gone")


# --- keys and limits ------------------------------------------------------------------------------


async def test_a_silent_gateway_loses_its_reservations(locked: RouterProcess) -> None:
    """One that was killed would hold its load for ever; one that reports keeps it."""
    async with engines(1) as (stub,), locked.serving(stub):
        body = {"model": stub.model, "token_ids": prompt_ids(64, 9)}
        kept, lost = [await reserve(locked, body, ALICE) for _ in range(2)]
        path = f"/reservations/{kept['selection_id']}/output"

        async def is_lost() -> bool:
            assert (await locked.post(path, {"tokens": 1}, ALICE)).status == 200
            return await held(locked) == 1

        while not await is_lost():
            await asyncio.sleep(0.05)
        gone = await locked.delete(f"/reservations/{lost['selection_id']}", ALICE)
        assert gone.status == 404
        await end(locked, kept, headers=ALICE)
        assert (await locked.metrics()).sum("kvroute_reservation_ends_total", end="expired") == 1


async def test_reservations_are_their_keys_own_and_count_for_its_limits(
    locked: RouterProcess,
) -> None:
    """Nobody ends, or outlives, what another one has booked."""
    async with engines(1) as (stub,), locked.serving(stub):
        body = {"model": stub.model, "token_ids": prompt_ids(64, 10)}
        assert (await locked.post("/select_and_reserve", body)).status == 401
        not_his = await locked.post("/select_and_reserve", body, BOB)
        assert (not_his.status, not_his.error["code"]) == (403, "model_not_allowed")
        first, second = [await reserve(locked, body, ALICE) for _ in range(2)]
        assert first["body_fields"]["cache_salt"], "the engine must salt as the router did"
        third = await locked.post("/select_and_reserve", body, ALICE)
        assert third.status == 429
        foreign = await locked.delete(f"/reservations/{first['selection_id']}", BOB)
        assert foreign.status == 404
        await end(locked, first, headers=ALICE)
        await end(locked, await reserve(locked, body, ALICE), headers=ALICE)
        await end(locked, second, headers=ALICE)


async def test_there_are_no_more_reservations_than_may_be() -> None:
    """A gateway that never ends any must not fill the memory."""
    config = {"health": QUICK_HEALTH, "doors": {"max_reservations": 3}}
    with router_process(config) as router:
        async with engines(1) as (stub,), router.serving(stub):
            body = {"model": stub.model, "token_ids": prompt_ids(64, 11)}
            made = [await reserve(router, body) for _ in range(3)]
            refused = await router.post("/select_and_reserve", body)
            assert (refused.status, refused.error["code"]) == (503, "overloaded")
            assert int(refused.headers["retry-after"]) > 0
            for each in made:
                await end(router, each)
            await end(router, await reserve(router, body))


async def test_who_finds_no_room_waits_for_an_end() -> None:
    """The queue is one, whoever sends; a gateway that leaves it books nothing."""
    config = {"health": QUICK_HEALTH, "overload": {"max_in_flight": 1}}
    with router_process(config) as router:
        async with engines(1) as (stub,), router.serving(stub):
            body = {"model": stub.model, "token_ids": prompt_ids(64, 12)}
            first = await reserve(router, body)

            async def waiting() -> float:
                return (await router.metrics()).sum("kvroute_queue_requests")

            second = asyncio.create_task(reserve(router, body))
            while await waiting() < 1:
                assert not second.done()
            async with connect(router.port) as impatient:
                await impatient.send("POST", "/select_and_reserve", body)
                while await waiting() < 2:
                    pass
                impatient.leave()
            while await waiting() > 1:
                pass
            assert not second.done()
            await end(router, first)
            await end(router, await second)
            await router.until_idle()
            assert await held(router) == 0


# --- attacks --------------------------------------------------------------------------------------

BAD = (
    b"",
    b"[]",
    b"{",
    b"\xff",
    b'{"token_ids": {"a": 1}}',
    b'{"token_ids": [1], "selection_id": "a b"}',
    b'{"token_ids": [1], "selection_id": ""}',
    b'{"token_ids": [1], "replicas": "all"}',
    b'{"token_ids": [1], "dp_rank": -1}',
    b'{"token_ids": [-1]}',
    b'{"token_ids": [1], "allowed_worker_ids": [1.5]}',
    b'{"token_ids": [1], "avoid": [' + b'"a",' * 2000 + b'"a"]}',
    b'{"replica": 7}',
)


@pytest.mark.parametrize("path", ["/select_and_reserve", "/reservations"])
async def test_who_leaves_before_it_is_decided_books_nothing(
    router: RouterProcess, path: str
) -> None:
    """Its end of the reservation comes before there is one, and would be its last word."""
    async with engines(1) as (stub,), router.serving(stub):
        asked, go = asyncio.Event(), asyncio.Event()

        async def tokenize(exchange: Exchange) -> None:
            asked.set()
            await exchange.wait(go)
            await answer(exchange)

        stub.tokenizing = tokenize
        async with connect(router.port) as gateway:
            body = {"model": stub.model, "prompt": "to be tokenised", "selection_id": unique("r")}
            if path == "/reservations":
                body["replica"] = stub.name
            await gateway.send("POST", path, body)
            await eventually(asked.is_set, "its prompt is being tokenised")
        early = await ask(router.port, "DELETE", f"/reservations/{body['selection_id']}")
        assert early.status == 404
        go.set()
        await router.until(
            lambda now: not now.sum("kvroute_requests_under_way"), "nothing is being decided"
        )
        assert await held(router) == 0


@pytest.mark.parametrize("path", ["/select", "/select_and_reserve", "/reservations"])
async def test_bad_questions_are_refused_and_book_nothing(router: RouterProcess, path: str) -> None:
    """Whatever comes, the answer names the place and the rule."""
    async with engines(1) as (stub,), router.serving(stub):
        for body in BAD:
            answer = await router.post(path, body)
            assert answer.status == 400, (body[:60], answer.body)
            assert answer.error["type"] == "invalid_request_error"
        assert await held(router) == 0


@pytest.mark.parametrize(
    "body",
    [b'{"tokens": -1}', b'{"tokens": 1e300}', b'{"usage": 7}', b"[", b"x" * 70_000, b"\xff"],
)
async def test_bad_reports_change_nothing(router: RouterProcess, body: bytes) -> None:
    """A broken gateway must not spoil the books."""
    async with engines(1) as (stub,), router.serving(stub):
        found = await reserve(router, {"model": stub.model, "token_ids": prompt_ids(64, 13)})
        path = f"/reservations/{found['selection_id']}"
        for method, target in (("POST", f"{path}/output"), ("DELETE", path)):
            answer = await ask(router.port, method, target, body)
            assert answer.status in (400, 413), answer.body
        assert await held(router) == 1
        await end(router, found)


async def test_reports_of_any_order_and_number_leave_nothing_behind(router: RouterProcess) -> None:
    """Gateways repeat, forget and cross their reports."""
    async with engines(2) as stubs, router.serving(*stubs):
        random = Random(5)
        body = {"model": stubs[0].model, "token_ids": prompt_ids(256, 14)}
        for _ in range(20):
            path = f"/reservations/{(await reserve(router, body))['selection_id']}"
            for _ in range(random.randrange(5)):
                step = random.choice(["/prefill_complete", "/output", "/output_block"])
                assert (
                    await router.post(path + step, {"tokens": random.randrange(9)})
                ).status == 200
            report = random.choice([{}, {"outcome": "failed"}, {"status": 500}, {"tokens": 3}])
            assert (await ask(router.port, "DELETE", path, report)).status == 200
            assert (await ask(router.port, "DELETE", path)).status == 404
        await router.until_idle()
        router.check_log()
