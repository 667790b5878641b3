"""Makes the responses of `/route` and for gateways from a decision."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from router.doors.http.bodies import JSON, MSGPACK
from router.doors.http.route_views import (
    ExcludedReplica,
    OverlapView,
    PrefillView,
    PromptView,
    RankedReplica,
    RouteView,
    SelectionView,
    hit_view,
)
from router.doors.names import worker_number
from router.fleet.replica import Replica
from router.index.base import GroupHit, Hit, SourceId
from router.plane.attempts import Attempt
from router.policies.types import Candidate, Ranked
from router.prompt.endpoints import Encoding
from router.routing.decision import Decision
from router.routing.question import uncached_tokens

_MSGPACK_NAMES = (MSGPACK, "application/x-msgpack")
_BLOCK_SIZE = 16
_MEMORY_TIERS = ("CPU", "cpu")


def route_view(decision: Decision, explains: bool = False) -> RouteView:
    """Show where a request would go. Some replica must be able to serve it.

    Args:
        explains: True to show the other candidates, and how much each has cached.
    """
    best = decision.ranking[0]
    view = RouteView(
        replica=best.candidate.replica_id,
        dp_rank=best.candidate.dp_rank,
        model=decision.model_name,
        policy=decision.policy,
        prompt_tokens=decision.prompt_tokens,
        cost=round(best.cost, 3),
        hit=hit_view(best.candidate),
        expected_tokens=decision.expected_tokens(best.candidate),
        reason=best.reason,
        routing_seconds=round(decision.routing_s, 6),
    )
    return _explained(view, decision) if explains else view


def _explained(view: RouteView, decision: Decision) -> RouteView:
    return msgspec.structs.replace(
        view,
        prompts=[
            PromptView(
                tokens=len(prompt.token_ids),
                coverage=prompt.coverage.value,
                reason=prompt.reason,
                lora_name=prompt.lora_name,
            )
            for prompt in decision.tokenized
        ],
        ranking=[_ranked(decision, ranked) for ranked in decision.ranking],
        excluded=[
            ExcludedReplica(replica=candidate.replica_id, reason=candidate.obstacle or "")
            for candidate in decision.excluded
        ],
    )


def _ranked(decision: Decision, ranked: Ranked) -> RankedReplica:
    candidate = ranked.candidate
    return RankedReplica(
        replica=candidate.replica_id,
        dp_rank=candidate.dp_rank,
        cost=round(ranked.cost, 3),
        reason=ranked.reason,
        hit=hit_view(candidate),
        recent_tokens=candidate.recent_tokens,
        groups=_group_hits(decision, decision.source_of(candidate)),
    )


def selection_view(
    decision: Decision, attempt: Attempt | None, selection_id: str, fields: dict[str, Any]
) -> SelectionView:
    """Return the replica for a gateway's request. Some replica must be able to serve it.

    Args:
        attempt: None: nothing is booked.
        selection_id: The reservation's, or that of a selection that may be reserved later.
    """
    best = decision.ranking[0] if attempt is None else decision.ranked(attempt.replica_id)
    candidate = best.candidate
    replica = decision.replicas[candidate.replica_id]
    source, model = decision.source_of(candidate), decision.asked.model
    layout = None if model is None else model.index.announced(source)
    prefiller = decision.prefiller_for(candidate) if attempt is None else attempt.prefiller
    return SelectionView(
        selection_id=selection_id,
        model_name=decision.model_name,
        replica=replica.id,
        worker_id=worker_number(replica.id),
        dp_rank=candidate.dp_rank,
        endpoint=str(replica.origin),
        address=replica.address,
        headers={} if attempt is None else _headers_of(replica, attempt),
        body_fields=fields,
        block_size=_BLOCK_SIZE if layout is None else layout.hash_block_size or _BLOCK_SIZE,
        overlap=_overlap(candidate),
        isl_tokens=decision.prompt_tokens,
        effective_prefill_tokens=max(decision.prompt_tokens - candidate.cached_tokens, 0),
        prefill=None if prefiller is None else _prefill_view(decision, prefiller),
        expected_tokens=decision.expected_tokens(candidate),
        groups=_group_hits(decision, source) if attempt is None else [],
        hit=hit_view(candidate),
        reason=best.reason,
        policy=decision.policy,
        cost=round(best.cost, 3) if math.isfinite(best.cost) else 0.0,
    )


def _prefill_view(decision: Decision, prefiller: Candidate) -> PrefillView:
    replica = decision.replica_of(prefiller)
    return PrefillView(
        replica=replica.id,
        worker_id=worker_number(replica.id),
        endpoint=str(replica.origin),
        address=replica.address,
        hit=hit_view(prefiller),
        effective_prefill_tokens=uncached_tokens(decision.prompt_tokens, prefiller),
    )


def _group_hits(decision: Decision, source: SourceId) -> list[Sequence[GroupHit]]:
    model = decision.asked.model
    if model is None or not model.index.holds(source):
        return []
    return [model.index.explain(prompt, source) for prompt in decision.prompts]


def _headers_of(replica: Replica, attempt: Attempt) -> dict[str, str]:
    """Return the headers for the engine; without the replica's key, which is the gateway's to
    add."""
    names = {name for name, _ in replica.headers}
    return {
        name.decode(): value.decode("latin-1")
        for name, value in attempt.request_headers
        if value is not None and name not in names
    }


def _overlap(candidate: Candidate) -> OverlapView:
    gpu = candidate.gpu_cached_tokens
    rank = "0" if candidate.dp_rank is None else str(candidate.dp_rank)
    return OverlapView(
        longest_matched=candidate.cached_tokens,
        gpu=gpu,
        dp={rank: gpu},
        cpu=tokens_with_memory(candidate),
        disk=candidate.cached_tokens,
    )


def tokens_with_memory(found: Candidate | Hit) -> int:
    """Return the tokens on the GPU, with those that CPU memory would bring back."""
    in_memory = sum(tokens for tier, tokens in found.by_tier if tier in _MEMORY_TIERS)
    return min(found.gpu_cached_tokens + in_memory, found.cached_tokens)


def encoding_of(headers: Mapping[bytes, bytes]) -> Encoding:
    """Return the encoding of a question's body."""
    named = headers.get(b"content-type", b"").split(b";")[0].strip()
    return "msgpack" if named.decode("latin-1") in _MSGPACK_NAMES else "json"


def encoded(view: RouteView, headers: Mapping[bytes, bytes]) -> tuple[str, bytes]:
    """Return the type and the body of an answer: msgpack where the client accepts it, or sent it
    and accepts anything."""
    accepted = headers.get(b"accept", b"*/*").decode("latin-1")
    if any(name in accepted for name in _MSGPACK_NAMES) or (
        "json" not in accepted and encoding_of(headers) == "msgpack"
    ):
        return MSGPACK, msgspec.msgpack.encode(view)
    return JSON, msgspec.json.encode(view)
