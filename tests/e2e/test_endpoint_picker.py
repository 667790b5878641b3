"""The endpoint picker behind a real Envoy: each MUST of the Gateway API's protocol, and what
becomes of the books."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Iterator
from random import Random
from typing import Any

import grpc
import pytest

from router.doors.messages import (
    HEALTH_SERVICE,
    INDEXER_SERVICE,
    GetPodScoresRequest,
    GetPodScoresResponse,
    HealthCheckRequest,
    HealthCheckResponse,
)
from tests.support.actual_hits import cached_tokens, until_told
from tests.support.engine_process import engine_processes, simulated
from tests.support.engine_stub import (
    engines,
    prompt_ids,
    streaming,
    unique,
)
from tests.support.envoy import Envoy, envoy, needs_envoy
from tests.support.http_client import Answer, ask, connect
from tests.support.nginx import Nginx
from tests.support.router_process import QUICK_HEALTH, RouterProcess, router_process
from tests.support.waiting import DEADLINE_S

pytestmark = needs_envoy
CONFIG: dict[str, Any] = {
    "health": QUICK_HEALTH,
    "doors": {"ext_proc": {"listen": "127.0.0.1:0"}},
}
MODES = ("FULL_DUPLEX_STREAMED", "BUFFERED")


def picker_of(router: RouterProcess) -> str:
    deadline = time.monotonic() + DEADLINE_S
    while not (found := re.search(r"picker listens on grpc://(\S+)\n", router.log())):
        assert time.monotonic() < deadline, router.log()
        time.sleep(0.01)
    return found[1]


@pytest.fixture(scope="module")
def router() -> Iterator[RouterProcess]:
    with router_process(CONFIG) as process:
        yield process


@pytest.fixture(scope="module")
def gateways(router: RouterProcess) -> Iterator[dict[str, Envoy]]:
    """By mode, before whatever the picker names."""
    with contextlib.ExitStack() as stack:
        picker = picker_of(router)
        yield {mode: stack.enter_context(envoy(picker, mode=mode)) for mode in MODES}


@pytest.fixture(params=MODES)
def gateway(request: pytest.FixtureRequest, gateways: dict[str, Envoy]) -> Envoy:
    found: Envoy = gateways[request.param]
    return found


async def post(
    gateway: Envoy | Nginx, body: object, headers: dict[str, str] | None = None
) -> Answer:
    headers = {"content-type": "application/json", **(headers or {})}
    return await ask(gateway.port, "POST", "/v1/completions", body, headers)


async def until_unbooked(router: RouterProcess) -> None:
    await router.until(lambda now: not now.sum("kvroute_reservations"), "nothing is booked")
    await router.until_idle()


# --- where ----------------------------------------------------------------------------------------


async def test_a_prompt_goes_where_it_is_cached(router: RouterProcess, gateway: Envoy) -> None:
    """This is what a picker is for; body and response pass unchanged."""
    async with engines(3, has_events=True) as stubs, router.serving(*stubs):
        holder, ids = stubs[1], prompt_ids(80, 1)
        holder.store(ids)
        await router.until_applied(holder)
        body = {"model": holder.model, "prompt": [*ids, 7]}
        answer = await post(gateway, body, {"x-request-id": "mine-42"})
        assert answer.status == 200, answer.body
        assert [len(stub.requests) for stub in stubs] == [0, 1, 0]
        assert holder.requests[0].json == body
        headers = holder.requests[0].headers
        assert headers["x-gateway-destination-endpoint"] == f"127.0.0.1:{holder.port}"
        assert answer.headers["x-kv-replica"] == holder.name
        await until_unbooked(router)
        logged = (await router.get("/requests?limit=1")).json["requests"][0]
        assert (logged["request_id"], logged["path"]) == ("mine-42", "/v1/completions")
        assert (logged["predicted"]["cached_tokens"], logged["end"]) == (80, "completed")
        assert logged["actual"] == cached_tokens(answer)


async def test_a_request_id_that_is_too_long_is_replaced(
    router: RouterProcess, gateway: Envoy
) -> None:
    """As at every other door: two requests whose ids differ only behind the bound are not one."""
    async with engines(1) as (stub,), router.serving(stub):
        body = {"model": stub.model, "prompt": [1, 2]}
        assert (await post(gateway, body, {"x-request-id": "x" * 129})).status == 200
        await until_unbooked(router)
        logged = (await router.get("/requests?limit=1")).json["requests"][0]
        assert len(logged["request_id"]) == 32


async def test_a_request_without_a_body_goes_to_any(router: RouterProcess, gateway: Envoy) -> None:
    """A GET ends with its headers."""
    async with engines(1) as (stub,), router.serving(stub):
        answer = await ask(gateway.port, "GET", "/v1/models")
        assert answer.status == 200, answer.body
        await until_unbooked(router)


@pytest.mark.parametrize("size", [1, 61_999, 62_000, 62_001, 400_000])
async def test_bodies_of_all_sizes_arrive_whole(
    router: RouterProcess, gateway: Envoy, size: int
) -> None:
    """They go back in pieces of at most 62,000 bytes, since some gateways take no more."""
    async with engines(1) as (stub,), router.serving(stub):
        body = {"model": stub.model, "prompt": [1, 2], "user": "x" * size}
        answer = await post(gateway, body)
        assert answer.status == 200, answer.body
        assert stub.requests[0].json == body
        await until_unbooked(router)


async def test_a_body_may_have_trailers(router: RouterProcess, gateway: Envoy) -> None:
    """In buffered mode no message has the end of the body then, and the gateway waits for an answer
    all the same."""
    async with engines(1) as (stub,), router.serving(stub), connect(gateway.port) as client:
        body = json.dumps({"model": stub.model, "prompt": [1, 2, 3]}).encode()
        await client.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"te: trailers\r\ntrailer: x-late\r\ntransfer-encoding: chunked\r\n\r\n"
            b"%x\r\n%b\r\n0\r\nx-late: 1\r\n\r\n" % (len(body), body)
        )
        answer = await client.read_answer()
        assert answer.status == 200, answer
        assert stub.requests[0].json == json.loads(body)
        await until_unbooked(router)


async def test_streams_pass_and_are_read(router: RouterProcess, gateway: Envoy) -> None:
    """Load moves from prefill to decoding as tokens come."""
    async with engines(1) as (stub,), router.serving(stub):
        stub.behaviour = streaming(20)
        answer = await post(gateway, {"model": stub.model, "prompt": [1, 2], "stream": True})
        assert answer.status == 200
        assert answer.body.count(b"data: ") >= 20
        await until_unbooked(router)
        logged = (await router.get("/requests?limit=1")).json["requests"][0]
        assert logged["end"] == "completed"
        assert logged["first_byte_ms"] is not None


# --- refusals -------------------------------------------------------------------------------------


async def test_nothing_ready_is_503_from_the_picker(router: RouterProcess, gateway: Envoy) -> None:
    """The client gets our own error, body and all."""
    async with engines(1) as (stub,), router.serving(stub):
        await router.post(f"/replicas/{stub.name}/drain")
        answer = await post(gateway, {"model": stub.model, "prompt": [1]})
        assert (answer.status, answer.error["code"]) == (503, "no_replica")
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.headers["x-llm-d-request-dropped-reason"] == "no_replica"


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff\xfe", b'{"model": 7, "prompt": "x"}'])
async def test_a_bad_body_is_400_in_openai_s_form(
    router: RouterProcess, gateway: Envoy, body: bytes
) -> None:
    """And nothing is booked."""
    async with engines(1) as (stub,), router.serving(stub):
        answer = await post(gateway, body)
        assert answer.status == 400, answer.body
        assert answer.error["type"] == "invalid_request_error"
        assert stub.requests == []
        await until_unbooked(router)


async def test_a_full_fleet_lets_wait_and_then_refuses() -> None:
    """The queue is the router's one, and 429 reaches the client."""
    config = {**CONFIG, "overload": {"max_in_flight": 1, "max_waiting": 1}}
    with router_process(config) as router, envoy(picker_of(router)) as gateway:
        async with engines(1) as (stub,), router.serving(stub):
            body = {"model": stub.model, "token_ids": [1]}
            held = (await router.post("/select_and_reserve", body)).json
            waiting = asyncio.create_task(post(gateway, {"model": stub.model, "prompt": [1]}))
            await router.until(lambda now: now.sum("kvroute_queue_requests") == 1, "it waits")
            refused = await post(gateway, {"model": stub.model, "prompt": [1]})
            assert (refused.status, refused.error["code"]) == (429, "queue_full")
            assert (await router.delete(f"/reservations/{held['selection_id']}")).status == 200
            assert (await waiting).status == 200
            await until_unbooked(router)


