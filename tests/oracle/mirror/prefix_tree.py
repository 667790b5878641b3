"""How much of a prompt others share, by who has them, however many they are.

A key stands for the whole prefix up to it, so prompts that begin alike have the same keys as far as
they are the same. They hang in a tree: a stretch is a run of keys that all prompts below it have,
and it counts them by their holders. Four prompts, of the holders A and B:

    A  1 2 3 4 5         1 2  (A: 2, B: 2) ──┬── 3  (A: 2) ──┬── 4 5  (A: 1)
    A  1 2 3 6 7                             │               └── 6 7  (A: 1)
    B  1 2 8                                 └── 8  (B: 1)
    B  1 2

A question walks down once: `1 2 3 9` shares three keys with A and two with B.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

_Holder = TypeVar("_Holder", bound=Hashable)


class _Stretch(Generic[_Holder]):
    """Keys that all prompts below it have."""

    __slots__ = ("end", "following", "holders", "keys")

    def __init__(self, keys: Sequence[int], end: int) -> None:
        self.keys = keys
        """Of one of its prompts; those before its own are the same in all of them."""
        self.end = end
        """Where its own end among these."""
        self.holders: dict[_Holder, int] = {}
        """How many of its prompts each has."""
        self.following: dict[int, _Stretch[_Holder]] = {}
        """By their first keys."""


class PrefixTree(Generic[_Holder]):
    """The prompts that are to be compared with. What is added must be removed again."""

    def __init__(self) -> None:
        self._roots: dict[int, _Stretch[_Holder]] = {}

    def __len__(self) -> int:
        """How many stretches there are."""
        found, count = list(self._roots.values()), 0
        while found:
            count += 1
            found.extend(found.pop().following.values())
        return count

    def add(self, keys: Sequence[int], holder: _Holder) -> None:
        """Add a prompt.

        Args:
            keys: Of its prefixes, from the shortest.
            holder: Who has it; any number of prompts may be the same.
        """
        at, count, following = 0, len(keys), self._roots
        while at < count:
            stretch = following.get(keys[at])
            if stretch is None:
                stretch = following[keys[at]] = _Stretch(keys, count)
                at = count
            else:
                at = equal_keys(keys, stretch.keys, at + 1, min(stretch.end, count))
                if at < stretch.end:
                    _split(stretch, at)
            stretch.holders[holder] = stretch.holders.get(holder, 0) + 1
            following = stretch.following

    def remove(self, keys: Sequence[int], holder: _Holder) -> None:
        """Remove a prompt that was added.

        Args:
            keys: As they were.
            holder: The same.
        """
        at, count, following = 0, len(keys), self._roots
        while at < count:
            stretch = following[keys[at]]
            left = stretch.holders[holder] - 1
            if left:
                stretch.holders[holder] = left
            else:
                del stretch.holders[holder]
                if not stretch.holders:  # nor has anyone below it
                    del following[keys[at]]
                    return
            at, following = stretch.end, stretch.following

    def shared(self, keys: Sequence[int]) -> dict[_Holder, int]:
        """How many leading keys of a prompt each holder has in one of its own; those with none are
        left out."""
        found: dict[_Holder, int] = {}
        at, count, following = 0, len(keys), self._roots
        while at < count and (stretch := following.get(keys[at])) is not None:
            at = equal_keys(keys, stretch.keys, at + 1, min(stretch.end, count))
            found.update(dict.fromkeys(stretch.holders, at))
            if at < stretch.end:
                break
            following = stretch.following
        return found


def _split(stretch: _Stretch[_Holder], at: int) -> None:
    """Let a stretch end earlier, and what it loses follow it."""
    keys = stretch.keys
    rest: _Stretch[_Holder] = _Stretch(keys, stretch.end)
    rest.holders, rest.following = stretch.holders.copy(), stretch.following
    stretch.end, stretch.following = at, {keys[at]: rest}


def equal_keys(keys: Sequence[int], theirs: Sequence[int], low: int, high: int) -> int:
    """How many leading keys of two prompts are the same.

    Args:
        keys: Of the one.
        theirs: Of the other.
        low: At least so many are.
        high: At most so many can be.
    """
    if low < high and keys[high - 1] == theirs[high - 1]:
        return high
    while low < high:
        middle = (low + high) // 2
        if keys[middle] == theirs[middle]:
            low = middle + 1
        else:
            high = middle
    return low
