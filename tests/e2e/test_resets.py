"""Every connection that the router makes by itself is reset, at any moment, hundreds of times:
nothing that runs for as long as the router may end of it."""

from __future__ import annotations

import contextlib
import json
import ssl
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import trustme
import zmq
from typing_extensions import override

from tests.support.engine_stub import EngineStub, Exchange, prompt_ids, unique
from tests.support.kubernetes_api import PODS, ApiServer, api_server, pod
from tests.support.otlp_collector import otlp_collector
from tests.support.relay import CuttingRelay
from tests.support.router_process import Metrics, RouterProcess, router_process
from tests.support.trtllm_engine import PATH, TrtllmCache, TrtllmEvents
from tests.support.valkey_server import ValkeyServer

CUTS = 600
"""Of all addresses together."""
HEALTH = {
    "interval_s": 0.02,
    "timeout_s": 1.0,
    "discovery_interval_s": 0.1,
    "unhealthy_after": 3,
}
LOADED = 7
"""Requests that run at SGLang, by what it publishes; its metrics say 0."""


class SglangStub(EngineStub):
    """An engine that publishes its load as SGLang does."""

    load_port = 0

    @override
    async def serve(self, exchange: Exchange) -> None:
        if exchange.request.path == "/kv_event_sources":
            await exchange.whole(b"{}", "404 Not Found")
        elif exchange.request.path == "/server_info":
            published = {"load_endpoint_port_base": self.load_port, "load_topic": "load"}
            published |= {"publisher": "zmq", "endpoint_port_base": 1}
            await exchange.whole(json.dumps({"kv_events": published}).encode())
        else:
            await super().serve(exchange)


@contextlib.contextmanager
def published_load() -> Iterator[str]:
    """Publish SGLang's load many times a second; the address."""
    is_over = threading.Event()
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.PUB)
    socket.bind("tcp://127.0.0.1:0")
    stat = msgspec.msgpack.encode(["LoadStat", LOADED, 0, 100, 1000, 0])

    def publish() -> None:
        while not is_over.wait(0.02):
            socket.send_multipart([b"load", bytes(8), stat])

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield socket.last_endpoint.decode()
    finally:
        is_over.set()
        thread.join()
        context.destroy(linger=0)


class Surroundings:
    """All that a router connects to, each behind a relay."""

    def __init__(self, directory: Path) -> None:
        self.relays: dict[str, CuttingRelay] = {}
        self.model = unique("model")
        self.events = EngineStub(self.model, name="events", has_events=True)
        self.polled = EngineStub(self.model, name="polled")
        self.sglang = SglangStub(self.model, name="sglang")
        self.found = EngineStub(self.model, name="found")
        self.secure = EngineStub(self.model, name="secure")
        self.cache = TrtllmCache((1024, 8192), names_groups=True)
        self.polled.paths[PATH] = TrtllmEvents([self.cache])
        authority = trustme.CA()
        self.secure.tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        authority.issue_cert("127.0.0.1").configure_cert(self.secure.tls)
        self._authority = directory / "authority.pem"
        self._authority.write_bytes(authority.cert_pem.bytes())
        self.api = ApiServer()
        self.config: dict[str, Any] = {}

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            for stub in (self.events, self.polled, self.sglang, self.found, self.secure):
                await stack.enter_async_context(stub)
            self.api, api = await stack.enter_async_context(api_server())
            load = stack.enter_context(published_load())
            traces = stack.enter_context(otlp_collector()).url
            board = stack.enter_context(contextlib.closing(ValkeyServer())).url
            try:
                self.sglang.load_port = int(self._relayed(load).rpartition(":")[2])
                found = int(self._relayed(self.found.url).rpartition(":")[2])
                await self.api.put(PODS.format("models"), pod("found", "127.0.0.1", port=found))
                self._configure(api, traces, board)
                yield
            finally:
                for relay in self.relays.values():
                    relay.close()

    def _relayed(self, url: str) -> str:
        """The same address behind a relay."""
        if url not in self.relays:
            self.relays[url] = CuttingRelay(url, seed=len(self.relays), cut=0.0, resets=True)
        return url.partition("://")[0] + self.relays[url].endpoint.removeprefix("tcp")

    def _configure(self, api: str, traces: str, board: str) -> None:
        live, replay = map(self._relayed, self.events.event_addresses)
        source = {"endpoint": live, "replay_endpoint": replay, "topic": "kv-events"}
        polled = self._relayed(self.polled.url)
        pods = {"namespace": "models", "selector": "app=vllm", "api_server": self._relayed(api)}
        self.config = {
            "health": HEALTH,
            "replicas": [
                {"id": "events", "url": self._relayed(self.events.url), "kv_events": [source]},
                {"id": "polled", "url": polled, "kv_events": [{"endpoint": polled + PATH}]},
                {"id": "sglang", "url": self._relayed(self.sglang.url)},
                {"id": "secure", "url": self._relayed(self.secure.url)},
            ],
            "discovery": {"kubernetes": [pods]},
            "board": {"url": self._relayed(board), "secret": "shared"},
            "observability": {"tracing": {"enabled": True, "endpoint": self._relayed(traces)}},
            "server": {"replica_tls": {"ca": str(self._authority)}},
        }

    async def reset_all(self, router: RouterProcess) -> None:
        """Reset connections while requests come and caches change."""
        self._set_cut(0.1)
        number = 0
        while not self._has_cut_enough():
            number += 1
            ids = prompt_ids(64, number)
            self.events.store(ids)
            self.cache.store(ids)
            await self.api.bookmark(PODS.format("models"))
            prompt = ids if number % 2 else f"a text of number {number}"
            with contextlib.suppress(ConnectionError):
                await router.post("/v1/completions", {"model": self.model, "prompt": prompt})
        self._set_cut(0.0)

    def _set_cut(self, cut: float) -> None:
        for relay in self.relays.values():
            relay.cut = cut

    def _has_cut_enough(self) -> bool:
        return sum(relay.cuts for relay in self.relays.values()) >= CUTS


def all_is_well(now: Metrics) -> bool:
    names = "events", "polled", "sglang", "secure", "found"
    return (
        all(now.sum("kvroute_replica_healthy", replica=name) == 1 for name in names)
        and now.sum("kvroute_board_up", board="valkey") == 1
        and now.sum("kvroute_discovery_failing") == 0
        and now.sum("kvroute_engine_running_requests", replica="sglang") == LOADED
    )


async def test_nothing_that_runs_for_long_ends_of_a_reset(tmp_path: Path) -> None:
    """A task that ended would not be missed before the next engine comes, fails or moves on."""
    around = Surroundings(tmp_path)
    async with around.running():
        with router_process(around.config, {"OTEL_BSP_SCHEDULE_DELAY": "20"}) as router:
            await router.until(all_is_well, "all is well")
            await around.reset_all(router)
            await router.until(all_is_well, "all is well again")
            await router.until_applied(around.events)
            around.events.store(prompt_ids(64, 0))
            await router.until_applied(around.events)
            assert (await router.replica("polled"))["sources"][0]["feed"]["state"] != "dead"
            exported = (await router.metrics()).sum("kvroute_traces_total", result="exported")
            await router.post("/v1/completions", {"model": around.model, "prompt": [1, 2]})
            await router.until(
                lambda now: now.sum("kvroute_traces_total", result="exported") > exported,
                "it is traced",
            )
