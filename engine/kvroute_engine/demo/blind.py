"""The index of a router that knows no KV cache groups: a replica holds a block or does not.

It is there for comparison. The blocks of every group count as blocks of one full-attention group,
and a block is held from the first event that stores it, for whichever group. Such routers differ in
when it is removed, and are wrong in opposite ways once a window has slid on:

    with the first removal   what the window left behind and full attention still holds seems lost
    with the last copy       what full attention holds seems reusable where the window is gone
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec
from typing_extensions import override

from kvevents.codec import decode
from kvevents.errors import UNREADABLE
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
    TierBlocksCleared,
)
from kvevents.layout import GroupKind
from router.config.schema import RouterConfig
from router.index.base import ApplyResult, SourceId
from router.index.index import PrefixIndex
from router.index.layout_learner import LayoutHints
from router.index.sources import DumpError
from router.serve.server import run

_copies_decoder = msgspec.msgpack.Decoder(list[tuple[SourceId, dict[BlockHash, int]]])


class GroupBlindIndex(PrefixIndex):
    """Strips the groups off the events.

    Args:
        any_copy: Hold a block until its last copy in any group is removed; else until its first is.
    """

    def __init__(self, any_copy: bool = False, secret: bytes | None = None) -> None:
        super().__init__(secret=secret)
        self._any_copy = any_copy
        self._copies: dict[SourceId, Counter[BlockHash]] = {}

    @override
    def add(self, source: SourceId, hints: LayoutHints | None = None) -> None:
        self._copies.pop(source, None)
        super().add(source, hints)

    @override
    def apply(self, source: SourceId, payload: bytes | EventBatch) -> ApplyResult:
        if not self.holds(source):
            self.add(source)
        batch = payload if isinstance(payload, EventBatch) else decode(payload)
        events = list(self._without_groups(source, batch.events))
        return super().apply(source, msgspec.structs.replace(batch, events=events))

    @override
    def drop(self, source: SourceId) -> None:
        self._copies.pop(source, None)
        super().drop(source)

    @override
    def export(self, only: SourceId | None = None) -> Iterator[bytes]:
        copies = self._copies.items()
        yield msgspec.msgpack.encode([each for each in copies if only in (None, each[0])])
        yield from super().export(only)

    @override
    def restore(self, records: Iterable[bytes | memoryview]) -> None:
        remaining = iter(records)
        try:
            copies = _copies_decoder.decode(next(remaining, b""))
        except UNREADABLE as error:
            raise DumpError(f"index dump: not of a group-blind index: {error}") from None
        super().restore(remaining)
        self._copies = {source: Counter(counts) for source, counts in copies}

    def _without_groups(self, source: SourceId, events: Sequence[Event]) -> Iterator[Event]:
        """Yield the events as of one full-attention group."""
        copies = self._copies.setdefault(source, Counter())
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
                yield BlockRemoved(list(self._removed(copies, event.block_hashes)), GPU, 0)
            elif isinstance(event, (AllBlocksCleared, TierBlocksCleared)) and event.tier == GPU:
                copies.clear()
                yield event

    def _removed(
        self, copies: Counter[BlockHash], hashes: Sequence[BlockHash]
    ) -> Iterator[BlockHash]:
        """Yield each hash as often as the index, which counts copies, is to remove it."""
        for block in hashes:
            held = copies.pop(block, 0)
            if self._any_copy and held > 1:
                copies[block] = held - 1
            yield from [block] * (1 if self._any_copy else held)


def _one_group(layout: CacheLayout) -> CacheLayout:
    full = GroupSpec(GroupKind.FULL.value, layout.hash_block_size)
    return msgspec.structs.replace(
        layout,
        groups=[full],
        scheduler_block_size=layout.hash_block_size,
        eagle=False,
        eagle_groups=None,
    )


BLIND_INDEXES: dict[str, Callable[..., GroupBlindIndex]] = {
    "group-blind": GroupBlindIndex,
    "group-blind-any-copy": partial(GroupBlindIndex, any_copy=True),
}
"""The indexes, by name."""


if __name__ == "__main__":
    # `kvroute serve` with this index: the processes that the demo compares with.
    found = BLIND_INDEXES[sys.argv[2] if len(sys.argv) > 2 else "group-blind"]
    sys.exit(run(RouterConfig.load(Path(sys.argv[1]), os.environ), new_index=found))
