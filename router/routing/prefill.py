"""Decides whether another replica computes a request's prompt than its response, and which one.

Roles decide who may:

    role      requests are sent there   computes prompts for
    both      yes                       replicas of role `decode`
    decode    yes                       none
    prefill   no                        all others

The replica of the response is chosen first, as for every request. Only where it would have to
compute much of the prompt is it worth moving a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import msgspec

from router.fleet.replica import Replica
from router.index.prompt import HashedPrompt
from router.policies.types import Candidate, Ranked
from router.prompt.endpoints import FORMS
from router.prompt.prompts import PromptSpec
from router.routing.question import RankChoice, RankQuestion

_RANK_OF_ITS_OWN = RankChoice(is_read=False, may_pull=False)
"""A prefiller gets neither a rank nor a peer to pull from."""

RankReplicas: TypeAlias = Callable[
    [RankQuestion, Iterable[Replica]], tuple[Sequence[Ranked], Sequence[Candidate]]
]


class Serving(NamedTuple):
    """Holds the replicas that serve a model or an adapter, by id."""

    able: Mapping[str, Replica]
    """Replicas that requests are sent to."""
    prefillers: Mapping[str, Replica]
    """Replicas that only compute prompts."""
    may_split: bool
    """True if a prompt may be computed elsewhere than where its request is sent."""
    is_by_sglang: bool
    """True if requests are sent to no other engine."""

    @staticmethod
    def of(replicas: Iterable[Replica], splits: bool) -> Serving:
        """Sort replicas by their roles.

        Args:
            splits: False if no prompt is ever computed elsewhere.
        """
        able: dict[str, Replica] = {}
        prefillers: dict[str, Replica] = {}
        for replica in replicas:
            (able if replica.takes_requests else prefillers)[replica.id] = replica
        roles = {replica.config.role for replica in able.values()}
        may_split = bool(able and prefillers) or roles >= {"both", "decode"}
        is_by_sglang = bool(able) and all(replica.is_of("sglang") for replica in able.values())
        return Serving(able, prefillers, splits and may_split, is_by_sglang)


@dataclass(frozen=True, slots=True)
class PrefillPlanner:
    """Chooses the replica that computes a prompt."""

    rank: RankReplicas
    """`RoutePlanner.rank`."""
    min_uncached_tokens: int
    """The least to compute at the replica of the response."""

    def allows(self, spec: PromptSpec, prompts: Collection[HashedPrompt]) -> bool:
        """Return whether engines can compute this prompt apart from its response.

        Args:
            prompts: Those that are looked up: none where engines do not read their cache.
        """
        return (
            len(prompts) == len(spec.prompts) == spec.choices == 1
            and FORMS[spec.endpoint].may_split
            and spec.stored_response is None  # the replica that has it knows the prompt alone
        )

    def prefiller(
        self, question: RankQuestion, serving: Serving, chosen: Candidate
    ) -> Candidate | None:
        """Choose the replica that computes the prompt; None: the chosen one itself."""
        # What the replica only waits for counts as well: its engine would not wait for it again.
        if question.prompt_tokens - chosen.cached_tokens < self.min_uncached_tokens:
            return None
        others = [each for each in serving.prefillers.values() if not each.removed]
        if serving.able[chosen.replica_id].config.role == "decode":
            able = serving.able.values()
            others += [each for each in able if each.config.role == "both" and not each.removed]
        if not others:
            return None
        request = msgspec.structs.replace(question.request, is_for_prefill=True)
        asked = replace(question, request=request, choice=_RANK_OF_ITS_OWN)
        ranking, _ = self.rank(asked, others)
        return ranking[0].candidate if ranking else None
