"""Gateways ask about text and chats: Python says which token ids they are, and the core answers as
Python would have."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Iterator
from random import Random
from typing import Any

import pytest

from tests.support.engine_stub import EngineStub
from tests.support.http_client import Answer, ask
from tests.support.model_files import write_byte_tokenizer
from tests.support.router_process import QUICK_HEALTH, RouterProcess, router_process

BY_PYTHON = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
"""With this header, a question is answered in Python."""
PATHS = ("/route", "/select", "/select_and_reserve")
VARYING = ("selection_id", "cost", "routing_seconds")


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(directory)
    models = [{"name": "spoken", "tokenizer": str(directory)}]
    with router_process({"health": QUICK_HEALTH, "models": models}) as process:
        yield process


@contextlib.asynccontextmanager
async def spoken(
    router: RouterProcess, count: int, **options: Any
) -> AsyncIterator[list[EngineStub]]:
    """Replicas that the core answers for."""
    async with contextlib.AsyncExitStack() as stack:
        stubs = [EngineStub("spoken", has_events=True, **options) for _ in range(count)]
        for stub in stubs:
            await stack.enter_async_context(stub)
        await stack.enter_async_context(router.serving(*stubs))
        while True:
            before = (await router.metrics()).sum("kvroute_tokenization_seconds_count")
            asked_of = await router.post("/route", {"model": "spoken", "token_ids": [1]})
            after = (await router.metrics()).sum("kvroute_tokenization_seconds_count")
            if after == before and asked_of.status == 200:  # the core has nothing to tokenise
                break
        yield stubs


def may_be_of_core(answer: Answer) -> bool:
    """The core writes a cost to the third place, Python without zeros at its end."""
    return re.search(rb'"cost":-?\d+\.\d{3}[,}]', answer.body) is not None


async def asked(
    router: RouterProcess, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> dict[str, Any]:
    """The answer, from the core unless *headers* say otherwise; what was reserved is given back."""
    answer = await router.post(path, body, headers)
    assert answer.status == 200, answer.body
    assert headers or may_be_of_core(answer), answer.body
    found = dict(answer.json)
    if "selection_id" in found:
        assert found["selection_id"] == body.get("selection_id", found["selection_id"])
        gone = await ask(router.port, "DELETE", f"/reservations/{found['selection_id']}")
        assert gone.status == 200
    kept = {name: value for name, value in found.items() if name not in VARYING}
    words = str(found["reason"]).partition(": a delay of ")[0].split("; ")
    kept["reason"] = [each for each in words if not re.match(r"[\d,]+ (for|ahead)", each)]
    return kept


def bodies(random: Random, prefixes: list[tuple[str, str]]) -> Iterator[list[dict[str, Any]]]:
    """Two like each other: text or chats that begin like what is cached, and fields that gateways
    leave in them. They share nothing: what one computes, the other must not find."""
    while True:
        kept, length = random.choice([64, 320, 640]), random.choice([1, 40, 600])
        cut, is_chat, has_salt = (
            random.randrange(kept),
            random.random() < 0.5,
            random.random() < 0.3,
        )
        more = random.choice([{}, {}, {"stream": True}, {"n": 2}, {"temperature": 0.5}])
        more = more | random.choice([{}, {}, {"user": "someone"}])
        made = []
        for prefix in random.choice(prefixes):
            text = prefix[:kept] + "".join(random.choices("xyz", k=length))
            parts = [{"role": "user", "content": part} for part in (text[:cut], text[cut:])]
            prompt = {"messages": parts} if is_chat else {"prompt": text}
            salt = {"cache_salt": f"{random.random()}"} if has_salt else {}
            made.append({"model": "spoken", **prompt, **more, **salt})
        yield made


@pytest.mark.parametrize("path", PATHS)
async def test_words_are_answered_as_by_python(router: RouterProcess, path: str) -> None:
    """Field by field, whatever is cached where."""
    random = Random(path)
    prefixes = [
        ("".join(random.choices("abcd ", k=640)), "".join(random.choices("efgh ", k=640)))
        for _ in range(3)
    ]
    async with spoken(router, 3) as stubs:
        for stub, two in zip(stubs, prefixes, strict=True):
            for prefix in two:
                stub.store(list(prefix.encode()))
            await router.until_applied(stub)
        made = bodies(random, prefixes)
        for _ in range(20):
            bodies_of_two = next(made)
            ways: list[dict[str, str] | None] = [None, BY_PYTHON]
            random.shuffle(ways)
            found = [
                await asked(router, path, body, headers)
                for body, headers in zip(bodies_of_two, ways, strict=True)
            ]
            for each in found:
                if "cache_salt" in bodies_of_two[0]:  # nothing is cached: chance decides
                    for varying in ("replica", "worker_id", "endpoint", "address"):
                        each.pop(varying, None)
            assert found[0] == found[1], bodies_of_two
    await router.until_idle()


async def test_tokens_of_words_are_counted_and_timed(router: RouterProcess) -> None:
    """Operators see how long a tokenizer takes, also where only gateways ask."""
    async with spoken(router, 1):
        before = await router.metrics()
        await asked(router, "/route", {"model": "spoken", "prompt": "how far?"})
        await router.until(
            lambda now: all(
                now.sum(name) == before.sum(name) + 1
                for name in ("kvroute_tokenization_seconds_count", "kvroute_routing_seconds_count")
            ),
            "it is counted",
        )


async def test_a_reservation_in_words_has_the_name_that_its_gateway_gives(
    router: RouterProcess,
) -> None:
    """It reports by that name."""
    async with spoken(router, 1):
        body = {"model": "spoken", "prompt": "how far?", "selection_id": "of-a-gateway"}
        await asked(router, "/select_and_reserve", body)
        answer = await router.post("/select_and_reserve", body)
        assert may_be_of_core(answer)
        again = await router.post("/select_and_reserve", body)
        assert (again.status, again.error["code"]) == (409, "reservation_exists")
        assert (await ask(router.port, "DELETE", "/reservations/of-a-gateway")).status == 200
    await router.until_idle()


@pytest.mark.parametrize(
    "fields",
    [
        {"avoid": ["somewhere"]},
        {"selection_id": "kept"},
        {"prompt": ["two", "texts"]},
        {"prompt": [], "messages": [{"role": "user", "content": "a"}], "tools": 1},
        {"endpoint": "/v1/messages", "messages": [{"role": "user", "content": "a"}]},
        {"model": "unknown"},
    ],
    ids=str,
)
async def test_what_is_not_usual_is_left_to_python(
    router: RouterProcess, fields: dict[str, Any]
) -> None:
    """The answer, or the error, is the same as if it had read the question first."""
    async with spoken(router, 1):
        body = {"model": "spoken", "prompt": "how far?", **fields}
        first = await router.post("/select", body)
        second = await router.post("/select", body, BY_PYTHON)
        assert (first.status, first.body) == (second.status, second.body)
