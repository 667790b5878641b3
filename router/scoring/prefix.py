"""The default policy: the replica where this request waits least, given its cache and its load.

One hot prefix stays on the replica that has it as long as waiting there is cheaper than computing
it again elsewhere, and then spills over by itself: no threshold, only costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from random import Random

from router.scoring.cost import estimate
from router.scoring.types import Candidate, Ranked, RouteRequest, Weights

_BEFORE_THE_ESTIMATE = itemgetter(0, 1, 2)


class PrefixPolicy:
    """Least estimated wait first; among equals the one with the fewest requests, then at random."""

    def __init__(self, weights: Weights, random: Random) -> None:
        self._weights = weights
        self._random = random.random

    def rank(self, request: RouteRequest, candidates: Sequence[Candidate]) -> list[Ranked]:
        """Order by estimated wait.

        Args:
            request: Only the prompt's length matters.
            candidates: With their hits and loads.
        """
        draw, tokens, weights = self._random, request.prompt_tokens, self._weights
        estimates = [estimate(tokens, candidate, weights) for candidate in candidates]
        order = [(found.cost, found.candidate.load.requests, draw(), found) for found in estimates]
        order.sort(key=_BEFORE_THE_ESTIMATE)
        return [Ranked(found.candidate, cost, found) for cost, _, _, found in order]
