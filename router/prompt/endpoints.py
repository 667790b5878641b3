"""The request forms that are understood: each with its path, and with what engines do there.

This is all that other files know of a form, except how its body is read (`body/requests.py`) and
described (`router/doors/http/request_bodies.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal, TypeAlias

# Claude Code puts a line with a per-request hash before its system prompt. The engine drops it; a
# prompt that kept it would never share a prefix with another one.
BILLING_HEADER = "x-anthropic-billing-header"
Encoding: TypeAlias = Literal["json", "msgpack"]
"""The form of a body."""
ContentForm: TypeAlias = Literal["string", "openai"]
"""The form in which a chat template reads a message's content: text, or parts."""


class Endpoint(str, Enum):
    """The request forms that are understood; the value is the path."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"
    EMBEDDINGS = "/v1/embeddings"
    CHAT_BATCH = "/v1/chat/completions/batch"
    GENERATE = "/inference/v1/generate"
    ROUTE = "/route"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestForm:
    """The particulars of a form. The defaults are safe with any engine: nothing is written into
    the body."""

    operation: str | None
    """The operation's name in traces, one of OpenTelemetry's `gen_ai.operation.name`; None where
    nothing is sent."""
    fields: tuple[str, ...] = ()
    """Fields of the body that only this form has; a field that no form names is not read."""
    id_fields: tuple[str, ...] = ()
    """Fields that may hold nothing but token ids."""
    generates: bool = True
    """False: a prompt may have the model's whole length, and engines may take a longer one in
    pieces."""
    is_rendered: bool = False
    """vLLM has a path behind it that turns such a body into one for `/inference/v1/generate`."""
    priority_in: Literal["header", "field"] | None = None
    """Where vLLM reads a number to order its queue by; SGLang reads the field at all of these."""
    reads_rank: bool = True
    """False: some engines ignore the data-parallel rank that they are asked for."""
    may_pull: bool = False
    """Engines read a peer to pull the prompt's cache from; or nothing is sent."""
    may_split: bool = False
    """llm-d's sidecar has such a prompt computed elsewhere; or nothing is sent."""
    reads_hints: bool = False
    """Engines read kvroute's own retention hints."""
    reads_arguments: bool = False
    """vLLM reads `vllm_xargs`."""


FORMS: Mapping[Endpoint, RequestForm] = {
    Endpoint.CHAT: RequestForm(
        operation="chat",
        is_rendered=True,
        priority_in="header",
        may_pull=True,
        may_split=True,
        reads_hints=True,
        reads_arguments=True,
    ),
    Endpoint.COMPLETIONS: RequestForm(
        operation="text_completion",
        fields=("prompt_embeds", "suffix"),
        id_fields=("prompt",),
        is_rendered=True,
        priority_in="header",
        may_pull=True,
        may_split=True,
        reads_hints=True,
        reads_arguments=True,
    ),
    Endpoint.RESPONSES: RequestForm(
        operation="chat",
        fields=("instructions", "reasoning", "truncation"),
        is_rendered=True,
        priority_in="header",
        reads_rank=False,  # vLLM before 0.33
        may_pull=True,
        may_split=True,
        reads_arguments=True,
    ),
    Endpoint.MESSAGES: RequestForm(
        operation="chat",
        fields=("system", "thinking", "output_config"),
        is_rendered=True,
        may_pull=True,
        may_split=True,
        reads_arguments=True,
    ),
    Endpoint.EMBEDDINGS: RequestForm(
        operation="embeddings",
        id_fields=("input",),
        generates=False,
        priority_in="field",
        reads_rank=False,  # every vLLM
    ),
    Endpoint.CHAT_BATCH: RequestForm(operation="chat"),
    Endpoint.GENERATE: RequestForm(
        operation="text_completion",
        fields=("features", "content_parts"),
        id_fields=("token_ids",),
        priority_in="field",
        may_split=True,
    ),
    Endpoint.ROUTE: RequestForm(
        operation=None,
        fields=("model_name", "lora_name", "endpoint"),
        id_fields=("token_ids", "prompt"),
        may_pull=True,
        may_split=True,
    ),
}

PROMPT_ENDPOINTS = tuple(endpoint for endpoint in Endpoint if endpoint is not Endpoint.ROUTE)
"""The paths of engines, whose replicas are chosen by the prompt; the other one only asks."""
