"""The whole way from a body to ids, in the router and at a replica, in an event loop."""

from __future__ import annotations

import asyncio
import json
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from tokenizers import Tokenizer

from router.errors import BadRequest
from router.prompt.body.requests import parse_request
from router.prompt.body.sglang_request import as_sglang_reads
from router.prompt.endpoints import Endpoint
from router.prompt.errors import ReplicaAnswerError, UntokenizableError
from router.prompt.limits import MAX_PROMPT_TOKENS
from router.prompt.local.tokenizer import LocalTokenizer
from router.prompt.model_files import ModelFiles
from router.prompt.processes import LargeWork
from router.prompt.prompts import (
    ChatPrompt,
    Coverage,
    PromptSpec,
    TextPrompt,
    TokenizedPrompt,
)
from router.prompt.remote import RemoteTokenizer
from router.prompt.token_ids import Ends, Truncation, ends_of
from router.prompt.tokenization import Tokenization
from router.routing.replica_tokenizers import find_disagreements
from tests.router.prompt.bodies import bodies
from tests.support.waiting import DEADLINE_S

_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor "
    "%}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_USER = {"role": "user", "content": "the quick brown fox"}
_CHAT = {"model": "m", "messages": [{"role": "system", "content": "Be brief."}, _USER]}

_HALF_A_PAIR = {"function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}

_TokenizerOf = Callable[[str], Tokenizer]
_LocalOf = Callable[..., LocalTokenizer]


def _spec(endpoint: Endpoint, body: Any) -> PromptSpec:
    return parse_request(endpoint, json.dumps(body).encode())


class _Replica:
    """A server with `/tokenize` as vLLM has it, on the same tokenizer; what it got is kept."""

    def __init__(self, local: LocalTokenizer, answer: Response | None = None) -> None:
        self.local = local
        self.answer = answer
        self.bodies: list[dict[str, Any]] = []
        app = Starlette(routes=[Route("/tokenize", self._tokenize, methods=["POST"])])
        self._client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app), base_url="http://replica"
        )

    async def fetch(self, path: str, body: bytes) -> tuple[int, bytes]:
        response = await self._client.post(path, content=body)
        return response.status_code, response.content

    async def _tokenize(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        if self.answer is not None:
            return self.answer
        special = body["add_special_tokens"]
        if "prompt" in body:
            prompt: TextPrompt | ChatPrompt = TextPrompt(body["prompt"], special)
        else:
            prompt = ChatPrompt(
                body["messages"],
                add_generation_prompt=body.get("add_generation_prompt", True),
                add_special_tokens=special,
            )
        ids = self.local.finish(self.local.prepare(prompt, None)).tolist()
        return Response(json.dumps({"tokens": ids, "count": len(ids), "max_model_len": 4096}))


@pytest.fixture
def local(build_tokenizer: _TokenizerOf, local_of: _LocalOf) -> LocalTokenizer:
    return local_of(build_tokenizer("qwen"), chat_templates={"default": _TEMPLATE})


@pytest.fixture
def without_template(build_tokenizer: _TokenizerOf, local_of: _LocalOf) -> LocalTokenizer:
    return local_of(build_tokenizer("qwen"))


@pytest.fixture
def replica(local: LocalTokenizer) -> _Replica:
    return _Replica(local)


async def test_a_chat_is_tokenised_with_adapter_and_salt(
    local: LocalTokenizer, build_tokenizer: _TokenizerOf
) -> None:
    """All that block keys depend on comes out together."""
    tokenization = Tokenization(local=local)
    (result,) = await tokenization.tokenize(
        _spec(Endpoint.CHAT, {**_CHAT, "cache_salt": "s"}), lora_name="adapter"
    )
    text = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
        "the quick brown fox<|im_end|>\n<|im_start|>assistant\n"
    )
    assert result.token_ids.tolist() == build_tokenizer("qwen").encode(text).ids
    assert (result.coverage, result.exact, result.reason) == (Coverage.WHOLE, True, None)
    assert (result.lora_name, result.cache_salt, result.extra_keys) == ("adapter", "s", None)
    tokenization.close()


