"""Which prefixes were just sent where: a guess that holds until the engines' events tell.

Between the moment a prompt is sent and the first event about its blocks lies its whole prefill.
Without a memory of its own, the router would spread a burst of equal prompts over all replicas, and
each would compute the same prefix.

A key stands for the whole prefix up to it, and a prompt is always remembered from its start. So
what is live of a replica is closed under taking prefixes, and how far a prompt goes is found by
bisection: 13 look-ups for 8,192 keys. Two generations make forgetting free: entries are written to
the young one, and after the time to live the old one is thrown away whole. Each entry carries its
own expiry, so the answer is exact although memory is given back in lumps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

_Generation = dict[str, dict[int, float]]
"""replica -> key -> when it expires."""


@dataclass(frozen=True, slots=True)
class RecentStatistics:
    """Entries held now, and counts since the start."""

    replicas: int
    entries: int
    """Expired ones included, until their generation goes."""
    evicted: int
    """Entries thrown away early, to make room."""
    truncated: int
    """Prompts of which only the first keys found room."""


class RecentPrefixes:
    """Remembers prefix keys by replica. No clock of its own: *now* is seconds on any clock that
    never goes back.

    Args:
        ttl_s: How long an entry counts. A few seconds: prefill and the event's way here.
        max_entries: Bound on keys over all replicas, some 80 bytes each.
    """

    def __init__(self, ttl_s: float = 5.0, max_entries: int = 262_144) -> None:
        if not ttl_s > 0 or max_entries < 1:
            raise ValueError(
                f"recent: ttl_s {ttl_s} must be above 0 and max_entries {max_entries} at least 1"
            )
        self._ttl_s = ttl_s
        self._max_entries = max_entries
        self._young: _Generation = {}
        self._old: _Generation = {}
        self._rotate_at: float | None = None
        self._evicted = self._truncated = 0

    def remember(self, replica: str, keys: Sequence[int], now: float) -> None:
        """A prompt with these *keys*, from its start, was just sent to *replica*."""
        self._rotate(now)
        fitting = self._fit(keys)
        if fitting:
            self._young.setdefault(replica, {}).update(zip(fitting, repeat(now + self._ttl_s)))

    def match(self, keys: Sequence[int], step: int, now: float) -> dict[str, int]:
        """How many leading tokens of a prompt were recently sent to each replica; replicas with
        none are left out.

        Args:
            keys: The prompt's keys at every multiple of *step* tokens, of the key space that
                `remember` was given. Use one step for all prompts of a model: a prompt is found
                only where its own first key was remembered.
            step: Tokens from one key to the next.
            now: Seconds, on the clock of `remember`.
        """
        self._rotate(now)
        if not keys:
            return {}
        found = {
            replica: self._live_keys(replica, keys, now)
            for replica in self._young.keys() | self._old.keys()
        }
        return {replica: count * step for replica, count in found.items() if count}

    def forget(self, replica: str) -> None:
        """What was sent there is void: the replica restarted, failed, or is gone."""
        self._young.pop(replica, None)
        self._old.pop(replica, None)

    def statistics(self) -> RecentStatistics:
        """Sizes and counts."""
        replicas = len(self._young.keys() | self._old.keys())
        entries = _size(self._young) + _size(self._old)
        return RecentStatistics(replicas, entries, self._evicted, self._truncated)

    def _live_keys(self, replica: str, keys: Sequence[int], now: float) -> int:
        """How many leading *keys* are live there."""
        young, old = self._young.get(replica, {}), self._old.get(replica, {})

        def is_live(index: int) -> bool:
            key = keys[index]
            return young.get(key, now) > now or old.get(key, now) > now

        if not is_live(0):
            return 0
        low, high = 1, len(keys)
        while low < high:
            # Half-way, but all of it first: equal prompts are the usual case.
            middle = high - 1 if high == len(keys) else (low + high) // 2
            if is_live(middle):
                low = middle + 1
            else:
                high = middle
        return low

    def _rotate(self, now: float) -> None:
        """Throw away the generation that has expired."""
        if self._rotate_at is None:
            self._rotate_at = now + self._ttl_s
        if now < self._rotate_at:
            return
        # After two times to live without a call, the young generation has expired as well.
        self._old = self._young if now < self._rotate_at + self._ttl_s else {}
        self._young = {}
        self._rotate_at = now + self._ttl_s

    def _fit(self, keys: Sequence[int]) -> Sequence[int]:
        """As many leading *keys* as there is room for, after the old generation was given up for
        them."""
        room = self._max_entries - _size(self._young) - _size(self._old)
        if len(keys) <= room:
            return keys
        evicted = _size(self._old)
        self._old = {}
        self._evicted += evicted
        if len(keys) <= room + evicted:
            return keys
        self._truncated += 1
        return keys[: room + evicted]


def _size(generation: _Generation) -> int:
    return sum(map(len, generation.values()))
