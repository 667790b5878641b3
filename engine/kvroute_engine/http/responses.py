"""Response bodies in OpenAI's shapes, with vLLM's additions, as types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from offload.request import RETENTION_HINTS


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The facts about the engine for clients."""

    name: str
    vocab_size: int
    max_model_len: int
    """Longest sequence in tokens, prompt and output together."""
    block_size: int
    """Block size of the KV cache, in tokens."""
    num_blocks: int
    """Blocks of the KV cache on the GPU."""
    enable_prefix_caching: bool
    created: int
    """The time when it was started, in seconds since 1970."""
    adapters: tuple[str, ...] = ()
    """LoRA adapters: names with caches of their own, for the same weights."""
    group_kinds: tuple[str, ...] = ()
    """Kind of each KV cache group as on the wire: `full_attention`, `sliding_window` ..."""
    scheduling_policy: str = "fcfs"
    """The order of requests; `priority` where their own priorities count."""


# --- completions and chats ------------------------------------------------------------------------


class CachedTokens(msgspec.Struct, frozen=True):
    """The part of the prompts that was not computed; reported even if it is 0, so that a router can
    compare it with its prediction."""

    cached_tokens: int = 0


class CompletionUsage(msgspec.Struct, frozen=True):
    """Tokens of one response, over all its prompts."""

    prompt_tokens: int = 0
    total_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: CachedTokens = CachedTokens()

    @classmethod
    def of(cls, prompt: int, completion: int, cached: int) -> CompletionUsage:
        """Count the tokens of a prompt, of its output, and those of the prompt that were cached."""
        return cls(prompt, prompt + completion, completion, CachedTokens(cached))

    def __add__(self, other: CompletionUsage) -> CompletionUsage:
        return CompletionUsage.of(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.prompt_tokens_details.cached_tokens + other.prompt_tokens_details.cached_tokens,
        )


class Choice(msgspec.Struct, frozen=True):
    """One response to one prompt, or the next piece of it."""

    index: int
    text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    """The stop string or stop token that ended it."""
    logprobs: None = None


