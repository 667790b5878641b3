"""Conversations become the text that an engine makes of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import pytest

from router.prompt.body.requests import parse_request
from router.prompt.chat.conversation import normalise
from router.prompt.chat.parts import has_media
from router.prompt.chat.renderer import ChatRenderer
from router.prompt.endpoints import Endpoint
from router.prompt.errors import UntokenizableError
from router.prompt.model_files import ModelFiles
from router.prompt.prompts import ChatPrompt, OpaquePrompt

_CHATML = """
{%- for tool in tools or [] %}
    {{- '<|im_start|>tools\\n' + (tool | tojson) + '<|im_end|>\\n' }}
{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.reasoning_content %}
        {{- '<think>' + message.reasoning_content + '</think>' }}
    {%- endif %}
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- call.function.name + '(' + (call.function.arguments | tojson) + ')' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
_PARTS = """
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['content'] is string %}{{- message['content'] }}
    {%- else %}
        {%- for part in message['content'] %}
            {%- if part.type == 'image' %}{{- '<|image|>' }}{%- else %}{{- part.text }}{%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
_STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ "
    "raise_exception('x') }}{% endif %}{% endfor %}"
)
_USER = {"role": "user", "content": "hi"}
_CALL = {
    "id": "1",
    "type": "function",
    "function": {"name": "f", "arguments": '{"b": "é", "a": 1}'},
}


def _renderer(
    template: str | dict[str, str], chat_template: str | None = None, **files: Any
) -> ChatRenderer:
    templates = template if isinstance(template, dict) else {"default": template}
    now = lambda: datetime(2024, 7, 26, 12, 0)  # noqa: E731
    return ChatRenderer(
        ModelFiles(path="test", tokenizer_json=b"", chat_templates=templates, **files),
        chat_template,
        now,
    )


def _prompt(endpoint: Endpoint, body: Mapping[str, Any]) -> ChatPrompt:
    (prompt,) = parse_request(endpoint, json.dumps(body).encode()).prompts
    assert isinstance(prompt, ChatPrompt)
    return prompt


def _render(
    template: str, body: Mapping[str, Any], endpoint: Endpoint = Endpoint.CHAT, **files: Any
) -> str:
    return _renderer(template, **files).render(_prompt(endpoint, body)).text


def test_a_conversation_is_written_by_the_template() -> None:
    """The plain case."""
    text = _render(_CHATML, {"messages": [{"role": "system", "content": "s"}, _USER]})
    assert (
        text == "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "False None"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "True None"),
        ({"chat_template_kwargs": {"enable_thinking": None}}, "False None"),
        ({"reasoning_effort": "high"}, "True high"),
    ],
)
def test_a_template_gets_the_operators_variables(fields: dict[str, Any], expected: str) -> None:
    """VLLM's `--default-chat-template-kwargs`; what a request says or implies wins."""
    template = "{{ enable_thinking }} {{ reasoning_effort | default(none) }}"
    files = ModelFiles(path="test", tokenizer_json=b"", chat_templates={"default": template})
    renderer = ChatRenderer(files, template_arguments={"enable_thinking": False})
    prompt = _prompt(Endpoint.CHAT, {"messages": [_USER], **fields})
    assert renderer.render(prompt).text == expected


def test_the_generation_prompt_can_be_left_out() -> None:
    """Batch scoring sends finished conversations."""
    assert _render(_CHATML, {"messages": [_USER], "add_generation_prompt": False}).endswith(
        "hi<|im_end|>\n"
    )


@pytest.mark.parametrize(
    ("content", "expected"), [("Once upon", "Once upon"), ("Once \n ", "Once \n ")]
)
def test_a_final_message_is_left_open(content: str, expected: str) -> None:
    """Prefilled answers end where the client's text ends, blanks included."""
    body = {
        "messages": [_USER, {"role": "assistant", "content": content}],
        "continue_final_message": True,
    }
    for template in (_CHATML, _PARTS):
        text = _render(template, {**body, "add_generation_prompt": False})
        assert text.endswith("<|im_start|>assistant\n" + expected)


def test_a_template_that_trims_trims_the_open_message_too() -> None:
    """The engine removes the blanks that the template would have removed."""
    template = "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}"
    body = {
        "messages": [{"role": "assistant", "content": "Once \n "}],
        "continue_final_message": True,
    }
    assert _render(template, {**body, "add_generation_prompt": False}) == "assistant: Once"


