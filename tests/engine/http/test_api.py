"""The engine over HTTP, field by field, over real sockets: what clients of vLLM rely on."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator, Sequence
from random import Random
from typing import Any

import pytest

from kvroute_engine.core.batch import SequenceChunk
from kvroute_engine.core.serving_order import SchedulingPolicy
from kvroute_engine.http.chat import Chat
from kvroute_engine.http.schemas import MAX_PROMPTS, MAX_STOPS
from kvroute_engine.http.tokenizer import ByteTokenizer
from tests.engine.http.served import ADAPTER, MODEL, ScriptedRunner, Served, serving
from tests.support.hostile import SENTINEL, mutated_body
from tests.support.http_client import Answer, connect
from tests.support.waiting import eventually

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = list(range(100))


@pytest.fixture
async def engine() -> AsyncIterator[Served]:
    """An engine that generates "hello" and stops."""
    async with serving("hello") as served:
        yield served


def body_for(path: str, **fields: Any) -> dict[str, Any]:
    prompt = (
        {"prompt": PROMPT}
        if path == COMPLETIONS
        else {"messages": [{"role": "user", "content": "x" * 90}]}
    )
    return {"model": MODEL, **prompt, **fields}


def events_of(body: bytes) -> list[Any]:
    """The events of a stream that ended properly."""
    *events, done, rest = body.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    return [json.loads(event.removeprefix(b"data: ")) for event in events]


def error_of(answer: Answer) -> dict[str, Any]:
    """The error, in the shape that clients parse."""
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.json) == {"error"}
    error: dict[str, Any] = answer.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == answer.status
    return error


# --- responses ------------------------------------------------------------------------------------


async def test_a_completion_has_every_field(engine: Served) -> None:
    """Clients and the router's usage reader look the fields up by name."""
    answer = await engine.post(COMPLETIONS, body_for(COMPLETIONS), {"x-request-id": "mine"})
    assert answer.status == 200
    found = answer.json
    assert abs(found.pop("created") - 1.7e9) < 1e9
    assert found == {
        "id": "cmpl-mine",
        "object": "text_completion",
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "text": "hello",
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": usage(100, 6, 0),
    }


async def test_a_chat_completion_has_every_field(engine: Served) -> None:
    """As for text completions."""
    found = (await engine.post(CHAT, body_for(CHAT, model=None))).json
    assert found.pop("created") > 0
    assert found.pop("id").startswith("chatcmpl-")
    message = {"role": "assistant", "content": "hello"}
    assert found == {
        "object": "chat.completion",
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": message,
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": usage(94, 6, 0),
    }


def usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_stream_has_the_text_of_the_full_response(engine: Served, path: str) -> None:
    """Token by token, with the usage at the end and not before."""
    whole = (await engine.post(path, body_for(path))).json
    await engine.post("/reset_prefix_cache")
    answer = await engine.post(
        path, body_for(path, stream=True, stream_options={"include_usage": True})
    )
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *pieces, last = events_of(answer.body)
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert all(piece["usage"] is None for piece in pieces)
    assert len({piece["id"] for piece in pieces} | {last["id"]}) == 1
    choices = [piece["choices"][0] for piece in pieces]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    if path == CHAT:
        assert {piece["object"] for piece in pieces} == {"chat.completion.chunk"}
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert [choice["delta"]["content"] for choice in choices[1:]] == [*"hello", ""]
    else:
        assert {piece["object"] for piece in pieces} == {"text_completion"}
        assert [choice["text"] for choice in choices] == [*"hello", ""]


async def test_a_stream_without_options_has_no_usage(engine: Served) -> None:
    """As OpenAI has it: older clients fail on an event without choices."""
    events = events_of((await engine.post(COMPLETIONS, body_for(COMPLETIONS, stream=True))).body)
    assert all(event["choices"] and "usage" not in event for event in events)


