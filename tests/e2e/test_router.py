"""The router as a whole: a real process, real replicas, everything over the network."""

from __future__ import annotations

import asyncio
import json
import re
import resource
import socket
import subprocess
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from router.prompt.endpoints import PROMPT_ENDPOINTS
from tests.support.engine_stub import (
    DONE,
    Behaviour,
    EngineStub,
    after,
    begun_until,
    engines,
    hang,
    hang_up,
    prompt_ids,
    unique,
)
from tests.support.http_client import Answer, ask, connect, request_bytes
from tests.support.model_files import write_tokenizer
from tests.support.router_process import (
    QUICK_HEALTH,
    RouterProcess,
    router_process,
)
from tests.support.vllm_publisher import free_port
from tests.support.waiting import DEADLINE_S, eventually
from tests.support.warm_start import COMMAND, ROOT

CLIENT_KEY = "client-key-sentinel-7c1e"
OPERATOR_KEY = "operator-key-sentinel-93ab"
REPLICA_KEY = "replica-key-sentinel-51d0"
MAX_BODY = 1024 * 1024
MAX_HEAD = 16 * 1024

OPEN = {
    "server": {
        "max_body_bytes": MAX_BODY,
        "max_header_bytes": MAX_HEAD,
        "timeouts": {
            "connect_s": 10,
            "client_body_s": 5,
            "client_stall_s": 5,
            "shutdown_grace_s": 60,
        },
    },
    "health": QUICK_HEALTH,
}
LOCKED = {
    "server": {
        "client_api_key": "${CLIENT_KEY}",
        "operator_api_key": "${OPERATOR_KEY}",
        "wrong_key_delay_s": 0,
        "max_concurrent_requests": 2,
    },
    "health": QUICK_HEALTH,
    "observability": {"metrics_need_key": True, "log_format": "json", "access_log": True},
}
CLIENT = {"authorization": f"Bearer {CLIENT_KEY}"}
OPERATOR = {"authorization": f"Bearer {OPERATOR_KEY}"}


@pytest.fixture(scope="module")
def router() -> Iterator[RouterProcess]:
    with router_process(OPEN) as process:
        yield process


@pytest.fixture(scope="module")
def locked() -> Iterator[RouterProcess]:
    """A router that requires keys."""
    with router_process(
        LOCKED, {"CLIENT_KEY": CLIENT_KEY, "OPERATOR_KEY": OPERATOR_KEY}
    ) as process:
        yield process


# --- where requests go ----------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_is_routed_to_where_it_is_cached(
    router: RouterProcess, stream: bool
) -> None:
    """This is the purpose of the router: the events of one replica decide, and the client is told
    where and how much."""
    async with engines(3, has_events=True) as stubs, router.serving(*stubs):
        holder, ids = stubs[1], prompt_ids(80, 1)
        holder.store(ids)
        await router.until_applied(holder)
        body = {"model": holder.model, "prompt": [*ids, 7], "stream": stream}

        route = (await router.post("/route?explain=true", body)).json
        assert route["replica"] == holder.name
        assert route["ranking"][0]["hit"] == {
            "gpu_cached_tokens": 80,
            "cached_tokens": 80,
            "by_tier": {},
            "suspect": False,
            "approximate": False,
            "pull_from": None,
        }
        assert [entry["hit"]["gpu_cached_tokens"] for entry in route["ranking"][1:]] == [0, 0]

        found = await router.post("/v1/completions", body, {"x-request-id": "mine-42"})
        assert found.status == 200
        assert (found.headers["x-kv-replica"], found.headers["x-kv-hit-tokens"]) == (
            holder.name,
            "80",
        )
        assert found.headers["x-request-id"] == "mine-42"
        assert [len(stub.requests) for stub in stubs] == [0, 1, 0]
        assert holder.requests[0].headers["x-request-id"] == "mine-42"
        assert holder.requests[0].json == body


async def test_least_delay_learns_what_comes_back_and_evicts_something_else() -> None:
    """One replica is full of documents that everybody asks about, the other is empty. To a policy
    that knows only hits and load they are the same for a new prompt."""
    config = {"policy": {"name": "least_delay"}, "health": QUICK_HEALTH}
    with router_process(config) as router:
        async with engines(2, has_events=True) as stubs, router.serving(*stubs):
            full, empty = stubs
            documents = [prompt_ids(512, seed) for seed in (1, 2)]
            for ids in (*documents, prompt_ids(16, 3)):
                full.store(ids)
            full.evict(prompt_ids(16, 3))
            await router.until_applied(full)
            for turn in range(24):
                body = {"model": full.model, "prompt": [*documents[turn % 2], 7 + turn]}
                answer = await router.post("/v1/completions", body)
                assert answer.headers["x-kv-replica"] == full.name
            await router.until_idle()
            for seed in range(10, 16):
                new = {"model": full.model, "prompt": prompt_ids(600, seed)}
                route = (await router.post("/route?explain=true", new)).json
                assert route["replica"] == empty.name, route
                assert "for what it evicts" in route["ranking"][1]["reason"]
            found = await router.post("/v1/completions", new)
            assert found.headers["x-kv-replica"] == empty.name
            assert len(empty.requests) == 1


async def test_what_one_replica_wrote_to_shared_storage_counts_for_the_others() -> None:
    """One file system behind several replicas: the one that wrote a prompt may be busy, gone, or
    have evicted it, and any other loads it from there. One that is on its own storage does not."""
    stores = [{"name": "shared-fs", "tiers": ["storage"], "replicas": ["shares-*"]}]
    config = {"models": [{"name": "shared-model", "stores": stores}], "health": QUICK_HEALTH}
    async with engines(3, model="shared-model", has_events=True) as stubs:
        writer, reader, alone = stubs
        writer.name, reader.name, alone.name = "shares-a", "shares-b", "alone"
        with router_process(config) as router:
            async with router.serving(*stubs):
                ids = prompt_ids(80, 1)
                for stub in (reader, alone):
                    stub.store(prompt_ids(16, 2))
                writer.store(ids)
                writer.offload(ids, "STORAGE")
                writer.evict(ids)
                route = await routed(router, {"model": "shared-model", "prompt": [*ids, 7]}, 2)
                hits = {entry["replica"]: entry["hit"]["by_tier"] for entry in route["ranking"]}
                assert hits == {
                    "shares-a": {"shared-fs": 80},
                    "shares-b": {"shared-fs": 80},
                    "alone": {},
                }
                assert route["ranking"][-1]["replica"] == "alone"
                assert "80 offloaded (80 shared-fs)" in route["ranking"][0]["reason"]
                (source,) = (await router.replica("shares-b"))["sources"]
                shared = [{"group": 0, "tier": "STORAGE", "blocks": 5, "unit_tokens": None}]
                assert source["cache"]["stores"] == {"shared-fs": shared}
                metrics = await router.metrics()
                assert metrics.sum("kvroute_index_store_blocks", store="shared-fs") == 5


