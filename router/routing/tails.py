"""Guesses where a prompt that is new as a whole will part from later ones, by earlier prompts.

Many prompts begin with something long that others will share, and end with something short that
they will not: a question behind a document. Where the one ends and the other begins is unknown
until a second prompt shows it. But how long such ends were is known, and a boundary that lies
somewhat before the right one is nearly as good.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque

from router.routing.fading import FadingRatio

_SAMPLES = 256
_ENOUGH = 16
"""Exact lengths, from which on the others, which are up to a step too long, do not count."""
LEAST_SHARE = 0.05
"""Below this share of new prompts that later ones part from, no guess is made."""
MOST_GUESSES = 2


class _Lengths:
    """The latest lengths."""

    def __init__(self) -> None:
        self._latest: deque[int] = deque()
        self.ascending: list[int] = []

    def add(self, tokens: int) -> None:
        self._latest.append(tokens)
        insort(self.ascending, tokens)
        if len(self._latest) > _SAMPLES:
            self.ascending.remove(self._latest.popleft())


class Tails:
    """Lengths in tokens of what prompts had behind the point where a later one left them."""

    def __init__(self) -> None:
        self._rough, self._exact = _Lengths(), _Lengths()
        self._parted = FadingRatio(0.0, 4.0, _SAMPLES)
        """The share of new prompts that a later one parts from."""

    def new(self) -> None:
        """Count a prompt whose end no other had."""
        self._parted.add(0.0, 1.0)

    def parted(self, tail_tokens: int) -> None:
        """Note that a prompt parted from an earlier one *tail_tokens* before its end, or up to a
        step less."""
        self._parted.add(1.0, 0.0)
        self._rough.add(tail_tokens)

    def exactly(self, tail_tokens: int) -> None:
        """Note the exact place where prompts part: *tail_tokens* before the end."""
        self._exact.add(tail_tokens)

    def guesses(self, prompt_tokens: int, known_tokens: int) -> list[int]:
        """The boundaries that save most, by what was seen so far, in tokens.

        With a boundary d tokens before the end, those that part at most d before the end reuse all
        up to it.

        Args:
            known_tokens: Of these, the leading ones that others have had: no guess lies there.
        """
        if self._parted.value < LEAST_SHARE:
            return []
        is_exact = len(self._exact.ascending) >= _ENOUGH
        tails = (self._exact if is_exact else self._rough).ascending
        found: list[int] = []
        for _ in range(MOST_GUESSES):
            best = max(
                ((_saved(tails, prompt_tokens, [*found, tail]), tail) for tail in tails[::-8]),
                default=(0.0, 0),
            )
            if best[0] <= _saved(tails, prompt_tokens, found) * 1.05:
                break
            found.append(best[1])
        return [prompt_tokens - d for d in found if prompt_tokens - d > known_tokens]


def _saved(tails: list[int], prompt_tokens: int, distances: list[int]) -> float:
    """Tokens that such boundaries save, summed over all tails, which ascend."""
    saved, below = 0.0, 0
    for distance in sorted(distances):
        upto = bisect_right(tails, distance)
        saved += (upto - below) * max(prompt_tokens - distance, 0)
        below = upto
    return saved
