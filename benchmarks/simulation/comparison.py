"""Is a difference more than chance? Ratios of the same figure in paired runs, pooled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

_T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
    2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""The 97.5 % quantile of Student's t by degrees of freedom, from 1 on."""
_NORMAL_975 = 1.960


class Ratio(NamedTuple):
    """A geometric mean of ratios with its 95 % interval."""

    mean: float
    low: float
    high: float
    pairs: int

    @property
    def is_worse(self) -> bool:
        """Return whether it is above 1 by more than chance."""
        return self.low > 1

    @property
    def is_better(self) -> bool:
        """Return whether it is below 1 by more than chance."""
        return self.high < 1


def ratio(pairs: Sequence[tuple[float, float]]) -> Ratio:
    """Return how many times the second value of each pair the first one is: a t interval over the
    logarithms.

    Raises:
        ValueError: There are no pairs, or one has a value that is not positive.
    """
    if not pairs or min(map(min, pairs)) <= 0:
        raise ValueError(f"ratio: {len(pairs)} pairs; there must be some, all of them positive")
    logs = [math.log(first / second) for first, second in pairs]
    return _of_logs(logs, len(logs))


def pooled(groups: Sequence[Sequence[tuple[float, float]]]) -> Ratio:
    """Return the same over several situations, each of which counts as much as the others however
    many pairs it has. The situations are the ones that were chosen: the interval says what other
    seeds would give.

    Raises:
        ValueError: There are no pairs, or one has a value that is not positive.
    """
    if not groups:
        raise ValueError("ratio: 0 situations; there must be some")
    logs = [[math.log(first / second) for first, second in pairs] for pairs in groups]
    degrees = sum(len(each) - 1 for each in logs)
    # A single pair does not show how much it varies: it is taken to vary as the others do.
    common = sum(_variance(each) * (len(each) - 1) for each in logs) / max(degrees, 1)
    variance = sum((_variance(each) if each[1:] else common) / len(each) for each in logs)
    means = [math.fsum(each) / len(each) for each in logs]
    mean = math.fsum(means) / len(means)
    half = quantile(degrees) * math.sqrt(variance) / len(groups) if degrees else math.inf
    return _ratio(mean, half, sum(map(len, groups)))


def quantile(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t; infinite without a degree of freedom."""
    if degrees < 1:
        return math.inf
    return _T_975[degrees - 1] if degrees <= len(_T_975) else _NORMAL_975


def _of_logs(logs: Sequence[float], pairs: int) -> Ratio:
    mean = math.fsum(logs) / len(logs)
    half = (
        quantile(len(logs) - 1) * math.sqrt(_variance(logs) / len(logs)) if pairs > 1 else math.inf
    )
    return _ratio(mean, half, pairs)


def _ratio(mean: float, half: float, pairs: int) -> Ratio:
    low = math.exp(mean - half) if half < math.inf else 0.0
    return Ratio(math.exp(mean), low, math.exp(mean + half) if half < 700 else math.inf, pairs)


def _variance(values: Sequence[float]) -> float:
    """Return the variance of the population they are drawn from; 0 for a single one."""
    if len(values) < 2:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
