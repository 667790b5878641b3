"""One request, as replicas are ranked for it, and its placement, as a cache follows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from router.index.base import SourceId
from router.index.index import PrefixIndex
from router.index.prompt import HashedPrompt
from router.policies.types import Candidate, RouteRequest


class RankChoice(NamedTuple):
    """A request's limits on the choice of a data-parallel rank."""

    is_read: bool = True
    """True if the engine reads the rank that it is asked for. If not, only what every rank would
    reuse counts."""
    asked: int | None = None
    """The rank that the client asks for, where clients may."""
    may_pull: bool = True
    """True if the engine reads from which peer it is to pull."""


ANY_RANK = RankChoice()
UNREAD_RANK = RankChoice(is_read=False)


@dataclass(frozen=True, slots=True)
class RankQuestion:
    """One request, as replicas are ranked for it."""

    request: RouteRequest
    """The fields that the policy sees."""
    index: PrefixIndex | None = None
    """The model's index; None: it names no model."""
    prompts: Sequence[HashedPrompt] = ()
    """From `prepare`; none where they are not looked at."""
    choice: RankChoice = ANY_RANK
    """Limits on the choice of a rank."""
    tenant: str = ""
    """The tenant, where replicas may distinguish them. Never in a metric or a log."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, as far as they are known."""
        return self.request.prompt_tokens


@dataclass(frozen=True, slots=True)
class Placement:
    """Holds the replica and the cache that one request is sent to, or that compute its prompt."""

    question: RankQuestion
    candidate: Candidate
    """The ranked candidate, with its hit."""
    source: SourceId | None
    """The cache that it meets there; None: the engine chooses."""
    uncached_tokens: int
    """Prompt tokens to compute there."""
    keep: Sequence[int] = ()
    """Hinted lengths of the prompt at which the engine keeps windows and states."""

    @property
    def dp_rank(self) -> int | None:
        """The replica's rank that gets it; None: the engine chooses, or there is only one."""
        return None if self.source is None else self.candidate.dp_rank


def uncached_tokens(prompt_tokens: int, candidate: Candidate) -> int:
    """Prompt tokens that a replica will have to compute.

    What it is already computing for another request does not count: otherwise a burst of equal
    prompts would look like a queue and scatter.
    """
    return max(prompt_tokens - max(candidate.cached_tokens, candidate.recent_tokens), 0)
