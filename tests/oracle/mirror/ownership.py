"""Which of several requests used each part of a prefix last.

A request uses a prompt from its start, so whoever uses a key uses all keys before it, too. What a
request is the last to have used is therefore a *suffix* of its keys: the others took a prefix of
them. Three requests, the earliest first, where `A` stands for a key that A owns:

    A  1 2 3 4 5         owns          4 5
    B  1 2 3 6 7         owns      3   6 7
    C  1 2 8             owns  1 2 8

Keys that lie behind one another and have one owner are a *run*, and ownership is one dict from key
to run. Who uses a prompt again takes its runs over, one by one, whatever their length; key by key
only where prompts part for the first time, and what is new.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

import msgspec

from router.index.prompt import HashedPrompt

USE_KEYS = 4
"""A request that has ended takes as much memory as so many keys, besides those of its prompt."""


class Use(msgspec.Struct, eq=False):
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
    rest: float = 0.0
    """What it leaves behind the last of them, in keys; less than 0: so many are gone."""

    @property
    def owned(self) -> int:
        """How many keys it owns."""
        return len(self.keys) - self.owned_from


class _Run(msgspec.Struct, eq=False):
    """Keys of prompts that are the same so far, at `[start, end)`, and who owns them."""

    start: int
    end: int
    use: Use


@dataclass(frozen=True, slots=True)
class Taken:
    """Keys that a request took over from the one that had used them last."""

    use: Use
    keys: int


class Ownership:
    """Who owns which key, and the requests that have ended, by the time of their end.

    Memory: `size` times some 100 bytes, and 400 where the prompts are kept.
    """

    def __init__(self) -> None:
        self._runs: dict[int, _Run] = {}
        self._ended: dict[int, Use] = {}
        self._size = 0
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def requests(self) -> int:
        """Ended requests that own something."""
        return len(self._ended)

    @property
    def size(self) -> int:
        """What ended requests keep, in keys: all of their prompts, however little they own."""
        return self._size

    def begin(self, keys: Sequence[int]) -> tuple[Use, list[Taken]]:
        """A request begins to use a prefix; return it, and whose keys it took, from the start."""
        self._numbers += 1
        use = Use(self._numbers, keys)
        return use, self._take(use)

    def end(self, use: Use, now: float) -> list[Taken]:
        """A request has ended: it is the last that used its keys. Call once. Return whose keys it
        took back, from the start.

        Args:
            use: From `begin`.
            now: Seconds.
        """
        if not use.keys:
            return []
        taken = self._take(use) if use.owned_from else []
        use.ended_at = now
        self._ended[use.number] = use
        self._size += len(use.keys) + USE_KEYS
        return taken

    def drop(self, use: Use) -> None:
        """Forget a request and what it owns; its keys are nobody's then."""
        runs = self._runs
        for key in use.keys[use.owned_from :]:
            if (run := runs.get(key)) is not None and run.use is use:
                del runs[key]
        if self._ended.pop(use.number, None) is not None:
            self._size -= len(use.keys) + USE_KEYS
        use.owned_from = len(use.keys)

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
        self._size -= count
        dropped, use.keys = use.keys[kept:], use.keys[:kept]
        for key in dropped:
            self._runs.pop(key, None)
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

    def leading(self, keys: Sequence[int]) -> int:
        """How many leading keys of a prompt somebody owns."""
        at, count, find = 0, len(keys), self._runs.get
        while at < count and (run := find(keys[at])) is not None:
            at = self._end_of(run, keys, at)
        return at

    def segments(self, keys: Sequence[int]) -> Iterator[tuple[int, int, Use]]:
        """The stretches of *keys* that one request each owns: where one begins and ends, and who
        that is."""
        start = at = 0
        while at < len(keys) and (run := self._runs.get(keys[at])) is not None:
            use, at = run.use, self._end_of(run, keys, at)
            following = self._runs.get(keys[at]) if at < len(keys) else None
            if following is None or following.use is not use:
                yield start, at, use
                start = at

    def _end_of(self, run: _Run, keys: Sequence[int], start: int) -> int:
        """The index in *keys* where a run ends that begins at *start*."""
        runs, low, high = self._runs, start + 1, min(run.end, len(keys), len(run.use.keys))
        if runs.get(keys[high - 1]) is run:  # the usual case
            return high
        while low < high:
            middle = (low + high) // 2
            if runs.get(keys[middle]) is run:
                low = middle + 1
            else:
                high = middle
        return low

    def _take(self, use: Use) -> list[Taken]:
        """Make *use* the owner of all its keys."""
        taken: list[Taken] = []
        keys, at = use.keys, 0
        while at < len(keys):
            run = self._runs.get(keys[at])
            if run is None:
                at = self._add(use, at)
                continue
            start, at, before = at, self._end_of(run, keys, at), run.use
            if before is use:
                continue
            self._hand_over(run, start, at, use)
            count = at - start
            if taken and taken[-1].use is before:
                count += taken.pop().keys
            taken.append(Taken(before, count))
            if before.number in self._ended and at == len(before.keys):
                del self._ended[before.number]
                self._size -= len(before.keys) + USE_KEYS
            before.owned_from = max(before.owned_from, at)
        use.owned_from = 0
        return taken

    def _add(self, use: Use, start: int) -> int:
        """Add the keys from *start* on that nobody owns; return the index behind them."""
        run, find_or_add = _Run(start, len(use.keys), use), self._runs.setdefault
        for key in use.keys[start:]:
            if find_or_add(key, run) is not run:
                break
            start += 1
        run.end = start
        return start

    def _hand_over(self, run: _Run, start: int, end: int, use: Use) -> None:
        """Make *use* the owner of a run up to *end*. What is behind it stays with its owner."""
        before, run_end = run.use, min(run.end, len(run.use.keys))
        if end == run_end:
            run.use = use
        elif end - start <= run_end - end:
            self._runs.update(zip(use.keys[start:end], repeat(_Run(start, end, use))))
            run.start = end
        else:
            rest = _Run(end, run_end, before)
            self._runs.update(zip(before.keys[end:run_end], repeat(rest)))
            run.use, run.end = use, end
