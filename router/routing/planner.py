"""Ranks replicas for a request by what each would reuse, what each has to do, and the policy.

A replica with several data-parallel ranks has a cache and a queue for each. It enters the ranking
once, as the rank that the policy prefers if it looks at what each cache is doing, else as the one
where the request would wait least. That rank is asked for whenever it matters: wherever a hit, a
recent prompt or load tells the ranks apart, and for every prompt that is remembered, since the next
one like it should find the same rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from random import Random
from typing import NamedTuple

from router._core import EstimatedVisit, Visit
from router.fleet.load import LoadTracker
from router.fleet.replica import Replica
from router.index import HashedPrompt, PrefixIndex, SourceId
from router.index.approximate import ApproximateCaches
from router.index.mirror import Mirror
from router.index.mirror_types import WORTH_TELLING, Coming
from router.policies import Candidate, Policy, Ranked, RouteRequest, Weights
from router.prompt import TokenizedPrompt
from router.routing.ranker import Ranker
from router.routing.recent_prefixes import RecentPrefixes

RECENT_STEP = 64
"""Tokens between two keys in the memory of recent prefixes; the same for all prompts of a model."""
MAX_MATCHED_PROMPTS = 64
"""Prompts of one batch that are looked up; the rest counts as uncached."""


class RankChoice(NamedTuple):
    """Holds what a request allows in the choice of a data-parallel rank."""

    is_read: bool = True
    """Whether the engine reads the rank that it is asked for. If not, only what every rank would
    reuse counts."""
    asked: int | None = None
    """The rank that the client asks for, where clients may."""
    may_pull: bool = True
    """Whether the engine reads from which peer it is to pull."""


ANY_RANK = RankChoice()
UNREAD_RANK = RankChoice(is_read=False)


class RoutePlanner:
    """Ranks replicas. No I/O; the clock is passed in."""

    def __init__(
        self,
        policy: Policy,
        load: LoadTracker,
        recent: RecentPrefixes | None,
        suspects: Collection[SourceId],
        engine_load_stale_after_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        weights: Weights | None = None,
        random: Random | None = None,
        mirror: Mirror | None = None,
        approximate: ApproximateCaches | None = None,
    ) -> None:
        """Keep the parts that a ranking is made from.

        Args:
            policy: Orders the replicas that can serve the request.
            load: What this router has in flight at each replica.
            recent: Which prefixes were just sent where; None: what the mirror says is in prefill.
            suspects: The sources of which events were lost, so that their hits are doubtful; it
                changes with them.
            engine_load_stale_after_s: Age from which an engine's own load no longer counts.
            clock: A monotonic clock, in seconds.
            weights: What things cost, for the choice among the ranks of a replica.
            mirror: What every cache is doing and evicts next; None: that is not known.
            approximate: What caches hold without events; None: that is not estimated.
        """
        self._load = load
        self._recent = recent
        self._clock = clock
        self._mirror = mirror
        self._approximate = approximate
        self._catch_up: Callable[[], None] | None = None
        self._tell: Callable[[], None] | None = None
        self.ranker = Ranker(
            *(policy, load, weights or Weights(), suspects, engine_load_stale_after_s),
            *(random or Random(), mirror, approximate),
        )
        """Has the core decide."""
        if recent is not None:
            self.ranker.decider.use_recent(recent.core)

    def share(
        self, catch_up: Callable[[], None], tell: Callable[[], None], lots: bool = False
    ) -> None:
        """Decide by what others say as well.

        Args:
            catch_up: Receives what they publish, if that is due; called before each decision.
            tell: Publishes soon; called when a long prompt is sent.
            lots: Whether chance decides alike between equal replicas, wherever a prompt arrives: so
                that all who get the same prompt at the same moment send it to the same replica.
        """
        self._catch_up, self._tell = catch_up, tell
        if lots:
            self.ranker.decider.share_lots()

    def rank(
        self,
        request: RouteRequest,
        index: PrefixIndex,
        prompts: Sequence[HashedPrompt],
        replicas: Iterable[Replica],
        choice: RankChoice = ANY_RANK,
        tenant: str = "",
    ) -> tuple[Sequence[Ranked], Sequence[Candidate]]:
        """Rank *replicas* for a request.

        Args:
            request: What the policy may know of it.
            prompts: The request's prompts, from `prepare`.
            replicas: All that serve the model, whatever their state.
            choice: What the request allows in the choice of a rank.
            tenant: Whose it is, where replicas may tell tenants apart.
        Returns:
            As `scoring.rank`.
        Raises:
            PolicyError: A plug-in broke the rules of a policy.
        """
        if self._catch_up is not None:
            self._catch_up()
        now, coming = self._clock(), self._coming(prompts, request.prompt_tokens)
        return self.ranker.rank(
            request, index, prompts, list(replicas), choice, tenant, now, coming
        )

    def rank_by_load(
        self, request: RouteRequest, replicas: Iterable[Replica], tenant: str = ""
    ) -> tuple[Sequence[Ranked], Sequence[Candidate]]:
        """Rank *replicas* for a request whose prompt is not looked at.

        Args:
            request: What the policy may know of it.
            replicas: All that can serve it, whatever their state.
        Returns:
            As `scoring.rank`.
        Raises:
            PolicyError: A plug-in broke the rules of a policy.
        """
        return self.ranker.rank(
            request, None, (), list(replicas), UNREAD_RANK, tenant, self._clock(), ()
        )

    def obstacle(self, replica: Replica, tenant: str = "") -> str | None:
        """Why a replica cannot take a request that failed elsewhere; None if it can."""
        load = self._load.look_at(replica.id)
        return "removed" if replica.removed else replica.obstacle(load, False, tenant)

    def have_room(self, replicas: Iterable[Replica], tenant: str = "") -> bool:
        """Return whether one of *replicas* would be ranked for a new request."""
        load_at = self._load.look_at
        return any(
            not replica.removed and replica.obstacle(load_at(replica.id), tenant=tenant) is None
            for replica in replicas
        )

    def remember(self, prompts: Sequence[HashedPrompt], source: SourceId) -> None:
        """Count on the prefixes of *prompts* in a cache before its events report them.

        Args:
            prompts: From `prepare`.
            source: Where the request is about to be sent.
        """
        if self._recent is not None:
            now = self._clock()
            for prompt in prompts:
                self._recent.remember(source, prompt.prefix_keys(RECENT_STEP), now)

    def visit(
        self,
        model: str,
        index: PrefixIndex,
        prompts: Sequence[HashedPrompt],
        source: SourceId,
        prompt_tokens: int,
        candidate: Candidate,
        keep: Sequence[int] = (),
        uncached: int | None = None,
    ) -> Visit | None:
        """A request is about to be sent to a cache: follow it there.

        Args:
            prompts: From `prepare`.
            candidate: That it is, as it was ranked.
            keep: Lengths of the prompt at which the engine is told to keep windows and states.
            uncached: Prompt tokens to compute there; None: those that are not cached.
        Returns:
            What is told of the request's first token and end; None without a mirror.
        """
        if self._mirror is None:
            return None
        if uncached is None:
            uncached = uncached_tokens(prompt_tokens, candidate)
        if self._tell is not None and uncached >= WORTH_TELLING:
            self._tell()
        return self._mirror.begin(
            model,
            index,
            source,
            prompts,
            prompt_tokens,
            uncached,
            candidate.cached_tokens,
            candidate.speed,
            candidate.by_tier,
            candidate.junction_tokens,
            keep,
        )

    def approximate_visit(
        self, prompts: Sequence[HashedPrompt], source: SourceId, candidate: Candidate
    ) -> EstimatedVisit | None:
        """The same for a cache without events; None for one with them.

        Args:
            prompts: From `prepare`.
            candidate: That it is, as it was ranked.
        """
        if self._approximate is None or not candidate.is_approximate:
            return None
        keys = [prompt.prefix_keys(RECENT_STEP) for prompt in prompts]
        return self._approximate.visit(source, keys, candidate.cached_tokens)

    def expected(
        self, prompts: Sequence[HashedPrompt], source: SourceId, prompt_tokens: int, hit: int
    ) -> int:
        """How many tokens will be cached when the engine admits the request.

        Args:
            prompts: From `prepare`.
        """
        if self._mirror is None or len(prompts) != 1:
            return hit
        return self._mirror.expected(source, prompts[0], prompt_tokens, hit)

    def note_streams(self, replica: Replica) -> None:
        """A replica publishes events from now on, or none, or is removed."""
        if self._approximate is not None:
            silent = SourceId(replica.id)
            self._approximate.silent.discard(silent)
            if not replica.sources and not replica.removed:
                self._approximate.silent.add(silent)

    def forget(self, replica_id: str) -> None:
        """Count no longer on what was sent to this replica, at any of its ranks."""
        if self._recent is not None:
            self._recent.forget(replica_id)
        if self._mirror is not None:
            self._mirror.forget(replica_id)
        if self._approximate is not None:
            self._approximate.forget(replica_id)

    def forget_model(self, model: str) -> None:
        """No replica serves this model any more."""
        if self._mirror is not None:
            self._mirror.forget_model(model)

    def _coming(
        self, prompts: Sequence[HashedPrompt], prompt_tokens: int
    ) -> list[Mapping[SourceId, Coming]]:
        """Return what each cache is computing of each prompt, where the core does not look at what
        was just sent there."""
        if self._recent is not None or self._mirror is None:
            return []
        tokens = prompt_tokens if len(prompts) == 1 else 0
        return [self._mirror.in_prefill(prompt, tokens) for prompt in prompts]


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


def source_of(replica: Replica, dp_rank: int | None) -> SourceId:
    """The cache whose hit a candidate stands for.

    Args:
        dp_rank: The candidate's rank; None: the replica's first, or its only one.
    """
    return replica.cache if dp_rank is None else SourceId(replica.id, dp_rank)


def uncached_tokens(prompt_tokens: int, candidate: Candidate) -> int:
    """Prompt tokens that a replica will have to compute.

    What it is already computing for another request does not count: otherwise a burst of equal
    prompts would look like a queue and scatter.

    Args:
        prompt_tokens: Length of the prompt.
        candidate: The replica, as it was ranked for this prompt.
    """
    return max(prompt_tokens - max(candidate.cached_tokens, candidate.recent_tokens), 0)
