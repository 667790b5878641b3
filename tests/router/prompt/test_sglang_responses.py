"""SGLang makes another chat of `/v1/responses` than vLLM does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from router.prompt.body.requests import parse_request
from router.prompt.body.sglang_request import as_sglang_reads
from router.prompt.chat.renderer import ChatRenderer
from router.prompt.endpoints import Endpoint
from router.prompt.errors import UntokenizableError
from router.prompt.model_files import ModelFiles
from router.prompt.prompts import ChatPrompt, OpaquePrompt, Prompt
from router.prompt.remote import RemoteTokenizer

_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>"
    "{{ '[' + message.reasoning_content + ']' if message.reasoning_content }}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"
    "{% endfor %}<assistant>{{ reasoning_effort }}{{ thinking }}"
)
_TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}


def _prompt(body: Mapping[str, Any]) -> Prompt:
    spec = parse_request(Endpoint.RESPONSES, json.dumps(body).encode())
    return as_sglang_reads(spec).prompts[0]


def _render(body: Mapping[str, Any]) -> str:
    files = ModelFiles(path="test", tokenizer_json=b"", chat_templates={"default": _TEMPLATE})
    prompt = _prompt(body)
    assert isinstance(prompt, ChatPrompt)
    assert not prompt.add_special_tokens, "vLLM adds them a second time"
    return ChatRenderer(files).render(prompt).text


def test_tools_have_what_sglangs_types_add() -> None:
    """They stand before all messages."""
    function = {"name": "f", "description": None, "parameters": {"type": "object"}, "strict": False}
    tool = json.dumps({"type": "function", "function": function, "defer_loading": None})
    body = {"input": "hi", "instructions": "be", "tools": [_TOOL]}
    assert _render(body) == tool + "\n<system>be<user>hi<assistant>"
    assert _render({**body, "tool_choice": "none"}) == "<system>be<user>hi<assistant>"
    named = {"type": "function", "name": "f"}
    assert _render({**body, "tool_choice": named}) == _render(body)


def test_a_turn_is_gathered_from_its_items() -> None:
    """Of the assistant's, in SGLang's order of keys; results of tools are one text."""
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c",
            "output": [{"type": "input_text", "text": each} for each in "xy"],
        },
    ]
    assert _render({"input": items, "reasoning": {"effort": "low"}}) == (
        '<user>hi<assistant>[hm]{"name": "f", "arguments": {}}<tool>xy<assistant>lowTrue'
    )


def test_for_gpt_oss_no_template_is_used() -> None:
    """SGLang writes these in harmony format by code, unlike its chats."""
    templates = {"default": _TEMPLATE}
    files = ModelFiles("test", b"", chat_templates=templates, model_type="gpt_oss")
    prompt = _prompt({"input": "hi"})
    assert isinstance(prompt, ChatPrompt)
    with pytest.raises(UntokenizableError, match="harmony"):
        ChatRenderer(files).render(prompt)


async def test_a_replica_is_asked_in_a_form_that_it_takes() -> None:
    """Parts of text have another type in a chat."""
    bodies: list[dict[str, Any]] = []

    async def fetch(_path: str, body: bytes) -> tuple[int, bytes]:
        bodies.append(json.loads(body))
        return 200, b'{"tokens": [1]}'

    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
    prompt = _prompt({"input": [item], "reasoning": {"effort": "low"}})
    assert isinstance(prompt, ChatPrompt)
    await RemoteTokenizer(fetch).tokenize(prompt, model="m", cache_salt=None)
    assert bodies[0]["messages"] == [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert bodies[0]["reasoning_effort"] == "low"


@pytest.mark.parametrize("content", ["be", [{"type": "input_text", "text": "be"}]])
def test_instructions_of_a_developer_are_labelled(content: object) -> None:
    """As the first message; others are put together as the template needs it."""
    developer = {"role": "developer", "content": content}
    user = {"role": "user", "content": "hi"}
    expected = "<system>Developer instructions:\nbe<user>hi<assistant>"
    assert _render({"input": [developer, user]}) == expected
    assert _prompt({"input": [user, developer]}) == OpaquePrompt("unknown_input_item")
