"""What a source's events say about its cache layout, and which hash function it uses.

Known beats assumed: a `CacheLayout` event, else the events' own fields, else the configuration.
What had to be assumed is listed, so that an operator sees it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvevents.errors import LayoutError
from kvevents.events import GPU, BlockHash, BlockStored, CacheLayout
from kvevents.hashing import ExtraKeys, HashChain, hash_algorithms, to_wire_int
from kvevents.layout import GroupKind, KVCacheGroup, KVCacheLayout, kind_from_wire
from router.index.base import LayoutHints

_UNKNOWN_SIZE = "unknown, taken as full attention"


@dataclass(slots=True)
class SeenGroup:
    """What the events of one group have said so far."""

    kind: str | None = None
    sliding_window: int | None = None
    block_size: int = 0
    smallest_size: int = 0
    """Entries inside a block are announced with a smaller size than the group's own (vLLM >=
    0.24)."""

    def see(self, kind: str | None, sliding_window: int | None, block_size: int) -> bool:
        """Take one event's fields; True if something is new."""
        before = (self.kind, self.sliding_window, self.block_size, self.smallest_size)
        self.kind = kind or self.kind
        self.sliding_window = sliding_window or self.sliding_window
        self.smallest_size = min(self.smallest_size or block_size, block_size)
        self.block_size = max(self.block_size, block_size)
        return before != (self.kind, self.sliding_window, self.block_size, self.smallest_size)