async def test_a_batch_comes_out_in_order(
    local: LocalTokenizer, build_tokenizer: _TokenizerOf
) -> None:
    """Every prompt of a batch is routed on its own ids, with its own salt; now or later."""
    tokenizer = build_tokenizer("qwen")
    tokenization = Tokenization(local=local)
    salts = ["s", "t", ""]
    spec = _spec(Endpoint.COMPLETIONS, {"prompt": ["a", [5, 6], "b fox"], "cache_salt": salts})
    expected = [tokenizer.encode("a").ids, [5, 6], tokenizer.encode("b fox").ids]
    for results in (await tokenization.tokenize(spec), tokenization.tokenize_now(spec)):
        assert results is not None
        assert [result.token_ids.tolist() for result in results] == expected
        assert [result.cache_salt for result in results] == ["s", "t", None]


async def test_token_ids_need_no_tokenizer_at_all() -> None:
    """`/route` with ids works for models that the router knows nothing about."""
    body = {"model": "m", "token_ids": [1, 2, 3], "lora_name": "adapter"}
    (result,) = await Tokenization().tokenize(_spec(Endpoint.ROUTE, body))
    assert (result.token_ids.tolist(), result.exact, result.lora_name) == (
        [1, 2, 3],
        True,
        "adapter",
    )


@pytest.mark.parametrize(
    ("endpoint", "field"),
    [
        (Endpoint.CHAT, "messages"),
        (Endpoint.MESSAGES, "messages"),
        (Endpoint.RESPONSES, "input"),
    ],
)
async def test_forwarded_ids_are_computed_in_place_of_a_chat(
    endpoint: Endpoint, field: str
) -> None:
    """A gateway that had the prompt computed elsewhere forwards its ids, and vLLM 0.33 renders no
    messages then. SGLang does not know the field."""
    tokenization = Tokenization()
    body = {field: [_USER], "truncate_prompt_tokens": 1} | _forwarding([7, 8, 9])
    spec = _spec(endpoint, body)
    for found in (tokenization.tokenize_now(spec), await tokenization.tokenize(spec)):
        assert found is not None
        (prompt,) = found
        assert (list(prompt.token_ids), prompt.coverage) == ([7, 8, 9], Coverage.WHOLE)
    (prompt,) = await tokenization.tokenize(as_sglang_reads(spec))
    assert prompt.coverage is Coverage.UNKNOWN


@pytest.mark.parametrize("ids", [[], None, 7, ["7"], [True], [-1], [1.0], [2**32]])
async def test_ids_that_engines_refuse_are_not_taken(ids: Any) -> None:
    """The messages are read then, as older engines do."""
    (prompt,) = await Tokenization().tokenize(_spec(Endpoint.CHAT, _CHAT | _forwarding(ids)))
    assert prompt.coverage is Coverage.UNKNOWN


async def test_forwarded_ids_say_nothing_of_media() -> None:
    """Engines render such messages."""
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    chat = {"messages": [{"role": "user", "content": [image]}]} | _forwarding([7])
    (prompt,) = await Tokenization().tokenize(_spec(Endpoint.CHAT, chat))
    assert prompt.coverage is Coverage.UNKNOWN


def _forwarding(ids: Any) -> dict[str, Any]:
    return {"kv_transfer_params": {"prompt_token_ids": ids}}


async def test_token_ids_are_truncated_too() -> None:
    """The engine cuts them as it cuts text."""
    (result,) = await Tokenization().tokenize(
        _spec(Endpoint.COMPLETIONS, {"prompt": [1, 2, 3], "truncate_prompt_tokens": 2})
    )
    assert result.token_ids.tolist() == [2, 3]


@pytest.mark.parametrize(
    ("endpoint", "body", "reason"),
    [
        (Endpoint.CHAT, {**_CHAT, "chat_template": "x"}, "request_chat_template"),
        (Endpoint.COMPLETIONS, {"prompt_embeds": "x"}, "prompt_embeds"),
        (Endpoint.RESPONSES, {"input": "a", "previous_response_id": "r"}, "stored_conversation"),
        (Endpoint.CHAT, {**_CHAT, "continue_final_message": True}, "template_refused"),
        (
            Endpoint.CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "media",
        ),
        (
            Endpoint.CHAT,
            {"messages": [_USER, {"role": "assistant", "tool_calls": [_HALF_A_PAIR]}]},
            "not_unicode",
        ),
    ],
)
async def test_what_cannot_be_known_is_said_and_not_raised(
    local: LocalTokenizer, endpoint: Endpoint, body: dict[str, Any], reason: str
) -> None:
    """The request is routed by load, and the engine answers it."""
    tokenization = Tokenization(local=local)
    (result,) = await tokenization.tokenize(_spec(endpoint, body))
    assert result == TokenizedPrompt(array("I"), Coverage.UNKNOWN, reason)
    statistics = tokenization.statistics()
    assert (statistics.prompts, statistics.unknown) == ({Coverage.UNKNOWN: 1}, {reason: 1})


