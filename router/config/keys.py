"""The keys of clients and operators, and what comes with a key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

from pydantic import Field

from router.config.document import Location
from router.config.section import Section
from router.config.values import PLAIN, Count, Items, KeyName, Secret, TokenCount


class OperatorKeyConfig(Section, frozen=True):
    """One of several keys, so that each holder's can be changed by itself."""

    name: KeyName
    """Of the holder; it may appear in logs."""
    key: Secret


class ClientKeyConfig(OperatorKeyConfig, frozen=True):
    """The same for clients."""

    cache_salt: Secret | None = None
    """Added to every prompt sent with this key, so that its holders share cached blocks only with
    those of the same salt."""
    priority: KeyName | None = None
    """The highest priority class of its requests; null: overload.default_priority."""
    share: Annotated[float, Field(ge=0.001, le=1000, allow_inf_nan=False), PLAIN] = 1.0
    """Of the replicas' time while requests wait, relative to the other keys."""
    requests_per_minute: Count | None = None
    """In any 60 s; null: any number."""
    tokens_per_minute: TokenCount | None = None
    """The same for tokens, of prompts and responses."""
    max_in_flight: Count | None = None
    """Requests at a time."""
    models: Items[Annotated[str, Field(min_length=1, max_length=256), PLAIN]] | None = None
    """Models and adapters that it is for, `*` standing for any characters; null: all."""

    @property
    def is_limited(self) -> bool:
        """Whether anything has to be counted or checked."""
        limits = (self.requests_per_minute, self.tokens_per_minute, self.max_in_flight, self.models)
        return any(limit is not None for limit in limits)


def same_keys(kind: str, keys: Sequence[OperatorKeyConfig]) -> Iterator[tuple[Location, str]]:
    """Names and keys that appear twice.

    Args:
        kind: The option that lists them.
        keys: All of them.
    """
    for index, each in enumerate(keys):
        for other, earlier in enumerate(keys[:index]):
            if each.name == earlier.name:
                yield (kind, index, "name"), f"{each.name!r}; {kind}[{other}] has it already"
            if each.key == earlier.key:
                yield (kind, index, "key"), f"not shown; {kind}[{other}] has it already"
