"""What caches hold whose events are not there, as far as requests and responses show it.

What was sent to a cache was stored there, an engine evicts what was used longest ago, and responses
say how much of their prompts was cached. From that follows an estimate, over the keys that the
mirror has of prefixes, one for every `STEP` tokens. It is bounded by the capacity that the engine
reports, or by less: as far as reuse was seen to last.

An estimate stands in where a replica has no event stream, or where one has not been whole for long.
It begins with what this router sent there before, and ends when the stream is whole again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from router.index.base import SourceId
from router.index.mirror_types import STEP, ApproximateStatistics
from router.routing.fading import FadingRatio
from tests.oracle.mirror.mirror import ReferenceMirror
from tests.oracle.mirror.ownership import Ownership, Use
from tests.support.index import ApproximateHit


class _Met(NamedTuple):
    """What a prompt found in an estimate."""

    stretches: list[tuple[int, float | None]]
    """Of its keys, by their ends, and when each had been used last; None: it was in use."""
    known_keys: int
    """How many leading ones it had with those that were forgotten for lack of room."""


class ApproximateCache:
    """One such cache.

    Args:
        lost_at: When its events were lost; those of another loss are another estimate.
        limit_keys: That fit into it.
        clock: A monotonic clock, in seconds.
    """

    FIRST_TRUST = 0.8
    FIRST_TRUST_TOKENS = 4096
    """The first guess counts as much as one prompt of this length."""
    TRUST_REPORTS = 64
    LEAST_KEYS = 16
    """No cache is taken to be smaller."""
    SHRINK, GROW, NEAR = 0.9, 1.05, 0.8
    """A prediction that fails within the assumed capacity lowers that by 10 % at most; one that
    holds at 80 % of it or more raises it by 5 %, and so does a hit on what was forgotten."""
    FULL = 0.9
    """From here on it is taken to evict."""

    def __init__(self, lost_at: float, limit_keys: int, clock: Callable[[], float]) -> None:
        self.lost_at = lost_at
        self.limit_keys = limit_keys
        self._clock = clock
        self._reach = 1.0
        """Of the limit, the share that is known to be of use."""
        self._content = Ownership()
        self._forgotten: dict[int, None] = {}
        """Keys that had to make room, the earliest first."""
        self._trust = FadingRatio(self.FIRST_TRUST, self.FIRST_TRUST_TOKENS, self.TRUST_REPORTS)

    @property
    def capacity_keys(self) -> int:
        """That it is taken to hold."""
        return max(int(self.limit_keys * self._reach), self.LEAST_KEYS)

    def hit(self, prompts: Sequence[Sequence[int]], most_tokens: int) -> ApproximateHit:
        """What it may hold of a request's prompts.

        Args:
            prompts: The keys of each, every `STEP` tokens.
            most_tokens: Of all prompts, those that a hit may cover.
        """
        keys = sum(map(self._content.leading, prompts))
        return ApproximateHit(max(min(keys * STEP, most_tokens), 0), self._trust.value)

    def eviction_age_s(self, now: float) -> float | None:
        """For how long what it evicts next has been idle; None while it evicts nothing."""
        oldest = self._content.oldest()
        if oldest is None or len(self._content) < self.FULL * self.capacity_keys:
            return None
        return now - (oldest.ended_at or now)

    def remember(self, keys: Sequence[int], ended_at: float) -> None:
        """Something was sent there before the events were lost.

        Args:
            keys: Of the prompt.
            ended_at: When the request ended, later than those before it.
        """
        use, _ = self._content.begin(keys)
        self._content.end(use, ended_at)

    def begin(self, keys: Sequence[int]) -> tuple[Use, _Met]:
        """A prompt has been computed: return what is for `end`, and for `learn`."""
        stretches = [(end, use.ended_at) for _, end, use in self._content.segments(keys)]
        known, forgotten = stretches[-1][0] if stretches else 0, self._forgotten
        while known < len(keys) and keys[known] in forgotten:
            known += 1
        for key in keys if forgotten else ():
            forgotten.pop(key, None)
        return self._content.begin(keys)[0], _Met(stretches, known)

    def end(self, use: Use, most_keys: int) -> None:
        """A request is over: its prompt is the last that was used, and the oldest make room.

        Args:
            use: From `begin`.
            most_keys: That there is memory for.
        """
        self._content.end(use, self._clock())
        self.fit(most_keys)

    def fit(self, most_keys: int) -> None:
        """Forget what was used longest ago, down to the capacity or to *most_keys*."""
        content, forgotten = self._content, self._forgotten
        surplus = len(content) - min(self.capacity_keys, most_keys)
        while surplus > 0 and (oldest := content.oldest()) is not None:
            dropped = content.drop_end(oldest, surplus)
            surplus -= len(dropped)
            forgotten.update(dict.fromkeys(dropped))
        while forgotten and len(forgotten) + len(content) > min(self.limit_keys, most_keys):
            del forgotten[next(iter(forgotten))]

    def learn(self, found: _Met, predicted_tokens: int, actual_tokens: int) -> None:
        """An engine reports how much of a prompt was cached.

        What is idle for longer than the rest goes first. So a prediction tells, by the age of the
        last thing that it counts on, how far the capacity reaches.

        Args:
            found: From `begin`.
            predicted_tokens: That were to be cached.
            actual_tokens: That were.
        """
        if min(actual_tokens, found.known_keys * STEP) - predicted_tokens >= STEP:
            self._reach = min(self._reach * self.GROW, 1.0)
        if not predicted_tokens:
            return
        self._trust.add(min(actual_tokens, predicted_tokens), predicted_tokens)
        is_wrong = predicted_tokens - actual_tokens >= STEP
        decisive = actual_tokens // STEP if is_wrong else (predicted_tokens - 1) // STEP
        stretches = found.stretches
        used_at = next((ended_at for end, ended_at in stretches if decisive < end), None)
        if used_at is None:
            return
        capacity = self.capacity_keys
        used_since = self._content.owned_since(used_at, capacity)
        if is_wrong and used_since < capacity:
            reach = max(used_since / self.limit_keys, self._reach * self.SHRINK)
            self._reach = min(reach, self._reach)
        elif not is_wrong and used_since >= capacity * self.NEAR:
            self._reach = min(self._reach * self.GROW, 1.0)

    def statistics(self) -> ApproximateStatistics:
        """Sizes, and how far it is believed."""
        tokens, capacity = len(self._content) * STEP, self.capacity_keys * STEP
        return ApproximateStatistics(tokens, capacity, self._trust.value)


class ApproximateVisit:
    """One request at such a cache, from its sending to its end. Nothing is stored before its first
    token."""

    __slots__ = ("_cache", "_found", "_hit_tokens", "_most_keys", "_prompts", "_uses")

    def __init__(
        self,
        cache: ApproximateCache,
        prompts: Sequence[Sequence[int]],
        hit_tokens: int,
        most_keys: int,
    ) -> None:
        self._cache = cache
        self._prompts = prompts
        self._hit_tokens = hit_tokens
        self._most_keys = most_keys
        self._uses: list[Use] = []
        self._found = _Met([], 0)

    def first_token(self) -> None:
        """Its prompts have been computed; to be called once."""
        for keys in self._prompts:
            use, self._found = self._cache.begin(keys)
            self._uses.append(use)

    def ended(self, actual_tokens: int | None = None) -> None:
        """It is over; a second call does nothing.

        Args:
            actual_tokens: Of its only prompt, those that were cached as the engine says; None: it
                did not say.
        """
        uses, self._uses = self._uses, []
        if actual_tokens is not None and len(uses) == 1:
            self._cache.learn(self._found, self._hit_tokens, actual_tokens)
        for use in uses:
            self._cache.end(use, self._most_keys)


class ReferenceEstimates:
    """All caches that need an estimate. Belongs to one event loop."""

    def __init__(
        self,
        lost_since: Callable[[SourceId], float | None],
        mirror: ReferenceMirror | None = None,
        after_s: float = 60.0,
        cache_tokens: int = 262_144,
        max_keys: int = 1_048_576,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            lost_since: Since when the events of a source have not been whole, on *clock*; always,
                where there is no stream; None: they are.
            mirror: Knows what was sent where before the events were lost.
            after_s: For how long they must have been incomplete.
            cache_tokens: Size of a cache where the engine does not report it.
            max_keys: Bound on the keys of all caches together.
            clock: A monotonic clock, in seconds.
        """
        self._lost_since = lost_since
        self._mirror = mirror
        self._after_s = after_s
        self._cache_tokens = cache_tokens
        self._max_keys = max_keys
        self._clock = clock
        self.silent: set[SourceId] = set()
        """Caches of replicas that publish no events."""
        self._caches: dict[SourceId, ApproximateCache] = {}

    def stand_in(
        self, source: SourceId, cache_tokens: int | None, now: float
    ) -> ApproximateCache | None:
        """The estimate that stands in for a cache's events; None where they are whole, or have not
        been missing for long.

        Args:
            source: The cache.
            cache_tokens: Its size as the engine reports it; None: it does not.
            now: On the clock.
        """
        lost_at = self._lost_at(source, now)
        if lost_at is None:
            return None
        limit = max((cache_tokens or self._cache_tokens) // STEP, ApproximateCache.LEAST_KEYS)
        cache = self._caches.get(source)
        if cache is None or cache.lost_at != lost_at:
            cache = self._caches[source] = self._begin(source, lost_at, limit)
        cache.limit_keys = limit
        return cache

    def visit(
        self, source: SourceId, prompts: Sequence[Sequence[int]], hit_tokens: int
    ) -> ApproximateVisit | None:
        """A request is sent to a cache; None if no estimate stands in for it.

        Args:
            source: The cache.
            prompts: The keys of each of its prompts, every `STEP` tokens.
            hit_tokens: That were predicted to be cached.
        """
        cache = self._caches.get(source)
        if cache is None:
            return None
        return ApproximateVisit(cache, prompts, hit_tokens, self._most_keys)

    def forget(self, replica: str) -> None:
        """Forget what is cached at a replica: it restarted, failed, or was removed."""
        for source in [source for source in self._caches if source.replica == replica]:
            del self._caches[source]

    def statistics(self) -> dict[SourceId, ApproximateStatistics]:
        """Of the caches that an estimate stands in for now; those of others are dropped."""
        now = self._clock()
        for source, cache in list(self._caches.items()):
            if self._lost_at(source, now) != cache.lost_at:
                del self._caches[source]
        return {source: cache.statistics() for source, cache in self._caches.items()}

    @property
    def _most_keys(self) -> int:
        return self._max_keys // max(len(self._caches), 1)

    def _lost_at(self, source: SourceId, now: float) -> float | None:
        lost_at = self._lost_since(source)
        return None if lost_at is None or now - lost_at < self._after_s else lost_at

    def _begin(self, source: SourceId, lost_at: float, limit_keys: int) -> ApproximateCache:
        cache = ApproximateCache(lost_at, limit_keys, self._clock)
        for keys, ended_at in self._mirror.ended(source) if self._mirror is not None else ():
            cache.remember(keys, ended_at)
        cache.fit(self._most_keys)
        return cache
