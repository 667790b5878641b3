"""What engines read alike in the messages of a chat: the parts of a content, and the arguments of a
call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

Part: TypeAlias = "str | dict[str, Any]"

# Where the text of a part lies, by the part's type.
TEXT_FIELDS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
    "tool_reference": "name",
}
# Fields that make a part a medium whatever its type.
MEDIA_FIELDS = frozenset(
    (
        *("image_url", "input_image", "image_embeds", "image_pil"),
        *("audio_url", "input_audio", "audio_embeds"),
        *("video_url", "video_embeds", "prompt_embeds"),
    )
)


def has_media(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether any part of any message is an image, audio or video."""
    contents = [message.get("content") for message in messages]
    return any(any(map(is_medium, content)) for content in contents if isinstance(content, list))


def kind_of(part: Mapping[str, Any]) -> str:
    """Return the type of a part."""
    return part.get("type") or "text"


def is_medium(part: Part) -> bool:
    """Return whether a part is an image, audio or video."""
    return isinstance(part, dict) and (
        kind_of(part) not in TEXT_FIELDS or not MEDIA_FIELDS.isdisjoint(part)
    )


def modality(kind: str) -> str:
    """Return the kind of medium that a part of this type is."""
    return next((each for each in ("image", "audio", "video") if each in kind), "image")


def parsed_arguments(arguments: object) -> dict[str, Any]:
    """Return the arguments of a call as templates want them: an object, empty if none are given."""
    if isinstance(arguments, str) and arguments:
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return {}
    return arguments if isinstance(arguments, dict) else {}
