"""Manages the disk tier: its bytes, its files, and which one is evicted next.

What happens to a block meanwhile is in `offload/tier_manager.py`. A file is deleted, and its bytes
are freed, when its last copy is over, so a deletion never meets a queued copy of the same key.
Files are deleted here, as soon as that is decided. A file that cannot be deleted keeps its bytes;
deleting it is tried again later.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from typing_extensions import override

from kvevents.events import STORAGE
from offload.base import FileLoadStoreSpec, OffloadKey, PrepareStoreOutput, RequestContext
from offload.errors import CacheConfigError
from offload.fs.store import BlockFiles
from offload.tier_manager import TierCounts, TierEntry, TierManager, TierStatistics

_KEYS_PER_EVENT = 1024


@dataclass(slots=True)
class FileTierCounts(TierCounts):
    """Counts of the disk tier since the start."""

    restored: int = 0
    """Blocks found in the directory at the start."""
    failed_removals: int = 0
    """Attempts to delete a file that the system refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTierStatistics(TierStatistics):
    """Blocks and bytes now, and counts since the start."""

    max_bytes: int
    used_bytes: int
    """The bytes of all files, those in flight included."""
    counts: FileTierCounts


@dataclass(slots=True, kw_only=True)
class _FileEntry(TierEntry):
    file_bytes: int


class FileOffloadingManager(TierManager[_FileEntry]):
    """The disk tier as the scheduler sees it, over the files of a `BlockStore`.

    The least recently used block is evicted first. The order of the keys in a call is that of the
    prompt: a call's blocks are evicted from the last key to the first, since a block is useless
    without those before it. Blocks that an earlier process left in the directory are hits at once,
    the longest unused of them evicted first, and the first `take_events` reports them.
    """

    medium = STORAGE
    name = "disk"
    _counts: FileTierCounts

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
        super().__init__(FileTierCounts(), enable_events)
        self.max_bytes = max_bytes
        self._store = store
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
            self._entries[file.key].storing = False
            self._release(file.key)
            kept.append(file.key)
            if file.block_hashes:
                self._restored_hashes[file.key] = file.block_hashes
        self._counts.restored = len(kept)
        for first in range(0, len(kept), _KEYS_PER_EVENT):
            self._record(kept[first : first + _KEYS_PER_EVENT], removed=False)

    @override
    def restored_block_hashes(self) -> Mapping[OffloadKey, Sequence[bytes]]:
        """See `OffloadingManager`; for files found at the start, and empty after the first call."""
        hashes, self._restored_hashes = self._restored_hashes, {}
        return hashes

    # --- looking ----------------------------------------------------------------------------------

    @override
    def touch(self, keys: Iterable[OffloadKey], context: RequestContext) -> None:
        """Mark blocks as used; after a restart the order is that of writes and loads."""
        for key in keys:
            if key in self._idle:
                self._idle.move_to_end(key)

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
        new = {key: self._store.file_bytes(key) for key in asked if key not in self._entries}
        evicted = self._make_room(
            sum(new.values()), spared=[key for key in asked if key in self._idle]
        )
        if evicted is None:
            self._counts.refused_stores += 1
            return None
        for key, file_bytes in new.items():
            self._admit(key, file_bytes)
        return PrepareStoreOutput(tuple(new), self._spec(tuple(new)), evicted)

    def _admit(self, key: OffloadKey, file_bytes: int) -> None:
        self._entries[key] = _FileEntry(file_bytes=file_bytes)
        self._used_bytes += file_bytes

    def _make_room(self, needed_bytes: int, spared: list[OffloadKey]) -> list[OffloadKey] | None:
        """Evict until *needed_bytes* are free, and return the evicted keys; None if that fails."""
        spared_bytes = sum(self._entries[key].file_bytes for key in spared)
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
        self._record(evicted, removed=True)
        return evicted if self._used_bytes + needed_bytes <= self.max_bytes else None

    def _evict(self, key: OffloadKey, evicted: list[OffloadKey]) -> bool:
        if not self._unlink(key):
            # Its file is intact and stays a hit; the next call tries another one.
            self._idle.move_to_end(key)
            return False
        self._hold(key)
        self._forget(key)
        evicted.append(key)
        return True

    # --- TierManager ------------------------------------------------------------------------------

    @override
    def _spec(self, keys: Sequence[OffloadKey]) -> FileLoadStoreSpec:
        return FileLoadStoreSpec(tuple(keys))

    @override
    def _hold(self, key: OffloadKey) -> None:
        del self._idle[key]
        self._idle_bytes -= self._entries[key].file_bytes

    @override
    def _release(self, key: OffloadKey) -> None:
        self._idle[key] = None
        self._idle_bytes += self._entries[key].file_bytes

    @override
    def _discard(self, key: OffloadKey) -> None:
        """Do nothing: a block in flight is not among the idle ones."""

    @override
    def _discard_all(self) -> None:
        self._idle.clear()
        self._idle_bytes = 0

    @override
    def _remove(self, key: OffloadKey) -> None:
        if self._unlink(key):
            self._forget(key)
        else:
            self._stuck[key] = None

    def statistics(self) -> FileTierStatistics:
        """Blocks and bytes now, and counts since the start."""
        return self._statistics(
            FileTierStatistics, max_bytes=self.max_bytes, used_bytes=self._used_bytes
        )

    # --- small steps ------------------------------------------------------------------------------

    def _remove_stuck(self) -> None:
        while self._stuck:
            key = next(iter(self._stuck))
            if not self._unlink(key):
                # On a disk gone read-only none can go; the next call begins with another one.
                self._stuck[key] = self._stuck.pop(key)
                return
            self._forget(key)

    def _unlink(self, key: OffloadKey) -> bool:
        try:
            self._store.remove(key)
        except OSError:
            self._counts.failed_removals += 1
            return False
        return True

    def _forget(self, key: OffloadKey) -> None:
        self._used_bytes -= self._entries.pop(key).file_bytes
        self._stuck.pop(key, None)
