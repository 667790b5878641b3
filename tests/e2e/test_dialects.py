"""The paths of other indexers: what programs have that ask a Mooncake conductor or Dynamo's
indexer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.blocks import Prefix
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


@pytest.mark.parametrize(
    ("dialect", "name"), [("mooncake", "additionalsalt"), ("dynamo", "additional_salt")]
)
async def test_a_registration_in_a_namespace_of_its_own_is_refused(
    router: RouterProcess, dialect: str, name: str
) -> None:
    """Replicas of one model take each other's prompts; an empty one means nothing."""
    async with engines(1, has_events=True) as (stub,):
        new = {"instance_id": stub.name, "url": stub.url, "model_name": stub.model}
        refused = await router.post(f"/{dialect}/register", {**new, name: "w8a8"})
        assert (refused.status, refused.error["code"]) == (400, "invalid_value")
        assert f"$.{name}" in refused.error["message"]
        taken = await router.post(f"/{dialect}/register", {**new, name: ""})
        assert taken.status in (200, 201)
        await router.post(f"/{dialect}/unregister", new)


@pytest.mark.parametrize("path", ["/mooncake/query", "/dynamo/query", "/mooncake/register"])
@pytest.mark.parametrize("body", [b"", b"[]", b'{"model": 7}', b'{"token_ids": [-1]}', b"\xff"])
async def test_bad_questions_are_refused(router: RouterProcess, path: str, body: bytes) -> None:
    """With place and rule."""
    answer = await router.post(path, body)
    assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")


async def test_by_hashes_both_are_told_the_same(router: RouterProcess) -> None:
    """A program that has the engine's hashes needs no tokens."""
    async with HybridStub(unique("hybrid")) as stub, router.serving(stub):
        ids = prompt_ids(96, 3)
        hashes = Prefix(ids).hashes
        body = {"model": stub.model, "block_size": 16}
        stub.store(ids)
        await router.until_applied(stub)
        by_tokens = await router.post("/mooncake/query", {**body, "token_ids": [*ids, 7]})
        for name in ("seq_hashes", "block_hash"):
            found = await router.post("/mooncake/query_by_hash", {**body, name: hashes})
            expected = {**by_tokens.json["default"][stub.name], "exact": True}
            assert found.json == {"default": {stub.name: expected}}
        question = {"model_name": stub.model, "block_hashes": hashes[:3]}
        ((_, found),) = (
            (await router.post("/dynamo/query_by_hash", question)).json["instances"].items()
        )
        assert (found["longest_matched"], found["exact"]) == (48, True)
        stub.slide_on(ids)
        await router.until_applied(stub)
        slid = (await router.post("/mooncake/query_by_hash", {**body, "seq_hashes": hashes})).json
        assert slid["default"][stub.name]["longest_matched"] == 0
        assert slid["default"][stub.name]["groups"]["0"]["tokens"] == 96
        assert slid["default"][stub.name]["exact"]


async def test_an_answer_by_hashes_says_where_it_cannot_be_exact(router: RouterProcess) -> None:
    """Hashes that a replica does not hold may be another engine's."""
    async with engines(1, has_events=True) as (stub,), router.serving(stub):
        ids = prompt_ids(32, 4)
        stub.store(ids)
        await router.until_applied(stub)
        body = {"model": stub.model, "seq_hashes": ["ab" * 32, 5, -1]}
        found = (await router.post("/mooncake/query_by_hash", body)).json["default"][stub.name]
        assert (found["longest_matched"], found["exact"]) == (0, False)
        assert "none of these hashes" in found["problem"]
        body = {"model": stub.model, "seq_hashes": Prefix(ids).hashes, "block_size": 64}
        found = (await router.post("/mooncake/query_by_hash", body)).json["default"][stub.name]
        assert (found["longest_matched"], found["problem"]) == (
            32,
            "its hashes stand for 16 tokens each",
        )
        nobody = {**body, "instance_id": "nobody"}
        assert (await router.post("/mooncake/query_by_hash", nobody)).json == {"default": {}}


@pytest.mark.parametrize(
    ("hashes", "place"),
    [
        ([], "seq_hashes"),
        (["xyz"], "$.seq_hashes[0]"),
        ([1, ""], "$.seq_hashes[1]"),
        ([2**64], "$.seq_hashes[0]"),
        ([-(2**63) - 1], "$.seq_hashes[0]"),
        (["a" * 1026], "$.seq_hashes[0]"),
        ([1.5], "seq_hashes[0]"),
        ([0] * 65_537, "seq_hashes"),
        (None, "$.seq_hashes"),
    ],
)
async def test_hashes_that_are_none_are_refused(
    router: RouterProcess, hashes: object, place: str
) -> None:
    """Bounded, with their place."""
    async with engines(1, has_events=True) as (stub,), router.serving(stub):
        body = {"model": stub.model, "seq_hashes": hashes}
        answer = await router.post("/mooncake/query_by_hash", body)
        assert answer.status == 400
        assert place in answer.error["message"]


async def test_unknown_models_are_named(router: RouterProcess) -> None:
    """Whatever they are asked by."""
    unknown = await router.post("/dynamo/query", {"model_name": "nobody-has-it", "token_ids": [1]})
    assert unknown.status == 404
    by_hash = await router.post("/dynamo/query_by_hash", {"block_hashes": [1], "model_name": "m"})
    assert by_hash.status == 404


async def test_keys_are_asked_for() -> None:
    """What is cached is told to nobody else."""
    keys = {"client_api_key": "a-key", "operator_api_key": "b-key"}
    with router_process({"health": QUICK_HEALTH, "server": keys}) as router:
        by_hash = ("/mooncake/query_by_hash", "/dynamo/query_by_hash")
        for path in (
            "/mooncake/query",
            "/dynamo/query",
            *by_hash,
            "/dynamo/register",
            "/dynamo/unregister",
        ):
            assert (await router.post(path, {})).status == 401, path
        assert (await router.get("/dynamo/workers")).status == 401


async def test_a_key_that_keeps_its_prompts_to_itself_is_told_nothing_by_hashes() -> None:
    """A hash does not say whose prompt it is: guesses would find those of others."""
    salted = {"name": "team-a", "key": "a-key", "cache_salt": "salt-of-team-a"}
    keys = {"client_api_keys": [salted], "operator_api_key": "b-key"}
    server = {**keys, "clients_see_hits": True}
    config = {"health": QUICK_HEALTH, "server": server}
    async with engines(1, has_events=True) as (stub,):
        with router_process(config) as router:
            operator = {"authorization": "Bearer b-key"}
            replica = {"id": stub.name, "url": stub.url, "models": [stub.model]}
            assert (await router.post("/replicas", replica, operator)).status == 201
            body = {"model": stub.model, "seq_hashes": [1]}
            headers = {"authorization": "Bearer a-key"}
            refused = await router.post("/mooncake/query_by_hash", body, headers)
            assert (refused.status, refused.error["code"]) == (400, "invalid_value")
            assert "token_ids" in refused.error["message"]
