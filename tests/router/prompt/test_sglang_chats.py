"""SGLang makes other prompts of a request than vLLM does."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from tokenizers import Tokenizer

from router.prompt.body.requests import parse_request
from router.prompt.body.sglang_request import as_sglang_reads
from router.prompt.chat.renderer import ChatRenderer
from router.prompt.endpoints import Endpoint
from router.prompt.errors import UntokenizableError
from router.prompt.local.tokenizer import LocalTokenizer
from router.prompt.model_files import ModelFiles
from router.prompt.prompts import ChatPrompt, Prompt, PromptSpec, TextPrompt, TokenPrompt
from router.prompt.remote import RemoteTokenizer
from router.routing.replica_tokenizers import find_disagreements

_JSON = "{{ messages | tojson }}"
_PLAIN = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
_USER = {"role": "user", "content": "hi"}
_FUNCTION = {"parameters": {"type": "object"}, "description": "d", "name": "f"}
_TOOL = {"type": "function", "function": _FUNCTION}
_TOOL_TEXT = (
    '{"type": "function", "function": {"parameters": {"type": "object"}, "description": "d",'
    ' "name": "f"}, "defer_loading": null}\n'
)


def _spec(body: Mapping[str, Any], endpoint: Endpoint = Endpoint.CHAT) -> PromptSpec:
    return as_sglang_reads(parse_request(endpoint, json.dumps(body).encode()))


def _prompt(body: Mapping[str, Any], endpoint: Endpoint = Endpoint.CHAT) -> Prompt:
    return _spec(body, endpoint).prompts[0]


def _render(template: str, body: Mapping[str, Any], endpoint: Endpoint = Endpoint.CHAT) -> str:
    files = ModelFiles(path="test", tokenizer_json=b"", chat_templates={"default": template})
    prompt = _prompt(body, endpoint)
    assert isinstance(prompt, ChatPrompt)
    return ChatRenderer(files).render(prompt).text


@pytest.mark.parametrize(
    ("choice", "tools"),
    [
        (None, _TOOL_TEXT),
        ("auto", _TOOL_TEXT),
        ("required", _TOOL_TEXT),
        ("none", ""),
        ({"type": "function", "function": {"name": "f"}}, _TOOL_TEXT),
    ],
)
def test_tools_keep_their_order_and_leave_with_the_choice(choice: object, tools: str) -> None:
    """They stand at the very start of a prompt: a key in another place hides all that is cached."""
    other = {"type": "function", "function": {"name": "other"}}
    given = [_TOOL, other] if isinstance(choice, dict) else [_TOOL]
    body = {"messages": [_USER], "tools": given, "tool_choice": choice}
    assert _render(_PLAIN, body) == tools + "<user>hi<assistant>"


def test_a_function_gets_what_sglangs_type_adds() -> None:
    """The dump of a pydantic model has its nulls."""
    functions = [{"name": "f", "strict": None, "x": 1}, {"strict": True, "name": "g"}]
    tools = [{"type": "function", "function": function} for function in functions]
    tools.append({**_TOOL, "defer_loading": True})
    prompt = _prompt({"messages": [_USER], "tools": tools})
    assert isinstance(prompt, ChatPrompt)
    nothing = {"description": None, "parameters": None}
    expected = [{"name": "f", **nothing}, {"strict": True, "name": "g", **nothing}]
    written = [{"type": "function", "function": f, "defer_loading": None} for f in expected]
    deferred = {**_TOOL, "function": {**_FUNCTION, "defer_loading": True}, "defer_loading": True}
    assert json.dumps(prompt.tools) == json.dumps([*written, deferred])


def test_a_last_message_of_the_assistant_becomes_the_users() -> None:
    """So SGLang does unless it is to be continued, which only a replica can render."""
    body = {"messages": [_USER, {"role": "assistant", "content": "Once", "name": "n"}]}
    assert _render(_PLAIN, body) == "<user>hi<user>Once<assistant>"
    with pytest.raises(UntokenizableError, match="engine_renders_itself"):
        _render(_PLAIN, {**body, "continue_final_message": True})


@pytest.mark.parametrize("role", ["user", "tool"])
def test_parts_of_text_are_joined_by_blanks(role: str) -> None:
    """VLLM takes newlines."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {"messages": [{"role": role, "content": parts}]}
    assert _render(_PLAIN, body) == f"<{role}>a b<assistant>"
    of_parts = "{% for message in messages %}{{ message.content | tojson }}{% endfor %}{# image #}"
    expected = '"a b"' if role == "tool" else json.dumps(parts)
    assert _render(of_parts, body) == expected


def test_messages_have_the_fields_of_sglangs_types() -> None:
    """A template may write a call as JSON."""
    call = {"function": {"arguments": '{"a": 1}', "name": "f"}, "type": "function", "id": "c"}
    messages = [
        {**_USER, "name": "n"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "r"},
        {"role": "tool", "tool_call_id": "c", "content": "4"},
    ]
    found = json.loads(_render(_JSON, {"messages": messages}))
    function = {"name": "f", "arguments": {"a": 1}}
    assert json.dumps(found[1].pop("tool_calls")) == json.dumps(
        [{"id": "c", "index": None, "type": "function", "function": function}]
    )
    assert found == [
        _USER,
        {"role": "assistant", "content": "", "reasoning_content": "r"},
        messages[2],
    ]