@dataclass(slots=True)
class LayoutLearner:
    """The layout of one source, as far as it is known by now."""

    hints: LayoutHints = field(default_factory=LayoutHints)
    lookahead: int = 0
    """Tokens after a block that its hash covers too."""
    announced: CacheLayout | None = None
    layout: KVCacheLayout | None = None
    error: str | None = None
    """Why the groups seen make no layout, if they make none."""
    seen: dict[int, SeenGroup] = field(default_factory=dict)
    _smallest_step: int = 0

    def __post_init__(self) -> None:
        self._rebuild()

    def see_announcement(self, event: CacheLayout) -> None:
        """Take the publisher's own word."""
        self.announced = event
        self._rebuild()

    def see_stored(self, event: BlockStored) -> None:
        """Learn from one event."""
        if event.lookahead_token_ids:
            self.lookahead = max(map(len, event.lookahead_token_ids))
        block_size = event.block_size or event.tokens_per_block
        if not block_size or not event.token_ids or event.tier != GPU:
            return
        group = self.seen.setdefault(event.group_idx or 0, SeenGroup())
        changed = group.see(
            event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window, block_size
        )
        step = math.gcd(self._smallest_step, block_size)
        if changed or step != self._smallest_step:
            self._smallest_step = step
            self._rebuild()

    def restore(
        self, announced: CacheLayout | None, seen: dict[int, SeenGroup], lookahead: int
    ) -> None:
        """Take back what an earlier learner knew."""
        self.announced, self.seen, self.lookahead = announced, seen, lookahead
        self._smallest_step = math.gcd(
            *(size for group in seen.values() for size in (group.block_size, group.smallest_size))
        )
        self._rebuild()

    def _rebuild(self) -> None:
        try:
            self.layout, self.error = self._build(), None
        except LayoutError as error:
            self.layout, self.error = None, str(error)

    def _build(self) -> KVCacheLayout | None:
        if self.announced is not None:
            return KVCacheLayout.from_event(self.announced)
        hints = self.hints
        groups = hints.groups if hints.authoritative else self._groups()
        if not any(group.kind is not GroupKind.NOT_CACHED for group in groups):
            return None
        return KVCacheLayout.build(
            groups,
            hints.hash_block_size or (None if hints.authoritative else self._smallest_step or None),
            self._inner_step(groups) or hints.scheduler_block_size,
            # Hashes that cover the next tokens make the drop unnecessary, and vLLM >= 0.33 then
            # does without.
            hints.eagle and not self.lookahead,
            hints.eagle_sees_last_token,
        )

    def _inner_step(self, groups: Sequence[KVCacheGroup]) -> int | None:
        """vLLM lets a hit end inside a block where Mamba states are kept at such points, and only
        there."""
        states = [
            index
            for index, group in enumerate(groups)
            if group.kind is GroupKind.MAMBA and index in self.seen
        ]
        largest = max(group.block_size for group in groups)
        inside = any(self.seen[index].smallest_size < largest for index in states)
        partial = any(
            seen.smallest_size < groups[index].block_size
            for index, seen in self.seen.items()
            if index < len(groups)
        )
        return self._smallest_step if inside and partial else None

    def _groups(self) -> tuple[KVCacheGroup, ...]:
        assumed = len(self.hints.groups) if self.hints.assume_unseen else 0
        count = max(assumed, max(self.seen, default=-1) + 1)
        return tuple(self._group(index) for index in range(count))

    def _group(self, index: int) -> KVCacheGroup:
        seen, hint = self.seen.get(index), self._hint(index)
        if seen is None:
            return (hint if self.hints.assume_unseen else None) or KVCacheGroup(
                GroupKind.NOT_CACHED, 1
            )
        kind = kind_from_wire(seen.kind) or (hint.kind if hint else GroupKind.FULL)
        window = seen.sliding_window or (hint.sliding_window if hint else None)
        chunk = self._chunk_size(hint)
        if (kind is GroupKind.SLIDING_WINDOW and not window) or (
            kind is GroupKind.CHUNKED_LOCAL and not chunk
        ):
            kind = GroupKind.FULL
        return KVCacheGroup(
            kind, seen.block_size, window, chunk if kind is GroupKind.CHUNKED_LOCAL else None
        )

    def _hint(self, index: int) -> KVCacheGroup | None:
        return self.hints.groups[index] if index < len(self.hints.groups) else None

    def _chunk_size(self, hint: KVCacheGroup | None) -> int | None:
        if hint and hint.attention_chunk_size:
            return hint.attention_chunk_size
        return next(
            (
                group.attention_chunk_size
                for group in self.hints.groups
                if group.attention_chunk_size
            ),
            None,
        )

    def assumptions(self) -> tuple[str, ...]:
        """What is assumed rather than known, one sentence each."""
        if self.announced is not None:
            return (self.error,) if self.error else ()
        return tuple(self._assumptions())

    def _assumptions(self) -> Iterator[str]:
        if self.error:
            yield self.error
        if self.hints.eagle:
            yield "eagle: from the configuration"
        if self.hints.authoritative:
            yield "groups: from the configuration"
            return
        for index in range(len(self._groups())):
            yield from self._group_assumptions(index)

    def _group_assumptions(self, index: int) -> Iterator[str]:
        seen, hint = self.seen.get(index), self._hint(index)
        if seen is None:
            if hint and self.hints.assume_unseen:
                yield f"group {index}: from the configuration, no event has named it"
            return
        kind = kind_from_wire(seen.kind)
        if kind is None:
            yield f"group {index}: kind from the configuration, or full attention"
        elif kind is GroupKind.CHUNKED_LOCAL:
            yield f"group {index}: attention_chunk_size {self._chunk_size(hint) or _UNKNOWN_SIZE}"
        elif kind is GroupKind.SLIDING_WINDOW and not seen.sliding_window:
            yield f"group {index}: sliding_window {(hint.sliding_window if hint else None) or _UNKNOWN_SIZE}"


