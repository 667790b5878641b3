"""What is learned of a model's requests: rates, and how probable it is that what has been idle for
some time will be used again."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from router.routing.fading import FadingRatio
from tests.oracle.mirror.ownership import Ownership, Taken, Use

# --- sums that forget -----------------------------------------------------------------------------


class FadingRate:
    """How much happens per second: a sum in which the past fades, exponentially.

    Args:
        fade_s: The time after which something counts 1/e.
        now: Seconds, the time of the start.
    """

    __slots__ = ("_at", "_fade_s", "_start", "_sum")

    def __init__(self, fade_s: float, now: float) -> None:
        self._fade_s = fade_s
        self._start = self._at = now
        self._sum = 0.0

    def add(self, amount: float, now: float) -> None:
        """Something happened.

        Args:
            amount: How much of it.
            now: Seconds; never falls.
        """
        self._sum = self._sum * math.exp((self._at - now) / self._fade_s) + amount
        self._at = now

    def per_s(self, now: float) -> float:
        """The rate at a time; of a short past it is the mean."""
        weight = self._fade_s * -math.expm1((self._start - now) / self._fade_s)
        if weight <= 0:
            return 0.0
        return self._sum * math.exp((self._at - now) / self._fade_s) / max(weight, 1.0)


# --- reuse ----------------------------------------------------------------------------------------

SHORTEST_S, LONGEST_S, BINS = 0.01, 86_400.0, 40
_STEP = (LONGEST_S / SHORTEST_S) ** (1 / (BINS - 1))
EDGES = [0.0, *(SHORTEST_S * _STEP**index for index in range(BINS - 1))]
"""Where the bins of intervals begin: 0 s, 10 ms, 15 ms, ... a day."""


class ReuseIntervals:
    """From the end of one use of something to its next use: the probability that there will be one.

    The Kaplan-Meier estimator (1958) over bins of time. Most things have not been used again *yet*
    when one looks: how long they have been idle so far counts as well (they are censored), or else
    nothing that takes long would ever be expected. What lies beyond the longest time that was
    observed is a guess: at most `TAIL`, and less for what has been idle for a short part of it.
    """

    TAIL = 0.3

    def __init__(self) -> None:
        self._reused = [0.0] * BINS
        self._given_up = [0.0] * BINS
        self._lost: list[float] = [1.0] * BINS
        self._within: list[float] = [0.0] * BINS
        self._horizon_s = 0.0

    def reused(self, after_s: float, weight: float) -> None:
        """Something was used again.

        Args:
            after_s: From the end of its last use; 0 if that has not ended.
            weight: How much of it.
        """
        self._reused[bin_of(after_s)] += weight

    def given_up(self, after_s: float, weight: float) -> None:
        """Something was idle all that time, and is not followed any more.

        Args:
            after_s: From the end of its last use.
            weight: How much of it.
        """
        self._given_up[bin_of(after_s)] += weight

    def halve(self) -> None:
        """Let what was observed so far count half."""
        self._reused = [weight / 2 for weight in self._reused]
        self._given_up = [weight / 2 for weight in self._given_up]

    def estimate(self, idle: Sequence[Use], now: float) -> None:
        """Estimate anew.

        Args:
            idle: What is idle, by the end of its last use, earliest first.
            now: Seconds, on the clock of the ends.
        """
        ends = [use.ended_at or 0.0 for use in idle]
        sums = [0, *accumulate(use.owned for use in idle)]
        left = 0.0  # those that left a bin later than the one at hand, either way
        if ends:
            self._horizon_s = max(self._horizon_s, now - ends[0])
        survival = 1.0
        for index in reversed(range(BINS)):
            still = sums[bisect_right(ends, now - EDGES[index])]
            left += self._reused[index] + self._given_up[index]
            at_risk = left + still
            self._within[index] = 1 - (self._reused[index] / at_risk if at_risk else 0.0)
            survival *= self._within[index]
            self._lost[index] = survival

    def probability(self, idle_s: float) -> float:
        """That what has been idle for so long will be used again.

        Interpolated within the bin on a logarithmic scale.
        """
        index = bin_of(idle_s)
        never = self._lost[index]
        if 0 < index < BINS - 1 and self._within[index]:
            passed = math.log(idle_s / EDGES[index]) / math.log(_STEP)
            never *= self._within[index] ** -min(max(passed, 0.0), 1.0)
        tail = self.TAIL / (1 + self._horizon_s / (4 * idle_s)) if idle_s > 0 else 0.0
        return min(max(1 - never * (1 - tail), 0.0), 1.0)


def bin_of(seconds: float) -> int:
    """The index of the bin that an interval falls into."""
    return bisect_right(EDGES, seconds, lo=1) - 1


# --- one model ------------------------------------------------------------------------------------

REUSE_STEP = 4
"""Every so many keys one is followed, from prefix to prefix: less memory, and coarser weights."""


class ModelTraffic:
    """What the requests of one model show, over all caches.

    Args:
        max_keys: Bound on the keys of which the last use is remembered, some 110 bytes each.
    """

    PREFILLS = 32
    LEAST_PREFILL = 1024
    """A shorter one says more about the cost of a step than of its tokens."""
    FIRST_GUESS_TOKENS_PER_S = 10_000.0
    HALVE_EVERY = 20_000

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._speed = self._first_guess()
        self._has_timed = False
        self._uses = Ownership()
        self._reuse = ReuseIntervals()
        self._requests = self._estimated_at = 0

    @property
    def prefill_tokens_per_s(self) -> float:
        """Of a replica at speed 1."""
        return self._speed.value

    def began(self, keys: Sequence[int], now: float) -> Use:
        """A request is sent; the result is for `ended`.

        Args:
            keys: Of its prefixes.
            now: Seconds.
        """
        self._requests += 1
        use, taken = self._uses.begin(keys[REUSE_STEP - 1 :: REUSE_STEP])
        for each in taken:
            self._note_reuse(each, now)
        if self._requests % self.HALVE_EVERY == 0:
            self._reuse.halve()
        return use

    def ended(self, use: Use, now: float) -> None:
        """A request has ended.

        Args:
            use: From `began`.
            now: Seconds.
        """
        self._uses.end(use, now)
        # A key of a prompt takes an eighth of the memory of one that is owned.
        uses, most = self._uses, self._max_keys
        while len(uses) + uses.size // 8 > most and (oldest := uses.oldest()) is not None:
            self._reuse.given_up(now - (oldest.ended_at or now), oldest.owned)
            self._uses.drop(oldest)
        if self._requests - self._estimated_at > max(16, self._uses.requests // 16):
            self._estimated_at = self._requests
            self._reuse.estimate(list(self._uses.ended()), now)

    def _first_guess(self) -> FadingRatio:
        return FadingRatio(self.FIRST_GUESS_TOKENS_PER_S, 0.1, self.PREFILLS)

    def prefilled(self, tokens: int, seconds: float, is_timed: bool) -> None:
        """A cache has computed the uncached tokens of a prompt.

        Args:
            tokens: Uncached ones, as predicted.
            seconds: That it spent on this prompt, at speed 1.
            is_timed: Whether no more than on that; what is not counts until any is.
        """
        if tokens < self.LEAST_PREFILL:
            return
        if is_timed and not self._has_timed:
            self._has_timed, self._speed = True, self._first_guess()
        if is_timed or not self._has_timed:
            self._speed.add(tokens, seconds)

    def reuse_probability(self, idle_s: float) -> float:
        """That what has been idle for so long will be used again."""
        return self._reuse.probability(idle_s)

    def _note_reuse(self, taken: Taken, now: float) -> None:
        ended_at = taken.use.ended_at
        self._reuse.reused(0.0 if ended_at is None else now - ended_at, taken.keys)
