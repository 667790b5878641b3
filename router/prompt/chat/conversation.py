"""Messages of a request -> messages as a chat template gets them, normalised the way vLLM's server
does it.

A template either loops over the parts of a message's content (the `openai` form) or writes the
content as it is (the `string` form); every message is brought into the form that the template
expects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from router.prompt.chat.parts import (
    MEDIA_FIELDS,
    TEXT_FIELDS,
    Part,
    is_medium,
    kind_of,
    modality,
    parsed_arguments,
)
from router.prompt.endpoints import BILLING_HEADER, ContentForm

_Message: TypeAlias = dict[str, Any]

# Fields of parts that have a meaning of their own; a template gets all others beside type and text.
_KNOWN_PART_FIELDS = MEDIA_FIELDS | {
    *("type", "text", "refusal", "thinking", "closed", "name", "uuid", "data", "file")
}


def normalise(
    messages: Sequence[Mapping[str, Any]], form: ContentForm, media_mark: str | None = None
) -> list[_Message]:
    """Return new messages in *form*; the ones given stay as they are.

    Args:
        messages: Checked messages of a chat request.
        media_mark: Text to write for images, audio and video. None gives a template of the
            `openai` form the part that it gets in the engine, and writes nothing into one of the
            `string` form.
    """
    return [_normalise(message, form, media_mark) for message in messages]


def _normalise(message: Mapping[str, Any], form: ContentForm, media_mark: str | None) -> _Message:
    role, given = message["role"], message.get("content")
    if isinstance(given, str) and not given.startswith(BILLING_HEADER):  # nearly all of them
        content: str | list[_Message] = given
        if form == "openai":
            content = [{"type": "text", "text": given}]
    else:
        parts = _parts(given)
        if role == "system":
            parts = _without_billing_header(parts)
        is_parts = form == "openai"
        content = _as_parts(parts, media_mark) if is_parts else _as_string(parts, media_mark)
    result: _Message = {"role": role, "content": content}
    if role == "assistant":
        result.update(_assistant_fields(message))
    elif role == "tool":
        result.update(_tool_fields(message, content))
    elif role == "developer":
        result["tools"] = message.get("tools")
    for name in ("name", "task"):
        if isinstance(message.get(name), str):
            result[name] = message[name]
    return result


def _parts(content: object) -> list[Part]:
    if isinstance(content, list):
        return content
    return [content] if isinstance(content, str) else []


def _text(part: Part) -> str | None:
    """Return the text of a text part; None if it holds none."""
    if isinstance(part, str):
        return part
    text = part.get(TEXT_FIELDS[kind_of(part)])
    return text if isinstance(text, str) else None


def _as_string(parts: Sequence[Part], media_mark: str | None) -> str:
    """Join texts by newlines; the engine writes the placeholders of media before them all."""
    texts = [text for part in parts if not is_medium(part) and (text := _text(part)) is not None]
    if media_mark is not None and any(is_medium(part) for part in parts):
        texts.insert(0, media_mark)
    return "\n".join(texts)


def _as_parts(parts: Sequence[Part], media_mark: str | None) -> list[_Message]:
    return [wrapped for part in parts if (wrapped := _wrap(part, media_mark)) is not None]


def _wrap(part: Part, media_mark: str | None) -> _Message | None:
    """Return a part in the `openai` form; None for an empty one."""
    if is_medium(part):
        assert not isinstance(part, str)
        return (
            {"type": modality(kind_of(part))}
            if media_mark is None
            else {"type": "text", "text": media_mark}
        )
    text = _text(part)
    if text is None or isinstance(part, str):
        return None if text is None else {"type": "text", "text": text}
    if kind_of(part) == "tool_reference":
        return {"type": "tool_reference", "name": text}
    extra = {name: value for name, value in part.items() if name not in _KNOWN_PART_FIELDS}
    return {"type": "text", "text": text, **extra}


def _without_billing_header(parts: Sequence[Part]) -> list[Part]:
    """Drop the line that Claude Code puts before its system prompt, new in every request, as the
    engine does."""
    kept: list[Part] = []
    for part in parts:
        text = (
            part
            if isinstance(part, str)
            else part.get("text")
            if part.get("type") == "text"
            else None
        )
        if not isinstance(text, str) or not text.startswith(BILLING_HEADER):
            kept.append(part)
        elif rest := text.partition("\n")[2]:
            kept.append(rest if isinstance(part, str) else {**part, "text": rest})
    return kept


def _assistant_fields(message: Mapping[str, Any]) -> _Message:
    fields: _Message = {}
    calls = message.get("tool_calls")
    if calls:
        fields["tool_calls"] = [_call(call) for call in calls]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        # Templates read the one or the other name.
        fields["reasoning"] = fields["reasoning_content"] = reasoning
    return fields


def _call(call: Mapping[str, Any]) -> _Message:
    function = call["function"]
    return {
        **call,
        "function": {**function, "arguments": parsed_arguments(function.get("arguments"))},
    }


def _tool_fields(message: Mapping[str, Any], content: str | list[_Message]) -> _Message:
    fields: _Message = {}
    if "tool_call_id" in message:
        fields["tool_call_id"] = message["tool_call_id"]
    # Most templates write the content of a tool message as it is, also those that loop over that of
    # others.
    if isinstance(content, list) and all(part["type"] == "text" for part in content):
        fields["content"] = "\n".join(part["text"] for part in content)
    return fields


def without_developer_role(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Turn developer messages into system messages, then all system messages into one at the
    front."""
    converted = [
        {**{name: value for name, value in message.items() if name != "tools"}, "role": "system"}
        if message["role"] == "developer"
        else message
        for message in messages
    ]
    is_system = [message["role"] == "system" for message in converted]
    return converted if not any(is_system[1:]) else merge_system_messages(converted, "\n\n")


def merge_system_messages(
    messages: Sequence[Mapping[str, Any]], separator: str
) -> list[Mapping[str, Any]]:
    """Join all system messages into one at the front.

    Args:
        messages: They stay as they are.
    """
    system = [
        _plain_text(message.get("content")) for message in messages if message["role"] == "system"
    ]
    rest = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": separator.join(text for text in system if text)}, *rest]


def _plain_text(content: object) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "\n".join(part if isinstance(part, str) else part.get("text", "") for part in parts)
