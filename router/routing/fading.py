"""A ratio in which the past fades."""

from __future__ import annotations

import math


class FadingRatio:
    """One sum over another, the last *samples* or so of them.

    Args:
        first: The ratio before there is any sample; it counts as much as one.
        samples: After so many a sample counts 1/e.
    """

    __slots__ = ("_keep", "_over", "_under")

    def __init__(self, first: float, weight: float, samples: int) -> None:
        self._over, self._under = first * weight, weight
        self._keep = math.exp(-1 / samples)

    @property
    def value(self) -> float:
        return self._over / self._under

    def add(self, over: float, under: float) -> None:
        """Take a sample.

        Args:
            under: Added to the denominator; not negative.
        """
        self._over = self._over * self._keep + over
        self._under = self._under * self._keep + under