async def routed(router: RouterProcess, body: dict[str, Any], hits: int) -> dict[str, Any]:
    """A route, once that many replicas have a hit."""
    while True:
        route: dict[str, Any] = (await router.post("/route?explain=true", body)).json
        if sum(entry["hit"]["cached_tokens"] > 0 for entry in route["ranking"]) == hits:
            return route
        await asyncio.sleep(0.01)


async def test_a_request_without_a_usable_id_gets_a_new_one(router: RouterProcess) -> None:
    """The id connects the client's log with the router's and the engine's; an endless one would
    fill all three."""
    async with engines(1) as (stub,), router.serving(stub):
        seen = set()
        for headers in ({}, {}, {"x-request-id": "x" * 129}):
            found = await router.post(
                "/v1/completions", {"model": stub.model, "prompt": [1]}, headers
            )
            seen.add(found.headers["x-request-id"])
            assert stub.requests[-1].headers["x-request-id"] == found.headers["x-request-id"]
        assert len(seen) == 3
        assert {len(request_id) for request_id in seen} == {32}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
async def test_predictions_are_compared_with_what_engines_report(
    router: RouterProcess, path: str, stream: bool
) -> None:
    """Predicted versus actual exposes a wrong seed, block size or tokenizer, in every form of
    response."""
    async with engines(1, has_events=True) as (stub,), router.serving(stub):
        text = "a hot prefix " * 20
        stub.store(list(text.encode()))
        await router.until_applied(stub)
        prompt: Any = (
            [{"role": "user", "content": text + "?"}] if path == "/v1/messages" else text + "?"
        )
        body = {
            "model": stub.model,
            "messages" if path == "/v1/messages" else "prompt": prompt,
            "stream": stream,
        }
        hit = len(text) // 16 * 16

        assert (await router.post(path, {**body, "max_tokens": 1})).headers[
            "x-kv-hit-tokens"
        ] == str(hit)
        stub.forget()
        assert (await router.post(path, {**body, "max_tokens": 2})).status == 200

        now = await router.metrics()
        counts = {
            outcome: now.sum("kvroute_predictions_total", replica=stub.name, outcome=outcome)
            for outcome in OUTCOMES
        }
        assert counts == {"exact": 1, "over": 1, "under": 0}
        assert now.sum("kvroute_predicted_cached_tokens_total", replica=stub.name) == 2 * hit
        assert now.sum("kvroute_actual_cached_tokens_total", replica=stub.name) == hit
        assert (
            now.sum(
                "kvroute_requests_total",
                replica=stub.name,
                model=stub.model,
                policy="least_delay",
                status="200",
            )
            == 2
        )


OUTCOMES = ("exact", "over", "under")


async def test_the_route_response_is_the_same_in_json_and_msgpack(router: RouterProcess) -> None:
    """Gateways ask for every request they route, so they may use the cheaper form."""
    async with engines(2, has_events=True) as stubs, router.serving(*stubs):
        ids = prompt_ids(48, 2)
        stubs[0].store(ids)
        await router.until_applied(stubs[0])
        question = {"model": stubs[0].model, "token_ids": [*ids, 1]}
        as_json = await router.post("/route", question)
        packed = await router.post(
            "/route", msgspec.msgpack.encode(question), {"content-type": "application/msgpack"}
        )
        assert packed.headers["content-type"] == "application/msgpack"
        answers = [as_json.json, msgspec.msgpack.decode(packed.body)]
        for found in answers:
            found.pop("routing_seconds")
        assert answers[0] == answers[1]
        assert answers[0]["replica"] == stubs[0].name
        assert answers[0]["prompt_tokens"] == 49
        asked_for_json = {"content-type": "application/msgpack", "accept": "application/json"}
        assert (await router.post("/route", msgspec.msgpack.encode(question), asked_for_json)).json[
            "replica"
        ] == stubs[0].name
        assert not stubs[0].requests


async def test_a_route_is_explained_where_that_is_asked_for(router: RouterProcess) -> None:
    """The explanation of 64 replicas takes many times as long as the choice, which is all that a
    gateway needs."""
    async with engines(2, has_events=True) as stubs, router.serving(*stubs):
        ids = prompt_ids(48, 5)
        stubs[1].store(ids)
        await router.until_applied(stubs[1])
        question = {"model": stubs[1].model, "token_ids": [*ids, 1]}
        short = (await router.post("/route", question)).json
        assert (short["replica"], short["hit"]["gpu_cached_tokens"]) == (stubs[1].name, 48)
        assert short.keys().isdisjoint({"ranking", "excluded", "prompts"})
        whole = (await router.post("/route?explain=true", question)).json
        assert [entry["replica"] for entry in whole["ranking"]] == [stubs[1].name, stubs[0].name]
        assert whole["ranking"][0]["groups"]
        assert (whole["excluded"], whole["prompts"][0]["tokens"]) == ([], 49)
        brief = (await router.post("/route?explain=false", question)).json
        for each in (short, whole, brief):
            del each["routing_seconds"]
        assert brief == short
        assert {name: whole[name] for name in short} == short
        refused = await router.post("/route?explain=perhaps", question)
        assert (refused.status, refused.error["code"]) == (400, "invalid_value")


async def test_questions_share_a_connection_with_everything_else(router: RouterProcess) -> None:
    """They take another way through the server than `/healthz`, and may be pipelined with it."""
    async with engines(1, has_events=True) as (stub,), router.serving(stub):
        body = json.dumps({"model": stub.model, "token_ids": [1, 2, 3]}).encode()
        completion = json.dumps({"model": stub.model, "prompt": [7]}).encode()
        asked = [
            ("POST", "/route", body),
            ("GET", "/healthz", b""),
            ("POST", "/route?explain=true", body),
            ("POST", "/route", b"{}"),
            ("POST", "/v1/completions", completion),
            ("POST", "/route", body),
        ]
        async with connect(router.port) as client:
            await client.write(
                b"".join(request_bytes(*each).replace(b"router", b"localhost") for each in asked)
            )
            found = [await client.read_answer() for _ in asked]
        assert [answer.status for answer in found] == [200, 200, 200, 400, 200, 200]
        assert [found[place].json["prompt_tokens"] for place in (0, 2, 5)] == [3, 3, 3]
        assert len(stub.requests) == 1


async def test_a_prompt_is_routed_although_no_replica_can_tokenise_it(
    router: RouterProcess,
) -> None:
    """Unknown tokens may cost a hit, but never the request."""
    async with engines(2) as stubs, router.serving(*stubs):
        for number, failing in enumerate((hang_up, _no_tokens)):
            for stub in stubs:
                stub.tokenizing = failing
            found = await router.post(
                "/v1/completions", {"model": stubs[0].model, "prompt": f"text {number}"}
            )
            assert (found.status, found.headers["x-kv-hit-tokens"]) == (200, "0")
        assert (await router.metrics()).sum(
            "kvroute_untokenized_prompts_total", model=stubs[0].model
        ) == 2


