"""From all replicas of a model to a ranking of those that can take the request now."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from router.errors import PolicyError
from router.scoring.standings import Order, OrdersStandings, Ranking, Standings
from router.scoring.types import Candidate, Policy, Ranked, RouteRequest


def rank(
    policy: Policy, request: RouteRequest, candidates: Iterable[Candidate]
) -> tuple[tuple[Ranked, ...], tuple[Candidate, ...]]:
    """Leave out those that cannot take the request, and let the policy order the rest.

    Args:
        policy: Built-in or a plug-in.
        request: What the policy may know of it.
        candidates: All replicas that serve the model, whatever their state.
    Returns:
        Who could serve the request, best first; and who cannot, each with its `obstacle`.
    Raises:
        PolicyError: The policy lost, repeated or invented a candidate, or its costs are not finite
            and ascending.
    """
    able: list[Candidate] = []
    excluded: list[Candidate] = []
    for candidate in candidates:
        (able if candidate.obstacle is None else excluded).append(candidate)
    return _rank_candidates(policy, request, able), tuple(excluded)


class Ranker:
    """Lets a policy order what can take a request.

    Args:
        policy: Built-in or a plug-in. One that ranks candidates gets them; one that orders
            standings goes without.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._orders = policy if isinstance(policy, OrdersStandings) else None
        self.needs_outlook = self._orders is None or self._orders.needs_outlook
        """Whether the policy may look at what each cache is doing."""

    def rank(self, request: RouteRequest, standings: Standings) -> Sequence[Ranked]:
        """Rank *standings*, best first.

        Args:
            request: What the policy may know of it.
            standings: All that can take it.
        Raises:
            PolicyError: The policy lost, repeated or invented a candidate, or its costs are not
                finite, or not ascending.
        """
        if not standings.states:
            return ()
        if self._orders is None:
            candidates = [standings.candidate(number) for number in range(len(standings))]
            return _rank_candidates(self._policy, request, candidates)
        return Ranking(self._order(self._orders, request, standings), standings)

    def costs_of_ranks(self, request: RouteRequest, standings: Standings) -> Sequence[float] | None:
        """What the ranks of one replica cost, to a policy that looks at what each cache is doing;
        None if it does not, or ranks candidates: turns and sessions are about replicas.

        Args:
            request: What the policy may know of it.
            standings: The ranks; all have the same `replica_id`.
        Raises:
            PolicyError: As `rank`.
        """
        if self._orders is None or not self._orders.needs_outlook:
            return None
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


def _rank_candidates(
    policy: Policy, request: RouteRequest, able: Sequence[Candidate]
) -> tuple[Ranked, ...]:
    ranked = policy.rank(request, able)
    _check(policy, able, ranked)
    return tuple(ranked)


def empty_reason(excluded: Iterable[Candidate]) -> str:
    """Why nothing could be ranked: how many are excluded for which reason."""
    counts = Counter(candidate.obstacle for candidate in excluded)
    reasons = ", ".join(f"{count} {obstacle}" for obstacle, count in counts.most_common())
    return reasons or "no replica serves it"


def _check(policy: Policy, able: Sequence[Candidate], ranked: Sequence[Ranked]) -> None:
    """Hold a policy, possibly a plug-in, to the rules of `Policy`."""
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
