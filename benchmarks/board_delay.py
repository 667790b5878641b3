"""How long until the other routers know of a request that one of them has sent?

    python -m benchmarks.board_delay --background 8

Some routers over one Valkey or Redis, all of them real processes. A request to a replica that waits
with its response; then every router is asked, again and again, until all of them count it, and once
it has ended, until none does. Meanwhile clients send requests of another model, one after another
each.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import statistics
import time
from collections.abc import AsyncIterator, Sequence

from benchmarks.figures import report
from tests.support.engine_stub import EngineStub, after
from tests.support.http_client import HttpClient, ask, connect
from tests.support.router_process import RouterProcess, router_process
from tests.support.valkey_server import ValkeyServer
from tests.support.waiting import eventually

_POLL_S = 0.002
_PROMPT_TOKENS = 700


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=50, help="whose news are timed")
    parser.add_argument("--routers", type=int, default=2)
    parser.add_argument("--background", type=int, default=4, help="clients of another model")
    asyncio.run(_measure(parser.parse_args()))


async def _measure(options: argparse.Namespace) -> None:
    begun: list[float] = []
    ended: list[float] = []
    served = itertools.count()
    async with contextlib.AsyncExitStack() as stack:
        watched = await stack.enter_async_context(EngineStub("watched"))
        others = [await stack.enter_async_context(EngineStub("other")) for _ in range(2)]
        routers = await stack.enter_async_context(_routers([watched, *others], options.routers))
        asked = [await stack.enter_async_context(connect(router.port)) for router in routers]
        clients = [
            asyncio.create_task(_keep_asking(routers[number % len(routers)].port, number, served))
            for number in range(options.background)
        ]
        started_at, before = time.monotonic(), next(served)
        for number in range(options.requests):
            release = asyncio.Event()
            watched.behaviour = after(release)
            request = asyncio.create_task(_complete(routers[0].port, "watched", number))
            await eventually(lambda: watched.active, "it is sent")
            begun.append(await _until_all_count(asked, watched.name, 1))
            release.set()
            await request
            ended.append(await _until_all_count(asked, watched.name, 0))
        rate = (next(served) - before - 1) / (time.monotonic() - started_at)
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    for what, seconds in (("begun", begun), ("ended", ended)):
        report(
            "board_delay",
            of=what,
            routers=options.routers,
            requests=len(seconds),
            other_requests_per_s=round(rate, 1),
            p50_ms=round(statistics.median(seconds) * 1e3, 1),
            max_ms=round(max(seconds) * 1e3, 1),
        )


@contextlib.asynccontextmanager
async def _routers(stubs: Sequence[EngineStub], count: int) -> AsyncIterator[list[RouterProcess]]:
    with contextlib.closing(ValkeyServer()) as server, contextlib.ExitStack() as stack:
        config = {
            "replicas": [{"url": stub.url, "id": stub.name} for stub in stubs],
            "board": {"url": server.url, "secret": "shared-by-both"},
        }
        routers = [stack.enter_context(router_process(config)) for _ in range(count)]
        for router in routers:
            await router.until(
                lambda now: now.sum("kvroute_replica_healthy") == len(stubs), "healthy"
            )
            await router.until(
                lambda now: now.sum("kvroute_board_writers", board="valkey") == count - 1,
                "heard",
            )
        yield routers


async def _keep_asking(port: int, client: int, served: itertools.count[int]) -> None:
    for number in itertools.count(1):
        await _complete(port, "other", client * 1_000_000 + number)
        next(served)


async def _complete(port: int, model: str, number: int) -> None:
    """A prompt that begins like no other."""
    prompt = [number, *range(_PROMPT_TOKENS)]
    body = {"model": model, "prompt": prompt, "max_tokens": 1}
    await ask(port, "POST", "/v1/completions", body, {"content-type": "application/json"})


async def _until_all_count(asked: Sequence[HttpClient], replica: str, requests: int) -> float:
    """Return the seconds until every router counts so many requests at a replica."""
    began = time.perf_counter()
    waiting = list(asked)
    while waiting:
        counts = await asyncio.gather(*(_count(each, replica) for each in waiting))
        waiting = [each for each, count in zip(waiting, counts, strict=True) if count != requests]
        await asyncio.sleep(_POLL_S if waiting else 0)
    return time.perf_counter() - began


async def _count(client: HttpClient, replica: str) -> int:
    found = (await client.ask("GET", f"/replicas/{replica}")).json
    return sum(
        int(found[whose][what])
        for whose in ("load", "others")
        for what in ("prefilling_requests", "decoding_requests")
    )


if __name__ == "__main__":
    main()
