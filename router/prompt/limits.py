"""The bounds of a prompt."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PromptLimits:
    """Bounds on what one request may make the router hold and compute."""

    max_prompts: int = 2048
    """Prompts in one batch of completions or embeddings."""
    max_prompt_tokens: int = 2_097_152
    """Token ids of one prompt; room for models with a context of 2 Mi tokens."""
    max_prompt_chars: int = 16_777_216
    """Characters of one prompt's text, after the chat template was rendered."""
    max_messages: int = 16_384
    """Messages of one chat, and tools, and documents."""
    max_nesting: int = 64
    """Levels of objects and lists inside a message, a tool or a template argument."""
    max_values: int = 262_144
    """Values, counted at all levels, of all messages, and of all tools, documents, template
    arguments."""
    max_salt_chars: int = 1024
    """Characters of `cache_salt`, as vLLM bounds it."""