async def test_a_prompt_behind_a_stored_response_counts_once(router: RouterProcess) -> None:
    """It was taken for two: one before it was known who has the response, and one after."""
    async with engines(1) as (stub,), router.serving(stub):
        body = {"model": stub.model, "input": "a", "previous_response_id": "resp_1"}
        await router.post("/route", {"endpoint": "/v1/responses", **body})
        known = await router.metrics()
        labels = {"model": stub.model}
        assert known.sum("kvroute_tokenized_prompts_total", **labels, coverage="unknown") == 1
        assert known.sum("kvroute_tokenized_prompts_total", **labels) == 1
        assert known.sum("kvroute_untokenized_prompts_total", **labels) == 1


async def test_a_replica_whose_tokenizer_hangs_delays_one_text_only(
    router: RouterProcess,
) -> None:
    """Every text request waited 7 s for a frozen replica, and was then routed without its tokens
    although another one could tell them."""
    async with engines(3) as stubs, router.serving(*stubs):
        stubs[0].tokenizing = hang
        for number in range(12):
            body = {"model": stubs[0].model, "prompt": f"text {number}"}
            assert (await router.post("/v1/completions", body)).status == 200
        known = await router.metrics()
        assert known.sum("kvroute_tokenized_prompts_total", coverage="whole") >= 12
        assert tokenized_at(stubs[0]) == 1, "none is held up a second time"
        stubs[1].tokenizing = stubs[2].tokenizing = hang
        before = sum(map(tokenized_at, stubs))
        body = {"model": stubs[0].model, "prompt": "nobody knows"}
        assert (await router.post("/v1/completions", body)).status == 200
        assert sum(map(tokenized_at, stubs)) - before == 2, "then it is routed without"


async def test_texts_are_tokenised_at_all_replicas_in_turn(router: RouterProcess) -> None:
    """All of them went to the first: the tokenizer of one replica bounded the router."""
    async with engines(4) as stubs, router.serving(*stubs):
        for number in range(20):
            body = {"model": stubs[0].model, "prompt": f"text {number}"}
            await router.post("/v1/completions", body)
        assert [tokenized_at(stub) for stub in stubs] == [5] * 4
        holds = asyncio.Event()
        stubs[0].tokenizing = _tokens_after(holds)
        bodies = [{"model": stubs[0].model, "prompt": f"more {number}"} for number in range(4)]
        waiting = [asyncio.create_task(router.post("/route", body)) for body in bodies]
        await router.until(
            lambda now: now.sum("kvroute_in_flight_tokenizations", replica=stubs[0].name) == 1,
            "it is counted",
        )
        holds.set()
        assert {found.status for found in await asyncio.gather(*waiting)} == {200}
        await router.until(
            lambda now: not now.sum("kvroute_in_flight_tokenizations"), "and no longer"
        )


def tokenized_at(stub: EngineStub) -> int:
    return sum(request.path == "/tokenize" for request in stub.requests)


def _tokens_after(event: asyncio.Event) -> Behaviour:
    async def behave(exchange: Any) -> None:
        await exchange.wait(event)
        await exchange.whole(b'{"tokens": [1]}')

    return behave


async def _no_tokens(exchange: Any) -> None:
    await exchange.whole(b'{"tokens": "none"}')


# --- replicas that come and go --------------------------------------------------------------------


async def test_a_replica_needs_only_its_url(router: RouterProcess) -> None:
    """Models, adapters, event streams, load: it reports them itself."""
    adapter = unique("adapter")
    async with EngineStub(unique("model"), adapters=(adapter,), has_events=True) as stub:
        added = await router.post("/replicas", {"url": stub.url})
        assert added.status == 201
        replica_id = added.json["id"]
        assert replica_id == f"127.0.0.1:{stub.port}"
        stub.name = replica_id
        await router.until_in_rotation(stub)
        found = await router.replica(replica_id)
        assert found["models"] == [stub.model]
        assert found["adapters"] == {adapter: stub.model}
        (source,) = found["sources"]
        assert source["cache"]["groups"] == [
            {
                "kind": "full_attention",
                "block_size": 16,
                "sliding_window": None,
                "attention_chunk_size": None,
            }
        ]
        listed = {
            entry["id"]: entry["parent"] for entry in (await router.get("/v1/models")).json["data"]
        }
        assert listed == {stub.model: None, adapter: stub.model}
        assert (await router.post("/v1/completions", {"model": adapter, "prompt": [1]})).headers[
            "x-kv-replica"
        ] == replica_id
        assert (await router.delete(f"/replicas/{replica_id}")).status == 200
        assert (await router.get("/v1/models")).json["data"] == []
        assert (await router.post("/v1/completions", {"model": adapter, "prompt": [1]})).error[
            "code"
        ] == "model_not_found"


async def test_more_adapters_than_anyone_configures_are_all_served(router: RouterProcess) -> None:
    """A replica with an adapter per tenant has hundreds, and the last one matters as much as the
    first."""
    adapters = tuple(unique("tenant") for _ in range(600))
    async with EngineStub(unique("model"), adapters=adapters) as stub, router.serving(stub):
        for adapter in adapters[::99]:
            assert (
                await router.post("/v1/completions", {"model": adapter, "prompt": [1]})
            ).status == 200
        assert len((await router.get("/v1/models")).json["data"]) == 601


async def test_a_draining_replica_finishes_what_it_has_and_gets_nothing_new(
    router: RouterProcess,
) -> None:
    """This is how a replica is taken out without failing a request."""
    go = asyncio.Event()
    async with engines(2) as (drained, other), router.serving(drained, other):
        drained.behaviour = other.behaviour = begun_until(go)
        body = {"model": drained.model, "prompt": [1, 2, 3], "stream": True}
        async with connect(router.port) as client:
            await client.send("POST", "/v1/completions", body)
            await client.read_head()
            busy, free = (
                (drained, other)
                if client.headers["x-kv-replica"] == drained.name
                else (other, drained)
            )
            answered = await router.post(f"/replicas/{busy.name}/drain")
            assert (answered.status, answered.json["state"]) == (200, "draining")
            go.set()
            for _ in range(4):
                assert (await router.post("/v1/completions", body)).headers[
                    "x-kv-replica"
                ] == free.name
            assert (await client.read_body()).endswith(DONE)
        assert len(busy.requests) == 1
        assert (await router.post(f"/replicas/{busy.name}/undrain")).json["state"] == "healthy"


