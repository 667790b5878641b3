"""Examples of responses, for the OpenAPI document."""

from __future__ import annotations

from typing import Any

from router.doors.http.request_views import RequestsView, RequestView
from router.doors.http.route_views import (
    ExcludedReplica,
    HitView,
    PromptView,
    RankedReplica,
    RouteView,
)
from router.doors.http.views import ModelEntry, ModelList, RemovedReplica, StatusView, View
from router.index.base import GroupHit

_HIT = HitView(gpu_cached_tokens=960, cached_tokens=1008, suspect=False)
_ROUTE = RouteView(
    replica="replica-7",
    dp_rank=None,
    model="gemma-3",
    policy="least_delay",
    prompt_tokens=1024,
    cost=20.8,
    hit=_HIT,
    expected_tokens=1008,
    reason="1008 of 1024 tokens cached, 48 of them in a lower tier",
    routing_seconds=0.000412,
    prompts=[PromptView(tokens=1024, coverage="whole", reason=None, lora_name=None)],
    ranking=[
        RankedReplica(
            replica="replica-7",
            dp_rank=None,
            cost=20.8,
            reason="1008 of 1024 tokens cached, 48 of them in a lower tier",
            hit=_HIT,
            recent_tokens=0,
            groups=[[GroupHit(0, "full_attention", 960), GroupHit(1, "sliding_window", 1008)]],
        )
    ],
    excluded=[ExcludedReplica(replica="replica-8", reason="draining")],
)
_REQUEST = RequestView(
    number=4711,
    change=9422,
    arrived_at=1780000000.123,
    request_id="6f1c2b0d",
    trace_id="0af7651916cd43dd8448eb211c80319c",
    path="/v1/chat/completions",
    model="gemma-3",
    policy="least_delay",
    stream=True,
    prompt_tokens=1024,
    unknown=None,
    replica="replica-7",
    dp_rank=None,
    reason="1008 of 1024 tokens cached, 48 of them in a lower tier",
    attempts=1,
    last_failure=None,
    predicted=_HIT,
    expected=1008,
    actual=1008,
    verdict="exact",
    failed=False,
    status=200,
    end="completed",
    first_byte_ms=38.2,
    total_ms=1204.9,
)
_MODELS = [
    ModelEntry(id="gemma-3", created=1780000000, root="gemma-3", parent=None),
    ModelEntry(id="sql", created=1780000000, root="gemma-3", parent="gemma-3"),
]
EXAMPLES: dict[type[Any], View] = {
    StatusView: StatusView(status="not ready", reason="none of 3 replicas is healthy"),
    RouteView: _ROUTE,
    ModelList: ModelList(data=_MODELS),
    RequestsView: RequestsView(started_at=1779990000.5, change=9422, requests=[_REQUEST]),
    RemovedReplica: RemovedReplica(removed="replica-7"),
}
"""Values of the types they document: one that no longer fits does not pass the type checker."""
