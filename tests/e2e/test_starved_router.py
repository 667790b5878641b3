"""A router that gets no processor for a while has missed nothing: it must not look as if it had."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.actual_hits import hits, until_told
from tests.support.engine_process import EngineProcess, engine_processes, simulated
from tests.support.router_process import QUICK_HEALTH, RouterProcess, router_process

STOPPED_S = 4.0
"""Longer than the first silence after which the tail is looked at, and than every health check."""
CHANGES = "connecting", "recovering", "suspect", "start from nothing"


@pytest.fixture(scope="module")
def router() -> Iterator[RouterProcess]:
    with router_process({"health": QUICK_HEALTH, "events": {"silent_after_s": 2.0}}) as process:
        yield process


async def stream_of(router: RouterProcess, engine: EngineProcess) -> dict[str, Any]:
    """How its events were followed so far."""
    (source,) = (await router.replica(engine.name))["sources"]
    return dict(source["feed"]["stream"])


async def until_heard(router: RouterProcess, engine: EngineProcess) -> None:
    """Wait until the router has taken all heartbeats that it missed, and one more."""
    await until_told(router, engine)
    seen = (await stream_of(router, engine))["last_seq"]
    while (await stream_of(router, engine))["last_seq"] == seen:
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("times", [1, 3])
async def test_a_quiet_router_that_stood_still_reports_no_loss(
    router: RouterProcess, times: int
) -> None:
    """On a machine that is short of processors a quiet router flapped between recovering and live,
    and each time its hits were discounted."""
    model = f"m{times}"
    options = {"served_model_name": model, "max_model_len": 1024}
    async with (
        engine_processes(1, *simulated("gemma", **options)) as (engine,),
        router.serving(engine),
    ):
        body = {"model": model, "prompt": [5] * 200, "max_tokens": 1}
        await router.post("/v1/completions", body)
        await until_told(router, engine)
        earlier, logged = await stream_of(router, engine), len(router.log())
        for _ in range(times):
            router.process.send_signal(signal.SIGSTOP)
            try:
                await asyncio.sleep(STOPPED_S)
            finally:
                router.process.send_signal(signal.SIGCONT)
            answer = await router.post("/v1/completions", body)
            predicted, cached = hits(answer)
            assert predicted == cached > 0
            await until_heard(router, engine)
        said = router.log()[logged:]
        assert not [line for line in said.splitlines() if line.endswith(CHANGES)], said
        stream = await stream_of(router, engine)
        for name in ("connections", "gaps", "restarts", "snapshots", "replays"):
            assert stream[name] == earlier[name], (name, stream)
