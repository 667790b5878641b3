"""What a request asks to be computed, and the token ids that stand for it: plain values."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, TypeAlias

__all__ = [
    "ChatPrompt",
    "Coverage",
    "Endpoint",
    "OpaquePrompt",
    "Prompt",
    "PromptSpec",
    "TextPrompt",
    "TokenIds",
    "TokenPrompt",
    "TokenizedPrompt",
    "Truncation",
]

# An array of unsigned 32-bit integers (typecode "I"): a sequence of ints for readers, four bytes a
# token in memory, and a buffer that can be hashed without a loop over the tokens.
TokenIds: TypeAlias = "array[int]"


class Endpoint(str, Enum):
    """The request forms that are understood; the value is the path."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"
    EMBEDDINGS = "/v1/embeddings"
    ROUTE = "/route"


@dataclass(frozen=True, slots=True)
class Truncation:
    """``truncate_prompt_tokens``: the engine keeps only *max_tokens* of the prompt.

    Attributes:
        max_tokens: Tokens to keep, special tokens included.
        side: Side that is cut away, ``left`` keeps the end of the prompt.
        counts_special_tokens: The client named the side: the finished ids are cut as they are.
            Otherwise the text is cut first, and the special tokens around it survive.
    """

    max_tokens: int
    side: Literal["left", "right"]
    counts_special_tokens: bool


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt that came as token ids."""

    token_ids: TokenIds
    truncation: Truncation | None = None


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A prompt that came as text."""

    text: str = field(repr=False)
    add_special_tokens: bool = True
    truncation: Truncation | None = None


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, in the OpenAI chat form, to be rendered by the model's chat template.

    Attributes:
        messages: As the client sent them (or converted to this form), not yet normalised.
        tools: In the form that templates get: ``type``, ``function{name, description,
            parameters}``.
        documents: For templates that know retrieval.
        template_arguments: The client's ``chat_template_kwargs`` and what the request's own fields
            add to them.
        add_generation_prompt: Whether the header of the next assistant message follows.
        continue_final_message: Whether the last message is left open instead.
        add_special_tokens: Whether BOS and EOS are added to what the template wrote.
        merge_inline_system: Whether system messages in mid-conversation move to the front where the
            template takes them nowhere else (``/v1/messages`` does).
    """

    messages: Sequence[Mapping[str, Any]] = field(repr=False)
    tools: Sequence[Mapping[str, Any]] | None = field(default=None, repr=False)
    documents: Sequence[Mapping[str, Any]] | None = field(default=None, repr=False)
    template_arguments: Mapping[str, Any] = field(default_factory=dict, repr=False)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    merge_inline_system: bool = False
    truncation: Truncation | None = None


@dataclass(frozen=True, slots=True)
class OpaquePrompt:
    """A prompt whose token ids only the engine can know, for example embeddings or a stored
    conversation."""

    reason: str


Prompt: TypeAlias = TokenPrompt | TextPrompt | ChatPrompt | OpaquePrompt


@dataclass(frozen=True, slots=True)
class PromptSpec:
    """All that routing needs of a request.

    Attributes:
        endpoint: The form of the body; for ``/route`` the form that it stands for.
        model: As the client named it: a base model or a LoRA adapter; None lets the engine choose.
        prompts: One for a chat, as many as the batch holds for completions and embeddings.
        stream: Whether the client wants server-sent events.
        max_tokens: The client's bound on generated tokens.
        choices: How many answers are generated for each prompt (``n``).
        cache_salt: Keeps cached blocks of different tenants apart.
        lora_name: Only where ``/route`` names it; otherwise the caller finds out what *model* is.
        session: What the client says its conversation is, for session policies.
        body_bytes: Size of the body, a measure of the work that the prompts are.
        reads_cache: False where the logprobs of the prompt itself are asked for: the engine
            computes all of it, whatever it has cached.
        has_engine_arguments: The body has ``vllm_xargs``, which ``strip_report_mode`` looks into.
    """

    endpoint: Endpoint
    model: str | None
    prompts: tuple[Prompt, ...] = field(repr=False)
    stream: bool = False
    max_tokens: int | None = None
    choices: int = 1
    cache_salt: str | None = field(default=None, repr=False)
    lora_name: str | None = None
    session: str | None = field(default=None, repr=False)
    body_bytes: int = 0
    reads_cache: bool = True
    has_engine_arguments: bool = False


class Coverage(str, Enum):
    """How much of the engine's prompt the token ids stand for."""

    WHOLE = "whole"  # exactly the engine's ids
    PREFIX = "prefix"  # exactly the engine's first ids; more follow (images, audio)
    UNKNOWN = "unknown"  # nothing is known; the ids are empty


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """Token ids of one prompt and all else that its block keys depend on.

    Attributes:
        token_ids: The ids that are certain; empty where nothing is.
        coverage: What the ids cover.
        reason: Why the coverage is not ``WHOLE``; None where it is. One of a small fixed set.
        lora_name: Adapter the prompt runs with.
        cache_salt: Salt of the first block.
        extra_keys: Multimodal keys by block; None as long as ids end before the first medium.
    """

    token_ids: TokenIds = field(repr=False)
    coverage: Coverage = Coverage.WHOLE
    reason: str | None = None
    lora_name: str | None = None
    cache_salt: str | None = field(default=None, repr=False)
    extra_keys: tuple[Any, ...] | None = field(default=None, repr=False)

    @property
    def exact(self) -> bool:
        """Whether the ids are the engine's whole prompt."""
        return self.coverage is Coverage.WHOLE