async def test_keys_are_checked_and_not_passed_on() -> None:
    """With keys, a gateway's clients need one."""
    keys = {"server": {"client_api_keys": [{"name": "a", "key": "secret-key", "models": ["x"]}]}}
    with router_process({**CONFIG, **keys}) as router, envoy(picker_of(router)) as gateway:
        async with engines(1, model="x") as (stub,), router.serving(stub, api_key="replica-key"):
            body = {"model": "x", "prompt": [1]}
            assert (await post(gateway, body)).status == 401
            other = await post(gateway, {**body, "model": "y"}, {"x-api-key": "secret-key"})
            assert other.status == 403
            assert (await post(gateway, body, {"x-api-key": "secret-key"})).status == 200
            (request,) = stub.requests
            assert "x-api-key" not in request.headers
            assert request.headers["authorization"] == "Bearer replica-key"
            await until_unbooked(router)


async def test_a_client_sends_no_sidecar_anywhere(router: RouterProcess, gateway: Envoy) -> None:
    """llm-d's connects to whatever these headers name."""
    names = (
        "x-prefiller-host-port",
        "x-encoder-hosts-ports",
        "x-data-parallel-host-port",
        "x-kv-cache-source-host-port",
    )
    async with engines(1) as (stub,), router.serving(stub):
        body = {"model": stub.model, "prompt": [1]}
        answer = await post(gateway, body, dict.fromkeys((*names, "x-kept"), "169.254.169.254:80"))
        assert answer.status == 200
        (request,) = stub.requests
        assert not set(names) & set(request.headers)
        assert request.headers["x-kept"] == "169.254.169.254:80"
        await until_unbooked(router)


