"""Defines the plain values that go into the mirror and come out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from kvevents.field_docs import gauge
from router.index.base import SourceId

STEP = 64
"""Tokens between two keys of a prefix; the same for all prompts of a model."""
WORTH_PUBLISHING = 256
"""Uncached tokens from which a prompt is published to others at once."""

ByTier: TypeAlias = Sequence[tuple[str, int]]
"""Tokens of each lower tier or store, as in `Hit.by_tier`."""


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
