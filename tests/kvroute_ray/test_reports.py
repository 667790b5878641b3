"""What a replica of Ray reports of a call, at a real router."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from kvroute_ray.health import HealthPort
from kvroute_ray.reports import Reporter, usage_at_the_end_of
from router.client import AsyncSelectionClient
from tests.support.engine_stub import engines
from tests.support.router_process import QUICK_HEALTH, RouterProcess, router_process
from tests.support.vllm_publisher import free_port

USAGE = {"prompt_tokens": 64, "prompt_tokens_details": {"cached_tokens": 16}}


@pytest.fixture(scope="module")
def router() -> Iterator[RouterProcess]:
    with router_process({"health": QUICK_HEALTH}) as process:
        yield process


class UsageModel(BaseModel):
    """As Ray's own engines report it."""

    prompt_tokens: int = 64
    prompt_tokens_details: dict[str, int] = {"cached_tokens": 16}


@pytest.mark.parametrize(
    "pieces",
    [
        [json.dumps({"choices": [], "usage": USAGE}).encode()],
        [b'data: {"usage": null}\n\n', f"data: {json.dumps({'usage': USAGE})}\n\n", b"data: [D]"],
        [b'data: {"usa', f'ge": {json.dumps(USAGE)}}}\n\n'],
        [{"text": "a"}, {"usage": USAGE}, {"text": "b"}],
        [SimpleNamespace(usage=UsageModel())],
    ],
    ids=["json", "events", "cut", "mappings", "models"],
)
async def test_the_usage_of_a_response_is_reported(
    router: RouterProcess, pieces: list[Any]
) -> None:
    """Whatever it is made of; the first piece is the first token."""
    async with (
        engines(1) as (stub,),
        router.serving(stub),
        AsyncSelectionClient(router.url) as client,
    ):
        reporter = Reporter(router.url)
        booked = await client.reserve({"model": stub.model, "token_ids": [1] * 64})
        async with reporter.report(booked) as report:
            for piece in pieces:
                report.saw(piece)
        (logged,) = (await router.get("/requests?limit=1")).json["requests"]
        assert (logged["end"], logged["actual"]) == ("completed", 16)
        await reporter.close()


async def test_a_failure_is_reported_and_goes_on(router: RouterProcess) -> None:
    """The books must not wait for a deadline."""
    async with (
        engines(1) as (stub,),
        router.serving(stub),
        AsyncSelectionClient(router.url) as client,
    ):
        reporter = Reporter(router.url)
        booked = await client.reserve({"model": stub.model, "token_ids": [1] * 64})

        async def fail() -> None:
            async with reporter.report(booked) as report:
                report.failure = "closed"
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()
        await router.until_idle()
        assert (await router.replica(stub.name))["failed_requests"] == 1
        await reporter.close()


async def test_without_a_booking_or_a_router_responses_end_as_ever(router: RouterProcess) -> None:
    """Reports are for the router's sake."""
    reporter = Reporter(f"http://127.0.0.1:{free_port()}")
    async with reporter.report(None) as report:
        report.saw(b"x")
    assert report.headers == {}
    async with (
        engines(1) as (stub,),
        router.serving(stub),
        AsyncSelectionClient(router.url) as client,
    ):
        booked = await client.reserve({"model": stub.model, "token_ids": [1] * 64})
        async with reporter.report(booked) as report:
            report.saw(b"x")
        await client.end(booked)
    await reporter.close()


@pytest.mark.parametrize(
    "text",
    [b"", b'"usage"', b'"usage": ', b'"usage": [1]', b'{"text": "\\"usage\\": {}"}', b'"usage": {'],
)
def test_what_is_no_usage_is_none(text: bytes) -> None:
    """Responses hold what a model says."""
    assert usage_at_the_end_of(text) is None


def test_the_last_usage_counts_in_time() -> None:
    """Engines report it with every event, if asked; and a response may be hostile."""
    assert usage_at_the_end_of(b'"usage": {"a": 1} "usage": {"a": 2} "usage": null') == {"a": 2}
    assert usage_at_the_end_of(b'"usage":' + b"[" * 16_000) is None


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_a_health_port_answers_for_an_engine(host: str) -> None:
    """Until it is not well, and only what it is asked for."""
    is_well = True
    port = HealthPort(host, lambda: is_well)
    async with httpx.AsyncClient(base_url=port.url) as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/metrics")).status_code == 404
        is_well = False
        assert (await client.get("/health")).status_code == 503
    await asyncio.to_thread(port.close)
    async with httpx.AsyncClient(base_url=port.url) as client:
        with pytest.raises(httpx.ConnectError):
            await client.get("/health")
