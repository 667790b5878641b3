"""The compiled data plane: completions of token ids are decided without Python, as Python would."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import httpx
import msgspec
import pytest
import trustme

from tests.support.engine_stub import (
    EngineStub,
    Exchange,
    after,
    answer,
    begun_until,
    engines,
    hang,
    hang_up,
    prompt_ids,
)
from tests.support.http_client import Answer, connect, request_bytes
from tests.support.model_files import write_byte_tokenizer
from tests.support.otlp_collector import OtlpCollector, ReceivedSpan, otlp_collector
from tests.support.router_process import QUICK_HEALTH, Metrics, RouterProcess, router_process
from tests.support.valkey_server import ValkeyServer
from tests.support.waiting import eventually

BY_PYTHON = {"x-vllm-priority": "0"}
"""With this header, a request is decided in Python."""
NATIVE = {"server": {"threads": 2}, "health": QUICK_HEALTH}
UNBUSY = {"speed": 1000}
"""Of replicas whose work weighs nothing, however long a busy machine takes: where the first of two
equal requests makes one seem busy, the second rightly goes elsewhere."""


MODELS = [
    {"name": "aliased", "aliases": ["alias"], "lora_adapters": ["style"]},
    {"name": "told", "retention_hints": "always"},
]


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(directory)
    spoken = {"name": "spoken", "tokenizer": str(directory)}
    with router_process({**NATIVE, "models": [*MODELS, spoken]}) as started:
        yield started


@pytest.fixture
async def router(process: RouterProcess) -> AsyncIterator[RouterProcess]:
    """The router; after every test nothing may be left in flight."""
    yield process
    await process.until_idle()


async def asked(router: RouterProcess, stub: EngineStub, prompt: Any, **fields: Any) -> Answer:
    body = {"model": stub.model, "prompt": prompt, "max_tokens": 2, **fields}
    found = await router.post("/v1/completions", body)
    assert found.status == 200, found
    return found


async def last_request(router: RouterProcess, number: int) -> dict[str, Any]:
    """The one that ended last of *number*; it is told of a moment after its end."""
    while True:
        found = (await router.get("/requests")).json["requests"]
        if len(found) >= number and all(each["end"] for each in found):
            return dict(found[0])
        await asyncio.sleep(0.01)


async def buffered_bytes(router: RouterProcess) -> float:
    """What the router says it holds of bodies."""
    return (await router.metrics()).sum("kvroute_buffered_bytes")


def is_without_python(request: dict[str, Any]) -> bool:
    """Whether the data plane decided it."""
    return str(request["reason"]).endswith("; decided by the data plane")


async def until_native(router: RouterProcess, stub: EngineStub) -> int:
    """Ask until the core decides; return how many requests that took in all."""
    number = len((await router.get("/requests")).json["requests"])
    while True:
        await asked(router, stub, prompt_ids(64, 900))
        number += 1
        if is_without_python(await last_request(router, number)):
            return number


async def test_token_ids_go_where_they_are_cached_without_python(router: RouterProcess) -> None:
    """The decision is the same one, and what was predicted stands where operators look."""
    async with engines(3, has_events=True) as stubs, router.serving(*stubs):
        number = await until_native(router, stubs[0])
        for first, stub in enumerate(stubs, 1):
            ids = prompt_ids(640, first)
            stub.store(ids)
            await router.until_applied(stub)
            found = await asked(router, stub, [*ids, 7])
            number += 1
            assert found.headers["x-kv-replica"] == stub.name
            assert found.headers["x-kv-hit-tokens"] == "640"
            request = await last_request(router, number)
            assert request["reason"].startswith("640 of 641 tokens cached; ")
            assert is_without_python(request)
            assert request["replica"] == stub.name
            assert request["prompt_tokens"] == 641
            assert request["predicted"]["cached_tokens"] == 640


async def test_all_are_counted_where_many_end_together() -> None:
    """Some of them are then told of in sums: a line in the log for each cost more than all the rest
    of a request."""
    count = 600
    async with engines(2, has_events=True) as stubs:
        with router_process(NATIVE) as router:
            async with router.serving(*stubs):
                found = await asyncio.gather(
                    *(asked(router, stubs[0], prompt_ids(8, number)) for number in range(count))
                )
                assert len(found) == count
                await router.until(
                    lambda now: now.sum("kvroute_requests_total", status="200") == count,
                    "all are counted",
                )
                now = await router.metrics()
                assert now.sum("kvroute_compared_prompt_tokens_total") == 8 * count
                for outcomes in (
                    "kvroute_predictions_total",
                    "kvroute_admission_predictions_total",
                ):
                    assert now.sum(outcomes, outcome="exact") == count
                assert now.sum("kvroute_request_seconds_count") == count
                assert now.sum("kvroute_time_to_first_byte_seconds_count") == count
                assert now.sum("kvroute_request_ends_total", end="completed") == count


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "text"}),
        ("/v1/completions", {"prompt": prompt_ids(64, 1), "user": "a session"}),
        ("/v1/completions", {"prompt": prompt_ids(64, 1), "cache_salt": "s"}),
        ("/v1/completions", {"prompt": prompt_ids(64, 1), "n": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a question"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a question"}]}),
    ],
    ids=str,
)
async def test_what_needs_words_is_read_in_python_and_decided_in_the_core(
    router: RouterProcess, path: str, fields: dict[str, Any]
) -> None:
    """Python only says which token ids it stands for; the rest costs nothing there."""
    async with EngineStub("spoken", has_events=True) as stub, router.serving(stub):
        number = await until_native(router, stub)
        found = await router.post(path, {"model": stub.model, "max_tokens": 2, **fields})
        assert found.status == 200
        request = await last_request(router, number + 1)
        assert is_without_python(request)
        assert request["path"] == path
        # The router also compares its tokenizer with the replica's, at any time.
        sent = [each for each in stub.requests if each.path == path]
        assert request["prompt_tokens"] == len(sent[-1].prompt_ids)
        # Several answers make the engine's count another one than the prompt's.
        assert (request["actual"] is None) == ("n" in fields)


@pytest.mark.parametrize("path", ["/route", "/select"])
async def test_the_core_answers_where_a_request_would_go_that_gets_hints(
    router: RouterProcess, path: str
) -> None:
    """Hints change what is sent, not where. A reservation says them, so it is Python's."""

    async def read_in_python() -> float:
        return (await router.metrics()).sum("kvroute_tokenization_seconds_count")

    async with EngineStub("told", has_events=True) as stub, router.serving(stub):
        body = {"model": stub.model, "token_ids": prompt_ids(600, 3)}
        while True:
            before = await read_in_python()
            found = await router.post(path, body)
            if await read_in_python() == before and found.status == 200:
                break
        other = await router.post(path, body, {"x-vllm-priority": "0"})
        assert await read_in_python() == before + 1
        answers = [dict(each.json) for each in (found, other)]
        for each in answers:
            each.pop("routing_seconds", None)
        assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "fields", [{"prompt": [[1, 2], [3]]}, {"prompt": [1], "prompt_logprobs": 1}], ids=str
)
async def test_what_is_not_usual_is_decided_in_python(
    router: RouterProcess, fields: dict[str, Any]
) -> None:
    """The core must not decide what it does not understand."""
    async with engines(1, has_events=True) as (stub,), router.serving(stub):
        number = await until_native(router, stub)
        await asked(router, stub, **fields)
        assert not is_without_python(await last_request(router, number + 1))