async def test_a_replica_is_added_once_and_gone_when_deleted(router: RouterProcess) -> None:
    """Two entries for one engine would count its cache and load twice."""
    async with engines(1) as (stub,), router.serving(stub):
        again = await router.post("/replicas", {"url": stub.url, "id": "other"})
        assert (again.status, again.error["code"]) == (409, "replica_exists")
        same_id = await router.post("/replicas", {"url": "http://127.0.0.1:1", "id": stub.name})
        assert (same_id.status, same_id.error["code"]) == (409, "replica_exists")
        assert (await router.delete(f"/replicas/{stub.name}")).json == {"removed": stub.name}
        for gone in (
            await router.get(f"/replicas/{stub.name}"),
            await router.delete(f"/replicas/{stub.name}"),
        ):
            assert (gone.status, gone.error["code"]) == (404, "replica_not_found")
        assert stub.name not in [
            replica["id"] for replica in (await router.get("/replicas")).json["replicas"]
        ]


async def test_nothing_is_left_of_a_removed_replica_in_the_metrics(router: RouterProcess) -> None:
    """Autoscaling adds and removes replicas by the thousand; a stream that outlives its replica
    must not bring the series back."""
    go = asyncio.Event()
    async with engines(1, has_events=True) as (stub,), router.serving(stub):
        stub.store(prompt_ids(64, 3))
        await router.until_applied(stub)
        body = {"model": stub.model, "prompt": [1, 2, 3], "stream": True}
        assert (await router.post("/v1/completions", body)).status == 200
        stub.behaviour = begun_until(go)
        async with connect(router.port) as client:
            await client.send("POST", "/v1/completions", body)
            await client.read_head()
            assert stub.name in (await router.metrics()).text
            await router.delete(f"/replicas/{stub.name}")
            await eventually_not(router, stub.name)
            go.set()
            assert (await client.read_body()).endswith(DONE)
        await router.until_idle()
        text = (await router.metrics()).text
        assert stub.name not in text
        assert (
            stub.model not in text
            or f'model="{stub.model}",policy="least_delay",replica="removed"' in text
        )


async def eventually_not(router: RouterProcess, text: str) -> None:
    await router.until(lambda now: text not in now.text, f"{text} is gone from the metrics")


async def test_a_replica_restarted_at_the_same_address_is_known_to_be_empty(
    router: RouterProcess,
) -> None:
    """A new process has an empty cache: hits of the old one would attract prompts to it."""
    async with engines(2, has_events=True) as (stub, other), router.serving(stub, other):
        ids = prompt_ids(64, 4)
        question = {"model": stub.model, "token_ids": [*ids, 1]}
        stub.store(ids)
        await router.until_applied(stub)
        assert (await router.post("/route", question)).json["hit"]["gpu_cached_tokens"] == 64
        await stub.stop()
        await stub.start()
        await router.until(
            lambda now: now.sum("kvroute_events_restarts_total", replica=stub.name) == 1,
            "the restart is noticed",
        )
        await router.until_in_rotation(stub)
        assert [
            entry["hit"]["gpu_cached_tokens"]
            for entry in (await router.post("/route?explain=true", question)).json["ranking"]
        ] == [0, 0]
        stub.store(prompt_ids(32, 4))
        await router.until_applied(stub)
        assert (await router.post("/route", question)).json["hit"]["gpu_cached_tokens"] == 32


# --- probes ---------------------------------------------------------------------------------------


async def test_readiness_follows_the_replicas_and_liveness_does_not(router: RouterProcess) -> None:
    """A load balancer must not send clients to a router that would respond with 503, and an
    orchestrator must not restart it for that."""
    stub = EngineStub(
        unique("model"), health_status="503 Service Unavailable", silent_paths=("/v1/models",)
    )
    async with stub:
        await router.post("/replicas", {"url": stub.url, "id": stub.name})
        try:
            assert (await router.get("/healthz")).status == 200
            not_ready = await router.get("/readyz")
            assert (not_ready.status, not_ready.json["status"]) == (503, "not ready")
            stub.health_status = "200 OK"
            await until_health(router, stub, "healthy")
            assert (await router.get("/readyz")).status == 503, (
                "it is healthy, but its models are not known"
            )
            stub.silent_paths = ()
            await until_ready(router)
            found = await router.post("/v1/completions", {"model": stub.model, "prompt": [1]})
            assert found.status == 200
        finally:
            await router.delete(f"/replicas/{stub.name}")
        assert (await router.get("/readyz")).status == 503
        assert (await router.get("/healthz")).status == 200


async def until_health(router: RouterProcess, stub: EngineStub, health: str) -> None:
    while (await router.replica(stub.name))["health"] != health:
        await asyncio.sleep(0.02)


async def until_ready(router: RouterProcess) -> None:
    while (await router.get("/readyz")).status != 200:
        await asyncio.sleep(0.02)


# --- keys -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "right"),
    [
        ("POST", "/v1/chat/completions", CLIENT),
        ("POST", "/v1/completions", CLIENT),
        ("POST", "/v1/messages", {"x-api-key": CLIENT_KEY}),
        ("POST", "/tokenize", CLIENT),
        ("POST", "/route", OPERATOR),
        ("GET", "/v1/models", CLIENT),
        ("GET", "/replicas", OPERATOR),
        ("GET", "/replicas/x", OPERATOR),
        ("POST", "/replicas", OPERATOR),
        ("DELETE", "/replicas/x", OPERATOR),
        ("POST", "/replicas/x/drain", OPERATOR),
        ("POST", "/replicas/x/undrain", OPERATOR),
        ("GET", "/config", OPERATOR),
        ("GET", "/metrics", OPERATOR),
    ],
)
async def test_a_request_without_a_valid_key_gets_401(
    locked: RouterProcess, method: str, path: str, right: dict[str, str]
) -> None:
    """Also with the wrong one of the two keys: a client must not drain replicas, and an operator's
    script must not send prompts."""
    wrong = OPERATOR if right is not OPERATOR else CLIENT
    for headers in (
        {},
        {"authorization": "Bearer x"},
        {"authorization": f"Basic {CLIENT_KEY}"},
        {"x-api-key": "x"},
        wrong,
    ):
        refused = await ask(locked.port, method, path, b"{}", headers)
        assert refused.status == 401
        assert refused.headers["www-authenticate"] == "Bearer"
        assert refused.error["code"] == "invalid_api_key"
        assert refused.error["type"] == "authentication_error"
        assert (refused.json.get("type") == "error") is (path == "/v1/messages")
    assert (await ask(locked.port, method, path, b"{}", right)).status != 401


