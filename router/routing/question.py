"""One request, as replicas are ranked for it and a cache follows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from router.index import HashedPrompt, PrefixIndex
from router.policies import RouteRequest


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
