"""Finds out which hash function an engine uses, by trying the known ones on its events.

Only with the function can a block be found that no dense event ever placed: a prompt is then hashed
as the engine would hash it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvevents.events import BlockHash, BlockStored, CacheLayout
from kvevents.hashing import ExtraKeys, HashChain, hash_algorithms, to_wire_int
from kvevents.sealing import held_key


class HashFinder:
    """Tries known functions until one explains an engine's events.

    A wrong function is never taken for the right one, since a match is one of 64 bits or more.
    """

    TOKENS_TO_HASH = 3_200_000
    """Effort until giving up, over all tries; about half a second."""
    BLOCKS_PER_TRY = 256
    PROMPT_TOKENS_PER_TRY = 16_384

    def __init__(self, seeds: Sequence[str]) -> None:
        """
        Args:
            seeds: Values of `PYTHONHASHSEED` the engines may run with.
        """
        self.chain: HashChain | None = None
        """The engine's function, once it is known."""
        self._withheld: HashChain | None = None
        """The engine's function, where the key of its hashes is missing here."""
        self._seeds = seeds
        self._effort = 0

    @property
    def may_find(self) -> bool:
        """Return False once found, and once trying has proved useless."""
        is_searching = self.chain is None and self._withheld is None
        return is_searching and self._effort < self.TOKENS_TO_HASH

    def see_announcement(self, event: CacheLayout) -> None:
        """Believe the publisher, if it names an algorithm that is available here."""
        if event.hash_algorithm in hash_algorithms() and event.none_hash:
            self.take(HashChain(event.hash_algorithm, event.none_hash, event.hash_key_id))

    def take(self, chain: HashChain | None) -> None:
        """Use a known function, if its key is here."""
        key_id = None if chain is None else chain.key_id
        is_foreign = key_id is not None and held_key(key_id) is None
        self.chain, self._withheld = (None, chain) if is_foreign else (chain, None)

    @property
    def known(self) -> HashChain | None:
        """The engine's function, whether its key is here or not."""
        return self.chain or self._withheld

    @property
    def key_problem(self) -> str | None:
        """Return the fault of the key of the source's hashes, as a sentence for an operator."""
        if self._withheld is None:
            return None
        return (
            f"its blocks are announced under the hash key {self._withheld.key_id}, "
            "which is not here: no prompt can find them; configure events.hash_key"
        )

    def try_event(self, event: BlockStored, hash_block_size: int) -> None:
        """Try every known chain on an event that starts at the root.

        Args:
            event: Any; one that proves nothing is ignored.
        """
        sample = _sample(event)
        if sample is not None and len(sample.tokens) <= self.BLOCKS_PER_TRY * hash_block_size:
            self._try(sample.tokens, hash_block_size, sample.lookahead, sample.is_explained_by)

    def try_prompt(
        self,
        token_ids: Sequence[int],
        spellings: Iterable[Sequence[ExtraKeys]],
        hash_block_size: int,
        lookahead: int,
        holds: Callable[[BlockHash], bool],
    ) -> None:
        """Try every known chain on a prompt: is one of its blocks held?

        Args:
            spellings: From `prompt.spellings`.
            lookahead: Tokens behind a block that its hash covers too.
        """
        longest = min(self.BLOCKS_PER_TRY * hash_block_size, self.PROMPT_TOKENS_PER_TRY)
        tokens = token_ids[: longest + lookahead]

        def is_held(hashes: list[BlockHash]) -> bool:
            return any(map(holds, hashes))

        for extra_keys in spellings:
            if self.chain is None:
                self._try(tokens, hash_block_size, lookahead, is_held, extra_keys)

    def _try(
        self,
        tokens: Sequence[int],
        step: int,
        lookahead: int,
        is_right: Callable[[list[BlockHash]], bool],
        extra_keys: Sequence[ExtraKeys] = (),
    ) -> None:
        for algorithm, seed in itertools.product(hash_algorithms(), self._seeds):
            if not self.may_find:
                return
            chain = HashChain.from_seed(algorithm, seed)
            digests = list(chain.block_hashes(tokens, step, extra_keys, lookahead))
            self._effort += (len(digests) + 1) * (step + lookahead)
            if is_right([*digests, *map(to_wire_int, digests)]):
                self.chain = chain
                return


@dataclass(frozen=True, slots=True)
class _Sample:
    """The start of a prompt, and hashes that must appear in its chain."""

    tokens: list[int]
    lookahead: int
    wanted: frozenset[BlockHash]

    def is_explained_by(self, hashes: Iterable[BlockHash]) -> bool:
        return self.wanted <= set(hashes)


def _sample(event: BlockStored) -> _Sample | None:
    """Return what an event proves about the chain; None unless it starts at the root without extra
    keys.

    A dense event proves as much with its first block as with all. In one with holes every hash must
    be in the chain over all of its tokens: which block each belongs to is unknown.
    """
    if (
        event.parent_block_hash is not None
        or not event.block_hashes
        or event.adapter is not None
        or any(event.extra_keys or ())
    ):
        return None
    tails = event.lookahead_token_ids or [[]]
    size = event.tokens_per_block
    if size:
        first = frozenset(event.block_hashes[:1])
        return _Sample(event.token_ids[:size] + tails[0], len(tails[0]), first)
    return _Sample(event.token_ids + tails[-1], len(tails[-1]), frozenset(event.block_hashes))


class HashForm(NamedTuple):
    """The form in which an engine announces the hashes of its blocks."""

    chain: HashChain
    hash_block_size: int
    lookahead: int = 0
    """Tokens behind a block that its hash covers too."""
    as_int: bool = False
    """True if they are 64-bit integers, else digests."""


def engine_hashes(
    form: HashForm, token_ids: Sequence[int], extra_keys: Sequence[ExtraKeys] = ()
) -> list[BlockHash]:
    """A prompt's hashes in the form the engine puts on the wire.

    Args:
        extra_keys: In one spelling, by hash block.
    """
    chain = form.chain
    digests = chain.block_hashes(token_ids, form.hash_block_size, extra_keys, form.lookahead)
    key = None if chain.key_id is None else held_key(chain.key_id)
    if key is not None:
        return [key.seal(found) for found in digests]
    return [to_wire_int(found) for found in digests] if form.as_int else list(digests)
