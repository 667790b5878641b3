"""Compares the ways of routing, each played several times, and finds differences beyond chance.

The plays of one way differ only by chance, so the spread within the ways shows how far apart two
ways may be by chance alone: as in an analysis of variance, the spreads are pooled, and a difference
of means counts from the 95 % quantile of Student's t on.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvroute_engine.demo.phase import PhaseResult

_T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""Student's t for 95 %, two-sided, with 1, 2, ... degrees of freedom."""
_T_MANY = 2.2


@dataclass(frozen=True, slots=True)
class Play:
    """One way of routing, played once."""

    way: str
    phases: Sequence[PhaseResult]

    @property
    def requests(self) -> int:
        return sum(phase.requests for phase in self.phases)

    @property
    def prompt_tokens(self) -> int:
        return sum(phase.prompt_tokens for phase in self.phases)

    @property
    def reused_tokens(self) -> float:
        return sum(phase.cached_tokens for phase in self.phases)

    @property
    def mean_ttft_s(self) -> float:
        """Return the mean over all requests; 0 before the first."""
        ttfts_s = [ttft_s for phase in self.phases for ttft_s in phase.ttfts_s]
        return statistics.fmean(ttfts_s) if ttfts_s else 0.0


Measure = Callable[[Play], float]


def reused_tokens(play: Play) -> float:
    """Measure the prompt tokens that the engines did not have to compute."""
    return play.reused_tokens


def mean_ttft_s(play: Play) -> float:
    """Measure the mean time to the first token."""
    return play.mean_ttft_s


def of_way(plays: Sequence[Play], way: str) -> list[Play]:
    """Return all plays of one way."""
    return [play for play in plays if play.way == way]


def mean(plays: Sequence[Play], way: str, measure: Measure) -> float:
    """Return the mean of a measure over the plays of a way; 0 without any."""
    return statistics.fmean([measure(play) for play in of_way(plays, way)] or [0.0])


def chance(plays: Sequence[Play], measure: Measure) -> float | None:
    """Return the largest difference between the means of two ways that chance explains, at 95 %;
    None if no way was played twice.

    Args:
        plays: All ways', each played equally often.
    """
    ways = dict.fromkeys(play.way for play in plays)
    samples = [[measure(play) for play in of_way(plays, way)] for way in ways]
    freedom = sum(len(sample) - 1 for sample in samples)
    if freedom < 1:
        return None
    squares = sum((value - statistics.fmean(sample)) ** 2 for sample in samples for value in sample)
    times = min(map(len, samples))
    t = _T_95[freedom - 1] if freedom <= len(_T_95) else _T_MANY
    return t * math.sqrt(squares / freedom * 2 / times)
