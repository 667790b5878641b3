"""What the disk tier holds, what of it is in flight, and what goes when room is needed.

A key has at most one file. Its life: `prepare_store` makes it pending, `complete_store` makes it a
hit, loads protect it, and eviction, a failed copy or a reset ends it. A block that must go while a
copy of it is in flight is *doomed*: no hit from that moment on, in the events too, but its file is
deleted, its bytes are free, and its key may be stored again only when the copy is over. So no
deletion ever meets a queued copy of the same key.

Deletions happen here, when they are decided. A file that cannot be deleted keeps its bytes; it is
tried again later.
"""
# ruff: noqa: ARG002 - the protocol names the request for tiers that tell requests apart; this one
# treats all alike

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvevents.events import STORAGE
from offload.base import (
    FileLoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadKey,
    PrepareStoreOutput,
    RequestContext,
)
from offload.errors import CacheConfigError
from offload.fs.store import BlockFiles
from offload.tier_entries import TierEntries, TierEntry

_KEYS_PER_EVENT = 1024


@dataclass(frozen=True, slots=True)
class FileTierStatistics:
    """Blocks and bytes as they are now, and totals in blocks since the start."""

    max_bytes: int
    used_bytes: int
    """Of all files, those in flight included."""
    idle_blocks: int
    """Hits that no load protects: what can be evicted."""
    loading_blocks: int
    """Hits that a load protects."""
    pending_blocks: int
    """Their store is in flight."""
    doomed_blocks: int
    """No hits any more, gone when their copy is over or their file can be deleted."""
    restored: int
    """Found in the directory at the start."""
    lookup_hits: int
    lookup_misses: int
    lookup_pending: int
    stored: int
    """Became hits."""
    evicted: int
    """Went to make room."""
    failed_stores: int
    failed_loads: int
    failed_removals: int
    """Attempts to delete a file that the system refused."""
    refused_stores: int
    """Calls of `prepare_store` answered with None."""


@dataclass(slots=True, kw_only=True)
class _File(TierEntry):
    file_bytes: int


@dataclass(slots=True)
class _Totals:
    restored: int = 0
    stored: int = 0
    evicted: int = 0
    failed_stores: int = 0
    failed_loads: int = 0
    failed_removals: int = 0
    refused_stores: int = 0