def test_leaving_open_and_a_new_answer_exclude_each_other() -> None:
    """The engine refuses it; ids for it would be made up."""
    with pytest.raises(UntokenizableError, match="template_refused"):
        _render(_CHATML, {"messages": [_USER], "continue_final_message": True})


def test_tool_calls_and_tools_are_written_as_objects() -> None:
    """Arguments come as a string and go to the template as an object, in their order and not
    escaped."""
    messages = [_USER, {"role": "assistant", "content": None, "tool_calls": [_CALL]}]
    text = _render(
        _CHATML, {"messages": messages, "tools": [{"type": "function", "function": {"name": "f"}}]}
    )
    assert 'f({"b": "é", "a": 1})' in text
    assert text.startswith(
        '<|im_start|>tools\n{"type": "function", "function": {"name": "f", "description": null, '
        '"parameters": null}}'
    )


@pytest.mark.parametrize("arguments", ["", None, "{bad", "[1]", "7", "[" * 100_000])
def test_arguments_that_are_no_object_become_an_empty_one(arguments: str | None) -> None:
    """A slip in the history must not end the conversation."""
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    assert "f({})" in _render(
        _CHATML, {"messages": [_USER, {"role": "assistant", "content": "", "tool_calls": [call]}]}
    )


def test_parts_of_text_are_joined_for_a_template_that_writes_content_as_it_is() -> None:
    """By newlines, as the engine joins them."""
    parts = ["a", {"type": "text", "text": "b"}, {"type": "input_text", "text": "c"}, {"text": "d"}]
    assert "user\na\nb\nc\nd<" in _render(
        _CHATML, {"messages": [{"role": "user", "content": parts}]}
    )


def test_strings_are_wrapped_for_a_template_that_loops_over_parts() -> None:
    """And parts go through one by one, joined by nothing."""
    messages = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": ["b", {"type": "text", "text": "c", "extra": 1}]},
    ]
    assert normalise(messages, "openai") == [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {
            "role": "user",
            "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c", "extra": 1}],
        },
    ]
    assert "user\na<|im_end|>\n<|im_start|>user\nbc<" in _render(_PARTS, {"messages": messages})


def test_tool_messages_are_strings_in_either_form() -> None:
    """Most templates that loop over parts do not do so for tools."""
    message = {
        "role": "tool",
        "tool_call_id": "1",
        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
    }
    for form in ("string", "openai"):
        assert normalise([message], form) == [
            {"role": "tool", "content": "a\nb", "tool_call_id": "1"}
        ]  # type: ignore[arg-type]


def test_reasoning_goes_by_both_names() -> None:
    """Clients send the one or the other, templates read the one or the other."""
    for name in ("reasoning", "reasoning_content"):
        (message,) = normalise([{"role": "assistant", "content": "a", name: "r"}], "string")
        assert (message["reasoning"], message["reasoning_content"]) == ("r", "r")


def test_normalising_leaves_the_request_alone() -> None:
    """The same prompt may be rendered twice, and the body was not ours to change."""
    messages = [
        {"role": "assistant", "content": ["a"], "tool_calls": [_CALL]},
        {"role": "system", "content": "s"},
    ]
    before = json.dumps(messages)
    normalise(messages, "openai")
    normalise(messages, "string")
    assert json.dumps(messages) == before


def test_a_billing_header_is_dropped() -> None:
    """It is new in every request: kept, no two prompts of the same user would share a prefix."""
    system = {"role": "system", "content": "x-anthropic-billing-header: cch=1\nBe nice."}
    assert "system\nBe nice.<" in _render(_CHATML, {"messages": [system, _USER]})


def test_developer_messages_become_system_messages_where_a_template_knows_none() -> None:
    """All system text is gathered at the front, as the engine does it."""
    messages = [{"role": "system", "content": "s"}, {"role": "developer", "content": "d"}, _USER]
    assert _render(_CHATML, {"messages": messages}).startswith(
        "<|im_start|>system\ns\n\nd<|im_end|>\n<|im_start|>user"
    )
    knows = _CHATML + "{# 'developer' #}"
    assert "<|im_start|>developer\nd" in _render(knows, {"messages": messages})


def test_special_tokens_and_arguments_are_variables() -> None:
    """A request's arguments, but for those that are the renderer's own."""
    template = "{{ bos_token }}{{ a }}{{ b }}{{ documents[0].title }}{{ strftime_now('%d %b %Y') }}"
    renderer = _renderer(
        template,
        special_tokens={"bos_token": "<s>"},
    )
    body = {
        "messages": [_USER],
        "chat_template_kwargs": {"a": 1, "b": 3, "messages": "x"},
        "documents": [{"title": "t"}],
    }
    assert renderer.render(_prompt(Endpoint.CHAT, body)).text == "<s>13t26 Jul 2024"


