"""Configures when a prompt is computed at another replica than its response."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from router.config.section import Section
from router.config.values import PLAIN


class PrefillConfig(Section, frozen=True):
    """When a prompt is computed by another replica than the response, where `replicas[].role`
    allows it."""

    min_uncached_tokens: Annotated[int, Field(ge=0, le=1_000_000_000), PLAIN] = 512
    """So many prompt tokens, at least, must be left to compute at the chosen replica; 0: it always
    computes prompts itself.

    Change it when moving a prompt's cache between replicas costs less (lower) or more (higher) than
    to compute so much beside running responses; llm-d's `nonCachedTokens`."""
