"""Defines the prompts of a request: plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

import msgspec

from router.prompt.endpoints import FORMS, Endpoint
from router.prompt.token_ids import MODEL_LENGTH, TokenIds, Truncation


class TokenPrompt(msgspec.Struct, frozen=True):
    """A prompt that came as token ids."""

    token_ids: TokenIds
    truncation: Truncation | None = None
    is_prefix: bool = False
    """Other ids follow, or keys that are not known: media."""

    def __repr__(self) -> str:
        return f"TokenPrompt({len(self.token_ids)} ids)"


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A prompt that came as text."""

    text: str = field(repr=False)
    add_special_tokens: bool = True
    truncation: Truncation | None = None


class ChatPiece(NamedTuple):
    """Holds the text of one message, or of one part of it."""

    text: str
    is_named: bool
    """True if the client marks all up to here as cached (`cache_control`)."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, in the OpenAI chat form, to be rendered by the model's chat template."""

    messages: Sequence[Mapping[str, Any]] = field(repr=False)
    """The messages as the client sent them (or converted to this form), not yet normalised."""
    tools: Sequence[Mapping[str, Any]] | None = field(default=None, repr=False)
    """In the form that templates get: `type`, `function{name, description, parameters}`."""
    documents: Sequence[Mapping[str, Any]] | None = field(default=None, repr=False)
    """For templates that know retrieval."""
    template_arguments: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The client's `chat_template_kwargs` and what the request's own fields add to them."""
    least_thinking: Mapping[str, Any] | None = field(default=None, repr=False)
    """The same for a template that cannot turn thinking off, where the client asks for that as
    `/v1/messages` has it."""
    add_generation_prompt: bool = True
    """True if the header of the next assistant message follows."""
    continue_final_message: bool = False
    """True if the last message is left open instead."""
    add_special_tokens: bool = False
    """True if BOS and EOS are added to the template's text."""
    merge_inline_system: bool = False
    """True if system messages in mid-conversation move to the front where the template takes them
    nowhere else (`/v1/messages` does)."""
    truncation: Truncation | None = None
    pieces: Sequence[ChatPiece] | None = field(default=None, repr=False)
    """The texts of the messages, where the client's form has parts that *messages* has not."""
    sent: Mapping[str, Any] | None = field(default=None, repr=False)
    """The fields that engines read in different ways, as the client sent them."""
    is_of_responses: bool = False
    """True in `/v1/responses`, which both engines write in a way of its own for gpt-oss."""
    forwarded_ids: TokenIds | None = field(default=None, repr=False)
    """The token ids that a gateway forwards with it; vLLM (0.33) computes them in place of it if
    there are no media."""
    is_sglang: bool = False
    """True if all else is as SGLang reads it, which is asked for token ids with *sent*."""


@dataclass(frozen=True, slots=True)
class OpaquePrompt:
    """A prompt whose token ids only the engine can know, for example embeddings or a stored
    conversation."""

    reason: str


Prompt: TypeAlias = TokenPrompt | TextPrompt | ChatPrompt | OpaquePrompt


def _cut_to(prompt: Prompt, most: int) -> Prompt:
    if isinstance(prompt, OpaquePrompt) or prompt.truncation is None:
        return prompt
    cut = replace(prompt.truncation, max_tokens=most)
    if isinstance(prompt, TokenPrompt):
        return msgspec.structs.replace(prompt, truncation=cut)
    return replace(prompt, truncation=cut)


class PromptSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that routing needs of a request."""

    endpoint: Endpoint
    """The form of the body; for `/route` the form that it stands for."""
    model: str | None
    """The client's name of it: a base model or a LoRA adapter; None lets the engine choose."""
    prompts: tuple[Prompt, ...]
    """One for a chat, as many as the batch holds for completions, embeddings and batched chats."""
    stream: bool = False
    """True if the client wants server-sent events."""
    choices: int = 1
    """How many answers are generated for each prompt (`n`)."""
    cache_salt: str | tuple[str | None, ...] | None = None
    """Keeps cached blocks of different tenants apart. SGLang also takes one for each prompt."""
    lora_name: str | None = None
    """Only where the body names it beside the model; the caller resolves *model*."""
    adapters: tuple[str, ...] = ()
    """All that the body names so; several where each prompt of a batch may have its own."""
    session: str | None = None
    """The client's name for its conversation, for session policies."""
    body_bytes: int = 0
    """Size of the body, a measure of the work that the prompts are."""
    reads_cache: bool = True
    """False where the logprobs of the prompt itself are asked for: the engine computes all of it,
    whatever it has cached."""
    stored_response: str | None = None
    """`previous_response_id`: the response that this one continues. One replica has it."""
    has_engine_arguments: bool = False
    """The body has `vllm_xargs` or `sampling_params`, in which the router owns some fields."""
    has_report_mode: bool = False
    """It found the report mode there."""
    has_priority: bool = False
    """The body has a `priority`."""
    has_transfer_params: bool = False
    """The body has `kv_transfer_params`."""
    keeps_prompt: bool = False
    """`prompt_cache_retention`: the client will go on with this prompt."""

    def salt_of(self, number: int) -> str | None:
        """Return the salt of a prompt, by its place in the batch."""
        salt = self.cache_salt
        return salt[number] if isinstance(salt, tuple) else salt

    @property
    def is_cut_to_model(self) -> bool:
        """Return whether a prompt is cut to the model's length, not yet in numbers."""
        return any(
            not isinstance(prompt, OpaquePrompt)
            and prompt.truncation is not None
            and prompt.truncation.max_tokens == MODEL_LENGTH
            for prompt in self.prompts
        )

    def cut_to(self, model_length: int) -> PromptSpec:
        """Return it with the model's length in numbers.

        Args:
            model_length: Tokens of a prompt and its response.
        """
        most = max(model_length - FORMS[self.endpoint].generates, 0)
        prompts = tuple(_cut_to(prompt, most) for prompt in self.prompts)
        return msgspec.structs.replace(self, prompts=prompts)

    @property
    def may_differ_at_sglang(self) -> bool:
        """Return whether SGLang may read it in another way than vLLM."""
        return any(
            isinstance(prompt, TextPrompt | ChatPrompt)
            or (isinstance(prompt, TokenPrompt) and prompt.truncation is not None)
            for prompt in self.prompts
        )

    def __repr__(self) -> str:
        # Prompts, salts and sessions stay out of logs.
        return f"PromptSpec({self.endpoint.value}, {self.model!r}, {len(self.prompts)} prompts)"


class Coverage(str, Enum):
    """How much of the engine's prompt the token ids cover."""

    WHOLE = "whole"  # exactly the engine's ids
    PREFIX = "prefix"  # exactly the engine's first ids; more follow (images, audio)
    UNKNOWN = "unknown"  # not known; there are no ids


class MessageEnds(msgspec.Struct, frozen=True):
    """The lengths at which a prompt is expected to part from others, by its text; in tokens."""

    expected: tuple[int, ...] = ()
    """Behind its first messages and their parts, ascending."""
    named: tuple[int, ...] = ()
    """Where the client marks that it caches (`cache_control`), ascending."""


NO_ENDS: MessageEnds = MessageEnds()


class TokenizedPrompt(msgspec.Struct, frozen=True):
    """Token ids of one prompt and all else that its block keys depend on."""

    token_ids: TokenIds
    """The ids that are certain; empty where nothing is."""
    coverage: Coverage = Coverage.WHOLE
    """The coverage of the ids."""
    reason: str | None = None
    """Why the coverage is not `WHOLE`; None where it is. One of a small fixed set."""
    lora_name: str | None = None
    """Adapter the prompt runs with."""
    cache_salt: str | None = None
    """Salt of the first block."""
    extra_keys: tuple[Any, ...] | None = None
    """Multimodal keys by block; None as long as ids end before the first medium."""
    ends: MessageEnds = NO_ENDS
    """Where its messages end; empty where they were not asked for."""

    @property
    def exact(self) -> bool:
        """Return whether the ids are the engine's whole prompt."""
        return self.coverage is Coverage.WHOLE

    def __repr__(self) -> str:
        # Ids, salts and keys of media stay out of logs.
        return f"TokenizedPrompt({len(self.token_ids)} ids, {self.coverage.value}, {self.reason})"
