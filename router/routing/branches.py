"""Finds where the prompts of a fleet part, and recognises prompts that continue an earlier one.

A key stands for a prefix of so many steps of tokens. What followed a key first is remembered; when
something else follows, prompts part there, and a third one will ask for just that prefix. A prompt
that begins with the whole of an earlier one is its session's next turn: nothing parts there.

Keys give the step in which prompts part. The second prompt's tokens of that step are kept, so that
the third one shows after how many tokens.

    first   system | document | question 1             nothing is known yet
    second  system | document | question 2             they part behind the document
    third   system | document | question 2 | answer | question 3       goes on: no branch
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import islice, takewhile
from typing import NamedTuple
from zlib import crc32

import msgspec


class PromptBranches(NamedTuple):
    """Holds what earlier prompts show of a new one."""

    branches: list[int]
    """Lengths in tokens at which prompts part, the longest first; in whole steps until it is known
    better."""
    is_continued: bool
    """True if it continues an earlier prompt."""
    known_tokens: int
    """Tokens of its prefix that others have had, in whole steps."""
    new_branch: int
    """The length at which it is the first to part from others, in tokens; 0: none."""
    exact_branch: int = 0
    """The exact length at which prompts part, where it is the first to show it; 0: none."""


class _Tail(msgspec.Struct, frozen=True, gc=False):
    """The tokens of a prompt behind its last key: too few for another."""

    tokens: int
    digest: int


class _Branch(msgspec.Struct, gc=False):
    """A key behind which prompts part."""

    ahead: array[int]
    """The second prompt's tokens in the next step."""
    shared: int | None = None
    """Tokens of these that all later prompts had; None: no later prompt."""


class BranchPoints:
    """The branch points of one model's prompts.

    Memory: some 150 bytes for each key; it grows until `forget` is called.
    """

    def __init__(self, step: int) -> None:
        """
        Args:
            step: Tokens from one key to the next.
        """
        self._step = step
        self._following: dict[int, int | _Tail | None] = {}
        """By key: the next key of the prompt that came first, or how its prompt ended."""
        self._branches: dict[int, _Branch] = {}
        """The branches, by the key behind which prompts part; the latest used at the end."""

    def __len__(self) -> int:
        return len(self._following)

    def record(self, keys: Sequence[int], token_ids: Sequence[int]) -> PromptBranches:
        """Record a prompt; return what is known of it.

        Args:
            keys: Its prefixes' keys, one for each whole step.
        """
        following, known = self._following, self._known(keys)
        is_continued, new_branch, exact_branch = False, 0, 0
        if known:
            last = keys[known - 1]
            before = following[last]
            now = keys[known] if known < len(keys) else self._tail(token_ids)
            is_continued = self._continues(before, now, token_ids, known)
            if is_continued:
                following[last] = now
            elif before is not None and now is not None and before != now:
                new_branch, exact_branch = self._part(last, known * self._step, token_ids)
        for index in range(known, len(keys)):
            is_last = index + 1 == len(keys)
            following[keys[index]] = self._tail(token_ids) if is_last else keys[index + 1]
        branches = self._found(keys, token_ids)
        return PromptBranches(branches, is_continued, known * self._step, new_branch, exact_branch)

    def _known(self, keys: Sequence[int]) -> int:
        """How many leading keys were seen before."""
        following = self._following
        return next((i for i, key in enumerate(keys) if key not in following), len(keys))

    def _tail(self, token_ids: Sequence[int]) -> _Tail | None:
        tokens = len(token_ids) % self._step
        return _Tail(tokens, _digest(token_ids[-tokens:])) if tokens else None

    def _continues(
        self,
        before: int | _Tail | None,
        now: int | _Tail | None,
        token_ids: Sequence[int],
        known: int,
    ) -> bool:
        """Return whether a prompt ended behind the key, and the new one goes on with its last
        tokens."""
        if isinstance(before, int) or now is None:
            return False
        if before is None:
            return True
        start = known * self._step
        theirs = token_ids[start : start + before.tokens]
        is_longer = len(token_ids) > start + before.tokens
        return is_longer and _digest(theirs) == before.digest

    def _part(self, key: int, start: int, token_ids: Sequence[int]) -> tuple[int, int]:
        """Note that a prompt parts from others in the step behind a key; return where that is new,
        and where it is known exactly for the first time; else 0."""
        ahead = self._ahead(start, token_ids)
        branch = self._branches.get(key)
        if branch is None:
            self._branches[key] = _Branch(ahead)
            return start, 0
        if ahead == branch.ahead:
            return 0, 0  # the second prompt again
        pairs = zip(branch.ahead, ahead, strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        is_first = branch.shared is None
        branch.shared = shared if branch.shared is None else min(shared, branch.shared)
        return 0, start + shared if is_first else 0

    def _ahead(self, start: int, token_ids: Sequence[int]) -> array[int]:
        return array("I", token_ids[start : start + self._step])

    def _found(self, keys: Sequence[int], token_ids: Sequence[int]) -> list[int]:
        found = [index for index, key in enumerate(keys, 1) if key in self._branches]
        return [self._length(index, keys[index - 1], token_ids) for index in reversed(found)]

    def _length(self, index: int, key: int, token_ids: Sequence[int]) -> int:
        """Return the length of a branch that a prompt goes through, in tokens; it is used."""
        branch = self._branches.pop(key)
        self._branches[key] = branch
        start, shared = index * self._step, branch.shared or 0
        is_same = self._ahead(start, token_ids)[:shared] == branch.ahead[:shared]
        return start + shared if is_same else start

    def forget(self, count: int) -> None:
        """Forget the *count* keys that were seen first, and the branches beyond their share."""
        following = self._following
        for key in list(islice(following, count)):
            del following[key]
        most = max(len(following) // 16, 1)
        for key in list(islice(self._branches, max(len(self._branches) - most, 0))):
            del self._branches[key]


def _digest(token_ids: Sequence[int]) -> int:
    return crc32(b"".join(int(token).to_bytes(8, "little", signed=True) for token in token_ids))