async def test_a_chat_with_an_image_keeps_its_certain_prefix(local: LocalTokenizer) -> None:
    """A long system prompt before an image is worth routing by."""
    image = {
        "role": "user",
        "content": [
            {"type": "text", "text": "look"},
            {"type": "image_url", "image_url": {"url": "x"}},
        ],
    }
    tokenization = Tokenization(local=local)
    (whole,) = await tokenization.tokenize(_spec(Endpoint.CHAT, _CHAT))
    (prefix,) = await tokenization.tokenize(
        _spec(Endpoint.CHAT, {"messages": [*_CHAT["messages"], image]})
    )
    assert (prefix.coverage, prefix.reason) == (Coverage.PREFIX, "media")
    # All of the two messages, but not the header of the generation prompt.
    assert 10 < len(prefix.token_ids) < len(whole.token_ids)
    assert prefix.token_ids == whole.token_ids[: len(prefix.token_ids)]


async def test_a_replica_is_asked_where_the_router_has_no_template(
    without_template: LocalTokenizer, replica: _Replica, local: LocalTokenizer
) -> None:
    """The answer is exact, by definition."""
    tokenization = Tokenization(local=without_template, remote=RemoteTokenizer(replica.fetch))
    (result,) = await tokenization.tokenize(_spec(Endpoint.CHAT, _CHAT))
    (expected,) = await Tokenization(local=local).tokenize(_spec(Endpoint.CHAT, _CHAT))
    assert result == expected
    await tokenization.tokenize(_spec(Endpoint.COMPLETIONS, {"prompt": "text"}))
    assert len(replica.bodies) == 1, "text needs no template"


@pytest.mark.parametrize(
    ("endpoint", "fields", "asks", "is_asked"),
    [
        (Endpoint.CHAT, {}, True, True),
        (Endpoint.MESSAGES, {}, True, True),
        (Endpoint.CHAT, {}, False, False),
        (Endpoint.CHAT, {"reasoning_effort": "high"}, True, False),
        (Endpoint.CHAT, {"truncate_prompt_tokens": 5}, True, False),
        (Endpoint.RESPONSES, {"input": "hello"}, True, False),
    ],
)
async def test_replicas_are_asked_for_chats_with_gpt_oss_where_they_know_them(
    endpoint: Endpoint,
    fields: dict[str, Any],
    asks: bool,
    is_asked: bool,
    build_tokenizer: _TokenizerOf,
    local_of: _LocalOf,
    replica: _Replica,
) -> None:
    """VLLM writes them by code; from 0.33 on its `/tokenize` does, too, as far as it has fields."""
    local = local_of(build_tokenizer("qwen"), model_type="gpt_oss")
    tokenization = Tokenization(local=local, remote=RemoteTokenizer(replica.fetch))
    tokenization.asks_harmony = lambda: asks
    (result,) = await tokenization.tokenize(_spec(endpoint, {**_CHAT, **fields}))
    assert (result.exact, result.reason) == ((True, None) if is_asked else (False, "harmony"))
    assert len(replica.bodies) == is_asked


async def test_a_replica_gets_all_that_shapes_the_prompt(replica: _Replica) -> None:
    """`/tokenize` has other fields than a chat; what it lacks goes among the template's
    arguments."""
    body = {
        **_CHAT,
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "documents": [{"title": "t"}],
        "reasoning_effort": "low",
        "add_generation_prompt": False,
    }
    await Tokenization(remote=RemoteTokenizer(replica.fetch)).tokenize(_spec(Endpoint.CHAT, body))
    function = {"name": "f", "description": None, "parameters": None}
    assert replica.bodies == [
        {
            "model": "m",
            "messages": _CHAT["messages"],
            "tools": [{"type": "function", "function": function}],
            "add_generation_prompt": False,
            "continue_final_message": False,
            "add_special_tokens": False,
            "chat_template_kwargs": {
                "reasoning_effort": "low",
                "enable_thinking": True,
                "documents": [{"title": "t"}],
            },
        }
    ]


