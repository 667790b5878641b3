"""Configures the estimates in place of missing event streams."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from router.config.section import Section
from router.config.values import PLAIN, Seconds


class ApproximateConfig(Section, frozen=True):
    """Estimates of caches without events."""

    enabled: bool = True
    """Change it when replicas without events should be routed by load alone, and hits that are
    suspect stay discounted however long."""
    after_s: Seconds = 60.0
    """How long a stream must have been incomplete until an estimate replaces its doubtful hits.

    Change it when an event stream that is not whole should be replaced by an estimate sooner or
    later. Until then its hits are `suspect`; once it is whole again they are exact at once."""
    cache_tokens: Annotated[int, Field(ge=1024, le=1_000_000_000), PLAIN] = 262_144
    """Size of a replica's cache, where its metrics do not report it.

    Change it when the caches of replicas without events are of another size, and their metrics do
    not report it. vLLM's (`vllm:cache_config_info`) and SGLang's (`sglang:max_total_num_tokens`)
    do."""
    max_keys: Annotated[int, Field(ge=1024, le=1_000_000_000), PLAIN] = 1_048_576
    """Bound on what is remembered of all such caches: keys, one for 64 tokens.

    Change it when memory is short (lower: a key for each 64 tokens of all such caches takes some
    200 bytes), or they hold more than 64 million tokens."""
