"""What it costs to bring tokens to a cache from below its GPU, learned from times to the first
token."""

from __future__ import annotations

from collections.abc import Callable

from router.index.mirror_types import ByTier
from router.routing.fading import FadingRatio


class LoadPrices:
    """By tier, the time to load one token over the time to compute one.

    A hit may come from several tiers. Its time says something about the one that most of it came
    from: what the others take is subtracted at their prices.
    """

    LEAST_TOKENS = 1024
    """Fewer say more about the cost of a step than of loading."""
    LEAST_SHARE = 0.5
    """Of a hit's lower tokens that one tier has."""
    FIRST_TOKENS = 4096.0
    """What the price before any load counts, in tokens."""
    LOADS = 32
    """After so many a load counts 1/e."""

    def __init__(self, first_price: Callable[[str], float]) -> None:
        """
        Args:
            first_price: Of a tier before anything was loaded from it.
        """
        self._first_price = first_price
        self._learned: dict[str, FadingRatio] = {}

    def of(self, tier: str) -> float:
        """The price of a token from *tier*."""
        learned = self._learned.get(tier)
        return self._first_price(tier) if learned is None else learned.value

    def mean(self, by_tier: ByTier) -> float:
        """The price of a token of those from several tiers; empty: nobody knows from which."""
        total = sum(tokens for _, tokens in by_tier)
        return self._sum(by_tier) / total if total else self.of("")

    def loaded(self, by_tier: ByTier, cost: float) -> None:
        """A prompt has begun to respond.

        Args:
            by_tier: What of it was loaded.
            cost: The time that this took, in tokens to compute.
        """
        total = sum(tokens for _, tokens in by_tier)
        tier, most = max(by_tier, key=lambda each: each[1])
        if most < self.LEAST_TOKENS or most < total * self.LEAST_SHARE:
            return
        own = cost - (self._sum(by_tier) - most * self.of(tier))
        learned = self._learned.get(tier)
        if learned is None:
            first = FadingRatio(self._first_price(tier), self.FIRST_TOKENS, self.LOADS)
            learned = self._learned[tier] = first
        # One that takes longer than computing would has waited for something else.
        learned.add(min(max(own, 0.0), float(most)), most)

    def _sum(self, by_tier: ByTier) -> float:
        return sum(tokens * self.of(tier) for tier, tokens in by_tier)
