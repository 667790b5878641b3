"""Lets a policy of another package order the candidates, and checks its rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from router.errors import PolicyError
from router.policies.standings import Order, OrdersStandings, Ranking, Standings
from router.policies.types import Candidate, Policy, Ranked, RouteRequest


class PlugIn:
    """One such policy.

    Args:
        policy: One that ranks candidates gets them; one that orders standings goes without.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._orders = policy if isinstance(policy, OrdersStandings) else None
        self.needs_outlook = self._orders is None or self._orders.needs_outlook
        """True if it may look at what each cache is doing."""
        self.chooses_ranks = self._orders is not None and self._orders.needs_outlook
        """True if it chooses among the ranks of a replica. Where it does not look at what each
        cache is doing, or ranks candidates, they are chosen by the wait there."""

    def rank(self, request: RouteRequest, standings: Standings) -> Sequence[Ranked]:
        """Rank *standings*, best first.

        Args:
            request: The fields that the policy sees.
        Raises:
            PolicyError: The policy lost, repeated or invented a candidate, or its costs are not
                finite, or not ascending.
        """
        if not standings.states:
            return ()
        if self._orders is None:
            candidates = [standings.candidate(number) for number in range(len(standings))]
            ranked = self._policy.rank(request, candidates)
            check(self._policy, candidates, ranked)
            return tuple(ranked)
        order = self._order(self._orders, request, standings)

        def place(number: int, place: int) -> Ranked:
            candidate, cost = standings.candidate(number), order.costs[number]
            return Ranked(candidate, cost, partial(order.why, candidate, cost, place))

        return Ranking(len(standings), order.first(), order.numbers, place)

    def costs_of_ranks(self, request: RouteRequest, standings: Standings) -> Sequence[float]:
        """Return the costs of one replica's ranks, where it `chooses_ranks`.

        Args:
            standings: The ranks; all have the same `replica_id`.
        Raises:
            PolicyError: See `rank`.
        """
        assert self._orders is not None
        return self._order(self._orders, request, standings).costs

    def _order(self, policy: OrdersStandings, request: RouteRequest, standings: Standings) -> Order:
        order = policy.order(request, standings)
        total = sum(order.costs)
        if len(order.costs) != len(standings) or not math.isfinite(total):
            raise PolicyError(
                f"policy {type(self._policy).__name__}: {len(order.costs)} costs with the sum "
                f"{total} for {len(standings)} candidates; each needs one, and it must be finite"
            )
        return order


def check(policy: Policy, able: Sequence[Candidate], ranked: Sequence[Ranked]) -> None:
    """Check that a ranking keeps the rules of `Policy`.

    Raises:
        PolicyError: It lost, repeated or invented a candidate, or its costs are not finite and
            ascending.
    """
    name = type(policy).__name__
    given = {candidate.replica_id for candidate in able}
    returned = {entry.candidate.replica_id for entry in ranked}
    if len(ranked) != len(able) or given != returned:
        names = [entry.candidate.replica_id for entry in ranked]
        raise PolicyError(
            f"policy {name}: ranked {names}; it must rank each of {sorted(given)} exactly once"
        )
    before = -math.inf
    for entry in ranked:
        if not before <= entry.cost < math.inf:
            raise PolicyError(
                f"policy {name}: cost {entry.cost} after {before}; costs must be finite and ascend"
            )
        before = entry.cost
