"""Which prefixes were just sent to which cache, in plain Python. The compiled memory is tested to
equal it.

A key stands for the whole prefix up to it, and a prompt is always remembered from its start. So if
a key is live, all keys before it are live as well, and the end of the live ones is found by
bisection: 13 look-ups for 8,192 keys. Which caches to look at, the prompt's first key says.

Two generations make forgetting cheap: entries are written to the young one, and after each time to
live the old one is dropped as a whole. Each entry carries its own expiry, so look-ups are exact
although memory is freed a generation at a time.

    time          0 s               5 s               10 s
    young         entries 0-5 s     entries 5-10 s    entries 10-15 s
    old           -                 entries 0-5 s     entries 5-10 s
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

from router.index.base import SourceId
from router.routing.recent_prefixes import RecentStatistics


class _Generation:
    __slots__ = ("by_cache", "by_root", "entries")

    def __init__(self) -> None:
        self.entries = 0
        self.by_cache: dict[SourceId, dict[int, float]] = {}
        """cache -> key -> when it expires."""
        self.by_root: dict[int, tuple[SourceId, ...]] = {}
        """The first key of a prompt -> where it was sent. Some of it may be forgotten since."""

    def remember(self, source: SourceId, keys: Sequence[int], until: float) -> None:
        held = self.by_cache.setdefault(source, {})
        self.entries -= len(held)
        held.update(zip(keys, repeat(until)))
        self.entries += len(held)
        known = self.by_root.get(keys[0], ())
        if source not in known:
            self.by_root[keys[0]] = (*known, source)

    def forget(self, replica: str) -> None:
        for source in [source for source in self.by_cache if source.replica == replica]:
            self.entries -= len(self.by_cache.pop(source))


class ReferenceRecent:
    """Remembers prefix keys by cache. The caller passes the time: *now* is seconds on a monotonic
    clock.

    Args:
        ttl_s: How long an entry counts. A few seconds: prefill, and the event's way here.
        max_entries: Bound on keys over all caches, some 80 bytes each, and 150 for each prompt.
    """

    def __init__(self, ttl_s: float = 5.0, max_entries: int = 262_144) -> None:
        if not ttl_s > 0 or max_entries < 1:
            raise ValueError(
                f"recent: ttl_s {ttl_s} must be above 0 and max_entries {max_entries} at least 1"
            )
        self._ttl_s = ttl_s
        self._max_entries = max_entries
        self._young, self._old = _Generation(), _Generation()
        self._rotate_at: float | None = None
        self._evicted = self._truncated = 0

    def remember(self, source: SourceId, keys: Sequence[int], now: float) -> None:
        """Remember that a prompt was just sent to a cache.

        Args:
            source: A data-parallel rank of a replica.
            keys: The prompt's keys, from its start.
            now: Seconds.
        """
        self._rotate(now)
        fitting = self._fit(keys)
        if fitting:
            self._young.remember(source, fitting, now + self._ttl_s)

    def match(self, keys: Sequence[int], step: int, now: float) -> dict[SourceId, int]:
        """Return how many leading tokens of a prompt were recently sent to each cache.

        Caches with none are left out.

        Args:
            keys: The prompt's keys at every multiple of *step* tokens, as given to `remember`. Use
                one step for all prompts of a model: a prompt is found only where its own first key
                was remembered.
            step: Tokens from one key to the next.
            now: Seconds, on the clock of `remember`.
        """
        self._rotate(now)
        if not keys:
            return {}
        found: dict[SourceId, int] = {}
        for generation in (self._young, self._old):
            for source in generation.by_root.get(keys[0], ()):
                if source not in found and (live := self._live_keys(source, keys, now)):
                    found[source] = live * step
        return found

    def forget(self, replica: str) -> None:
        """Forget what was sent to a replica, at all its ranks: it restarted, failed, or was
        removed."""
        self._young.forget(replica)
        self._old.forget(replica)

    def statistics(self) -> RecentStatistics:
        """Sizes and counts."""
        entries = self._young.entries + self._old.entries
        return RecentStatistics(entries, self._evicted, self._truncated)

    def _live_keys(self, source: SourceId, keys: Sequence[int], now: float) -> int:
        """How many leading *keys* are live there."""
        young, old = self._young.by_cache.get(source, {}), self._old.by_cache.get(source, {})

        def is_live(index: int) -> bool:
            key = keys[index]
            return young.get(key, now) > now or old.get(key, now) > now

        if not is_live(0):
            return 0
        low, high = 1, len(keys)
        while low < high:
            # The last key first, since equal prompts are the usual case; then half-way.
            middle = high - 1 if high == len(keys) else (low + high) // 2
            if is_live(middle):
                low = middle + 1
            else:
                high = middle
        return low

    def _rotate(self, now: float) -> None:
        """Drop the generation that has expired."""
        if self._rotate_at is None:
            self._rotate_at = now + self._ttl_s
        if now < self._rotate_at:
            return
        # After two times to live without a call, the young generation has expired as well.
        self._old = self._young if now < self._rotate_at + self._ttl_s else _Generation()
        self._young = _Generation()
        self._rotate_at = now + self._ttl_s

    def _fit(self, keys: Sequence[int]) -> Sequence[int]:
        """The leading *keys* that there is room for; the old generation is dropped to make some."""
        room = self._max_entries - self._young.entries - self._old.entries
        if len(keys) <= room:
            return keys
        evicted = self._old.entries
        self._old = _Generation()
        self._evicted += evicted
        if len(keys) <= room + evicted:
            return keys
        self._truncated += 1
        return keys[: room + evicted]
