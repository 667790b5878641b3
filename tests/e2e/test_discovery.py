"""Replicas come and go while the router runs: by SIGHUP, a changed file, pods; no stream is cut."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import yaml

from tests.support.engine_stub import DONE, EngineStub, begun_until, engines
from tests.support.http_client import connect
from tests.support.kubernetes_api import PODS, api_server, pod
from tests.support.router_process import QUICK_HEALTH, RouterProcess, router_process

PATH = PODS.format("models")


def configured(*stubs: EngineStub, **more: Any) -> dict[str, Any]:
    return {
        "health": QUICK_HEALTH,
        "replicas": [{"url": stub.url, "id": stub.name} for stub in stubs],
        **more,
    }


def body_for(stub: EngineStub, **more: Any) -> dict[str, Any]:
    return {"model": stub.model, "prompt": [1, 2, 3], **more}


async def served_by(router: RouterProcess, stub: EngineStub) -> str:
    answer = await router.post("/v1/completions", body_for(stub))
    assert answer.status == 200, answer
    return answer.headers["x-kv-replica"]


async def until_healthy(router: RouterProcess, *stubs: EngineStub) -> None:
    await router.until(
        lambda now: all(
            now.sum("kvroute_replica_healthy", replica=stub.name) == 1 for stub in stubs
        ),
        f"{[stub.name for stub in stubs]} are healthy",
    )
    for stub in stubs:  # what it serves is asked after its health
        await router.until_in_rotation(stub)


async def test_a_replica_that_leaves_by_sighup_is_drained_and_its_stream_ends_whole() -> None:
    """New requests go elsewhere at once; what runs there runs on."""
    go = asyncio.Event()
    async with engines(2) as (leaving, staying):
        linger = {"discovery": {"linger_s": 0.2}}
        with router_process(configured(leaving, **linger)) as router:
            await until_healthy(router, leaving)
            leaving.behaviour = begun_until(go)
            async with connect(router.port) as client:
                await client.send("POST", "/v1/completions", body_for(leaving, stream=True))
                await client.read_head()
                router.configure(configured(staying, **linger))
                router.process.send_signal(signal.SIGHUP)
                await router.until(
                    lambda now: (
                        now.sum("kvroute_config_reloads_total", result="taken") == 1
                        and now.sum("kvroute_replica_healthy", replica=staying.name) == 1
                        and leaving.name not in now.by("replica", "kvroute_replica_healthy")
                    ),
                    "the list has changed, and the old replica was removed",
                )
                assert await served_by(router, staying) == staying.name
                go.set()
                assert (await client.read_body()).endswith(DONE)
            answer = await router.get("/config")
            assert [found["id"] for found in answer.json["replicas"]] == [staying.name]


async def test_a_configuration_that_breaks_a_rule_is_refused_as_a_whole() -> None:
    """Nothing of it is taken over, the log says every problem, and the next one is read."""
    async with engines(2) as (one, other):
        with router_process(configured(one)) as router:
            await until_healthy(router, one)
            router.configure(configured(other, policy={"name": "nearest"}))
            router.process.send_signal(signal.SIGHUP)
            await router.until(
                lambda now: now.sum("kvroute_config_reloads_total", result="refused") == 1,
                "it is refused",
            )
            assert "policy.name: 'nearest'; expected one of" in router.log()
            assert await served_by(router, one) == one.name
            router.configure(configured(one, other, server={"max_body_bytes": 2048}))
            router.process.send_signal(signal.SIGHUP)
            await until_healthy(router, one, other)
            assert "only a restart takes it over: server.max_body_bytes" in router.log()


async def test_a_changed_file_is_noticed_without_a_signal() -> None:
    """As mounted ConfigMaps change."""
    async with engines(2) as (one, other):
        with router_process(configured(one), options=["--watch-config"]) as router:
            await until_healthy(router, one)
            router.configure(configured(one, other))
            await until_healthy(router, one, other)


async def test_a_file_that_changes_while_the_router_starts_is_noticed(tmp_path: Path) -> None:
    """Tokenizers take a while to load, and a pod may start with the ConfigMap of before."""
    path, key = tmp_path / "kvroute.yaml", tmp_path / "key"
    os.mkfifo(key)
    own = {"events": {"hash_key": str(key)}, "server": {"port": 0, "host_names": ["router"]}}
    async with engines(2) as (one, other):
        path.write_text(yaml.safe_dump(configured(one, **own)))

        def change() -> None:
            with key.open("w") as opened:  # once the router has read its configuration
                path.write_text(yaml.safe_dump(configured(one, other, **own)))
                opened.write("ab" * 32)

        changing = threading.Thread(target=change, daemon=True)
        changing.start()
        with router_process(options=["--config", str(path), "--watch-config"]) as router:
            changing.join()
            await until_healthy(router, one, other)


async def test_a_list_in_a_file_of_its_own_is_followed(tmp_path: Path) -> None:
    """Another program writes it; the configuration stays as it is."""
    path = tmp_path / "replicas.json"
    async with engines(2) as (one, other):
        path.write_text(json.dumps([{"url": one.url, "id": one.name}]))
        found = {"discovery": {"files": [{"path": str(path), "interval_s": 0.05}]}}
        with router_process(configured(**found)) as router:
            await until_healthy(router, one)
            path.write_text(json.dumps([{"url": other.url, "id": other.name}]))
            await until_healthy(router, other)
            assert await served_by(router, other) == other.name
            path.write_text("[{url: ftp://x}]")
            await router.until(
                lambda now: now.sum("kvroute_discovery_failing", provider=f"file {path}") == 1,
                "the broken list shows",
            )
            assert await served_by(router, other) == other.name


async def test_no_request_goes_to_a_pod_that_has_lost_its_readiness() -> None:
    """As soon as the API server has said so; its stream ends whole, and a pod that comes back is
    used again."""
    go = asyncio.Event()
    async with engines(2) as stubs, api_server() as (server, url):
        first, second = stubs
        for stub in stubs:
            await server.put(PATH, pod_of(stub))
        kubernetes = {"selector": "app=vllm", "namespace": "models", "api_server": url}
        with router_process(configured(discovery={"kubernetes": [kubernetes]})) as router:
            await until_healthy(router, *stubs)
            first.behaviour = second.behaviour = begun_until(go)
            async with connect(router.port) as client:
                await client.send("POST", "/v1/completions", body_for(first, stream=True))
                await client.read_head()
                busy = client.headers["x-kv-replica"]
                gone, kept = (first, second) if busy == first.name else (second, first)
                await server.put(PATH, pod_of(gone, ready=False))
                await router.until(
                    lambda now: now.sum(
                        "kvroute_replica_state", replica=gone.name, state="draining"
                    ),
                    "it drains",
                )
                go.set()
                for _ in range(8):
                    assert await served_by(router, kept) == kept.name
                assert (await client.read_body()).endswith(DONE)
            await server.put(PATH, pod_of(gone))
            await router.until(
                lambda now: now.sum("kvroute_replica_state", replica=gone.name, state="healthy"),
                "it is back",
            )


def pod_of(stub: EngineStub, *, ready: bool = True) -> dict[str, Any]:
    port = int(stub.url.rpartition(":")[2])
    return pod(stub.name, "127.0.0.1", ready=ready, port=port)


async def test_a_signal_without_a_change_changes_nothing() -> None:
    """Reloading twice must be as harmless as once; a list of the command line stays."""
    async with engines(1) as (stub,):
        options = ["--replica", stub.url]
        with router_process({"health": QUICK_HEALTH}, options=options) as router:
            await router.until(
                lambda now: now.sum("kvroute_replica_healthy") == 1, "the replica is healthy"
            )
            for reloads in (1, 2):
                router.process.send_signal(signal.SIGHUP)
                await router.until(
                    lambda now, count=reloads: (
                        now.sum("kvroute_config_reloads_total", result="taken") == count
                    ),
                    "read again",
                )
            assert (await router.metrics()).sum("kvroute_replica_healthy") == 1
            assert "no longer named" not in router.log()