async def test_a_rank_is_named_by_its_own_port() -> None:
    """As llm-d's sidecar listens: the replica's port plus the rank."""
    doors = {"ext_proc": {"listen": "127.0.0.1:0", "rank_ports": True}}
    with router_process({**CONFIG, "doors": doors}) as router, envoy(picker_of(router)) as gateway:
        async with engines(1, has_events=True) as (stub,):
            ids = prompt_ids(64, 9)
            stub.store(ids)
            endpoint, replay = stub.event_addresses
            first = {"endpoint": endpoint, "replay_endpoint": replay, "dp_rank": 1}
            sources = [first, {"endpoint": "tcp://*:2", "dp_rank": 2}]
            replica = {"url": stub.url, "id": stub.name, "models": [stub.model]}
            added = await router.post("/replicas", {**replica, "kv_events": sources})
            assert added.status == 201
            body, deadline = {"model": stub.model, "prompt": [*ids, 7]}, time.monotonic()
            while not any("x-data-parallel-rank" in each.headers for each in stub.requests):
                assert time.monotonic() < deadline + DEADLINE_S
                await post(gateway, body)
            headers = stub.requests[-1].headers
            rank, port = int(headers["x-data-parallel-rank"]), int(stub.url.rpartition(":")[2])
            assert rank in (1, 2)
            assert headers["x-data-parallel-host-port"] == f"127.0.0.1:{port + rank}"
            await until_unbooked(router)