class FileOffloadingManager:
    """The disk tier as the scheduler sees it: an `OffloadingManager` over the files of a
    `BlockStore`, the least recently used of which go first.

    The order of the keys in a call is that of the prompt: what a call stores or has loaded is
    evicted from its last key to its first, since a block is of no use without those before it. What
    an earlier process left in the directory is a hit at once, the longest unused of it evicted
    first, and the first `take_events` tells of it.
    """

    medium = STORAGE

    def __init__(self, store: BlockFiles, max_bytes: int, enable_events: bool = True) -> None:
        """
        Args:
            store: The directory. It belongs to this manager until `store.close()`.
            max_bytes: What all block files together may take; see `BlockStore` for what is not
                counted.
            enable_events: Without it `take_events` is always empty; with it somebody has to call
                it.

        Raises:
            CacheConfigError: Not even one block fits, or another manager has the directory.
            OSError: The directory cannot be read, or holds too much and cannot be written.
        """
        if max_bytes < max(store.payload_bytes):
            raise CacheConfigError(
                f"disk tier: max_bytes {max_bytes} must hold a block, {max(store.payload_bytes)} bytes"
            )
        self.max_bytes = max_bytes
        self.enable_events = enable_events
        self._store = store
        self._files = TierEntries[_File]("disk", self.medium, enable_events)
        self._idle: OrderedDict[OffloadKey, None] = OrderedDict()  # the longest unused first
        self._idle_bytes = self._used_bytes = 0
        self._stuck: dict[
            OffloadKey, None
        ] = {}  # doomed, nothing in flight, and the file could not be deleted
        self._totals = _Totals()
        self._restore()

    def _restore(self) -> None:
        found = self._store.scan()
        surplus = sum(file.file_bytes for file in found) - self.max_bytes
        kept: list[OffloadKey] = []
        for file in found:
            if surplus > 0:
                self._store.remove(file.key)
                surplus -= file.file_bytes
                continue
            self._admit(file.key, file.file_bytes)
            self._files[file.key].storing = False
            self._make_idle(file.key)
            kept.append(file.key)
        self._totals.restored = len(kept)
        for first in range(0, len(kept), _KEYS_PER_EVENT):
            self._files.note(kept[first : first + _KEYS_PER_EVENT], removed=False)

    # --- looking ----------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, context: RequestContext) -> LookupResult:
        """A doomed block is a miss, not pending: waiting for it is of no use."""
        return self._files.lookup(key)

    def touch(self, keys: Iterable[OffloadKey], context: RequestContext) -> None:
        """Counts for this process; after a restart the order is that of writes and loads."""
        for key in keys:
            if key in self._idle:
                self._idle.move_to_end(key)

    # --- loading ----------------------------------------------------------------------------------

    def prepare_load(
        self, keys: Sequence[OffloadKey], context: RequestContext
    ) -> FileLoadStoreSpec:
        """A key named several times is protected as many times."""
        files = self._files.require(keys, lambda file: file.loadable, "prepare_load", "is no hit")
        for key, file in zip(keys, files, strict=True):
            self._drop_from_idle(key)
            file.loads += 1
        return FileLoadStoreSpec(tuple(keys))

    def complete_load(
        self, keys: Sequence[OffloadKey], context: RequestContext, success: bool = True
    ) -> None:
        """A block that could not be read is no hit from now on, and gone when no other load of it
        is in flight."""
        loads = Counter(keys)
        self._files.require_loads(loads)
        if not success:
            self._totals.failed_loads += loads.total()
            self._doom([key for key in loads if not self._files[key].doomed])
        for key in reversed(loads):
            self._files[key].loads -= loads[key]
            self._settle(key)

    # --- storing ----------------------------------------------------------------------------------

    def prepare_store(
        self, keys: Sequence[OffloadKey], context: RequestContext
    ) -> PrepareStoreOutput | None:
        """Keys named several times count once. Neither a key of this call nor a block in flight is
        evicted for it. Where the system refuses to delete a file the answer is None too, and what
        was deleted until then is gone, as the events say.

        Raises:
            TransferError: A key cannot be one of this directory. Nothing changed.
        """
        self._remove_stuck()
        asked = dict.fromkeys(keys)
        new = {key: self._store.file_bytes(key) for key in asked if key not in self._files}
        evicted = self._make_room(
            sum(new.values()), spared=[key for key in asked if key in self._idle]
        )
        if evicted is None:
            self._totals.refused_stores += 1
            return None
        for key, file_bytes in new.items():
            self._admit(key, file_bytes)
        return PrepareStoreOutput(tuple(new), FileLoadStoreSpec(tuple(new)), evicted)

    def complete_store(
        self, keys: Sequence[OffloadKey], context: RequestContext, success: bool = True
    ) -> None:
        """Keys named several times count once. What a reset overtook is gone either way."""
        asked = list(dict.fromkeys(keys))
        files = self._files.require(
            asked, lambda file: file.storing, "complete_store", "has no store in flight"
        )
        stored = [
            key for key, file in zip(asked, files, strict=True) if success and not file.doomed
        ]
        for key, file in zip(reversed(asked), reversed(files), strict=True):
            file.storing = False
            file.doomed = file.doomed or not success
            self._settle(key)
        self._totals.stored += len(stored)
        self._totals.failed_stores += 0 if success else len(asked)
        self._files.note(stored, removed=False)

    def _admit(self, key: OffloadKey, file_bytes: int) -> None:
        self._files[key] = _File(file_bytes=file_bytes)
        self._used_bytes += file_bytes

    def _make_room(self, needed_bytes: int, spared: list[OffloadKey]) -> list[OffloadKey] | None:
        """Evict until so many bytes are free; None if they cannot be."""
        spared_bytes = sum(self._files[key].file_bytes for key in spared)
        if self._used_bytes - self._idle_bytes + spared_bytes + needed_bytes > self.max_bytes:
            return None
        for key in reversed(spared):
            self._idle.move_to_end(key)
        evicted: list[OffloadKey] = []
        while self._used_bytes + needed_bytes > self.max_bytes and self._evict(
            next(iter(self._idle)), evicted
        ):
            pass
        self._totals.evicted += len(evicted)
        self._files.note(evicted, removed=True)
        return evicted if self._used_bytes + needed_bytes <= self.max_bytes else None

    def _evict(self, key: OffloadKey, evicted: list[OffloadKey]) -> bool:
        if not self._unlink(key):
            self._idle.move_to_end(
                key
            )  # its file is intact and stays a hit; the next call tries another one
            return False
        self._drop_from_idle(key)
        self._forget(key)
        evicted.append(key)
        return True

    # --- all at once ------------------------------------------------------------------------------

    def reset(self) -> None:
        """Deletes every file that is not in flight before it returns."""
        self._doom([key for key, file in self._files.items() if file.loadable])
        for file in self._files.values():
            file.doomed = True
        for key in list(self._files):
            self._settle(key)

    def take_events(self) -> list[OffloadingEvent]:
        """Replayed in order they give the keys that `lookup` calls hits; a key's events
        alternate."""
        return self._files.take_events()

    def statistics(self) -> FileTierStatistics:
        files = self._files.values()
        totals = self._totals
        return FileTierStatistics(
            max_bytes=self.max_bytes,
            used_bytes=self._used_bytes,
            idle_blocks=len(self._idle),
            loading_blocks=sum(file.loadable and file.loads > 0 for file in files),
            pending_blocks=sum(file.storing and not file.doomed for file in files),
            doomed_blocks=sum(file.doomed for file in files),
            restored=totals.restored,
            lookup_hits=self._files.lookups.hits,
            lookup_misses=self._files.lookups.misses,
            lookup_pending=self._files.lookups.pending,
            stored=totals.stored,
            evicted=totals.evicted,
            failed_stores=totals.failed_stores,
            failed_loads=totals.failed_loads,
            failed_removals=totals.failed_removals,
            refused_stores=totals.refused_stores,
        )

    # --- small steps ------------------------------------------------------------------------------

    def _doom(self, keys: list[OffloadKey]) -> None:
        """Hits end here for readers."""
        for key in keys:
            self._drop_from_idle(key)
            self._files[key].doomed = True
        self._files.note(keys, removed=True)

    def _settle(self, key: OffloadKey) -> None:
        """A copy is over, or a reset came: what is in flight stays as it is, the rest becomes idle
        or goes."""
        file = self._files[key]
        if file.in_flight:
            return
        if not file.doomed:
            self._make_idle(key)
        elif self._unlink(key):
            self._forget(key)
        else:
            self._stuck[key] = None

    def _remove_stuck(self) -> None:
        while self._stuck and self._unlink(key := next(iter(self._stuck))):
            self._forget(key)

    def _unlink(self, key: OffloadKey) -> bool:
        try:
            self._store.remove(key)
        except OSError:
            self._totals.failed_removals += 1
            return False
        return True

    def _forget(self, key: OffloadKey) -> None:
        self._used_bytes -= self._files.pop(key).file_bytes
        self._stuck.pop(key, None)

    def _make_idle(self, key: OffloadKey) -> None:
        if key not in self._idle:
            self._idle_bytes += self._files[key].file_bytes
        self._idle[key] = None
        self._idle.move_to_end(key)

    def _drop_from_idle(self, key: OffloadKey) -> None:
        if key in self._idle:
            del self._idle[key]
            self._idle_bytes -= self._files[key].file_bytes
