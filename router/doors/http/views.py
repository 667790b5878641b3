"""The bodies of the router's own responses, as types: what endpoints send, commands and tests read,
and the OpenAPI document describes. Here are those that stand by themselves.

msgspec structs, since `/route` and `/overview` are asked often: 256 replicas take 0.5 ms to encode.
The string under a field is its description in the OpenAPI document. Where a part keeps statistics
for people, their type is that of the response.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class View(msgspec.Struct, frozen=True, kw_only=True):
    """The base of all of them."""


class StatusView(View, frozen=True, kw_only=True, omit_defaults=True):
    """The state of the router: alive, or ready."""

    status: Literal["ok", "ready", "not ready"]
    reason: str | None = None
    """Why it is not ready."""


class ErrorDetails(View, frozen=True, kw_only=True):
    """The error of a request."""

    message: str
    """Place, value and rule; never anything of a prompt."""
    type: str
    """OpenAI's type of the error."""
    code: str
    """The same for every error of one kind."""


class ErrorView(View, frozen=True, kw_only=True):
    """An error, in the form that OpenAI's SDKs understand."""

    error: ErrorDetails


class AnthropicErrorView(View, frozen=True, kw_only=True):
    """An error, in the form that Anthropic's SDKs understand."""

    type: Literal["error"] = "error"
    error: ErrorDetails


class RemovedReplica(View, frozen=True, kw_only=True):
    """A replica that is no longer known."""

    removed: str
    """The id of the replica."""


# --- models ---------------------------------------------------------------------------------------


class ModelEntry(View, frozen=True, kw_only=True):
    """A model or an adapter, as in OpenAI's API."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "kvroute"
    root: str
    """The model itself, or the one that an adapter is for."""
    parent: str | None
    """The model that an adapter is for."""
    max_model_len: int | msgspec.UnsetType | None = msgspec.UNSET
    """The longest prompt and response together, where engines report it; of several the least."""


class ModelList(View, frozen=True, kw_only=True):
    """Every name that some healthy replica serves. Entries have all other fields that the engine's
    own have."""

    object: Literal["list"] = "list"
    data: list[ModelEntry]
