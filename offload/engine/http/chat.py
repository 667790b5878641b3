"""A conversation that is to become a prompt, and the text of its messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from offload.engine.http.errors import ConversationError

_TEXT_FIELDS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages as the client sent them, checked to have a role and nothing more."""

    messages: Sequence[Mapping[str, Any]] = field(repr=False)
    tools: Sequence[Mapping[str, Any]] | None = field(default=None, repr=False)
    template_arguments: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """`chat_template_kwargs`: variables of a template."""
    add_generation_prompt: bool = True
    """The header of the next assistant message follows."""
    continue_final_message: bool = False
    """The last message is left open instead."""
    add_special_tokens: bool = False
    """Also round what the template wrote."""


def message_parts(message: Mapping[str, Any], place: str) -> list[str]:
    """The texts of a message's content, in order; none where it has no content.

    Raises:
        ConversationError: The content is no text, as an image is none.
    """
    content = message.get("content")
    if content is None:
        return []
    parts = content if isinstance(content, list) else [content]
    return [_text(part, f"{place}.content[{index}]") for index, part in enumerate(parts)]


def message_text(message: Mapping[str, Any], place: str) -> str:
    """The same as one text, joined as vLLM joins parts.

    Raises:
        ConversationError: The content is no text.
    """
    return "\n".join(message_parts(message, place))


def _text(part: object, place: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict):
        name = _TEXT_FIELDS.get(str(part.get("type", "text")))
        text = part.get(name) if name else None
        if isinstance(text, str):
            return text
    raise ConversationError(f"{place}: not a text; this model takes nothing else")