async def test_running_usage_is_in_every_event(engine: Served) -> None:
    """vLLM's `continuous_usage_stats`, for gateways that bill streams that were cut."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = events_of(
        (
            await engine.post(
                COMPLETIONS, body_for(COMPLETIONS, stream=True, stream_options=options)
            )
        ).body
    )
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 4, 5, 6, 6]


async def test_cached_tokens_are_reported_and_separated_by_salt_and_adapter(engine: Served) -> None:
    """A router's predictions are compared with them; a salt or an adapter has its own cache."""
    cached = []
    for extra in (
        {},
        {},
        {"cache_salt": "s"},
        {"cache_salt": "s"},
        {"model": ADAPTER},
        {"model": ADAPTER},
        {},
    ):
        found = (await engine.post(COMPLETIONS, body_for(COMPLETIONS, **extra))).json
        assert found["model"] == extra.get("model", MODEL)
        cached.append(found["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 96, 0, 96, 0, 96, 96]


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("abc", [4]),
        (["abc", "de"], [4, 3]),
        ([1, 2, 3], [3]),
        ([[1, 2, 3], [4]], [3, 1]),
        ([[1, 2], "abc"], [2, 4]),
        (["x"] * MAX_PROMPTS, [2] * MAX_PROMPTS),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_has_four_forms(
    engine: Served, prompt: Any, tokens: list[int], stream: bool
) -> None:
    """Each prompt of a batch is a choice, in the order of the prompts."""
    fields = {"stream": stream, "stream_options": {"include_usage": True}} if stream else {}
    answer = await engine.post(COMPLETIONS, body_for(COMPLETIONS, prompt=prompt, **fields))
    texts = [""] * len(tokens)
    events = events_of(answer.body) if stream else [answer.json]
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["hello"] * len(tokens)
    found = events[-1]["usage"]
    assert (found["prompt_tokens"], found["completion_tokens"]) == (sum(tokens), 6 * len(tokens))


async def test_a_text_prompt_is_tokenised_as_by_the_tokenize_endpoint(engine: Served) -> None:
    """A router calls that endpoint and predicts hits from the result."""
    text, messages = (
        "a long enough prompt to fill blocks " * 3,
        [{"role": "user", "content": "question " * 20}],
    )
    for path, prompt in ((COMPLETIONS, {"prompt": text}), (CHAT, {"messages": messages})):
        tokenized = (await engine.post("/tokenize", {"model": MODEL, **prompt})).json
        ids = tokenized["tokens"]
        assert tokenized == {
            "count": len(ids),
            "max_model_len": 4096,
            "tokens": ids,
            "token_strs": None,
        }
        assert (await engine.post(path, {"model": MODEL, **prompt})).json["usage"][
            "prompt_tokens"
        ] == len(ids)
        again = (await engine.post(COMPLETIONS, {"prompt": ids})).json["usage"]
        assert again["prompt_tokens_details"]["cached_tokens"] == (len(ids) - 1) // 16 * 16
        back = (await engine.post("/detokenize", {"model": MODEL, "tokens": ids})).json
        assert back["prompt"].startswith("<|bos|>")
    plain = (
        await engine.post(
            "/tokenize", {"prompt": "hé", "add_special_tokens": False, "return_token_strs": True}
        )
    ).json
    assert (plain["tokens"], len(plain["token_strs"])) == ([104, 195, 169], 3)


# --- how responses end ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "text", "reason", "stop_reason", "tokens"),
    [
        ({"max_tokens": 3}, "hel", "length", None, 3),
        ({"max_tokens": 8, "ignore_eos": True}, "hellohe", "length", None, 8),
        ({"stop": "ll"}, "he", "stop", "ll", 4),
        ({"stop": ["zzz", "lo"]}, "hel", "stop", "lo", 5),
        ({"stop": "oh no"}, "hello", "stop", None, 6),
        ({"stop_token_ids": [ord("l")]}, "he", "stop", ord("l"), 3),
        ({"stop_token_ids": [], "stop": []}, "hello", "stop", None, 6),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_ends_where_the_client_asked(
    engine: Served,
    fields: dict[str, Any],
    text: str,
    reason: str,
    stop_reason: Any,
    tokens: int,
    stream: bool,
) -> None:
    """The token that ended it is counted and not part of the text."""
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = await engine.post(COMPLETIONS, body_for(COMPLETIONS, **fields, **options))
    events = events_of(answer.body) if stream else [answer.json]
    choices = [choice for event in events for choice in event["choices"]]
    assert "".join(choice["text"] for choice in choices) == text
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == (reason, stop_reason)
    assert events[-1]["usage"]["completion_tokens"] == tokens
    await engine.until_idle()


async def test_completions_end_after_sixteen_tokens_and_chats_at_the_model_s_end() -> None:
    """The defaults of OpenAI and of vLLM; `max_completion_tokens` is the newer name."""
    async with serving("x" * 5000, settings={"max_model_len": 256, "preset": "full"}) as served:
        assert (await served.post(COMPLETIONS, {"prompt": [1]})).json["usage"][
            "completion_tokens"
        ] == 16
        assert (await served.post(CHAT, body_for(CHAT))).json["usage"]["total_tokens"] == 256
        both = body_for(CHAT, max_completion_tokens=4, max_tokens=9)
        assert (await served.post(CHAT, both)).json["usage"]["completion_tokens"] == 4
        at_the_end = (await served.post(COMPLETIONS, {"prompt": [1] * 250})).json
        assert (
            at_the_end["choices"][0]["finish_reason"],
            at_the_end["usage"]["completion_tokens"],
        ) == ("length", 6)


# --- clients that leave ---------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reset", [False, True])
async def test_a_client_that_leaves_frees_its_blocks(stream: bool, reset: bool) -> None:
    """Streamed or not, closed or aborted: output that is not read must not be computed."""
    async with serving("x" * 4000) as served:
        served.runner.may_go.clear()
        async with connect(served.port) as client:
            await client.send(
                "POST", COMPLETIONS, body_for(COMPLETIONS, max_tokens=3000, stream=stream)
            )
            await eventually(lambda: served.runner.steps, "the request runs")
            client.leave(reset)
        await eventually(
            lambda: not served.service.statistics().in_flight, "the request is given up"
        )
        served.runner.may_go.set()
        await served.until_idle()
        assert served.engine.statistics().scheduler.generation_tokens == 1
        assert (await served.metrics()).sum(
            "vllm:request_success_total", finished_reason="abort"
        ) == 1


async def test_a_client_that_leaves_in_the_middle_of_its_stream_frees_its_blocks() -> None:
    """With tokens sent, and more of them waiting to be sent."""
    async with serving("x" * 4000) as served:
        served.service.faults.slow(1000)
        async with connect(served.port) as client:
            await client.send(
                "POST", COMPLETIONS, body_for(COMPLETIONS, max_tokens=3000, stream=True)
            )
            await client.read_head()
            await client.read_piece()
        await eventually(
            lambda: not served.service.statistics().in_flight, "the request is given up"
        )
        served.service.faults.slow(1)
        await served.until_idle()
        assert served.engine.statistics().scheduler.generation_tokens < 3000


async def test_a_client_that_leaves_before_it_is_admitted_leaves_nothing(engine: Served) -> None:
    """The engine hangs in a step meanwhile."""
    engine.runner.may_go.clear()
    first = asyncio.ensure_future(engine.post(COMPLETIONS, body_for(COMPLETIONS)))
    await eventually(lambda: engine.runner.steps, "the engine is in its step")
    async with connect(engine.port) as client:
        await client.send("POST", COMPLETIONS, body_for(COMPLETIONS))
        await eventually(lambda: engine.service.statistics().in_flight == 2, "the second one waits")
        client.leave()
    await eventually(
        lambda: engine.service.statistics().in_flight == 1, "the second one is forgotten"
    )
    engine.runner.may_go.set()
    assert (await first).status == 200
    await engine.until_idle()


# --- for routers ----------------------------------------------------------------------------------


async def test_models_and_event_sources_have_vllm_s_form(engine: Served) -> None:
    """Discovery needs nothing else."""
    listed = (await engine.get("/v1/models")).json
    assert listed["object"] == "list"
    assert [(entry["id"], entry["parent"], entry["object"]) for entry in listed["data"]] == [
        (MODEL, None, "model"),
        (ADAPTER, MODEL, "model"),
    ]
    assert listed["data"][0]["max_model_len"] == 4096
    assert (await engine.get("/kv_event_sources")).json == {
        "0": {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": "tcp://127.0.0.1:5557",
            "replay_endpoint": "tcp://127.0.0.1:6557",
            "topic": "kv-events",
        }
    }
    assert (await engine.get("/server_info")).json == {
        "scheduling_policy": "fcfs",
        "retention_hints": 1,
    }


async def test_a_request_s_priority_is_in_its_header_or_its_body() -> None:
    """As vLLM reads them: the header first, and not where it is no number."""
    settings = {"max_num_seqs": 1, "scheduling_policy": SchedulingPolicy.PRIORITY}
    sent: list[tuple[str, dict[str, str], dict[str, Any]]] = [
        (COMPLETIONS, {}, {}),
        (COMPLETIONS, {}, {"priority": 3}),
        (CHAT, {"X-Vllm-Priority": "2"}, {"priority": -9}),
        (CHAT, {"X-Vllm-Priority": "soon"}, {"priority": 1}),
        (COMPLETIONS, {"X-Vllm-Priority": "-9223372036854775808"}, {}),
    ]
    async with serving(settings=settings) as served:
        order = keep_order(served.runner)
        served.runner.may_go.clear()
        tasks = []
        for path, headers, fields in sent:
            tasks.append(asyncio.create_task(served.post(path, body_for(path, **fields), headers)))
            await eventually(
                lambda: served.service.statistics().in_flight == len(tasks), "it is queued"
            )
            await eventually(lambda: served.runner.steps, "the first one runs")
        served.runner.may_go.set()
        assert {(await task).status for task in tasks} == {200}
    assert order == [f"request-{number}" for number in (0, 4, 3, 2, 1)]


@pytest.mark.parametrize("priority", ["9223372036854775808", "-" + "9" * 23, "9" * 5000])
async def test_a_priority_above_64_bits_is_refused(engine: Served, priority: str) -> None:
    """An error of the client's, and not of the engine."""
    body, headers = body_for(COMPLETIONS), {"X-Vllm-Priority": priority}
    answer = await engine.post(COMPLETIONS, body, headers)
    assert answer.status == 400
    assert error_of(answer)["param"] == "x-vllm-priority"
    assert engine.runner.steps == 0


def keep_order(runner: ScriptedRunner) -> list[str]:
    """The requests in the order in which they are computed first, as that goes on."""
    order, run = list[str](), runner.run

    def watched(chunks: Sequence[SequenceChunk]) -> list[int | None]:
        order.extend(chunk.request_id for chunk in chunks if chunk.request_id not in order)
        return run(chunks)

    runner.run = watched  # type: ignore[method-assign]
    return order


async def test_an_engine_without_events_has_no_sources() -> None:
    """An empty object, not an error."""
    async with serving(event_endpoints={}) as served:
        assert (await served.get("/kv_event_sources")).json == {}


async def test_probes_respond_without_a_body(engine: Served) -> None:
    """As vLLM's do."""
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        answer = await (engine.get(path) if method == "GET" else engine.post(path))
        assert (answer.status, answer.body) == (200, b"")
    assert (await engine.get("/version")).json == {"version": "1.2.3"}


async def test_a_reset_forgets_every_prefix_unless_it_is_in_use() -> None:
    """The response says which of the two."""
    async with serving("x" * 4000) as served:
        await served.post(COMPLETIONS, body_for(COMPLETIONS))
        served.service.faults.slow(100)
        async with connect(served.port) as client:
            await client.send(
                "POST", COMPLETIONS, body_for(COMPLETIONS, max_tokens=3000, stream=True)
            )
            await client.read_head()
            await client.read_piece()
            assert (await served.post("/reset_prefix_cache")).json == {"success": False}
        served.service.faults.slow(1)
        await served.until_idle()
        again = (await served.post(COMPLETIONS, body_for(COMPLETIONS))).json["usage"]
        assert again["prompt_tokens_details"]["cached_tokens"] == 96
        assert (await served.post("/reset_prefix_cache")).json == {"success": True}
        assert (await served.post(COMPLETIONS, body_for(COMPLETIONS))).json["usage"] == usage(
            100, 16, 0
        )


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [1, 512]}, "prompt[1]"),
        ({"prompt": [[1], [2, 10**20]]}, "prompt[1][1]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["x"] * (MAX_PROMPTS + 1)}, "prompt"),
        ({"prompt": [1] * 4096}, "prompt"),
        ({"max_tokens": 4000}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"seed": 2**63}, "seed"),
        ({"priority": 2**63}, "priority"),
        ({"priority": "1"}, "priority"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * (MAX_STOPS + 1)}, "stop"),
        ({"stop": ["a" * 2000]}, "stop[0]"),
        ({"stop_token_ids": [-5]}, "stop_token_ids[0]"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"n": 2}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"echo": True}, "echo"),
        ({"logprobs": 0}, "logprobs"),
        ({"suffix": "x"}, "suffix"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 5}, "top_k"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 0}, "prompt"),
        ({"truncation_side": "middle"}, "truncation_side"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias"),
    ],
)
async def test_a_broken_rule_is_named_with_its_field(
    engine: Served, fields: dict[str, Any], place: str
) -> None:
    """An unsupported field is refused and never replaced by something else."""
    answer = await engine.post(COMPLETIONS, body_for(COMPLETIONS, **fields))
    assert answer.status == 400, answer.body
    error = error_of(answer)
    assert (error["type"], error["param"]) == ("BadRequestError", place)
    assert error["message"].startswith(f"{place}: ")
    assert engine.runner.steps == 0


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{}]}, "messages[0].role"),
        ({"messages": [{"role": 5}]}, "messages[0].role"),
        ({"messages": [{"role": "x", "content": "y"}]}, None),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"max_completion_tokens": 5000}, "max_tokens"),
    ],
)
async def test_a_chat_s_broken_rule_is_named_too(
    engine: Served, fields: dict[str, Any], place: str | None
) -> None:
    """As for text completions."""
    answer = await engine.post(CHAT, body_for(CHAT, **fields))
    assert (answer.status, error_of(answer)["param"]) == (400, place)