def test_templates_are_chosen_by_name() -> None:
    """A model may have one for tools; a processor's own goes first where there are none."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    plain, with_tools = (
        _prompt(Endpoint.CHAT, {"messages": [_USER]}),
        _prompt(Endpoint.CHAT, {"messages": [_USER], "tools": tools}),
    )
    named = _renderer({"default": "plain", "tool_use": "tools"})
    assert (named.render(plain).text, named.render(with_tools).text) == ("plain", "tools")
    processed = _renderer({"default": "plain"}, processor_template="processor")
    assert (processed.render(plain).text, processed.render(with_tools).text) == (
        "processor",
        "plain",
    )
    overridden = _renderer({"default": "plain"}, "server", processor_template="processor")
    assert (overridden.render(plain).text, overridden.render(with_tools).text) == (
        "server",
        "server",
    )


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"chat_templates": {}}, "no_chat_template"),
        ({"model_type": "gpt_oss"}, "harmony"),
        ({"model_type": "deepseek_v32"}, "engine_renders_itself"),
        ({"model_type": "inkling_mm_model"}, "engine_renders_itself"),
        ({"model_type": "inkling_model"}, "engine_renders_itself"),
        ({"has_mistral_tokenizer": True}, "engine_renders_itself"),
    ],
)
def test_a_model_without_a_template_that_counts_is_not_guessed_at(
    files: dict[str, Any], reason: str
) -> None:
    """Ids of another rendering would promise hits that never come."""
    renderer = ChatRenderer(
        ModelFiles(
            **{"path": "test", "tokenizer_json": b"", "chat_templates": {"default": "x"}, **files}
        )
    )
    with pytest.raises(UntokenizableError, match=reason):
        renderer.render(ChatPrompt([_USER]))


_IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


@pytest.mark.parametrize("template", [_CHATML, _PARTS])
def test_text_before_the_first_medium_is_certain(template: str) -> None:
    """What an image becomes only the engine knows; what stands before it is exact."""
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": ["look: ", _IMAGE, "and"]},
        _USER,
    ]
    chat = _renderer(template).render(_prompt(Endpoint.CHAT, {"messages": messages}))
    assert chat.is_prefix
    assert chat.text.startswith("<|im_start|>system\ns<|im_end|>\n<|im_start|>user\n")
    assert "and" not in chat.text
    assert chat.text.endswith("look: " if template == _PARTS else "user\n")


@pytest.mark.parametrize(
    "part",
    [
        _IMAGE,
        {"type": "input_audio", "input_audio": {}},
        {"type": "video_url"},
        {"image_url": "x"},
        {"type": "tomorrow"},
    ],
)
def test_anything_but_text_counts_as_a_medium(part: dict[str, Any]) -> None:
    """An unknown part must end the certain prefix, not be skipped over."""
    assert has_media([{"role": "user", "content": ["a", part]}])
    assert not has_media(
        [{"role": "user", "content": ["a", {"type": "text", "text": "b"}]}, {"role": "user"}]
    )


def test_messages_of_the_anthropic_form_are_converted() -> None:
    """Thinking, calls, results and their order, as vLLM's server converts them."""
    body = {
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: 1"},
            {"type": "text", "text": "s"},
        ],
        "messages": [
            _USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t"},
                    {"type": "text", "text": "a"},
                    {"type": "tool_use", "id": "1", "name": "f", "input": {"x": "é"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "1", "content": "r"},
                    {"type": "text", "text": "b"},
                ],
            },
        ],
        "tools": [{"name": "f", "input_schema": {"properties": {}}}],
    }
    prompt = _prompt(Endpoint.MESSAGES, body)
    function = {
        "name": "f",
        "description": None,
        "parameters": {"properties": {}, "type": "object"},
    }
    assert prompt.tools == [{"type": "function", "function": function}]
    text = _renderer(_CHATML).render(prompt).text
    assert text.endswith(
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        '<|im_start|>assistant\n<think>t</think>af({"x": "é"})<|im_end|>\n'
        "<|im_start|>tool\nr<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_turn_of_tool_results_alone_is_no_user_message() -> None:
    """Otherwise an empty user turn would stand in every agent's prompt."""
    result = {
        "type": "tool_result",
        "tool_use_id": "1",
        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
    }
    prompt = _prompt(Endpoint.MESSAGES, {"messages": [{"role": "user", "content": [result]}]})
    assert list(prompt.messages) == [{"role": "tool", "tool_call_id": "1", "content": "a\nb"}]


def test_a_template_among_the_arguments_is_the_client_s_own() -> None:
    """Engines that trust clients' templates take it there as well, and not the model's."""
    body = {"messages": [_USER], "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}
    with pytest.raises(UntokenizableError, match="request_chat_template"):
        _render(_CHATML, body)
    body["chat_template_kwargs"] = {"chat_template": None}
    assert "hi" in _render(_CHATML, body)


_CALLS_AS_JSON = (
    "{% for m in messages %}{% for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}"
    "{% endfor %}"
)


@pytest.mark.parametrize(
    ("endpoint", "body", "function"),
    [
        (
            Endpoint.CHAT,
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {
                                "index": 0,
                                "type": "function",
                                "function": {"name": "f", "x": 1, "arguments": '{"a": 1}'},
                                "id": "1",
                            }
                        ],
                    }
                ]
            },
            '{"arguments": {"a": 1}, "name": "f", "x": 1}, "type": "function", "index": 0}',
        ),
        (
            Endpoint.MESSAGES,
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "tool_use", "name": "f", "input": {"a": 1}, "id": "1"}
                        ],
                    }
                ]
            },
            '{"arguments": {"a": 1}, "name": "f"}, "type": "function"}',
        ),
        (
            Endpoint.RESPONSES,
            {
                "input": [
                    {"type": "function_call", "name": "f", "arguments": '{"a": 1}', "call_id": "1"}
                ]
            },
            '{"name": "f", "arguments": {"a": 1}}, "type": "function"}',
        ),
    ],
)
def test_calls_have_the_order_that_templates_see(
    endpoint: Endpoint, body: dict[str, Any], function: str
) -> None:
    """Mistral's templates write a call as JSON, so that another order of keys is another prompt:
    vLLM's validation orders them as its types do, and the responses API makes them itself."""
    expected = '{"id": "1", "function": ' + function
    assert _render(_CALLS_AS_JSON, body, endpoint) == expected


