"""Body of a chat completion -> `ChatPrompt`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from router.tokenize.body.json_fields import (
    check_shape,
    describe,
    is_true,
    object_list,
    optional_object,
)
from router.tokenize.body.tools import chat_tools
from router.tokenize.errors import RequestBodyError
from router.tokenize.limits import PromptLimits
from router.tokenize.prompts import ChatPrompt, OpaquePrompt, Truncation

# vLLM takes these values in template arguments as "not given".
_UNSET = (None, "auto")


def parse_chat(
    fields: Mapping[str, Any],
    limits: PromptLimits,
    truncation: Truncation | None,
    *,
    add_generation_prompt: bool = True,
) -> ChatPrompt | OpaquePrompt:
    """Read a conversation.

    Args:
        add_generation_prompt: The endpoint's default where the body says nothing.
    """
    messages = check_messages(fields, limits)
    if fields.get("chat_template") is not None:
        # A template is a program. One that a client sends is never run here.
        return OpaquePrompt("request_chat_template")
    return ChatPrompt(
        messages=messages,
        tools=chat_tools(fields, limits),
        documents=_documents(fields, limits),
        template_arguments=template_arguments(fields, limits, fields.get("reasoning_effort")),
        add_generation_prompt=is_true(fields.get("add_generation_prompt", add_generation_prompt)),
        continue_final_message=is_true(fields.get("continue_final_message", False)),
        add_special_tokens=is_true(fields.get("add_special_tokens", False)),
        truncation=truncation,
    )


def check_messages(fields: Mapping[str, Any], limits: PromptLimits) -> list[dict[str, Any]]:
    """Check the shape of `messages` as far as anything here relies on it.

    Args:
        fields: The decoded body.
        limits: Bounds on the list and its nesting.
    Raises:
        RequestBodyError: The list or an entry breaks a rule.
    """
    messages = object_list(fields.get("messages"), "$.messages", limits)
    if not messages:
        raise RequestBodyError("$.messages", "an empty list", "must hold at least one message")
    for index, message in enumerate(messages):
        _check_message(message, f"$.messages[{index}]")
    return messages


def _check_message(message: Mapping[str, Any], place: str) -> None:
    role = message.get("role")
    if not isinstance(role, str):
        raise RequestBodyError(f"{place}.role", describe(role), "must be a string")
    content = message.get("content")
    if isinstance(content, list):
        for index, part in enumerate(content):
            _check_part(part, f"{place}.content[{index}]")
    elif content is not None and not isinstance(content, str):
        raise RequestBodyError(
            f"{place}.content", describe(content), "must be a string, a list of parts or null"
        )
    _check_tool_calls(message.get("tool_calls"), f"{place}.tool_calls")


def _check_part(part: object, place: str) -> None:
    if isinstance(part, str):
        return
    if not isinstance(part, dict):
        raise RequestBodyError(place, describe(part), "must be an object or a string")
    for name in ("type", "text"):
        value = part.get(name)
        if value is not None and not isinstance(value, str):
            raise RequestBodyError(f"{place}.{name}", describe(value), "must be a string")


def _check_tool_calls(calls: object, place: str) -> None:
    if calls is None:
        return
    if not isinstance(calls, list):
        raise RequestBodyError(place, describe(calls), "must be a list of objects")
    for index, call in enumerate(calls):
        if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
            raise RequestBodyError(
                f"{place}[{index}]", describe(call), "must be an object with a function"
            )


def _documents(fields: Mapping[str, Any], limits: PromptLimits) -> list[dict[str, Any]] | None:
    documents = fields.get("documents")
    if documents is None:
        return None
    return object_list(documents, "$.documents", limits)


def template_arguments(
    fields: Mapping[str, Any], limits: PromptLimits, reasoning_effort: object
) -> dict[str, Any]:
    """Return the variables that a request adds to its chat template.

    Args:
        fields: The decoded body; its `chat_template_kwargs` come first.
        limits: Bounds on their nesting.
        reasoning_effort: What the request says of it, from which the engine derives
            `enable_thinking`.
    Raises:
        RequestBodyError: `chat_template_kwargs` is not an object, or is too large.
    """
    given = optional_object(fields, "chat_template_kwargs", "$") or {}
    check_shape(given, "$.chat_template_kwargs", limits)
    arguments = dict(given)
    if isinstance(reasoning_effort, str) and reasoning_effort != "auto":
        arguments["reasoning_effort"] = reasoning_effort
        arguments.setdefault("enable_thinking", reasoning_effort != "none")
    return {name: value for name, value in arguments.items() if value not in _UNSET}
