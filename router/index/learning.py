"""What a source's events say about its cache layout, and which hash function it uses.

Known beats assumed: a `CacheLayout` event, else the events' own fields, else the configuration. What had to be assumed is
listed, so that an operator sees it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvevents.errors import HashAlgorithmError, LayoutError
from kvevents.events import GPU, BlockHash, BlockStored, CacheLayout
from kvevents.hashing import DEFAULT_SEED, ExtraKeys, HashChain, algorithms, to_wire_int
from kvevents.layout import GroupKind, KVCacheGroup, KVCacheLayout, kind_from_wire


@dataclass(frozen=True, slots=True)
class LayoutHints:
    """What the configuration says of a model's cache.

    Attributes:
        groups: By group index; used where the wire is silent.
        hash_block_size: Tokens between two engine hashes; None: the greatest common divisor of the block sizes.
        scheduler_block_size: Granularity of hits; None: the least common multiple of the block sizes.
        eagle: The engine drops the last matched block (EAGLE or MTP drafting); no engine says so on the wire.
        authoritative: The groups are facts and events cannot change them.
        hash_seeds: Values of `PYTHONHASHSEED` the engines may run with.
    """

    groups: tuple[KVCacheGroup, ...] = ()
    hash_block_size: int | None = None
    scheduler_block_size: int | None = None
    eagle: bool = False
    authoritative: bool = False
    hash_seeds: tuple[str, ...] = (DEFAULT_SEED, "0")


@dataclass(slots=True)
class _SeenGroup:
    kind: str | None = None
    sliding_window: int | None = None
    block_size: int = 0
    has_partial_entries: bool = False

    def see(self, kind: str | None, sliding_window: int | None, block_size: int) -> bool:
        """Take one event's fields; True if something is new."""
        before = (self.kind, self.sliding_window, self.block_size, self.has_partial_entries)
        self.kind = kind or self.kind
        self.sliding_window = sliding_window or self.sliding_window
        # Entries inside a block are announced with a smaller size than the group's own (vLLM >= 0.24).
        self.has_partial_entries |= 0 < self.block_size != block_size
        self.block_size = max(self.block_size, block_size)
        return before != (self.kind, self.sliding_window, self.block_size, self.has_partial_entries)


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
    _seen: dict[int, _SeenGroup] = field(default_factory=dict)
    _smallest_step: int = 0

    def __post_init__(self) -> None:
        self._rebuild()

    def see_announcement(self, event: CacheLayout) -> None:
        """Take the publisher's own word."""
        self.announced = event
        self._rebuild()

    def see_stored(self, event: BlockStored, block_size: int) -> None:
        """Learn from one event; *block_size* is what its fields or their quotient say, 0 if nothing does."""
        if event.lookahead_token_ids:
            self.lookahead = max(map(len, event.lookahead_token_ids))
        if not block_size or not event.token_ids or (event.medium or GPU) != GPU:
            return
        group = self._seen.setdefault(event.group_idx or 0, _SeenGroup())
        changed = group.see(event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window, block_size)
        step = math.gcd(self._smallest_step, block_size)
        if changed or step != self._smallest_step:
            self._smallest_step = step
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
            hints.scheduler_block_size or self._inner_step(groups),
            # Hashes that cover the next tokens make the drop unnecessary, and vLLM >= 0.33 then does without.
            hints.eagle and not self.lookahead,
        )

    def _inner_step(self, groups: Sequence[KVCacheGroup]) -> int | None:
        """vLLM lets a hit end inside a block where Mamba states are kept at such points, and only there."""
        partial = any(
            group.kind is GroupKind.MAMBA and index in self._seen and self._seen[index].has_partial_entries
            for index, group in enumerate(groups)
        )
        return self._smallest_step if partial else None

    def _groups(self) -> tuple[KVCacheGroup, ...]:
        count = max(len(self.hints.groups), max(self._seen, default=-1) + 1)
        return tuple(self._group(index) for index in range(count))

    def _group(self, index: int) -> KVCacheGroup:
        seen, hint = self._seen.get(index), self._hint(index)
        if seen is None:
            return hint or KVCacheGroup(GroupKind.NOT_CACHED, 1)
        kind = kind_from_wire(seen.kind) or (hint.kind if hint else GroupKind.FULL)
        window = seen.sliding_window or (hint.sliding_window if hint else None)
        chunk = self._chunk_size(hint)
        if (kind is GroupKind.SLIDING_WINDOW and not window) or (kind is GroupKind.CHUNKED_LOCAL and not chunk):
            kind = GroupKind.FULL
        return KVCacheGroup(kind, seen.block_size, window, chunk)

    def _hint(self, index: int) -> KVCacheGroup | None:
        return self.hints.groups[index] if index < len(self.hints.groups) else None

    def _chunk_size(self, hint: KVCacheGroup | None) -> int | None:
        if hint and hint.attention_chunk_size:
            return hint.attention_chunk_size
        return next((group.attention_chunk_size for group in self.hints.groups if group.attention_chunk_size), None)

    def assumptions(self) -> tuple[str, ...]:
        """What is assumed rather than known, one sentence each."""
        if self.announced is not None:
            return ()
        return tuple(self._assumptions())

    def _assumptions(self) -> Iterator[str]:
        if self.error:
            yield self.error
        if self.hints.eagle:
            yield "eagle: from the configuration"
        if self.hints.authoritative:
            yield "groups: from the configuration"
            return
        for index, seen in sorted(self._seen.items()):
            kind = kind_from_wire(seen.kind)
            if kind is None:
                yield f"group {index}: kind from the configuration, or full attention"
            elif kind is GroupKind.CHUNKED_LOCAL:
                known = self._chunk_size(self._hint(index))
                yield f"group {index}: attention_chunk_size {known or 'unknown, taken as full attention'}"


