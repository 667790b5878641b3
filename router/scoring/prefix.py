"""The default policy: the replica where this request waits least, given what is cached and what is going on there.

One hot prefix stays on the replica that has it as long as waiting there is cheaper than computing it again elsewhere, and then
spills over by itself: no threshold, only costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from router.scoring.cost import Estimate, estimate
from router.scoring.types import Candidate, Ranked, RouteRequest, Weights


class PrefixPolicy:
    """Least estimated wait first; among equals the one with the fewest requests, then at random."""

    def __init__(self, weights: Weights, random: Random) -> None:
        self._weights = weights
        self._random = random.random

    def rank(self, request: RouteRequest, candidates: Sequence[Candidate]) -> list[Ranked]:
        """Implements `Policy`."""
        estimates = [estimate(request.prompt_tokens, candidate, self._weights) for candidate in candidates]
        estimates.sort(key=self._order)
        return [Ranked(found.candidate, found.cost, found.reason) for found in estimates]

    def _order(self, found: Estimate) -> tuple[float, int, float]:
        return found.cost, found.candidate.requests, self._random()
