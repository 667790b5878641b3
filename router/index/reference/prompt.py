"""A prompt under every key and hash that some source may know its prefixes by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from typing_extensions import override

from kvevents.events import BlockHash, pack_tokens
from kvevents.hashing import ExtraKeys, HashChain
from router.index.base import HashedPrompt
from router.index.reference.extra_keys import marks_of, spellings
from router.index.reference.hash_finder import engine_hashes
from router.index.reference.keys import KeySpace


class PromptKeys(HashedPrompt):
    """Computes each list once, and keeps it."""

    def __init__(
        self,
        space: KeySpace,
        token_ids: Sequence[int],
        lora_name: str | None = None,
        cache_salt: str | None = None,
        extra_keys: Sequence[Any] | None = None,
    ) -> None:
        self.token_ids = token_ids
        self.lora_name = lora_name
        self._space = space
        self._salt = cache_salt
        self._extra_keys = extra_keys
        self._packed = pack_tokens(token_ids)
        self._keys: dict[tuple[int, int], list[int]] = {}
        self._prefix_keys: dict[int, list[int]] = {}
        self._hashes: dict[tuple[HashChain, int, int, bool], list[list[BlockHash]]] = {}

    def keys(self, step: int, lookahead: int = 0) -> list[int]:
        """Keys at every multiple of *step* tokens, each *lookahead* tokens further along.

        Args:
            step: Tokens per entry of the prompt's extra keys.
            lookahead: Tokens behind a block that its hash covers too.
        """
        if (step, lookahead) not in self._keys:
            marks = marks_of(self._extra_keys, step, self.lora_name, self._salt, lookahead)
            ends = range(step + lookahead, len(self.token_ids) + 1, step)
            chain = self._space.chain(self._space.root(self.lora_name), self._packed, ends, marks)
            self._keys[step, lookahead] = list(chain)
        return self._keys[step, lookahead]

    @override
    def prefix_keys(self, step: int) -> Sequence[int]:
        if step not in self._prefix_keys:
            self._prefix_keys[step] = self._picked(step) or self.keys(step)
        return self._prefix_keys[step]

    def _picked(self, step: int) -> list[int] | None:
        """Every n-th of some finer keys that are there already; None if there are none."""
        for finer, lookahead in self._keys:
            if not lookahead and step % finer == 0:
                nth = step // finer
                return self._keys[finer, 0][nth - 1 :: nth]
        return None

    def engine_hashes(
        self, chain: HashChain, step: int, lookahead: int, as_int: bool
    ) -> list[list[BlockHash]]:
        """An engine's hashes at every multiple of *step*: one list for each spelling of extra keys.

        Args:
            chain: The engine's.
            step: Tokens between two hashes.
            lookahead: Tokens behind a block that its hash covers too.
            as_int: As 64-bit integers, else as digests.
        """
        wanted = (chain, step, lookahead, as_int)
        if wanted not in self._hashes:
            self._hashes[wanted] = [
                engine_hashes(chain, self.token_ids, step, extra_keys, lookahead, as_int)
                for extra_keys in self.spellings(step)
            ]
        return self._hashes[wanted]

    def spellings(self, step: int) -> Iterator[Sequence[ExtraKeys]]:
        """The ways in which engines may hash the extra keys of blocks of *step* tokens."""
        blocks = -(-len(self.token_ids) // step)
        return spellings(self._extra_keys, blocks, self.lora_name, self._salt)