def test_inline_system_messages_move_to_the_front_only_where_they_must() -> None:
    """Templates that take a system message nowhere else refuse the conversation otherwise."""
    body = {"system": "top.", "messages": [_USER, {"role": "system", "content": "mid."}, _USER]}
    merged = _render(_STRICT + _CHATML, body, Endpoint.MESSAGES)
    assert merged.count("system") == 1
    assert "<|im_start|>system\ntop.mid.<|im_end|>" in merged
    assert _render(_CHATML, body, Endpoint.MESSAGES).count("system") == 2


@pytest.mark.parametrize(
    "unknown", ["{% generation %}{% endgeneration %}", "{{ strftime_now('%Y') }}"]
)
def test_inline_system_messages_move_where_the_engine_cannot_try_the_template(unknown: str) -> None:
    """vLLM tries it in a Jinja that knows neither, and then merges: the templates that have them
    would have taken the messages where they stand."""
    body = {"system": "top.", "messages": [_USER, {"role": "system", "content": "mid."}, _USER]}
    assert "<|im_start|>system\ntop.mid.<|im_end|>" in _render(
        unknown + _CHATML, body, Endpoint.MESSAGES
    )


def test_a_merged_system_message_has_the_form_of_all_others() -> None:
    """vLLM merges before it makes parts: a template that only loops over these wrote nothing."""
    body = {"system": "top.", "messages": [_USER, {"role": "system", "content": "mid."}, _USER]}
    loop = "{% for m in messages %}[{% for p in m.content %}{{ p.text }}{% endfor %}]{% endfor %}"
    assert _render(_STRICT + loop, body, Endpoint.MESSAGES) == "[top.mid.][hi][hi]"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"thinking": {"type": "disabled"}},
            {"reasoning_effort": "none", "enable_thinking": False},
        ),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, {}),
        (
            {"output_config": {"effort": "high"}},
            {"reasoning_effort": "high", "enable_thinking": True},
        ),
    ],
)
def test_thinking_options_reach_the_template(
    fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    """They change the generation prompt of many models."""
    assert (
        _prompt(Endpoint.MESSAGES, {"messages": [_USER], **fields}).template_arguments == expected
    )


_SHOWS = "{{ reasoning_effort }} {{ enable_thinking }}"
_KNOWS_TWO = "{% if reasoning_effort in ['low', 'high'] %}" + _SHOWS + "{% else %}max{% endif %}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (_SHOWS, "none False"),
        ("{% if enable_thinking %}thinks{% endif %}", ""),
        (
            "{% if reasoning_effort not in ['low', 'high'] %}max{% else %}"
            + _SHOWS
            + "{% endif %}",
            "low True",
        ),
        (
            "{% if reasoning_effort == 'none' %}{{ raise_exception('x') }}{% endif %}" + _SHOWS,
            "low True",
        ),
    ],
)
def test_thinking_is_least_where_a_template_cannot_turn_it_off(
    template: str, expected: str
) -> None:
    """vLLM tries it: some know no effort `none`, and write what they write of the most."""
    body = {"messages": [_USER], "thinking": {"type": "disabled"}}
    assert _render(template, body, Endpoint.MESSAGES) == expected
    asked = {"messages": [_USER], "output_config": {"effort": "high"}}
    assert _render(_SHOWS, asked, Endpoint.MESSAGES) == "high True"