@pytest.mark.parametrize(
    "fields",
    [
        {
            "n": 1,
            "best_of": 1,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0,
            "presence_penalty": 0.0,
            "echo": False,
            "logprobs": None,
        },
        {
            "user": "u",
            "vllm_xargs": {"a": 1},
            "whatever": [1, 2],
            "logit_bias": {},
            "suffix": None,
            "temperature": 0,
            "seed": 7,
        },
    ],
)
async def test_fields_with_their_neutral_value_are_accepted(
    engine: Served, fields: dict[str, Any]
) -> None:
    """SDKs send defaults, and servers add fields over the years."""
    assert (await engine.post(COMPLETIONS, body_for(COMPLETIONS, **fields))).json["choices"][0][
        "text"
    ] == "hello"


@pytest.mark.parametrize(
    ("path", "body", "status", "kind"),
    [
        (COMPLETIONS, {"model": "nobody", "prompt": [1]}, 404, "NotFoundError"),
        ("/tokenize", {"model": "nobody", "prompt": "x"}, 404, "NotFoundError"),
        (COMPLETIONS, b"{", 400, "BadRequestError"),
        (COMPLETIONS, b"", 400, "BadRequestError"),
        (COMPLETIONS, b"[" * 100_000, 400, "BadRequestError"),
        (CHAT, b'{"messages":' + b'[{"a":' * 5000, 400, "BadRequestError"),
        (COMPLETIONS, b'{"prompt": "\xff"}', 400, "BadRequestError"),
        (COMPLETIONS, b'{"prompt": "\\ud800"}', 400, "BadRequestError"),
        ("/tokenize", {}, 400, "BadRequestError"),
        ("/tokenize", {"prompt": [1]}, 400, "BadRequestError"),
        ("/detokenize", {"tokens": [600]}, 400, "BadRequestError"),
        ("/health", b"", 405, "MethodNotAllowedError"),
        ("/v2/completions", b"", 404, "NotFoundError"),
        ("/faults", {"kind": "crash"}, 404, "NotFoundError"),
    ],
)
async def test_errors_have_openai_s_shape_and_vllm_s_status(
    engine: Served, path: str, body: Any, status: int, kind: str
) -> None:
    """Also for requests that are not well-formed."""
    answer = await engine.post(path, body)
    assert (answer.status, error_of(answer)["type"]) == (status, kind)