async def test_an_objective_for_the_first_token_bounds_the_wait() -> None:
    """Where the operator says that a later one is of no use; a client's own shorter one stays."""
    overload = {"max_in_flight": 1, "max_waiting": 8, "ttft_is_deadline": True}
    with (
        router_process({**CONFIG, "overload": overload}) as router,
        envoy(picker_of(router)) as gateway,
    ):
        async with engines(1) as (stub,), router.serving(stub):
            body = {"model": stub.model, "token_ids": [1]}
            held = (await router.post("/select_and_reserve", body)).json
            prompt = {"model": stub.model, "prompt": [1]}
            for headers in (
                {"x-llm-d-slo-ttft-ms": "200"},
                {"x-slo-ttft-ms": "200", "x-request-timeout": "3600"},
                {"x-llm-d-slo-ttft-ms": "3600000", "x-request-timeout": "0.2"},
            ):
                refused = await post(gateway, prompt, headers)
                assert (refused.status, refused.error["code"]) == (503, "queue_timeout")
            for given in ("0", "-1", "soon", "1e3", "9" * 10):
                wrong = await post(gateway, prompt, {"x-llm-d-slo-ttft-ms": given})
                assert (wrong.status, wrong.error["code"]) == (400, "invalid_value")
            await router.delete(f"/reservations/{held['selection_id']}")
            late = {"x-llm-d-slo-ttft-ms": "600000"}
            assert (await post(gateway, prompt, late)).status == 200
            await until_unbooked(router)


# --- subsets, lists, retries ----------------------------------------------------------------------


async def test_only_what_the_gateway_allows_is_picked(router: RouterProcess) -> None:
    """A subset hint is a MUST: by `ip:port`, or by `ip` for all ports there; empty allows none."""
    async with engines(3) as stubs, router.serving(*stubs):
        body = {"model": stubs[0].model, "prompt": [1]}
        for subset, statuses in (
            ([f"127.0.0.1:{stubs[1].port}"], {200}),
            (["127.0.0.1"], {200}),
            (["10.0.0.9:8000"], {503}),
            ([], {503}),
        ):
            with envoy(picker_of(router), subset=subset) as gateway:
                before = len(stubs[1].requests)
                found = [await post(gateway, body) for _ in range(4)]
                assert {answer.status for answer in found} == statuses, subset
                if len(subset) == 1 and ":" in subset[0] and statuses == {200}:
                    assert len(stubs[1].requests) == before + 4
        await until_unbooked(router)


async def test_a_list_names_where_to_try_next() -> None:
    """Where the gateway takes one: the first is dead, the second serves, and the books follow."""
    ext_proc = {"listen": "127.0.0.1:0", "fallbacks": 2}
    slow = {**QUICK_HEALTH, "interval_s": 9.0}  # so that the death is the gateway's to find
    config = {"health": slow, "doors": {"ext_proc": ext_proc}}
    with router_process(config) as router:
        async with engines(2, has_events=True) as stubs, router.serving(*stubs):
            dead, alive = stubs
            ids = prompt_ids(80, 3)
            dead.store(ids)
            await router.until_applied(dead)
            hosts = [f"127.0.0.1:{stub.port}" for stub in stubs]
            with envoy(picker_of(router), hosts=hosts, retries=True) as gateway:
                await dead.stop()
                answer = await post(gateway, {"model": dead.model, "prompt": [*ids, 7]})
                assert answer.status == 200, answer.body
                assert len(alive.requests) == 1
                await until_unbooked(router)
                logged = (await router.get("/requests?limit=1")).json["requests"][0]
                assert (logged["replica"], logged["attempts"]) == (alive.name, 2)
            await dead.start()


# --- health and TLS -------------------------------------------------------------------------------


async def health(address: str, service: str, trusted: bytes | None = None) -> int:
    """Ask for its health; *trusted*: the authorities of its certificate, None: it has none."""
    secure = None if trusted is None else grpc.ssl_channel_credentials(trusted)
    async with (
        grpc.aio.insecure_channel(address)
        if secure is None
        else grpc.aio.secure_channel(address, secure)
    ) as channel:
        check = channel.unary_unary(
            f"/{HEALTH_SERVICE}/Check",
            request_serializer=HealthCheckRequest.SerializeToString,
            response_deserializer=HealthCheckResponse.FromString,
        )
        answer = await check(HealthCheckRequest(service=service))
        return int(answer.status)


