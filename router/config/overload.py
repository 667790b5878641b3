"""Configures queues and refusals for replicas without room."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from router.config.rules import Location, repeated
from router.config.section import Section
from router.config.values import (
    PLAIN,
    Count,
    HeaderName,
    Items,
    KeyName,
    Seconds,
    TokenCount,
)


class OverloadConfig(Section, frozen=True):
    """How much is sent to a replica at a time, and in which order the rest waits."""

    max_in_flight: Count | None = None
    """Change it when requests should wait in the router, and not in the engines: the requests under
    way at one replica, some more than it computes at a time. With
    `replicas[].max_concurrent_requests`, the smaller one counts."""
    max_prefill_tokens: TokenCount | None = None
    """Prompt tokens to compute that are under way at one replica. Null: any number. With both null,
    no request waits.

    Change it when requests should wait in the router by their prompt tokens to compute, those whose
    first response token is not back; a replica without any takes a prompt of any length."""
    max_waiting: Count = 1024
    """Requests that wait for one model; more are refused with 429.

    Change it when more or fewer requests should wait for one model; each is held in memory, and
    counts for `server.max_concurrent_requests` and `max_buffered_bytes`."""
    max_waiting_tokens: TokenCount = 16 * 1024 * 1024
    """Change it when more or less should wait, by what it costs: prompt tokens to compute, and the
    usual length of a response."""
    max_wait_s: Seconds = 30.0
    """The longest that one waits; then it is refused with 503.

    Change it when clients wait for longer, or give up sooner."""
    timeout_header: HeaderName | None = "x-request-timeout"
    """Change it when a gateway sends it in another header: the seconds after which its client wants
    no response any more. It can only shorten `max_wait_s`."""
    ttft_is_deadline: bool = False
    """Change it when a first token after its objective (`x-llm-d-slo-ttft-ms`) is of no use: a
    request that would wait longer for room is refused with 503, as by `timeout_header`."""
    priorities: Annotated[Items[KeyName], Field(min_length=1, max_length=16)] = (
        "high",
        "normal",
        "low",
    )
    """Change it when you have other classes; highest first."""
    default_priority: KeyName = "normal"
    """The class of requests for which neither their key nor their header names one.

    Change it when requests without a priority of their own should be of another class."""
    priority_header: HeaderName | None = None
    """Names a request's priority, where clients are trusted with that; it cannot be above that of
    the key. Then `x-llm-d-inference-objective` does, too.

    Change it when clients, or a gateway before the router, may mark urgent requests. With a key
    that has a `priority`, not above that."""
    tenant_header: HeaderName | None = None
    """Names a request's tenant, where all come through a gateway that sets it; else it is the
    holder of the key. Then `x-llm-d-inference-fairness-id` does, too.

    Change it when all requests come with the key of a gateway that names their tenants."""
    breaker_failures: Annotated[int, Field(ge=1, le=100), PLAIN] | None = None
    """Change it when replicas pass their checks and fail requests all the same: one that failed so
    many of the last twice as many gets none for a while."""
    breaker_open_s: Seconds = 5.0
    """For how long, until one request may try; twice as long after each try that fails."""
    breaker_max_open_s: Seconds = 60.0
    """No longer than this, however often a try fails."""
    max_back_off_s: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False), PLAIN] = 10.0
    """The longest that a replica gets nothing because it answered 429 or 503 with Retry-After; 0:
    no such answer matters.

    Change it when replicas that answer 429 or 503 with `Retry-After` should be left alone for
    longer, or not at all (0); [a 429 by one tenant
    only](operations.md#when-replicas-are-full), where there are several."""
    slow_start_s: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False), PLAIN] = 0.0
    """Change it when a replica that joins others has to warm up: for so long it counts as slower,
    and its limits above are smaller, from a tenth to all."""
    ageing_tokens_per_s: Annotated[
        float, Field(ge=0, le=1_000_000_000, allow_inf_nan=False), PLAIN
    ] = 1000.0
    """Shorter requests go first; each second of waiting counts as so many tokens less.

    Change it when long requests wait too long behind short ones (raise), or short ones behind long
    ones; a request of n tokens is overtaken only by what comes in the n / `ageing_tokens_per_s`
    seconds after it, and one of more than 4,096 tokens for no longer than one of so many."""

    @property
    def is_queueing(self) -> bool:
        """Return whether requests wait at all."""
        return self.max_in_flight is not None or self.max_prefill_tokens is not None

    def contradictions(self) -> Iterator[tuple[Location, str]]:
        """Classes that appear twice, a default that is not among them, and times that defeat each
        other."""
        yield from repeated("priorities", self.priorities)
        if self.breaker_max_open_s < self.breaker_open_s:
            rule = f"must be at least breaker_open_s ({self.breaker_open_s:g})"
            yield ("breaker_max_open_s",), f"{self.breaker_max_open_s:g}; {rule}"
        if self.default_priority not in self.priorities:
            known = ", ".join(self.priorities)
            yield ("default_priority",), f"{self.default_priority!r}; expected one of {known}"
