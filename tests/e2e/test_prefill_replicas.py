"""Prompts are computed by other replicas than their responses, where roles say so: at every door,
through a real Envoy and a real router."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import grpc
import pytest
from async_timeout import timeout

from router.doors.messages import INDEXER_SERVICE, GetPodScoresRequest, GetPodScoresResponse
from tests.e2e.test_endpoint_picker import CONFIG, picker_of, post, until_unbooked
from tests.support import engine_stub
from tests.support.engine_stub import (
    EngineStub,
    Exchange,
    after,
    begun_until,
    engines,
    hang,
    prompt_ids,
    refusing,
    unique,
)
from tests.support.envoy import Envoy, envoy, needs_envoy
from tests.support.http_client import Answer, ask, connect
from tests.support.router_process import Metrics, RouterProcess, router_process
from tests.support.waiting import DEADLINE_S

pytestmark = needs_envoy
HEADER = "x-prefiller-host-port"
LEAST = 64
ROLES: dict[str, Any] = {**CONFIG, "prefill": {"min_uncached_tokens": LEAST}}
DOORS = ("proxy", "reservation", "FULL_DUPLEX_STREAMED", "BUFFERED")


@pytest.fixture(scope="module")
def router() -> Iterator[RouterProcess]:
    with router_process(ROLES) as process:
        yield process


@pytest.fixture(scope="module")
def gateways(router: RouterProcess) -> Iterator[dict[str, Envoy]]:
    with contextlib.ExitStack() as stack:
        picker = picker_of(router)
        yield {mode: stack.enter_context(envoy(picker, mode=mode)) for mode in DOORS[2:]}


@dataclass(frozen=True)
class Fleet:
    """Two replicas that compute prompts, and two that wait for them."""

    router: RouterProcess
    prefillers: list[EngineStub]
    decoders: list[EngineStub]

    @property
    def model(self) -> str:
        return self.decoders[0].model

    async def holds(self, stub: EngineStub, ids: list[int]) -> None:
        stub.store(ids)
        await self.router.until_applied(stub)


@contextlib.asynccontextmanager
async def fleet_of(router: RouterProcess, role: str = "decode") -> AsyncIterator[Fleet]:
    model = unique("split")
    async with (
        engines(2, model=model, has_events=True) as prefillers,
        engines(2, model=model, has_events=True) as decoders,
        router.serving(*prefillers, role="prefill"),
        router.serving(*decoders, role=role),
    ):
        yield Fleet(router, list(prefillers), list(decoders))
        assert not any(stub.requests for stub in prefillers)


def address_of(stub: EngineStub) -> str:
    return f"127.0.0.1:{stub.port}"


async def told(
    fleet: Fleet, gateways: dict[str, Envoy], door: str, ids: list[int], **more: Any
) -> str | None:
    """Who is to compute a prompt, as whoever serves the request is told by one door; nothing is
    booked any more."""
    router, body = fleet.router, {"model": fleet.model, "prompt": ids, **more}
    if door == "reservation":
        made = (await router.post("/select_and_reserve", body)).json
        await router.delete(f"/reservations/{made['selection_id']}")
        named = made.get("prefill", {}).get("address")
        assert made.get("headers", {}).get(HEADER) == named
        await until_unbooked(router)
        return None if named is None else str(named)
    before = {stub.name: len(stub.requests) for stub in fleet.decoders}
    served = await posted(fleet, gateways, door, body)
    assert served.status == 200, served.body
    (request,) = [each for stub in fleet.decoders for each in stub.requests[before[stub.name] :]]
    await until_unbooked(router)
    assert request.names.count(HEADER) <= 1
    return request.headers.get(HEADER)


@pytest.mark.parametrize("role", ["decode", "both"])
@pytest.mark.parametrize("door", DOORS)
async def test_a_long_prompt_is_computed_where_its_prefix_is(
    router: RouterProcess, gateways: dict[str, Envoy], door: str, role: str
) -> None:
    """The second decision is by the same index as the first; every sidecar is told in the same
    header."""
    async with fleet_of(router, role) as fleet:
        held = [prompt_ids(320, number) for number in (1, 2)]
        for stub, ids in zip(fleet.prefillers, held, strict=True):
            await fleet.holds(stub, ids)
        for number, stub in enumerate([*fleet.prefillers, *fleet.prefillers]):
            ids = [*held[number % 2], *prompt_ids(LEAST, 100 + number)]
            assert await told(fleet, gateways, door, ids) == address_of(stub)
            logged = (await router.get("/requests?limit=1")).json["requests"][0]
            assert logged["prefiller"] == stub.name
            assert logged["replica"] in {each.name for each in fleet.decoders}
            assert logged["actual"] is None, "what the response reports came from the prefiller"
        metrics = await router.metrics()
        for stub in fleet.prefillers:
            counted = "kvroute_requests_prefilled_elsewhere_total"
            assert metrics.sum(counted, model=fleet.model, replica=stub.name) == 2


@pytest.mark.parametrize("door", DOORS)
async def test_what_is_short_or_cached_is_computed_where_it_goes(
    router: RouterProcess, gateways: dict[str, Envoy], door: str
) -> None:
    """So does llm-d's decider: it counts what is left to compute at the replica that was chosen."""
    async with fleet_of(router) as fleet:
        assert await told(fleet, gateways, door, prompt_ids(LEAST - 1, 3)) is None
        cached = prompt_ids(320, 4)
        for stub in fleet.decoders:
            await fleet.holds(stub, cached)
        assert await told(fleet, gateways, door, [*cached, *prompt_ids(LEAST - 1, 5)]) is None
        assert await told(fleet, gateways, door, [*cached, *prompt_ids(LEAST, 6)]) is not None


