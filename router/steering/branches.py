"""Where the prompts of a fleet part, and how often one goes on where another ended.

A key stands for a prefix of so many steps of tokens. What followed a key first is remembered; when
something else follows, prompts part there, and a third one will ask for just that prefix. A prompt
that begins with the whole of an earlier one is its session's next turn: nothing parts there.

    first   system | document | question 1             nothing is known yet
    second  system | document | question 2             they part behind the document
    third   system | document | question 2 | answer | question 3       goes on: no branch
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple
from zlib import crc32

import msgspec


class Seen(NamedTuple):
    """What the prompts before say of a new one."""

    branches: list[int]
    """Lengths in tokens at which prompts part, the longest first."""
    is_continued: bool
    """Whether it goes on where an earlier prompt ended."""
    known_tokens: int
    """Of its prefix, those that others have had, in whole steps."""
    new_branch: int
    """Where it is the first to part from others, in tokens; 0: nowhere."""


class _Tail(msgspec.Struct, frozen=True, gc=False):
    """What a prompt has behind its last key: too short for another."""

    tokens: int
    digest: int


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
        """By key: the next key of whoever came first, or how its prompt ended."""
        self._branches: dict[int, None] = {}
        """Keys at which prompts part, the one that was asked for last at the end."""

    def __len__(self) -> int:
        return len(self._following)

    def see(self, keys: Sequence[int], token_ids: Sequence[int]) -> Seen:
        """Take note of a prompt, and say what is known of it.

        Args:
            keys: Of its prefixes, one for each whole step.
            token_ids: The prompt's.
        """
        following, known = self._following, self._known(keys)
        is_continued, new_branch = False, 0
        if known:
            last = keys[known - 1]
            before = following[last]
            now = keys[known] if known < len(keys) else self._tail(token_ids)
            is_continued = self._continues(before, now, token_ids, known)
            if is_continued:
                following[last] = now
            elif before is not None and now is not None and before != now:
                new_branch = 0 if last in self._branches else known * self._step
                self._branches[last] = None
        for index in range(known, len(keys)):
            is_last = index + 1 == len(keys)
            following[keys[index]] = self._tail(token_ids) if is_last else keys[index + 1]
        return Seen(self._found(keys), is_continued, known * self._step, new_branch)

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
        """Whether a prompt ended behind the key, and the new one goes on with its last tokens."""
        if isinstance(before, int) or now is None:
            return False
        if before is None:
            return True
        start = known * self._step
        theirs = token_ids[start : start + before.tokens]
        is_longer = len(token_ids) > start + before.tokens
        return is_longer and _digest(theirs) == before.digest

    def _found(self, keys: Sequence[int]) -> list[int]:
        branches = self._branches
        found = [index for index, key in enumerate(keys, 1) if key in branches]
        for index in found:
            del branches[keys[index - 1]]
            branches[keys[index - 1]] = None
        return [index * self._step for index in reversed(found)]

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
