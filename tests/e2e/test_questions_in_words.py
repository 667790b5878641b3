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

BY_PYTHON = {"x-vllm-priority": "0"}
"""With this header, a question is answered in Python."""
PATHS = ("/route", "/select", "/select_and_reserve")
VARYING = ("selection_id", "cost", "routing_seconds")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(directory)
    return [{"name": "spoken", "tokenizer": str(directory)}]


@pytest.fixture(scope="module")
def router(models: list[dict[str, str]]) -> Iterator[RouterProcess]:
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


@pytest.mark.parametrize("path", PATHS)
async def test_tokens_of_words_are_counted_and_timed(router: RouterProcess, path: str) -> None:
    """Operators see how long a tokenizer takes, also where only gateways ask, and many of them."""
    async with spoken(router, 1):
        before = await router.metrics()
        bodies = ({"model": "spoken", "prompt": f"how far is {number}?"} for number in range(40))
        answers = [await router.post(path, body) for body in bodies]
        assert all(may_be_of_core(answer) for answer in answers)
        ids = [answer.json.get("selection_id") for answer in answers]
        for name in filter(None, ids):  # together, so that they are told of in a sum
            assert (await ask(router.port, "DELETE", f"/reservations/{name}")).status == 200
        await router.until(
            lambda now: all(
                now.sum(name) == before.sum(name) + 40
                for name in ("kvroute_tokenization_seconds_count", "kvroute_routing_seconds_count")
            ),
            "all are counted",
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


CLIENTS = {
    "client_api_keys": [
        {"name": "one", "key": "key-of-one"},
        {"name": "salted", "key": "key-of-salted", "cache_salt": "a-salt"},
        {"name": "limited", "key": "key-of-limited", "requests_per_minute": 3},
    ],
    "clients_see_hits": True,
}
OPERATORS = {
    "operator_api_keys": [{"name": "one", "key": "key-of-one"}],
    "clients_see_hits": False,
}


@contextlib.asynccontextmanager
async def with_keys(
    models: list[dict[str, str]], keys: dict[str, Any]
) -> AsyncIterator[tuple[RouterProcess, dict[str, Any]]]:
    """A router whose gateways need keys, and a question; 640 of its 641 tokens are cached."""
    async with EngineStub("spoken", has_events=True) as stub:
        stub.store(list(range(640)))
        replicas = [{"url": stub.url, "id": stub.name}]
        config = {"health": QUICK_HEALTH, "models": models, "replicas": replicas}
        with router_process({**config, "server": keys}) as router:
            yield router, {"model": "spoken", "token_ids": [*range(640), 1]}


def is_settled(answer: Answer) -> bool:
    """All events of the replica are there, and nothing is doubted any more."""
    return answer.status == 200 and answer.json["reason"].startswith("640 of 641 tokens cached; 1 ")


def with_key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer key-of-{name}"}


@pytest.mark.parametrize("keys", [CLIENTS, OPERATORS], ids=["clients", "operators"])
@pytest.mark.parametrize("session", [{}, {"x-session-id": "a session"}], ids=["none", "session"])
async def test_a_gateway_with_a_key_is_answered_as_by_python(
    models: list[dict[str, str]], keys: dict[str, Any], session: dict[str, str]
) -> None:
    """Its key is checked first, by Python."""
    async with with_keys(models, keys) as (router, body):
        headers = {**with_key("one"), **session}
        for path in "/route", "/select":
            found = await router.post(path, body, headers)
            while not (is_settled(found) and may_be_of_core(found)):
                found = await router.post(path, body, headers)
            other = await router.post(path, body, {**headers, **BY_PYTHON})
            assert not may_be_of_core(other)
            seen = [dict(each.json) for each in (found, other)]
            for each in seen:
                each.pop("routing_seconds", None)
            assert seen[0] == seen[1]
            wrong = await router.post(path, body, with_key("nobody"))
            assert (wrong.status, wrong.error["code"]) == (401, "invalid_api_key")


async def test_what_a_key_brings_counts_in_questions(models: list[dict[str, str]]) -> None:
    """A salt shares nothing, and is to be set; limits hold."""
    async with with_keys(models, CLIENTS) as (router, body):
        found = await router.post("/select", body, with_key("one"))
        while not is_settled(found):
            found = await router.post("/select", body, with_key("one"))
        salted = await router.post("/route", body, with_key("salted"))
        assert salted.json["hit"]["cached_tokens"] == 0
        told = (await router.post("/select", body, with_key("salted"))).json
        assert told["hit"]["cached_tokens"] == 0
        assert told["body_fields"]["cache_salt"]
        two_types = {**with_key("salted"), "Content-Type": "text/plain"}
        assert (await router.post("/route", body, two_types)).status == 400
        limited = [await router.post("/route", body, with_key("limited")) for _ in range(5)]
        assert [each.status for each in limited] == [200, 200, 200, 429, 429]
