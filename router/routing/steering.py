"""Chooses the prefixes of a prompt that an engine is asked to keep, and counts what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

from kvevents.field_docs import counter
from router.index.mirror_types import STEP
from router.prompt.prompts import NO_ENDS, MessageEnds
from router.routing.tenant import ContinuationSign, Found, Tenant

MAX_TENANTS = 1024
"""The most tenants; the one that sent a request least recently is forgotten."""
_AT_ONCE = 64
"""One part in so many of all keys is forgotten at once."""


class Hints(NamedTuple):
    """The parts of a request that an engine should keep and would not by itself."""

    keep: tuple[int, ...] = ()
    """Lengths of prefixes in tokens, at most `MOST_BOUNDARIES`, the shortest first."""
    keep_end: bool = False
    """True if the response is likely to be continued."""


NO_HINTS = Hints()


@dataclass(slots=True)
class SteeringStatistics:
    """Counts since the start, but for `keys`."""

    keys: int = 0
    """Prefixes that are remembered."""
    branch_points: int = 0
    """Boundaries named where prompts were seen to part."""
    message_ends: int = 0
    """Boundaries named where prompts are expected to part: ends of messages."""
    guesses: int = 0
    """Boundaries named where prompts are expected to part by how they parted before."""
    kept_ends: int = 0
    """Requests whose response is to be kept."""
    kept: int = 0
    """Prompts that begin with a named boundary and find it cached."""
    lost: int = 0
    """Prompts that begin with a named boundary and find less of it cached."""
    hit: int = 0
    """Prompts of `kept` whose hit ends just there: without the hint it would have been shorter."""
    hit_tokens: Annotated[int, counter("kvroute_boundary_hit_tokens")] = 0
    """Prompt tokens of the hits that end where a replica was asked to keep a boundary."""


class Steering:
    """Decides what engines are asked to keep, for the requests of one model. No I/O, no clock.

    Each tenant has branch points and ratios of its own, so that none learns from, or is misled by,
    what another sends; and where the memory is full, the one that takes most of it forgets.
    """

    def __init__(self, max_keys: int = 262_144) -> None:
        """
        Args:
            max_keys: Bound on the prefixes that are remembered, for all tenants together.
        """
        self._max_keys = max_keys
        self._keys = 0
        self._tenants: dict[str, Tenant] = {}
        self._named: dict[int, int] = {}
        """Lengths of named boundaries in tokens, by key; the latest at the end."""
        self._counts = SteeringStatistics()

    def hints(
        self,
        keys: Sequence[int],
        token_ids: Sequence[int],
        ends: MessageEnds = NO_ENDS,
        tenant: str = "",
        continuation: ContinuationSign = ContinuationSign.NONE,
    ) -> Hints:
        """Record a prompt; return what to keep of it.

        Args:
            keys: Its prefixes' keys, one for every `STEP` tokens.
        """
        known = self._tenants.pop(tenant, None) or Tenant()
        self._tenants[tenant] = known
        before = len(known.branches)
        found = known.find(keys, token_ids, ends, continuation)
        self._keys += len(known.branches) - before
        self._forget()
        hints = Hints(found.boundaries, found.keeps_end)
        self._count(hints, found)
        for length in hints.keep:
            if length >= STEP:
                self._name(keys[length // STEP - 1], length)
        return hints

    def look_up(self, keys: Sequence[int], cached_tokens: int, step: int) -> None:
        """Count the outcome of earlier hints; call it before `hints`.

        Args:
            cached_tokens: The prompt's hit where it is sent.
            step: Tokens from one length of a hit to the next, at most.
        """
        self.count_outcome(self.named(keys), cached_tokens, step)

    def named(self, keys: Sequence[int]) -> list[int]:
        """The lengths of a prompt's prefixes that were named, for `count_outcome`."""
        return [self._named[key] for key in keys if key in self._named]

    def count_outcome(self, lengths: Sequence[int], cached_tokens: int, step: int) -> None:
        """Count like `look_up`, where it is known only later where a prompt is sent.

        Args:
            lengths: From `named`, before `hints`.
        """
        if not lengths:
            return
        counts, longest = self._counts, lengths[-1]
        if cached_tokens <= longest - step:
            counts.lost += 1
            return
        counts.kept += 1
        if cached_tokens <= longest:
            counts.hit += 1
            counts.hit_tokens += cached_tokens

    def statistics(self) -> SteeringStatistics:
        return replace(self._counts, keys=self._keys)

    def _count(self, hints: Hints, found: Found) -> None:
        counts, named = self._counts, set(hints.keep)
        counts.branch_points += len(named.intersection(found.branches))
        counts.message_ends += len(named.intersection(found.ends).difference(found.branches))
        counts.guesses += len(named.difference(found.branches, found.ends))
        counts.kept_ends += hints.keep_end

    def _name(self, key: int, length: int) -> None:
        self._named.pop(key, None)
        self._named[key] = length
        if len(self._named) > self._max_keys // 16:
            del self._named[next(iter(self._named))]

    def _forget(self) -> None:
        if len(self._tenants) > MAX_TENANTS:
            self._keys -= len(self._tenants.pop(next(iter(self._tenants))).branches)
        while self._keys > self._max_keys:
            largest = max((each.branches for each in self._tenants.values()), key=len)
            before = len(largest)
            largest.forget(self._keys - self._max_keys + self._max_keys // _AT_ONCE)
            self._keys -= before - len(largest)
