"""What becomes of requests when the replicas have no room for more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from router.config.document import Location
from router.config.section import Section
from router.config.values import PLAIN, Count, HeaderName, Items, KeyName, Seconds, TokenCount


class OverloadConfig(Section, frozen=True):
    """How much is sent to a replica at a time, and in which order the rest waits."""

    max_in_flight: Count | None = None
    """Requests under way at one replica; more wait in the router. Null: any number."""
    max_prefill_tokens: TokenCount | None = None
    """Prompt tokens to compute that are under way at one replica. Null: any number. With both null,
    no request waits."""
    max_waiting: Count = 1024
    """Requests that wait for one model; more are refused with 429."""
    max_waiting_tokens: TokenCount = 16 * 1024 * 1024
    """What these cost together: prompt tokens to compute, and the usual length of a response."""
    max_wait_s: Seconds = 30.0
    """The longest that one waits; then it is refused with 503."""
    timeout_header: HeaderName | None = "x-request-timeout"
    """Names the seconds after which a client wants no response any more; can only shorten
    max_wait_s."""
    priorities: Annotated[Items[KeyName], Field(min_length=1, max_length=16)] = (
        "high",
        "normal",
        "low",
    )
    """The priority classes, highest first."""
    default_priority: KeyName = "normal"
    """Of requests for which neither their key nor their header names one."""
    priority_header: HeaderName | None = None
    """Names a request's priority, where clients are trusted with that; it cannot be above that of
    the key."""
    tenant_header: HeaderName | None = None
    """Names whose request it is, where all come through a gateway that says so; else it is the
    holder of the key."""
    breaker_failures: Annotated[int, Field(ge=1, le=100), PLAIN] | None = None
    """A replica that failed so many of the last twice as many requests gets none for a while, then
    one to try; null: only health decides."""
    breaker_open_s: Seconds = 5.0
    """For how long; twice as long after each try that fails."""
    breaker_max_open_s: Seconds = 60.0
    """But no longer than this."""
    max_back_off_s: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False), PLAIN] = 10.0
    """The longest that a replica gets nothing because it answered 429 or 503 with Retry-After; 0:
    no such answer matters."""
    slow_start_s: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False), PLAIN] = 0.0
    """For how long a replica that joins others gets less: from a tenth to all; 0: all at once."""
    ageing_tokens_per_s: Annotated[
        float, Field(ge=0, le=1_000_000_000, allow_inf_nan=False), PLAIN
    ] = 1000.0
    """Shorter requests go first; each second of waiting counts as so many tokens less."""

    @property
    def is_queueing(self) -> bool:
        """Whether requests wait at all."""
        return self.max_in_flight is not None or self.max_prefill_tokens is not None

    def contradictions(self) -> Iterator[tuple[Location, str]]:
        """Classes that appear twice, a default that is none of them, and times that defeat each
        other."""
        for index, name in enumerate(self.priorities):
            first = self.priorities.index(name)
            if first != index:
                yield ("priorities", index), f"{name!r}; priorities[{first}] has it already"
        if self.breaker_max_open_s < self.breaker_open_s:
            rule = f"must be at least breaker_open_s ({self.breaker_open_s:g})"
            yield ("breaker_max_open_s",), f"{self.breaker_max_open_s:g}; {rule}"
        if self.default_priority not in self.priorities:
            known = ", ".join(self.priorities)
            yield ("default_priority",), f"{self.default_priority!r}; expected one of {known}"
