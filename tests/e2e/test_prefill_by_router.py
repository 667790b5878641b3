"""The router has prompts computed by other replicas, and hands their caches over by itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.engine_stub import (
    Behaviour,
    EngineStub,
    Exchange,
    after,
    always,
    answer,
    engines,
    hang,
    hang_up,
    prompt_ids,
    refusing,
    unique,
)
from tests.support.http_client import connect
from tests.support.nixl_engines import FIELD, Handover, either
from tests.support.router_process import QUICK_HEALTH, RouterProcess, router_process

LEAST = 64
CONFIG: dict[str, Any] = {
    "health": QUICK_HEALTH,
    "prefill": {"min_uncached_tokens": LEAST, "handed_over_by": "router"},
}


@pytest.fixture(scope="module")
def router() -> Iterator[RouterProcess]:
    with router_process(CONFIG) as process:
        yield process


@dataclass(frozen=True)
class Pair:
    """One replica that computes prompts, and two that respond."""

    router: RouterProcess
    prefiller: EngineStub
    decoders: list[EngineStub]
    handover: Handover = field(default_factory=Handover)

    @property
    def model(self) -> str:
        return self.prefiller.model

    def body(self, seed: int, **more: Any) -> dict[str, Any]:
        return {"model": self.model, "prompt": prompt_ids(320, seed), **more}

    @property
    def asked(self) -> list[Any]:
        """The bodies that the replicas which respond have got."""
        return [each.json for stub in self.decoders for each in stub.requests]

    async def logged(self) -> dict[str, Any]:
        """The request in the log, once nothing is booked any more."""
        await self.router.until_idle()
        (logged,) = (await self.router.get("/requests?limit=1")).json["requests"]
        return dict(logged)


@contextlib.asynccontextmanager
async def pair_of(router: RouterProcess, **options: Any) -> AsyncIterator[Pair]:
    model = unique("pair")
    async with (
        engines(1, model=model, has_events=True) as (prefiller,),
        engines(2, model=model, has_events=True) as decoders,
        router.serving(prefiller, role="prefill", **options),
        router.serving(*decoders, role="decode"),
    ):
        pair = Pair(router, prefiller, list(decoders))
        prefiller.behaviour = pair.handover.prefill
        for stub in decoders:
            stub.behaviour = pair.handover.decode
        yield pair


BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"max_tokens": 9, "min_tokens": 4},
    "/v1/chat/completions": {"max_completion_tokens": 9},
    "/v1/messages": {"max_tokens": 9},
    "/v1/responses": {"max_output_tokens": 9, "store": False},
    "/inference/v1/generate": {"sampling_params": {"max_tokens": 9, "min_tokens": 2}},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_a_prompt_is_computed_at_one_replica_and_its_response_at_another(
    router: RouterProcess, path: str, stream: bool
) -> None:
    """With nothing before the engines: what vLLM's `NixlConnector` needs goes from one to the
    other, at each path where vLLM reads it, and all that the client has set reaches the second."""
    async with pair_of(router) as pair:
        body: dict[str, Any] = {"model": pair.model, "stream": stream, **BODIES[path]}
        if path == "/inference/v1/generate":
            body["token_ids"] = prompt_ids(320, 1)
        elif path == "/v1/completions":
            body["prompt"] = prompt_ids(320, 1)
        elif path == "/v1/responses":
            body["input"] = "x" * 320
        else:
            body["messages"] = [{"role": "user", "content": "x" * 320}]
        if stream and path == "/v1/completions":
            body["stream_options"] = {"include_usage": True}
        response = await router.post(path, body)
        assert response.status == 200, response.body
        (computed,) = (each for each in pair.prefiller.requests if each.path == path)
        (served,) = (each for stub in pair.decoders for each in stub.requests if each.path == path)
        assert pair.handover.held == {}
        (name,) = pair.handover.fetched
        assert name.startswith(response.headers["x-request-id"])
        assert served.headers["x-request-id"] == computed.headers["x-request-id"]
        assert "x-prefiller-host-port" not in served.headers
        assert {**served.json, FIELD: None} == {**body, FIELD: None}
        assert response.headers["x-kv-replica"] in {each.name for each in pair.decoders}


async def test_both_predictions_are_compared(router: RouterProcess) -> None:
    """What the prefiller has cached is known, and it says what it had. The other's report is of
    what it was given."""
    async with pair_of(router) as pair:
        ids = prompt_ids(320, 2)
        pair.prefiller.store(ids)
        await router.until_applied(pair.prefiller)
        body = {"model": pair.model, "prompt": [*ids, *prompt_ids(100, 3)]}
        assert (await router.post("/v1/completions", body)).status == 200
        logged = await pair.logged()
        assert logged["prefiller"] == pair.prefiller.name
        assert logged["prefiller_cached_tokens"] == logged["prefiller_actual_tokens"] == 320
        assert logged["actual"] is None
        metrics = await router.metrics()
        name = pair.prefiller.name
        assert metrics.sum("kvroute_predictions_total", replica=name, outcome="exact") == 1


async def test_a_store_that_the_engines_share_needs_no_word(router: RouterProcess) -> None:
    """Then the prefiller says nothing of its cache, and the other finds it by its content."""
    async with pair_of(router) as pair:
        pair.prefiller.behaviour = answer
        body = pair.body(4)
        assert (await router.post("/v1/completions", body)).status == 200
        assert len(pair.prefiller.requests) == 1
        assert pair.asked == [body]
        assert (await pair.logged())["prefiller"] == pair.prefiller.name


FAULTS: dict[str, Behaviour] = {
    "closes": hang_up,
    "500": refusing("500 Internal Server Error"),
    "503": refusing("503 Service Unavailable"),
    "429": refusing("429 Too Many Requests"),
    "404": refusing("404 Not Found"),
    "no JSON": always(b"<html>"),
    "no object": always(b'{"kv_transfer_params": [1]}'),
    "null": always(b'{"kv_transfer_params": null}'),
    "endless": always(b" " * (17 << 20)),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_what_a_prefiller_fails_to_compute_is_computed_where_it_is_sent(
    router: RouterProcess, fault: str
) -> None:
    """The client sees nothing of it: the engine gets the request as it was. A response that names
    no cache is no failure, for engines may share a store."""
    async with pair_of(router) as pair:
        pair.prefiller.behaviour = FAULTS[fault]
        body = pair.body(5)
        assert (await router.post("/v1/completions", body)).status == 200
        assert pair.asked == [body]
        logged = await pair.logged()
        is_failure = fault not in ("no JSON", "no object", "null")
        assert (logged["prefiller"] is None) == is_failure
        assert logged["attempts"] == 1
        if is_failure:  # so its report is of its own cache
            assert logged["actual"] == 0


async def test_a_prefiller_that_dies_is_found_out(router: RouterProcess) -> None:
    """As any replica that closes its connections; others compute their prompts meanwhile."""
    async with pair_of(router) as pair:
        await pair.prefiller.stop()
        for number in range(3):
            body = pair.body(10 + number)
            assert (await router.post("/v1/completions", body)).status == 200
        await router.until(
            lambda now: not now.sum("kvroute_replica_healthy", replica=pair.prefiller.name),
            "unhealthy",
        )
        await router.until_idle()


async def test_no_request_waits_for_a_prefiller_that_does_not_respond(
    router: RouterProcess,
) -> None:
    """Its health checks fail long before its first byte is overdue."""
    async with pair_of(router) as pair:
        pair.prefiller.behaviour = hang
        body = pair.body(20)
        asking = asyncio.create_task(router.post("/v1/completions", body))
        await router.until(
            lambda now: now.sum("kvroute_in_flight_requests", replica=pair.prefiller.name) == 1,
            "under way",
        )
        pair.prefiller.silent_paths = ("/health",)
        assert (await asking).status == 200
        assert pair.asked == [body]
        await router.until_idle()
        pair.prefiller.silent_paths = ()


async def test_a_replica_that_fails_with_the_cache_of_another_is_replaced(
    router: RouterProcess,
) -> None:
    """The next one computes the prompt: what was handed over is for one engine only."""
    async with pair_of(router) as pair:
        for stub in pair.decoders:
            stub.behaviour = failing_once(pair)
        body = pair.body(30)
        response = await router.post("/v1/completions", body)
        assert response.status == 200
        first, second = sorted(pair.asked, key=lambda each: FIELD not in each)
        assert (first[FIELD]["do_remote_prefill"], second) == (True, body)
        logged = await pair.logged()
        assert (logged["attempts"], logged["prefiller"], logged["actual"]) == (2, None, 0)


async def test_a_client_that_leaves_ends_the_prompt_at_the_prefiller(
    router: RouterProcess,
) -> None:
    """Its connection is closed, so that its engine stops; and nobody else gets the request."""
    async with pair_of(router) as pair:
        pair.prefiller.behaviour = hang
        async with connect(router.port) as client:
            headers = {"content-type": "application/json"}
            await client.send("POST", "/v1/completions", pair.body(40), headers)
            await router.until(
                lambda now: now.sum("kvroute_in_flight_requests", replica=pair.prefiller.name) == 1,
                "under way",
            )
            client.leave()
        logged = await pair.logged()
        assert (logged["end"], logged["status"]) == ("client_left", None)
        while not pair.prefiller.left:
            await asyncio.sleep(0)
        assert pair.asked == []


async def test_a_prompt_counts_where_it_is_computed(router: RouterProcess) -> None:
    """Until that replica responds; then the other has a request without a prompt to compute."""
    async with pair_of(router) as pair:
        computed, responded = asyncio.Event(), asyncio.Event()
        pair.prefiller.behaviour = after(computed, pair.handover.prefill)
        for stub in pair.decoders:
            stub.behaviour = after(responded, pair.handover.decode)
        asking = asyncio.create_task(router.post("/v1/completions", pair.body(50)))

        def tokens(of: Any, stubs: list[EngineStub]) -> float:
            return float(
                sum(of.sum("kvroute_in_flight_prefill_tokens", replica=each.name) for each in stubs)
            )

        await router.until(lambda now: tokens(now, [pair.prefiller]) == 320, "at the prefiller")
        assert not tokens(await router.metrics(), pair.decoders)
        computed.set()
        await router.until(lambda now: not tokens(now, [pair.prefiller]), "computed")
        assert not tokens(await router.metrics(), pair.decoders)
        responded.set()
        assert (await asking).status == 200
        await router.until_idle()


async def test_a_client_cannot_name_a_cache_of_another(router: RouterProcess) -> None:
    """An engine connects wherever these fields say; what else the client says there stays."""
    async with pair_of(router) as pair:
        given = {"remote_host": "192.0.2.1", "do_remote_decode": False, "other": 1}
        body = pair.body(60, **{FIELD: given})
        assert (await router.post("/v1/completions", body)).status == 200
        (computed,) = pair.prefiller.requests
        assert computed.json[FIELD]["other"] == 1
        (served,) = pair.asked
        assert (served[FIELD]["remote_host"], served[FIELD]["other"]) == ("127.0.0.1", 1)
        assert b"192.0.2.1" not in computed.body


async def test_a_prefiller_has_a_key_of_its_own(router: RouterProcess) -> None:
    """Or the client's, if the router has none for it."""
    async with pair_of(router, api_key="of-the-prefiller") as pair:
        key = {"authorization": "Bearer of-the-client"}
        assert (await router.post("/v1/completions", pair.body(61), key)).status == 200
        assert pair.prefiller.requests[-1].headers["authorization"] == "Bearer of-the-prefiller"
    async with pair_of(router) as pair:
        assert (await router.post("/v1/completions", pair.body(62), key)).status == 200
        assert pair.prefiller.requests[-1].headers["authorization"] == "Bearer of-the-client"


