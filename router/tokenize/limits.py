"""How large a prompt may be before it is refused."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PromptLimits"]


@dataclass(frozen=True)
class PromptLimits:
    """Bounds on what one request may make the router hold and compute.

    Attributes:
        max_prompts: Prompts in one batch of completions or embeddings.
        max_prompt_tokens: Token ids of one prompt; room for models with a context of 2 Mi tokens.
        max_prompt_chars: Characters of one prompt's text, after the chat template was rendered.
        max_messages: Messages of one chat, and tools, and documents.
        max_nesting: Levels of objects and lists inside a message, a tool or a template argument.
        max_values: Values, counted at all levels, of all messages, and of all tools, documents,
            template arguments.
        max_salt_chars: Characters of ``cache_salt``, as vLLM bounds it.
    """

    max_prompts: int = 2048
    max_prompt_tokens: int = 2_097_152
    max_prompt_chars: int = 16_777_216
    max_messages: int = 16_384
    max_nesting: int = 64
    max_values: int = 262_144
    max_salt_chars: int = 1024