async def test_keys_stay_where_they_belong(locked: RouterProcess) -> None:
    """The router's key is not for engines, and an engine's key is not for clients. Neither belongs
    in any log or response."""
    async with engines(2) as (plain, keyed):
        for stub, settings in ((plain, {}), (keyed, {"api_key": REPLICA_KEY})):
            added = await locked.post(
                "/replicas", {"url": stub.url, "id": stub.name, **settings}, OPERATOR
            )
            assert added.status == 201
            assert REPLICA_KEY not in added.body.decode()
        listing = ""
        while listing.count(f'"models":["{plain.model}"]') < 2:
            listing = (await locked.get("/replicas", OPERATOR)).body.decode()
        for _ in range(8):
            for headers in (CLIENT, {"x-api-key": CLIENT_KEY}, {**CLIENT, "x-api-key": CLIENT_KEY}):
                found = await locked.post(
                    "/v1/messages", {"model": plain.model, "messages": [], "max_tokens": 1}, headers
                )
                assert found.status in (200, 400)
                found = await locked.post(
                    "/v1/completions", {"model": plain.model, "prompt": [1]}, headers
                )
                assert found.status == 200
        assert plain.requests
        assert keyed.requests
        assert not [
            request
            for request in plain.requests
            if {"authorization", "x-api-key"} & set(request.headers)
        ]
        assert {request.headers.get("authorization") for request in keyed.requests} == {
            f"Bearer {REPLICA_KEY}"
        }
        assert not [request for request in keyed.requests if "x-api-key" in request.headers]
        shown = [
            (await locked.get(path, OPERATOR)).body.decode()
            for path in ("/config", "/replicas", "/metrics")
        ]
        for text in (*shown, listing, locked.log()):
            assert not [key for key in (CLIENT_KEY, OPERATOR_KEY, REPLICA_KEY) if key in text]
        for stub in (plain, keyed):
            await locked.delete(f"/replicas/{stub.name}", OPERATOR)


async def test_a_json_log_is_json_in_every_line(locked: RouterProcess) -> None:
    """A log shipper drops an incomplete line of JSON, which may be the one that mattered."""
    await locked.get('/no"such\\path', OPERATOR)
    await locked.post("/replicas", {"url": "http://127.0.0.1:1", "id": "unreachable"}, OPERATOR)
    await eventually(lambda: "unhealthy" in locked.log(), "the router complains of the replica")
    await locked.delete("/replicas/unreachable", OPERATOR)
    lines = [json.loads(line) for line in locked.log().splitlines()]
    assert any("listens on" in line["message"] for line in lines[:3])
    assert all(line["message"] for line in lines)
    assert all(datetime.fromisoformat(line["time"]).tzinfo for line in lines)
    assert {line["logger"].partition(".")[0] for line in lines} == {"router"}


async def test_the_access_log_says_in_fields_what_became_of_a_request(
    locked: RouterProcess,
) -> None:
    """Joined by the request's id and the client's trace with what others say of it; without
    keys."""
    trace = "0af7651916cd43dd8448eb211c80319c"
    parent = f"00-{trace}-b7ad6b7169203331-01"
    async with engines(1, has_events=True) as (stub,):
        added = await locked.post(
            "/replicas", {"url": stub.url, "id": stub.name, "models": [stub.model]}, OPERATOR
        )
        assert added.status == 201
        while (await locked.get(f"/replicas/{stub.name}", OPERATOR)).json["state"] != "healthy":
            await asyncio.sleep(0.01)
        body = {"model": stub.model, "prompt": [1, 2, 3]}
        named = {**CLIENT, "x-request-id": "of-the-client", "traceparent": parent}
        await locked.post("/v1/completions?api_key=in-the-query", body, named)
        broken = {
            **CLIENT,
            "x-request-id": "broken",
            "traceparent": f"{parent}-x",
            "tracestate": "a=1",
        }
        await locked.post("/v1/completions", body, broken)
        await locked.post("/v1/completions", body, {"x-request-id": "without-a-key"})
        logged = (await locked.get("/requests", OPERATOR)).json["requests"]
        await locked.delete(f"/replicas/{stub.name}", OPERATOR)
    lines = [json.loads(line) for line in locked.log().splitlines()]
    by_id = {line["request_id"]: line for line in lines if "request_id" in line}
    served, refused = by_id["of-the-client"], by_id["without-a-key"]
    assert (served["path"], served["method"]) == ("/v1/completions", "POST")
    assert (served["model"], served["prompt_tokens"]) == (stub.model, 3)
    assert {"replica", "predicted_tokens", "cached_tokens", "seconds", "bytes"} <= served.keys()
    assert (refused["status"], refused["error"]) == (401, "invalid_api_key")
    assert refused["bytes"] > 0
    assert "in-the-query" not in locked.log()
    assert served["trace_id"] == trace
    assert "trace_id" not in by_id["broken"]
    assert [each["trace_id"] for each in logged[:2]] == [None, trace]
    first, second = stub.requests
    assert first.headers["traceparent"] == parent
    assert not {"traceparent", "tracestate"} & second.headers.keys()


# --- bounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/completions", "/route", "/tokenize"])
@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_over_the_bound_is_refused(
    router: RouterProcess, path: str, announced: bool
) -> None:
    """Whether its length is announced or not; the connection can be used again."""
    body = b'{"prompt": "' + b"x" * MAX_BODY + b'"}'
    chunked = (
        b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:600_000], body[600_000:]))
        + b"0\r\n\r\n"
    )
    head = f"POST {path} HTTP/1.1\r\nhost: router\r\n"
    plain = f"content-length: {len(body)}\r\n\r\n".encode() + body
    async with connect(router.port) as client:
        await client.write(
            head.encode()
            + (plain if announced else b"transfer-encoding: chunked\r\n\r\n" + chunked)
        )
        refused = await client.read_answer()
        assert (refused.status, refused.error["code"]) == (413, "body_too_large")
        assert str(MAX_BODY) in refused.error["message"]
        assert (await client.ask("GET", "/healthz")).status == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/healthz"])
@pytest.mark.parametrize("shape", ["one", "many", "target", "endless", "trailers"])
async def test_a_head_over_the_bound_is_refused(
    router: RouterProcess, path: str, shape: str
) -> None:
    """httptools collects headers without a limit, in one packet or in thousands."""
    start = f"POST {path} HTTP/1.1\r\nhost: router\r\n".encode()
    data = {
        "one": start + b"x: " + b"a" * MAX_HEAD + b"\r\n\r\n",
        "many": start
        + b"".join(b"x-%d: %d\r\n" % (index, index) for index in range(2000))
        + b"\r\n",
        "target": f"POST {path}?{'q' * MAX_HEAD} HTTP/1.1\r\nhost: router\r\n\r\n".encode(),
        "endless": start + b"x: " + b"a" * (4 * MAX_HEAD),
        "trailers": start
        + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nx: "
        + b"a" * (4 * MAX_HEAD),
    }[shape]
    before = await router.metrics()
    async with connect(router.port) as client:
        for start_at in range(0, len(data), 5000):
            await client.write(data[start_at : start_at + 5000])
        if shape == "trailers":
            assert await client.is_closed()
        else:
            refused = await client.read_answer()
            assert (refused.status, refused.error["code"]) == (431, "headers_too_large")
            assert await client.is_closed()
    now = await router.metrics()
    name = "kvroute_rejected_requests_total"
    assert now.sum(name, code="headers_too_large") == before.sum(name, code="headers_too_large") + 1


