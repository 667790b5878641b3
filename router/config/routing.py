"""The options that decide which replica is chosen, where prompts are computed, and when requests
wait."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from router.config.section import Location, Section, broken_rule, repeated
from router.config.values import PLAIN, Count, HeaderName, Items, KeyName, Seconds, TokenCount
from router.policies.policies import BUILT_IN, LEAST_DELAY, policy_names
from router.policies.types import Weights


def _check_policy(name: str) -> str:
    if name not in BUILT_IN and name not in policy_names():
        raise broken_rule(f"{name!r}; expected one of {', '.join(policy_names())}")
    return name


PolicyName = Annotated[
    str, Field(min_length=1, max_length=256), PLAIN, AfterValidator(_check_policy)
]


class PolicyConfig(Section, frozen=True):
    """Configures how a replica is chosen."""

    name: PolicyName = LEAST_DELAY
    """Change it when you want another of them (`prefix`: a request's own wait only, which was the
    default before), or a plug-in (entry point group `kvroute.policies`)."""
    weights: Weights = Weights()
    session_header: HeaderName = "x-session-id"
    """Change it when clients name their session in another header; used by `session`. Without the
    header, `session_id`, `prompt_cache_key`, `conversation`, `previous_response_id` or `user` of
    the body is used."""
    recent_ttl_s: Seconds = 5.0
    """How long a prefix that was sent somewhere counts as cached there before any event shows it.

    Change it when prefill takes longer than this, and bursts of equal prompts spread over replicas;
    only with `prefix`."""
    recent_max_entries: Annotated[int, Field(ge=1, le=100_000_000), PLAIN] = 262_144
    """Change it when `kvroute_recent_prefix_keys` stays at the bound; an entry stands for 64 prompt
    tokens and takes some 80 bytes."""
    mirror_max_keys: Annotated[int, Field(ge=1, le=1_000_000_000), PLAIN] = 1_048_576
    """Change it when `kvroute_mirror_kept_keys` stays at the bound: the caches together hold more
    than 64 times as many tokens, or very many prompts that are short or share all but their ends. A
    key takes some 400 bytes, most of them its prompt's token ids; each prompt counts for four more,
    and is remembered only while its cache holds some of it: 3 MB for 500,000 cached tokens."""
    options: dict[str, Any] = Field(default_factory=dict)
    """For a plug-in; it checks them.

    Change it when a plug-in has options; the built-in policies have none."""

    def contradictions(self) -> Iterator[tuple[Location, str]]:
        """Yield options that no policy reads."""
        if self.name in BUILT_IN and self.options:
            yield (
                ("options",),
                f"a mapping of {len(self.options)}; the built-in policies take none",
            )


class PrefillConfig(Section, frozen=True):
    """Configures when a prompt is computed by another replica than the response, where
    `replicas[].role` allows it."""

    min_uncached_tokens: Annotated[int, Field(ge=0, le=1_000_000_000), PLAIN] = 512
    """So many prompt tokens, at least, must be left to compute at the chosen replica; 0: it always
    computes prompts itself.

    Change it when moving a prompt's cache between replicas costs less (lower) or more (higher) than
    to compute so much beside running responses; llm-d's `nonCachedTokens`."""
    handed_over_by: Literal["sidecar", "router"] = "sidecar"
    """Who has the other replica compute the prompt, for requests through the proxy.

    Change it when no sidecar stands before the replicas: with `router`, vLLM's `NixlConnector` or a
    store that the engines share moves the cache."""


class OverloadConfig(Section, frozen=True):
    """Configures how much is sent to a replica at a time, and in which order the rest waits."""

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
        """Yield classes that appear twice, a default that is not among them, and times that defeat
        each other."""
        yield from repeated("priorities", self.priorities)
        if self.breaker_max_open_s < self.breaker_open_s:
            rule = f"must be at least breaker_open_s ({self.breaker_open_s:g})"
            yield ("breaker_max_open_s",), f"{self.breaker_max_open_s:g}; {rule}"
        if self.default_priority not in self.priorities:
            known = ", ".join(self.priorities)
            yield ("default_priority",), f"{self.default_priority!r}; expected one of {known}"
