"""What clients are answered: OpenAI's shapes, with what vLLM adds to them. Plain data, no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

OWNER = "kvroute"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What clients may know of the engine."""

    name: str
    vocab_size: int
    max_model_len: int
    """Longest sequence in tokens, prompt and output."""
    block_size: int
    """Of the KV cache, in tokens."""
    num_blocks: int
    """Of the KV cache."""
    enable_prefix_caching: bool
    created: int
    """When it was started, in seconds since 1970."""
    adapters: tuple[str, ...] = ()
    """LoRA adapters, as names that part caches."""


@dataclass(frozen=True, slots=True)
class KVEventEndpoint:
    """Where the engine publishes what its cache holds."""

    data_parallel_rank: int
    endpoint: str
    replay_endpoint: str | None
    topic: str


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens of one answer, over all its prompts."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def __add__(self, other: TokenUsage) -> TokenUsage:
        return TokenUsage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
        )

    def to_dict(self) -> dict[str, Any]:
        """Cached tokens are told also where there are none, so that whoever predicts them can
        compare."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer, or the next piece of one."""

    index: int
    text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    """The stop string or stop token that ended it."""


class ResponseFormat(Protocol):
    """One endpoint's shapes, for one answer."""

    def whole(self, choices: Sequence[Choice], usage: TokenUsage) -> dict[str, Any]:
        """Everything at once."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """The first event of a choice, if it has one of its own."""

    def piece(self, choice: Choice) -> dict[str, Any]:
        """One event of a stream."""

    def closing(self, usage: TokenUsage) -> dict[str, Any]:
        """The event that tells the usage."""


class CompletionFormat:
    """Of /v1/completions."""

    def __init__(self, answer_id: str, model: str, created: int) -> None:
        self._head = {
            "id": answer_id,
            "object": "text_completion",
            "created": created,
            "model": model,
        }

    def whole(self, choices: Sequence[Choice], usage: TokenUsage) -> dict[str, Any]:
        return {
            **self._head,
            "choices": [self._choice(choice) for choice in choices],
            "usage": usage.to_dict(),
        }

    def opening(self, index: int) -> None:  # noqa: ARG002 (the interface's)
        return None

    def piece(self, choice: Choice) -> dict[str, Any]:
        return {**self._head, "choices": [self._choice(choice)]}

    def closing(self, usage: TokenUsage) -> dict[str, Any]:
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
    """Of /v1/chat/completions."""

    def __init__(self, answer_id: str, model: str, created: int) -> None:
        self._head = {
            "id": answer_id,
            "object": "chat.completion",
            "created": created,
            "model": model,
        }
        self._stream_head = {**self._head, "object": "chat.completion.chunk"}

    def whole(self, choices: Sequence[Choice], usage: TokenUsage) -> dict[str, Any]:
        entries = [
            self._entry(choice, "message", {"role": "assistant", "content": choice.text})
            for choice in choices
        ]
        return {**self._head, "choices": entries, "usage": usage.to_dict()}

    def opening(self, index: int) -> dict[str, Any]:
        choice = Choice(index, "")
        return {
            **self._stream_head,
            "choices": [self._entry(choice, "delta", {"role": "assistant", "content": ""})],
        }

    def piece(self, choice: Choice) -> dict[str, Any]:
        return {
            **self._stream_head,
            "choices": [self._entry(choice, "delta", {"content": choice.text})],
        }

    def closing(self, usage: TokenUsage) -> dict[str, Any]:
        return {**self._stream_head, "choices": [], "usage": usage.to_dict()}

    def _entry(self, choice: Choice, name: str, content: dict[str, Any]) -> dict[str, Any]:
        return {
            "index": choice.index,
            name: content,
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }


def models_response(model: ServedModel) -> dict[str, Any]:
    """The model, and its adapters as entries with a parent."""
    entries = [_model_entry(model, model.name, None)]
    entries += [_model_entry(model, adapter, model.name) for adapter in model.adapters]
    return {"object": "list", "data": entries}


def _model_entry(model: ServedModel, name: str, parent: str | None) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": OWNER,
        "root": name,
        "parent": parent,
        "max_model_len": model.max_model_len if parent is None else None,
        "permission": [],
    }


def event_sources_response(sources: Sequence[KVEventEndpoint]) -> dict[str, Any]:
    """Rank -> publisher, as vLLM 0.32 tells it."""
    return {
        str(source.data_parallel_rank): {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": source.endpoint,
            "replay_endpoint": source.replay_endpoint,
            "topic": source.topic,
        }
        for source in sources
    }


def tokenize_response(
    token_ids: Sequence[int], texts: Sequence[str] | None, max_model_len: int
) -> dict[str, Any]:
    """Of /tokenize."""
    return {
        "count": len(token_ids),
        "max_model_len": max_model_len,
        "tokens": list(token_ids),
        "token_strs": texts,
    }
