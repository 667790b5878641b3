"""Request bodies: JSON in, checked values out.

Fields that would change the response in a way the engine cannot follow are refused; unknown fields
are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from kvevents.errors import UNREADABLE
from kvroute_engine.http.chat import Chat
from kvroute_engine.http.errors import InvalidRequest
from kvroute_engine.http.faults import MAX_FACTOR, MAX_SECONDS

MAX_PROMPTS = 256
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_STOP_TOKENS = 1024
MAX_NAME_CHARS = 256
MAX_SALT_CHARS = 4096
MAX_MESSAGES = 16_384
MIN_PRIORITY, MAX_PRIORITY = -(2**63), 2**63 - 1
_MAX_SHOWN_CHARS = 200
DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions."""

_PROMPT_RULE = "must be a string, a list of strings, a list of token ids or a list of such lists"

Body = TypeVar("Body")
_Messages = Annotated[list[dict[str, Any]], msgspec.Meta(max_length=MAX_MESSAGES)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=2**31)]
_TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
_Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)]
_Stop = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_STOP_CHARS)]


class StreamOptions(msgspec.Struct, frozen=True):
    """The reports of a stream besides its tokens."""

    include_usage: bool = False
    """A last event with the usage."""
    continuous_usage_stats: bool = False
    """The usage so far in every event."""


class GenerateBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of both kinds of completions."""

    model: _Name | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: _Count | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: _Stop | Annotated[list[_Stop], msgspec.Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[_TokenId], msgspec.Meta(max_length=MAX_STOP_TOKENS)] | None = (
        None
    )
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    cache_salt: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    """Passed to the lower tiers."""
    priority: Annotated[int, msgspec.Meta(ge=MIN_PRIORITY, le=MAX_PRIORITY)] = 0
    """Lower goes first; read where the engine schedules by priority."""

    # Refused unless they have their neutral value; see `refuse_unsupported`.
    n: int | None = None
    best_of: int | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    use_beam_search: bool | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: dict[str, float] | None = None
    prompt_logprobs: int | None = None

    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=-1, le=2**63 - 1)] | None = None
    """Prompt tokens to keep; -1: as many as leave room for one token."""
    truncation_side: Literal["left", "right"] | None = None
    """The side that is cut; None: the left one, behind the special tokens that begin a text."""

    @property
    def stops(self) -> tuple[str, ...]:
        """Return the stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        """Return whether the stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wants_running_usage(self) -> bool:
        """Return whether every event of the stream has the usage so far."""
        return (
            self.wants_usage
            and self.stream_options is not None
            and self.stream_options.continuous_usage_stats
        )


class CompletionBody(GenerateBody, frozen=True, kw_only=True):
    """Body of /v1/completions."""

    prompt: str | list[str | int | list[_TokenId]]
    add_special_tokens: bool = True
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    prompt_embeds: Any = None

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, each a text or token ids.

        `prompt` has four forms: "text", ["text", ...], [1, 2, ...] (one prompt) and
        [[1, 2, ...], ...].

        Raises:
            InvalidRequest: It has another form.
        """
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise InvalidRequest(
                "prompt", "an empty list", "must hold at least one prompt or token id"
            )
        if isinstance(self.prompt[0], int):
            return [_ids(self.prompt)]
        if len(self.prompt) > MAX_PROMPTS:
            raise InvalidRequest(
                "prompt", f"{len(self.prompt)} prompts", f"must be at most {MAX_PROMPTS}"
            )
        return [_one_of_many(item, index) for index, item in enumerate(self.prompt)]


class ChatBody(GenerateBody, frozen=True, kw_only=True):
    """Body of /v1/chat/completions."""

    messages: _Messages
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    max_completion_tokens: _Count | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    tool_choice: Any = None


class TokenizeTextBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of /tokenize with a text."""

    prompt: str
    model: _Name | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class TokenizeChatBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of /tokenize with a conversation."""

    messages: _Messages
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    model: _Name | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of /detokenize."""

    tokens: list[_TokenId]
    model: _Name | None = None


class HangFault(
    msgspec.Struct, frozen=True, tag_field="kind", tag="hang", forbid_unknown_fields=True
):
    """No step begins for `seconds`."""

    seconds: Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)]


class SlowFault(
    msgspec.Struct, frozen=True, tag_field="kind", tag="slow", forbid_unknown_fields=True
):
    """Each step takes `factor` times as long; 1 ends it."""

    factor: Annotated[float, msgspec.Meta(ge=1, le=MAX_FACTOR)]


class CrashFault(
    msgspec.Struct, frozen=True, tag_field="kind", tag="crash", forbid_unknown_fields=True
):
    """The process ends at once."""


class RestartFault(
    msgspec.Struct, frozen=True, tag_field="kind", tag="restart", forbid_unknown_fields=True
):
    """The process ends at once and starts again with an empty cache."""


class DropEventsFault(
    msgspec.Struct, frozen=True, tag_field="kind", tag="drop_events", forbid_unknown_fields=True
):
    """The next `batches` of events are numbered and not sent."""

    batches: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]


Fault = HangFault | SlowFault | CrashFault | RestartFault | DropEventsFault

# Fields that shape the response, with the only value that the engine supports.
_ONLY_VALUES: dict[str, object] = {
    "n": 1,
    "best_of": 1,
    "top_p": 1,
    "min_p": 0,
    "min_tokens": 0,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "use_beam_search": False,
    "include_stop_str_in_output": False,
    "logit_bias": {},
    "echo": False,
    "suffix": "",
    "top_logprobs": 0,
    "response_format": {"type": "text"},
}
_NEVER = ("prompt_logprobs", "prompt_embeds")
_NEUTRAL_TOP_K = (None, 0, -1)


def decode(body: bytes, kind: type[Body]) -> Body:
    """Read a body.

    Raises:
        InvalidRequest: It is not JSON, or breaks a rule of *kind*. The error names types and
            fields, and quotes nothing.
    """
    result: Body = _decode(body, kind)
    return result


def _decode(body: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        found, _, path = str(error).partition(" - at ")
        param = path.strip("`").removeprefix("$").removeprefix(".") or "body"
        raise InvalidRequest(
            param[:_MAX_SHOWN_CHARS], found[:_MAX_SHOWN_CHARS], "see the OpenAI API"
        ) from None
    except UNREADABLE:
        raise InvalidRequest(
            "body", f"{len(body)} bytes that are not JSON", "must be a JSON object in UTF-8"
        ) from None


def decode_tokenize(body: bytes) -> TokenizeTextBody | TokenizeChatBody:
    """Read a body of /tokenize; it is a conversation if it has `messages`.

    Raises:
        InvalidRequest: It has neither form.
    """
    fields = decode(body, dict[str, msgspec.Raw])
    return (
        decode(body, TokenizeChatBody) if "messages" in fields else decode(body, TokenizeTextBody)
    )


def decode_fault(body: bytes) -> Fault:
    """Read a body of /faults.

    Raises:
        InvalidRequest: Unknown fault name, or values out of range.
    """
    fault: Fault = _decode(body, Fault)
    return fault


def conversation(body: ChatBody | TokenizeChatBody) -> Chat:
    """Return the chat in a body.

    Raises:
        InvalidRequest: A message has no role, or fields contradict each other.
    """
    if not body.messages:
        raise InvalidRequest("messages", "an empty list", "must hold at least one message")
    if body.continue_final_message and body.add_generation_prompt:
        rule = "must be false where add_generation_prompt is true, which is its default"
        raise InvalidRequest("continue_final_message", "true", rule)
    for index, message in enumerate(body.messages):
        if not isinstance(message.get("role"), str):
            raise InvalidRequest(
                f"messages[{index}].role", "not a string", "every message must have a role"
            )
    documents = {} if body.documents is None else {"documents": body.documents}
    return Chat(
        messages=body.messages,
        tools=body.tools,
        template_arguments={**documents, **(body.chat_template_kwargs or {})},
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        add_special_tokens=body.add_special_tokens,
    )


def refuse_unsupported(body: GenerateBody) -> None:
    """Refuse fields that would change the response and are not supported.

    Raises:
        InvalidRequest: Such a field is given and does not have its neutral value.
    """
    for name, only in _ONLY_VALUES.items():
        value = getattr(body, name, None)
        if value is not None and value != only:
            raise InvalidRequest(
                name,
                _shown(value),
                f"not supported by this engine; must be left out or {_shown(only)}",
            )
    for name in _NEVER:
        if getattr(body, name, None) is not None:
            raise InvalidRequest(name, "given", "not supported by this engine; must be left out")
    if body.top_k not in _NEUTRAL_TOP_K:
        raise InvalidRequest(
            "top_k", str(body.top_k), "this engine samples from all tokens; must be left out"
        )
    _refuse_log_probabilities(body)
    if isinstance(body, ChatBody) and body.tool_choice not in (None, "auto", "none"):
        raise InvalidRequest(
            "tool_choice",
            "a tool to be called",
            "this engine calls no tools; must be auto, none or left out",
        )


def _refuse_log_probabilities(body: GenerateBody) -> None:
    wanted = getattr(body, "logprobs", None)
    if wanted is not None and wanted is not False:
        raise InvalidRequest(
            "logprobs", "given", "this engine does not report probabilities; must be left out"
        )


def _shown(value: object) -> str:
    return str(value) if isinstance(value, (bool, int, float)) else "a value" if value else "empty"


def _one_of_many(item: object, index: int) -> str | list[int]:
    if isinstance(item, str):
        return item
    if isinstance(item, list):
        return item
    raise InvalidRequest(f"prompt[{index}]", type(item).__name__, _PROMPT_RULE)


def _ids(values: Sequence[object]) -> list[int]:
    ids = [value for value in values if isinstance(value, int)]
    if len(ids) < len(values):
        raise InvalidRequest("prompt", "token ids among other things", _PROMPT_RULE)
    return ids


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Refuse ids that the model does not have.

    Args:
        token_ids: Ids as the client sent them.
        vocab_size: One more than the model's largest id.
        param: Their field in the body, for the error.

    Raises:
        InvalidRequest: An id is out of range.
    """
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        index = next(
            index for index, token_id in enumerate(token_ids) if not 0 <= token_id < vocab_size
        )
        raise InvalidRequest(
            f"{param}[{index}]",
            "a token id out of range",
            f"must be at least 0 and below {vocab_size}",
        )
