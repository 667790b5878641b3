"""The demo: hybrid engines with small caches, a router, a workload; then the same workload routed
with less knowledge."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from router.demo.client import Client
from router.demo.fleet import ReplicaView, empty_caches, look_at_all, until_live
from router.demo.phase import ReplicaTally, Tally, run_phase
from router.demo.processes import Running, engines, router
from router.demo.workload import Workload, WorkloadSizes

_LOOK_EVERY_S = 0.5
_RECENT_TTL_S = 0.3
"""How long the router remembers what it has just sent where. People think for half a minute between
turns, these clients not at all: the memory is shortened as their time is, in every way of
routing."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way of routing."""

    name: str
    policy: str
    module: str = "router.cli.main"


WAYS = (
    Way("kvroute", "prefix"),
    Way("group-blind index", "prefix", "router.demo.blind_router"),
    Way("round robin", "round_robin"),
)


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """What is played."""

    replicas: int = 3
    engine_arguments: Sequence[str] = ()
    at_a_time: int = 4
    """Requests under way."""
    sizes: WorkloadSizes = field(default_factory=WorkloadSizes)
    ways: Sequence[Way] = WAYS
    keep: bool = False
    """Leave engines and router running behind the first way."""


@dataclass(slots=True)
class Scene:
    """What is shown."""

    settings: DemoSettings
    router_url: str = ""
    tallies: list[Tally] = field(default_factory=list)
    views: list[ReplicaView] = field(default_factory=list)
    views_before: list[ReplicaView] = field(default_factory=list)
    """Before this way of routing: the engines count on from one to the next."""
    requests: int = 0
    """In one phase."""
    is_over: bool = False


async def play(settings: DemoSettings, show: Callable[[Scene], None]) -> Scene:
    """Play every way in turn; *show* is called whenever something changed.

    Raises:
        DemoFailed: A process did not start, or something did not answer.
    """
    scene = Scene(settings)
    with tempfile.TemporaryDirectory(prefix="kvroute-demo-") as directory:
        async with (
            engines(settings.replicas, settings.engine_arguments) as replicas,
            _clients(replicas) as clients,
        ):
            model = (await clients[0].get_json("/v1/models"))["data"][0]["id"]
            for way in settings.ways:
                await _play_way(way, scene, replicas, clients, model, Path(directory), show)
            scene.is_over = True
            show(scene)
            if settings.keep:
                async with router(
                    Path(directory) / "kvroute.yaml", _configuration(WAYS[0], replicas)
                ) as process:
                    scene.router_url = process.url
                    show(scene)
                    await asyncio.Event().wait()
    return scene


async def _play_way(
    way: Way,
    scene: Scene,
    replicas: Sequence[Running],
    clients: Sequence[Client],
    model: str,
    directory: Path,
    show: Callable[[Scene], None],
) -> None:
    await empty_caches(clients)
    scene.views_before = await look_at_all(replicas, clients)
    workload = Workload(scene.settings.sizes)
    tally = Tally(way.name, {replica.name: ReplicaTally() for replica in replicas})
    scene.tallies.append(tally)
    scene.requests = workload.requests
    async with router(
        directory / "kvroute.yaml", _configuration(way, replicas), way.module
    ) as process:
        scene.router_url = process.url
        client = Client(process.url)
        watching = asyncio.create_task(_watch(scene, replicas, clients, show))
        try:
            await until_live(client, len(replicas))
            await run_phase(
                tally, client, model, workload, scene.settings.at_a_time, lambda: show(scene)
            )
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await client.close()
    scene.views = await look_at_all(replicas, clients)
    show(scene)


async def _watch(
    scene: Scene,
    replicas: Sequence[Running],
    clients: Sequence[Client],
    show: Callable[[Scene], None],
) -> None:
    while True:
        scene.views = await look_at_all(replicas, clients)
        show(scene)
        await asyncio.sleep(_LOOK_EVERY_S)


@asynccontextmanager
async def _clients(replicas: Sequence[Running]) -> AsyncIterator[list[Client]]:
    clients = [Client(replica.url) for replica in replicas]
    try:
        yield clients
    finally:
        for client in clients:
            await client.close()


def _configuration(way: Way, replicas: Sequence[Running]) -> str:
    lines = [
        "server: {port: 0}",
        "health: {interval_s: 2, timeout_s: 2}",
        "observability: {log_level: error}",
        f"policy: {{name: {way.policy}, recent_ttl_s: {_RECENT_TTL_S}}}",
        "replicas:",
        *(f"  - {{id: {replica.name}, url: '{replica.url}'}}" for replica in replicas),
    ]
    return "\n".join(lines) + "\n"
