"""Responses of `/route` and for gateways, as types: the replica of a request, and the reasons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from router.doors.http.views import View
from router.index.base import GroupHit
from router.policies.types import Candidate


class HitView(View, frozen=True, kw_only=True):
    """Prompt tokens that a replica would reuse."""

    gpu_cached_tokens: int
    cached_tokens: int
    """With the tokens that lower tiers would bring back."""
    by_tier: dict[str, int] = msgspec.field(default_factory=dict)
    """Tokens that each lower tier, by its name in events, or shared store adds to the GPU's; `PEER`
    is another replica's memory."""
    pull_from: str | None = None
    """The replica from whose memory that is pulled."""
    suspect: bool
    """Events of the replica were lost, so the hit is doubtful and counts in part."""
    approximate: bool = False
    """There are no events of the replica: the hit is an estimate from what was sent there, in steps
    of 64 tokens, and counts as far as such estimates were right lately."""


def hit_view(candidate: Candidate) -> HitView:
    return HitView(
        gpu_cached_tokens=candidate.gpu_cached_tokens,
        cached_tokens=candidate.cached_tokens,
        by_tier=dict(candidate.by_tier),
        pull_from=candidate.pull_from,
        suspect=candidate.suspect,
        approximate=candidate.is_approximate,
    )


class PromptView(View, frozen=True, kw_only=True):
    """One prompt of the request."""

    tokens: int
    """Its length, as far as its token ids are known."""
    coverage: Literal["whole", "prefix", "unknown"]
    """The part of the prompt that those tokens cover."""
    reason: str | None
    """Why the coverage is not `whole`."""
    lora_name: str | None
    """The adapter it runs with."""


class RankedReplica(View, frozen=True, kw_only=True):
    """One replica that could serve the request."""

    replica: str
    dp_rank: int | None
    """The data-parallel rank to ask for; null lets the engine choose."""
    cost: float
    """Never falls along the ranking; for the default policy, the delay in prefill tokens."""
    reason: str
    hit: HitView
    recent_tokens: int
    """Leading prompt tokens that were sent there so recently that events may not show them yet."""
    groups: list[Sequence[GroupHit]]
    """By prompt: the longest prefix that each KV cache group by itself would allow."""


class ExcludedReplica(View, frozen=True, kw_only=True):
    """One replica that serves the model but cannot take the request."""

    replica: str
    reason: str


class RouteView(View, frozen=True, kw_only=True):
    """A replica for a request; more fields with `explain`."""

    replica: str
    dp_rank: int | None
    """The data-parallel rank to ask for; null lets the engine choose."""
    model: str
    policy: str
    prompt_tokens: int
    """Tokens of all prompts, as far as they are known."""
    cost: float
    """For the default policy, the delay in prefill tokens."""
    hit: HitView
    expected_tokens: int
    """Prompt tokens that would be cached there when the engine admits the request: those ahead of
    it store their prompts and evict others."""
    reason: str
    routing_seconds: float
    """Hashing, matching and ranking."""
    prompts: list[PromptView] | msgspec.UnsetType = msgspec.UNSET
    ranking: list[RankedReplica] | msgspec.UnsetType = msgspec.UNSET
    """The best first."""
    excluded: list[ExcludedReplica] | msgspec.UnsetType = msgspec.UNSET


# --- for gateways ---------------------------------------------------------------------------------


class OverlapView(View, frozen=True, kw_only=True):
    """Prompt tokens that the chosen replica would reuse, in the words of other indexers."""

    longest_matched: int
    """All of them; where a model has several KV cache groups, the hit that all groups allow."""
    gpu: int
    dp: dict[str, int] = msgspec.field(default_factory=dict)
    """On the GPU, by data-parallel rank."""
    cpu: int
    """With the tokens that memory would bring back."""
    disk: int
    """With the tokens that all lower tiers would bring back."""


class PrefillView(View, frozen=True, kw_only=True):
    """The replica that computes the prompt for the chosen one."""

    replica: str
    worker_id: int
    """The replica's id as a number, the same at every router."""
    endpoint: str
    """The replica's URL."""
    address: str
    """Its `host:port`, as in the header `x-prefiller-host-port`."""
    hit: HitView
    effective_prefill_tokens: int
    """Prompt tokens to be computed there."""


class SelectionView(View, frozen=True, kw_only=True, omit_defaults=True):
    """A replica for a gateway's request."""

    selection_id: str = ""
    """The id of the reservation, if one was made."""
    model_name: str
    routing_group: str = "default"
    replica: str
    worker_id: int
    """The replica's id as a number, the same at every router."""
    dp_rank: int | None
    """The data-parallel rank to ask for; null lets the engine choose."""
    endpoint: str
    """The replica's URL."""
    address: str
    """Its `host:port`."""
    headers: dict[str, str] = msgspec.field(default_factory=dict)
    """Headers to send with the request."""
    body_fields: dict[str, Any] = msgspec.field(default_factory=dict)
    """Fields to set in its body."""
    block_size: int
    """Tokens of a block."""
    overlap: OverlapView
    isl_tokens: int
    """The prompt's length, as far as its token ids are known."""
    effective_prefill_tokens: int
    """Prompt tokens to be computed, at any replica."""
    prefill: PrefillView | None = None
    """The replica that computes them, where that is another one: it is in `headers`, for llm-d's
    sidecar."""
    expected_tokens: int
    """Prompt tokens that will be cached when the engine admits the request: the prediction that is
    compared with its report."""
    groups: list[Sequence[GroupHit]] = msgspec.field(default_factory=list)
    """By prompt: the longest prefix that each KV cache group by itself would allow; present where
    nothing is booked."""
    hit: HitView
    reason: str
    policy: str
    cost: float
