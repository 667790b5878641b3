"""What an autoscaler of the engines goes by, from a real router."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.engine_stub import after, unique
from tests.support.hybrid_stub import HybridStub
from tests.support.router_process import QUICK_HEALTH, router_process


async def test_the_backlog_is_what_waits_for_its_first_token_in_seconds_of_work() -> None:
    """Tokens alone mean another load on every GPU; an idle fleet has none."""
    done = asyncio.Event()
    with router_process({"health": QUICK_HEALTH}) as router:
        stub = HybridStub(unique("model"), behaviour=after(done), waiting_requests=3)
        async with stub, router.serving(stub):
            idle = await router.metrics()
            asking = asyncio.create_task(
                router.post("/v1/completions", {"model": stub.model, "prompt": [*range(4000)]})
            )
            labels = {"model": stub.model, "replica": stub.name}
            await router.until(
                lambda now: now.sum("kvroute_prefill_backlog_seconds", **labels), "it waits there"
            )
            waiting = await router.metrics()
            done.set()
            assert (await asking).status == 200
            await router.until_idle()
            over = await router.metrics()
    speed = waiting.sum("kvroute_prefill_tokens_per_second", model=stub.model)
    backlog = waiting.sum("kvroute_prefill_backlog_seconds", **labels)
    assert backlog == pytest.approx(4000 / speed)
    for scrape in (idle, over):
        assert f'kvroute_prefill_backlog_seconds{{model="{stub.model}"' in scrape.text
        assert scrape.sum("kvroute_prefill_backlog_seconds") == 0
        assert f'kvroute_cache_pressure{{dp_rank="0",model="{stub.model}"' in scrape.text
        assert scrape.sum("kvroute_cache_pressure") == 0
