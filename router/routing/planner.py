"""Ranks replicas for a request by what each would reuse, what each has to do, and the policy.

A replica with several data-parallel ranks has a cache and a queue for each. It enters the ranking
once, as the rank that the policy prefers if it looks at what each cache is doing, else as the one
where the request would wait least. That rank is asked for whenever it matters: wherever a hit, a
recent prompt or load tells the ranks apart, and for every prompt that is remembered, since the next
one like it should find the same rank.

The core matches, sorts out, and orders, by what a mirror and estimates know of the caches.
Candidates and their reasons are made from what the core found when they are asked for. A plug-in
gets what the core found as columns, and orders it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from msgspec.structs import replace

from router._core import DecidedRanking, Decider
from router.errors import PolicyError
from router.fleet.gate import (
    AT_LIMIT,
    AT_TOKEN_LIMIT,
    BACKING_OFF,
    BEING_PROBED,
    BREAKER_OPEN,
    TENANT_BACKING_OFF,
)
from router.fleet.load import LoadTracker
from router.fleet.replica import Replica
from router.index.base import SourceId
from router.index.index import PrefixIndex
from router.index.mirror import ApproximateCaches, Mirror
from router.index.mirror_types import STEP
from router.index.prompt import HashedPrompt
from router.policies.plug_ins import PlugIn
from router.policies.policies import BuiltInPolicy, session_bytes
from router.policies.standings import Lower, Ranking, Standings
from router.policies.types import Candidate, CandidateLoad, Policy, Ranked, RouteRequest, Weights
from router.prompt.prompts import TokenizedPrompt
from router.routing.booking import CacheVisits
from router.routing.fleets import FleetKeeper
from router.routing.question import RankQuestion
from router.routing.recent_prefixes import RECENT_STEP, RecentPrefixes

MAX_MATCHED_PROMPTS = 64
"""Prompts of one batch that are looked up; the rest counts as uncached."""
_OBSTACLES = (
    None,
    "not healthy",
    "draining",
    AT_LIMIT,
    AT_TOKEN_LIMIT,
    BACKING_OFF,
    TENANT_BACKING_OFF,
    BREAKER_OPEN,
    BEING_PROBED,
    "removed",
)
"""Sentences for `Obstacle` of core/decide/fleet.hpp, by its number."""


@dataclass(frozen=True, slots=True)
class Known:
    """Holds the state that decisions read."""

    load: LoadTracker
    """Counts what this router has in flight at each replica."""
    suspects: Collection[SourceId] = ()
    """The sources of which events were lost, so that their hits are doubtful; it changes with
    them."""
    recent: RecentPrefixes | None = None
    """Which prefixes were just sent where; None: what the mirror has in prefill."""
    mirror: Mirror | None = None
    """Follows every cache: what it is doing, and evicts next; its books are those of the load.
    None: that is not known."""
    approximate: ApproximateCaches | None = None
    """Estimates what caches hold without events, with the mirror; None: that is not estimated."""
    engine_load_stale_after_s: float = 10.0
    """Age from which an engine's own load no longer counts."""


