"""The examples of gateways that ask by a script, without an endpoint picker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.test_endpoint_picker import post, until_unbooked
from tests.support.actual_hits import cached_tokens
from tests.support.engine_stub import engines, prompt_ids, refusing, streaming
from tests.support.envoy import Envoy, needs_envoy, scripted_envoy
from tests.support.http_client import connect
from tests.support.nginx import Nginx, needs_nginx, scripted_nginx
from tests.support.router_process import QUICK_HEALTH, RouterProcess, router_process

NGINX = [
    pytest.param("nginx.conf", marks=needs_nginx("js")),
    pytest.param("nginx-lua.conf", marks=needs_nginx("lua")),
]


@pytest.fixture(scope="module")
def router() -> Iterator[RouterProcess]:
    with router_process({"health": QUICK_HEALTH}) as process:
        yield process


@pytest.fixture(scope="module", params=[pytest.param("envoy.yaml", marks=needs_envoy), *NGINX])
def gateway(request: pytest.FixtureRequest, router: RouterProcess) -> Iterator[Envoy | Nginx]:
    if request.param == "envoy.yaml":
        with scripted_envoy(router.port) as envoy:
            yield envoy
    else:
        with scripted_nginx(request.param, router.port) as nginx:
            yield nginx


@pytest.fixture(scope="module", params=NGINX)
def nginx(request: pytest.FixtureRequest, router: RouterProcess) -> Iterator[Nginx]:
    with scripted_nginx(request.param, router.port) as running:
        yield running


async def test_a_script_asks_books_and_reports(
    router: RouterProcess, gateway: Envoy | Nginx
) -> None:
    """Forty lines do what a picker does."""
    async with engines(2, has_events=True) as stubs, router.serving(*stubs):
        holder, ids = stubs[1], prompt_ids(80, 1)
        holder.store(ids)
        await router.until_applied(holder)
        body = {"model": holder.model, "prompt": [*ids, 7]}
        answer = await post(gateway, body)
        assert answer.status == 200, answer.body
        assert holder.requests[0].json == body
        await until_unbooked(router)
        logged = (await router.get("/requests?limit=1")).json["requests"][0]
        assert logged["predicted"]["cached_tokens"] == 80
        assert (logged["end"], logged["actual"]) == ("completed", cached_tokens(answer))
        holder.behaviour = streaming(20)
        streamed = await post(gateway, {**body, "stream": True})
        assert streamed.body.count(b"data: ") >= 20
        await until_unbooked(router)


async def test_a_large_body_arrives_whole(router: RouterProcess, gateway: Envoy | Nginx) -> None:
    """It passes through the script's question and to the replica."""
    async with engines(1) as (stub,), router.serving(stub):
        body = {"model": stub.model, "prompt": [1, 2], "user": "x" * 2_000_000}
        answer = await post(gateway, body)
        assert answer.status == 200, answer.body
        assert stub.requests[0].json == body
        await until_unbooked(router)


async def test_a_refusal_reaches_the_client(router: RouterProcess, gateway: Envoy | Nginx) -> None:
    """With the router's own words."""
    answer = await post(gateway, {"model": "nobody-has-it", "prompt": [1]})
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")


async def test_an_answer_of_the_replica_that_is_an_error_is_told(
    router: RouterProcess, gateway: Envoy | Nginx
) -> None:
    """It passes to the client, and the books have its status."""
    async with engines(1) as (stub,), router.serving(stub):
        stub.behaviour = refusing("400 Bad Request")
        answer = await post(gateway, {"model": stub.model, "prompt": [1]})
        assert answer.status == 400
        await until_unbooked(router)
        logged = (await router.get("/requests?limit=1")).json["requests"][0]
        assert logged["status"] == 400


async def test_a_client_that_leaves_is_told_by_nginx(router: RouterProcess, nginx: Nginx) -> None:
    """Its scripts run at the end of every request; Envoy's do not, and the reservation ends by
    silence."""
    async with engines(1) as (stub,), router.serving(stub):
        stub.behaviour = streaming(10_000, 0.01)
        body = {"model": stub.model, "prompt": [1], "stream": True}
        async with connect(nginx.port) as client:
            await client.send("POST", "/v1/completions", body)
            await client.read_head()
            await client.read_piece()
            client.leave()
        await until_unbooked(router)
        logged = (await router.get("/requests?limit=1")).json["requests"][0]
        assert logged["end"] == "client_left"
