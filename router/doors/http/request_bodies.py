"""Bodies of requests to the proxied paths and to `/route`, and an engine's response: as far as the
router reads them. Only for the OpenAPI document; `router.prompt.body` does the reading.

Every body may have more fields, which go to the engine unchanged.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from router.config.replica import ReplicaConfig

_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}}
_TEXTS = {"type": "array", "items": {"type": "string"}}
_ONE_OR_MORE = [_TOKEN_IDS, {"type": "array", "items": _TOKEN_IDS}]

# msgspec allows one kind of list in a union, so what the lists hold is written out.
TokenIds: TypeAlias = Annotated[list[Any], msgspec.Meta(extra_json_schema={"anyOf": _ONE_OR_MORE})]
"""The token ids of one prompt or several."""
TextOrTokenIds: TypeAlias = Annotated[
    str | list[Any],
    msgspec.Meta(extra_json_schema={"anyOf": [{"type": "string"}, _TEXTS, *_ONE_OR_MORE]}),
]
"""One prompt or several."""


ReservationId: TypeAlias = Annotated[
    str, msgspec.Meta(min_length=1, max_length=128, pattern="^[A-Za-z0-9._:-]+$")
]
ReplicaName: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=2048)]
Names: TypeAlias = Annotated[list[ReplicaName], msgspec.Meta(max_length=1024)]
WorkerNumber: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Numbers: TypeAlias = Annotated[list[WorkerNumber], msgspec.Meta(max_length=1024)]
Rank: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
TokenCount: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**40)]


class ProxiedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that all of them have."""

    model: str | None = None
    """A model, an alias or an adapter; needed where the router serves several."""


class PromptRequest(ProxiedRequest, frozen=True, kw_only=True):
    """A body that holds a prompt."""

    cache_salt: str | None = None
    """Keeps cached blocks of different tenants apart."""
    stream: bool = False


class ChatRequest(PromptRequest, frozen=True, kw_only=True):
    """A chat, as in OpenAI's API."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(ProxiedRequest, frozen=True, kw_only=True):
    """A completion, as in OpenAI's API."""

    prompt: TextOrTokenIds
    """One prompt or several."""
    cache_salt: str | list[str] | None = None
    """Keeps cached blocks of different tenants apart. SGLang also takes one for each prompt."""
    stream: bool = False


class ResponsesRequest(PromptRequest, frozen=True, kw_only=True):
    """A request to OpenAI's responses API."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None


class MessagesRequest(PromptRequest, frozen=True, kw_only=True):
    """Messages, as in Anthropic's API."""

    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    max_tokens: int


class EmbeddingsRequest(ProxiedRequest, frozen=True, kw_only=True):
    """Texts to embed, as in OpenAI's API."""

    input: TextOrTokenIds


class MessagesToRoute(MessagesRequest, frozen=True, kw_only=True):
    """Messages to find a route for; without `endpoint` they would be taken for a chat."""

    endpoint: Literal["/v1/messages"]


class EmbeddingsToRoute(EmbeddingsRequest, frozen=True, kw_only=True):
    """Texts to find a route for; without `endpoint` they would be taken for a response's input."""

    endpoint: Literal["/v1/embeddings"]


class ChatBatchRequest(ProxiedRequest, frozen=True, kw_only=True):
    """Several chats, each with a choice of the response; as in vLLM."""

    messages: list[list[dict[str, Any]]]
    """The conversations, to which all else applies alike."""
    cache_salt: str | None = None
    """Keeps cached blocks of different tenants apart."""
    chat_template_kwargs: dict[str, Any] | None = None


class GenerateRequest(PromptRequest, frozen=True, kw_only=True):
    """Token ids to go on from, as in vLLM (`--enable-scale-out`)."""

    token_ids: Annotated[list[Any], msgspec.Meta(extra_json_schema=_TOKEN_IDS)]
    sampling_params: dict[str, Any]
    features: dict[str, Any] | None = None
    """The media among them, from `/render`; what is cached is known up to the first one."""


class TokenizeRequest(ProxiedRequest, frozen=True, kw_only=True):
    """Text or a chat to tokenise, as in vLLM."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(ProxiedRequest, frozen=True, kw_only=True):
    """Token ids to turn into text, as in vLLM."""

    tokens: list[int]


class TokenIdsRequest(ProxiedRequest, frozen=True, kw_only=True):
    """Token ids to find a route for."""

    token_ids: TokenIds
    lora_name: str | None = None
    """The adapter, where `model` names the base model."""
    cache_salt: str | None = None


class SelectionRequest(ProxiedRequest, frozen=True, kw_only=True):
    """A gateway's question: token ids, or in their place the body of any endpoint with a prompt,
    beside these fields, which are the router's."""

    model_name: str | None = None
    """Another name of `model`."""
    token_ids: TokenIds | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    """Turns of one session have the same."""
    selection_id: ReservationId | None = None
    """A name for the reservation, or for the selection that will be reserved later."""
    replicas: Names | None = None
    """Only these may be chosen: ids, URLs, or `host:port`."""
    avoid: Names | None = None
    """These may not be chosen, such as one that has failed."""
    allowed_worker_ids: Numbers | None = None
    """The `replicas` allowed, by `worker_id`."""
    dp_rank: Rank | None = None
    """The data-parallel rank, where the gateway chooses it."""


