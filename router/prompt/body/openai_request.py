"""Bodies of OpenAI's APIs -> `ChatPrompt`: a chat completion's, and that of `/v1/responses`, whose
instructions and items become messages, as vLLM's server makes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from router.errors import BadRequest
from router.prompt.body.json_fields import (
    is_true,
    object_list,
    optional_object,
    optional_text,
)
from router.prompt.body.sglang_request import SENT_CHAT
from router.prompt.body.template_arguments import template_arguments
from router.prompt.body.tools import chat_tools, responses_tools
from router.prompt.errors import describe
from router.prompt.prompts import ChatPrompt, OpaquePrompt
from router.prompt.token_ids import Truncation

_UNFINISHED = ("in_progress", "incomplete")


def parse_chat(
    fields: Mapping[str, Any],
    truncation: Truncation | None,
    *,
    add_generation_prompt: bool = True,
) -> ChatPrompt | OpaquePrompt:
    """Read a conversation.

    Args:
        add_generation_prompt: The endpoint's default without the body's.
    """
    messages = check_messages(fields)
    if fields.get("chat_template") is not None:
        # A template is a program. One that a client sends is never run here.
        return OpaquePrompt("request_chat_template")
    return ChatPrompt(
        messages=[_with_ordered_calls(message) for message in messages],
        tools=chat_tools(fields),
        documents=_documents(fields),
        template_arguments=template_arguments(fields, fields.get("reasoning_effort")),
        add_generation_prompt=is_true(fields.get("add_generation_prompt", add_generation_prompt)),
        continue_final_message=is_true(fields.get("continue_final_message", False)),
        add_special_tokens=is_true(fields.get("add_special_tokens", False)),
        truncation=truncation,
        sent={name: fields[name] for name in SENT_CHAT if name in fields},
    )


def check_messages(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Check the shape of `messages` as far as anything here relies on it.

    Raises:
        BadRequest: The list or an entry breaks a rule.
    """
    messages = object_list(fields.get("messages"), "$.messages")
    if not messages:
        raise BadRequest("$.messages", "an empty list", "must hold at least one message")
    for index, message in enumerate(messages):
        _check_message(message, f"$.messages[{index}]")
    return messages


def _check_message(message: Mapping[str, Any], place: str) -> None:
    role = message.get("role")
    if not isinstance(role, str):
        raise BadRequest(f"{place}.role", describe(role), "must be a string")
    content = message.get("content")
    if isinstance(content, list):
        for index, part in enumerate(content):
            _check_part(part, f"{place}.content[{index}]")
    elif content is not None and not isinstance(content, str):
        raise BadRequest(
            f"{place}.content", describe(content), "must be a string, a list of parts or null"
        )
    _check_tool_calls(message.get("tool_calls"), f"{place}.tool_calls")


def _check_part(part: object, place: str) -> None:
    if isinstance(part, str):
        return
    if not isinstance(part, dict):
        raise BadRequest(place, describe(part), "must be an object or a string")
    for name in ("type", "text"):
        value = part.get(name)
        if value is not None and not isinstance(value, str):
            raise BadRequest(f"{place}.{name}", describe(value), "must be a string")


def _check_tool_calls(calls: object, place: str) -> None:
    if calls is None:
        return
    if not isinstance(calls, list):
        raise BadRequest(place, describe(calls), "must be a list of objects")
    for index, call in enumerate(calls):
        if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
            raise BadRequest(
                f"{place}[{index}]", describe(call), "must be an object with a function"
            )