class HashFinder:
    """Finds out which hash function an engine uses, by trying the known ones on blocks it
    announced.

    Only then can a block be found that no dense event ever placed: a prompt is hashed as the engine
    would hash it. A wrong function is never taken for the right one, since a match is one of 64
    bits or more.
    """

    TOKENS_TO_HASH = 3_200_000
    """Effort until giving up, over all tries; about half a second."""
    BLOCKS_PER_TRY = 256
    PROMPT_TOKENS_PER_TRY = 16_384

    def __init__(self, hints: LayoutHints) -> None:
        self._seeds = hints.hash_seeds
        self._effort = 0
        self.chain: HashChain | None = None

    @property
    def may_find(self) -> bool:
        """False once found, and once trying has proved useless."""
        return self.chain is None and self._effort < self.TOKENS_TO_HASH

    def see_announcement(self, event: CacheLayout) -> None:
        """Take the publisher's own word, if it names an algorithm we have."""
        if event.hash_algorithm in hash_algorithms() and event.none_hash:
            self.chain = HashChain(event.hash_algorithm, event.none_hash)

    def try_event(self, event: BlockStored, hash_block_size: int) -> None:
        """Try every known chain on an event that starts at the root."""
        sample = _sample(event)
        if sample is not None and len(sample.tokens) <= self.BLOCKS_PER_TRY * hash_block_size:
            self._try(sample.tokens, hash_block_size, sample.lookahead, sample.is_explained_by)

    def try_prompt(
        self,
        token_ids: Sequence[int],
        spellings: Iterable[Sequence[ExtraKeys]],
        hash_block_size: int,
        lookahead: int,
        held: Container[BlockHash],
    ) -> None:
        """Try every known chain on a prompt: is one of its blocks among those held?"""
        tokens = token_ids[
            : min(self.BLOCKS_PER_TRY * hash_block_size, self.PROMPT_TOKENS_PER_TRY) + lookahead
        ]
        for extra_keys in spellings:
            if self.chain is None:
                self._try(
                    tokens,
                    hash_block_size,
                    lookahead,
                    lambda names: any(name in held for name in names),
                    extra_keys,
                )

    def _try(
        self,
        tokens: Sequence[int],
        step: int,
        lookahead: int,
        is_right: Callable[[list[BlockHash]], bool],
        extra_keys: Sequence[ExtraKeys] = (),
    ) -> None:
        for chain in self._candidates():
            if not self.may_find:
                return
            digests = list(chain.block_hashes(tokens, step, extra_keys, lookahead))
            self._effort += (len(digests) + 1) * (step + lookahead)
            if is_right([*digests, *map(to_wire_int, digests)]):
                self.chain = chain
                return

    def _candidates(self) -> Iterator[HashChain]:
        for algorithm in hash_algorithms():
            for seed in self._seeds:
                yield HashChain.from_seed(algorithm, seed)


@dataclass(frozen=True, slots=True)
class _Sample:
    """The start of a prompt, and hashes that must appear in its chain."""

    tokens: list[int]
    lookahead: int
    wanted: frozenset[BlockHash]

    def is_explained_by(self, names: Iterable[BlockHash]) -> bool:
        return self.wanted <= set(names)


def _sample(event: BlockStored) -> _Sample | None:
    """What an event tells of the chain, if it starts at the root and no extra keys are in it."""
    if (
        event.parent_block_hash is not None
        or not event.block_hashes
        or event.lora_name
        or any(event.extra_keys or ())
    ):
        return None
    tails = event.lookahead_token_ids or [[]]
    size = event.tokens_per_block
    if size:
        return _Sample(
            event.token_ids[:size] + tails[0], len(tails[0]), frozenset(event.block_hashes[:1])
        )
    return _Sample(event.token_ids + tails[-1], len(tails[-1]), frozenset(event.block_hashes))


def engine_hashes(
    chain: HashChain,
    token_ids: Sequence[int],
    hash_block_size: int,
    extra_keys: Sequence[ExtraKeys],
    lookahead: int,
    as_int: bool,
) -> list[BlockHash]:
    """A prompt's hashes in the form the engine puts on the wire."""
    digests = chain.block_hashes(token_ids, hash_block_size, extra_keys, lookahead)
    return [to_wire_int(found) for found in digests] if as_int else list(digests)
