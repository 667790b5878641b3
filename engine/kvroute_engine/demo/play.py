"""The demo: hybrid engines with small caches, a router and a workload; then the same workload under
routing modes that know less, and all of it again in the opposite order."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kvroute_engine.demo.client import Client, TimedCompletion
from kvroute_engine.demo.comparison import Play
from kvroute_engine.demo.fleet import (
    EngineCache,
    admission_predictions,
    empty_caches,
    look_at_all,
    until_live,
    until_read,
)
from kvroute_engine.demo.phase import PhaseResult, PlayPhase, ReplicaResult, run_phase
from kvroute_engine.demo.processes import Running, engines, router
from kvroute_engine.demo.workload import Workload, WorkloadSizes, questions_about_documents
from router.config.origin import Origin

_LOOK_EVERY_S = 0.5
_RECENT_TTL_S = 0.1
"""The time for which the router remembers its last requests; shorter than its default in every
routing mode, since here a document is not asked about again after half a minute but after a
fraction of a second."""


@dataclass(frozen=True, slots=True)
class RoutingMode:
    """A way of routing."""

    name: str
    policy: str | None = None
    """None means that of the settings."""
    blind_index: str | None = None
    """The name of an index of `kvroute_engine.demo.blind`; None: the router's own."""
    gives_hints: bool = False
    """True if engines get hints what to keep."""


MODES = (
    RoutingMode("kvroute", gives_hints=True),
    RoutingMode("kvroute, no hints"),
    RoutingMode("blind, any copy", "prefix", "group-blind-any-copy"),
    RoutingMode("blind, first removal", "prefix", "group-blind"),
    RoutingMode("round robin", "round_robin"),
)
"""The blind ones weigh believed hits against load, as routers without groups do; they cannot know
what a cache would evict for a prompt."""

PHASES = (
    PlayPhase("one at a time", clients=1, is_settled=True),
    PlayPhase("three at a time", clients=3, pause_s=0.05),
)


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """The settings of the demo."""

    replicas: int = 5
    engine_arguments: Sequence[str] = ()
    workload: Callable[[int], Workload] = lambda _play: questions_about_documents(WorkloadSizes())
    """The requests of a phase; takes which play of a mode it is, from 0."""
    phases: Sequence[PlayPhase] = PHASES
    """They follow one another in each play; each begins with empty caches."""
    modes: Sequence[RoutingMode] = MODES
    plays: int = 2
    """The plays of each mode; the order of the modes is reversed from one to the next."""
    policy: str = "least_delay"
    """The policy of the modes that name none."""
    keep: bool = False
    """Leave the engines running afterwards, behind a router in the first mode."""


@dataclass(slots=True)
class Scene:
    """The state of the demo, for the display."""

    settings: DemoSettings
    router_url: str = ""
    """The same for every router of the demo, so that a page that is open stays up to date."""
    plays: list[Play] = field(default_factory=list)
    present: PhaseResult | None = None
    caches: list[EngineCache] = field(default_factory=list)
    caches_before: list[EngineCache] = field(default_factory=list)
    """Before the present phase: the engines' counts go on from one to the next."""
    requests: int = 0
    """Requests in the present phase."""
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class _Fleet:
    """The engines, and where the routers' configuration goes."""

    replicas: Sequence[Running]
    clients: Sequence[Client]
    model: str
    configuration: Path


async def play(settings: DemoSettings, show: Callable[[Scene], None]) -> Scene:
    """Play every mode in turn.

    Args:
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
            await _warm_up(clients, model)
            fleet = _Fleet(replicas, clients, model, Path(directory) / "kvroute.yaml")
            for number in range(settings.plays):
                for mode in settings.modes[:: -1 if number % 2 else 1]:
                    await _play_mode(mode, number, scene, fleet, show)
            scene.is_over = True
            show(scene)
            if settings.keep:
                async with _router(settings.modes[0], scene, fleet):
                    show(scene)
                    await asyncio.Event().wait()
    return scene


async def _warm_up(engines: Sequence[Client], model: str) -> None:
    """Let every engine compute once: the first request's cost has nothing to do with routing."""
    request = {"model": model, "prompt": [1] * 300, "max_tokens": 2}
    await asyncio.gather(*(engine.post("/v1/completions", request) for engine in engines))


async def _play_mode(
    mode: RoutingMode,
    number: int,
    scene: Scene,
    fleet: _Fleet,
    show: Callable[[Scene], None],
) -> None:
    results: list[PhaseResult] = []
    scene.plays.append(Play(mode.name, results))
    await empty_caches(fleet.clients)
    async with _router(mode, scene, fleet) as process:
        client = Client(process.url)
        watching = asyncio.create_task(_watch(scene, fleet, show))
        try:
            await until_live(client, len(fleet.replicas))
            for phase in scene.settings.phases:
                results.append(_begin(phase, scene, fleet))
                workload = scene.settings.workload(number)
                await _play_phase(phase, workload, scene, fleet, client, show)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await client.close()


def _begin(phase: PlayPhase, scene: Scene, fleet: _Fleet) -> PhaseResult:
    replicas = {replica.name: ReplicaResult() for replica in fleet.replicas}
    scene.present = PhaseResult(phase.name, replicas)
    return scene.present


async def _play_phase(
    phase: PlayPhase,
    workload: Workload,
    scene: Scene,
    fleet: _Fleet,
    client: Client,
    show: Callable[[Scene], None],
) -> None:
    assert scene.present is not None
    await empty_caches(fleet.clients)
    for replica in fleet.replicas:
        await until_read(client, replica.name)
    scene.caches_before = await look_at_all(fleet.replicas, fleet.clients)
    scene.requests = workload.requests

    async def completed(completion: TimedCompletion) -> None:
        show(scene)
        if phase.is_settled:
            await until_read(client, completion.replica)

    exact, compared = await admission_predictions(client)
    await run_phase(phase, scene.present, client, fleet.model, workload, completed)
    exact_now, compared_now = await admission_predictions(client)
    scene.present.exact_at_admission = exact_now - exact
    scene.present.compared_at_admission = compared_now - compared
    scene.caches = await look_at_all(fleet.replicas, fleet.clients)
    show(scene)


async def _watch(scene: Scene, fleet: _Fleet, show: Callable[[Scene], None]) -> None:
    while True:
        scene.caches = await look_at_all(fleet.replicas, fleet.clients)
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


@asynccontextmanager
async def _router(mode: RoutingMode, scene: Scene, fleet: _Fleet) -> AsyncIterator[Running]:
    text = _configuration(mode, scene, fleet)
    command = (
        ("router.cli.main",)
        if mode.blind_index is None
        else ("kvroute_engine.demo.blind", mode.blind_index)
    )
    async with router(fleet.configuration, text, *command) as process:
        scene.router_url = process.url
        yield process


def _configuration(mode: RoutingMode, scene: Scene, fleet: _Fleet) -> str:
    port = Origin.parse(scene.router_url).port if scene.router_url else 0
    hints = "auto" if mode.gives_hints else "never"
    lines = [
        f"server: {{port: {port}}}",
        "health: {interval_s: 2, timeout_s: 2}",
        "observability: {log_level: error}",
        f"policy: {{name: {mode.policy or scene.settings.policy}, recent_ttl_s: {_RECENT_TTL_S}}}",
        f"models: [{{name: {fleet.model}, retention_hints: {hints}}}]",
        "replicas:",
        *(f"  - {{id: {replica.name}, url: '{replica.url}'}}" for replica in fleet.replicas),
    ]
    return "\n".join(lines) + "\n"
