"""Ranks replicas for a request by what each would reuse, what each has to do, and the policy.

A replica with several data-parallel ranks has a cache and a queue for each. It enters the ranking
once, as the rank that the policy prefers if it looks at what each cache is doing, else as the one
where the request would wait least. That rank is asked for whenever it matters: wherever a hit, a
recent prompt or load tells the ranks apart, and for every prompt that is remembered, since the next
one like it should find the same rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from random import Random

from router._core import EstimatedVisit, Visit
from router.fleet.replica import Replica
from router.index.base import SourceId
from router.index.index import PrefixIndex
from router.index.mirror_types import WORTH_PUBLISHING
from router.index.prompt import HashedPrompt
from router.policies.types import Candidate, Policy, Ranked, Weights
from router.prompt.prompts import TokenizedPrompt
from router.routing.question import Placement, RankQuestion
from router.routing.ranker import Known, Ranker

RECENT_STEP = 64
"""Tokens between two keys in the memory of recent prefixes; the same for all prompts of a model."""
MAX_MATCHED_PROMPTS = 64
"""Prompts of one batch that are looked up; the rest counts as uncached."""


class RoutePlanner:
    """Ranks replicas. No I/O; the clock is passed in."""

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
            weights: What things cost, for the choice among the ranks of a replica.
        """
        self._known = known
        self._clock = clock
        self._catch_up: Callable[[], None] | None = None
        self._publish: Callable[[], None] | None = None
        self.ranker = Ranker(policy, known, weights or Weights(), random or Random())
        """Has the core decide."""

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
        self._catch_up, self._publish = catch_up, publish
        if lots:
            self.ranker.decider.share_lots()

    def rank(
        self, question: RankQuestion, replicas: Iterable[Replica]
    ) -> tuple[Sequence[Ranked], Sequence[Candidate]]:
        """Rank *replicas* for a request.

        Args:
            replicas: All that can serve it, whatever their state.
        Returns:
            Those that can take it now, the best first, and the others with their obstacles.
        Raises:
            PolicyError: A plug-in broke the rules of a policy.
        """
        if self._catch_up is not None:
            self._catch_up()
        return self.ranker.rank(question, list(replicas), self._clock())

    def obstacle(self, replica: Replica, tenant: str = "") -> str | None:
        """Why a replica cannot take a request that failed elsewhere; None if it can."""
        load = self._known.load.look_at(replica.id)
        return "removed" if replica.removed else replica.obstacle(load, False, tenant)

    def have_room(self, replicas: Iterable[Replica], tenant: str = "") -> bool:
        """Return whether one of *replicas* would be ranked for a new request."""
        load_at = self._known.load.look_at
        return any(
            not replica.removed and replica.obstacle(load_at(replica.id), tenant=tenant) is None
            for replica in replicas
        )

    def remember(self, prompts: Sequence[HashedPrompt], source: SourceId) -> None:
        """Count on the prefixes of *prompts* in a cache before its events report them."""
        if self._known.recent is not None:
            now = self._clock()
            for prompt in prompts:
                self._known.recent.remember(source, prompt.prefix_keys(RECENT_STEP), now)

    def visit(self, at: Placement) -> Visit | None:
        """A request is about to be sent to a cache: `remember` its prompts, and follow it there.

        Returns:
            The visit, which takes the request's first token and end; None without a mirror or a
            model, or where the engine chooses the cache.
        """
        question, candidate, source = at.question, at.candidate, at.source
        if source is None:
            return None
        self.remember(question.prompts, source)
        if self._known.mirror is None or question.index is None:
            return None
        if self._publish is not None and at.uncached_tokens >= WORTH_PUBLISHING:
            self._publish()
        return self._known.mirror.begin(
            question.request.model,
            question.index,
            source,
            question.prompts,
            question.prompt_tokens,
            at.uncached_tokens,
            candidate.cached_tokens,
            candidate.speed,
            candidate.by_tier,
            candidate.junction_tokens,
            at.keep,
        )

    def estimated_visit(self, at: Placement) -> EstimatedVisit | None:
        """The same for a cache without events; None for one with them."""
        approximate, source = self._known.approximate, at.source
        if approximate is None or source is None or not at.candidate.is_approximate:
            return None
        keys = [prompt.prefix_keys(RECENT_STEP) for prompt in at.question.prompts]
        return approximate.visit(source, keys, at.candidate.cached_tokens)

    def expected(self, question: RankQuestion, source: SourceId, hit: int) -> int:
        """How many tokens will be cached when the engine admits the request."""
        if self._known.mirror is None or len(question.prompts) != 1:
            return hit
        return self._known.mirror.expected(source, question.prompts[0], question.prompt_tokens, hit)

    def note_streams(self, replica: Replica) -> None:
        """A replica publishes events from now on, or none."""
        self.ranker.fleets.note_streams(replica)

    def forget(self, replica_id: str) -> None:
        """Count no longer on what was sent to this replica, at any of its ranks."""
        if self._known.recent is not None:
            self._known.recent.forget(replica_id)
        if self._known.mirror is not None:
            self._known.mirror.forget(replica_id)
        if self._known.approximate is not None:
            self._known.approximate.forget(replica_id)

    def forget_model(self, model: str) -> None:
        """No replica serves this model any more."""
        if self._known.mirror is not None:
            self._known.mirror.forget_model(model)


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