def _with_ordered_calls(message: dict[str, Any]) -> dict[str, Any]:
    """Return a checked message with the keys of its calls in the order of vLLM's own types, which
    templates that write a call as JSON show. The responses API makes calls in another one."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    ordered = [
        _beginning_with(
            {**call, "function": _beginning_with(call["function"], "arguments", "name")},
            *("id", "function", "type"),
        )
        for call in calls
    ]
    return {**message, "tool_calls": ordered}


def _beginning_with(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: fields[name] for name in names if name in fields} | fields


def _documents(fields: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    documents = fields.get("documents")
    if documents is None:
        return None
    return object_list(documents, "$.documents")


# --- /v1/responses --------------------------------------------------------------------------------


class _UnknownItemError(Exception):
    """An item that this router does not know how to turn into a message; the engine may."""


def parse_responses(
    fields: Mapping[str, Any], truncation: Truncation | None
) -> ChatPrompt | OpaquePrompt:
    """Read instructions, input, tools and reasoning effort of a responses request.

    An assistant turn may span several items (reasoning, text, calls); they are gathered into one
    message.

    Raises:
        BadRequest: A field that shapes the prompt breaks a rule.
    """
    if fields.get("previous_response_id") is not None:
        return OpaquePrompt("stored_conversation")
    if any(tool.get("type") in ("namespace", "custom") for tool in _objects(fields.get("tools"))):
        return OpaquePrompt("unknown_tool_type")
    try:
        messages = _messages_of(fields)
    except _UnknownItemError:
        return OpaquePrompt("unknown_input_item")
    continues = _continues_final_message(fields["input"])
    reasoning = optional_object(fields, "reasoning", "$") or {}
    return ChatPrompt(
        messages=check_messages({"messages": messages}),
        tools=responses_tools(fields),
        template_arguments=template_arguments(fields, reasoning.get("effort")),
        add_generation_prompt=not continues,
        continue_final_message=continues,
        # The engine leaves this endpoint at the tokenizer's default, unlike chat completions: a
        # template that writes BOS itself gets a second one.
        add_special_tokens=True,
        is_of_responses=True,
        truncation=truncation,
        sent={
            "tool_choice": fields.get("tool_choice"),
            "reasoning_effort": reasoning.get("effort"),
        },
    )


def _objects(value: object) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _messages_of(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    given = fields.get("input")
    instructions = optional_text(fields, "instructions", "$")
    messages: list[dict[str, Any]] = (
        [{"role": "system", "content": instructions}] if instructions else []
    )
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list):
        raise BadRequest("$.input", describe(given), "must be a string or a list of items")
    if not given and not messages:
        raise BadRequest("$.input", "an empty list", "must hold at least one item")
    turns: list[dict[str, Any]] = []
    for item in object_list(given, "$.input"):
        _add_item(turns, item)
    return messages + turns


def _add_item(turns: list[dict[str, Any]], item: dict[str, Any]) -> None:
    kind = item.get("type")
    if kind in ("function_call", "custom_tool_call"):
        _add_call(turns, item)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        turns.append(
            {"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")}
        )
    elif kind == "reasoning":
        _add_to_assistant(turns, "reasoning", _reasoning_text(item))
    elif item.get("role") == "assistant" and (text := _first_text(item.get("content"))) is not None:
        _add_to_assistant(turns, "content", text)
    elif isinstance(item.get("role"), str):
        turns.append(item)
    else:
        raise _UnknownItemError


def _add_call(turns: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    name, arguments = item.get("name"), item.get("arguments")
    if item.get("namespace"):
        raise _UnknownItemError
    if item["type"] == "custom_tool_call":
        arguments = json.dumps({"input": item.get("input") or ""}, ensure_ascii=False)
    call = {
        "id": item.get("call_id"),
        "function": {"name": name, "arguments": arguments},
        "type": "function",
    }
    if turns and turns[-1]["role"] == "assistant":
        calls = turns[-1].get("tool_calls")
        if calls is not None and not isinstance(calls, list):
            raise BadRequest("$.input[].tool_calls", describe(calls), "must be a list")
        turns[-1] = {**turns[-1], "tool_calls": [*(calls or []), call]}
    else:
        turns.append({"role": "assistant", "tool_calls": [call]})


def _add_to_assistant(turns: list[dict[str, Any]], name: str, text: str) -> None:
    """Add *text* to the preceding assistant message, or start a new one if that field is taken."""
    if turns and turns[-1]["role"] == "assistant" and turns[-1].get(name) is None:
        turns[-1][name] = text
    else:
        turns.append({"role": "assistant", name: text})


def _reasoning_text(item: Mapping[str, Any]) -> str:
    if item.get("encrypted_content"):
        raise _UnknownItemError
    for source in ("content", "summary"):
        text = _first_text(item.get(source))
        if text is not None:
            return text
    return ""


def _first_text(content: object) -> str | None:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content and isinstance(content[0], dict):
        text = content[0].get("text")
        return text if isinstance(text, str) else None
    return None


def _continues_final_message(given: object) -> bool:
    items = _objects(given)
    if not items or items[-1].get("type", "message") not in ("message", "reasoning"):
        return False
    return items[-1].get("status") in _UNFINISHED