async def test_equal_prompts_at_once_all_have_a_prefiller(router: RouterProcess) -> None:
    """An engine that waits for a prompt from elsewhere computes an equal one beside it, all of it;
    the prefiller computes it once."""
    async with fleet_of(router) as fleet:
        body = {"model": fleet.model, "prompt": prompt_ids(320, 15)}
        made = [(await router.post("/select_and_reserve", body)).json for _ in range(4)]
        assert len({each["prefill"]["replica"] for each in made}) == 1
        assert [each["prefill"]["effective_prefill_tokens"] >= 320 for each in made] == [
            True,
            False,
            False,
            False,
        ]
        for each in made:
            await router.delete(f"/reservations/{each['selection_id']}")
        await until_unbooked(router)


async def test_what_cannot_be_split_is_not(
    router: RouterProcess, gateways: dict[str, Envoy]
) -> None:
    """Engines recompute it where it goes, or more than one prompt would be handed over."""
    async with fleet_of(router) as fleet:
        for more in ({"n": 2}, {"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}):
            ids = prompt_ids(320, 7)
            assert await told(fleet, gateways, "proxy", ids, **more) is None, more
        batch: Any = [prompt_ids(320, 8), prompt_ids(320, 9)]
        assert await told(fleet, gateways, "proxy", batch) is None


@pytest.mark.parametrize("door", DOORS)
async def test_without_a_healthy_prefiller_there_is_none(
    router: RouterProcess, gateways: dict[str, Envoy], door: str
) -> None:
    """Then prompts are computed where they go, as without roles."""
    async with fleet_of(router) as fleet:
        ids, (drained, dead) = prompt_ids(320, 10), fleet.prefillers
        await router.post(f"/replicas/{drained.name}/drain")
        assert await told(fleet, gateways, door, ids) == address_of(dead)
        dead.health_status = "500 Internal Server Error"
        await router.until(
            lambda now: not now.sum("kvroute_replica_healthy", replica=dead.name), "unhealthy"
        )
        assert await told(fleet, gateways, door, ids) is None


@pytest.mark.parametrize("door", DOORS)
async def test_the_prompt_counts_at_the_prefiller_until_the_response_begins(
    router: RouterProcess, gateways: dict[str, Envoy], door: str
) -> None:
    """What is cached there does not count; and nothing of it counts where the response comes
    from."""
    async with fleet_of(router) as fleet:
        begins, ends = asyncio.Event(), asyncio.Event()
        for stub in fleet.decoders:
            stub.behaviour = after(begins, begun_until(ends))
        holder, ids = fleet.prefillers[0], prompt_ids(320, 11)
        await fleet.holds(holder, ids)
        body = {"model": fleet.model, "prompt": [*ids, *prompt_ids(100, 12)], "stream": True}
        served, path = None, ""
        if door == "reservation":
            made = (await router.post("/select_and_reserve", body)).json
            assert made["prefill"]["effective_prefill_tokens"] == 100
            path = f"/reservations/{made['selection_id']}"
        else:
            served = asyncio.create_task(posted(fleet, gateways, door, body))

        def is_booked(now: Metrics) -> bool:
            tokens = partial(now.sum, "kvroute_in_flight_prefill_tokens")
            assert not any(tokens(replica=stub.name) for stub in fleet.decoders)
            waiting = sum_at(now, "kvroute_in_flight_requests", fleet.decoders)
            return tokens(replica=holder.name) == 100 and waiting == 1

        await router.until(is_booked, "booked at both")
        begins.set()
        if door == "reservation":
            await router.post(f"{path}/prefill_complete")
        await router.until(
            lambda now: (
                not sum_at(now, "kvroute_in_flight_requests", fleet.prefillers)
                and sum_at(now, "kvroute_in_flight_decodes", fleet.decoders) == 1
            ),
            "the prompt is computed",
        )
        ends.set()
        if served is None:
            await router.delete(path)
        else:
            assert (await served).status == 200
        await until_unbooked(router)


@pytest.mark.parametrize("door", DOORS[1:])
async def test_a_request_that_ends_before_its_response_frees_the_prefiller(
    router: RouterProcess, gateways: dict[str, Envoy], door: str
) -> None:
    """However early its client leaves."""
    async with fleet_of(router) as fleet:
        for stub in fleet.decoders:
            stub.behaviour = hang
        body = {"model": fleet.model, "prompt": prompt_ids(320, 13)}
        if door == "reservation":
            made = (await router.post("/select_and_reserve", body)).json
            await router.until(lambda now: tokens_at(now, fleet) == 320, "booked")
            path = f"/reservations/{made['selection_id']}"
            ended = await ask(router.port, "DELETE", path, {"outcome": "client_left"})
            assert ended.status == 200, ended.body
        else:
            async with connect(gateways[door].port) as client:
                headers = {"content-type": "application/json"}
                await client.send("POST", "/v1/completions", body, headers)
                await router.until(lambda now: tokens_at(now, fleet) == 320, "booked")
                client.leave()
        await until_unbooked(router)


async def test_a_retry_computes_its_prompt_where_it_goes(router: RouterProcess) -> None:
    """What failed may have been the prefiller: its sidecar passes that on. So the replica stays,
    and the prefiller is looked at."""
    async with fleet_of(router) as fleet:
        for stub in fleet.decoders:
            stub.behaviour = failing_split
        for stub in fleet.prefillers:
            stub.health_status = "500 Internal Server Error"
        for number in range(6):
            body = {"model": fleet.model, "prompt": prompt_ids(320, 20 + number)}
            answer = await router.post("/v1/completions", body)
            assert answer.status == 200, answer.body
        tries = [HEADER in each.headers for stub in fleet.decoders for each in stub.requests]
        assert tries.count(False) == 6
        assert tries.count(True) >= 1
        await router.until(
            lambda now: not sum_at(now, "kvroute_replica_healthy", fleet.prefillers), "looked at"
        )
        metrics = await router.metrics()
        assert not sum_at(metrics, "kvroute_replica_failures_total", fleet.decoders)
        await until_unbooked(router)


async def test_prefill_replicas_get_no_requests(router: RouterProcess) -> None:
    """Not at any door, and not where they are all there is."""
    model = unique("alone")
    async with (
        engines(1, model=model) as (stub,),
        router.serving(stub, role="prefill"),
    ):
        body = {"model": model, "prompt": prompt_ids(320, 30)}
        for path in ("/v1/completions", "/route", "/select", "/select_and_reserve"):
            answer = await router.post(path, body)
            assert (answer.status, answer.error["code"]) == (503, "no_replica"), path
            assert "1 of role prefill" in answer.error["message"]
        unready = await router.get("/readyz")
        assert unready.status == 503
        assert (await router.get("/v1/models")).json["data"] == []
        assert (await router.replica(stub.name))["role"] == "prefill"
        async with engines(1, model=model) as (other,), router.serving(other):
            for _ in range(6):
                answer = await router.post("/v1/completions", {**body, "max_tokens": 1})
                assert answer.headers["x-kv-replica"] == other.name
                counted = await router.post("/tokenize", {"model": model, "prompt": "x"})
                assert counted.status == 200
        assert stub.requests == []


async def test_who_does_both_computes_prompts_for_those_that_do_not(
    router: RouterProcess, gateways: dict[str, Envoy]
) -> None:
    """And its own itself: nobody else computes prompts only."""
    model = unique("elastic")
    async with (
        engines(1, model=model) as (both,),
        engines(1, model=model) as (decoder,),
        router.serving(both),
        router.serving(decoder, role="decode"),
    ):
        fleet = Fleet(router, [], [both, decoder])
        await router.post(f"/replicas/{both.name}/drain")
        assert await told(fleet, gateways, "proxy", prompt_ids(320, 40)) is None
        await router.delete(f"/replicas/{both.name}")
        async with router.serving(both):
            numbers = iter(range(41, 200))
            # The data plane knows who serves a moment after `/replicas` shows it.
            while not await told(fleet, gateways, "proxy", prompt_ids(320, next(numbers))):
                if both.requests:
                    break
            for number in islice(numbers, 20):
                named = await told(fleet, gateways, "proxy", prompt_ids(320, number))
                by_decoder = decoder.requests and decoder.requests[-1].prompt_ids == prompt_ids(
                    320, number
                )
                assert named == (address_of(both) if by_decoder else None)
            assert len(decoder.requests) > 1
            assert both.requests


async def test_turns_are_taken_on_both_sides() -> None:
    """Two decisions for each request must not leave every other replica out."""
    with router_process({**ROLES, "policy": {"name": "round_robin"}}) as router:
        async with fleet_of(router) as fleet:
            named = [
                await told(fleet, {}, "proxy", prompt_ids(320, 50 + number)) for number in range(4)
            ]
            assert [len(stub.requests) for stub in fleet.decoders] == [2, 2]
            assert sorted(map(str, named)) == sorted(map(address_of, fleet.prefillers * 2))


async def test_with_zero_nobody_computes_prompts_for_others() -> None:
    """As llm-d's decider has it; prefill replicas get no requests all the same."""
    with router_process({**CONFIG, "prefill": {"min_uncached_tokens": 0}}) as router:
        async with fleet_of(router) as fleet:
            for number in range(4):
                assert await told(fleet, {}, "proxy", prompt_ids(320, 54 + number)) is None


async def test_the_prefiller_stays_where_the_gateway_tries_another_replica() -> None:
    """It sends the same headers there."""
    ext_proc = {"listen": "127.0.0.1:0", "fallbacks": 1}
    slow = {"interval_s": 9.0}  # so that the death is the gateway's to find
    with router_process({**ROLES, "health": slow, "doors": {"ext_proc": ext_proc}}) as router:
        async with fleet_of(router) as fleet:
            dead, alive = fleet.decoders
            ids = prompt_ids(320, 60)
            await fleet.holds(dead, ids)
            hosts = [address_of(stub) for stub in fleet.decoders]
            with envoy(picker_of(router), hosts=hosts, retries=True) as gateway:
                await dead.stop()
                body = {"model": fleet.model, "prompt": [*ids, *prompt_ids(320, 61)]}
                assert (await post(gateway, body)).status == 200
            named = alive.requests[-1].headers[HEADER]
            await until_unbooked(router)
            logged = (await router.get("/requests?limit=1")).json["requests"][0]
            (prefiller,) = [each for each in fleet.prefillers if address_of(each) == named]
            assert (logged["replica"], logged["prefiller"]) == (alive.name, prefiller.name)
            assert (logged["attempts"], logged["actual"]) == (2, None)
            metrics = await router.metrics()
            assert metrics.sum("kvroute_requests_prefilled_elsewhere_total") == 1
            await dead.start()


@pytest.mark.parametrize("allows_prefiller", [True, False])
async def test_a_subset_bounds_both_choices(router: RouterProcess, allows_prefiller: bool) -> None:
    """As in llm-d, whose profiles all choose among the endpoints that the gateway allows."""
    async with fleet_of(router) as fleet:
        allowed = [fleet.decoders[1], *fleet.prefillers[:allows_prefiller]]
        subset = [address_of(stub) for stub in allowed]
        with envoy(picker_of(router), subset=subset) as gateway:
            for number in range(4):
                body = {"model": fleet.model, "prompt": prompt_ids(320, 70 + number)}
                assert (await post(gateway, body)).status == 200
                named = fleet.decoders[1].requests[-1].headers.get(HEADER)
                assert named == (address_of(fleet.prefillers[0]) if allows_prefiller else None)
        assert fleet.decoders[0].requests == []
        await until_unbooked(router)


async def test_a_selection_that_is_not_booked_names_a_prefiller(router: RouterProcess) -> None:
    """Nothing counts anywhere."""
    async with fleet_of(router) as fleet:
        holder, ids = fleet.prefillers[1], prompt_ids(320, 80)
        await fleet.holds(holder, ids)
        body = {"model": fleet.model, "prompt": [*ids, *prompt_ids(100, 81)]}
        made = (await router.post("/select", body)).json
        assert made["prefill"]["replica"] == holder.name
        assert made["prefill"]["hit"]["cached_tokens"] == 320
        assert not tokens_at(await router.metrics(), fleet)


async def test_llm_d_s_question_counts_prefill_replicas(router: RouterProcess) -> None:
    """Its own picker scores both kinds of pods by the same answer."""
    model, text = unique("scored"), "the quick brown fox " * 8
    async with (
        engines(1, model=model, has_events=True) as (prefiller,),
        engines(1, model=model, has_events=True) as (decoder,),
        router.serving(prefiller, role="prefill"),
        router.serving(decoder, role="decode"),
    ):
        prefiller.store(list(text.encode())[:128])
        await router.until_applied(prefiller)
        async with grpc.aio.insecure_channel(picker_of(router)) as channel:
            scores = channel.unary_unary(
                f"/{INDEXER_SERVICE}/GetPodScores",
                request_serializer=GetPodScoresRequest.SerializeToString,
                response_deserializer=GetPodScoresResponse.FromString,
            )
            answer = await scores(GetPodScoresRequest(model_name=model, prompt=text))
        found = {each.pod: each.score for each in answer.scores}
        assert found[address_of(prefiller)] == 8


async def test_a_role_changes_while_the_router_runs() -> None:
    """What is known of its cache stays."""
    async with engines(2, model=unique("reload"), has_events=True) as (one, other):

        def configured(role: str) -> dict[str, Any]:
            listed = [{"id": one.name, "url": one.url, "role": role}]
            return {**ROLES, "replicas": [*listed, {"id": other.name, "url": other.url}]}

        with router_process(configured("both")) as router:
            for stub in (one, other):
                await router.until_in_rotation(stub)
            ids = prompt_ids(320, 90)
            one.store(ids)
            await router.until_applied(one)
            body = {"model": one.model, "prompt": [*ids, 7]}
            answer = await router.post("/v1/completions", body)
            assert answer.headers["x-kv-replica"] == one.name
            router.configure(configured("prefill"))
            router.process.send_signal(signal.SIGHUP)
            await router.until(
                lambda now: now.sum("kvroute_config_reloads_total", result="taken") == 1, "taken"
            )
            async with timeout(DEADLINE_S):
                while answer.headers["x-kv-replica"] == one.name:  # the core is told a little later
                    answer = await router.post("/v1/completions", body)
            assert other.requests[-1].headers[HEADER] == address_of(one)
            await router.until_applied(one)


# --- helpers --------------------------------------------------------------------------------------


async def posted(
    fleet: Fleet, gateways: dict[str, Envoy], door: str, body: dict[str, Any]
) -> Answer:
    """The response of the proxy, or of a gateway; the client names a prefiller of its own."""
    own = {HEADER: "169.254.169.254:80"}
    if door == "proxy":
        return await fleet.router.post("/v1/completions", body, own)
    return await post(gateways[door], body, own)


async def failing_split(exchange: Exchange) -> None:
    """A sidecar whose prefiller is dead."""
    is_split = HEADER in exchange.request.headers
    await (refusing("503 Service Unavailable") if is_split else engine_stub.answer)(exchange)


def sum_at(now: Metrics, name: str, stubs: list[EngineStub]) -> float:
    return sum(now.sum(name, replica=stub.name) for stub in stubs)


def tokens_at(now: Metrics, fleet: Fleet) -> float:
    return sum_at(now, "kvroute_in_flight_prefill_tokens", fleet.prefillers)
