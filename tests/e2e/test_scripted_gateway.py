"""The example of an Envoy that asks by a script, without an endpoint picker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.test_endpoint_picker import (
    check_two_prompts_in_turn,
    post,
    until_unbooked,
)
from tests.support.actual_hits import cached_tokens
from tests.support.engine_stub import engines, prompt_ids, streaming
from tests.support.envoy import Envoy, needs_envoy, scripted_envoy
from tests.support.router_process import QUICK_HEALTH, RouterProcess, router_process

pytestmark = needs_envoy


@pytest.fixture(scope="module")
def router() -> Iterator[RouterProcess]:
    with router_process({"health": QUICK_HEALTH}) as process:
        yield process


@pytest.fixture(scope="module")
def gateway(router: RouterProcess) -> Iterator[Envoy]:
    with scripted_envoy(router.port) as running:
        yield running


async def test_a_script_asks_books_and_reports(router: RouterProcess, gateway: Envoy) -> None:
    """Forty lines do what a picker does, but for clients that leave."""
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


async def test_a_refusal_reaches_the_client(router: RouterProcess, gateway: Envoy) -> None:
    """With the router's own words."""
    answer = await post(gateway, {"model": "nobody-has-it", "prompt": [1]})
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("seed", range(2))
async def test_two_prompts_in_turn_are_reused_through_a_script(
    router: RouterProcess, gateway: Envoy, seed: int
) -> None:
    """As through the proxy."""
    await check_two_prompts_in_turn(router, gateway, seed)
