"""The demo: hybrid engines with small caches, a router and a workload; then the same workload under
routing modes that know less."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from router.demo.client import Client
from router.demo.fleet import EngineCache, empty_caches, look_at_all, until_live
from router.demo.phase import PhaseResult, ReplicaResult, run_phase
from router.demo.processes import Running, engines, router
from router.demo.workload import Workload, WorkloadSizes

_LOOK_EVERY_S = 0.5
_RECENT_TTL_S = 0.3
"""How long the router remembers what it has just sent where; shorter than its default in every
routing mode, since these clients do not think for half a minute between turns as people do."""


@dataclass(frozen=True, slots=True)
class RoutingMode:
    """How the router chooses a replica."""

    name: str
    policy: str
    module: str = "router.cli.main"


MODES = (
    RoutingMode("kvroute", "prefix"),
    RoutingMode("group-blind index", "prefix", "router.demo.blind"),
    RoutingMode("round robin", "round_robin"),
)


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """What to play."""

    replicas: int = 3
    engine_arguments: Sequence[str] = ()
    at_a_time: int = 4
    """Requests under way."""
    sizes: WorkloadSizes = field(default_factory=WorkloadSizes)
    modes: Sequence[RoutingMode] = MODES
    keep: bool = False
    """Leave the engines running afterwards, behind a router in the first mode."""


@dataclass(slots=True)
class Scene:
    """The state of the demo, for whoever shows it."""

    settings: DemoSettings
    router_url: str = ""
    results: list[PhaseResult] = field(default_factory=list)
    caches: list[EngineCache] = field(default_factory=list)
    caches_before: list[EngineCache] = field(default_factory=list)
    """Before the present mode: the engines' counts go on from mode to mode."""
    requests: int = 0
    """In one phase."""
    is_over: bool = False


async def play(settings: DemoSettings, show: Callable[[Scene], None]) -> Scene:
    """Play every mode in turn.

    Args:
        settings: What to play.
        show: Called whenever the scene has changed.
    Raises:
        DemoFailed: A process did not start, or a request failed.
    """
    scene = Scene(settings)
    with tempfile.TemporaryDirectory(prefix="kvroute-demo-") as directory:
        async with (
            engines(settings.replicas, settings.engine_arguments) as replicas,
            _clients(replicas) as clients,
        ):
            model = (await clients[0].get_json("/v1/models"))["data"][0]["id"]
            for mode in settings.modes:
                await _play_mode(mode, scene, replicas, clients, model, Path(directory), show)
            scene.is_over = True
            show(scene)
            if settings.keep:
                async with router(
                    Path(directory) / "kvroute.yaml", _configuration(MODES[0], replicas)
                ) as process:
                    scene.router_url = process.url
                    show(scene)
                    await asyncio.Event().wait()
    return scene


async def _play_mode(
    mode: RoutingMode,
    scene: Scene,
    replicas: Sequence[Running],
    clients: Sequence[Client],
    model: str,
    directory: Path,
    show: Callable[[Scene], None],
) -> None:
    await empty_caches(clients)
    scene.caches_before = await look_at_all(replicas, clients)
    workload = Workload(scene.settings.sizes)
    result = PhaseResult(mode.name, {replica.name: ReplicaResult() for replica in replicas})
    scene.results.append(result)
    scene.requests = workload.requests
    async with router(
        directory / "kvroute.yaml", _configuration(mode, replicas), mode.module
    ) as process:
        scene.router_url = process.url
        client = Client(process.url)
        watching = asyncio.create_task(_watch(scene, replicas, clients, show))
        try:
            await until_live(client, len(replicas))
            await run_phase(
                result, client, model, workload, scene.settings.at_a_time, lambda: show(scene)
            )
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await client.close()
    scene.caches = await look_at_all(replicas, clients)
    show(scene)


async def _watch(
    scene: Scene,
    replicas: Sequence[Running],
    clients: Sequence[Client],
    show: Callable[[Scene], None],
) -> None:
    while True:
        scene.caches = await look_at_all(replicas, clients)
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


def _configuration(mode: RoutingMode, replicas: Sequence[Running]) -> str:
    lines = [
        "server: {port: 0}",
        "health: {interval_s: 2, timeout_s: 2}",
        "observability: {log_level: error}",
        f"policy: {{name: {mode.policy}, recent_ttl_s: {_RECENT_TTL_S}}}",
        "replicas:",
        *(f"  - {{id: {replica.name}, url: '{replica.url}'}}" for replica in replicas),
    ]
    return "\n".join(lines) + "\n"