async def test_a_head_within_the_bound_is_served(router: RouterProcess) -> None:
    """The limit is on the head; a body in the same packet does not count."""
    head = {"x": "a" * (MAX_HEAD - 1000)}
    async with engines(1) as (stub,), router.serving(stub):
        found = await router.post(
            "/v1/completions", {"model": stub.model, "prompt": [1] * 30_000}, head
        )
        assert found.status == 200
        assert len(stub.requests[0].headers["x"]) == MAX_HEAD - 1000


async def test_trailers_do_not_become_headers(router: RouterProcess) -> None:
    """They arrive after every decision based on headers, so they would bypass every check (RFC 9110
    6.5.1)."""
    async with engines(1) as (stub,), router.serving(stub):
        body = json.dumps({"model": stub.model, "prompt": [1]}).encode()
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: router\r\n"
            b"transfer-encoding: chunked\r\ntrailer: x-late\r\n\r\n"
        )
        async with connect(router.port) as client:
            await client.write(
                head
                + b"%x\r\n%b\r\n0\r\nx-late: 1\r\nx-request-id: late\r\n\r\n" % (len(body), body)
            )
            assert (await client.read_answer()).status == 200
        (request,) = stub.requests
        assert request.json == {"model": stub.model, "prompt": [1]}
        assert "x-late" not in request.headers
        assert request.headers["x-request-id"] != "late"


async def test_requests_over_the_limit_get_503_with_retry_after(
    locked: RouterProcess,
) -> None:
    """Requests over the limit would only slow down all of them."""
    async with engines(1) as (stub,):
        await locked.post("/replicas", {"url": stub.url, "id": stub.name}, OPERATOR)
        while not (await locked.get(f"/replicas/{stub.name}", OPERATOR)).json["models"]:
            pass
        go = asyncio.Event()
        stub.behaviour = after(go)
        body = {"model": stub.model, "prompt": [1]}
        held = [asyncio.create_task(locked.post("/v1/completions", body, CLIENT)) for _ in range(2)]
        await eventually(lambda: stub.active == 2, "both are under way")
        refused = await locked.post("/v1/completions", body, CLIENT)
        assert (refused.status, refused.error["code"], refused.headers["retry-after"]) == (
            503,
            "overloaded",
            "1",
        )
        go.set()
        assert [found.status for found in await asyncio.gather(*held)] == [200, 200]
        assert (await locked.post("/v1/completions", body, CLIENT)).status == 200
        await locked.delete(f"/replicas/{stub.name}", OPERATOR)


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "place", "rule"),
    [
        ("/v1/completions", b"{", "$", "must be valid json"),
        ("/v1/completions", b"[1]", "$: a list of 1 items", "must be an object"),
        ("/v1/completions", b"\xff\xfe", "$", "must be valid json"),
        (
            "/v1/completions",
            b'{"model": 5, "prompt": [1]}',
            "$.model: an integer",
            "must be a string",
        ),
        ("/v1/completions", b"{}", "$.prompt: missing", "must be a string"),
        (
            "/v1/completions",
            b'{"prompt": [1, "x"]}',
            "$.prompt[1]: a string of 1 characters",
            "must be an integer",
        ),
        ("/v1/completions", b'{"prompt": [-1]}', "$.prompt[0]", "from 0 to"),
        (
            "/v1/completions",
            b'{"prompt": [1], "cache_salt": 5}',
            "$.cache_salt",
            "must be",
        ),
        ("/v1/chat/completions", b'{"messages": "hi"}', "$.messages", "must be a list"),
        ("/v1/chat/completions", b'{"messages": [7]}', "$.messages[0]", "must be an object"),
        ("/v1/messages", b'{"max_tokens": 1}', "$.messages", "must be a list of objects"),
        ("/v1/embeddings", b'{"input": 5}', "$.input", "must be"),
        ("/v1/responses", b"{}", "$.input", "must be a string or"),
        ("/tokenize", b"[", "$", "must be a JSON object"),
        (
            "/tokenize",
            b'{"model": "x", "y": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
            "$",
            "must be a JSON object",
        ),
        ("/route", b"{}", "$", "must have token_ids"),
        (
            "/route",
            b'{"token_ids": [[]], "x": ' + b"[" * 100_000,
            "$: nested too deep",
            "less deep",
        ),
        ("/replicas", b"[]", "$", "expected a mapping"),
        ("/replicas", b'{"url": "ftp://x"}', "$.url: 'ftp://x'", "http://"),
        ("/replicas", b'{"url": "http://x", "sped": 2}', "$.sped", "did you mean speed?"),
        (
            "/replicas",
            b'{"url": "http://x", "api_key": "${HOME}"}',
            "$.api_key",
            "configuration file only",
        ),
    ],
)
async def test_the_error_for_bad_input_has_the_place_and_the_rule(
    router: RouterProcess, path: str, body: bytes, place: str, rule: str
) -> None:
    """The author of a client must be able to fix it from the response, and operators see how often
    it happens."""
    before = await router.metrics()
    refused = await router.post(path, body)
    assert refused.status == 400
    assert refused.headers["content-type"] == "application/json"
    assert refused.error["type"] == "invalid_request_error"
    assert place in refused.error["message"]
    assert rule in refused.error["message"]
    assert (refused.json.get("type") == "error") is (path == "/v1/messages")
    name = "kvroute_rejected_requests_total"
    assert (await router.metrics()).sum(name, code="invalid_value") == before.sum(
        name, code="invalid_value"
    ) + 1


async def test_an_unknown_model_is_404_and_a_known_one_without_replicas_503(
    router: RouterProcess,
) -> None:
    """Trying again helps only in the second case."""
    unknown = await router.post("/v1/completions", {"model": "nobody-has-it", "prompt": [1]})
    assert (unknown.status, unknown.error["code"]) == (404, "model_not_found")
    async with engines(1) as (stub,), router.serving(stub):
        await router.post(f"/replicas/{stub.name}/drain")
        for path in ("/v1/completions", "/route"):
            refused = await router.post(path, {"model": stub.model, "prompt": [1]})
            assert (refused.status, refused.error["code"], refused.headers["retry-after"]) == (
                503,
                "no_replica",
                "1",
            )
            assert "1 draining" in refused.error["message"]
        await stub.stop()
        await router.post(f"/replicas/{stub.name}/undrain")
        refused = await router.post("/v1/completions", {"model": stub.model, "prompt": [1]})
        assert refused.status in (502, 503)
        assert refused.headers["retry-after"] == "1"


