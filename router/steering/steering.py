"""Which prefixes of a prompt an engine is told to keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from router.mirror import STEP, FadingRatio
from router.steering.branches import BranchPoints, Seen
from router.steering.tails import Tails

MOST_BOUNDARIES = 8
"""That one request names."""
LEAST_SHARE = 0.05
"""Ends of messages of a kind of which fewer were asked for again are not worth a window."""
GOES_ON = 0.2
"""From this share of responses on that are continued, they are kept."""
_SAMPLES = 256


class Hints(NamedTuple):
    """What an engine should keep of a request that it would not keep by itself."""

    keep: tuple[int, ...] = ()
    """Lengths of prefixes in tokens, at most `MOST_BOUNDARIES`, the shortest first."""
    keep_end: bool = False
    """Whether the response is likely to be continued."""


NO_HINTS = Hints()


@dataclass(frozen=True, slots=True)
class SteeringStatistics:
    """Counts since the start, but for `keys`."""

    keys: int
    """Prefixes that are remembered."""
    branch_points: int
    """Boundaries named where prompts were seen to part."""
    message_ends: int
    """Boundaries named where prompts are expected to part: ends of messages."""
    guesses: int
    """Boundaries named where prompts are expected to part by how they parted before."""
    kept_ends: int
    """Requests whose response is to be kept."""


class _Kind:
    """Ends of messages in one place of a prompt: behind the system prompt, say."""

    __slots__ = ("asked_again",)

    def __init__(self) -> None:
        self.asked_again = FadingRatio(1.0, 4.0, _SAMPLES)
        """Of those that were new, how many became a branch point."""


class Steering:
    """What is told for the requests of one model. No I/O, no clock."""

    def __init__(self, max_keys: int = 262_144) -> None:
        """
        Args:
            max_keys: Bound on the prefixes that are remembered.
        """
        self._branches = BranchPoints(STEP, max_keys)
        self._kinds = [_Kind() for _ in range(MOST_BOUNDARIES)]
        self._tails = Tails()
        self._goes_on = FadingRatio(0.5, 4.0, _SAMPLES)
        self._branch_points = self._message_ends = self._guesses = self._kept_ends = 0

    def hints(
        self, keys: Sequence[int], token_ids: Sequence[int], message_ends: Sequence[int] = ()
    ) -> Hints:
        """Take note of a prompt, and say what to keep of it.

        Args:
            keys: Of its prefixes of `STEP` tokens, twice as many, and so on.
            token_ids: The prompt's.
            message_ends: Lengths in tokens at which it is expected to part from others, ascending;
                each place among them is a kind of its own.
        """
        seen = self._branches.see(keys, token_ids)
        self._goes_on.add(float(seen.is_continued), 1.0)
        named = seen.branches[:MOST_BOUNDARIES]
        self._branch_points += len(named)
        for kind, end in zip(self._kinds, message_ends, strict=False):
            self._learn(kind, end, seen.known_tokens, seen.new_branch)
            is_new = all(end // STEP != other // STEP for other in named)
            if is_new and kind.asked_again.value >= LEAST_SHARE:
                named.append(end)
                self._message_ends += 1
        if not message_ends:
            self._guess(named, len(token_ids), seen)
        named = named[:MOST_BOUNDARIES]
        keep_end = self._goes_on.value >= GOES_ON
        self._kept_ends += keep_end
        return Hints(tuple(sorted(named)), keep_end)

    def _guess(self, named: list[int], prompt_tokens: int, seen: Seen) -> None:
        """Name where a new prompt will part from later ones, where nothing tells of messages."""
        if seen.new_branch:
            self._tails.parted(prompt_tokens - seen.new_branch)
        if seen.is_continued or prompt_tokens - seen.known_tokens < STEP:
            return
        if seen.known_tokens < prompt_tokens // 2:
            self._tails.new()
        guesses = self._tails.guesses(prompt_tokens, seen.known_tokens)
        self._guesses += len(guesses)
        named += guesses

    def statistics(self) -> SteeringStatistics:
        """Counts since the start."""
        return SteeringStatistics(
            keys=len(self._branches),
            branch_points=self._branch_points,
            message_ends=self._message_ends,
            guesses=self._guesses,
            kept_ends=self._kept_ends,
        )

    def _learn(self, kind: _Kind, end: int, known_tokens: int, new_branch: int) -> None:
        if end // STEP * STEP > known_tokens:
            kind.asked_again.add(0.0, 1.0)  # nobody had it before
        elif new_branch and new_branch == end // STEP * STEP:
            kind.asked_again.add(1.0, 0.0)
