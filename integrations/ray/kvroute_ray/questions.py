"""Makes the questions to the router about a call. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_PROMPTS = ("token_ids", "prompt", "messages", "input")
_ROUTERS_OWN = (
    *("selection_id", "replicas", "avoid", "allowed_worker_ids", "dp_rank", "replica"),
    *("worker_id", "endpoint"),
)
"""Fields of a question by which a client could choose a replica, or take another's booking."""

MOST_NAMES = 1024
"""Replicas that a question can name."""


class Prompt(NamedTuple):
    """The argument of a call that is a request with a prompt."""

    place: int | str
    """Its position, or its name."""
    argument: Any
    fields: Mapping[str, Any]
    """It as plain data."""

    def with_fields(self, fields: Mapping[str, Any]) -> Any:
        """Return a copy of the argument in which these are set."""
        if isinstance(self.argument, Mapping):
            return {**self.argument, **fields}
        return self.argument.model_copy(update=dict(fields))


def prompt_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Prompt | None:
    """Return the first argument of a call that is a request with a prompt; None if none is.

    Args:
        args: Mappings, pydantic models, and whatever else.
        kwargs: The same, by name.
    Raises:
        ValueError: A model cannot be made plain.
    """
    places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for place, argument in places:
        fields = _fields(argument)
        if fields is not None and any(fields.get(name) is not None for name in _PROMPTS):
            return Prompt(place, argument, fields)
    return None


def _fields(argument: Any) -> Mapping[str, Any] | None:
    if isinstance(argument, Mapping):
        return argument
    dump = getattr(argument, "model_dump", None)
    if dump is None or not any(hasattr(argument, name) for name in _PROMPTS):
        return None
    fields: Mapping[str, Any] = dump(mode="json", exclude_unset=True, exclude_none=True)
    return fields


def question(
    prompt: Mapping[str, Any],
    selection_id: str,
    model: str | None = None,
    endpoint: str | None = None,
    only: Sequence[str] = (),
    avoid: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the body of `POST /select_and_reserve`.

    Args:
        prompt: A request as a client sent it; what is the router's own in it is left out.
        selection_id: Of the booking.
        model: In place of the request's.
        endpoint: The API whose form the prompt has, where it does not show that.
        only: The replicas that may be chosen; empty: all that the router knows.
        avoid: Those that may not.
    """
    asked = {name: value for name, value in prompt.items() if name not in _ROUTERS_OWN}
    asked["selection_id"] = selection_id
    if model is not None:
        asked.pop("model_name", None)
        asked["model"] = model
    if endpoint is not None:
        asked["endpoint"] = endpoint
    if only:
        asked["replicas"] = [*only[:MOST_NAMES]]
    if avoid:
        asked["avoid"] = [*avoid[:MOST_NAMES]]
    return asked