class HashFinder:
    """Finds out which hash function an engine uses, by trying the known ones on blocks it announced.

    Only then can a block be found that no dense event ever placed: a prompt is hashed as the engine would hash it.
    """

    MAX_ATTEMPTS = 16
    MAX_BLOCKS = 4096

    def __init__(self, hints: LayoutHints) -> None:
        self._seeds = hints.hash_seeds
        self._attempts = 0
        self.chain: HashChain | None = None

    @property
    def may_find(self) -> bool:
        """False once found, and once trying has proved useless."""
        return self.chain is None and self._attempts < self.MAX_ATTEMPTS

    def see_announcement(self, event: CacheLayout) -> None:
        """Take the publisher's own word, if it names an algorithm we have."""
        if event.hash_algorithm in algorithms() and event.none_hash:
            self.chain = HashChain(event.hash_algorithm, event.none_hash)

    def try_root(self, event: BlockStored, hash_block_size: int) -> None:
        """Try every known chain on an event that starts at the root of the chain."""
        if event.parent_block_hash is not None or not event.block_hashes or event.lora_name or _hides_order(event):
            return
        if len(event.token_ids) // hash_block_size > self.MAX_BLOCKS:
            return
        self._attempts += 1
        self.chain = next((chain for chain in self._candidates() if _explains(chain, event, hash_block_size)), None)

    def _candidates(self) -> Iterator[HashChain]:
        for algorithm in algorithms():
            for seed in self._seeds:
                yield HashChain.from_seed(algorithm, seed)


def _hides_order(event: BlockStored) -> bool:
    """Extra keys line up with the hashes, so with holes they cannot be told to blocks."""
    return any(event.extra_keys or ())


def _explains(chain: HashChain, event: BlockStored, hash_block_size: int) -> bool:
    wanted = set(event.block_hashes)
    lookahead = len(event.lookahead_token_ids[0]) if event.lookahead_token_ids else 0
    tokens = event.token_ids + (event.lookahead_token_ids[-1] if event.lookahead_token_ids else [])
    for found in chain.block_hashes(tokens, hash_block_size, lookahead=lookahead):
        wanted -= {found, to_wire_int(found)}
    return not wanted


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


__all__ = ["HashAlgorithmError", "HashFinder", "LayoutHints", "LayoutLearner", "engine_hashes"]