async def test_a_replica_is_not_told_its_own_default(replica: _Replica) -> None:
    """SGLang 0.5.23 refuses the field, true or false, where it renders a model's chats by code."""
    await Tokenization(remote=RemoteTokenizer(replica.fetch)).tokenize(_spec(Endpoint.CHAT, _CHAT))
    assert "add_generation_prompt" not in replica.bodies[0]


_INPUT_TEXT = {"type": "input_text", "text": "hello"}


@pytest.mark.parametrize(
    "item",
    [
        {"role": "user", "content": [_INPUT_TEXT]},
        {"type": "message", "role": "user", "content": [_INPUT_TEXT]},
        {"role": "user", "content": [_INPUT_TEXT, {"type": "input_text", "text": "there"}]},
        {"role": "developer", "content": [_INPUT_TEXT]},
        {"type": "function_call_output", "call_id": "c", "output": [_INPUT_TEXT]},
    ],
)
async def test_a_replica_is_asked_for_typed_input_as_text_parts(
    replica: _Replica, item: dict[str, Any]
) -> None:
    """vLLM's `/tokenize` takes the parts of a chat only, and the OpenAI SDK sends these."""
    tokenization = Tokenization(remote=RemoteTokenizer(replica.fetch))
    spec = _spec(Endpoint.RESPONSES, {"model": "m", "input": [item]})
    (result,) = await tokenization.tokenize(spec)
    assert result.exact
    parts = replica.bodies[0]["messages"][-1]["content"]
    assert {part["type"] for part in parts} == {"text"}
    assert parts[0]["text"] == "hello"


async def test_a_long_text_arrives_whole(replica: _Replica, large_work: LargeWork) -> None:
    """It is encoded in pieces, and its ids are read in a process."""
    text = 'one "two"\n\U0001f600 ' * 110_000
    remote = RemoteTokenizer(replica.fetch, large_work=large_work)
    tokenization = Tokenization(remote=remote)
    (result,) = await tokenization.tokenize(_spec(Endpoint.COMPLETIONS, {"prompt": text}))
    assert replica.bodies[0]["prompt"] == text
    assert result.exact
    assert len(result.token_ids) > 262_144


@pytest.fixture
def large_work() -> Iterator[LargeWork]:
    work = LargeWork()
    yield work
    work.close()


async def test_a_refused_prompt_is_not_called_the_replicas_failure(
    local: LocalTokenizer,
) -> None:
    """An operator would look at the replica, which is fine."""
    remote = RemoteTokenizer(_Replica(local, Response("no", status_code=400)).fetch)
    (result,) = await Tokenization(remote=remote).tokenize(
        _spec(Endpoint.COMPLETIONS, {"prompt": "text"})
    )
    assert (result.coverage, result.reason) == (Coverage.UNKNOWN, "replica_refused")


async def test_an_answer_is_remembered_by_salt(replica: _Replica) -> None:
    """A round trip is saved, but not across tenants."""
    remote = RemoteTokenizer(replica.fetch)
    for salt in (None, None, "s", "s"):
        await remote.tokenize(TextPrompt("text"), model="m", cache_salt=salt)
    assert len(replica.bodies) == 2


async def test_a_replica_whose_template_has_one_system_message_gets_one(
    build_tokenizer: _TokenizerOf, local_of: _LocalOf
) -> None:
    """Where the engine merges them, so that Claude Code's reminders went by load; asked twice only
    until that is known."""
    strict = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('no') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    local = local_of(build_tokenizer("qwen"), chat_templates={"default": strict})
    asked: list[list[str]] = []

    async def fetch(_path: str, body: bytes) -> tuple[int, bytes]:
        messages = json.loads(body)["messages"]
        asked.append([message["role"] for message in messages])
        try:
            ids = local.finish(local.prepare(ChatPrompt(messages), None)).tolist()
        except UntokenizableError:
            return 400, b"{}"
        return 200, json.dumps({"tokens": ids}).encode()

    tokenization = Tokenization(remote=RemoteTokenizer(fetch))
    for text, times in (("a", 2), ("b", 1)):
        asked.clear()
        reminder = {"role": "system", "content": "now"}
        body = {
            "model": "m",
            "system": "be",
            "messages": [_USER, reminder, {**_USER, "content": text}],
        }
        spec = _spec(Endpoint.MESSAGES, body)
        (result,) = await tokenization.tokenize(spec)
        (expected,) = await Tokenization(local=local).tokenize(spec)
        assert result == expected
        assert result.exact
        assert (len(asked), asked[-1]) == (times, ["system", "user", "user"])


