"""Prefixes by marks, and what any replica has ever computed: what a perfect cache would hold."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence

STEP = 32
"""Tokens between two marks."""


def marks(tokens: Sequence[int], step: int = STEP) -> list[int]:
    """Return one number for each leading multiple of *step* tokens.

    It is made from one token in every *step*: texts of the simulation share no tokens, so that
    those tell prefixes apart.
    """
    mark, found = 0, list[int]()
    for token in tokens[step - 1 :: step]:
        mark = hash((mark, token))
        found.append(mark)
    return found


def known_marks(prompt: Sequence[int], known: Collection[int]) -> int:
    """Return how many leading marks of a prompt are among *known*, where none is without those
    before."""
    return bisect_left(prompt, True, key=lambda mark: mark not in known)


class SeenPrefixes:
    """Everything that was ever asked for or answered."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def add(self, tokens: Sequence[int]) -> int:
        """Remember a sequence; return how many of its leading tokens were known before."""
        found = marks(tokens)
        known = known_marks(found, self._seen)
        self._seen.update(found[known:])
        return known * STEP
