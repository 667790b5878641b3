"""Requests for which an engine computes the whole prompt even if it is cached; observed with vLLM
0.32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.engine_stub import EngineStub, engines
from tests.support.router_process import QUICK_HEALTH, RouterProcess, router_process

TEXT = "a hot prefix " * 20
HIT = len(TEXT) // 16 * 16
COMPLETIONS: dict[str, Any] = {"prompt": TEXT + "?"}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": TEXT + "?"}]}


@pytest.fixture(scope="module")
def router() -> Iterator[RouterProcess]:
    with router_process({"health": QUICK_HEALTH}) as process:
        yield process


async def predicted(
    router: RouterProcess, stub: EngineStub, body: dict[str, Any]
) -> tuple[int, int]:
    """What `/route` and the response header predict for a prompt of which all but the last token is
    cached."""
    stub.store(list(TEXT.encode()))
    await router.until_applied(stub)
    whole = {"model": stub.model, **body}
    route = await router.post("/route", whole)
    found = await router.post(
        "/v1/completions" if "prompt" in body else "/v1/chat/completions", whole
    )
    assert (route.status, found.status) == (200, 200)
    return route.json["hit"]["cached_tokens"], int(found.headers["x-kv-hit-tokens"])


WITH_PROMPT_LOGPROBS: list[dict[str, Any]] = [
    {**COMPLETIONS, "prompt_logprobs": 1},
    {**COMPLETIONS, "prompt_logprobs": 0},
    {**COMPLETIONS, "echo": True, "logprobs": 0},
    {**CHAT, "prompt_logprobs": 1},
    # A chat that does not say how many logprobs it wants gets 0, and an echo asks for as many of
    # the prompt.
    {**CHAT, "echo": True},
]
WITHOUT: list[dict[str, Any]] = [
    {**COMPLETIONS, "prompt_logprobs": None},
    {**COMPLETIONS, "echo": True},
    {**COMPLETIONS, "echo": False, "logprobs": 1},
    {**CHAT, "echo": False, "logprobs": True, "top_logprobs": 2},
]


def fields(body: dict[str, Any]) -> str:
    return ", ".join(
        name if name in ("prompt", "messages") else f"{name} {value}"
        for name, value in body.items()
    )


@pytest.mark.parametrize("body", WITH_PROMPT_LOGPROBS, ids=fields)
async def test_no_hit_is_predicted_if_the_request_asks_for_logprobs_of_its_prompt(
    router: RouterProcess, body: dict[str, Any]
) -> None:
    """They come from computing the prompt, so vLLM reads nothing from its cache; a predicted hit
    would send the prompt there for nothing."""
    async with engines(1, has_events=True) as (stub,), router.serving(stub):
        assert await predicted(router, stub, body) == (0, 0)


@pytest.mark.parametrize("body", WITHOUT, ids=fields)
async def test_a_hit_is_predicted_if_only_the_response_has_logprobs(
    router: RouterProcess, body: dict[str, Any]
) -> None:
    """These do not need the prompt computed, and many clients ask for them."""
    async with engines(1, has_events=True) as (stub,), router.serving(stub):
        assert await predicted(router, stub, body) == (HIT, HIT)
