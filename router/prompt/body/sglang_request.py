"""Prompts that were read for vLLM -> the same as SGLang reads them (0.5.23).

SGLang cuts nothing that a request wants cut, and adds special tokens to every text. Of a chat it
drops the tools that `tool_choice` rules out, hands templates the others with the client's order of
keys, and reads none of vLLM's fields for documents, special tokens and the generation prompt.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from router.prompt.body.json_fields import is_true
from router.prompt.body.sglang_messages import chat_of
from router.prompt.endpoints import Endpoint
from router.prompt.limits import MAX_PROMPT_TOKENS
from router.prompt.prompts import (
    ChatPrompt,
    OpaquePrompt,
    Prompt,
    PromptSpec,
    TextPrompt,
    TokenPrompt,
)
from router.prompt.token_ids import TokenIds

_IDS = "input_ids"
SENT_CHAT = (
    *("messages", "tools", "tool_choice", "reasoning_effort", "reasoning"),
    *("chat_template_kwargs", "continue_final_message", _IDS),
)
"""The fields of a chat that it reads in its own way."""

_OF_FUNCTION = ("name", "description", "parameters", "strict", "defer_loading")
_MAY_BE_NULL = ("description", "parameters")


def as_sglang_reads(spec: PromptSpec) -> PromptSpec:
    """Return a request with the prompts that SGLang makes of it."""
    as_chat = _AS_CHAT.get(spec.endpoint)
    of_chats = spec.prompts if as_chat is None else map(as_chat, spec.prompts)
    return msgspec.structs.replace(spec, prompts=tuple(map(_prompt, of_chats)))


def _of_messages(prompt: Prompt) -> Prompt:
    """Return a prompt of `/v1/messages` with the fields of the chat that SGLang makes of it."""
    if not isinstance(prompt, ChatPrompt) or prompt.sent is None:
        return prompt
    return replace(prompt, sent=chat_of(prompt.sent))


def _of_responses(prompt: Prompt) -> Prompt:
    """Return a prompt of `/v1/responses` with the fields of the chat that SGLang makes of it.
    Where instructions come later, it depends on the template how they are put together."""
    if not isinstance(prompt, ChatPrompt) or prompt.sent is None:
        return prompt
    if any(message["role"] in ("system", "developer") for message in prompt.messages[1:]):
        return OpaquePrompt("unknown_input_item")
    choice = prompt.sent.get("tool_choice")
    if isinstance(choice, dict):
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    sent = {
        **prompt.sent,
        "messages": [_of_item(message) for message in prompt.messages],
        "tools": prompt.tools and [_strict_or_not(tool) for tool in prompt.tools],
        "tool_choice": choice,
        "chat_template_kwargs": prompt.template_arguments,
    }
    return replace(prompt, sent=sent)


def _strict_or_not(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {name: tool["function"].get(name) for name in _OF_FUNCTION[:3]}
    return {
        "type": "function",
        "function": {**function, "strict": tool["function"].get("strict") is True},
    }


def _of_item(message: Mapping[str, Any]) -> dict[str, Any]:
    found = {**message, "reasoning_content": message.get("reasoning")}
    content = found.get("content")
    if found["role"] == "tool" and isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        found["content"] = "".join(text for text in texts if isinstance(text, str))
    if found["role"] == "developer":
        found["role"] = "system"
        if isinstance(content, str):
            found["content"] = f"{_DEVELOPER}\n{content}"
        elif isinstance(content, list) and content and isinstance(content[0], dict):
            text = f"{_DEVELOPER}\n{content[0].get('text') or ''}"
            found["content"] = [{**content[0], "text": text}, *content[1:]]
    return {name: value for name, value in found.items() if name in _OF_ITEM and value is not None}


_DEVELOPER = "Developer instructions:"
_OF_ITEM = ("role", "content", "name", "tool_call_id", "tool_calls", "reasoning_content")
_AS_CHAT = {Endpoint.MESSAGES: _of_messages, Endpoint.RESPONSES: _of_responses}


def _prompt(prompt: Prompt) -> Prompt:
    if isinstance(prompt, ChatPrompt):
        ids = _given_ids(prompt.sent or {})
        return as_sglang_chat(prompt) if ids is None else TokenPrompt(ids)
    if isinstance(prompt, TokenPrompt):
        return msgspec.structs.replace(prompt, truncation=None)
    return prompt if isinstance(prompt, OpaquePrompt) else TextPrompt(prompt.text)


def _given_ids(sent: Mapping[str, Any]) -> TokenIds | None:
    """Return the ids that come with a chat; it is not rendered then."""
    ids = sent.get(_IDS)
    if not isinstance(ids, list) or len(ids) > MAX_PROMPT_TOKENS or set(map(type, ids)) != {int}:
        return None
    try:
        return array("I", ids)
    except OverflowError:
        return None


def as_sglang_chat(prompt: ChatPrompt) -> ChatPrompt:
    """Return a conversation as SGLang reads it. Its fields have been checked for vLLM."""
    sent = prompt.sent
    if sent is None:
        return replace(prompt, truncation=None, forwarded_ids=None)
    return ChatPrompt(
        messages=sent["messages"],
        tools=_tools(sent.get("tools"), sent.get("tool_choice")),
        template_arguments=_template_arguments(sent),
        continue_final_message=is_true(sent.get("continue_final_message", False)),
        merge_inline_system=prompt.merge_inline_system,
        pieces=prompt.pieces,
        is_of_responses=prompt.is_of_responses,
        sent={name: value for name, value in sent.items() if name != _IDS and value is not None},
        is_sglang=True,
    )


def _tools(
    given: Sequence[Mapping[str, Any]] | None, choice: object
) -> list[dict[str, Any]] | None:
    """Return the tools that templates get, as dumps of SGLang's types; None without any."""
    tools = [] if given is None or choice == "none" else [_tool(tool) for tool in given]
    if isinstance(choice, dict):
        named = choice.get("function")
        name = named.get("name") if isinstance(named, dict) else None
        tools = [tool for tool in tools if tool["function"]["name"] == name]
    return tools or None


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    given, deferred = tool["function"], tool.get("defer_loading")
    function = {
        name: value
        for name, value in given.items()
        if name in _OF_FUNCTION and (value is not None or name in _MAY_BE_NULL)
    }
    for name in _MAY_BE_NULL:
        function.setdefault(name, None)
    if deferred is not None:
        function.setdefault("defer_loading", deferred)
    return {"type": "function", "function": function, "defer_loading": deferred}


def _template_arguments(sent: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables that a request adds to its template, and those that SGLang derives from
    its reasoning effort."""
    arguments = dict(sent.get("chat_template_kwargs") or {})
    effort, reasoning = sent.get("reasoning_effort"), sent.get("reasoning")
    thinking: bool | None = None
    if isinstance(reasoning, dict):
        own = reasoning.get("effort")
        own = reasoning.get("reasoning_effort") if own is None else own
        effort = effort if own is None else own
        enabled = reasoning.get("enabled")
        thinking = is_true(reasoning.get("enable") if enabled is None else enabled) or None
    if effort is not None:
        thinking = effort != "none"
        arguments.setdefault("reasoning_effort", effort)
    if thinking is not None:
        arguments.setdefault("thinking", thinking)
        arguments.setdefault("enable_thinking", thinking)
    return arguments
