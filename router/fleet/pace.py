"""Decides how often replicas are asked about themselves: seldom while no request comes, as Envoy's
`no_traffic_interval` has it. Their last answers are enough until one does."""

from __future__ import annotations

from collections.abc import Callable

from router.config.watch import HealthConfig

QUIET_AFTER = 5
"""Intervals without a request that count as quiet."""
_WAKES = 8
"""Times in one quiet interval at which replicas are looked at, however many they are."""


class Pace:
    """The time between two looks at a healthy replica.

    Args:
        config: The interval, and how many times longer it is without requests.
    """

    def __init__(self, config: HealthConfig, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._asked = 0
        self._began = clock()
        self._quiet_from = self._began + QUIET_AFTER * config.interval_s

    @property
    def is_quiet(self) -> bool:
        """Return whether no request has come for a while, and none is under way."""
        return self._clock() >= self._quiet_from

    @property
    def interval_s(self) -> float:
        """Seconds between two looks at a healthy replica."""
        config = self._config
        if not self.is_quiet:
            return config.interval_s
        longest_s = config.interval_s * config.no_traffic_factor
        if config.scrape_metrics:  # what is known of its load stays fresh enough to count
            longest_s = min(longest_s, 0.8 * config.engine_load_stale_after_s)
        return max(longest_s, config.interval_s)

    def due(self, at: float, interval_s: float) -> float:
        """Return when to do what is due *at*: in a quiet time up to an eighth of its interval
        earlier, together with what is due for other replicas. Each wake of a process that slept
        finds the CPU's caches cold, and costs more than what it is for."""
        return at - (at - self._began) % (interval_s / _WAKES) if self.is_quiet else at

    def look(self, asked: int, in_flight: int) -> bool:
        """Learn whether requests have come since the last call.

        Args:
            asked: Decisions and requests since the start.
        Returns:
            True at the first requests after a quiet time: look at all replicas now.
        """
        was_quiet = self.is_quiet
        if asked != self._asked or in_flight:
            self._asked = asked
            self._quiet_from = self._clock() + QUIET_AFTER * self._config.interval_s
        return was_quiet and not self.is_quiet
