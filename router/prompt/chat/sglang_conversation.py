"""Messages of a request -> messages as a chat template gets them from SGLang (0.5.23)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from router.prompt.chat.parts import is_medium, modality, parsed_arguments
from router.prompt.endpoints import ContentForm

_Message: TypeAlias = dict[str, Any]
_TEXTS = ("text", "input_text")
# What its type of message has besides role and content; a user's has no more than these two.
_FIELDS = ("tool_call_id", "name", "phase", "reasoning_content", "prefix")


def as_sglang(
    messages: Sequence[Mapping[str, Any]], form: ContentForm, media_mark: str | None = None
) -> list[_Message]:
    """Return new messages in *form*, as `conversation.normalise` does by vLLM's rules; a last one
    of the assistant becomes the user's."""
    found = [_message(message, form, media_mark) for message in messages]
    last = found[-1]
    if last["role"] == "assistant" and isinstance(last["content"], str):
        found[-1] = {"role": "user", "content": last["content"]}
    return found


def _message(message: Mapping[str, Any], form: ContentForm, media_mark: str | None) -> _Message:
    role, content = message["role"].lower(), message.get("content")
    result: _Message = {"role": role, "content": "" if content is None else content}
    if isinstance(content, list):
        parts = _parts(content, media_mark)
        is_plain = all(part["type"] == "text" for part in parts)
        if form == "string" or (role == "tool" and is_plain):
            texts = [part["text"] for part in parts if part["type"] == "text"]
            result["content"] = " ".join(texts)
        else:
            result["content"] = parts
    if role == "user":
        return result
    result.update({name: message[name] for name in _FIELDS if message.get(name) is not None})
    if message.get("tool_calls") is not None:
        result["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    return result


def _parts(content: Sequence[object], media_mark: str | None) -> list[_Message]:
    """Return the parts that templates get. Others, as those of thinking, are left out."""
    parts: list[_Message] = []
    for part in content:
        if not isinstance(part, dict):
            continue
        kind = part.get("type")
        if kind in _TEXTS:
            parts.append({"type": "text", "text": part.get("text") or ""})
        elif kind == "tool_reference":
            parts.append(part)
        elif is_medium(part) and media_mark is not None:
            parts.append({"type": "text", "text": media_mark})
        elif is_medium(part):
            parts.append({"type": modality(kind or "")})
    return parts


def _call(call: Mapping[str, Any]) -> _Message:
    """Return a call with the keys of SGLang's own types, in their order: templates may write it as
    JSON."""
    given = call["function"]
    arguments = given.get("arguments")
    if isinstance(arguments, str):
        arguments = parsed_arguments(arguments)
    function = {"name": given.get("name"), "arguments": arguments}
    return {
        "id": call.get("id"),
        "index": call.get("index"),
        "type": "function",
        "function": function,
    }