@pytest.mark.parametrize(
    ("method", "path", "status", "allowed"),
    [
        ("GET", "/nothing/here", 404, None),
        ("POST", "/v1/audio/", 404, None),
        ("POST", "/metrics/", 404, None),
        ("GET", "/v1/chat/completions", 405, "OPTIONS, POST"),
        ("DELETE", "/route", 405, "OPTIONS, POST"),
        ("PUT", "/replicas", 405, "GET, HEAD, OPTIONS, POST"),
        ("PATCH", "/v1/responses/resp_1", 405, "DELETE, GET, HEAD, OPTIONS"),
    ],
)
async def test_a_wrong_path_or_method_has_the_same_form_of_error(
    router: RouterProcess, method: str, path: str, status: int, allowed: str | None
) -> None:
    """SDKs read only that form, and operators see every refused request in the metrics."""
    before = await router.metrics()
    refused = await ask(router.port, method, path)
    assert (refused.status, refused.error["type"]) == (status, "invalid_request_error")
    assert allowed is None or refused.headers["allow"] == allowed
    name = "kvroute_rejected_requests_total"
    assert (await router.metrics()).sum(name) == before.sum(name) + 1


async def test_a_client_that_offers_an_upgrade_is_served_like_any_other(
    router: RouterProcess,
) -> None:
    """Java's HTTP client does so with every first request, and httptools would drop the body after
    such a head."""
    offer = {
        "connection": "Upgrade, HTTP2-Settings",
        "upgrade": "h2c",
        "http2-settings": "AAMAAABkAARAAAAAAAIAAAAA",
    }
    async with engines(1) as (stub,), router.serving(stub):
        body = {"model": stub.model, "prompt": [1] * 20_000}
        data = request_bytes("POST", "/v1/completions", json.dumps(body).encode(), offer)
        for cut in (len(data), 300, 5):
            async with connect(router.port) as client:
                await client.write(data[:cut])
                await client.write(data[cut:])
                found = await client.read_answer()
                assert (found.status, found.headers["connection"]) == (200, "close")
            assert stub.requests[-1].json == body
            assert "upgrade" not in stub.requests[-1].headers
        assert (await ask(router.port, "GET", "/healthz", b"", offer)).status == 200


# --- the description ------------------------------------------------------------------------------

ENDPOINTS = {
    **{endpoint.value: {"post"} for endpoint in PROMPT_ENDPOINTS},
    "/v1/chat/completions/render": {"post"},
    "/v1/completions/render": {"post"},
    "/v1/responses/render": {"post"},
    "/v1/messages/render": {"post"},
    "/tokenize": {"post"},
    "/detokenize": {"post"},
    "/v1/messages/count_tokens": {"post"},
    "/v1/rerank": {"post"},
    "/v2/rerank": {"post"},
    "/rerank": {"post"},
    "/v1/score": {"post"},
    "/score": {"post"},
    "/v1/audio/{operation}": {"post"},
    "/version": {"get"},
    "/v1/responses/{response_id}": {"get", "delete"},
    "/v1/responses/{response_id}/cancel": {"post"},
    "/v1/responses/{response_id}/input_items": {"get"},
    "/v1/models": {"get"},
    "/v1/models/{name}": {"get"},
    "/health": {"get"},
    "/ping": {"get"},
    "/route": {"post"},
    "/select": {"post"},
    "/select_and_reserve": {"post"},
    "/reservations": {"post"},
    "/reservations/{reservation_id}": {"delete"},
    "/reservations/{reservation_id}/prefill_complete": {"post"},
    "/reservations/{reservation_id}/output": {"post"},
    "/healthz": {"get"},
    "/readyz": {"get"},
    "/metrics": {"get"},
    "/config": {"get"},
    "/": {"get"},
    "/overview": {"get"},
    "/history": {"get"},
    "/requests": {"get"},
    "/replicas": {"get", "post"},
    "/replicas/{replica_id}": {"get", "delete"},
    "/replicas/{replica_id}/recording": {"get"},
    "/replicas/{replica_id}/drain": {"post"},
    "/replicas/{replica_id}/undrain": {"post"},
}


async def test_every_endpoint_is_described(router: RouterProcess) -> None:
    """Including those that bypass FastAPI; and everything described exists."""
    described = (await router.get("/openapi.json")).json["paths"]
    assert {path: set(methods) for path, methods in described.items()} == ENDPOINTS
    assert all(entry["summary"] for methods in described.values() for entry in methods.values())
    assert (await router.get("/docs")).status == 200
    for path, methods in ENDPOINTS.items():
        for method in methods:
            target = re.sub(r"\{\w+\}", "nobody", path)
            found = await ask(router.port, method.upper(), target, b"{}")
            assert found.status != 405
            assert found.status != 404 or found.error["code"] in (
                "replica_not_found",
                "model_not_found",
                "reservation_not_found",
            ), path


# --- the end --------------------------------------------------------------------------------------


async def test_sigterm_refuses_what_is_new_finishes_what_runs_and_exits_with_0() -> None:
    """A rolling update of the router must not cost a single response, and idle connections or
    half-sent requests must not hold it up. Until it ends, probes and scrapes get their answers: a
    refused connection would look like a crash."""
    go = asyncio.Event()
    async with engines(1) as (stub,):
        with router_process(OPEN) as router:
            async with (
                router.serving(stub),
                connect(router.port) as running,
                connect(router.port) as kept,
            ):
                stub.behaviour = begun_until(go)
                body = {"model": stub.model, "prompt": [1], "stream": True}
                assert (await kept.ask("GET", "/healthz")).status == 200
                await running.send("POST", "/v1/completions", body)
                assert await running.read_head() == 200
                async with connect(router.port) as half, connect(router.port):
                    await half.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")
                    router.tell_to_stop()
                    await eventually(
                        lambda: "shutting down: 1 requests" in router.log(),
                        "it has heard the signal",
                    )
                    await assert_turned_away(await kept.ask("POST", "/v1/completions", body))
                    assert await kept.is_closed()
                    await assert_turned_away(await router.post("/v1/completions", body))
                    ready = await router.get("/readyz")
                    assert (ready.status, ready.json["reason"]) == (
                        503,
                        "the router is shutting down",
                    )
                    assert (await router.get("/healthz")).status == 200
                    now = await router.metrics()
                    assert now.sum("kvroute_requests_under_way") == 1
                    assert router.process.poll() is None, "a stream is still running"
                    go.set()
                    assert (await running.read_body()).endswith(DONE)
                    assert await half.is_closed()
                    assert await router.ended() == 0
                assert is_refused(router.port)
                assert stub.left == []
            router.check_log()


async def assert_turned_away(answer: Answer) -> None:
    assert (answer.status, answer.error["code"]) == (503, "shutting_down")
    assert (answer.headers["retry-after"], answer.headers["connection"]) == ("1", "close")


