"""Real engines pull from each other's memory what a real router tells them to."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.support.actual_hits import cached_tokens, hits, until_told
from tests.support.engine_process import EngineProcess, engine_processes, simulated
from tests.support.router_process import QUICK_HEALTH, RouterProcess, router_process
from tests.support.vllm_publisher import free_port

PROMPT = [number * number % 250 for number in range(1100)]
ARGUMENTS = simulated(
    "gptoss", num_blocks=400, cpu_blocks=400, max_model_len=2048, retention_interval="dense"
)


@pytest.fixture(scope="module")
def router() -> Iterator[RouterProcess]:
    with router_process({"health": QUICK_HEALTH}) as process:
        yield process


async def filled(router: RouterProcess, holder: EngineProcess) -> str:
    """The holder computes the prompt, and the model is named."""
    model: str = (await router.replica(holder.name))["models"][0]
    body = {"model": model, "prompt": PROMPT, "max_tokens": 1}
    answer = await router.post("/v1/completions", body)
    assert (answer.status, answer.headers["x-kv-replica"]) == (200, holder.name)
    await until_told(router, holder)
    return model


async def test_what_another_s_memory_holds_is_pulled_and_predicted_to_the_token(
    router: RouterProcess,
) -> None:
    """The holder gets no requests any more, and its cache serves all the same. What a client says
    of peers is not passed on."""
    port = free_port()
    serving = ("--tier", "p2p", f"port={port}", "answer_s=60")
    pulling = ("--tier", "p2p", "answer_s=60")
    async with (
        engine_processes(1, *ARGUMENTS, *serving) as (holder,),
        engine_processes(1, *ARGUMENTS, *pulling) as (puller,),
        router.serving(holder, p2p={"port": port}),
    ):
        model = await filled(router, holder)
        async with router.serving(puller, p2p={"port": free_port()}):
            await router.post(f"/replicas/{holder.name}/drain")
            body = {"model": model, "prompt": [*PROMPT, 7], "max_tokens": 1}
            route = await router.post("/route?explain=true", body)
            (candidate,) = route.json["ranking"]
            assert candidate["hit"]["pull_from"] == holder.name
            assert f"(1,088 PEER of {holder.name})" in candidate["reason"]
            nobody = {"kv_request_id": "x", "remote_host": "192.0.2.1", "remote_port": 1}
            answer = await router.post(
                "/v1/completions", {**body, "kv_transfer_params": {"remote_kv_source": nobody}}
            )
            assert answer.headers["x-kv-replica"] == puller.name
            predicted, actual = hits(answer)
            assert predicted == actual == 1088
            await until_told(router, puller)
            again = hits(await router.post("/v1/completions", body))
            assert again == (1088, 1088), "it is a copy of its own now"


async def test_without_the_option_nobody_is_told_to_pull(router: RouterProcess) -> None:
    """Engines that do not know the field may refuse it."""
    async with (
        engine_processes(2, *ARGUMENTS, "--tier", "p2p") as (holder, other),
        router.serving(holder),
    ):
        model = await filled(router, holder)
        async with router.serving(other):
            await router.post(f"/replicas/{holder.name}/drain")
            body = {"model": model, "prompt": [*PROMPT, 7], "max_tokens": 1}
            answer = await router.post("/v1/completions", json.loads(json.dumps(body)))
            assert (answer.headers["x-kv-replica"], cached_tokens(answer)) == (other.name, 0)
