"""Token ids of text segments, kept for the next turn of the conversation; LRU eviction."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from router.tokenize.prompts import TokenIds

# Salt and text. The salt keeps tenants apart: the time a response takes must not tell one of them
# what another sent.
SegmentKey = tuple[str | None, str]

# The dictionary's, the key tuple's and the array header's share, measured on 64-bit CPython.
_ENTRY_OVERHEAD_BYTES = 320


@dataclass(frozen=True)
class SegmentCacheStatistics:
    """Counts since the start, and sizes now."""

    entries: int
    held_bytes: int
    max_bytes: int
    hits: int
    misses: int
    evictions: int


class SegmentCache:
    """A bounded map from segments to ids, safe to use from several threads."""

    def __init__(self, max_bytes: int) -> None:
        """Make an empty cache; 0 keeps nothing."""
        self._max_bytes = max_bytes
        self._entries: OrderedDict[SegmentKey, TokenIds] = OrderedDict()
        self._held_bytes = 0
        self._hits = 0
        self._misses = 0
        self._evictions = 0
        self._lock = threading.Lock()

    def get_all(self, keys: list[SegmentKey]) -> list[TokenIds | None]:
        """Look up keys; a miss is None. The arrays are shared: read them only."""
        entries = self._entries
        with self._lock:
            found = [entries.get(key) for key in keys]
            for key, ids in zip(keys, found, strict=True):
                if ids is not None:
                    entries.move_to_end(key)
            misses = found.count(None)
            self._misses += misses
            self._hits += len(keys) - misses
        return found

    def peek_all(self, keys: Iterable[SegmentKey]) -> dict[SegmentKey, TokenIds]:
        """Return the cached ones of *keys*, without counting or renewing them."""
        with self._lock:
            return {key: self._entries[key] for key in keys if key in self._entries}

    def put(self, key: SegmentKey, ids: TokenIds) -> None:
        """Keep ids, unless they would evict half of everything else by themselves.

        Args:
            key: Salt and text.
            ids: Their token ids, shared from now on: do not change them.
        """
        size = _entry_bytes(key, ids)
        if size > self._max_bytes // 2:
            return
        with self._lock:
            if key in self._entries:
                return
            self._entries[key] = ids
            self._held_bytes += size
            while self._held_bytes > self._max_bytes:
                old_key, old_ids = self._entries.popitem(last=False)
                self._held_bytes -= _entry_bytes(old_key, old_ids)
                self._evictions += 1

    def statistics(self) -> SegmentCacheStatistics:
        """Return a snapshot of the counts."""
        with self._lock:
            return SegmentCacheStatistics(
                entries=len(self._entries),
                held_bytes=self._held_bytes,
                max_bytes=self._max_bytes,
                hits=self._hits,
                misses=self._misses,
                evictions=self._evictions,
            )


def _entry_bytes(key: SegmentKey, ids: TokenIds) -> int:
    return sys.getsizeof(key[1]) + ids.itemsize * len(ids) + _ENTRY_OVERHEAD_BYTES