def is_refused(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.parametrize("how", ["grace", "second signal"])
async def test_what_does_not_finish_is_cut_and_the_exit_code_is_still_0(how: str) -> None:
    """An engine that hangs must not keep the router alive forever."""
    grace_s = 1 if how == "grace" else 100 * DEADLINE_S
    config = {**OPEN, "server": {"timeouts": {"shutdown_grace_s": grace_s}}}
    async with engines(1) as (stub,):
        with router_process(config) as router:
            async with router.serving(stub), connect(router.port) as client:
                stub.behaviour = hang
                await client.send("POST", "/v1/completions", {"model": stub.model, "prompt": [1]})
                await eventually(lambda: stub.active == 1, "it is under way")
                router.tell_to_stop()
                if how == "second signal":
                    await eventually(
                        lambda: "shutting down" in router.log(), "it has heard the first signal"
                    )
                    router.tell_to_stop()
                assert await router.ended() == 0
                await eventually(lambda: stub.active == 0, "the engine is rid of it")
            router.check_log()


# --- the configuration ----------------------------------------------------------------------------


def serve_with(path: Path, config: object, *options: str) -> subprocess.CompletedProcess[str]:
    path.write_text(config if isinstance(config, str) else yaml.safe_dump(config))
    command = [*COMMAND, "serve", "--config", str(path), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("options", [(), ("--check",)])
def test_every_problem_of_a_configuration_is_reported_at_once(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    """Fixing a file with one restart per mistake takes too long during an incident."""
    config = {
        "server": {
            "port": 99999,
            "client_api_key": "${NOT_SET_ANYWHERE}",
            "timeouts": {"connect_s": -1},
        },
        "replicas": [{"url": "http://a:1", "id": "x"}, {"url": "nonsense", "id": "x"}, {"id": "y"}],
        "polcy": {"name": "prefix"},
        "health": {"timeout_s": -5, "interval_s": 1},
    }
    done = serve_with(tmp_path / "bad.yaml", config, *options)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    places = [line.strip().partition(": ")[0] for line in done.stderr.splitlines()[1:]]
    assert sorted(places) == sorted(
        [
            "polcy",
            "server.port",
            "server.client_api_key",
            "server.timeouts.connect_s",
            "replicas[1].url",
            "replicas[2].url",
            "health.timeout_s",
        ]
    )
    assert "policy" in done.stderr


def test_tokenizers_and_addresses_that_cannot_be_used_are_configuration_errors(
    tmp_path: Path,
) -> None:
    """Errors that show only at the start are reported like the others: a place, a reason, exit code
    2, no traceback."""
    models = [{"name": "a", "tokenizer": "missing-a"}, {"name": "b", "tokenizer": "missing-b"}]
    done = serve_with(tmp_path / "models.yaml", {"server": {"port": 0}, "models": models})
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert "models[0]: " in done.stderr
    assert "models[1]: " in done.stderr
    assert f"{tmp_path / 'missing-b'}: no such directory" in done.stderr
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = serve_with(tmp_path / "port.yaml", {"server": {"port": port}})
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert f"server: 127.0.0.1 port {port} cannot be listened on" in done.stderr


@pytest.mark.parametrize("log_format", ["text", "json"])
@pytest.mark.parametrize(
    ("place", "scheme"), [("events", "tcp://"), ("doors.ext_proc", "")], ids=["events", "picker"]
)
def test_another_address_that_is_taken_is_a_configuration_error_too(
    tmp_path: Path, place: str, scheme: str, log_format: str
) -> None:
    """These are listened on once the application starts, whose errors were traces and exit code
    3."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = "{}{}:{}".format(scheme, *taken.getsockname())
        document: Any = {"listen": address}
        for name in reversed(place.split(".")):
            document = {name: document}
        document |= {"server": {"port": 0}, "observability": {"log_format": log_format}}
        done = serve_with(tmp_path / "kvroute.yaml", document)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert "startup failed" not in done.stderr
    assert place in done.stderr.splitlines()[-1]
    assert address.removeprefix(scheme) in done.stderr.splitlines()[-1]
    if log_format == "json":
        assert json.loads(done.stderr.splitlines()[-1])["level"] == "CRITICAL"


async def test_a_router_with_few_files_allowed_takes_what_the_system_grants() -> None:
    """Every stream needs two sockets, and the usual limit is 1024 open files: 500 streams would
    reach it."""

    def allow_few() -> None:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        )

    go = asyncio.Event()
    async with engines(1) as (stub,):
        with router_process(OPEN, limit=allow_few) as router:
            async with router.serving(stub):
                stub.behaviour = after(go)
                asking = [
                    asyncio.create_task(
                        router.post("/v1/completions", {"model": stub.model, "prompt": [1]})
                    )
                    for _ in range(100)
                ]
                await eventually(lambda: stub.active == 100, "all of them are under way")
                go.set()
                assert {found.status for found in await asyncio.gather(*asking)} == {200}


def test_too_few_open_files_are_a_configuration_error(tmp_path: Path) -> None:
    """A service manager shows the last line, and that should say what to change."""
    path = tmp_path / "kvroute.yaml"
    path.write_text("{}")
    done = subprocess.run(
        ["sh", "-c", f"ulimit -n 12; exec {' '.join(COMMAND)} serve --config {path}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert "the limit on open files is 12; the router needs 64 at least" in done.stderr


async def test_a_full_disk_behind_stderr_neither_prevents_the_start_nor_ends_the_router() -> None:
    """A log is not worth an outage."""
    port = free_port()
    with open("/dev/full", "wb") as full:
        process = subprocess.Popen(
            [*COMMAND, "serve", "--port", str(port), "--replica", "http://127.0.0.1:1"],
            cwd=ROOT,
            stderr=full,
        )
    try:
        await eventually(lambda: not is_refused(port) or process.poll() is not None, "it listens")
        for _ in range(20):
            assert (await ask(port, "GET", "/healthz")).status == 200
        process.terminate()
        await eventually(lambda: process.poll() is not None, "it has ended")
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()


async def test_the_tokenizer_of_a_replica_known_only_by_its_url_is_compared(
    tmp_path: Path,
) -> None:
    """It becomes healthy before it has reported what it serves; the comparison must happen
    nevertheless."""
    write_tokenizer(tmp_path / "model")
    settings = {
        "models": [{"name": "compared", "tokenizer": str(tmp_path / "model")}],
        "health": QUICK_HEALTH,
    }
    with router_process(settings) as router:
        async with EngineStub("compared") as stub, router.serving(stub):
            compared = f'kvroute_tokenizer_disagreements{{model="compared",replica="{stub.name}"}}'
            await router.until(lambda now: compared in now.text, "the tokenizers were compared")