def test_the_client_s_own_switch_stays_where_thinking_is_least() -> None:
    """`chat_template_kwargs` go before what the engine derives."""
    body = {
        "messages": [_USER],
        "thinking": {"type": "disabled"},
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert _render(_KNOWS_TWO, body, Endpoint.MESSAGES) == "low False"


def test_items_of_one_assistant_turn_are_one_message() -> None:
    """The responses API spreads a turn over items; templates know messages."""
    items = [
        _USER,
        {
            "type": "reasoning",
            "id": "r",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "t"}],
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "r"},
        {"role": "assistant", "content": "b"},
        {"role": "assistant", "content": "c"},
    ]
    prompt = _prompt(Endpoint.RESPONSES, {"input": items, "instructions": "s"})
    call = {"id": "1", "function": {"name": "f", "arguments": "{}"}, "type": "function"}
    assert list(prompt.messages) == [
        {"role": "system", "content": "s"},
        _USER,
        {"role": "assistant", "reasoning": "t", "content": "a", "tool_calls": [call]},
        {"role": "tool", "content": "r", "tool_call_id": "1"},
        {"role": "assistant", "content": "b"},
        {"role": "assistant", "content": "c"},
    ]
    assert prompt.add_special_tokens


def test_an_unfinished_item_is_continued() -> None:
    """A partial answer that the client sends back is to be completed."""
    item = {
        "type": "message",
        "role": "assistant",
        "status": "incomplete",
        "content": [{"type": "output_text", "text": "Once"}],
    }
    prompt = _prompt(Endpoint.RESPONSES, {"input": [_USER, item]})
    assert (prompt.continue_final_message, prompt.add_generation_prompt) == (True, False)


def test_tools_of_the_responses_form_are_reshaped() -> None:
    """There a function's fields lie beside its type; other kinds of tools reach no template."""
    tools = [
        {"type": "function", "parameters": {}, "name": "f", "strict": None},
        {"type": "web_search"},
    ]
    function = {"name": "f", "description": None, "parameters": {}}
    assert _prompt(Endpoint.RESPONSES, {"input": "a", "tools": tools}).tools == [
        {"type": "function", "function": function}
    ]


@pytest.mark.parametrize(
    ("endpoint", "body", "reason"),
    [
        (Endpoint.RESPONSES, {"input": "a", "previous_response_id": "r"}, "stored_conversation"),
        (Endpoint.RESPONSES, {"input": [{"type": "web_search_call"}]}, "unknown_input_item"),
        (
            Endpoint.RESPONSES,
            {"input": [{"type": "reasoning", "encrypted_content": "x"}]},
            "unknown_input_item",
        ),
        (Endpoint.RESPONSES, {"input": "a", "tools": [{"type": "namespace"}]}, "unknown_tool_type"),
        (
            Endpoint.MESSAGES,
            {"messages": [{"role": "system", "content": [{"type": "tool_removal"}]}]},
            "tool_changes",
        ),
        (Endpoint.EMBEDDINGS, {"input": [{"role": "user", "content": "a"}]}, "unknown_input_item"),
    ],
)
def test_what_only_the_engine_can_put_together_is_opaque(
    endpoint: Endpoint, body: object, reason: str
) -> None:
    """It is routed by load, not refused: the engine may well serve it."""
    assert parse_request(endpoint, json.dumps(body).encode()).prompts == (OpaquePrompt(reason),)
