"""Which of several requests used each part of a prefix last.

A request uses a prompt from its start, so whoever uses a key uses all keys before it, too. What a
request is the last to have used is therefore a *suffix* of its keys: the others took a prefix of
them. Three requests, the earliest first, where `A` stands for a key that A owns:

    A  1 2 3 4 5         owns          4 5
    B  1 2 3 6 7         owns      3   6 7
    C  1 2 8             owns  1 2 8

So ownership is one dict from key to request, written in bulk, and a number for each request.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from router.index import HashedPrompt


@dataclass(eq=False, slots=True)
class Use:
    """One request's use of a prefix."""

    number: int
    keys: Sequence[int]
    """Of its prefixes, from the shortest."""
    owned_from: int = 0
    """The index of the first key that it owns; `len(keys)`: it owns nothing."""
    ended_at: float | None = None
    """None while it runs."""
    prompt: HashedPrompt | None = None
    """For look-ups, where somebody needs it."""

    @property
    def owned(self) -> int:
        """How many keys it owns."""
        return len(self.keys) - self.owned_from


@dataclass(frozen=True, slots=True)
class Taken:
    """Keys that a request took over from the one that had used them last."""

    use: Use
    keys: int


class Ownership:
    """Who owns which key, and the requests that have ended, by the time of their end.

    Memory: some 110 bytes for each key, and 50 for each request.
    """

    def __init__(self) -> None:
        self._owners: dict[int, Use] = {}
        self._ended: dict[int, Use] = {}
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._owners)

    @property
    def requests(self) -> int:
        """Ended requests that own something."""
        return len(self._ended)

    def begin(self, keys: Sequence[int]) -> tuple[Use, list[Taken]]:
        """A request begins to use a prefix; return it, and whose keys it took, from the start."""
        self._numbers += 1
        use = Use(self._numbers, keys)
        return use, self._take(use)

    def end(self, use: Use, now: float) -> None:
        """A request has ended: it is the last that used its keys. Call once.

        Args:
            use: From `begin`.
            now: Seconds.
        """
        if not use.keys:
            return
        if use.owned_from:
            self._take(use)
        use.ended_at = now
        self._ended[use.number] = use

    def drop(self, use: Use) -> None:
        """Forget a request and what it owns; its keys are nobody's then."""
        owners = self._owners
        for key in use.keys[use.owned_from :]:
            if owners.get(key) is use:
                del owners[key]
        use.owned_from = len(use.keys)
        self._ended.pop(use.number, None)

    def drop_end(self, use: Use, count: int) -> Sequence[int]:
        """Forget the last keys that a request owns, as an engine evicts them; return them.

        Args:
            use: One that has ended.
            count: How many at most.
        """
        if count >= use.owned:
            dropped = use.keys[use.owned_from :]
            self.drop(use)
            return dropped
        kept = len(use.keys) - count
        dropped, use.keys = use.keys[kept:], use.keys[:kept]
        for key in dropped:
            self._owners.pop(key, None)
        return dropped

    def oldest(self) -> Use | None:
        """The request that ended first of those that still own something."""
        return next(iter(self._ended.values()), None)

    def ended(self) -> Iterator[Use]:
        """All that have ended and own something, earliest first."""
        return iter(self._ended.values())

    def owned_since(self, ended_at: float, most: int) -> int:
        """How many keys were used after a time, by requests that have ended; counted up to *most*.

        Args:
            ended_at: The time; an end at just that time does not count.
            most: Where to stop counting.
        """
        count = 0
        for use in reversed(self._ended.values()):
            if (use.ended_at or 0.0) <= ended_at or count >= most:
                break
            count += use.owned
        return min(count, most)

    def clear(self) -> None:
        """Forget all requests that have ended."""
        for use in list(self._ended.values()):
            self.drop(use)

    def oldest_keys(self, count: float) -> dict[Use, int]:
        """Whose keys are the *count* that were used longest ago, and how many of each: all of
        whoever ended first, and of the last of them those at the end."""
        found: dict[Use, int] = {}
        for use in self._ended.values():
            if count <= 0:
                break
            found[use] = min(use.owned, math.ceil(count))
            count -= use.owned
        return found

    def segments(self, keys: Sequence[int]) -> Iterator[tuple[int, int, Use]]:
        """The stretches of *keys* that one request each owns: where one begins and ends, and who
        that is."""
        start, owners = 0, self._owners
        while start < len(keys):
            use = owners.get(keys[start])
            if use is None:
                return
            most = min(len(keys), len(use.keys))
            end = _end_of_run(owners, keys, use, start + 1, most)
            yield start, end, use
            start = end

    def _take(self, use: Use) -> list[Taken]:
        """Make *use* the owner of all its keys."""
        taken = []
        for start, end, before in self.segments(use.keys):
            if before is use:
                continue
            taken.append(Taken(before, end - start))
            before.owned_from = max(before.owned_from, end)
            if end == len(before.keys):
                self._ended.pop(before.number, None)
        self._owners.update(dict.fromkeys(use.keys, use))
        use.owned_from = 0
        return taken


def _end_of_run(owners: dict[int, Use], keys: Sequence[int], use: Use, low: int, high: int) -> int:
    """The first index in `[low, high]` from which *use* does not own *keys*."""
    if low < high and owners.get(keys[high - 1]) is use:  # the usual case
        return high
    while low < high:
        middle = (low + high) // 2
        if owners.get(keys[middle]) is use:
            low = middle + 1
        else:
            high = middle
    return low