async def test_health_is_told_by_service(router: RouterProcess) -> None:
    """Liveness at once; readiness, under three names, with the first replica."""
    address = picker_of(router)
    services = ("", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor")
    assert await health(address, "liveness") == 1
    assert [await health(address, service) for service in services] == [2, 2, 2]
    async with engines(1) as (stub,), router.serving(stub):
        assert [await health(address, service) for service in services] == [1, 1, 1]


# --- predictions and books ------------------------------------------------------------------------


async def test_predictions_through_envoy_are_exact(router: RouterProcess, gateway: Envoy) -> None:
    """As through the proxy: one request after another, all of them, while blocks are evicted."""
    name = unique("exact")
    options = {"served_model_name": name, "num_blocks": 340, "max_model_len": 1024}
    random = Random(7)
    documents = [[random.randrange(256) for _ in range(500)] for _ in range(5)]
    async with (
        engine_processes(2, *simulated("gemma", **options)) as replicas,
        router.serving(*replicas),
    ):
        by_name = {each.name: each for each in replicas}
        found: list[tuple[int, int]] = []
        for _ in range(40):
            prompt = [*random.choice(documents), *random.choices(range(256), k=20)]
            answer = await post(gateway, {"model": name, "prompt": prompt, "max_tokens": 3})
            assert answer.status == 200, answer.body
            await until_unbooked(router)
            logged = (await router.get("/requests?limit=1")).json["requests"][0]
            found.append((logged["predicted"]["cached_tokens"], cached_tokens(answer)))
            assert logged["actual"] == found[-1][1]
            await until_told(router, by_name[logged["replica"]])
        assert [predicted for predicted, _ in found] == [actual for _, actual in found]
        assert sum(actual for _, actual in found) > 5000


async def test_a_client_that_leaves_books_nothing(router: RouterProcess, gateway: Envoy) -> None:
    """Before the first byte as well as in mid-stream."""
    async with engines(1) as (stub,), router.serving(stub):
        stub.behaviour = streaming(10_000, 0.01)
        body = {"model": stub.model, "prompt": [1], "stream": True}
        async with connect(gateway.port) as client:
            await client.send("POST", "/v1/completions", body)
            await client.read_head()
            await client.read_piece()
            client.leave()
        await until_unbooked(router)


async def test_a_crowd_with_cancels_and_a_dead_endpoint_leaves_no_booking(
    router: RouterProcess, gateway: Envoy
) -> None:
    """300 requests at 32 in flight, a fifth of them cancelled."""
    async with engines(3) as stubs, router.serving(*stubs):
        random = Random(9)
        room = asyncio.Semaphore(32)
        for stub in stubs:
            stub.behaviour = streaming(5, 0.002)

        async def one(number: int) -> int:
            body = {"model": stubs[0].model, "prompt": prompt_ids(64, number), "stream": True}
            async with room, connect(gateway.port) as client:
                await client.send("POST", "/v1/completions", body)
                if random.random() < 0.2:
                    client.leave(reset=random.random() < 0.5)
                    return 0
                return (await client.read_answer()).status

        statuses = await asyncio.gather(*(one(number) for number in range(300)))
        assert set(statuses) <= {0, 200}
        assert statuses.count(200) > 200
        await until_unbooked(router)
        router.check_log()


async def test_llm_d_s_question_is_answered_on_the_same_port() -> None:
    """Blocks of a text by address; pods may be named with their port or without."""
    model, text = unique("text"), "the quick brown fox " * 8
    config = {**CONFIG, "models": [{"name": model, "tokenizer": "replica"}]}
    with router_process(config) as router:
        async with engines(2, model=model, has_events=True) as stubs, router.serving(*stubs):
            holder = stubs[1]
            holder.store(list(text.encode())[:128])
            await router.until_applied(holder)
            async with grpc.aio.insecure_channel(picker_of(router)) as channel:
                scores = channel.unary_unary(
                    f"/{INDEXER_SERVICE}/GetPodScores",
                    request_serializer=GetPodScoresRequest.SerializeToString,
                    response_deserializer=GetPodScoresResponse.FromString,
                )
                address = f"127.0.0.1:{holder.port}"
                for pods in ([], ["127.0.0.1"], [address]):
                    asked = GetPodScoresRequest(prompt=text, model_name=model, pod_identifiers=pods)
                    found = (await scores(asked)).scores
                    assert [(each.pod, each.score) for each in found] == [(address, 8.0)]
                asked = GetPodScoresRequest(prompt=text, model_name=model, pod_identifiers=["x:1"])
                assert list((await scores(asked)).scores) == []
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await scores(GetPodScoresRequest(prompt=text, model_name="nobody-has-it"))
                assert refused.value.code() is grpc.StatusCode.NOT_FOUND
