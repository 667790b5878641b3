"""Endpoints that only vLLM has: they go where their prompts are cached, as OpenAI's do. And the
order of requests at the engine, which is the router's to decide where it tells clients apart."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.actual_hits import hits
from tests.support.engine_stub import always, engines
from tests.support.router_process import QUICK_HEALTH, RouterProcess, router_process

IDS = list(range(1, 81))
GENERATE, BATCH = "/inference/v1/generate", "/v1/chat/completions/batch"
KEYED = {
    "health": QUICK_HEALTH,
    "server": {
        "client_api_keys": [{"name": "a", "key": "key-a", "cache_salt": "tenant-a"}],
        "extra_paths": ["/pooling"],
    },
}
KEY = {"authorization": "Bearer key-a"}
ORDER = {"x-vllm-priority": "-1000000000"}


@pytest.fixture(scope="module")
def router() -> Iterator[RouterProcess]:
    with router_process({"health": QUICK_HEALTH}) as process:
        yield process


@pytest.fixture(scope="module")
def keyed() -> Iterator[RouterProcess]:
    with router_process(KEYED) as process:
        yield process


async def test_token_ids_go_to_where_they_are_cached(router: RouterProcess) -> None:
    """vLLM's `--enable-scale-out`: they need no tokenizer, so the prediction is exact."""
    async with engines(3, has_events=True) as stubs, router.serving(*stubs):
        stubs[1].store(IDS)
        await router.until_applied(stubs[1])
        body = {
            "model": stubs[1].model,
            "sampling_params": {"max_tokens": 4, "extra_args": {"kv_cache_report_mode": "full"}},
            "token_ids": [*IDS, 7],
        }
        found = await router.post(GENERATE, body)
        assert (found.headers["x-kv-replica"], hits(found)) == (stubs[1].name, (80, 80))
        assert stubs[1].requests[-1].json == {
            **body,
            "sampling_params": {"max_tokens": 4, "extra_args": {}},
        }
        now = await router.metrics()
        assert now.sum("kvroute_predictions_total", replica=stubs[1].name, outcome="exact") == 1


@pytest.mark.parametrize("prompt", [IDS, "a" * 80])
async def test_an_adapter_beside_the_model_finds_nothing_of_the_model_s(
    router: RouterProcess, prompt: object
) -> None:
    """SGLang's `lora_path`: what the base model has cached was predicted for the adapter."""
    async with engines(1, has_events=True) as (stub,), router.serving(stub):
        stub.store(IDS)
        stub.store([ord("a")] * 80)
        await router.until_applied(stub)
        body = {"model": stub.model, "prompt": prompt}
        assert hits(await router.post("/v1/completions", body))[0] == 64
        found = await router.post("/v1/completions", {**body, "lora_path": "adapter"})
        assert hits(found)[0] == 0


async def test_a_batch_of_chats_goes_to_where_most_of_it_is_cached(router: RouterProcess) -> None:
    """It was a path that the router did not know (404); the header counts all conversations."""
    chats = [[{"role": "user", "content": letter * 80}] for letter in "abc"]
    async with engines(3, has_events=True) as stubs, router.serving(*stubs):
        for letter, stub in zip("ab", (stubs[0], stubs[0]), strict=True):
            stub.store([ord(letter)] * 64)
        stubs[2].store([ord("c")] * 80)
        for stub in (stubs[0], stubs[2]):
            await router.until_applied(stub)
        body = {"model": stubs[0].model, "messages": chats}
        found = await router.post(BATCH, body)
        assert found.status == 200
        assert found.headers["x-kv-replica"] == stubs[0].name
        assert found.headers["x-kv-hit-tokens"] == "128"
        assert stubs[0].requests[-1].json == body


@pytest.mark.parametrize("priority", ["-5", "7", "high"])
async def test_without_keys_and_classes_a_priority_goes_on_as_it_is(
    router: RouterProcess, priority: str
) -> None:
    """The router has no other opinion then, and the engine has its own rules."""
    async with engines(1) as (stub,), router.serving(stub):
        body = b'{"model": "%b", "prompt": [1], "priority": -5}' % stub.model.encode()
        found = await router.post("/v1/completions", body, {"x-vllm-priority": priority})
        assert found.status == 200
        assert stub.requests[-1].body == body
        assert stub.requests[-1].headers["x-vllm-priority"] == priority


async def test_a_priority_above_64_bits_reaches_no_engine(router: RouterProcess) -> None:
    """vLLM answers it with 500, which would count against a healthy replica."""
    huge = 10**22
    async with engines(1, paths={"/rerank": always(b"{}")}) as (stub,), router.serving(stub):
        body = {"model": stub.model, "prompt": [1]}
        for path, sent, headers, place in (
            ("/v1/completions", {**body, "priority": huge}, {}, "$.priority: "),
            ("/rerank", {**body, "priority": -huge}, {}, "$.priority: "),
            ("/v1/completions", body, {"x-vllm-priority": str(huge)}, "x-vllm-priority: "),
        ):
            refused = await router.post(path, sent, headers)
            assert (refused.status, refused.error["code"]) == (400, "invalid_value")
            assert refused.error["message"].startswith(place)
            assert "64 bits" in refused.error["message"]
        assert stub.requests == []


async def test_where_clients_have_keys_no_client_goes_before_the_others(
    keyed: RouterProcess,
) -> None:
    """Else each could put itself first at an engine, whatever class its key has in the router."""
    async with (
        engines(1, paths={"/pooling": always(b"{}")}) as (stub,),
        keyed.serving(stub),
    ):
        body = b'{"model": "%b", "prompt": [1],  "priority": -9}' % stub.model.encode()
        for path in ("/v1/completions", "/pooling"):
            assert (await keyed.post(path, body, {**KEY, **ORDER})).status == 200
            request = stub.requests[-1]
            assert "x-vllm-priority" not in request.headers
            assert set(request.json) == {"model", "prompt", "cache_salt"}
        large = {"model": stub.model, "prompt": "x" * 300_000, "priority": 1}
        assert (await keyed.post("/v1/completions", large, KEY)).status == 200
        assert set(stub.requests[-1].json) == {"model", "prompt", "cache_salt"}
