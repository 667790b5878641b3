"""What the gateways of the field say in headers, at the doors over HTTP: whose a request is, how
urgent, until when; and what is for sidecars alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.engine_stub import EngineStub, engines
from tests.support.http_client import Answer
from tests.support.router_process import QUICK_HEALTH, RouterProcess, router_process

OVERLOAD = {
    "max_in_flight": 1,
    "max_waiting": 8,
    "ttft_is_deadline": True,
    "priority_header": "x-priority",
    "tenant_header": "x-tenant",
}
DOORS = ("/v1/completions", "/select_and_reserve")


@pytest.fixture(scope="module")
def router() -> Iterator[RouterProcess]:
    with router_process({"health": QUICK_HEALTH, "overload": OVERLOAD}) as process:
        yield process


async def ask(
    router: RouterProcess, door: str, stub: EngineStub, headers: dict[str, str]
) -> Answer:
    body = {"model": stub.model, "prompt" if door.startswith("/v1") else "token_ids": [1]}
    return await router.post(door, body, headers)


@pytest.mark.parametrize("door", DOORS)
async def test_an_objective_for_the_first_token_bounds_the_wait(
    router: RouterProcess, door: str
) -> None:
    """By both names; what is no time, or no class, is refused with the header's name."""
    async with engines(1) as (stub,), router.serving(stub):
        held = (await ask(router, DOORS[1], stub, {})).json
        for name in ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms"):
            refused = await ask(router, door, stub, {name: "150"})
            assert (refused.status, refused.error["code"]) == (503, "queue_timeout")
            wrong = await ask(router, door, stub, {name: "soon"})
            assert (wrong.status, wrong.error["code"]) == (400, "invalid_value")
            assert name in wrong.error["message"]
        for name in ("x-llm-d-inference-objective", "x-gateway-inference-objective"):
            wrong = await ask(router, door, stub, {name: "best"})
            assert (wrong.status, wrong.error["code"]) == (400, "invalid_value")
            assert name in wrong.error["message"]
        await router.delete(f"/reservations/{held['selection_id']}")
        known = {"x-llm-d-inference-objective": "low", "x-slo-ttft-ms": "600000"}
        answer = await ask(router, door, stub, known)
        assert answer.status == 200
        if door == DOORS[1]:
            await router.delete(f"/reservations/{answer.json['selection_id']}")


async def test_a_client_names_no_sidecar_s_peers(router: RouterProcess) -> None:
    """llm-d's sidecar before an engine connects where these say: with a client's own, anywhere.
    The core and Python take them out alike."""
    names = (
        "x-prefiller-host-port",
        "x-encoder-hosts-ports",
        "x-data-parallel-host-port",
        "x-kv-cache-source-host-port",
    )
    own = dict.fromkeys((*names, "x-kept"), "169.254.169.254:80")
    async with engines(1) as (stub,), router.serving(stub):
        for more in ({}, {"x-llm-d-inference-fairness-id": "blue"}):
            answer = await ask(router, DOORS[0], stub, {**own, **more})
            assert answer.status == 200
            request = stub.requests[-1]
            assert not set(names) & set(request.headers)
            assert request.headers["x-kept"] == "169.254.169.254:80"
