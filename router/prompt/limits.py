"""The bounds on what one request may make the router hold and compute."""

from __future__ import annotations

MAX_PROMPTS = 2048
"""Prompts in one batch of completions or embeddings."""
MAX_PROMPT_TOKENS = 2_097_152
"""Token ids of one prompt; room for models with a context of 2 Mi tokens."""
MAX_PROMPT_CHARS = 16_777_216
"""Characters of one prompt's text, after the chat template was rendered."""
MAX_MESSAGES = 16_384
"""Messages of one chat, and tools, and documents."""
MAX_NESTING = 64
"""Levels of objects and lists inside a message, a tool or a template argument."""
MAX_VALUES = 262_144
"""Values, counted at all levels, of all messages, and of all tools, documents, template
arguments."""
MAX_SALT_CHARS = 1024
"""Characters of `cache_salt`, as vLLM bounds it."""
