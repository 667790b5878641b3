"""Learns from one tenant's prompts: nothing that another tenant sends changes it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import chain

import msgspec

from router.index.mirror_types import STEP
from router.prompt.prompts import MessageEnds
from router.routing.branches import BranchPoints, PromptBranches
from router.routing.fading import FadingRatio
from router.routing.tails import Tails

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
    """Branch points, and which kinds of boundary are asked for again."""

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
