"""A conversation that becomes a prompt, and the text of its messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvroute_engine.http.errors import ConversationError

_TEXT_FIELDS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages as the client sent them; only their roles are checked."""

    messages: Sequence[Mapping[str, Any]] = field(repr=False)
    tools: Sequence[Mapping[str, Any]] | None = field(default=None, repr=False)
    template_arguments: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """`chat_template_kwargs`: variables for the template."""
    add_generation_prompt: bool = True
    """True if the prompt ends with the header of an assistant message."""
    continue_final_message: bool = False
    """True if the prompt ends inside the last message instead."""
    add_special_tokens: bool = False
    """True if the tokenizer adds its special tokens to the template's text."""


def message_parts(message: Mapping[str, Any], path: str) -> list[str]:
    """List the texts of a message's content, in order; empty if it has no content.

    Args:
        message: A message as the client sent it.
        path: Where it is in the body, for the error.

    Raises:
        ConversationError: A part is not text but, for example, an image.
    """
    content = message.get("content")
    if content is None:
        return []
    parts = content if isinstance(content, list) else [content]
    return [_text(part, f"{path}.content[{index}]") for index, part in enumerate(parts)]


def message_text(message: Mapping[str, Any], path: str) -> str:
    """Join the texts of a message's content with newlines, as vLLM does.

    Args:
        message: A message as the client sent it.
        path: Where it is in the body, for the error.

    Raises:
        ConversationError: A part is not text.
    """
    return "\n".join(message_parts(message, path))


def _text(part: object, path: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict):
        name = _TEXT_FIELDS.get(str(part.get("type", "text")))
        text = part.get(name) if name else None
        if isinstance(text, str):
            return text
    raise ConversationError(f"{path}: not text; this model takes text only")