def _bodies(random: Random, prefixes: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Requests that begin like others, in every form that the core decides."""
    while True:
        text = random.choice(prefixes)[: random.randrange(100, 900)] + random.choice(
            ["", "?", " so"]
        )
        more: dict[str, Any] = random.choice(
            [{}, {}, {"stream": True}, {"n": 2}, {"user": "u"}, {"cache_salt": "s"}, {"seed": 1}]
        )
        form = random.randrange(4)
        if form == 0:
            yield "/v1/completions", {"prompt": text, **more}
        elif form == 1:
            yield "/v1/completions", {"prompt": list(text.encode()), **more}
        else:
            path = ("/v1/chat/completions", "/v1/messages")[form == 3]
            middle = random.randrange(len(text))
            parts = [part for part in (text[:middle], text[middle:]) if part]
            messages = [{"role": "user", "content": part} for part in parts]
            yield path, {"messages": messages, **more}


@pytest.mark.parametrize("seed", range(3))
async def test_the_core_decides_as_python_does(router: RouterProcess, seed: int) -> None:
    """One fleet, every request both ways: replica, prediction and what engines get are equal."""
    random = Random(seed)
    prefixes = ["".join(random.choices("abcdefgh ", k=960)) for _ in range(3)]
    async with contextlib.AsyncExitStack() as stack:
        stubs = [EngineStub("spoken", has_events=True) for _ in range(3)]
        for stub in stubs:
            await stack.enter_async_context(stub)
        await stack.enter_async_context(router.serving(*stubs, **UNBUSY))
        number = await until_native(router, stubs[0])
        for stub, prefix in zip(stubs, prefixes, strict=True):
            stub.store(list(prefix.encode()))
            await router.until_applied(stub)
            while True:  # the core learns of a replica some moments after it is healthy
                answer = await asked(router, stub, list(prefix.encode()))
                number += 1
                if answer.headers["x-kv-replica"] == stub.name:
                    break
        for path, fields in islice(_bodies(random, prefixes), 40):
            body = {"model": stubs[0].model, "max_tokens": 2, **fields}
            ways = [{}, BY_PYTHON]
            random.shuffle(ways)
            found, reasons, more = [], [], random.choice(_HEADERS)
            for headers in ways:
                answer = await router.post(path, body, {**more, **headers})
                number += 1
                request = await last_request(router, number)
                assert is_without_python(request) == (not headers), body
                chosen = {stub.name: stub for stub in stubs}[answer.headers["x-kv-replica"]]
                found.append((_told(answer), _logged(request), _received(chosen, path)))
                reasons.append(request["reason"])
            assert found[0] == found[1], (reasons, body)


_HEADERS: list[dict[str, str]] = [
    {},
    {"x-session-id": "of a user"},
    {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "a=1"},
    {"x-forwarded-for": "192.0.2.7", "x-stainless-lang": "python", "authorization": "Bearer any"},
    {"x-data-parallel-rank": "1", "x-api-key": "any", "tracestate": "of=nobody"},
]


def _told(answer: Answer) -> dict[str, str]:
    """What the client learns, without the names that differ each time."""
    names = ("x-kv-replica", "x-kv-hit-tokens", "x-kv-model", "x-kv-hit-approximate")
    return {name: answer.headers[name] for name in names if name in answer.headers}


def _logged(request: dict[str, Any]) -> dict[str, Any]:
    predicted = request["predicted"]
    names = ("path", "replica", "prompt_tokens", "actual", "stream")
    return {
        "gpu": predicted["gpu_cached_tokens"],
        "all": predicted["cached_tokens"],
        **{name: request[name] for name in names},
    }


def _received(stub: EngineStub, path: str) -> tuple[str, dict[str, str], bytes]:
    request = next(each for each in reversed(stub.requests) if each.path == path)
    told = {
        name: value
        for name, value in request.headers.items()
        if name not in ("x-request-id", *BY_PYTHON)
    }
    return request.target, told, request.body


async def test_each_request_has_its_line_in_the_access_log() -> None:
    """The same one, whoever decided it."""
    logged = {"access_log": True, "log_format": "json"}
    async with engines(1, has_events=True) as (stub,):
        with router_process({**NATIVE, "observability": logged}) as router:
            async with router.serving(stub):
                number = await until_native(router, stub)
                ids = prompt_ids(640, 1)
                stub.store(ids)
                await router.until_applied(stub)
                for more in ({"x-request-id": "core"}, {"x-request-id": "python", **BY_PYTHON}):
                    body = {"model": stub.model, "prompt": [*ids, 7], "max_tokens": 2}
                    assert (await router.post("/v1/completions", body, more)).status == 200
                    number += 1
                    python = await last_request(router, number)
                    assert is_without_python(python) == (more["x-request-id"] == "core")
                lines = {
                    line["request_id"]: line
                    for line in map(json.loads, router.log().splitlines())
                    if "request_id" in line
                }
    assert len(lines) == number
    one, other = lines["core"], lines["python"]
    assert list(one) == list(other)
    varying = ("client", "seconds", "first_byte_seconds", "request_id", "time", "message")
    fields = [name for name in one if name not in varying]
    assert [one[name] for name in fields] == [other[name] for name in fields]
    assert one["predicted_tokens"] == one["cached_tokens"] == 640
    assert 0 < one["first_byte_seconds"] < one["seconds"] < 60
    assert one["client"].startswith("127.0.0.1:")


SDK = {
    **{"user-agent": "OpenAI/Python", "x-stainless-lang": "python", "x-stainless-async": "false"},
    **{"anthropic-version": "2023-06-01", "cookie": "a=b", "origin": "http://router"},
}


async def test_headers_that_mean_nothing_to_the_router_are_no_reason_to_ask_python(
    router: RouterProcess,
) -> None:
    """Every SDK, proxy and page sends some of its own. They reach the engine, who may know them;
    what a stranger says of other hops does not."""
    async with engines(1, has_events=True) as (stub,), router.serving(stub):
        number = await until_native(router, stub)
        claims = {"x-forwarded-for": "192.0.2.7", "x-real-ip": "192.0.2.7", "forwarded": "for=a"}
        body = {"model": stub.model, "prompt": prompt_ids(64, 1), "max_tokens": 2}
        found = []
        for more in ({}, BY_PYTHON):
            headers = {**SDK, **claims, **more}
            assert (await router.post("/v1/completions", body, headers)).status == 200
            number += 1
            assert is_without_python(await last_request(router, number)) == (not more)
            found.append(_received(stub, "/v1/completions"))
        assert found[0] == found[1]
        _, told, _ = found[0]
        assert SDK.items() <= told.items()
        assert told["x-forwarded-for"] == "127.0.0.1"
        assert not {"x-real-ip", "forwarded"} & told.keys()


async def test_a_trusted_proxy_is_believed_without_python() -> None:
    """Behind one every request has such headers: none of them may cost the fast path."""
    server = {**NATIVE["server"], "trusted_proxies": ["10.0.0.0/8", "127.0.0.0/9"]}
    server |= {"trust_client_rank": True}
    async with engines(1, has_events=True) as (stub,):
        with router_process({**NATIVE, "server": server}) as router:
            async with router.serving(stub):
                number = await until_native(router, stub)
                head = b"POST /v1/completions HTTP/1.1\r\nhost: router\r\n"
                chain = b"x-forwarded-for: 192.0.2.7, 192.0.2.8\r\nx-forwarded-for: 192.0.2.9\r\n"
                body = json.dumps({"model": stub.model, "prompt": [1, 2], "max_tokens": 2}).encode()
                found = []
                for more in (b"", b"x-vllm-priority: 0\r\n"):
                    lines = chain + b"x-forwarded-proto: https\r\n" + more
                    length = b"content-length: %d\r\n\r\n" % len(body)
                    async with connect(router.port) as client:
                        await client.write(head + lines + length + body)
                        assert await client.read_head() == 200
                        await client.read_body()
                    number += 1
                    assert is_without_python(await last_request(router, number)) == (not more)
                    found.append(_received(stub, "/v1/completions"))
                assert found[0] == found[1]
                _, told, _ = found[0]
                assert told["x-forwarded-for"] == "192.0.2.7, 192.0.2.8, 192.0.2.9, 127.0.0.1"
                assert told["x-forwarded-proto"] == "https"
                headers = {"x-data-parallel-rank": "1"}
                body_of_one = json.loads(body)
                assert (await router.post("/v1/completions", body_of_one, headers)).status == 200
                assert not is_without_python(await last_request(router, number + 1))


async def until_decided(router: RouterProcess, model: str, prompt: Any, number: int) -> int:
    """Ask for a name until the core decides; return how many requests that took in all."""
    while True:
        body = {"model": model, "prompt": prompt, "max_tokens": 2}
        assert (await router.post("/v1/completions", body)).status == 200
        number += 1
        if is_without_python(await last_request(router, number)):
            return number


@pytest.mark.parametrize("name", ["aliased", "alias", "style", "aliased:style", "alias:style"])
async def test_every_name_of_a_model_is_decided_in_the_core(
    router: RouterProcess, name: str
) -> None:
    """One replica calls it by the one name, one by the other, and one has the adapter."""
    async with (
        EngineStub("aliased", has_events=True, adapters=("style",)) as first,
        EngineStub("alias", has_events=True) as second,
        router.serving(first, second),
    ):
        number = len((await router.get("/requests")).json["requests"])
        number = await until_decided(router, name, prompt_ids(64, 900), number)
        for seed, stub in enumerate([first, second] * 4):
            ids = prompt_ids(320, 40 + seed)
            stub.store(ids)
            await router.until_applied(stub)
            body = {"model": name, "prompt": [*ids, 7], "max_tokens": 2}
            found = []
            for headers in ({}, BY_PYTHON):
                answer = await router.post("/v1/completions", body, headers)
                number += 1
                request = await last_request(router, number)
                assert is_without_python(request) == (not headers)
                chosen = {each.name: each for each in (first, second)}[request["replica"]]
                found.append((_told(answer), _received(chosen, "/v1/completions")))
            assert found[0] == found[1]
            if ":" in name:  # as SGLang names an adapter, and it would compute the model without
                assert json.loads(found[0][1][2])["model"] == name


async def test_what_an_engine_should_keep_is_said_by_the_core(router: RouterProcess) -> None:
    """It is found in Python, which says it with the token ids."""
    async with EngineStub("told", has_events=True) as stub, router.serving(stub):
        number = len((await router.get("/requests")).json["requests"])
        number = await until_decided(router, "told", prompt_ids(64, 900), number)
        document = prompt_ids(640, 1)
        for question in range(3):
            ids = [*document, *prompt_ids(100, 50 + question)]
            body = {"model": "told", "prompt": ids, "max_tokens": 2}
            assert (await router.post("/v1/completions", body)).status == 200
            number += 1
            assert is_without_python(await last_request(router, number))
        keep = stub.requests[-1].json["kv_transfer_params"]["kvroute"]["keep"]
        assert any(640 <= length < 740 for length in keep)


async def test_keys_are_checked_and_their_salts_are_sent() -> None:
    """A request without limits is read with its key in Python, and decided in the core."""
    keys = [{"name": "a", "key": "key-of-a", "cache_salt": "tenant-a"}]
    config = {**NATIVE, "server": {**NATIVE["server"], "client_api_keys": keys}}
    with router_process(config) as router:
        async with engines(1, has_events=True) as (stub,), router.serving(stub):
            body = {"model": stub.model, "prompt": prompt_ids(64, 1), "max_tokens": 2}
            allowed = {"authorization": "Bearer key-of-a"}
            number = 0
            while True:
                assert (await router.post("/v1/completions", body, allowed)).status == 200
                number += 1
                if is_without_python(await last_request(router, number)):
                    break
            assert "cache_salt" in stub.requests[-1].json
            assert "authorization" not in stub.requests[-1].headers
            for headers in ({}, {"authorization": "Bearer wrong"}):
                refused = await router.post("/v1/completions", body, headers)
                assert (refused.status, len(stub.requests)) == (401, number)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer key-of-{key}"}


async def until_native_with_key(router: RouterProcess, stub: EngineStub, key: str) -> int:
    """Ask with a key that has no limits until the core decides; return how often."""
    body = {"model": stub.model, "prompt": prompt_ids(64, 900), "max_tokens": 2}
    number = 0
    while True:
        assert (await router.post("/v1/completions", body, bearer(key))).status == 200
        number += 1
        if is_without_python(await last_request(router, number)):
            return number


@contextlib.asynccontextmanager
async def with_keys(
    count: int, **limits: Any
) -> AsyncIterator[tuple[RouterProcess, list[EngineStub]]]:
    """A router whose keys `core` and `python` have the same limits, and `free` has none."""
    keys = [{"name": name, "key": f"key-of-{name}", **limits} for name in ("core", "python")]
    keys.append({"name": "free", "key": "key-of-free"})
    config = {**NATIVE, "server": {**NATIVE["server"], "client_api_keys": keys}}
    async with engines(count, has_events=True) as stubs:
        with router_process(config) as router:
            async with router.serving(*stubs):
                yield router, stubs
            await router.until_idle()


def counted(metrics: Metrics, key: str) -> dict[str, float]:
    """What is counted for a key, by the name of the metric and the reason."""
    return {
        f"{name} {reason}": metrics.sum(name, key=key, **({"reason": reason} if reason else {}))
        for name in sorted(metrics.names())
        if name.startswith("kvroute_key_")
        for reason in ("", "requests", "tokens", "in_flight", "model")
    }


async def test_a_key_is_held_to_its_limits_whoever_decides() -> None:
    """Every request counts once, and what is left is told to the client, as in Python."""
    limits = {"requests_per_minute": 6, "tokens_per_minute": 1000, "models": ["model-*"]}
    async with with_keys(1, **limits) as (router, (stub,)):
        number = await until_native_with_key(router, stub, "free")
        told: dict[str, list[Any]] = {"core": [], "python": []}
        for tokens in (100, 300, 900, 500, 20, 20, 20, 20):
            for key, found in told.items():
                model = "another" if tokens == 500 else stub.model
                body = {"model": model, "prompt": prompt_ids(tokens, 1), "max_tokens": 2}
                headers = {**bearer(key), **(BY_PYTHON if key == "python" else {})}
                answer = await router.post("/v1/completions", body, headers)
                left = {
                    name: answer.headers[name]
                    for name in answer.headers
                    if name.startswith("x-ratelimit-")
                }
                found.append((answer.status, left))
                number += answer.status == 200
                if answer.status == 200:
                    is_native = is_without_python(await last_request(router, number))
                    assert is_native == (key == "core")
        assert told["core"] == told["python"]
        statuses = [status for status, _ in told["core"]]
        assert statuses == [200, 200, 429, 403, 200, 200, 429, 429]
        assert told["core"][0][1]["x-ratelimit-remaining-requests"] == "5"
        await router.until_idle()
        metrics = await router.metrics()
        assert counted(metrics, "core") == counted(metrics, "python")
        assert metrics.sum("kvroute_key_requests_total", key="core") == 6


async def test_a_key_that_asks_too_much_at_a_time_gets_room_back() -> None:
    """At the end of a stream, when a client leaves, and when a replica hangs up."""
    async with with_keys(2, max_in_flight=1) as (router, stubs):
        await until_native_with_key(router, stubs[0], "free")
        body = {"model": stubs[0].model, "prompt": [1, 2, 3], "stream": True}

        async def status() -> int:
            return (await router.post("/v1/completions", body, bearer("core"))).status

        for stub in stubs:
            stub.behaviour = begun_until(asyncio.Event())
        for _ in range(2):
            async with connect(router.port) as client:
                await client.send("POST", "/v1/completions", body, bearer("core"))
                assert await client.read_head() == 200
                assert await status() == 429
            await router.until_idle()
        for stub in stubs:
            stub.behaviour = hang_up
        assert await status() == 502
        for stub in stubs:
            stub.behaviour = answer
        assert await status() == 200


async def test_a_session_that_a_header_names_is_read_in_python_and_kept_by_the_core() -> None:
    """A policy that goes by sessions must find the same one in both."""
    config = {**NATIVE, "policy": {"name": "session", "session_header": "x-of-user"}}
    async with engines(3, has_events=True) as stubs:
        with router_process(config) as router:
            async with router.serving(*stubs):
                number = await until_native(router, stubs[0])
                for session in range(12):
                    body = {"model": stubs[0].model, "prompt": [session + 1], "max_tokens": 2}
                    chosen = set()
                    for more in ({}, BY_PYTHON):
                        headers = {"x-of-user": f"session {session}", **more}
                        found = await router.post("/v1/completions", body, headers)
                        number += 1
                        is_native = is_without_python(await last_request(router, number))
                        assert is_native == (not more)
                        chosen.add(found.headers["x-kv-replica"])
                    assert len(chosen) == 1


async def test_what_was_just_sent_is_remembered_whoever_decided() -> None:
    """Before any event tells of it, a prompt that comes again goes where it went."""
    policy = {"name": "prefix", "recent_ttl_s": 60}
    async with engines(4, has_events=True) as stubs:
        with router_process({**NATIVE, "policy": policy}) as router:
            async with router.serving(*stubs):
                number = await until_native(router, stubs[0])
                for seed in range(16):
                    body = {"model": stubs[0].model, "prompt": prompt_ids(200, seed)}
                    ways = [{}, BY_PYTHON] * 2
                    Random(seed).shuffle(ways)
                    chosen = []
                    for headers in ways:
                        found = await router.post("/v1/completions", body, headers)
                        number += 1
                        is_native = is_without_python(await last_request(router, number))
                        assert is_native == (not headers)
                        chosen.append(found.headers["x-kv-replica"])
                    assert len(set(chosen)) == 1, (seed, ways, chosen)
                assert (await router.metrics()).sum("kvroute_recent_prefix_keys") >= 16 * 3


async def test_routers_that_share_their_load_decide_without_python() -> None:
    """A prompt that one of them is having computed is sent there by the other as well, and what is
    under way at one counts at the other."""
    with contextlib.closing(ValkeyServer()) as server, contextlib.ExitStack() as stack:
        async with engines(3, has_events=True) as stubs:
            config = {
                **NATIVE,
                "replicas": [{"url": stub.url, "id": stub.name} for stub in stubs],
                "board": {"url": server.url, "secret": "shared-by-both"},
            }
            one, other = (stack.enter_context(router_process(config)) for _ in range(2))
            numbers = {router: await until_all_native(router, stubs) for router in (one, other)}
            for seed in range(4):
                await _share_a_burst(one, other, stubs, seed)
                for router, count in ((one, 1), (other, 2)):
                    numbers[router] += count
                    await last_request(router, numbers[router])
                    found = (await router.get("/requests")).json["requests"][:count]
                    assert all(map(is_without_python, found))


async def _share_a_burst(
    one: RouterProcess, other: RouterProcess, stubs: list[EngineStub], seed: int
) -> None:
    release = asyncio.Event()
    for stub in stubs:
        stub.behaviour = after(release)
    await _knows_of(other, stubs, 0)
    ids, else_ids = prompt_ids(1000, seed), prompt_ids(1000, 90 + seed)
    first = asyncio.ensure_future(asked(one, stubs[0], ids))
    await eventually(lambda: sum(stub.active for stub in stubs) == 1, "it is sent")
    (busy,) = [stub for stub in stubs if stub.active]
    await _knows_of(other, [busy], 1)
    second = asyncio.ensure_future(asked(other, stubs[0], ids))
    await eventually(lambda: busy.active == 2, "it goes to the same replica")
    third = asyncio.ensure_future(asked(other, stubs[0], else_ids))
    await eventually(lambda: sum(stub.active for stub in stubs) == 3, "it is sent")
    assert busy.active == 2, "what is not the same goes elsewhere"
    release.set()
    await asyncio.gather(first, second, third)


async def _knows_of(router: RouterProcess, stubs: list[EngineStub], requests: int) -> None:
    """Until it has heard that each has so many of the other's before their first token."""
    for stub in stubs:
        while (await router.replica(stub.name))["others"]["prefilling_requests"] != requests:
            await asyncio.sleep(0.001)


async def until_all_native(router: RouterProcess, stubs: list[EngineStub]) -> int:
    """Until the router knows all replicas, and decides without Python; return how many requests
    that took."""
    await router.until(
        lambda now: now.sum("kvroute_replica_healthy") == len(stubs), "all are healthy"
    )
    await router.until(lambda now: now.sum("kvroute_board_writers") == 1, "it hears the other")
    return await until_native(router, stubs[0])


async def test_while_nobody_waits_the_core_decides_and_a_line_is_pythons() -> None:
    """A queue that is empty costs nothing; once it is not, nobody passes those who wait."""
    # However long they wait for each other here, the shortest goes first.
    overload = {"max_in_flight": 1, "max_waiting": 10, "ageing_tokens_per_s": 0}
    async with engines(1, has_events=True) as (stub,):
        with router_process({**NATIVE, "overload": overload}) as router:
            async with router.serving(stub):
                number = await until_native(router, stub)
                for burst in range(3):
                    number += await _fill(router, stub, burst)
                    assert stub.peak == 1
                    while True:
                        await asked(router, stub, prompt_ids(64, 900))
                        number += 1
                        if is_without_python(await last_request(router, number)):
                            break
                waited = (await router.metrics()).sum("kvroute_queue_wait_seconds_count")
                assert waited == number
                assert not (await router.metrics()).sum("kvroute_queue_requests")


async def test_a_request_that_was_handed_over_waited_once() -> None:
    """Its first replica failed after it was shown as under way: the line's metric counts requests,
    and not the times that they were sent."""
    overload = {"max_in_flight": 50, "max_waiting": 4}
    async with engines(2, has_events=True) as stubs:
        with router_process({**NATIVE, "overload": overload}) as router:
            async with router.serving(*stubs):
                number = await until_native(router, stubs[0])
                bad, good = stubs
                ids = prompt_ids(640, 4)
                bad.store(ids)
                await router.until_applied(bad)
                fails = asyncio.Event()
                bad.behaviour = after(fails, hang_up)
                asking = asyncio.create_task(asked(router, bad, [*ids, 7]))
                while len((await router.get("/requests")).json["requests"]) == number:
                    await asyncio.sleep(0.01)
                fails.set()
                assert (await asking).headers["x-kv-replica"] == good.name
                await last_request(router, number + 1)
                metrics = await router.metrics()
                assert metrics.sum("kvroute_queue_wait_seconds_count") == number + 1


async def _latest(router: RouterProcess, count: int) -> list[dict[str, Any]]:
    """The requests that came last."""
    return list((await router.get("/requests")).json["requests"][:count])


async def _fill(router: RouterProcess, stub: EngineStub, seed: int) -> int:
    """A request is under way, decided by the core, and three wait for it; return the sum."""
    release = asyncio.Event()
    stub.behaviour = after(release)
    stub.requests.clear()
    under_way = [asyncio.ensure_future(asked(router, stub, prompt_ids(64, 10 * seed + 1)))]
    await eventually(lambda: stub.active == 1, "it is sent")
    for count, tokens in enumerate((900, 30, 300), 1):
        ids = prompt_ids(tokens, 10 * seed + 3)
        under_way.append(asyncio.ensure_future(asked(router, stub, ids)))
        while (await router.metrics()).sum("kvroute_queue_requests") != count:
            await asyncio.sleep(0.001)
    release.set()
    await asyncio.gather(*under_way)
    assert [len(each.prompt_ids) for each in stub.requests] == [64, 30, 300, 900]
    found = await _latest(router, len(under_way))
    while not all(each["end"] for each in found):
        found = await _latest(router, len(under_way))
    native = [each["prompt_tokens"] for each in found if is_without_python(each)]
    assert native == [64]
    return len(under_way)


VERSIONED = {
    **NATIVE,
    "models": [{"name": "second", "aliases": ["second-alias"]}],
    "versioned_models": [
        {
            "name": "both",
            "versions": [
                {"model": "first", "weight": 1},
                {"model": "second", "weight": 1, "label": "canary"},
            ],
        }
    ],
}


async def test_a_version_of_a_model_is_the_same_one_whoever_decides() -> None:
    """By its label, by its session, or by chance; what engine and client are told is equal."""
    async with (
        EngineStub("first", has_events=True) as first,
        EngineStub("second", has_events=True) as second,
        EngineStub("second-alias", has_events=True) as other,
    ):
        stubs = {stub.name: stub for stub in (first, second, other)}
        with router_process(VERSIONED) as router:
            async with router.serving(*stubs.values()):
                number = await until_native(router, first)
                for seed, stub in enumerate((second, other)):
                    ids = prompt_ids(640, seed)
                    stub.store(ids)
                    await router.until_applied(stub)
                    number = await until_decided(router, "second", ids, number)
                chosen = set()
                for case in range(24):
                    label = ("canary", "first")[case % 3 > 0]
                    headers = {} if case % 2 else {"x-model-version": label}
                    body = {"model": "both", "prompt": [*ids, case], "user": f"user {case}"}
                    found = []
                    for more in ({}, BY_PYTHON):
                        answer = await router.post("/v1/completions", body, {**headers, **more})
                        number += 1
                        request = await last_request(router, number)
                        assert is_without_python(request) == (not more)
                        told = _received(stubs[request["replica"]], "/v1/completions")
                        found.append((_told(answer), _logged(request), request["model"], told))
                    assert found[0] == found[1]
                    chosen.add(found[0][0]["x-kv-model"])
                assert chosen == {"first", "second-alias"}
                await _check_chance(router, number)


async def _check_chance(router: RouterProcess, number: int) -> None:
    """Requests without a session are shared out by weight, and each is counted once."""
    name = "kvroute_versioned_requests_total"
    before = await router.metrics()
    for case in range(40):
        body = {"model": "both", "prompt": [case + 1], "max_tokens": 1}
        assert (await router.post("/v1/completions", body)).status == 200
        assert is_without_python(await last_request(router, number + 1 + case))
    after_all = await router.metrics()
    counts = [
        after_all.sum(name, model=model) - before.sum(name, model=model)
        for model in ("first", "second")
    ]
    assert sum(counts) == 40
    assert min(counts) > 5


async def test_only_requests_that_pull_from_a_peer_are_pythons(router: RouterProcess) -> None:
    """Where a peer's memory serves best, the body names it; all others need nothing of that."""
    async with (
        engines(2, has_events=True) as (holder, other),
        router.serving(holder, other, p2p={"port": 7777}),
    ):
        number, ids = await until_native(router, holder), prompt_ids(1600, 1)
        holder.store(ids)
        await router.until_applied(holder)
        holder.offload(ids, "CPU")
        while await _blocks(router, holder) < 2 * holder.stored_blocks:
            await asyncio.sleep(0.001)
        found = []
        for more in ({}, BY_PYTHON):
            body = {"model": holder.model, "prompt": [*ids, 7], "max_tokens": 2}
            answer = await router.post("/v1/completions", body, more)
            number += 1
            request = await last_request(router, number)
            assert is_without_python(request) == (not more)
            found.append((_told(answer), _logged(request)))
        assert found[0] == found[1]
        assert found[0][0]["x-kv-replica"] == holder.name
        assert (await router.post(f"/replicas/{holder.name}/drain")).status == 200
        await asked(router, holder, [*ids, 8])
        request = await last_request(router, number + 1)
        assert not is_without_python(request)
        assert request["replica"] == other.name
        assert request["predicted"]["by_tier"] == {"PEER": 1600}
        assert request["predicted"]["pull_from"] == holder.name
        told = other.requests[-1].json["kv_transfer_params"]["remote_kv_source"]
        assert told["remote_port"] == 7777
        source = {"x-kv-cache-source-host-port": holder.url.removeprefix("http://")}
        assert source.items() <= other.requests[-1].headers.items()
        body = {"model": holder.model, "token_ids": [*ids, 9]}
        selected = (await router.post("/select_and_reserve", body)).json
        assert source.items() <= selected["headers"].items()
        await router.delete(f"/reservations/{selected['selection_id']}")


async def test_an_engine_learns_from_the_core_when_to_compute_a_request() -> None:
    """By what is left to compute, its age and the class of its key, as Python says it."""
    keys = [
        {"name": "a", "key": "key-of-a", "priority": "high"},
        {"name": "b", "key": "key-of-b"},
    ]
    for server in ({"client_api_keys": keys}, {}):
        config = {**NATIVE, "server": {**NATIVE["server"], **server}}
        async with engines(1, has_events=True) as (stub,):
            with router_process(config) as router:
                async with router.serving(stub, priority_order="lower_first"):
                    await _check_order(router, stub, ["a", "b"] if server else [""])


async def _check_order(router: RouterProcess, stub: EngineStub, names: list[str]) -> None:
    ids = prompt_ids(640, 1)
    stub.store(ids)
    await router.until_applied(stub)
    number = await until_native_with_key(router, stub, names[-1])
    message = [{"role": "user", "content": "a question"}]
    for name in names:
        for prompt in ([*ids, 7], prompt_ids(300, 2), prompt_ids(9000, 3)):
            numbers, begun = [], time.time()
            for more in ({}, BY_PYTHON):
                body = {"model": stub.model, "prompt": prompt, "priority": 3}
                headers = {**bearer(name), **more}
                assert (await router.post("/v1/completions", body, headers)).status == 200
                number += 1
                assert is_without_python(await last_request(router, number)) == (not more)
                numbers.append(int(stub.requests[-1].headers["x-vllm-priority"]))
                assert stub.requests[-1].names.count("x-vllm-priority") == 1
            took_s = time.time() - begun
            assert 0 <= numbers[1] - numbers[0] <= 1000 * took_s + 2
        body = {"model": stub.model, "messages": message, "max_tokens": 5}
        await router.post("/v1/messages", body, bearer(name))
        number += 1
        assert "x-vllm-priority" not in stub.requests[-1].headers


async def _blocks(router: RouterProcess, stub: EngineStub) -> int:
    """What the index holds of its cache, in all tiers."""
    (source,) = (await router.replica(stub.name))["sources"]
    return sum(held["blocks"] for held in source["cache"]["blocks"])


TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


async def test_a_client_s_trace_goes_on_to_the_engine_without_python(
    router: RouterProcess,
) -> None:
    """A router that records none passes it on as it came, and names it in its log; what breaks the
    standard's grammar goes nowhere."""
    async with engines(1, has_events=True) as (stub,), router.serving(stub):
        number = await until_native(router, stub)
        body = {"model": stub.model, "prompt": [1, 2], "max_tokens": 2}
        for parent in (f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00", f"00-{TRACE}-{SPAN}-0"):
            found = []
            for more in ({}, BY_PYTHON):
                headers = {"traceparent": parent, "tracestate": "a=1, b=2", **more}
                assert (await router.post("/v1/completions", body, headers)).status == 200
                number += 1
                request = await last_request(router, number)
                assert is_without_python(request) == (not more)
                found.append((request["trace_id"], _received(stub, "/v1/completions")))
            assert found[0] == found[1]
            is_valid = len(parent) == 55
            assert found[0][0] == (TRACE if is_valid else None)
            assert found[0][1][1].get("traceparent") == (parent if is_valid else None)


def _spans(spans: list[ReceivedSpan], varying: tuple[str, ...]) -> list[tuple[Any, ...]]:
    """What spans say, without what differs each time; each after its parent."""
    names = {span.span_id: span.name for span in spans}
    return sorted(
        (
            *(span.name, span.kind, span.is_error, names.get(span.parent_id, span.parent_id)),
            {name: value for name, value in span.attributes.items() if name not in varying},
        )
        for span in spans
    )


async def test_a_request_has_the_same_spans_whoever_decided_it() -> None:
    """From one dashboard nobody must see which of the two it was."""
    with otlp_collector() as collector:
        environ = {"OTEL_BSP_SCHEDULE_DELAY": "50", "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
        traced = {**NATIVE, "observability": {"tracing": {"enabled": True}}}
        async with engines(2, has_events=True) as stubs:
            with router_process(traced, environ) as router:
                async with router.serving(*stubs):
                    number, ids = await until_native(router, stubs[0]), prompt_ids(640, 1)
                    stubs[0].store(ids)
                    await router.until_applied(stubs[0])
                    body = {"model": stubs[0].model, "prompt": [*ids, 7], "stream": True}
                    found = []
                    for trace, more in (("1" * 32, {}), ("2" * 32, BY_PYTHON)):
                        headers = {"traceparent": f"00-{trace}-{SPAN}-01", "tracestate": "a=1"}
                        headers |= more
                        assert (await router.post("/v1/completions", body, headers)).status == 200
                        number += 1
                        request = await last_request(router, number)
                        assert is_without_python(request) == (not more)
                        assert request["trace_id"] == trace
                        spans = await asyncio.to_thread(collector.trace, trace)
                        told = stubs[0].requests[-1].headers["traceparent"]
                        (attempt,) = [span for span in spans if span.name.startswith("attempt")]
                        assert told == f"00-{trace}-{attempt.span_id}-01"
                        assert stubs[0].requests[-1].headers["tracestate"] == "a=1"
                        (root,) = [span for span in spans if span.parent_id == SPAN]
                        assert all(
                            root.began <= span.began <= span.ended <= root.ended for span in spans
                        )
                        varying = (
                            "kvroute.request_id",
                            "gen_ai.response.time_to_first_chunk",
                        )
                        found.append(_spans(spans, varying))
                    assert found[0] == found[1]
                    await _check_unsampled(router, stubs[0], body, number)
                    await _check_handed_over(router, collector, stubs)


async def _check_unsampled(
    router: RouterProcess, stub: EngineStub, body: dict[str, Any], number: int
) -> None:
    """The engine learns that it is not recorded, under a span of the router's."""
    headers = {"traceparent": f"00-{'3' * 32}-{SPAN}-00"}
    assert (await router.post("/v1/completions", body, headers)).status == 200
    assert is_without_python(await last_request(router, number + 1))
    told = stub.requests[-1].headers["traceparent"]
    assert told.startswith(f"00-{'3' * 32}-")
    assert told.endswith("-00")
    assert SPAN not in told


async def _check_handed_over(
    router: RouterProcess, collector: OtlpCollector, stubs: list[EngineStub]
) -> None:
    """A replica that hangs up has its span, whoever sent the request there."""
    bad, good = stubs
    bad.behaviour = hang_up
    body = {"model": bad.model, "prompt": [*prompt_ids(640, 1), 7], "max_tokens": 2}
    headers = {"traceparent": f"00-{'4' * 32}-{SPAN}-01"}
    found = await router.post("/v1/completions", body, headers)
    assert found.headers["x-kv-replica"] == good.name
    spans = await asyncio.to_thread(collector.trace, "4" * 32)
    attempts = {span.name: span for span in spans if span.name.startswith("attempt")}
    assert attempts.keys() == {f"attempt {bad.name}", f"attempt {good.name}"}
    failed = attempts[f"attempt {bad.name}"]
    assert failed.is_error
    assert failed.attributes["error.type"] in ("closed", "kept_closed")
    assert bad.requests[-1].headers["traceparent"].split("-")[2] == failed.span_id


async def test_a_page_that_calls_the_router_by_its_own_name_is_refused(
    router: RouterProcess,
) -> None:
    """Whose name resolves to this machine reads what anybody on it may read."""
    async with engines(1, has_events=True) as (stub,), router.serving(stub):
        await until_native(router, stub)
        body = json.dumps({"model": stub.model, "prompt": [1], "max_tokens": 2}).encode()
        whole = request_bytes("POST", "/v1/completions", body)
        async with connect(router.port) as client:
            await client.write(whole.replace(b"host: router", b"host: evil.example"))
            assert await client.read_head() == 403


async def test_the_first_request_under_one_of_the_routers_names_needs_no_python(
    router: RouterProcess,
) -> None:
    """A thousand that come at once after a start would all wait until Python had looked at one."""
    async with engines(1, has_events=True) as (stub,), router.serving(stub):
        number = await until_native(router, stub)
        for host in ("localhost", f"localhost:{router.port}", f"127.0.0.1:{router.port}"):
            body = {"model": stub.model, "prompt": prompt_ids(64, 900), "max_tokens": 2}
            whole = request_bytes("POST", "/v1/completions", json.dumps(body).encode())
            async with connect(router.port) as client:
                await client.write(whole.replace(b"host: router", f"host: {host}".encode()))
                assert (await client.read_answer()).status == 200
            number += 1
            assert is_without_python(await last_request(router, number))


async def test_wrong_predictions_are_evidence_whoever_made_them() -> None:
    """A source that tells lies is found out also where Python has decided nothing."""
    events = {"self_repair_after_s": 0.2, "self_repair_quiet_s": 1e-6}
    async with engines(1, has_events=True) as (stub,):
        with router_process({**NATIVE, "events": events}) as router:
            async with router.serving(stub):
                number, ids = await until_native(router, stub), prompt_ids(64, 5)
                stub.store(ids)
                await router.until_applied(stub)
                stub.forget()
                while True:
                    await asked(router, stub, [*ids, 7])
                    number += 1
                    last = await last_request(router, number)
                    assert is_without_python(last)
                    assert (last["predicted"]["cached_tokens"], last["actual"]) == (64, 0)
                    (source,) = (await router.replica(stub.name))["sources"]
                    if (source["predictions"] or {"rebuilds": 0})["rebuilds"]:
                        break


async def streamed(router: RouterProcess, stub: EngineStub, prompt: list[int]) -> Answer:
    body = {"model": stub.model, "prompt": prompt, "max_tokens": 2, "stream": True}
    found = await router.post("/v1/completions", body)
    assert found.status == 200, found
    return found


async def second_attempts(router: RouterProcess, outcome: str) -> float:
    return (await router.metrics()).sum("kvroute_second_attempts_total", outcome=outcome)


async def learn_what_is_usual(router: RouterProcess, stubs: list[EngineStub]) -> None:
    """Every replica has served enough streams for that."""
    await until_native(router, stubs[0])
    first = 1000
    while min(sum("stream" in each.json for each in stub.requests) for stub in stubs) < 20:
        await streamed(router, stubs[0], prompt_ids(64, first))
        first += 1


async def test_a_stream_that_a_frozen_replica_got_is_served_by_another() -> None:
    """Its health checks would take seconds to tell, or never: only some of its threads may hang.
    Then the attempt there is ended, and what failed is counted against the replica."""
    async with engines(2, has_events=True) as stubs:
        with router_process(NATIVE) as router:
            async with router.serving(*stubs):
                await learn_what_is_usual(router, stubs)
                bad, good = stubs
                ids = prompt_ids(640, 3)
                bad.store(ids)
                await router.until_applied(bad)
                bad.behaviour = hang
                retried = {"replica": bad.name, "reason": "late"}
                # One may have been late already, on a busy machine.
                before, left = await router.metrics(), len(bad.left)
                found = await streamed(router, bad, [*ids, 7])
                assert found.headers["x-kv-replica"] == good.name
                await eventually(lambda: len(bad.left) == left + 1, "the attempt there is ended")
                now = await router.metrics()
                for name, labels in (
                    ("kvroute_second_attempts_total", {"outcome": "begun"}),
                    ("kvroute_second_attempts_total", {"outcome": "won"}),
                    ("kvroute_retries_total", retried),
                ):
                    assert now.sum(name, **labels) == before.sum(name, **labels) + 1, name
            await router.until_idle()


async def test_a_slow_fleet_gets_no_second_attempts() -> None:
    """What is late everywhere would be later still with twice the work."""
    async with engines(2, has_events=True) as stubs:
        with router_process(NATIVE) as router:
            async with router.serving(*stubs):
                await learn_what_is_usual(router, stubs)
                may_respond = asyncio.Event()

                async def wait(exchange: Exchange) -> None:
                    await may_respond.wait()
                    await answer(exchange)

                for stub in stubs:
                    stub.behaviour = wait
                begun = await second_attempts(router, "begun")
                prompts = [[5000 + number] for number in range(30)]
                asked = [asyncio.ensure_future(streamed(router, stubs[0], ids)) for ids in prompts]
                while await second_attempts(router, "not_allowed") < 20:
                    await asyncio.sleep(0.01)
                may_respond.set()
                await asyncio.gather(*asked)
                assert await second_attempts(router, "begun") - begun <= 5
            await router.until_idle()


async def test_replicas_and_clients_by_tls_are_served_without_python_as_well(
    tmp_path: Path,
) -> None:
    """Encryption is no reason to ask Python; the replica learns by which scheme its client came."""
    ca = trustme.CA()
    ca_file, chain, key = (tmp_path / name for name in ("ca.pem", "router.pem", "router.key"))
    ca.cert_pem.write_to_path(ca_file)
    issued = ca.issue_cert("127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(chain)
    issued.private_key_pem.write_to_path(key)
    shown, trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    issued.configure_cert(shown)
    ca.configure_trust(trusting)
    async with EngineStub("by-tls", tls=shown, has_events=True) as stub:
        server = {
            **NATIVE["server"],
            "tls": {"certificate": str(chain), "key": str(key)},
            "replica_tls": {"ca": str(ca_file)},
        }
        replicas = [{"url": stub.url, "id": stub.name}]
        config = {**NATIVE, "server": server, "replicas": replicas}
        with router_process(config) as router:
            url = f"https://127.0.0.1:{router.port}"
            async with httpx.AsyncClient(base_url=url, verify=trusting) as client:
                body = {"model": stub.model, "prompt": prompt_ids(64, 900), "max_tokens": 2}
                found: list[dict[str, Any]] = []
                while not found or not is_without_python(found[0]):
                    await client.post("/v1/completions", json=body)
                    found = (await client.get("/requests")).json()["requests"]
            assert stub.requests[-1].headers["x-forwarded-proto"] == "https"


async def test_a_replica_that_hangs_up_costs_no_request(router: RouterProcess) -> None:
    """The core hands such a request over, and Python goes on where the others are."""
    async with engines(2, has_events=True) as stubs, router.serving(*stubs):
        await until_native(router, stubs[0])
        bad, good = stubs
        ids = prompt_ids(640, 3)
        bad.store(ids)
        await router.until_applied(bad)
        bad.behaviour = hang_up
        found = await asked(router, bad, [*ids, 7])
        assert found.headers["x-kv-replica"] == good.name


async def test_the_time_at_a_replica_that_failed_counts_for_the_request(
    router: RouterProcess,
) -> None:
    """A client that waited for two replicas has waited for both: slow failures must show in the
    latency of the router, and in that of the one request."""
    async with engines(2, has_events=True) as stubs, router.serving(*stubs):
        await until_native(router, stubs[0])
        bad, good = stubs
        ids = prompt_ids(640, 4)
        bad.store(ids)
        await router.until_applied(bad)
        before, fails, loop = await router.metrics(), asyncio.Event(), asyncio.get_running_loop()
        bad.requests.clear()
        bad.behaviour = after(fails, hang_up)
        asking = asyncio.create_task(asked(router, bad, [*ids, 7]))
        await eventually(lambda: bool(bad.requests), "the request is at the first replica")
        loop.call_later(0.5, fails.set)
        assert (await asking).headers["x-kv-replica"] == good.name
        for name in ("kvroute_request_seconds", "kvroute_time_to_first_byte_seconds"):
            count, total = (
                before.sum(f"{name}_{each}", model=bad.model) for each in ("count", "sum")
            )
            await router.until(
                lambda now, name=name, count=count: (
                    now.sum(f"{name}_count", model=bad.model) > count
                ),
                name,
            )
            now = await router.metrics()
            assert now.sum(f"{name}_sum", model=bad.model) - total >= 0.5, name


async def test_bodies_are_bounded_as_elsewhere() -> None:
    """By the limits that the configuration names, and counted while they come."""
    limits = {"max_body_bytes": 100_000, "max_buffered_bytes": 250_000}
    config = {**NATIVE, "server": {**NATIVE["server"], **limits}}
    with router_process(config) as router:
        async with engines(1, has_events=True) as (stub,), router.serving(stub):
            await until_native(router, stub)
            large = {"model": stub.model, "prompt": prompt_ids(40_000, 1)}
            found = await router.post("/v1/completions", large)
            assert (found.status, found.error["code"]) == (413, "body_too_large")
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 90000\r\n\r\n"
            async with contextlib.AsyncExitStack() as clients:
                # Where the body comes slowly, Python takes over, and counts what has come of it.
                while await buffered_bytes(router) < 90_000:
                    client = await clients.enter_async_context(connect(router.port))
                    await client.write(head + b"{" * 40_000)
            while await buffered_bytes(router):
                await asyncio.sleep(0.01)
            await until_native(router, stub)


async def test_a_stream_that_is_under_way_ends_before_the_router_does() -> None:
    """A deployment must not cut what users are reading."""
    go = asyncio.Event()
    async with engines(1, has_events=True) as (stub,):
        with router_process(NATIVE) as router:
            async with router.serving(stub):
                await until_native(router, stub)
                stub.behaviour = begun_until(go)
                async with connect(router.port) as client:
                    body = {"model": stub.model, "prompt": [1, 2, 3], "stream": True}
                    await client.send("POST", "/v1/completions", body)
                    assert await client.read_head() == 200
                    stopping = asyncio.create_task(asyncio.to_thread(router.stop))
                    await eventually(lambda: "shutting down" in router.log(), "it is told to stop")
                    go.set()
                    assert b"[DONE]" in await client.read_body()
                    await stopping


MSGPACK = {"accept": "application/msgpack"}
"""Python answers in it."""


async def told_where(router: RouterProcess, stub: EngineStub, prompt: Any) -> dict[str, Any]:
    """Where a prompt would go, as the core says it and as Python does; both must say the same."""
    body = {"model": stub.model, "token_ids": prompt}
    by_core = (await router.post("/route", {"model": stub.model, "prompt": prompt})).json
    while by_core["hit"]["suspect"]:  # the core hears of it a moment later
        by_core = (await router.post("/route", body)).json
    answer = await router.post("/route", body, headers=MSGPACK)
    by_python = msgspec.msgpack.decode(answer.body)
    assert by_core.pop("routing_seconds") > 0
    assert by_python.pop("routing_seconds") > 0
    assert by_core == by_python
    return dict(by_core)


async def test_where_a_request_would_go_is_told_by_the_core_as_by_python(
    router: RouterProcess,
) -> None:
    """Gateways ask before every request; and nothing of it may be booked."""
    async with engines(3, has_events=True) as stubs, router.serving(*stubs):
        number = await until_native(router, stubs[0])
        for first, stub in enumerate(stubs, 30):
            ids = prompt_ids(640, first)
            stub.store(ids)
            await router.until_applied(stub)
            told = await told_where(router, stub, [*ids, 7])
            assert told["replica"] == stub.name
            assert told["hit"]["gpu_cached_tokens"] == told["hit"]["cached_tokens"] == 640
            assert told["prompt_tokens"] == 641
        decided = (await router.metrics()).sum(
            "kvroute_routing_seconds_count", model=stubs[0].model
        )
        assert decided >= 6
        assert len((await router.get("/requests")).json["requests"]) == number


async def test_a_question_that_cannot_be_answered_is_refused_as_by_python(
    router: RouterProcess,
) -> None:
    """The core leaves it to who can say what is wrong."""
    async with engines(1, has_events=True) as (stub,), router.serving(stub):
        await until_native(router, stub)
        unknown = await router.post("/route", {"model": "nobody has it", "prompt": [1, 2]})
        assert (unknown.status, unknown.error["code"]) == (404, "model_not_found")
        nonsense = await router.post("/route", {"model": stub.model, "prompt": [1, -2]})
        assert nonsense.status == 400
        assert "prompt" in nonsense.error["message"]


def with_a_small_stack() -> None:
    """For the threads of the process that begins."""
    resource.setrlimit(resource.RLIMIT_STACK, (256 * 1024, 256 * 1024))


async def test_many_questions_in_one_segment_are_answered_in_order() -> None:
    """Each is answered at once: where each answer began the next one, they would fill the stack."""
    async with engines(1, has_events=True) as (stub,):
        with router_process(NATIVE, limit=with_a_small_stack) as router:
            async with router.serving(stub):
                await until_native(router, stub)
                asked = [
                    json.dumps({"model": stub.model, "prompt": [1] * (1 + number % 7)}).encode()
                    for number in range(600)
                ]
                row = b"".join(
                    b"POST /route HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b"
                    % (len(body), body)
                    for body in asked
                )
                async with connect(router.port) as client:
                    await client.write(row)
                    for number in range(len(asked)):
                        answer = await client.read_answer()
                        assert answer.status == 200
                        assert answer.json["prompt_tokens"] == 1 + number % 7
