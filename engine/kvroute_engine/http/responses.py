"""Response bodies in OpenAI's shapes, with vLLM's additions, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from offload.request import RETENTION_HINTS

_OWNER = "kvroute"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What clients may know about the engine."""

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
    """When it was started, in seconds since 1970."""
    adapters: tuple[str, ...] = ()
    """LoRA adapters: names with caches of their own, for the same weights."""
    group_kinds: tuple[str, ...] = ()
    """Kind of each KV cache group as on the wire: `full_attention`, `sliding_window` ..."""
    scheduling_policy: str = "fcfs"
    """By what requests are ordered; `priority` where their own priorities count."""


@dataclass(frozen=True, slots=True)
class KVEventEndpoint:
    """Where the engine publishes its KV cache events."""

    data_parallel_rank: int
    endpoint: str
    replay_endpoint: str | None
    topic: str


@dataclass(frozen=True, slots=True)
class CompletionUsage:
    """Tokens of one response, over all its prompts."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def __add__(self, other: CompletionUsage) -> CompletionUsage:
        return CompletionUsage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return OpenAI's `usage`.

        Cached tokens are reported even if there are 0, so that a router can compare them with its
        prediction.
        """
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True)
class Choice:
    """One response to one prompt, or the next piece of it."""

    index: int
    text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    """The stop string or stop token that ended it."""


class ResponseFormat(Protocol):
    """Builds the bodies of one response of one endpoint."""

    def full(self, choices: Sequence[Choice], usage: CompletionUsage) -> dict[str, Any]:
        """Build a response that is not streamed.

        Args:
            choices: One per prompt, each complete.
            usage: Tokens of all of them.
        """

    def first_chunk(self, index: int) -> dict[str, Any] | None:
        """Build the event that opens choice *index* of a stream; None if there is no such event."""

    def chunk(self, choice: Choice) -> dict[str, Any]:
        """Build an event with the next piece of a choice."""

    def usage_chunk(self, usage: CompletionUsage) -> dict[str, Any]:
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
        self._head = {
            "id": response_id,
            "object": "text_completion",
            "created": created,
            "model": model,
        }

    def full(self, choices: Sequence[Choice], usage: CompletionUsage) -> dict[str, Any]:
        """Build a response that is not streamed.

        Args:
            choices: One per prompt, each complete.
            usage: Tokens of all of them.
        """
        return {
            **self._head,
            "choices": [self._choice(choice) for choice in choices],
            "usage": usage.to_dict(),
        }

    def first_chunk(self, index: int) -> None:
        """See `ResponseFormat.first_chunk`: text completions have no such event."""

    def chunk(self, choice: Choice) -> dict[str, Any]:
        """See `ResponseFormat.chunk`."""
        return {**self._head, "choices": [self._choice(choice)]}

    def usage_chunk(self, usage: CompletionUsage) -> dict[str, Any]:
        """See `ResponseFormat.usage_chunk`."""
        return {**self._head, "choices": [], "usage": usage.to_dict()}

    def _choice(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": choice.text,
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }


class ChatFormat:
    """Bodies of /v1/chat/completions; see `ResponseFormat`."""

    def __init__(self, response_id: str, model: str, created: int) -> None:
        """
        Args:
            response_id: Repeated in every event of a stream.
            model: Name that the client used.
            created: When, in seconds since 1970.
        """
        self._head = {
            "id": response_id,
            "object": "chat.completion",
            "created": created,
            "model": model,
        }
        self._chunk_head = {**self._head, "object": "chat.completion.chunk"}

    def full(self, choices: Sequence[Choice], usage: CompletionUsage) -> dict[str, Any]:
        """Build a response that is not streamed.

        Args:
            choices: One per prompt, each complete.
            usage: Tokens of all of them.
        """
        entries = [
            self._entry(choice, "message", {"role": "assistant", "content": choice.text})
            for choice in choices
        ]
        return {**self._head, "choices": entries, "usage": usage.to_dict()}

    def first_chunk(self, index: int) -> dict[str, Any]:
        """See `ResponseFormat.first_chunk`: the role, with an empty content."""
        choice = Choice(index, "")
        return {
            **self._chunk_head,
            "choices": [self._entry(choice, "delta", {"role": "assistant", "content": ""})],
        }

    def chunk(self, choice: Choice) -> dict[str, Any]:
        """See `ResponseFormat.chunk`."""
        return {
            **self._chunk_head,
            "choices": [self._entry(choice, "delta", {"content": choice.text})],
        }

    def usage_chunk(self, usage: CompletionUsage) -> dict[str, Any]:
        """See `ResponseFormat.usage_chunk`."""
        return {**self._chunk_head, "choices": [], "usage": usage.to_dict()}

    def _entry(self, choice: Choice, name: str, content: dict[str, Any]) -> dict[str, Any]:
        return {
            "index": choice.index,
            name: content,
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }


def models_response(model: ServedModel) -> dict[str, Any]:
    """Build the response of /v1/models: the model, and its adapters with it as their parent."""
    entries = [_model_entry(model, model.name, None)]
    entries += [_model_entry(model, adapter, model.name) for adapter in model.adapters]
    return {"object": "list", "data": entries}


def _model_entry(model: ServedModel, name: str, parent: str | None) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": _OWNER,
        "root": name,
        "parent": parent,
        "max_model_len": model.max_model_len if parent is None else None,
        "permission": [],
    }


def server_info_response(model: ServedModel) -> dict[str, Any]:
    """Build the response of /server_info: what a router can make use of."""
    return {"scheduling_policy": model.scheduling_policy, "retention_hints": RETENTION_HINTS}


def event_sources_response(endpoints: Sequence[KVEventEndpoint]) -> dict[str, Any]:
    """Build the response of /kv_event_sources: rank -> publisher, as vLLM 0.32 reports it."""
    return {
        str(endpoint.data_parallel_rank): {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": endpoint.endpoint,
            "replay_endpoint": endpoint.replay_endpoint,
            "topic": endpoint.topic,
        }
        for endpoint in endpoints
    }


def tokenize_response(
    token_ids: Sequence[int], texts: Sequence[str] | None, max_model_len: int
) -> dict[str, Any]:
    """Build the response of /tokenize.

    Args:
        token_ids: The ids.
        texts: Text of each id, if the client asked for it.
        max_model_len: Longest sequence of the model in tokens.
    """
    return {
        "count": len(token_ids),
        "max_model_len": max_model_len,
        "tokens": list(token_ids),
        "token_strs": texts,
    }
