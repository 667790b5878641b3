"""Engines that order what waits by numbers are told one: by class, tokens to compute and age."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.engine_process import engine_processes, simulated
from tests.support.engine_stub import always, engines
from tests.support.router_process import QUICK_HEALTH, RouterProcess, router_process

COMPLETIONS, MESSAGES = "/v1/completions", "/v1/messages"
HEADER = "x-vllm-priority"
CLASS = 2**58
AGEING_TOKENS_PER_S = 1000
KEYS = [
    {"name": "first", "key": "key-first", "priority": "high"},
    {"name": "other", "key": "key-other"},
]
ORDERED = {"scheduling_policy": "priority"}
SGLANG = {"enable_priority_scheduling": True, "schedule_low_priority_values_first": False}


@pytest.fixture(scope="module")
def router() -> Iterator[RouterProcess]:
    with router_process({"health": QUICK_HEALTH}) as process:
        yield process


def saying(info: dict[str, Any]) -> dict[str, Any]:
    """What an engine has besides, where it says so much of itself."""
    return {"/server_info": always(json.dumps(info).encode())}


def tokens(number: int, since_s: float, number_class: int = 1) -> tuple[float, float]:
    """The tokens to compute that a number stands for, at least and at most: it was made between
    *since_s* and now."""
    place = number - number_class * CLASS
    return place - AGEING_TOKENS_PER_S * time.time() - 1, place - AGEING_TOKENS_PER_S * since_s + 1


async def test_an_engine_that_orders_by_priority_is_told_what_is_left_to_compute(
    router: RouterProcess,
) -> None:
    """Prompt length is all that others know; what clients say of themselves goes nowhere."""
    cached = list(range(1, 3201))
    async with (
        engines(1, has_events=True, paths=saying(ORDERED)) as (stub,),
        router.serving(stub, priority_order="ask"),
    ):
        stub.store(cached)
        await router.until_applied(stub)
        found = []
        for prompt in ([*cached, 7], list(range(50_000, 50_600))):
            since = time.time()
            body = {"model": stub.model, "prompt": prompt, "priority": -5}
            assert (await router.post(COMPLETIONS, body, {HEADER: "-9"})).status == 200
            found.append(tokens(int(stub.requests[-1].headers[HEADER]), since))
        assert found[0][0] <= 1 <= found[0][1]
        assert found[1][0] <= 600 <= found[1][1]
        message = {"role": "user", "content": "hello"}
        body = {"model": stub.model, "messages": [message], "max_tokens": 5}
        await router.post(MESSAGES, body)
        assert HEADER not in stub.requests[-1].headers
        assert stub.requests[-1].json == body


@pytest.mark.parametrize(
    ("info", "configured", "sign"),
    [
        (SGLANG, "ask", -1),
        (SGLANG | {"schedule_low_priority_values_first": True}, "ask", 1),
        ({}, "higher_first", -1),
        ({}, "lower_first", 1),
    ],
)
async def test_sglang_reads_the_number_from_the_body(
    router: RouterProcess, info: dict[str, Any], configured: str, sign: int
) -> None:
    """Higher goes first there, if it was not started otherwise."""
    details = {"owned_by": "sglang"}
    async with (
        engines(1, paths=saying(info), model_details=details) as (stub,),
        router.serving(stub, priority_order=configured),
    ):
        since = time.time()
        body = b'{"prompt": [1, 2, 3],  "priority": 5, "model": "%b"}' % stub.model.encode()
        assert (await router.post(COMPLETIONS, body)).status == 200
        sent = stub.requests[-1]
        number = sent.json["priority"]
        assert sent.body == body.replace(b"5", b"%d" % number, 1)
        least, most = tokens(sign * number, since)
        assert least <= 3 <= most
        assert HEADER not in sent.headers


@pytest.mark.parametrize(("order", "sign"), [("higher_first", -1), ("lower_first", 1)])
async def test_the_core_tells_sglang_as_python_does(
    router: RouterProcess, order: str, sign: int
) -> None:
    """The number, its place in the body, and all other bytes."""
    async with (
        engines(1, has_events=True, model_details={"owned_by": "sglang"}) as (stub,),
        router.serving(stub, priority_order=order),
    ):
        cached = list(range(1, 641))
        stub.store(cached)
        await router.until_applied(stub)
        name = stub.model.encode()
        bodies = [
            b' {"model": "%b", "prompt": %b}' % (name, json.dumps([*cached, *more]).encode())
            for more in ([7], [8] * 300)
        ] + [b'{"model":"%b","priority" : -7, "prompt":[1, 2, 3]}' % name]
        for body, to_compute in zip(bodies, (1, 300, 3), strict=True):
            while True:  # until the core decides
                since = time.time()
                await router.post(COMPLETIONS, body)
                by_core = stub.requests[-1]
                (entry,) = (await router.get("/requests?limit=1")).json["requests"]
                if entry["end"] and entry["reason"].endswith("; decided by the data plane"):
                    break
            least, most = tokens(sign * by_core.json["priority"], since)
            assert least <= to_compute <= most
            await router.post(COMPLETIONS, body, {HEADER: "1"})
            by_python = stub.requests[-1]
            assert HEADER not in by_core.headers
            bare = [
                re.sub(rb'"priority"( ?):( ?)-?\d+', rb'"priority"\1:\2N', each.body)
                for each in (by_core, by_python)
            ]
            assert bare[0] == bare[1]


@pytest.mark.parametrize(
    ("info", "configured"),
    [
        ({"scheduling_policy": "fcfs"}, "ask"),
        ({"scheduling_policy": "shortest"}, "ask"),
        ({"enable_priority_scheduling": False}, "ask"),
        ({"enable_priority_scheduling": "yes"}, "ask"),
        ({}, "ask"),
        (ORDERED, None),
    ],
)
async def test_an_engine_that_does_not_order_is_told_nothing(
    router: RouterProcess, info: dict[str, Any], configured: str | None
) -> None:
    """It may refuse a request with a priority; and nobody is told without being asked for."""
    async with (
        engines(1, paths=saying(info)) as (stub,),
        router.serving(stub, priority_order=configured),
    ):
        body = {"model": stub.model, "prompt": [1, 2, 3]}
        assert (await router.post(COMPLETIONS, body)).status == 200
        assert HEADER not in stub.requests[-1].headers
        assert stub.requests[-1].json == body


async def test_the_class_of_a_key_comes_before_everything_else() -> None:
    """And a client cannot choose another one."""
    config = {"health": QUICK_HEALTH, "server": {"client_api_keys": KEYS}}
    with router_process(config) as router:
        async with (
            engines(1, paths=saying(ORDERED)) as (stub,),
            router.serving(stub, priority_order="ask"),
        ):
            for key, number_class in (("key-first", 0), ("key-other", 1)):
                since, body = time.time(), {"model": stub.model, "prompt": [1, 2], "priority": 0}
                headers = {"authorization": f"Bearer {key}", HEADER: "-1"}
                assert (await router.post(COMPLETIONS, body, headers)).status == 200
                assert "priority" not in stub.requests[-1].json
                number = int(stub.requests[-1].headers[HEADER])
                least, most = tokens(number, since, number_class)
                assert least <= 2 <= most


async def test_a_real_engine_says_its_order_and_takes_the_numbers(router: RouterProcess) -> None:
    """`kvroute engine --scheduling-policy priority`."""
    arguments = simulated("gptoss", served_model_name="ordered", scheduling_policy="priority")
    async with (
        engine_processes(1, *arguments) as (engine,),
        router.serving(engine, priority_order="ask"),
    ):
        for path, asked in (
            (COMPLETIONS, {"prompt": "hello " * 20}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ):
            body = {"model": "ordered", "max_tokens": 3, **asked}
            assert (await router.post(path, body)).status == 200


@pytest.mark.parametrize("path", [COMPLETIONS, "/select_and_reserve"])
async def test_a_priority_that_is_no_class_leaves_no_request_under_way(path: str) -> None:
    """It was refused when the log had it already, and was shown as running for ever."""
    async with engines(1) as (stub,):
        with router_process({"overload": {"priority_header": "x-priority"}}) as router:
            async with router.serving(stub):
                body = {"model": stub.model, "model_name": stub.model, "prompt": [1, 2, 3]}
                refused = await router.post(path, body, {"x-priority": "vip"})
                assert (refused.status, refused.error["code"]) == (400, "invalid_value")
                assert (await router.get("/requests")).json["requests"] == []
