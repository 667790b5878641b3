"""Body of `/v1/messages` -> `ChatPrompt`: blocks become OpenAI messages, as vLLM's server
converts them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from router.errors import BadRequest
from router.prompt.body.json_fields import object_list, optional_object
from router.prompt.body.sglang_messages import SENT_MESSAGES
from router.prompt.body.template_arguments import template_arguments
from router.prompt.body.tools import anthropic_tools
from router.prompt.endpoints import BILLING_HEADER
from router.prompt.errors import describe
from router.prompt.prompts import ChatPiece, ChatPrompt, OpaquePrompt
from router.prompt.token_ids import Truncation


def parse_messages(
    fields: Mapping[str, Any], truncation: Truncation | None
) -> ChatPrompt | OpaquePrompt:
    """Read system prompt, messages, tools and thinking options.

    Raises:
        BadRequest: A field that shapes the prompt breaks a rule.
    """
    given = object_list(fields.get("messages"), "$.messages")
    if not given:
        raise BadRequest("$.messages", "an empty list", "must hold at least one message")
    if any(_changes_tools(message) for message in given):
        return OpaquePrompt("tool_changes")
    messages = _system_message(fields.get("system"), "$.system")
    for index, message in enumerate(given):
        messages += _convert(message, f"$.messages[{index}]")
    thinking = optional_object(fields, "thinking", "$") or {}
    effort = (optional_object(fields, "output_config", "$") or {}).get("effort")
    is_off = thinking.get("type") == "disabled"
    return ChatPrompt(
        messages=messages,
        tools=anthropic_tools(fields),
        template_arguments=template_arguments(fields, "none" if is_off else effort),
        least_thinking=template_arguments(fields, "low") if is_off else None,
        merge_inline_system=True,
        truncation=truncation,
        sent={name: fields[name] for name in SENT_MESSAGES if name in fields},
        pieces=_pieces([fields.get("system"), *(message.get("content") for message in given)]),
    )


def _pieces(contents: Iterable[object]) -> list[ChatPiece] | None:
    """Return the texts of system prompt and messages, where the client marks what it caches; the
    blocks have been checked."""
    pieces: list[ChatPiece] = []
    for content in contents:
        blocks = content if isinstance(content, list) else [{"text": content}]
        for block in blocks:
            text = block.get("text") or block.get("content")
            if isinstance(text, str) and not text.startswith(BILLING_HEADER):
                pieces.append(ChatPiece(text, bool(block.get("cache_control"))))
    return pieces if any(piece.is_named for piece in pieces) else None


def _changes_tools(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(
        isinstance(block, dict) and block.get("type") in ("tool_addition", "tool_removal")
        for block in content
    )


def _blocks(content: object, place: str) -> list[dict[str, Any]]:
    """Return content as blocks; a string is one text block."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise BadRequest(place, describe(content), "must be a string or a list of blocks")
    for index, block in enumerate(content):
        if not isinstance(block, dict):
            raise BadRequest(f"{place}[{index}]", describe(block), "must be an object")
        text = block.get("text")
        if text is not None and not isinstance(text, str):
            raise BadRequest(f"{place}[{index}].text", describe(text), "must be a string")
    return content


def _system_message(content: object, place: str) -> list[dict[str, Any]]:
    """Return the system prompt as a list of one message, empty if nothing is left of it."""
    if not content:
        return []
    texts = [
        block.get("text") or "" for block in _blocks(content, place) if block.get("type") == "text"
    ]
    # A system prompt that is one string keeps a header that it starts with, as at the top level it
    # is not looked at.
    keeps_header = isinstance(content, str) and place == "$.system"
    kept = [
        text for text in texts if text and (keeps_header or not text.startswith(BILLING_HEADER))
    ]
    return [{"role": "system", "content": "".join(kept)}] if kept else []


def _convert(message: Mapping[str, Any], place: str) -> list[dict[str, Any]]:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise BadRequest(f"{place}.role", describe(role), "must be a string")
    if role == "system":
        return _system_message(content, f"{place}.content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    turn = _Turn(role)
    for index, block in enumerate(_blocks(content, f"{place}.content")):
        turn.add(block, f"{place}.content[{index}]")
    return turn.messages()


@dataclass
class _Turn:
    """One Anthropic message on its way to OpenAI messages: results of tools come out before it."""

    role: str
    before: list[dict[str, Any]] = field(default_factory=list)
    parts: list[dict[str, Any]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)

    def add(self, block: Mapping[str, Any], place: str) -> None:
        """Take one content block; unknown ones carry nothing a template sees."""
        kind = block.get("type")
        if kind == "text" and block.get("text"):
            self.parts.append({"type": "text", "text": block["text"]})
        elif kind == "image":
            self.parts.append({"type": "image_url", "image_url": {}})
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            self.reasoning.append(block["thinking"])
        elif kind == "tool_use":
            self.calls.append(_call(block))
        elif kind == "tool_result" and self.role == "user":
            self.before += _tool_result(block, place)
        elif kind == "tool_result":
            content = block.get("content")
            self.parts.append(
                {"type": "text", "text": f"Tool result: {content if content else ''}"}
            )

    def messages(self) -> list[dict[str, Any]]:
        """Return the OpenAI messages; a user turn that holds only tool results has none of its
        own."""
        message: dict[str, Any] = {"role": self.role}
        if self.reasoning:
            message["reasoning"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = self.calls
        if len(self.parts) == 1 and self.parts[0]["type"] == "text":
            message["content"] = self.parts[0]["text"]
        elif self.parts:
            message["content"] = self.parts
        if self.role == "user" and not self.parts:
            return self.before
        return [*self.before, message]


def _call(block: Mapping[str, Any]) -> dict[str, Any]:
    arguments = block.get("input")
    # As a string, the way OpenAI's form has them: a replica is asked with these messages too.
    text = json.dumps(arguments if isinstance(arguments, dict) else {})
    # The keys in the order of vLLM's own types, for templates that write a call as JSON.
    function = {"arguments": text, "name": block.get("name") or ""}
    return {"id": block.get("id") or "", "function": function, "type": "function"}


def _tool_result(block: Mapping[str, Any], place: str) -> list[dict[str, Any]]:
    """Convert a tool's answer: its text, then its images, then references to tools it found."""
    call_id = block.get("tool_use_id") or ""
    content = block.get("content")
    items = _blocks(content, f"{place}.content") if content else []
    text = "\n".join(item.get("text") or "" for item in items if item.get("type") == "text")
    messages: list[dict[str, Any]] = [{"role": "tool", "tool_call_id": call_id, "content": text}]
    images = [
        {"type": "image_url", "image_url": {}} for item in items if item.get("type") == "image"
    ]
    if images:
        messages.append({"role": "user", "content": images})
    names = [
        item.get("tool_name") or item.get("name")
        for item in items
        if item.get("type") == "tool_reference"
    ]
    references = [{"type": "tool_reference", "name": name} for name in names if name]
    if references:
        messages.append({"role": "tool", "tool_call_id": call_id, "content": references})
    return messages
