"""Configures the policy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from router.config.rules import Location, broken_rule
from router.config.section import Section
from router.config.values import PLAIN, HeaderName, Seconds
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
    """How a replica is chosen."""

    name: PolicyName = LEAST_DELAY
    """Change it when you want another of them (`prefix`: a request's own wait only, which was the
    default before), or a plug-in (entry point group `kvroute.policies`)."""
    weights: Weights = Weights()
    session_header: HeaderName = "x-session-id"
    """Names the session, for the policy `session`; in lower case.

    Change it when clients name their session in another header; used by `session`. Without the
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
        """Options that no policy reads."""
        if self.name in BUILT_IN and self.options:
            yield (
                ("options",),
                f"a mapping of {len(self.options)}; the built-in policies take none",
            )
