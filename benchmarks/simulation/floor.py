"""The floor that hardly any router can go below: all caches as one, which every replica can use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from benchmarks.simulation.seen import known_marks, marks

STEP = 64
"""Tokens between two marks."""


class OneCacheForAll:
    """The same requests, at the same times, at replicas that share one cache of the size of all of
    theirs: it holds no copies, it evicts what was used least recently, and each request goes where
    it begins first. Decoding takes nothing, and what is being computed can be used already.

    What is computed takes its place in every group; of all but one group, what windows have left
    behind is not used again. Any prefix that the first group holds is a hit.

    Args:
        cache_tokens: Of one replica, in every group.
        groups: Of its layout.
        replicas: How many there are.
        alone_s: The time to the first token of a prompt on an idle replica, from the tokens that
            need not be computed and its length.
    """

    def __init__(
        self,
        cache_tokens: int,
        groups: int,
        replicas: int,
        alone_s: Callable[[int, int], float],
    ) -> None:
        self._free = cache_tokens * replicas // STEP * groups
        self._others = groups - 1
        self._held: OrderedDict[int, int] = OrderedDict()
        """The marks of the blocks that each takes: a mark is there for the first group, its
        complement for the others."""
        self._free_at_s = [0.0] * replicas
        self._alone_s = alone_s

    def ttft_s(self, tokens: Sequence[int], now_s: float) -> float:
        """Return the time to the first token of a request that comes now.

        Args:
            tokens: Its prompt.
            now_s: Never falls.
        """
        found = marks(tokens, STEP)
        known = min(known_marks(found, self._held) * STEP, len(tokens) - 1)
        self._use(found)
        work_s = self._alone_s(known, len(tokens))
        replica = self._free_at_s.index(min(self._free_at_s))
        begin_s = max(now_s, self._free_at_s[replica])
        self._free_at_s[replica] = begin_s + work_s
        return begin_s + work_s - now_s

    def answered(self, tokens: Sequence[int]) -> None:
        """A prompt with its response is cached."""
        self._use(marks(tokens, STEP))

    def _use(self, found: Sequence[int]) -> None:
        held, known = self._held, known_marks(found, self._held)
        for mark in found[known:] if self._others else ():
            self._free += held.get(~mark, 0) - self._others
            held[~mark] = self._others
            held.move_to_end(~mark)
        self._free -= sum(mark not in held for mark in found[known:])
        for mark in reversed(found):  # what is behind goes first
            held[mark] = 1
            held.move_to_end(mark)
        while self._free < 0:
            self._free += held.popitem(last=False)[1]
