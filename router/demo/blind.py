"""An index as routers have it that know no KV cache groups: a block is at a replica, or it is not.

It exists to be compared with. Every group's blocks count as blocks of one group of full attention,
a block is there from the first event that stores it, whoever stored it, and gone with the first
that removes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from kvevents.codec import decode
from kvevents.events import (
    GPU,
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    CacheLayout,
    Event,
    EventBatch,
    GroupSpec,
)
from kvevents.layout import GroupKind
from router.index.reference.index import PrefixIndex, SourceId
from router.index.reference.source import ApplyResult


class GroupBlindIndex(PrefixIndex):
    """Hears of one group where there are several."""

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[SourceId, Counter[BlockHash]] = {}

    def apply(self, source: SourceId, payload: bytes | EventBatch) -> ApplyResult:
        """Like the index itself, of what is left of a batch without its groups."""
        batch = payload if isinstance(payload, EventBatch) else decode(payload)
        events = list(
            self._without_groups(self._copies.setdefault(source, Counter()), batch.events)
        )
        return super().apply(source, msgspec.structs.replace(batch, events=events))

    def clear(self, source: SourceId) -> None:
        self._copies.pop(source, None)
        super().clear(source)

    def drop(self, source: SourceId) -> None:
        self._copies.pop(source, None)
        super().drop(source)

    def _without_groups(
        self, copies: Counter[BlockHash], events: Sequence[Event]
    ) -> Iterator[Event]:
        for event in events:
            if isinstance(event, CacheLayout):
                yield _one_group(event)
            elif isinstance(event, BlockStored) and event.medium in (None, GPU):
                copies.update(event.block_hashes)
                yield msgspec.structs.replace(
                    event,
                    group_idx=0,
                    kv_cache_spec_kind=GroupKind.FULL.value,
                    kv_cache_spec_sliding_window=None,
                )
            elif isinstance(event, BlockRemoved) and event.medium in (None, GPU):
                gone = [block for block in event.block_hashes for _ in range(copies.pop(block, 0))]
                yield BlockRemoved(gone, GPU, 0)
            elif isinstance(event, AllBlocksCleared):
                copies.clear()
                yield event


def _one_group(layout: CacheLayout) -> CacheLayout:
    full = GroupSpec(GroupKind.FULL.value, layout.hash_block_size)
    return msgspec.structs.replace(
        layout, groups=[full], scheduler_block_size=layout.hash_block_size, eagle=False
    )
