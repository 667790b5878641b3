"""Where a gateway is to send a request, told without Python as Python tells it, with what each KV
cache group holds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from kvevents.layout import GroupKind, KVCacheGroup, KVCacheLayout
from tests.support.blocks import FULL, mamba, window
from tests.support.engine_stub import EngineStub, engines, prompt_ids
from tests.support.router_process import QUICK_HEALTH, RouterProcess, router_process

BY_PYTHON = {"x-vllm-priority": "0"}
"""With this header, a question is answered in Python."""
UNCACHED = KVCacheGroup(GroupKind.NOT_CACHED, 1)
LAYOUTS = {
    "full": [FULL],
    "window": [FULL, window(40)],
    "states": [FULL, UNCACHED, mamba()],
    "chunks": [
        FULL,
        KVCacheGroup(GroupKind.CHUNKED_LOCAL, 16, attention_chunk_size=128),
    ],
}


@pytest.fixture(scope="module")
def router() -> Iterator[RouterProcess]:
    with router_process({"server": {"threads": 2}, "health": QUICK_HEALTH}) as process:
        yield process


async def decided(router: RouterProcess, model: str) -> tuple[float, float]:
    """How many decisions there were, and how many of them in Python."""
    now = await router.metrics()
    names = "kvroute_routing_seconds_count", "kvroute_tokenization_seconds_count"
    all_of_them, of_python = (now.sum(name, model=model) for name in names)
    return all_of_them, of_python


async def select(
    router: RouterProcess, body: dict[str, Any], headers: dict[str, str] | None = None
) -> dict[str, Any]:
    """The answer, from the core unless *headers* say otherwise."""
    model = body.get("model") or body["model_name"]
    before = await decided(router, model)
    answer = await router.post("/select", body, headers)
    assert answer.status == 200, answer.body
    after = await decided(router, model)
    while after[0] == before[0]:  # the core tells of it a moment later
        await asyncio.sleep(0.001)
        after = await decided(router, model)
    assert (after[0] - before[0], after[1] - before[1]) == (1, 1 if headers else 0)
    return dict(answer.json)


async def until_core(router: RouterProcess, stub: EngineStub) -> None:
    """Ask until the core answers."""
    while True:
        before = await decided(router, stub.model)
        body = {"model": stub.model, "token_ids": prompt_ids(64, 900)}
        assert (await router.post("/select", body)).status == 200
        after = await decided(router, stub.model)
        if after[1] == before[1]:
            return


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_selection_of_the_core_is_python_s(router: RouterProcess, layout: str) -> None:
    """Field by field, whatever is cached where."""
    random = Random(layout)
    options: dict[str, Any] = {"layout": KVCacheLayout.build(LAYOUTS[layout])}
    async with engines(2, has_events=True, **options) as stubs, router.serving(*stubs):
        prefixes = [prompt_ids(640, 10 + number) for number in range(2)]
        for stub, prefix in zip(stubs, prefixes, strict=True):
            stub.store(prefix)
            await router.until_applied(stub)
        await until_core(router, stubs[0])
        kinds = {group.kind.value for group in LAYOUTS[layout] if group is not UNCACHED}
        for number in range(12):
            kept = random.choice([0, 64, 320, 640])
            more = prompt_ids(random.choice([1, 1, 40, 900]), 100 + number)
            name, prompt = random.choice(
                [("model", "token_ids"), ("model_name", "token_ids"), ("model", "prompt")]
            )
            body = {
                name: stubs[0].model,
                prompt: [*random.choice(prefixes)[:kept], *more],
                "stream": random.random() < 0.5,
            }
            found = await select(router, body)
            other = await select(router, body, BY_PYTHON)
            for each in (found, other):
                # Chance decides between replicas of which neither has any of it.
                if not kept:
                    for varying in ("replica", "worker_id", "endpoint", "address"):
                        each.pop(varying)
            assert found == other
            (groups,) = found["groups"]
            if len(body[prompt]) > 1:
                assert {group["kind"] for group in groups} == kinds
                assert groups[0]["tokens"] == kept
            else:
                assert groups == []


async def test_a_selection_says_what_lower_tiers_have(router: RouterProcess) -> None:
    """By tier, and in the words of other indexers."""
    async with engines(1, has_events=True) as (stub,), router.serving(stub):
        ids = prompt_ids(640, 50)
        stub.store(ids)
        await router.until_applied(stub)
        stub.offload(ids, "CPU")
        stub.evict(ids)
        await until_core(router, stub)
        body = {"model": stub.model, "token_ids": [*ids, 7]}
        found = await select(router, body)
        while found["overlap"]["gpu"] or not found["hit"]["by_tier"]:
            found = await select(router, body)
        assert found == await select(router, body, BY_PYTHON)
        assert found["hit"]["by_tier"] == {"CPU": 640}
        assert [group["tokens"] for group in found["groups"][0]] == [0]


async def test_a_selection_that_is_booked_later_is_python_s_to_keep(router: RouterProcess) -> None:
    """The core keeps nothing between two questions."""
    async with engines(1, has_events=True) as (stub,), router.serving(stub):
        await until_core(router, stub)
        before = await decided(router, stub.model)
        body = {"model": stub.model, "token_ids": prompt_ids(64, 4), "selection_id": "kept"}
        assert (await router.post("/select", body)).json["selection_id"] == "kept"
        after = await decided(router, stub.model)
        assert after[1] == before[1] + 1
        booked = await router.post("/reservations", {"selection_id": "kept"})
        assert booked.status == 201
        ended = await router.delete("/reservations/kept")
        assert ended.status == 200
