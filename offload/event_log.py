"""Records the changes of one engine step in the cache, presence-exactly.

A (group, hash) is *stored* when it goes from no copy to one and *removed* when its last copy goes,
compared between one `take` and the next. A change that was undone in between is not reported, so a
step's removals and stores can be reported in any order. Removals of a group travel in one event; a
store event is one contiguous run of blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvevents.events import (
    GPU,
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    Event,
    GroupIdx,
)
from kvevents.layout import KVCacheGroup
from offload.request import CacheRequest


@dataclass(slots=True)
class _StoredRun:
    """Contiguous blocks of one request, cached in one call."""

    group_idx: GroupIdx
    first_block: int
    request: CacheRequest
    hashes: list[bytes] = field(default_factory=list)


class EventLog:
    """Collects changes of presence and turns them into events."""

    def __init__(self, groups: Sequence[KVCacheGroup]) -> None:
        self._groups = groups
        self._is_cleared = False
        self._removed: list[dict[bytes, None]] = [{} for _ in groups]
        self._stored: list[dict[bytes, _StoredRun]] = [{} for _ in groups]
        """The run that reports each new hash; a run may hold hashes that are gone again."""
        self._runs: list[_StoredRun] = []

    def start_run(self, group_idx: GroupIdx, first_block: int, request: CacheRequest) -> None:
        """Begin a run of blocks, each of which is added by `add_stored`.

        Args:
            first_block: Index of the first of them in the request's block table.
            request: The blocks hold its tokens.
        """
        self._runs.append(_StoredRun(group_idx, first_block, request))

    def add_stored(self, block_hash: bytes, has_appeared: bool) -> None:
        """Record that the next block of the run was cached.

        Args:
            has_appeared: True if it is the first copy of its hash.
        """
        run = self._runs[-1]
        run.hashes.append(block_hash)
        removed = self._removed[run.group_idx]
        if not has_appeared:
            return
        if block_hash in removed:
            del removed[block_hash]
        else:
            self._stored[run.group_idx][block_hash] = run

    def add_removed(self, group_idx: GroupIdx, block_hash: bytes) -> None:
        """Record that the last copy of a hash is gone.

        Args:
            block_hash: The hash that can no longer be found.
        """
        if self._stored[group_idx].pop(block_hash, None) is None:
            self._removed[group_idx][block_hash] = None

    def add_cleared(self) -> None:
        """Record that the whole cache was emptied at once."""
        self._is_cleared = True
        self._forget_changes()

    def take(self) -> list[Event]:
        """Return the step's events; the next step starts empty."""
        events: list[Event] = [AllBlocksCleared()] if self._is_cleared else []
        for index, removed in enumerate(self._removed):
            if removed:
                events.append(BlockRemoved(list[BlockHash](removed), GPU, index))
        for run in self._runs:
            events += self._stored_events(run)
        self._is_cleared = False
        self._forget_changes()
        return events

    def _forget_changes(self) -> None:
        self._runs = []
        for removed, stored in zip(self._removed, self._stored, strict=True):
            removed.clear()
            stored.clear()

    def _stored_events(self, run: _StoredRun) -> Iterator[BlockStored]:
        """The run cut at its holes: blocks that were there before, or are gone again."""
        stored = self._stored[run.group_idx]
        start = 0
        for index in range(len(run.hashes) + 1):
            if index == len(run.hashes) or stored.get(run.hashes[index]) is not run:
                if index > start:
                    yield self._event(run, start, index)
                start = index + 1

    def _event(self, run: _StoredRun, start: int, stop: int) -> BlockStored:
        group, request = self._groups[run.group_idx], run.request
        size = group.block_size
        first, last = (run.first_block + start) * size, (run.first_block + stop) * size
        extra = (
            [request.extra_keys_between(at, at + size) for at in range(first, last, size)]
            if request.has_extra_keys
            else []
        )
        return BlockStored(
            block_hashes=list[BlockHash](run.hashes[start:stop]),
            parent_block_hash=request.hash_at(first) if first else None,
            token_ids=request.token_ids[first:last],
            medium=GPU,
            group_idx=run.group_idx,
            lora_name=request.lora_name,
            extra_keys=extra if any(extra) else None,
            kv_cache_spec_kind=group.kind.value,
            kv_cache_spec_sliding_window=group.sliding_window,
        )