async def test_a_body_over_the_limit_is_refused_before_it_is_read() -> None:
    """With a content-length or in chunks."""
    async with serving(max_body_bytes=1000) as served:
        assert (
            await served.post(COMPLETIONS, body_for(COMPLETIONS, prompt="x" * 2000))
        ).status == 413
        async with connect(served.port) as client:
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
            client.writer.write(head + b"400\r\n" + b"x" * 0x400 + b"\r\n")
            assert await client.read_head() == 413
        assert (await served.post(COMPLETIONS, {"prompt": [1]})).status == 200


async def test_a_body_that_never_arrives_times_out() -> None:
    """A client may open many such requests."""
    async with serving(body_timeout_s=0.05) as served, connect(served.port) as client:
        client.writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{"
        )
        assert await client.read_head() == 408


async def test_a_dead_engine_shows_at_every_endpoint(engine: Served) -> None:
    """503 to health checks, 500 to requests, an event in a stream that has begun."""
    engine.runner.may_go.clear()
    async with connect(engine.port) as client:
        await client.send("POST", COMPLETIONS, body_for(COMPLETIONS, stream=True))
        assert await client.read_head() == 200
        engine.runner.fails_with = RuntimeError("broken")
        engine.runner.may_go.set()
        (event,) = events_of(await client.read_body())
        assert event["error"]["code"] == 500
    assert (await engine.get("/health")).status == 503
    answer = await engine.post(COMPLETIONS, body_for(COMPLETIONS))
    assert (answer.status, error_of(answer)["type"]) == (500, "InternalServerError")
    assert (await engine.get("/metrics")).status == 200


