"""Chooses the prefixes of a prompt that an engine is asked to keep, and counts what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain
from typing import Annotated, NamedTuple

import msgspec

from kvevents.field_docs import counter
from router.index.mirror_types import STEP
from router.prompt.prompts import NO_ENDS, MessageEnds
from router.routing.branches import BranchPoints, PromptBranches
from router.routing.fading import FadingRatio
from router.routing.tails import Tails

MAX_TENANTS = 1024
"""The most tenants; the one that sent a request least recently is forgotten."""
_AT_ONCE = 64
"""One part in so many of all keys is forgotten at once."""
MOST_BOUNDARIES = 8
"""The most boundaries that one request names."""
LEAST_SHARE = 0.05
"""Kinds of message end of which a smaller share was asked for again are not worth a window."""
GOES_ON = 0.2
"""Responses are kept if at least this share of them is continued."""
_SAMPLES = 256


class ContinuationSign(Enum):
    """Names the sign in a request that it will be continued."""

    NONE = "none"
    SESSION = "session"
    """It names its session."""
    RETENTION = "retention"
    """It asks that its prompt be kept (`prompt_cache_retention`)."""


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

    def named(self, keys: Sequence[int]) -> list[int]:
        """The lengths of a prompt's prefixes that were named, for `count_outcome`."""
        return [self._named[key] for key in keys if key in self._named]

    def count_outcome(self, lengths: Sequence[int], cached_tokens: int, step: int) -> None:
        """Count the outcome of earlier hints.

        Args:
            lengths: From `named`, before `hints`.
            cached_tokens: The prompt's hit where it is sent.
            step: Tokens from one length of a hit to the next, at most.
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


# --- what one tenant's prompts show --------------------------------------------------------------


class Found(msgspec.Struct, frozen=True):
    """Holds what to keep of one prompt, by where that is known from; lengths in tokens."""

    branches: list[int]
    """Where prompts were seen to part."""
    ends: list[int]
    """Ends of messages, and what the client named."""
    guesses: list[int]
    """Where earlier prompts that ended alike were left."""
    keeps_end: bool
    """True if the response is likely to be continued."""

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The first `MOST_BOUNDARIES` of all, ascending. Branches are seen in whole steps: an end
        of a message in the same step is where prompts really part."""
        kept: dict[int, int] = {}
        for length in chain(self.branches, self.ends, self.guesses):
            kept[length // STEP] = max(kept.get(length // STEP, 0), length)
        return tuple(sorted(list(kept.values())[:MOST_BOUNDARIES]))


class Tenant:
    """Learns from one tenant's prompts where they part, and which kinds of boundary are asked for
    again: nothing that another tenant sends changes it."""

    def __init__(self) -> None:
        self.branches = BranchPoints(STEP)
        self._kinds = [FadingRatio(1.0, 4.0, _SAMPLES) for _ in range(MOST_BOUNDARIES)]
        """By place among a prompt's ends of messages (such as behind the system prompt): the share
        of new ones that became a branch point."""
        self._named = FadingRatio(1.0, 4.0, _SAMPLES)
        """The same of what clients named."""
        self._tails = Tails()
        self._goes_on = {sign: FadingRatio(0.5, 4.0, _SAMPLES) for sign in ContinuationSign}
        """By sign, the share of prompts that continue an earlier one."""

    def find(
        self,
        keys: Sequence[int],
        token_ids: Sequence[int],
        ends: MessageEnds,
        continuation: ContinuationSign,
    ) -> Found:
        """Record a prompt; return what to keep of it.

        Args:
            keys: Its prefixes' keys, one for each whole step.
        """
        seen = self.branches.record(keys, token_ids)
        goes_on = self._goes_on[continuation]
        goes_on.add(float(seen.is_continued), 1.0)
        kinds = [*zip(self._kinds, ends.expected, strict=False)]
        kinds += [(self._named, end) for end in ends.named[-MOST_BOUNDARIES:]]
        for kind, end in kinds:
            _learn(kind, end, seen)
        return Found(
            seen.branches[:MOST_BOUNDARIES],
            [end for kind, end in kinds if kind.value >= LEAST_SHARE],
            [] if kinds else self._guess(len(token_ids), seen),
            goes_on.value >= GOES_ON,
        )

    def _guess(self, prompt_tokens: int, seen: PromptBranches) -> list[int]:
        """Guess where a new prompt will part from later ones, without known ends of messages."""
        if seen.new_branch:
            self._tails.parted(prompt_tokens - seen.new_branch)
        if seen.exact_branch:
            self._tails.exactly(prompt_tokens - seen.exact_branch)
        if seen.is_continued or prompt_tokens - seen.known_tokens < STEP:
            return []
        if seen.known_tokens < prompt_tokens // 2:
            self._tails.new()
        return self._tails.guesses(prompt_tokens, seen.known_tokens)


def _learn(kind: FadingRatio, end: int, seen: PromptBranches) -> None:
    if end // STEP * STEP > seen.known_tokens:
        kind.add(0.0, 1.0)  # no prompt had it before
    elif seen.new_branch and seen.new_branch == end // STEP * STEP:
        kind.add(1.0, 0.0)
