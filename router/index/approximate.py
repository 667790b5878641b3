"""Estimates what caches without events hold, by requests and responses.

What was sent to a cache was stored there, an engine evicts what was used longest ago, and responses
report how much of their prompts was cached. From that follows an estimate, over the keys that the
mirror has of prefixes, one for every `STEP` tokens. It is bounded by the capacity that the engine
reports, or by less: as far as reuse was seen to last.

An estimate stands in where a replica has no event stream, or where one has not been whole for long.
It begins with what this router sent there before, and ends when the stream is whole again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from router._core import Estimate, EstimatedVisit, Estimates
from router.index.base import SourceId
from router.index.mirror import Mirror
from router.index.mirror_types import ApproximateHit, ApproximateStatistics


class ApproximateCache:
    """The estimate of one cache."""

    def __init__(self, estimate: Estimate) -> None:
        self._estimate = estimate
        self.eviction_age_s: Callable[[float], float | None] = estimate.eviction_age_s

    def hit(self, prompts: Sequence[Sequence[int]], most_tokens: int) -> ApproximateHit:
        """Return the tokens of a request's prompts that it may hold.

        Args:
            prompts: The keys of each, every `STEP` tokens.
            most_tokens: Tokens of all prompts that a hit may cover.
        """
        return ApproximateHit(*self._estimate.hit(prompts, most_tokens))


class ApproximateCaches:
    """All caches that need an estimate. Belongs to one event loop."""

    def __init__(
        self,
        lost_since: Callable[[SourceId], float | None],
        mirror: Mirror,
        after_s: float = 60.0,
        cache_tokens: int = 262_144,
        max_keys: int = 1_048_576,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            lost_since: Returns since when the events of a source have been incomplete, on *clock*;
                minus infinity without a stream; None: they are complete.
            mirror: Knows the requests sent before the events were lost.
            after_s: For how long they must have been incomplete.
            cache_tokens: Size of a cache where the engine does not report it.
            max_keys: Bound on the keys of all caches together.
        """
        self.lost_since = lost_since
        self._clock = clock
        self._mirror = mirror
        self._core = Estimates(mirror.core, after_s, cache_tokens, max_keys, clock)

    def stand_in(
        self, source: SourceId, cache_tokens: int | None, now: float
    ) -> ApproximateCache | None:
        """The estimate that stands in for a cache's events; None where they are complete, or not
        missing for long.

        Args:
            cache_tokens: Its size by the engine; None: not reported.
        """
        number, lost_since = self._mirror.number_of(source), self.lost_since(source)
        found = self._core.stand_in(number, lost_since, cache_tokens, now)
        return None if found is None else ApproximateCache(found)

    def visit(
        self, source: SourceId, prompts: Sequence[Sequence[int]], hit_tokens: int
    ) -> EstimatedVisit | None:
        """A request is sent to a cache; None if no estimate stands in for it.

        Args:
            prompts: The keys of each of its prompts, every `STEP` tokens.
            hit_tokens: Those predicted to be cached.
        """
        return self._core.visit(self._mirror.number_of(source), prompts, hit_tokens)

    def forget(self, replica: str) -> None:
        """Forget what is cached at a replica: it restarted, failed, or was removed."""
        self._core.forget(self._mirror.numbers_of(replica))

    def statistics(self) -> dict[SourceId, ApproximateStatistics]:
        """Return the state of the caches that an estimate stands in for now; those of others are
        dropped."""
        now, found = self._clock(), {}
        for number in self._core.caches():
            source = self._mirror.source_of(number)
            values: Any = self._core.statistics(number, self.lost_since(source), now)
            if values is not None:
                found[source] = ApproximateStatistics(*values)
        return found
