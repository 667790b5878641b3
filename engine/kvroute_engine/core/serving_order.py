"""Orders the sequences that a step serves, by policy.

    fcfs        running ones as they were admitted, then waiting ones as they arrived
    priority    the same, but both by the priority that their requests name, lower first
    shortest    sequences in decode, then all prompts, begun or not, by the tokens left to compute

The last one ages with work instead of time: a request that waits while the engine computes n tokens
counts as n / 10 tokens shorter. So a prompt of m tokens is overtaken only by prompts that arrive
before the engine has computed 10 * m more, however fast it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from heapq import nsmallest
from itertools import chain
from typing import Protocol

from kvroute_engine.core.sequence import SequenceInProgress
from offload.cache_manager import CacheManager

_AGEING = 0.1
"""Tokens that each token computed in the meantime is worth. Without it the longest prompts starve;
at 0.5 little is gained over arrival order."""
_LOOKED_UP = 32
"""Waiting prompts whose hits are looked up again in a step; the others keep their ranks."""


class SchedulingPolicy(Enum):
    """The orders of requests; the first two are vLLM's."""

    FCFS = "fcfs"
    PRIORITY = "priority"
    SHORTEST = "shortest"


class ServingOrder(Protocol):
    """One policy."""

    def place(self, sequence: SequenceInProgress) -> tuple[int, int]:
        """Return the place of a sequence among those that wait; the lowest stands first."""
        ...

    def turns(
        self, running: Sequence[SequenceInProgress], waiting: Sequence[SequenceInProgress]
    ) -> Iterable[SequenceInProgress]:
        """Yield all sequences, in the order in which a step serves them.

        Args:
            running: In the order of their admission; may change during the iteration.
            waiting: In the order of their places; may change as well.
        """
        ...

    def last(self, running: Sequence[SequenceInProgress]) -> SequenceInProgress:
        """Return the one of these that gives up its blocks when too few are free."""
        ...


class _ArrivalOrder:
    """First come, first served."""

    def place(self, sequence: SequenceInProgress) -> tuple[int, int]:
        return 0, sequence.number

    def turns(
        self, running: Sequence[SequenceInProgress], waiting: Sequence[SequenceInProgress]
    ) -> Iterable[SequenceInProgress]:
        return chain(tuple(running), tuple(waiting))

    def last(self, running: Sequence[SequenceInProgress]) -> SequenceInProgress:
        return running[-1]


class _PriorityOrder(_ArrivalOrder):
    """Serves by the requests' own priorities; waiting ones do not hold up running ones."""

    def place(self, sequence: SequenceInProgress) -> tuple[int, int]:
        return sequence.request.priority, sequence.number

    def turns(
        self, running: Sequence[SequenceInProgress], waiting: Sequence[SequenceInProgress]
    ) -> Iterable[SequenceInProgress]:
        return [*sorted(running, key=self.place), *waiting]

    def last(self, running: Sequence[SequenceInProgress]) -> SequenceInProgress:
        return max(running, key=self.place)


class _ShortestOrder(_ArrivalOrder):
    """Serves by the tokens left to compute, with ageing."""

    def __init__(self, cache: CacheManager) -> None:
        self._cache = cache
        self._left: dict[SequenceInProgress, int] = {}
        """Tokens to compute of those that wait, when they were looked up."""

    def turns(
        self, running: Sequence[SequenceInProgress], waiting: Sequence[SequenceInProgress]
    ) -> Iterable[SequenceInProgress]:
        self._look_up(waiting)
        decoding = [sequence for sequence in running if sequence.num_tokens_left == 1]
        prompts = [*_in_prefill(running), *waiting]
        return [*decoding, *sorted(prompts, key=self._rank)]

    def last(self, running: Sequence[SequenceInProgress]) -> SequenceInProgress:
        return max(_in_prefill(running), key=self._rank, default=running[-1])

    def _look_up(self, waiting: Sequence[SequenceInProgress]) -> None:
        """Look up the hits of new ones, and again those of the first ones: others that ran
        meanwhile may have cached more of them, or evicted it."""
        known, self._left = self._left, {}
        for sequence in waiting:
            left = known.get(sequence)
            self._left[sequence] = self._to_compute(sequence) if left is None else left
        for sequence in nsmallest(_LOOKED_UP, waiting, key=self._rank):
            if sequence in known:
                self._left[sequence] = self._to_compute(sequence)

    def _to_compute(self, sequence: SequenceInProgress) -> int:
        """Return how many tokens the GPU's cache lacks; those in lower tiers would have to be
        loaded."""
        return (
            sequence.cache.num_tokens - self._cache.get_computed_blocks(sequence.cache).num_tokens
        )

    def _rank(self, sequence: SequenceInProgress) -> float:
        left = self._left.get(sequence, sequence.num_tokens_left)
        return left + _AGEING * sequence.arrived_at


def _in_prefill(running: Sequence[SequenceInProgress]) -> list[SequenceInProgress]:
    return [sequence for sequence in running if sequence.num_tokens_left > 1]


def serving_order(policy: SchedulingPolicy, cache: CacheManager) -> ServingOrder:
    """Make the order of a policy.

    Args:
        cache: The engine's, where hits of prompts that wait are looked up.
    """
    if policy is SchedulingPolicy.SHORTEST:
        return _ShortestOrder(cache)
    return _PriorityOrder() if policy is SchedulingPolicy.PRIORITY else _ArrivalOrder()
