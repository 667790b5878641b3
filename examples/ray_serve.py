"""Engines behind Ray Serve, each request sent where a kvroute router says.

```sh
kvroute serve --port 8080 &
python examples/ray_serve.py --router http://127.0.0.1:8080 \\
  kvroute engine --simulate --host '$host' --port '$port' \\
  --kv-events-endpoint 'tcp://*:$events' --kv-events-replay-endpoint 'tcp://*:$replay'
curl http://127.0.0.1:8000/v1/completions -d '{"model": "gemma", "prompt": "Why is the sky blue?"}'
```

Any engine with vLLM's HTTP API does, as `vllm serve`.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Sequence
from string import Template
from typing import Any

import httpx
import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from kvroute_ray.options import router_kwargs
from kvroute_ray.outcomes import CallRefused
from kvroute_ray.registration import register
from kvroute_ray.reports import Reporter
from kvroute_ray.request_router import KVRouteRequestRouter
from router.client import Selection

START_S = 600.0


@serve.deployment
class Engine:
    """One replica: an engine's process, listed at the router as long as it lives.

    Args:
        router: The router's URL.
        command: The engine's, with `$host`, `$port`, `$events` and `$replay` where it is to listen.
        host: The address to listen at, as the router reaches it; None: the node's.
        api_key_env: The environment variable with the client's key, where the router wants one.
    """

    def __init__(
        self,
        router: str,
        command: Sequence[str],
        host: str | None = None,
        api_key_env: str | None = None,
    ) -> None:
        port, events, replay = free_ports(3)
        host = host or ray.util.get_node_ip_address()
        places = {"host": host, "port": port, "events": events, "replay": replay}
        words = [Template(word).safe_substitute(places) for word in command]
        self._process = subprocess.Popen(words)
        url = f"http://{host}:{port}"
        self._wait(url)
        self._http = httpx.AsyncClient(base_url=url, timeout=None)
        self._reporter = Reporter(router, api_key_env)
        self._registration = register(router, url)

    def _wait(self, url: str) -> None:
        deadline = time.monotonic() + START_S
        while True:
            self.check_health()
            try:
                if httpx.get(f"{url}/health", timeout=5.0).is_success:
                    return
            except httpx.TransportError:
                pass
            if time.monotonic() > deadline:
                raise TimeoutError(f"the engine does not serve within {START_S:g} s")
            time.sleep(0.05)

    def check_health(self) -> None:
        """Ray asks this, and starts another replica where it raises."""
        code = self._process.poll()
        if code is not None:
            raise RuntimeError(f"the engine has ended: {code}")

    async def forward(
        self, path: str, body: dict[str, Any], kvroute: Selection | None = None
    ) -> AsyncIterator[Any]:
        """Send it to the engine; the head of the response first, then its pieces.

        Args:
            path: Of the request.
            body: Of the request.
            kvroute: What the router has booked; None where Ray chose this replica.
        """
        async with self._reporter.report(kvroute) as report:
            request = self._http.stream("POST", path, json=body, headers=report.headers)
            try:
                async with request as response:
                    report.status = response.status_code
                    kind = response.headers.get("content-type")
                    yield {"status": response.status_code, "type": kind}
                    async for piece in response.aiter_bytes():
                        report.saw(piece)
                        yield piece
            except httpx.TransportError:
                report.failure = "closed"
                raise

    def __del__(self) -> None:
        registration = getattr(self, "_registration", None)
        if registration is not None:
            registration.close()
        process = getattr(self, "_process", None)
        if process is not None:
            process.terminate()
            process.wait()


@serve.deployment
class Ingress:
    """Reads requests: what Ray's HTTP proxy chooses a replica for, it has not read."""

    def __init__(self, engine: DeploymentHandle[Any]) -> None:
        self._engine = engine.options(stream=True)

    async def __call__(self, request: Request) -> Response:
        """Take any request of an engine's API that has a body."""
        try:
            body = json.loads(await request.body())
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            return refusal(400, "invalid_value", "body: must be a JSON object")
        pieces = self._engine.forward.remote(request.url.path, body)
        try:
            head = await anext(pieces)
        except CallRefused as refused:
            return refusal(refused.status, refused.code, refused.message, refused.retry_after_s)
        return StreamingResponse(pieces, head["status"], media_type=head["type"])


def refusal(
    status: int, code: str, message: str, retry_after_s: float | None = None
) -> JSONResponse:
    """Return an error as OpenAI's clients understand it."""
    headers = {} if retry_after_s is None else {"retry-after": f"{retry_after_s:.0f}"}
    return JSONResponse({"error": {"code": code, "message": message}}, status, headers)


def application(
    router: str,
    command: Sequence[str],
    replicas: int = 2,
    host: str | None = None,
    at_once: int = 256,
    **options: Any,
) -> serve.Application:
    """Return all of it, to be run by `serve.run`.

    Args:
        router: The router's URL.
        command: The engine's; see `Engine`.
        replicas: How many engines.
        host: Where they listen; see `Engine`.
        at_once: Calls that Ray gives a replica: more than an engine computes, so that it is the
            router that decides where to wait.
        options: Of the request router; see `RoutingOptions`.
    """
    kwargs = router_kwargs(router, booking_argument="kvroute", **options)
    engines = Engine.options(
        num_replicas=replicas,
        max_ongoing_requests=at_once,
        request_router_config=RequestRouterConfig(
            request_router_class=KVRouteRequestRouter, request_router_kwargs=kwargs
        ),
    )
    bound = engines.bind(router, [*command], host, options.get("api_key_env"))
    return Ingress.bind(bound)


def free_ports(count: int) -> list[int]:
    """Return ports that nothing listens at now."""
    sockets = [socket.create_server(("", 0)) for _ in range(count)]
    try:
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--router", required=True, metavar="URL")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    serve.run(application(arguments.router, arguments.command, arguments.replicas), blocking=True)
