"""A real Ray Serve on this machine, with `examples/ray_serve.py` on it: engines' processes behind
an ingress, each call placed by `kvroute_ray`."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from kvroute_ray.health import HealthPort
from kvroute_ray.options import router_kwargs
from kvroute_ray.registration import register
from kvroute_ray.reports import Reporter
from kvroute_ray.request_router import KVRouteRequestRouter
from router.client import Selection
from tests.support.engine_stub import unique
from tests.support.http_client import Answer, ask
from tests.support.router_process import RouterProcess
from tests.support.vllm_publisher import free_port
from tests.support.warm_start import ROOT

ENGINE = (
    *(sys.executable, "-m", "router.cli.main", "engine", "--host", "$host", "--port", "$port"),
    *("--kv-events-endpoint", "tcp://$host:$events"),
    *("--kv-events-replay-endpoint", "tcp://$host:$replay"),
)
KEY = "key-of-alice"
KEY_VARIABLE = "KVROUTE_KEY_OF_RAY"
"""In the environment of all of Ray's processes."""
_HOST = "127.0.0.1"


class EngineOfRay:
    """An engine that a replica of Ray has started, with what a `RouterProcess` needs of one.

    Args:
        name: Its id at the router.
        url: Where it serves.
    """

    sources = 1

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.url = url
        self.port = int(url.rpartition(":")[2])

    async def get(self, path: str) -> Answer:
        return await ask(self.port, "GET", path)


class RayServe:
    """One that runs; `port` is its HTTP proxy's."""

    def __init__(self) -> None:
        paths = [str(ROOT), str(ROOT / "examples"), str(ROOT / "integrations/ray")]
        # The processes of Ray take it over from this one.
        os.environ["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
        os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled")
        os.environ[KEY_VARIABLE] = KEY
        sys.path += [path for path in paths if path not in sys.path]
        self.example: Any = importlib.import_module("ray_serve")
        # A path to a socket must be short.
        self._directory = tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp")
        self.port = free_port()
        ray.init(
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            _node_ip_address=_HOST,
            _temp_dir=self._directory.name,
        )
        serve.start(http_options={"host": _HOST, "port": self.port})

    def stop(self) -> None:
        serve.shutdown()
        ray.shutdown()
        self._directory.cleanup()

    def run_in_process(
        self, router: str, model: str, name: str, options: Mapping[str, Any] | None = None
    ) -> None:
        """Run an application of two `InProcess`.

        Args:
            router: Its URL.
            model: What they serve.
            name: Of the application.
            options: Of the request router, whether right or wrong.
        """
        config = RequestRouterConfig(
            request_router_class=KVRouteRequestRouter,
            request_router_kwargs=dict(
                options or router_kwargs(router, booking_argument="kvroute")
            ),
        )
        engines = InProcess.options(num_replicas=2, request_router_config=config)
        serve.run(engines.bind(router, model), name=name, route_prefix=f"/{name}")

    @contextlib.asynccontextmanager
    async def engines(
        self, router: RouterProcess, *arguments: str, **options: Any
    ) -> AsyncIterator[ServedEngines]:
        """Serve engines at `/` until the block ends.

        Args:
            router: Lists them, and is asked for every call.
            arguments: Of the engines.
            options: Of the example's `application`.
        """
        name = unique("ray")
        command = [*ENGINE, *arguments]
        application = self.example.application(router.url, command, host=_HOST, **options)
        await asyncio.to_thread(serve.run, application, name=name, route_prefix="/")
        try:
            served = ServedEngines(name, self.port, router)
            await served.until_listed()
            yield served
            await let_go(served.used)
        finally:
            await asyncio.to_thread(serve.delete, name)


@serve.deployment
class InProcess:
    """An engine without a server, whose cache holds 16 tokens of every prompt.

    Args:
        router: Its URL.
        model: What it serves.
    """

    def __init__(self, router: str, model: str) -> None:
        self._health = HealthPort(_HOST)
        self._reporter = Reporter(router)
        self._registration = register(router, self._health.url, models=[model], kv_events=[])

    async def complete(
        self, body: dict[str, Any], kvroute: Selection | None = None
    ) -> dict[str, Any]:
        """Complete a prompt of token ids; with `fails` in the body it cannot."""
        async with self._reporter.report(kvroute) as report:
            if "fails" in body:
                raise ZeroDivisionError
            details = {"cached_tokens": 16}
            usage = {"prompt_tokens": len(body["prompt"]), "prompt_tokens_details": details}
            answer = {"choices": [], "usage": usage}
            report.saw(answer)
            return answer

    def __del__(self) -> None:
        self._registration.close()


class ServedEngines:
    """The engines of one application."""

    def __init__(self, name: str, port: int, router: RouterProcess) -> None:
        self.name = name
        self.port = port
        self.router = router
        self.used: Any = None
        """The handle that was asked for."""

    async def listed(self) -> list[EngineOfRay]:
        """Those that the router lists."""
        every = (await self.router.get("/replicas")).json["replicas"]
        mine = [each for each in every if each["id"].startswith(f"{self.name}:Engine:")]
        return [EngineOfRay(each["id"], each["url"]) for each in mine]

    async def until_listed(self) -> list[EngineOfRay]:
        """Wait until all that the router lists are in rotation."""
        found = await self.listed()
        for each in found:
            await self.router.until_in_rotation(each)
        return found

    def handle(self) -> Any:
        """A handle of the engines, whose request router is in this process."""
        self.used = serve.get_deployment_handle("Engine", app_name=self.name).options(stream=True)
        return self.used


def request_router_of(handle: Any) -> Any:
    """The request router of a handle that has been used."""
    return handle._router._asyncio_router.request_router


async def let_go(handle: Any) -> None:
    """Close what a handle of this process has opened, if it was used."""
    if handle is not None and handle._router is not None:
        found = request_router_of(handle)
        closing = asyncio.run_coroutine_threadsafe(found.close(), found._event_loop)
        await asyncio.wrap_future(closing)


@contextlib.contextmanager
def ray_serve() -> Iterator[RayServe]:
    """Run one until the block ends."""
    running = RayServe()
    try:
        yield running
    finally:
        running.stop()
