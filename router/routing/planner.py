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

from router.fleet.replica import Replica
from router.index.index import PrefixIndex
from router.index.prompt import HashedPrompt
from router.policies.types import Candidate, Policy, Ranked, Weights
from router.prompt.prompts import TokenizedPrompt
from router.routing.known import RECENT_STEP, CacheVisits, Known
from router.routing.question import RankQuestion
from router.routing.ranker import Ranker

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
        self.visits = CacheVisits(known, clock)
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
        self._catch_up, self.visits.publish = catch_up, publish
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

    def note_streams(self, replica: Replica) -> None:
        """A replica publishes events from now on, or none."""
        self.ranker.fleets.note_streams(replica)


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
