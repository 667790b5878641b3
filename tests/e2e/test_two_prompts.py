"""Two prompts in turn over two idle replicas that hold one each, in every way a request can be sent
where the router says: all reuse what the proxy reuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from tests.e2e.test_endpoint_picker import picker_of
from tests.support.envoy import Envoy, envoy, needs_envoy, scripted_envoy
from tests.support.nginx import Nginx, needs_nginx, scripted_nginx
from tests.support.router_process import QUICK_HEALTH, RouterProcess, router_process
from tests.support.two_prompts import (
    AskOne,
    by_gateway,
    by_proxy,
    by_reservation,
    fresh_replicas,
    play,
    share_reused,
)

CONFIG = {"health": QUICK_HEALTH, "doors": {"ext_proc": {"listen": "127.0.0.1:0"}}}
Start = Callable[[RouterProcess], AbstractContextManager[Envoy | Nginx]]
GATEWAYS: dict[str, tuple[pytest.MarkDecorator, Start]] = {
    "ext_proc": (needs_envoy, lambda router: envoy(picker_of(router))),
    "ext_proc buffered": (needs_envoy, lambda router: envoy(picker_of(router), mode="BUFFERED")),
    "Envoy by Lua": (needs_envoy, lambda router: scripted_envoy(router.port)),
    "nginx by njs": (needs_nginx("js"), lambda router: scripted_nginx("nginx.conf", router.port)),
    "nginx by Lua": (
        needs_nginx("lua"),
        lambda router: scripted_nginx("nginx-lua.conf", router.port),
    ),
}


@pytest.fixture(scope="module")
def router() -> Iterator[RouterProcess]:
    with router_process(CONFIG) as process:
        yield process


async def check(router: RouterProcess, seed: int, ask_one: AskOne) -> None:
    """Each prompt comes once; then all but its last block is reused, and exactly so predicted."""
    async with fresh_replicas(router) as replicas:
        turns = await play(router, replicas, seed, ask_one)
    assert [turn.predicted for turn in turns] == [turn.reused for turn in turns]
    assert share_reused(turns) > 0.8
    await router.until_idle()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("ask_one", [by_proxy, by_reservation])
async def test_two_prompts_in_turn_are_reused(
    router: RouterProcess, seed: int, ask_one: AskOne
) -> None:
    """Asked without booking, five plays of twelve sent both prompts to one replica, whose cache
    holds one of them."""
    await check(router, seed, ask_one)


@pytest.mark.parametrize(
    "start", [pytest.param(start, marks=mark, id=name) for name, (mark, start) in GATEWAYS.items()]
)
async def test_two_prompts_in_turn_are_reused_through_a_gateway(
    router: RouterProcess, start: Start
) -> None:
    """As through the proxy, and exactly as predicted."""
    with start(router) as gateway:
        for seed in range(2):
            await check(router, seed, by_gateway(gateway.port))
