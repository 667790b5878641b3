"""Engines, routers, and the server of their board."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.soaking.links import Balancer, Link
from tests.support.engine_process import EngineProcess, simulated
from tests.support.router_process import Metrics, RouterProcess
from tests.support.valkey_server import ValkeyServer
from tests.support.vllm_publisher import free_port
from tests.support.waiting import eventually

PRESETS = ("full", "gemma", "gptoss", "mamba-hybrid")
_STARTS = 3
_SPEED = {
    "step_overhead_s": 0.004,
    "prefill_tokens_per_s": 40_000,
    "decode_tokens_per_s": 10_000,
    "num_blocks": 800,
    "max_model_len": 2048,
    "max_num_seqs": 32,
    "enable_faults": True,
}


@dataclass
class Replica:
    """An engine, and for some of them links on the way to it."""

    model: str
    engine: EngineProcess
    endpoints: tuple[str, str]
    links: list[Link] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.engine.name

    def settings(self) -> dict[str, Any]:
        """Return the router's settings."""
        if not self.links:
            return {"url": self.engine.url, "id": self.name}
        http, events, replay = (link.port for link in self.links)
        feed = {
            "endpoint": f"tcp://127.0.0.1:{events}",
            "replay_endpoint": f"tcp://127.0.0.1:{replay}",
            "topic": "kv-events",
        }
        return {"url": f"http://127.0.0.1:{http}", "id": self.name, "kv_events": [feed]}


class Held(NamedTuple):
    """The memory, files and threads that a process holds, at rest."""

    rss_mib: float
    descriptors: int
    threads: int


def held(pid: int) -> Held:
    proc = Path(f"/proc/{pid}")
    pages = int((proc / "statm").read_text().split()[1])
    return Held(
        round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1),
        len(os.listdir(proc / "fd")),
        len(os.listdir(proc / "task")),
    )


class Router:
    """One router, at a port that it keeps."""

    def __init__(self, name: str, config: dict[str, Any]) -> None:
        self.name = name
        self.port = free_port()
        self._config = {**config, "server": {**config["server"], "port": self.port}}
        self.process = RouterProcess(self._config)
        self.logs: list[str] = []

    @property
    def pid(self) -> int:
        """Return the id of its process."""
        return self.process.process.pid

    async def restart(self) -> None:
        """After its process has ended."""
        self.logs.append(self.process.log())
        self.process.kill()
        for _ in range(_STARTS):
            # On a machine with other load it may take more than the minute it is given.
            with contextlib.suppress(AssertionError):
                self.process = await asyncio.to_thread(RouterProcess, self._config)
                return
        raise TimeoutError(f"{self.name} does not start")

    def errors(self) -> list[str]:
        """Return the lines that begin a traceback, of all the processes that there were."""
        with contextlib.suppress(FileNotFoundError):
            self.logs.append(self.process.log())
        said = "\n".join(self.logs)
        return [line for line in said.splitlines() if "Traceback" in line or "CRITICAL" in line]

    async def metrics(self) -> Metrics:
        return await self.process.metrics()

    async def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.process.send_signal(signal.SIGTERM)
        await eventually(lambda: self.process.process.poll() is not None, "it ends", 30)


@dataclass
class Fleet:
    """Everything that runs."""

    replicas: list[Replica]
    routers: list[Router]
    board: ValkeyServer
    balancer: Balancer

    @property
    def models(self) -> list[str]:
        return sorted({replica.model for replica in self.replicas})

    def router(self, name: str) -> Router:
        return next(router for router in self.routers if router.name == name)


def _engine(number: int, models: int) -> Replica:
    preset = PRESETS[number % models]
    addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    tier = {"cpu_blocks": 1600} if number // models % 4 == 3 else {}
    options = {"served_model_name": preset, **_SPEED, **tier}
    events, replay = addresses
    engine = EngineProcess(
        *simulated(preset, **options),
        "--kv-events-endpoint",
        events,
        "--kv-events-replay-endpoint",
        replay,
    )
    return Replica(preset, engine, (events, replay))


async def _linked(replica: Replica) -> None:
    ports = [replica.engine.port, *(int(each.rpartition(":")[2]) for each in replica.endpoints)]
    replica.links = [Link(port) for port in ports]
    for link in replica.links:
        await link.start()


@contextlib.asynccontextmanager
async def running(
    replicas: int, models: int, threads: int, linked: int, check_s: float
) -> AsyncIterator[Fleet]:
    """Start everything; end it, whatever happened.

    Args:
        replicas: Engines.
        models: Served by them in turn.
        threads: Of each of the two routers.
        linked: How many of the engines are behind links that can be cut.
        check_s: Between health checks, and how long one may take.
    """
    async with contextlib.AsyncExitStack() as stack:
        engines: list[Replica] = []
        slots = asyncio.Semaphore(2)

        async def start(number: int) -> None:
            async with slots:
                replica = await asyncio.to_thread(_engine, number, models)
            engines.append(replica)
            stack.callback(replica.engine.forget)

        await asyncio.gather(*(start(number) for number in range(replicas)))
        for replica in engines[:linked]:
            await _linked(replica)
            for link in replica.links:
                stack.push_async_callback(link.stop)
        board = stack.enter_context(contextlib.closing(ValkeyServer()))
        config = {
            "server": {"threads": threads, "timeouts": _timeouts(check_s)},
            "health": _health(check_s),
            "replicas": [replica.settings() for replica in engines],
            "board": {"url": board.url, "secret": "shared-by-both"},
        }
        routers = []
        for name in ("first", "second"):
            router = await asyncio.to_thread(Router, name, config)
            routers.append(router)
            stack.callback(_kill, router)
        balancer = Balancer({router.name: _port(router) for router in routers})
        await balancer.start()
        stack.push_async_callback(balancer.stop)
        yield Fleet(engines, routers, board, balancer)


def _health(check_s: float) -> dict[str, float]:
    return {
        "interval_s": check_s,
        "timeout_s": check_s,
        "discovery_interval_s": 2 * check_s,
        "engine_load_stale_after_s": 10 * check_s,
        "unhealthy_after": 2,
    }


def _timeouts(check_s: float) -> dict[str, float]:
    return {
        "first_byte_s": 10 * check_s,
        "whole_response_s": 20 * check_s,
        "idle_s": 10 * check_s,
    }


def _port(router: Router) -> Any:
    return lambda: router.port


def _kill(router: Router) -> None:
    router.process.kill()