class ChatMessage(msgspec.Struct, frozen=True):
    """Holds the assistant's text; the role stands at its beginning only."""

    content: str
    role: str | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A `Choice` in a chat: a whole message, or in a stream its new part."""

    index: int
    message: ChatMessage | UnsetType = UNSET
    delta: ChatMessage | UnsetType = UNSET
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: None = None


class CompletionResponse(msgspec.Struct, frozen=True):
    """A response of /v1/completions or /v1/chat/completions, or one event of its stream."""

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[Choice | ChatChoice] = ()
    usage: CompletionUsage | UnsetType | None = UNSET
    """Events have it only where the client asked for it."""


class ResponseFormat(Protocol):
    """Builds the bodies of one response of one endpoint."""

    def full(self, choices: Sequence[Choice], usage: CompletionUsage) -> CompletionResponse:
        """Build a response that is not streamed, of one complete choice per prompt."""

    def first_chunk(self, index: int) -> CompletionResponse | None:
        """Build the event that opens choice *index* of a stream; None if there is no such event."""

    def chunk(self, choice: Choice) -> CompletionResponse:
        """Build an event with the next piece of a choice."""

    def usage_chunk(self, usage: CompletionUsage) -> CompletionResponse:
        """Build the event that ends a stream with its usage."""


class CompletionFormat:
    """Bodies of /v1/completions; see `ResponseFormat`."""

    def __init__(self, response_id: str, model: str, created: int) -> None:
        """
        Args:
            response_id: Repeated in every event of a stream.
            model: Name that the client used.
            created: When, in seconds since 1970.
        """
        self._head = CompletionResponse(response_id, "text_completion", created, model)

    def full(self, choices: Sequence[Choice], usage: CompletionUsage) -> CompletionResponse:
        """See `ResponseFormat.full`."""
        return msgspec.structs.replace(self._head, choices=choices, usage=usage)

    def first_chunk(self, index: int) -> None:
        """See `ResponseFormat.first_chunk`: text completions have no such event."""

    def chunk(self, choice: Choice) -> CompletionResponse:
        """See `ResponseFormat.chunk`."""
        return msgspec.structs.replace(self._head, choices=(choice,))

    def usage_chunk(self, usage: CompletionUsage) -> CompletionResponse:
        """See `ResponseFormat.usage_chunk`."""
        return msgspec.structs.replace(self._head, usage=usage)


class ChatFormat:
    """Bodies of /v1/chat/completions; see `ResponseFormat`."""

    def __init__(self, response_id: str, model: str, created: int) -> None:
        """See `CompletionFormat`."""
        self._head = CompletionResponse(response_id, "chat.completion", created, model)
        self._chunk_head = msgspec.structs.replace(self._head, object="chat.completion.chunk")

    def full(self, choices: Sequence[Choice], usage: CompletionUsage) -> CompletionResponse:
        """See `ResponseFormat.full`."""
        messages = [
            ChatChoice(
                index=choice.index,
                message=ChatMessage(choice.text, role="assistant"),
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
            )
            for choice in choices
        ]
        return msgspec.structs.replace(self._head, choices=messages, usage=usage)

    def first_chunk(self, index: int) -> CompletionResponse:
        """See `ResponseFormat.first_chunk`: the role, with an empty content."""
        opening = ChatChoice(index=index, delta=ChatMessage("", role="assistant"))
        return msgspec.structs.replace(self._chunk_head, choices=(opening,))

    def chunk(self, choice: Choice) -> CompletionResponse:
        """See `ResponseFormat.chunk`."""
        piece = ChatChoice(
            index=choice.index,
            delta=ChatMessage(choice.text),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )
        return msgspec.structs.replace(self._chunk_head, choices=(piece,))

    def usage_chunk(self, usage: CompletionUsage) -> CompletionResponse:
        """See `ResponseFormat.usage_chunk`."""
        return msgspec.structs.replace(self._chunk_head, usage=usage)


# --- what routers and operators ask for -----------------------------------------------------------


class ServedModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A model, or a LoRA adapter with the model as its parent."""

    id: str
    created: int
    root: str
    parent: str | None = None
    max_model_len: int | None = None
    object: str = "model"
    owned_by: str = "kvroute"
    permission: tuple[str, ...] = ()


class ServedModelList(msgspec.Struct, frozen=True):
    """Response of /v1/models: the model, then its adapters."""

    data: Sequence[ServedModelEntry]
    object: str = "list"

    @classmethod
    def of(cls, model: ServedModel) -> ServedModelList:
        """List the model and its adapters."""
        name, created = model.name, model.created
        own = ServedModelEntry(
            id=name, created=created, root=name, max_model_len=model.max_model_len
        )
        adapters = [
            ServedModelEntry(id=adapter, created=created, root=adapter, parent=name)
            for adapter in model.adapters
        ]
        return cls([own, *adapters])


class EngineInfo(msgspec.Struct, frozen=True):
    """Response of /server_info: facts for routers."""

    scheduling_policy: str
    retention_hints: int = RETENTION_HINTS


class KVEventEndpoint(msgspec.Struct, frozen=True):
    """The endpoint of one data-parallel rank's KV cache events, as vLLM 0.32 reports it in the
    response of /kv_event_sources, by rank."""

    endpoint: str
    replay_endpoint: str | None
    topic: str
    publisher: str = "zmq"
    enable_kv_cache_events: bool = True


class TokenizeResponse(msgspec.Struct, frozen=True):
    """Response of /tokenize."""

    count: int
    max_model_len: int
    tokens: Sequence[int]
    token_strs: Sequence[str] | None
    """The text of each id, if the client asked for it."""


class DetokenizeResponse(msgspec.Struct, frozen=True):
    """Response of /detokenize."""

    prompt: str


class VersionResponse(msgspec.Struct, frozen=True):
    """Response of /version."""

    version: str


class ResetResponse(msgspec.Struct, frozen=True):
    """Response of /reset_prefix_cache; False if requests hold blocks."""

    success: bool