class ReservationRequest(SelectionRequest, frozen=True, kw_only=True):
    """A reservation to make: of a selection by its id, or of a request with the replica it was sent
    to."""

    replica: ReplicaName | None = None
    """Its id, URL, or `host:port`."""
    worker_id: WorkerNumber | None = None
    """The same as a number."""


class OutputReport(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a response since the last report."""

    tokens: TokenCount = 0
    """Output tokens since the last report."""
    usage: EngineUsage | None = None
    """The usage of the engine's response, or of its last event."""
    cached_tokens: TokenCount | None = None
    """The same in short, where only this is known."""


class ReservationEnd(OutputReport, frozen=True, kw_only=True):
    """The end of a request, and its tokens."""

    outcome: Literal["completed", "client_left", "failed"] = "completed"
    status: Annotated[int, msgspec.Meta(ge=100, le=599)] | None = None
    """The status of the replica's response."""
    failure: Literal["connect", "closed", "first_byte_timeout", "unavailable"] | None = None
    """How the replica failed, as far as it is to blame: it counts against its health."""


class EngineUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The counts from which the router learns the cached tokens: each API has its own."""

    prompt_tokens: int | None = None
    input_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    """Anthropic's cached tokens."""
    prompt_tokens_details: dict[str, Any] | None = None
    """OpenAI's; its `cached_tokens` is compared with the prediction."""
    input_tokens_details: dict[str, Any] | None = None
    """The same in the responses API."""


class EngineResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's response. The router passes it through and reads only the usage."""

    usage: EngineUsage | None = None


PROXIED: dict[str, tuple[type[Any], str]] = {
    "/v1/chat/completions": (ChatRequest, "OpenAI's chat completions"),
    "/v1/completions": (CompletionRequest, "OpenAI's completions"),
    "/v1/responses": (ResponsesRequest, "OpenAI's responses"),
    "/v1/messages": (MessagesRequest, "Anthropic's messages"),
    "/v1/embeddings": (EmbeddingsRequest, "OpenAI's embeddings"),
    "/v1/chat/completions/batch": (ChatBatchRequest, "vLLM's batch of chat completions"),
    "/inference/v1/generate": (GenerateRequest, "vLLM's generation from token ids"),
    "/tokenize": (TokenizeRequest, "vLLM's tokenizer"),
    "/detokenize": (DetokenizeRequest, "vLLM's detokenizer"),
}
"""The body at each path that goes to a replica, and whose form it is."""

_CHAT = [{"role": "user", "content": "Why is the sky blue?"}]
EXAMPLES: dict[type[Any], dict[str, dict[str, Any]]] = {
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
    ChatBatchRequest: {
        "chats": {"model": "gemma-3", "messages": [_CHAT, [{"role": "user", "content": "Why?"}]]}
    },
    GenerateRequest: {
        "tokens-in": {
            "model": "gemma-3",
            "token_ids": [2, 651, 7217, 603],
            "sampling_params": {"max_tokens": 16},
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
    SelectionRequest: {
        "selection-of-token-ids": {
            "model": "gemma-3",
            "token_ids": [2, 651, 7217, 603],
            "selection_id": "request-4711",
        },
        "selection-of-a-chat": {"model": "gemma-3", "messages": _CHAT, "avoid": ["replica-3"]},
    },
    ReservationRequest: {
        "reservation-of-a-selection": {"selection_id": "request-4711"},
        "reservation-at-a-replica": {
            "model": "gemma-3",
            "token_ids": [2, 651, 7217, 603],
            "replica": "replica-7",
        },
    },
    OutputReport: {"progress": {"tokens": 64}},
    ReservationEnd: {
        "end": {"usage": {"prompt_tokens": 4, "prompt_tokens_details": {"cached_tokens": 0}}},
        "failure": {"outcome": "failed", "failure": "connect"},
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
                    "replay_endpoint": "tcp://10.0.0.7:6557",
                    "topic": "kv-events",
                    "dp_rank": 0,
                }
            ],
            "speed": 2.0,
            "max_concurrent_requests": 256,
        },
    },
}
"""By type and name; a test reads them as the router would."""