async def test_an_answer_to_a_chat_holds_until_its_date_may_be_another(replica: _Replica) -> None:
    """Templates write the date at the very start of a prompt, and gpt-oss's chats have it."""
    now = [0.0]
    remote = RemoteTokenizer(replica.fetch, clock=lambda: now[0])
    chat = ChatPrompt([{"role": "user", "content": "hello"}])
    for time_s, asked in ((899.0, 1), (900.0, 2), (901.0, 2)):
        await remote.tokenize(chat, model="m", cache_salt=None)
        now[0] = time_s
        await remote.tokenize(chat, model="m", cache_salt=None)
        assert len(replica.bodies) == asked


@pytest.mark.parametrize(
    "answer",
    [
        Response("no", status_code=500),
        Response("no"),
        Response("[]"),
        Response('{"tokens": [1, -1]}'),
        Response('{"tokens": [1.5]}'),
        Response('{"tokens": [4294967296]}'),
        Response('{"tokens": [true]}'),
        Response('{"tokens": "secret"}'),
        Response('{"tokens": [1, 2], "count": 3}'),
        Response("[" * 100_000),
        Response(b"\xff"),
        Response(b" " * (13 * MAX_PROMPT_TOKENS) + b'{"tokens": []}'),
    ],
)
async def test_a_bad_answer_is_an_error_without_its_text(
    local: LocalTokenizer, answer: Response
) -> None:
    """A replica may be anything that listens on its port."""
    remote = RemoteTokenizer(_Replica(local, answer).fetch)
    with pytest.raises(ReplicaAnswerError) as error:
        await remote.tokenize(TextPrompt("text"), model=None, cache_salt=None)
    assert "secret" not in str(error.value)
    (result,) = await Tokenization(remote=remote).tokenize(
        _spec(Endpoint.COMPLETIONS, {"prompt": "text"})
    )
    assert (result.coverage, result.reason) == (Coverage.UNKNOWN, "replica_failed")


async def test_a_replica_that_is_not_there_is_no_crash() -> None:
    """The request goes on to another replica, routed by load."""

    async def fetch(path: str, body: bytes) -> tuple[int, bytes]:
        reader, _ = await asyncio.open_connection("127.0.0.1", 1)
        return 200, await reader.read()

    tokenization = Tokenization(remote=RemoteTokenizer(fetch))
    (result,) = await tokenization.tokenize(_spec(Endpoint.COMPLETIONS, {"prompt": "text"}))
    assert result.reason == "replica_failed"


async def test_more_ids_than_the_limit_are_not_taken_from_a_replica(local: LocalTokenizer) -> None:
    """The limit holds wherever ids come from."""
    answer = Response(json.dumps({"tokens": [1] * (MAX_PROMPT_TOKENS + 1)}))
    remote = RemoteTokenizer(_Replica(local, answer).fetch)
    with pytest.raises(UntokenizableError, match="prompt_too_long"):
        await remote.tokenize(TextPrompt("the quick brown fox"), model=None, cache_salt=None)


async def test_a_truncation_by_the_tokenizer_leaves_the_special_tokens(replica: _Replica) -> None:
    """Without a side the text gives way; which ids those tokens are, only the replica knows."""
    remote = RemoteTokenizer(replica.fetch)
    text = "the quick brown fox"
    whole = await remote.tokenize(TextPrompt(text), model=None, cache_salt=None)
    named = TextPrompt(text, truncation=Truncation(2, "left", counts_special_tokens=True))
    assert await remote.tokenize(named, model=None, cache_salt=None) == whole[-2:]
    bare = await remote.tokenize(
        TextPrompt(text, add_special_tokens=False), model=None, cache_salt=None
    )
    ends = ends_of(whole, bare)
    assert ends is not None
    unnamed = TextPrompt(text, truncation=Truncation(2, "left", counts_special_tokens=False))
    room = 2 - len(ends.before) - len(ends.after)
    expected = ends.around(bare[len(bare) - room :])
    assert await remote.tokenize(unnamed, model=None, cache_salt=None) == expected


