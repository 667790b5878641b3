"""Builds the events an engine would send for blocks of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvevents.events import BlockHash, BlockRemoved, BlockStored, Event, EventBatch
from kvevents.hashing import HashChain, to_wire_int
from kvevents.layout import GroupKind, KVCacheGroup
from router.index.base import SourceId
from router.index.index import PrefixIndex
from tests.oracle.index.block_table import GroupTier
from tests.oracle.index.index import ReferenceIndex

FULL = KVCacheGroup(GroupKind.FULL, 16)
SOURCE = SourceId("replica-a")


def window(size: int, block_size: int = 16) -> KVCacheGroup:
    return KVCacheGroup(GroupKind.SLIDING_WINDOW, block_size, sliding_window=size)


def mamba(block_size: int = 16) -> KVCacheGroup:
    return KVCacheGroup(GroupKind.MAMBA, block_size)


@dataclass
class Prefix:
    """One prompt, and the hashes an engine gives its blocks."""

    tokens: list[int]
    hash_block_size: int = 16
    as_int: bool = True
    salt: str | None = None
    lora: str | None = None
    seed: str = "a seed nobody knows"
    hashes: list[BlockHash] = field(init=False)

    def __post_init__(self) -> None:
        extra = [(self.salt,)] if self.salt else []
        root = f"{self.seed} {self.lora}" if self.lora else self.seed
        chain = HashChain.from_seed("sha256", root)
        digests = list(chain.block_hashes(self.tokens, self.hash_block_size, extra))
        self.hashes = [to_wire_int(digest) for digest in digests] if self.as_int else list(digests)

    def hash_at(self, end: int) -> BlockHash:
        return self.hashes[end // self.hash_block_size - 1]

    def stored(
        self,
        index: int,
        group: KVCacheGroup,
        start: int = 0,
        end: int | None = None,
        medium: str | None = "GPU",
    ) -> BlockStored:
        """An event without holes for the blocks of `[start, end)` in group *index*."""
        size = group.block_size
        stop = len(self.tokens) if end is None else end
        ends = range(start + size, stop + 1, size)
        first = [self.salt] if self.salt and start == 0 else []
        return BlockStored(
            block_hashes=[self.hash_at(block_end) for block_end in ends],
            parent_block_hash=self.hash_at(start) if start else None,
            token_ids=self.tokens[start : start + len(ends) * size],
            medium=medium,
            group_idx=index,
            lora_name=self.lora,
            extra_keys=[first or None] + [None] * (len(ends) - 1),
            kv_cache_spec_kind=group.kind.value,
            kv_cache_spec_sliding_window=group.sliding_window,
            block_size=size,
        )

    def kept(
        self,
        index: int,
        group: KVCacheGroup,
        ends: Sequence[int],
        start: int = 0,
        end: int | None = None,
    ) -> BlockStored:
        """An event with holes: the tokens of the range, and only the blocks that end at *ends*."""
        whole = self.stored(index, group, start, end)
        return BlockStored(
            block_hashes=[self.hash_at(block_end) for block_end in ends],
            parent_block_hash=whole.parent_block_hash,
            token_ids=whole.token_ids,
            medium=whole.medium,
            group_idx=index,
            lora_name=self.lora,
            extra_keys=[None] * len(ends),
            kv_cache_spec_kind=whole.kv_cache_spec_kind,
            kv_cache_spec_sliding_window=whole.kv_cache_spec_sliding_window,
            block_size=whole.block_size,
        )

    def offloaded(self, index: int, ends: Sequence[int], medium: str = "CPU") -> BlockStored:
        """The event of an offload tier: only hashes."""
        return BlockStored(
            [self.hash_at(end) for end in ends], None, [], medium, group_idx=index, block_size=0
        )

    def removed(self, index: int, ends: Sequence[int], medium: str | None = "GPU") -> BlockRemoved:
        return BlockRemoved([self.hash_at(end) for end in ends], medium, index)


def tokens(count: int, first: int = 1000) -> list[int]:
    return list(range(first, first + count))


def apply(index: PrefixIndex, *events: Event, source: SourceId = SOURCE) -> None:
    index.apply(source, EventBatch(ts=0.0, events=list(events)))


def gpu_hit(
    index: PrefixIndex, prompt: Sequence[int], source: SourceId = SOURCE, **extras: str
) -> int:
    """The predicted GPU tokens; the prompt gets one more token, which is always computed."""
    return index.match([*prompt, 1], **extras)[source].gpu_cached_tokens  # type: ignore[arg-type]


def copies_held(
    index: PrefixIndex | ReferenceIndex, source: SourceId = SOURCE
) -> dict[GroupTier, dict[BlockHash, int]]:
    """The copies that an index counts, by group and tier. The compiled one knows a hash that is no
    integer as a number, the same in all indexes of one secret."""
    if isinstance(index, ReferenceIndex):
        return index.sources[source].table.held
    held: dict[GroupTier, dict[BlockHash, int]] = {}
    for group, tier, block_hash, copies in index.core.copies(index.slots[source]):
        held.setdefault((group, tier), {})[block_hash] = copies
    return held
