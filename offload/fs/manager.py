"""Manages the disk tier: its blocks, copies in flight, and evictions.

A key has at most one file. Its life: `prepare_store` makes it pending, `complete_store` makes it a
hit, loads protect it, and eviction, a failed copy or a reset ends it. A block that must go while a
copy of it is in flight is *doomed*: no longer a hit from that moment on, in the events too, but its
file is deleted, its bytes are freed, and its key may be stored again only when the copy is over. So
a deletion never meets a queued copy of the same key.

Files are deleted here, as soon as that is decided. A file that cannot be deleted keeps its bytes;
deleting it is tried again later.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from typing_extensions import override

from kvevents.events import STORAGE
from offload.base import (
    FileLoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    RequestContext,
)
from offload.errors import CacheConfigError
from offload.fs.store import BlockFiles
from offload.tier_entries import TierCounts, TierEntries, TierEntry

_KEYS_PER_EVENT = 1024


@dataclass(slots=True)
class FileTierCounts(TierCounts):
    """Counts of the disk tier since the start."""

    restored: int = 0
    """Blocks found in the directory at the start."""
    failed_removals: int = 0
    """Attempts to delete a file that the system refused."""


@dataclass(frozen=True, slots=True)
class FileTierStatistics:
    """Blocks and bytes now, and counts since the start."""

    max_bytes: int
    used_bytes: int
    """The bytes of all files, those in flight included."""
    idle_blocks: int
    """Hits that no load protects, which can be evicted."""
    loading_blocks: int
    """Hits that a load protects."""
    pending_blocks: int
    """Their store is in flight."""
    doomed_blocks: int
    """No longer hits; gone when their copy is over or their file can be deleted."""
    counts: FileTierCounts


@dataclass(slots=True, kw_only=True)
class _FileEntry(TierEntry):
    file_bytes: int


class FileOffloadingManager(OffloadingManager):
    """The disk tier as the scheduler sees it, over the files of a `BlockStore`.

    The least recently used block is evicted first. The order of the keys in a call is that of the
    prompt: a call's blocks are evicted from the last key to the first, since a block is useless
    without those before it. Blocks that an earlier process left in the directory are hits at once,
    the longest unused of them evicted first, and the first `take_events` reports them.
    """

    medium = STORAGE

    def __init__(self, store: BlockFiles, max_bytes: int, enable_events: bool = False) -> None:
        """
        Args:
            store: The directory. It belongs to this manager until `store.close()`.
            max_bytes: Limit for all block files together; see `BlockStore` for bytes that are not
                counted.
            enable_events: Record what is stored and removed; then `take_events` must be called,
                since events are kept until it is.

        Raises:
            CacheConfigError: A single block would not fit, or another manager has the directory.
            OSError: The directory cannot be read, or holds too much and cannot be written.
        """
        if max_bytes < max(store.payload_bytes):
            raise CacheConfigError(
                f"disk tier: max_bytes {max_bytes} must hold a block, "
                f"{max(store.payload_bytes)} bytes"
            )
        self.max_bytes = max_bytes
        self.enable_events = enable_events
        self._store = store
        self._counts = FileTierCounts()
        self._files = TierEntries[_FileEntry]("disk", STORAGE, self._counts, enable_events)
        self._idle: OrderedDict[OffloadKey, None] = OrderedDict()
        """Blocks that can be evicted, the longest unused first."""
        self._idle_bytes = self._used_bytes = 0
        self._stuck: dict[OffloadKey, None] = {}
        """Doomed and not in flight, but the file could not be deleted."""
        self._restored_hashes: dict[OffloadKey, Sequence[bytes]] = {}
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
            if file.block_hashes:
                self._restored_hashes[file.key] = file.block_hashes
        self._counts.restored = len(kept)
        for first in range(0, len(kept), _KEYS_PER_EVENT):
            self._files.record(kept[first : first + _KEYS_PER_EVENT], removed=False)

    @override
    def restored_block_hashes(self) -> Mapping[OffloadKey, Sequence[bytes]]:
        """See `OffloadingManager`; for files found at the start, and empty after the first call."""
        hashes, self._restored_hashes = self._restored_hashes, {}
        return hashes

    # --- looking ----------------------------------------------------------------------------------

    @override
    def lookup(self, key: OffloadKey, context: RequestContext) -> LookupResult:
        return self._files.lookup(key)

    @override
    def touch(self, keys: Iterable[OffloadKey], context: RequestContext) -> None:
        """Mark blocks as used; after a restart the order is that of writes and loads."""
        for key in keys:
            if key in self._idle:
                self._idle.move_to_end(key)

    # --- loading ----------------------------------------------------------------------------------

    @override
    def prepare_load(
        self, keys: Sequence[OffloadKey], context: RequestContext
    ) -> FileLoadStoreSpec:
        files = self._files.require(
            keys, lambda file: file.loadable, "prepare_load", "is not a hit"
        )
        for key, file in zip(keys, files, strict=True):
            self._drop_from_idle(key)
            file.loads += 1
        return FileLoadStoreSpec(tuple(keys))

    @override
    def complete_load(
        self, keys: Sequence[OffloadKey], context: RequestContext, success: bool = True
    ) -> None:
        """End the protection; a block that could not be read goes with its last load in flight."""
        loads = Counter(keys)
        self._files.require_loads(loads)
        if not success:
            self._counts.failed_loads += loads.total()
            self._doom([key for key in loads if not self._files[key].doomed])
        for key in reversed(loads):
            self._files[key].loads -= loads[key]
            self._settle(key)

    # --- storing ----------------------------------------------------------------------------------

    @override
    def prepare_store(
        self, keys: Sequence[OffloadKey], context: RequestContext
    ) -> PrepareStoreOutput | None:
        """Make room; neither a key of this call nor a block in flight is evicted for it.

        None also where the system refuses to delete a file: then the files deleted before it are
        gone, as the events report.

        Raises:
            TransferError: A key cannot belong to this directory. Nothing changed.
        """
        self._remove_stuck()
        asked = dict.fromkeys(keys)
        new = {key: self._store.file_bytes(key) for key in asked if key not in self._files}
        evicted = self._make_room(
            sum(new.values()), spared=[key for key in asked if key in self._idle]
        )
        if evicted is None:
            self._counts.refused_stores += 1
            return None
        for key, file_bytes in new.items():
            self._admit(key, file_bytes)
        return PrepareStoreOutput(tuple(new), FileLoadStoreSpec(tuple(new)), evicted)

    @override
    def complete_store(
        self, keys: Sequence[OffloadKey], context: RequestContext, success: bool = True
    ) -> None:
        """Make stored blocks hits; those that a reset doomed meanwhile are gone either way."""
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
        self._counts.stored += len(stored)
        self._counts.failed_stores += 0 if success else len(asked)
        self._files.record(stored, removed=False)

    def _admit(self, key: OffloadKey, file_bytes: int) -> None:
        self._files[key] = _FileEntry(file_bytes=file_bytes)
        self._used_bytes += file_bytes

    def _make_room(self, needed_bytes: int, spared: list[OffloadKey]) -> list[OffloadKey] | None:
        """Evict until *needed_bytes* are free, and return the evicted keys; None if that fails."""
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
        self._counts.evicted += len(evicted)
        self._files.record(evicted, removed=True)
        return evicted if self._used_bytes + needed_bytes <= self.max_bytes else None

    def _evict(self, key: OffloadKey, evicted: list[OffloadKey]) -> bool:
        if not self._unlink(key):
            # Its file is intact and stays a hit; the next call tries another one.
            self._idle.move_to_end(key)
            return False
        self._drop_from_idle(key)
        self._forget(key)
        evicted.append(key)
        return True

    # --- all at once ------------------------------------------------------------------------------

    @override
    def reset(self) -> None:
        """Drop every block; files that are not in flight are deleted before this returns."""
        self._doom([key for key, file in self._files.items() if file.loadable])
        for file in self._files.values():
            file.doomed = True
        for key in list(self._files):
            self._settle(key)

    @override
    def take_events(self) -> list[OffloadingEvent]:
        """Events in order; replayed, they give the keys for which `lookup` returns a hit."""
        return self._files.take_events()

    def statistics(self) -> FileTierStatistics:
        """Blocks and bytes now, and counts since the start."""
        files = self._files.values()
        return FileTierStatistics(
            max_bytes=self.max_bytes,
            used_bytes=self._used_bytes,
            idle_blocks=len(self._idle),
            loading_blocks=sum(file.loadable and file.loads > 0 for file in files),
            pending_blocks=sum(file.storing and not file.doomed for file in files),
            doomed_blocks=sum(file.doomed for file in files),
            counts=replace(self._counts),
        )

    # --- small steps ------------------------------------------------------------------------------

    def _doom(self, keys: list[OffloadKey]) -> None:
        """End hits: from here on they are misses."""
        for key in keys:
            self._drop_from_idle(key)
            self._files[key].doomed = True
        self._files.record(keys, removed=True)

    def _settle(self, key: OffloadKey) -> None:
        """After a copy or a reset: a block that is not in flight becomes idle or goes."""
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
            self._counts.failed_removals += 1
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