@pytest.mark.parametrize(
    ("fields", "thinking"),
    [
        ({}, None),
        ({"reasoning_effort": "high"}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning": {"effort": "none"}}, False),
        ({"reasoning": {"enabled": True}}, True),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"thinking": True}}, True),
    ],
)
def test_an_effort_switches_thinking(fields: dict[str, Any], thinking: bool | None) -> None:
    """By both names that templates know."""
    template = "{{ [thinking, enable_thinking, reasoning_effort is defined] | tojson }}"
    found = _render(
        template.replace("thinking,", "thinking | default(none),"),
        {
            "messages": [_USER],
            **fields,
        },
    )
    assert json.loads(found)[0] is thinking


def test_a_template_is_used_that_vllm_does_without() -> None:
    """Else no chat with gpt-oss is found where SGLang serves it; others it writes by code, too."""
    prompt = _prompt({"messages": [_USER]})
    assert isinstance(prompt, ChatPrompt)
    templates = {"default": _PLAIN}
    for model_type, reason in (("gpt_oss", None), ("kimi_k3", "engine_renders_itself")):
        files = ModelFiles("test", b"", chat_templates=templates, model_type=model_type)
        found = None
        try:
            assert ChatRenderer(files).render(prompt).text == "<user>hi<assistant>"
        except UntokenizableError as error:
            found = error.reason
        assert found == reason


def test_media_end_what_is_certain() -> None:
    """As with vLLM: up to there the prompt is known."""
    image = {"type": "image_url", "image_url": {"url": "x"}}
    messages = [_USER, {"role": "user", "content": [{"type": "text", "text": "a"}, image]}]
    files = ModelFiles(path="test", tokenizer_json=b"", chat_templates={"default": _PLAIN})
    prompt = _prompt({"messages": messages})
    assert isinstance(prompt, ChatPrompt)
    found = ChatRenderer(files).render(prompt)
    assert found.is_prefix
    assert found.text.startswith("<user>hi<user>")


def test_ids_that_come_with_a_chat_are_its_prompt() -> None:
    """The messages are not rendered then."""
    prompt = _prompt({"messages": [_USER], "input_ids": [1, 2, 3]})
    assert isinstance(prompt, TokenPrompt)
    assert prompt.token_ids.tolist() == [1, 2, 3]


def test_what_only_vllm_reads_changes_nothing() -> None:
    """SGLang neither cuts a prompt nor leaves special tokens away."""
    own = {"truncate_prompt_tokens": 2, "add_special_tokens": False}
    chat = _prompt({"messages": [_USER], "add_generation_prompt": False, **own})
    assert chat == _prompt({"messages": [_USER]})
    assert _prompt({"prompt": "a", **own}, Endpoint.COMPLETIONS) == TextPrompt("a")
    ids = _prompt({"prompt": [1, 2, 3], **own}, Endpoint.COMPLETIONS)
    assert isinstance(ids, TokenPrompt)
    assert ids.truncation is None


async def test_a_replica_is_asked_in_the_clients_own_words() -> None:
    """Only so it reads keys in their order, whatever its version makes of them."""
    bodies: list[dict[str, Any]] = []

    async def fetch(_path: str, body: bytes) -> tuple[int, bytes]:
        bodies.append(json.loads(body))
        return 200, b'{"tokens": [1]}'

    words = {
        "messages": [_USER],
        "tools": [_TOOL],
        "tool_choice": "none",
        "reasoning_effort": "low",
        "chat_template_kwargs": {"a": 1},
        "continue_final_message": True,
    }
    prompt = _prompt({**words, "documents": [{"title": "t"}], "temperature": 0})
    assert isinstance(prompt, ChatPrompt)
    await RemoteTokenizer(fetch).tokenize(prompt, model="m", cache_salt=None)
    assert bodies == [{"model": "m", "add_special_tokens": False, **words}]
    assert list(bodies[0]["tools"][0]["function"]) == list(_FUNCTION)


@pytest.mark.parametrize("is_sglang", [True, False])
async def test_a_replica_is_compared_by_its_own_rules(
    is_sglang: bool,
    build_tokenizer: Callable[[str], Tokenizer],
    local_of: Callable[..., LocalTokenizer],
) -> None:
    """Else each SGLang would be said to tokenise differently, whether it does or not."""
    local = local_of(build_tokenizer("qwen"), chat_templates={"default": _PLAIN})

    async def fetch(_path: str, body: bytes) -> tuple[int, bytes]:
        asked = json.loads(body)
        if "prompt" in asked:
            prompt: Prompt = TextPrompt(asked["prompt"], asked["add_special_tokens"])
        else:
            prompt = _prompt(asked)
        assert isinstance(prompt, ChatPrompt | TextPrompt)
        ids = local.finish(local.prepare(prompt, None)).tolist()
        return 200, json.dumps({"tokens": ids}).encode()

    remote = RemoteTokenizer(fetch)
    found = await find_disagreements(local, remote, "m", is_sglang=is_sglang)
    assert found == ([] if is_sglang else ["tools"])
