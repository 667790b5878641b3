"""Defines what goes into the mirror and what comes out. Plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple, TypeAlias

from kvevents.field_docs import gauge
from router.index.base import SourceId

STEP = 64
"""Tokens between two keys of a prefix; the same for all prompts of a model."""
WORTH_TELLING = 256
"""Uncached tokens from which a prompt is published to others at once."""

ByTier: TypeAlias = Sequence[tuple[str, int]]
"""Tokens of each lower tier or store, as in `Hit.by_tier`."""


class Coming(NamedTuple):
    """Holds what a cache will have of a prompt before events show it. In tokens."""

    tokens: int
    """A hit."""
    run: int
    """Tokens that full attention will have, at least as many: beyond the hit it is a junction."""


class CacheOutlook(NamedTuple):
    """Holds what a new request would find at a cache, besides its hit."""

    progress_tokens: float = 0.0
    """Those of the uncached tokens in prefill there that are computed by now."""
    eviction_age_s: float | None = None
    """For how long what it evicts next has been idle; None while it evicts nothing."""
    reuse_probability: float = 0.0
    """How probable it is that what it evicts next is used again."""
    uncached_tokens_per_s: float = 0.0
    """That it was given to compute lately."""
    arrivals_per_s: float = 0.0
    """Requests that were sent to it lately."""
    refill: float = 1.0
    """The cost of bringing back what it evicts, relative to computing it."""


Outlook: TypeAlias = tuple[float | None, float, float, float, float]
"""A `CacheOutlook` without the progress."""


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
    """The last of these, which have still to be computed."""
    keys: Sequence[int]
    """The prompt's, every `STEP` tokens."""


@dataclass(frozen=True, slots=True)
class MirrorStatistics:
    """Sizes."""

    caches: int
    keys: Annotated[int, gauge("kvroute_mirror_keys")]
    """Pieces of 64 prompt tokens of which it is remembered who used them last, over all
    caches."""
    requests: int
    """Ended ones that still own something."""
    kept: Annotated[int, gauge("kvroute_mirror_kept_keys")]
    """Keys bounded by `policy.mirror_max_keys`: pieces of 64 tokens of the prompts of which
    something is remembered so, and four for each prompt."""


class ApproximateHit(NamedTuple):
    """Holds what a cache may hold of a prompt."""

    tokens: int
    trust: float
    """The share of the tokens that were promised there lately that was cached."""


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
