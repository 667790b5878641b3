"""The keys of clients and operators, and their options."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from router.config.section import Section
from router.config.values import PLAIN, Count, Items, KeyName, Secret, TokenCount


class OperatorKeyConfig(Section, frozen=True):
    """One of several keys, so that each holder's can be changed by itself."""

    name: KeyName
    """The name of the holder; it may appear in logs."""
    key: Secret
    """Sent by the holder as `Authorization: Bearer` or `x-api-key`."""


class ClientKeyConfig(OperatorKeyConfig, frozen=True):
    """The same for clients."""

    cache_salt: Secret | None = None
    """Added to every prompt sent with this key, so that its holders share cached blocks only with
    those of the same salt.

    Change it when others must not learn what the holder's prompts are: see
    [security.md](security.md#what-caches-tell)."""
    priority: KeyName | None = None
    """The highest priority class of its requests; null: overload.default_priority.

    Change it when its requests should go before others, or after them, [while requests
    wait](operations.md#when-replicas-are-full)."""
    share: Annotated[float, Field(ge=0.001, le=1000, allow_inf_nan=False), PLAIN] = 1.0
    """Change it when its holder should get more or less of the replicas' time than others of the
    same priority, while requests wait."""
    requests_per_minute: Count | None = None
    """In any 60 s; null: any number.

    Change it when its holder may send so many requests in any 60 s; more get 429 with
    `Retry-After`."""
    tokens_per_minute: TokenCount | None = None
    """Change it when its holder may use so many tokens in any 60 s: of prompts (cached ones too)
    and of responses, which are counted at their end. A prompt over the whole limit passes after an
    idle minute."""
    max_in_flight: Count | None = None
    """Change it when it may have so many requests at a time, those that wait included; with several
    routers a burst may pass it, see [several routers](operations.md#several-routers)."""
    models: Items[Annotated[str, Field(min_length=1, max_length=256), PLAIN]] | None = None
    """Models and adapters that it is for; null: all.

    Change it when it is not for every model and adapter; `*` stands for any characters. Others get
    403, and are not listed."""

    @property
    def is_limited(self) -> bool:
        """Return whether anything has to be counted or checked."""
        limits = (self.requests_per_minute, self.tokens_per_minute, self.max_in_flight, self.models)
        return any(limit is not None for limit in limits)