@pytest.mark.parametrize(
    ("whole", "bare", "ends"),
    [
        ([1, 5, 6, 2], [5, 6], ([1], [2])),
        ([5, 6], [5, 6], ([], [])),
        ([1, 5], [5], ([1], [])),
        ([5, 5, 5], [5, 5], None),
        ([1, 5, 6], [5, 7], None),
        ([5], [5, 6], None),
        ([9] * 40, [], None),
    ],
)
def test_special_tokens_are_found_or_not_guessed_at(
    whole: list[int], bare: list[int], ends: tuple[list[int], list[int]] | None
) -> None:
    """A prompt that is cut in the wrong place is predicted wrong."""
    found = ends_of(array("I", whole), array("I", bare))
    assert found == (None if ends is None else Ends(*(array("I", side) for side in ends)))


async def test_images_are_not_sent_to_be_counted(replica: _Replica) -> None:
    """The replica would load and decode each of them once more."""
    image = {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
        ]
    }
    (result,) = await Tokenization(remote=RemoteTokenizer(replica.fetch)).tokenize(
        _spec(Endpoint.CHAT, image)
    )
    assert (result.reason, replica.bodies) == ("media", [])


async def test_router_and_replica_are_compared(
    local: LocalTokenizer,
    replica: _Replica,
    build_tokenizer: _TokenizerOf,
    local_of: _LocalOf,
) -> None:
    """Before its hits are believed: the usual cause of misses is one token at the front."""
    remote = RemoteTokenizer(replica.fetch)
    assert await find_disagreements(local, remote, "m") == []
    other = local_of(
        build_tokenizer("qwen"), chat_templates={"default": "<|endoftext|>" + _TEMPLATE}
    )
    found = await find_disagreements(other, remote, "m")
    assert found == ["one message", "several turns", "tools"]
    chat = ChatPrompt([{"role": "user", "content": "Why is the sky blue?"}])
    there = await remote.tokenize(chat, model="m", cache_salt=None)
    assert other.finish(other.prepare(chat, None))[1:] == there


@pytest.fixture(scope="module")
def fuzzed(build_tokenizer: _TokenizerOf, local_of: _LocalOf) -> dict[str, Tokenization]:
    """Templates of both forms, and a replica that answers nothing but gets everything."""

    async def fetch(path: str, body: bytes) -> tuple[int, bytes]:
        json.loads(body)
        return 500, b""

    parts = _TEMPLATE.replace(
        "{{ m.content }}", "{% for part in m.content %}{{ part.text }}{% endfor %}"
    )
    remote = RemoteTokenizer(fetch)
    return {
        form: Tokenization(
            local=local_of(build_tokenizer("qwen"), chat_templates={"default": template}),
            remote=remote,
        )
        for form, template in (("string", _TEMPLATE), ("openai", parts))
    }


