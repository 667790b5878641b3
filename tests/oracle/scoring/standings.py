"""Standings of which any may be put in place of others, and policies that order them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

from router.policies import (
    Candidate,
    Lower,
    Order,
    Outlook,
    Ranked,
    RouteRequest,
    Standings,
    State,
    Weights,
)

IDLE: Outlook = (None, 0.0, 0.0, 0.0, 1.0)
"""Of a cache that nothing is sent to and that evicts nothing."""

LEAST_TRUST = 0.001
"""Of an estimate; none at all would read as certainty."""


def share_that_counts(doubt: bool | float, suspect_trust: float) -> float:
    """Of a hit that is doubtful.

    Args:
        doubt: As in `State`, and not False.
        suspect_trust: Of a suspect one.
    """
    return suspect_trust if doubt is True else doubt


speed_of: Callable[[State], float] = itemgetter(2)


# --- from candidates ------------------------------------------------------------------------------


def standings_of(candidates: Sequence[Candidate], kind: Any = Standings) -> Any:
    """The candidates as columns, in their order.

    Args:
        candidates: The rows.
        kind: What is made of them.
    """
    return kind(
        [state_of(candidate) for candidate in candidates],
        [candidate.gpu_cached_tokens for candidate in candidates],
        [candidate.cached_tokens for candidate in candidates],
        [candidate.junction_tokens for candidate in candidates],
        [candidate.recent_tokens for candidate in candidates],
        [candidate.progress_tokens for candidate in candidates],
        [outlook_of(candidate) for candidate in candidates],
        lambda number: lower_of_candidate(candidates[number]),
    )


def lower_cost(standings: Standings, number: int, weights: Weights) -> float:
    """What a token of the hit of candidate *number* costs that is below the GPU.

    Args:
        standings: The candidates.
        number: Which one.
        weights: What it costs where it was not measured.
    """
    lower = standings.lower_of(number)
    if lower.load_price is not None:
        return lower.load_price
    return mean_price(weights, lower.by_tier)


def mean_price(weights: Weights, by_tier: Sequence[tuple[str, int]]) -> float:
    """The mean cost of the tokens of a hit below the GPU, where no loads were measured.

    Args:
        by_tier: Tokens of each tier or store; empty where they are not separated.
    """
    tokens = sum(count for _, count in by_tier)
    if not tokens:
        return weights.lower_tier_token
    return sum(count * weights.of_tier(name) for name, count in by_tier) / tokens


def state_of(candidate: Candidate) -> State:
    """The `State` of a candidate."""
    load = candidate.load
    return (
        candidate.replica_id,
        candidate.dp_rank,
        candidate.speed,
        candidate.suspect if candidate.approximate_trust is None else candidate.approximate_trust,
        load.queued_prefill_tokens,
        load.prefilling_requests,
        load.decoding_requests,
        load.decode_context_tokens,
        load.foreign_requests,
        load.waiting_requests,
    )


def lower_of_candidate(candidate: Candidate) -> Lower:
    """Return what a candidate has below its GPU."""
    return Lower(candidate.by_tier, candidate.load_price, candidate.pull_from)


def outlook_of(candidate: Candidate) -> Outlook:
    """The `Outlook` of a candidate."""
    return (
        candidate.eviction_age_s,
        candidate.reuse_probability,
        candidate.uncached_tokens_per_s,
        candidate.arrivals_per_s,
        candidate.refill,
    )


class ChangingStandings(Standings):
    """As a plug-in gets them, but that they are made step by step."""

    __slots__ = ("_others",)

    def __init__(self, *columns: Any) -> None:
        super().__init__(*columns)
        self._others: dict[int, Lower] = {}
        """Of those that were put in place of others."""
        lower_of = self.lower_of
        self.lower_of = lambda number: self._others.get(number) or lower_of(number)

    def put(self, number: int, candidate: Candidate) -> None:
        """Let another candidate stand for *number*.

        Args:
            number: Which one goes.
            candidate: Which one comes.
        """
        self.states[number] = state_of(candidate)
        self.gpu_cached_tokens[number] = candidate.gpu_cached_tokens
        self.cached_tokens[number] = candidate.cached_tokens
        self.junction_tokens[number] = candidate.junction_tokens
        self.recent_tokens[number] = candidate.recent_tokens
        self.progress_tokens[number] = candidate.progress_tokens
        self.outlooks[number] = outlook_of(candidate)
        self._others[number] = lower_of_candidate(candidate)

    def put_estimate(self, number: int, tokens: int, trust: float) -> None:
        """Let an estimate stand for the hit of candidate *number*.

        Args:
            number: Its number.
            tokens: That it may have cached.
            trust: See `Candidate.approximate_trust`; not 0.
        """
        state = self.states[number]
        self.states[number] = (*state[:3], trust, *state[4:])
        self.gpu_cached_tokens[number] = self.cached_tokens[number] = tokens
        self.junction_tokens[number] = 0
        self._others[number] = Lower()

    def put_pull(self, number: int, tokens: int, lower: Lower) -> None:
        """Let candidate *number* pull what it lacks of a prefix from another replica's memory.

        Args:
            number: Its number.
            tokens: Of the prefix; more than it has cached.
            lower: What it has below its GPU then, with what it pulls.
        """
        self._others[number] = lower
        self.cached_tokens[number] = tokens

    def put_eviction(self, number: int, age_s: float, reuse: float) -> None:
        """Let an estimate stand for what candidate *number* would evict next.

        Args:
            number: Its number.
            age_s: See `Candidate.eviction_age_s`.
            reuse: See `Candidate.reuse_probability`.
        """
        _, _, uncached, arrivals, refill = self.outlooks[number]
        self.outlooks[number] = age_s, reuse, uncached, arrivals, refill


def fewest_requests(
    standings: Standings, random: Callable[[], float]
) -> Callable[[int], tuple[int, float]]:
    """Among equals, the candidate with the fewest requests, then any.

    Args:
        standings: Of the candidates.
        random: Draws a number for each of them.
    """
    draws, requests = [random() for _ in standings.states], standings.requests
    return lambda number: (requests(number), draws[number])


class RanksByOrder:
    """`Policy.rank` of a policy that orders standings."""

    def order(self, request: RouteRequest, standings: Standings) -> Order:
        """See `OrdersStandings`.

        Args:
            request: What is known of it.
            standings: At least one.
        """
        raise NotImplementedError

    def rank(self, request: RouteRequest, candidates: Sequence[Candidate]) -> list[Ranked]:
        """Order candidates.

        Args:
            request: What is known of it.
            candidates: May be empty.
        """
        if not candidates:
            return []
        order = self.order(request, standings_of(candidates))
        numbers = order.numbers()
        chosen = [(candidates[number], order.costs[number]) for number in numbers]
        return [
            Ranked(candidate, cost, partial(order.why, candidate, cost, place))
            for place, (candidate, cost) in enumerate(chosen)
        ]
