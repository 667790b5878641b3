"""SGLang makes another chat of `/v1/messages` than vLLM does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from router.prompt.body.requests import parse_request
from router.prompt.body.sglang_request import as_sglang_reads
from router.prompt.chat.renderer import ChatRenderer, RenderedChat
from router.prompt.endpoints import Endpoint
from router.prompt.model_files import ModelFiles
from router.prompt.prompts import ChatPrompt

_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"
    "{% endfor %}<assistant>"
)
_USER = {"role": "user", "content": "hi"}
_CALL = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}
_RESULT = {"type": "tool_result", "tool_use_id": "c"}


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _prompt(body: Mapping[str, Any]) -> ChatPrompt:
    spec = parse_request(Endpoint.MESSAGES, json.dumps(body).encode())
    (prompt,) = as_sglang_reads(spec).prompts
    assert isinstance(prompt, ChatPrompt)
    return prompt


def _render(body: Mapping[str, Any], template: str = _TEMPLATE) -> RenderedChat:
    files = ModelFiles(path="test", tokenizer_json=b"", chat_templates={"default": template})
    return ChatRenderer(files).render(_prompt(body))


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ("s", "<system>s"),
        ([_text("a"), _text(""), _text("b")], "<system>a\nb"),
        (" ", ""),
        ([], ""),
    ],
)
def test_parts_of_a_system_prompt_are_lines(system: object, expected: str) -> None:
    """Claude Code sends several; vLLM joins them by nothing, and no prompt had anything in common
    with what SGLang had cached."""
    body = {"system": system, "messages": [_USER]}
    assert _render(body).text == expected + "<user>hi<assistant>"


def test_tools_have_what_sglangs_types_add() -> None:
    """They stand before all messages; those that Anthropic's servers run are left out."""
    tool = {"input_schema": {"properties": {}}, "name": "f", "description": None}
    tools = [tool, {"type": "web_search_20250305", "name": "web_search"}]
    body = {"messages": [_USER], "tools": tools}
    function = {
        "name": "f",
        "description": "",
        "parameters": {"properties": {}, "type": "object"},
        "strict": False,
    }
    written = {"type": "function", "function": function, "defer_loading": None}
    assert _render(body).text == json.dumps(written) + "\n<user>hi<assistant>"
    assert _render({**body, "tool_choice": {"type": "none"}}).text == "<user>hi<assistant>"
    named = {"type": "tool", "name": "f"}
    assert _render({**body, "tool_choice": named}) == _render(body)


def test_what_a_user_says_keeps_its_place_among_results() -> None:
    """VLLM moves all results of tools to the front."""
    content = [_text("a"), {**_RESULT, "content": [_text("x"), _text("y")]}, _text("b")]
    messages = [_USER, {"role": "assistant", "content": [_CALL]}, {"role": "user"}]
    messages[-1]["content"] = content
    assert _render({"messages": messages}).text == (
        '<user>hi<assistant>{"name": "f", "arguments": {"a": 1}}<user>a<tool>x y<user>b<assistant>'
    )


def test_a_turn_without_anything_stays() -> None:
    """Roles alternate in many templates."""
    messages = [_USER, {"role": "assistant", "content": []}, _USER]
    assert _render({"messages": messages}).text == "<user>hi<assistant><user>hi<assistant>"


def test_results_that_an_assistant_brings_are_text() -> None:
    """Whatever they hold, as nothing checks them."""
    for content, text in (("x", "x"), ([_text("x"), 1, _text("y")], "x\ny"), (7, "")):
        messages = [_USER, {"role": "assistant", "content": [{**_RESULT, "content": content}]}]
        found = _render({"messages": [*messages, _USER]}).text
        assert found == f"<user>hi<assistant>Tool result: {text}<user>hi<assistant>"


def test_a_prompt_is_certain_up_to_earlier_thinking() -> None:
    """Where it goes, SGLang's reasoning parser decides."""
    thinking = {"type": "thinking", "thinking": "hm", "signature": "x"}
    turn = {"role": "assistant", "content": [thinking, _text("yes")]}
    found = _render({"messages": [_USER, turn, _USER]})
    assert found == RenderedChat("<user>hi<assistant>", is_prefix=True)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [None, None, None]),
        ({"thinking": {"type": "disabled"}}, [False, False, None]),
        ({"thinking": {"type": "adaptive"}}, [True, True, None]),
        ({"output_config": {"effort": "xhigh"}}, [None, None, "max"]),
    ],
)
def test_thinking_is_switched_by_both_names(fields: dict[str, Any], expected: list[object]) -> None:
    """A template knows one of them."""
    names = ("thinking", "enable_thinking", "reasoning_effort")
    values = ", ".join(f"{name} | default(none)" for name in names)
    template = f"{{{{ [{values}] | tojson }}}}"
    assert json.loads(_render({"messages": [_USER], **fields}, template).text) == expected