class RoutePlanner:
    """Ranks replicas by one policy. No I/O; the clock is passed in."""

    def __init__(
        self,
        policy: Policy,
        known: Known,
        clock: Callable[[], float] = time.monotonic,
        weights: Weights | None = None,
        random: Random | None = None,
    ) -> None:
        """Keep the parts that a ranking is made from.

        Args:
            policy: A built-in one, which has weights of its own, or a plug-in.
            weights: What things cost, where a plug-in leaves the choice among the ranks of a
                replica to the wait there.
        """
        self._known = known
        self._clock = clock
        self._catch_up: Callable[[], None] | None = None
        self._policy = policy if isinstance(policy, BuiltInPolicy) else PlugIn(policy)
        self._mirror = known.mirror
        assert self._mirror is None or self._mirror.books is known.load.books, "one set of books"
        self.visits = CacheVisits(known.recent, known.mirror, known.approximate, clock)
        lost_since = None if known.approximate is None else known.approximate.lost_since
        self.fleets = FleetKeeper(known.load.books, known.suspects, lost_since)
        name, weights = (
            (policy.name, policy.weights)
            if isinstance(policy, BuiltInPolicy)
            else ("", weights or Weights())
        )
        self.decider = Decider(
            known.load.books,
            name,
            weights,
            known.engine_load_stale_after_s,
            (random or Random()).getrandbits(64),
            self._policy.needs_outlook,
        )
        """Decides in the core."""
        if known.recent is not None:
            self.decider.use_recent(known.recent.core)

    def share(
        self, catch_up: Callable[[], None], publish: Callable[[], None], lots: bool = False
    ) -> None:
        """Decide by the state of other routers as well.

        Args:
            catch_up: Receives what they publish, if that is due; called before each decision.
            publish: Publishes soon; called when a long prompt is sent.
            lots: True if all routers draw the same among equal replicas, so that a prompt that
                arrives at several of them at one moment goes to one replica.
        """
        self._catch_up, self.visits.publish = catch_up, publish
        if lots:
            self.decider.share_lots()

    def rank(
        self, question: RankQuestion, replicas: Iterable[Replica]
    ) -> tuple[Sequence[Ranked], Sequence[Candidate]]:
        """Rank *replicas* for a request.

        Args:
            replicas: All that can serve it, whatever their state.
        Returns:
            Those that can take it now, the best first, and the others with their obstacles.
        Raises:
            PolicyError: A cost is not finite, or a plug-in broke the rules of a policy.
        """
        if self._catch_up is not None:
            self._catch_up()
        request, index, prompts = question.request, question.index, question.prompts
        # Those who compute prompts for others are a fleet of their own, with turns of their own.
        name = f"{request.model} prefill" if request.is_for_prefill else request.model
        fleet = self.fleets.fleet_of(name, list(replicas), index)
        asked = self._with_outlook(question) if self.asks_a_plug_in else request
        found = self.decider.rank(
            fleet.core,
            name,
            self.number_of(request.model),
            session_bytes(request),
            question.tenant,
            request.prompt_tokens,
            fleet.shared,
            [prompt.hashed for prompt in prompts],
            [] if index is None else [index.computed(prompt) for prompt in prompts],
            question.choice,
            self._clock(),
            self._asks_for_ranks(asked),
        )
        excluded = [_candidate(fields, obstacle) for fields, obstacle in found.excluded()]
        return self._ordered(found, asked) if len(found) else (), excluded

    def obstacle(self, replica: Replica, tenant: str = "", is_new: bool = False) -> str | None:
        """Why a replica cannot take a request that failed elsewhere, or is new; None if it can."""
        load = self._known.load.look_at(replica.id)
        return "removed" if replica.removed else replica.obstacle(load, is_new, tenant)

    def have_room(self, replicas: Iterable[Replica], tenant: str = "") -> bool:
        """Return whether one of *replicas* would be ranked for a new request."""
        return any(self.obstacle(each, tenant, is_new=True) is None for each in replicas)

    @property
    def asks_a_plug_in(self) -> bool:
        """Return whether the core cannot decide alone."""
        return isinstance(self._policy, PlugIn)

    def number_of(self, model: str) -> int:
        """The mirror's number of a model, where there is a mirror."""
        return 0 if self._mirror is None else self._mirror.number_of_model(model)

    def _ordered(self, found: DecidedRanking, request: RouteRequest) -> Sequence[Ranked]:
        """Return what the core found, best first; there is some."""
        policy = self._policy
        if isinstance(policy, PlugIn):
            return policy.rank(request, _standings(found.columns(), found.lower))
        if found.has_failed():
            raise PolicyError(f"policy {policy.name}: some cost is not finite, and each must be")
        request = replace(request, prefill_tokens_per_s=found.prefill_tokens_per_s())
        why = policy.why(request, found.mean_congestion())

        def place(number: int, place: int) -> Ranked:
            candidate, cost = _candidate(found.candidate(number)), found.cost(number)
            return Ranked(candidate, cost, partial(why, candidate, cost, place))

        return Ranking(len(found), found.first(), found.numbers, place)

    def _asks_for_ranks(
        self, request: RouteRequest
    ) -> Callable[[Any, list[tuple[Any, ...]]], Sequence[float]] | None:
        """Return what the core asks for the costs of a replica's ranks; None: it knows itself."""
        policy = self._policy
        if isinstance(policy, PlugIn) and policy.chooses_ranks:
            return partial(_costs_of_ranks, policy, request)
        return None

    def _with_outlook(self, question: RankQuestion) -> RouteRequest:
        """With what a plug-in may know of a request besides."""
        request, prompts = question.request, question.prompts
        if self._mirror is None or not self._policy.needs_outlook:
            return request
        return replace(
            request,
            prefill_tokens_per_s=self._mirror.prefill_tokens_per_s(request.model),
            keys=prompts[0].prefix_keys(STEP) if len(prompts) == 1 else (),
        )


def prepare(index: PrefixIndex, tokenized: Sequence[TokenizedPrompt]) -> list[HashedPrompt]:
    """Hash the prompts whose token ids are known.

    Hashing a long prompt takes milliseconds (a million tokens: some 40), so callers do it in a
    thread.

    Args:
        tokenized: All prompts of a request; only the first `MAX_MATCHED_PROMPTS` are hashed.
    """
    return [
        index.prepare(
            found.token_ids,
            found.lora_name,
            found.cache_salt,
            found.extra_keys,
            extra_steps=(RECENT_STEP,),
        )
        for found in tokenized[:MAX_MATCHED_PROMPTS]
        if found.token_ids
    ]


def _costs_of_ranks(
    policy: PlugIn, request: RouteRequest, columns: Any, lower: list[tuple[Any, ...]]
) -> Sequence[float]:
    """Return the costs of the ranks of a replica, as the core asks for them."""
    return policy.costs_of_ranks(request, _standings(columns, lower.__getitem__))


def _standings(columns: Any, lower: Callable[[int], tuple[Any, ...]]) -> Standings:
    """Read the core's columns of all candidates."""
    states, gpu, cached, junction, recent, progress, outlooks = columns
    return Standings(
        *(states, gpu, cached, junction, recent, progress, outlooks),
        lambda number: Lower(*lower(number)),
    )


def _candidate(fields: tuple[Any, ...], obstacle: int = 0) -> Candidate:
    """Read the core's fields of one candidate."""
    *before, load, speed, dp_rank = fields
    values = *before, CandidateLoad(*load), speed, dp_rank, _OBSTACLES[obstacle]
    return Candidate(*values)