async def test_a_draining_engine_responds_503_with_retry_after(engine: Served) -> None:
    """A router then takes another replica."""
    engine.service.start_draining()
    answer = await engine.post(COMPLETIONS, body_for(COMPLETIONS))
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert error_of(answer)["type"] == "ServiceUnavailableError"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"prompt": "a" * 20_000, "truncate_prompt_tokens": 10}),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 20_000}]}),
        (CHAT, {"tools": [{"a": "a" * 20_000}]}),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": ["a" * 20_000]}]}),
        ("/tokenize", {"prompt": "a" * 20_000, "return_token_strs": True}),
        ("/tokenize", {"messages": [{"role": "user"}], "tools": [{"a": "a" * 20_000}]}),
        ("/detokenize", {"tokens": [97] * 20_000}),
    ],
)
async def test_what_is_long_holds_up_no_other_client(path: str, fields: dict[str, Any]) -> None:
    """32 MiB of tokens take seconds; all streams and probes of the engine share one thread."""
    tokenizer = WatchedTokenizer()
    short: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]} if path == CHAT else {}
    if path == CHAT:
        fields = {"truncate_prompt_tokens": 10, "max_tokens": 2, **fields}
    async with serving("hello", tokenizer) as served:
        answer = await served.post(path, {"model": MODEL, **short, **fields})
        assert answer.status == 200
        assert tokenizer.threads
        assert threading.get_ident() not in tokenizer.threads


