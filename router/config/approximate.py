"""What stands in for event streams that are not there."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from router.config.section import Section
from router.config.values import PLAIN, Seconds


class ApproximateConfig(Section, frozen=True):
    """Estimates of what caches without events hold."""

    enabled: bool = True
    """Whether to estimate at all. If not, replicas without events are routed by load."""
    after_s: Seconds = 60.0
    """How long a stream must have been incomplete until an estimate replaces its doubtful hits."""
    cache_tokens: Annotated[int, Field(ge=1024, le=1_000_000_000), PLAIN] = 262_144
    """Size of a replica's cache, where its metrics do not say it."""
    max_keys: Annotated[int, Field(ge=1024, le=1_000_000_000), PLAIN] = 1_048_576
    """Bound on what is remembered of all such caches: keys, one for 64 tokens."""
