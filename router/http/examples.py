"""Examples of requests and responses for the OpenAPI document.

Responses are values of the types they document, so an example that no longer fits does not pass the
type checker. A test reads the request bodies as the router would.
"""

from __future__ import annotations

from typing import Any

from router.config import ReplicaConfig
from router.http.request_bodies import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingsRequest,
    EmbeddingsToRoute,
    MessagesRequest,
    MessagesToRoute,
    ResponsesRequest,
    TokenIdsRequest,
    TokenizeRequest,
)
from router.http.views import (
    ExcludedReplica,
    HitView,
    ModelEntry,
    ModelList,
    PromptView,
    RankedReplica,
    RemovedReplica,
    RequestsView,
    RequestView,
    RouteView,
    StatusView,
    View,
)
from router.index import GroupHit

_CHAT = [{"role": "user", "content": "Why is the sky blue?"}]
BODIES: dict[type[Any], dict[str, dict[str, Any]]] = {
    ChatRequest: {"chat": {"model": "gemma-3", "messages": _CHAT, "stream": True}},
    CompletionRequest: {
        "text": {"model": "gemma-3", "prompt": "The sky is", "max_tokens": 16},
        "token-ids-batch": {"model": "gemma-3", "prompt": [[2, 651, 7217], [2, 1596]]},
    },
    ResponsesRequest: {"response": {"model": "gemma-3", "input": "Why is the sky blue?"}},
    MessagesRequest: {"messages": {"model": "gemma-3", "messages": _CHAT, "max_tokens": 64}},
    EmbeddingsRequest: {"texts": {"model": "gemma-embed", "input": ["blue", "sky"]}},
    MessagesToRoute: {
        "messages-to-route": {
            "endpoint": "/v1/messages",
            "model": "gemma-3",
            "messages": _CHAT,
            "max_tokens": 64,
        }
    },
    EmbeddingsToRoute: {
        "texts-to-route": {
            "endpoint": "/v1/embeddings",
            "model": "gemma-embed",
            "input": ["blue", "sky"],
        }
    },
    TokenizeRequest: {"text-to-tokenise": {"model": "gemma-3", "prompt": "The sky is"}},
    DetokenizeRequest: {"tokens": {"model": "gemma-3", "tokens": [2, 651, 7217]}},
    TokenIdsRequest: {
        "token-ids": {"model": "gemma-3", "token_ids": [2, 651, 7217, 603]},
        "token-ids-of-an-adapter": {
            "model": "gemma-3",
            "token_ids": [2, 651, 7217, 603],
            "lora_name": "sql",
            "cache_salt": "tenant-7",
        },
    },
    ReplicaConfig: {
        "discovered-replica": {"url": "http://10.0.0.7:8000"},
        "replica-in-full": {
            "url": "http://10.0.0.7:8000",
            "id": "replica-7",
            "models": ["gemma-3"],
            "kv_events": [
                {
                    "endpoint": "tcp://10.0.0.7:5557",
                    "replay_endpoint": "tcp://10.0.0.7:5558",
                    "topic": "kv-events",
                    "dp_rank": 0,
                }
            ],
            "speed": 2.0,
            "max_concurrent_requests": 256,
        },
    },
}

_HIT = HitView(gpu_cached_tokens=960, cached_tokens=1008, suspect=False)
_ROUTE = RouteView(
    replica="replica-7",
    dp_rank=None,
    model="gemma-3",
    policy="prefix",
    prompt_tokens=1024,
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
    routing_seconds=0.000412,
)
_REQUEST = RequestView(
    number=4711,
    change=9422,
    arrived_at=1780000000.123,
    request_id="6f1c2b0d",
    path="/v1/chat/completions",
    model="gemma-3",
    policy="prefix",
    stream=True,
    prompt_tokens=1024,
    unknown=None,
    replica="replica-7",
    dp_rank=None,
    reason="1008 of 1024 tokens cached, 48 of them in a lower tier",
    attempts=1,
    last_failure=None,
    predicted=_HIT,
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
RESPONSES: dict[type[Any], View] = {
    StatusView: StatusView(status="not ready", reason="none of 3 replicas is healthy"),
    RouteView: _ROUTE,
    ModelList: ModelList(data=_MODELS),
    RequestsView: RequestsView(started_at=1779990000.5, change=9422, requests=[_REQUEST]),
    RemovedReplica: RemovedReplica(removed="replica-7"),
}