class _Gate:
    """A clock for templates that stands still, and the thread that asks it, until it is opened."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()

    def __call__(self) -> datetime:
        self.is_reached = True
        assert self._open.wait(timeout=DEADLINE_S)
        return datetime(2024, 7, 26)

    def close(self) -> None:
        self._open.clear()
        self.is_reached = False

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate() -> Iterator[_Gate]:
    gate = _Gate()
    yield gate
    gate.open()


@pytest.fixture
def gated(build_tokenizer: _TokenizerOf, gate: _Gate) -> LocalTokenizer:
    """A model whose template does not end before the gate is opened."""
    templates = {"default": "{{ strftime_now('%Y') }}" + _TEMPLATE}
    tokenizer_json = build_tokenizer("qwen").to_str().encode()
    local = LocalTokenizer(
        ModelFiles(path="test", tokenizer_json=tokenizer_json, chat_templates=templates), now=gate
    )
    gate.close()
    return local


async def _until(condition: Callable[[], bool]) -> None:
    deadline = asyncio.get_running_loop().time() + 20
    while not condition():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.001)


async def test_large_work_leaves_the_event_loop(gated: LocalTokenizer, gate: _Gate) -> None:
    """One long prompt must not stop the streams of all others."""
    tokenization = Tokenization(local=gated, inline_body_bytes=0)
    task = asyncio.create_task(tokenization.tokenize(_spec(Endpoint.CHAT, _CHAT)))
    await _until(lambda: tokenization.statistics().waiting == 1)
    assert not task.done()
    gate.open()
    (result,) = await task
    assert result.exact
    assert tokenization.statistics().waiting == 0
    tokenization.close()


async def test_more_than_can_wait_is_answered_at_once(gated: LocalTokenizer, gate: _Gate) -> None:
    """A queue without end would hold every prompt that clients send in memory."""
    tokenization = Tokenization(local=gated, max_threads=1, max_waiting=2, inline_body_bytes=0)
    spec = _spec(Endpoint.CHAT, _CHAT)
    waiting = [asyncio.create_task(tokenization.tokenize(spec)) for _ in range(2)]
    await _until(lambda: tokenization.statistics().waiting == 2)
    (refused,) = await tokenization.tokenize(spec)
    assert (refused.coverage, refused.reason) == (Coverage.UNKNOWN, "busy")
    gate.open()
    assert [(await task)[0].exact for task in waiting] == [True, True]
    tokenization.close()


async def test_a_client_that_leaves_frees_its_place_when_the_thread_is_done(
    gated: LocalTokenizer, gate: _Gate
) -> None:
    """Cancelling cannot stop a thread; the bound must count it until it has ended."""
    tokenization = Tokenization(local=gated, max_threads=1, inline_body_bytes=0)
    task = asyncio.create_task(tokenization.tokenize(_spec(Endpoint.CHAT, _CHAT)))
    await _until(lambda: gate.is_reached)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert tokenization.statistics().waiting == 1
    gate.open()
    await _until(lambda: tokenization.statistics().waiting == 0)
    tokenization.close()


async def test_after_closing_small_work_is_still_done_and_large_work_is_not(
    local: LocalTokenizer,
) -> None:
    """Requests that run out during a shutdown still get an answer."""
    tokenization = Tokenization(local=local, inline_chars=100)
    tokenization.close()
    small, large = ({"prompt": "text"}, {"prompt": "text " * 2000})
    assert (await tokenization.tokenize(_spec(Endpoint.COMPLETIONS, small)))[0].exact
    assert (await tokenization.tokenize(_spec(Endpoint.COMPLETIONS, large)))[0].reason == "busy"


async def test_threads_share_one_cache(build_tokenizer: _TokenizerOf) -> None:
    """Many conversations at once, all exact, on a cache so small that it evicts all the time."""
    tokenizer = build_tokenizer("qwen")
    files = ModelFiles(path="test", tokenizer_json=tokenizer.to_str().encode())
    tokenization = Tokenization(
        local=LocalTokenizer(files, use_native=False, cache_bytes=3000),
        max_threads=4,
        inline_chars=0,
    )
    texts = ["".join(f"<|im_start|>{turn}{name}" for turn in range(30)) for name in "abcdefgh"] * 5
    results = await asyncio.gather(
        *(tokenization.tokenize(_spec(Endpoint.COMPLETIONS, {"prompt": text})) for text in texts)
    )
    assert [result.token_ids.tolist() for (result,) in results] == [
        tokenizer.encode(text).ids for text in texts
    ]
    tokenization.close()


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    endpoint=st.sampled_from(Endpoint), body=bodies(), form=st.sampled_from(["string", "openai"])
)
def test_whatever_passes_the_parser_is_tokenised_or_said_to_be_unknown(
    fuzzed: dict[str, Tokenization], endpoint: Endpoint, body: object, form: str
) -> None:
    """An exception here would cost a request that an engine might have served."""
    with suppress(BadRequest):
        spec = _spec(endpoint, body)
        results = asyncio.run(fuzzed[form].tokenize(spec))
        assert len(results) == len(spec.prompts)
        assert all(result.exact or result.reason for result in results)


async def test_a_body_for_a_replica_is_json_that_it_can_read(replica: _Replica) -> None:
    """Characters of every kind go there and come back as the same ids."""
    text = 'quote " backslash \\ newline \n null \x00 é 日本 🙂'
    ids = await RemoteTokenizer(replica.fetch).tokenize(
        TextPrompt(text), model=None, cache_salt=None
    )
    assert replica.bodies == [{"add_special_tokens": True, "prompt": text}]
    assert ids == replica.local.finish(replica.local.prepare(TextPrompt(text), None))
