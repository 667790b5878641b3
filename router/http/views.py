"""What the router says of itself as plain data: a decision, the replicas, the models. For JSON and
for msgpack."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from router.feed import SourceFeedStatistics
from router.index import GroupHit, SourceId, SourceStatistics
from router.observability.request_log import RoutedRequest
from router.replicas import ReplicaView
from router.routing.dispatcher import Decision
from router.scoring import Ranked


def route_answer(decision: Decision) -> dict[str, Any]:
    """A decision with its reasons: who would serve the request, and how much of it is cached
    where."""
    ranking = [_ranked(decision, ranked) for ranked in decision.ranking.ranked]
    excluded = decision.ranking.excluded
    return {
        "replica": ranking[0]["replica"] if ranking else None,
        "dp_rank": ranking[0]["dp_rank"] if ranking else None,
        "model": decision.model.name,
        "policy": decision.policy,
        "prompt_tokens": decision.prompt_tokens,
        "prompts": [_prompt(prompt) for prompt in decision.tokenized],
        "ranking": ranking,
        "excluded": [
            {"replica": candidate.replica_id, "reason": candidate.obstacle}
            for candidate in excluded
        ],
        "routing_seconds": round(decision.routing_s, 6),
    }


def request_answer(request: RoutedRequest) -> dict[str, Any]:
    """One request of the log."""
    return {
        "number": request.number,
        "change": request.change,
        "arrived_at": round(request.arrived_at, 3),
        "request_id": request.request_id,
        "path": request.path,
        "model": request.model,
        "policy": request.policy,
        "stream": request.stream,
        "prompt_tokens": request.prompt_tokens,
        "unknown": request.unknown,
        "replica": request.replica,
        "dp_rank": request.dp_rank,
        "reason": request.reason,
        "attempts": request.attempts,
        "last_failure": request.last_failure,
        "predicted": {
            "gpu_cached_tokens": request.gpu_cached_tokens,
            "cached_tokens": request.cached_tokens,
            "suspect": request.suspect,
        },
        "actual": request.actual_tokens,
        "verdict": request.verdict,
        "failed": request.has_failed,
        "status": request.status,
        "end": request.end,
        "first_byte_ms": _milliseconds(request.first_byte_s),
        "total_ms": _milliseconds(request.seconds),
    }


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)


def _prompt(prompt: Any) -> dict[str, Any]:
    return {
        "tokens": len(prompt.token_ids),
        "coverage": prompt.coverage.value,
        "reason": prompt.reason,
        "lora_name": prompt.lora_name,
    }


def _ranked(decision: Decision, ranked: Ranked) -> dict[str, Any]:
    index, candidate = decision.model.index, ranked.candidate
    source = decision.source_of(candidate)
    prompts = decision.prompts if index.holds(source) else ()
    return {
        "replica": candidate.replica_id,
        "dp_rank": candidate.dp_rank,
        "cost": round(ranked.cost, 3),
        "reason": ranked.reason,
        "hit": {
            "gpu_cached_tokens": candidate.gpu_cached_tokens,
            "cached_tokens": candidate.cached_tokens,
            "suspect": candidate.suspect,
        },
        "recent_tokens": candidate.recent_tokens,
        "groups": [_groups(index.explain(prompt, source)) for prompt in prompts],
    }


def _groups(hits: Sequence[GroupHit]) -> list[dict[str, Any]]:
    return [{"group": found.group, "kind": found.kind, "tokens": found.tokens} for found in hits]


def replica_answer(
    view: ReplicaView,
    statistics: Mapping[SourceId, SourceStatistics],
    feeds: Mapping[SourceId, SourceFeedStatistics],
) -> dict[str, Any]:
    """One replica: its state, its load, and each of its event streams with what is known and what
    is assumed."""
    answer: dict[str, Any] = msgspec.to_builtins(view)
    answer["sources"] = [
        {
            **answer_source,
            "feed": _feed(feeds.get(SourceId(view.id, source.dp_rank))),
            "cache": _cache(statistics.get(SourceId(view.id, source.dp_rank))),
        }
        for source, answer_source in zip(view.sources, answer["sources"], strict=True)
    ]
    return answer


def _feed(statistics: SourceFeedStatistics | None) -> dict[str, Any] | None:
    if statistics is None:
        return None
    plain: dict[str, Any] = msgspec.to_builtins(statistics)
    applied = plain.pop("applied")
    return {**plain, **applied}


def _cache(statistics: SourceStatistics | None) -> dict[str, Any] | None:
    if statistics is None:
        return None
    layout = statistics.layout
    return {
        "blocks": [
            {"group": group, "tier": tier, "blocks": count}
            for (group, tier), count in sorted(statistics.blocks.items())
        ],
        "unplaced_blocks": statistics.unplaced,
        "waiting_runs": statistics.waiting.runs,
        "given_up_runs": statistics.waiting.given_up,
        "is_incomplete": statistics.is_incomplete,
        "hash_algorithm": statistics.hash_algorithm,
        "groups": [] if layout is None else [msgspec.to_builtins(group) for group in layout.groups],
        "hash_block_size": None if layout is None else layout.hash_block_size,
        "scheduler_block_size": None if layout is None else layout.scheduler_block_size,
        "eagle": None if layout is None else layout.eagle,
        "assumptions": list(statistics.assumptions),
    }


def models_answer(names: Mapping[str, str | None], served: Iterable[str]) -> dict[str, Any]:
    """`GET /v1/models`: every name that some replica serves now."""
    created = int(time.time())
    alive = set(served)
    return {
        "object": "list",
        "data": [
            {
                "id": name,
                "object": "model",
                "created": created,
                "owned_by": "kvroute",
                "root": parent or name,
                "parent": parent,
            }
            for name, parent in sorted(names.items())
            if name in alive
        ],
    }
