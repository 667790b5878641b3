"""The paths of other indexers: what programs have that ask a Mooncake conductor or Dynamo's
indexer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.engine_stub import engines, prompt_ids, unique
from tests.support.hybrid_stub import HybridStub
from tests.support.router_process import QUICK_HEALTH, RouterProcess, router_process


@pytest.fixture(scope="module")
def router() -> Iterator[RouterProcess]:
    with router_process({"health": QUICK_HEALTH}) as process:
        yield process


async def test_both_are_told_what_each_replica_would_reuse(router: RouterProcess) -> None:
    """Tokens, by tier, in the names that each of them uses; the groups stand beside them."""
    async with engines(3, has_events=True) as stubs, router.serving(*stubs):
        long, short, _ = stubs
        ids = prompt_ids(80, 1)
        long.store(ids)
        short.store(ids[:32])
        for stub in (long, short):
            await router.until_applied(stub)
        body = {"model": long.model, "token_ids": [*ids, 7], "block_size": 16}
        found = (await router.post("/mooncake/query", {**body, "tenant_id": "t1"})).json
        group = {"0": {"kind": "full_attention", "tokens": 80}}
        assert set(found) == {"t1"}
        assert set(found["t1"]) == {long.name, short.name}
        assert found["t1"][long.name] == {
            "longest_matched": 80,
            "GPU": 80,
            "DP": {"0": 80},
            "CPU": 80,
            "DISK": 80,
            "groups": group,
        }
        only = await router.post("/mooncake/query", {**body, "instance_id": short.name})
        assert set(only.json["default"]) == {short.name}

        question = {"model_name": long.model, "token_ids": [*ids, 7]}
        answer = (await router.post("/dynamo/query", question)).json
        workers = (await router.get("/dynamo/workers")).json
        numbers = {each["replica"]: str(each["instance_id"]) for each in workers}
        assert set(numbers) == {stub.name for stub in stubs}
        assert answer["scores"] == {numbers[long.name]: {"0": 80}, numbers[short.name]: {"0": 32}}
        assert answer["instances"][numbers[long.name]] == {
            "longest_matched": 80,
            "gpu": 80,
            "dp": {"0": 80},
            "cpu": 80,
            "disk": 80,
            "groups": group,
        }


async def test_the_one_number_is_what_all_groups_allow(router: RouterProcess) -> None:
    """A window that slid out of the cache is no hit, however much full attention holds."""
    async with HybridStub(unique("hybrid")) as stub, router.serving(stub):
        ids = prompt_ids(96, 2)
        body = {"model": stub.model, "token_ids": [*ids, 7], "block_size": 16}
        stub.store(ids)
        await router.until_applied(stub)
        found = (await router.post("/mooncake/query", body)).json["default"][stub.name]
        assert (found["longest_matched"], found["groups"]["1"]["tokens"]) == (96, 96)
        stub.slide_on(ids)
        await router.until_applied(stub)
        assert (await router.post("/mooncake/query", body)).json == {"default": {}}


async def test_replicas_can_be_registered_and_taken_out(router: RouterProcess) -> None:
    """One that is known is left as it is; a new one needs its URL."""
    async with engines(1, has_events=True) as (stub,):
        known = {"instance_id": stub.name, "modelname": stub.model, "endpoint": "tcp://x:1"}
        refused = await router.post("/mooncake/register", known)
        assert (refused.status, refused.error["code"]) == (400, "invalid_value")
        new = {"instance_id": stub.name, "url": stub.url, "model_name": stub.model}
        assert (await router.post("/dynamo/register", new)).status == 201
        again = await router.post("/mooncake/register", known)
        assert again.json == {"status": "registered successfully", "instance_id": stub.name}
        gone = await router.post("/mooncake/unregister", known)
        assert gone.json["removed_instances"] == [f"{stub.name}|default|0"]
        assert (await router.post("/dynamo/unregister", known)).status == 404


@pytest.mark.parametrize("path", ["/mooncake/query", "/dynamo/query", "/mooncake/register"])
@pytest.mark.parametrize("body", [b"", b"[]", b'{"model": 7}', b'{"token_ids": [-1]}', b"\xff"])
async def test_bad_questions_are_refused(router: RouterProcess, path: str, body: bytes) -> None:
    """With place and rule."""
    answer = await router.post(path, body)
    assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")


async def test_unknown_models_and_hashes_are_named(router: RouterProcess) -> None:
    """Who asks by hashes learns what to ask instead."""
    unknown = await router.post("/dynamo/query", {"model_name": "nobody-has-it", "token_ids": [1]})
    assert unknown.status == 404
    by_hash = await router.post("/dynamo/query_by_hash", {"block_hashes": [1], "model_name": "m"})
    assert by_hash.status == 400
    assert "token_ids" in by_hash.error["message"]


async def test_keys_are_asked_for() -> None:
    """What is cached is told to nobody else."""
    keys = {"client_api_key": "a-key", "operator_api_key": "b-key"}
    with router_process({"health": QUICK_HEALTH, "server": keys}) as router:
        for path in ("/mooncake/query", "/dynamo/query", "/dynamo/register", "/dynamo/unregister"):
            assert (await router.post(path, {})).status == 401, path
        assert (await router.get("/dynamo/workers")).status == 401