async def test_replicas_that_do_both_compute_prompts_for_others(router: RouterProcess) -> None:
    """The same engine is asked for both, by its roles."""
    model, handover = unique("elastic"), Handover()
    async with (
        engines(1, model=model) as (both,),
        engines(1, model=model) as (decoder,),
        router.serving(both),
        router.serving(decoder, role="decode"),
    ):
        both.behaviour = decoder.behaviour = either(handover)
        for number in range(100):
            body = {"model": model, "prompt": prompt_ids(320, 70 + number)}
            assert (await router.post("/v1/completions", body)).status == 200
            if handover.fetched:
                break
        assert handover.fetched
        assert handover.held == {}
        await router.until_idle()


async def test_a_stopping_router_ends_what_is_being_computed_elsewhere() -> None:
    """Not after the time that responses get to end: nothing has begun."""
    with router_process({**CONFIG, "server": {"timeouts": {"shutdown_grace_s": 0.2}}}) as router:
        async with pair_of(router) as pair:
            pair.prefiller.behaviour = hang
            async with connect(router.port) as client:
                await client.send("POST", "/v1/completions", pair.body(80))
                await router.until(
                    lambda now: (
                        now.sum("kvroute_in_flight_requests", replica=pair.prefiller.name) == 1
                    ),
                    "under way",
                )
                await asyncio.to_thread(router.stop)


def failing_once(pair: Pair) -> Behaviour:
    """Close the connection of the first request that any of the pair gets."""

    async def behave(exchange: Exchange) -> None:
        if len(pair.asked) == 1:
            await hang_up(exchange)
        else:
            await pair.handover.decode(exchange)

    return behave
