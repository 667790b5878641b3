"""Body of `/v1/messages` -> the chat that SGLang (0.5.23) makes of it.

It has rules of its own: parts of the system prompt on lines of their own, what a user says before a
tool's result before it, and tools with a `strict`. What it makes of earlier thinking depends on its
reasoning parser, which the router does not know: a prompt is certain up to there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

_Fields: TypeAlias = dict[str, Any]

SENT_MESSAGES = ("system", "messages", "tools", "tool_choice", "thinking", "output_config")
"""The fields that it reads in its own way."""

_OWN_TOOL = re.compile(r"(web_search|computer|bash|text_editor)_\d{8}")
"""Tools that Anthropic's servers run: SGLang leaves them out."""
_CHOICES = {"none": "none", "auto": "auto", "any": "required"}
# Stands where only the engine knows the text, as an image does.
_UNKNOWN = {"type": "unknown"}


def chat_of(sent: Mapping[str, Any]) -> _Fields:
    """Return the fields of the chat; those of the body have been checked for vLLM."""
    messages = _system(sent.get("system"))
    for message in sent["messages"]:
        messages += _converted(message)
    tools = [_tool(tool) for tool in sent.get("tools") or () if not _is_own(tool)]
    return {
        "messages": messages,
        "tools": tools or None,
        "tool_choice": _choice(sent.get("tool_choice")),
        "chat_template_kwargs": _template_arguments(sent),
    }


def _system(content: object) -> list[_Fields]:
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    texts = [block["text"] for block in _texts(blocks) if block.get("text")]
    if isinstance(content, str) and not content.strip():
        return []
    return [{"role": "system", "content": "\n".join(texts)}] if texts else []


def _texts(blocks: object) -> Iterable[Mapping[str, Any]]:
    given = blocks if isinstance(blocks, list) else []
    return (block for block in given if isinstance(block, dict) and block.get("type") == "text")


def _converted(message: Mapping[str, Any]) -> list[_Fields]:
    role, content = message["role"], message.get("content")
    if not isinstance(content, list):
        return [{"role": role, "content": content}]
    turn = _SglangTurn(role)
    if any(block.get("type") == "thinking" and block.get("thinking") for block in content):
        turn.parts.append(_UNKNOWN)
    for block in content:
        turn.add(block)
    return turn.messages()


@dataclass
class _SglangTurn:
    """One message on its way to those of a chat."""

    role: str
    before: list[_Fields] = field(default_factory=list)
    parts: list[_Fields] = field(default_factory=list)
    calls: list[_Fields] = field(default_factory=list)

    def add(self, block: Mapping[str, Any]) -> None:
        """Take one content block; unknown ones carry nothing a template sees."""
        kind = block.get("type")
        if kind == "tool_use":
            self.calls.append(_call(block))
        elif kind == "tool_result" and self.role == "user":
            self.before += [*_said(self.parts), *_results(block)]
            self.parts = []
        elif (part := _part(block)) is not None:
            self.parts.append(part)

    def messages(self) -> list[_Fields]:
        """Return the chat's; a user turn that holds only tool results has none of its own."""
        if self.role == "user":
            return self.before + _said(self.parts)
        message: _Fields = {"role": self.role}
        if self.calls:
            message["tool_calls"] = self.calls
        if self.parts or not self.calls:
            message["content"] = _content(self.parts) if self.parts else ""
        return [message]


def _part(block: Mapping[str, Any]) -> _Fields | None:
    kind, content = block.get("type"), block.get("content")
    if kind == "text" and block.get("text") is not None:
        return {"type": "text", "text": block["text"]}
    if kind == "image":
        return {"type": "image_url", "image_url": {}}
    if kind == "tool_result":
        texts = [content] if isinstance(content, str) else [b.get("text") for b in _texts(content)]
        text = "\n".join(text for text in texts if isinstance(text, str) and text)
        return {"type": "text", "text": f"Tool result: {text}"}
    return _UNKNOWN if kind == "search_result" else None


def _said(parts: Sequence[_Fields]) -> list[_Fields]:
    return [{"role": "user", "content": _content(parts)}] if parts else []


def _content(parts: Sequence[_Fields]) -> str | list[_Fields]:
    """Return one text as it is, and all else as parts."""
    if len(parts) == 1 and parts[0]["type"] == "text":
        text: str = parts[0]["text"]
        return text
    return list(parts)


def _results(block: Mapping[str, Any]) -> list[_Fields]:
    """Return the messages that a tool's answer becomes: references to tools have one of their
    own."""
    content = block.get("content")
    groups: list[list[_Fields]] = []
    for part in map(_result_part, content if isinstance(content, list) else ()):
        if part is None:
            continue
        is_reference = part["type"] == "tool_reference"
        if not groups or (groups[-1][0]["type"] == "tool_reference") != is_reference:
            groups.append([])
        groups[-1].append(part)
    text = content if isinstance(content, str) else ""
    call_id = block.get("tool_use_id") or block.get("id") or ""
    return [
        {"role": "tool", "tool_call_id": call_id, "content": each}
        for each in (map(_content, groups) if groups else [text])
    ]


def _result_part(item: Mapping[str, Any]) -> _Fields | None:
    kind, name = item.get("type"), item.get("tool_name") or item.get("name")
    if kind == "text" and item.get("text"):
        return {"type": "text", "text": item["text"]}
    if kind == "image":
        return {"type": "image_url", "image_url": {}}
    if kind == "tool_reference" and name:
        return {"type": "tool_reference", "name": name}
    return _UNKNOWN if kind == "search_result" else None


def _call(block: Mapping[str, Any]) -> _Fields:
    given = block.get("input")
    function = {"name": block.get("name") or "", "arguments": json.dumps(given or {})}
    return {"id": block.get("id") or "", "type": "function", "function": function}


def _is_own(tool: Mapping[str, Any]) -> bool:
    kind = tool.get("type")
    return isinstance(kind, str) and _OWN_TOOL.fullmatch(kind) is not None


def _tool(tool: Mapping[str, Any]) -> _Fields:
    schema = tool.get("input_schema")
    if schema is not None and "type" not in schema:
        schema = {**schema, "type": "object"}
    function = {
        "name": tool["name"],
        "description": tool.get("description") or "",
        "parameters": schema,
        "strict": tool.get("strict") is True,
    }
    return {
        "type": "function",
        "function": function,
        "defer_loading": tool.get("defer_loading"),
    }


def _choice(given: object) -> object:
    kind = given.get("type") if isinstance(given, dict) else None
    if isinstance(given, dict) and kind == "tool":
        return {"type": "function", "function": {"name": given.get("name")}}
    return _CHOICES.get(kind) if isinstance(kind, str) else None


def _template_arguments(sent: Mapping[str, Any]) -> _Fields | None:
    """Return the variables of templates: which of the two names one knows for thinking, SGLang
    learns from it."""
    arguments: _Fields = {}
    thinking = sent.get("thinking")
    if isinstance(thinking, dict):
        is_on = thinking.get("type") != "disabled"
        arguments = {"thinking": is_on, "enable_thinking": is_on}
    effort = (sent.get("output_config") or {}).get("effort")
    if effort is not None:
        arguments["reasoning_effort"] = "max" if effort == "xhigh" else effort
    return arguments or None