class WatchedTokenizer(ByteTokenizer):
    """Keeps the threads that it works in."""

    def __init__(self) -> None:
        self.threads: set[int] = set()

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        self.threads.add(threading.get_ident())
        return super().encode(text, add_special_tokens)

    def encode_chat(self, chat: Chat) -> list[int]:
        self.threads.add(threading.get_ident())
        return super().encode_chat(chat)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        self.threads.add(threading.get_ident())
        return super().decode(token_ids, skip_special_tokens)


async def test_hostile_bodies_get_a_response_that_never_quotes_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A good response or a proper error, no bug of ours, and nothing of the body in the log."""
    random = Random(7)
    extras = {
        "stream": False,
        "cache_salt": "s",
        "stop": ["q"],
        "stop_token_ids": [9],
        "temperature": 0.5,
        "max_tokens": 3,
    }
    prompt = {"prompt": f"{SENTINEL} a"}
    messages = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": SENTINEL}]}],
        "tools": [{"a": SENTINEL}],
    }
    seeds = {
        COMPLETIONS: {**prompt, **extras},
        CHAT: {**messages, **extras},
        "/tokenize": messages,
        "/detokenize": {"tokens": [1]},
    }
    async with serving("hello") as served:
        with caplog.at_level(logging.DEBUG, logger="kvroute_engine"):
            for index in range(600):
                path = list(seeds)[index % len(seeds)]
                body = mutated_body(random, {"model": MODEL, **seeds[path]})
                answer = await served.post(path, body)
                assert answer.status in (200, 400, 404), (path, body, answer)
                if answer.status != 200:
                    assert SENTINEL not in error_of(answer)["message"], (path, body)
        await served.until_idle()
    assert SENTINEL not in caplog.text


# --- faults ---------------------------------------------------------------------------------------


async def test_faults_can_be_injected_where_they_are_enabled() -> None:
    """Hang and slow over HTTP; a fault that the publisher cannot do is refused."""
    dropped: list[int] = []
    async with serving(enable_faults=True, drop_events=dropped.append) as served:
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert (await served.post("/faults", {"kind": "hang", "seconds": 0.2})).json == {
            "kind": "hang",
            "seconds": 0.2,
        }
        assert (await served.get("/health")).status == 200
        assert (await served.post(COMPLETIONS, body_for(COMPLETIONS))).status == 200
        assert loop.time() - began >= 0.2
        assert (await served.post("/faults", {"kind": "slow", "factor": 3})).status == 200
        assert served.service.faults.statistics().slow_factor == 3
        assert (await served.post("/faults", {"kind": "drop_events", "batches": 4})).status == 200
        assert dropped == [4]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"kind": "fire"},
        {"kind": "hang"},
        {"kind": "hang", "seconds": -1},
        {"kind": "slow", "factor": 0.5},
        [],
    ],
)
async def test_an_invalid_fault_is_refused(body: Any) -> None:
    """And changes nothing."""
    async with serving(enable_faults=True) as served:
        answer = await served.post("/faults", body)
        assert answer.status == 400
        assert error_of(answer)["type"] == "BadRequestError"
        assert served.service.faults.statistics().slow_factor == 1


async def test_a_publisher_that_cannot_lose_events_is_not_asked_to() -> None:
    """A test that believed it had lost some would prove nothing."""
    async with serving(enable_faults=True) as served:
        answer = await served.post("/faults", {"kind": "drop_events", "batches": 1})
        assert (answer.status, error_of(answer)["code"]) == (501, 501)
