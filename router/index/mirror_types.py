"""Defines the plain values that go into the mirror and come out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple, TypeAlias

from kvevents.field_docs import gauge
from router.index.base import SourceId

STEP = 64
"""Tokens between two keys of a prefix; the same for all prompts of a model."""
WORTH_PUBLISHING = 256
"""Uncached tokens from which a prompt is published to others at once."""

ByTier: TypeAlias = Sequence[tuple[str, int]]
"""Tokens of each lower tier or store, as in `Hit.by_tier`."""


class CacheOutlook(NamedTuple):
    """Holds a cache's state for a new request, besides its hit."""

    progress_tokens: float = 0.0
    """Uncached tokens in prefill there that are computed by now."""
    eviction_age_s: float | None = None
    """How long the block evicted next has been idle; None while it evicts nothing."""
    reuse_probability: float = 0.0
    """The probability that the block evicted next is used again."""
    uncached_tokens_per_s: float = 0.0
    """Prompt tokens it got to compute lately, per second."""
    arrivals_per_s: float = 0.0
    """Requests sent to it lately, per second."""
    refill: float = 1.0
    """The cost of bringing back what it evicts, relative to computing it."""


@dataclass(eq=False, slots=True)
class Prefilling:
    """A prompt that is being computed at a cache for a request, or has just been."""

    number: int
    """Its number among the requests of its router."""
    model: str
    source: SourceId
    tokens: int
    """The length of the prompt."""
    queued_tokens: int
    """Tokens at its end that have still to be computed."""
    keys: Sequence[int]
    """The keys of the prompt, every `STEP` tokens."""


@dataclass(frozen=True, slots=True)
class MirrorStatistics:
    """The sizes of the mirror."""

    caches: int
    keys: Annotated[int, gauge("kvroute_mirror_keys")]
    """Pieces of 64 prompt tokens of which it is remembered who used them last, over all
    caches."""
    requests: int
    """Ended requests that still own keys."""
    kept: Annotated[int, gauge("kvroute_mirror_kept_keys")]
    """Keys bounded by `policy.mirror_max_keys`: pieces of 64 tokens of the prompts of which
    something is remembered so, and four for each prompt."""


@dataclass(frozen=True, slots=True)
class ApproximateStatistics:
    """The estimate of one cache."""

    tokens: Annotated[int, gauge("kvroute_approximate_tokens")]
    """Tokens that a cache without events is estimated to hold."""
    capacity_tokens: Annotated[int, gauge("kvroute_approximate_capacity_tokens")]
    """Size of a cache without events, as far as reuse was seen to last."""
    trust: Annotated[float, gauge("kvroute_approximate_trust")]
    """The share of the tokens promised at a cache without events lately that was cached; so much of
    its hits counts."""
