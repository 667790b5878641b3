"""The bodies of the router's own responses, as types: what endpoints send, commands and tests read,
and the OpenAPI document describes. Here are those that stand by themselves.

msgspec structs, since `/route` and `/overview` are asked often: 256 replicas take 0.5 ms to encode.
The string under a field is its description in the OpenAPI document. Where a part keeps statistics
for people, their type is that of the response.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from router.fleet.replica import Replica


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


def model_list(
    names: Mapping[str, str | None], serving_of: Callable[[str], Sequence[Replica]]
) -> dict[str, Any]:
    """The models that clients may ask for: a `ModelList` whose entries keep all that engines
    report.

    Args:
        names: Every known model and adapter, with the model that an adapter is for.
        serving_of: The healthy replicas that can take requests for a name.
    """
    entries = [
        model_entry(name, parent, serving)
        for name, parent in sorted(names.items())
        if (serving := serving_of(name))
    ]
    return {"object": "list", "data": entries}


def model_entry(name: str, parent: str | None, serving: Sequence[Replica]) -> dict[str, Any]:
    """One model: a `ModelEntry`, and all else that the first replica reports.

    Args:
        serving: The healthy replicas that serve it.
    """
    entry = ModelEntry(id=name, created=int(time.time()), root=parent or name, parent=parent)
    entries = [_entry_of(name, replica) for replica in serving]
    lengths = [length for one in entries if type(length := one.get("max_model_len")) is int]
    found = {**msgspec.to_builtins(entry), **(entries[0] if entries else {})}
    found |= {"id": name, "parent": parent}
    if lengths:
        # A client must not send more than the replica that its request may go to takes.
        found["max_model_len"] = min(lengths)
    return found


def _entry_of(name: str, replica: Replica) -> dict[str, Any]:
    """Return a replica's entry for a model; where it has another name for it, only how much that
    takes."""
    found = replica.model_entries.get(name)
    if found is not None:
        return found
    lengths = [
        length
        for other in replica.served.models
        if type(length := replica.model_entries.get(other, {}).get("max_model_len")) is int
    ]
    return {"max_model_len": min(lengths)} if lengths else {}
