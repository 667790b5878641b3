"""The tokenizers library behind a cache: the token ids of a text's segments are kept for the next
turn of the conversation; LRU eviction.

For the tokenizers that `native.py` does not take. There a whole conversation takes less time than
looking up its segments would.
"""

from __future__ import annotations

import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from router.tokenize.local.backend import encode_all
from router.tokenize.local.segments import Segmenter
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


# --- tokenising -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class LookedUp:
    """A text, cut and looked up."""

    keys: list[SegmentKey] = field(repr=False)
    """Salt and text of every segment."""
    found: list[TokenIds | None] = field(repr=False)
    """Their ids; None where the tokenizer has to run."""
    missing_chars: int
    """Characters of those segments."""


class SegmentedTokenizer:
    """Tokenises the segments that are new. Safe to use from several threads.

    Args:
        backend: The library's tokenizer.
        segmenter: Cuts the texts; None leaves them whole.
        max_bytes: Bound on the memory of the cache.
    """

    def __init__(self, backend: Tokenizer, segmenter: Segmenter | None, max_bytes: int) -> None:
        self._backend = backend
        self._segmenter = segmenter
        self._cache = SegmentCache(max_bytes)

    def look_up(self, text: str, salt: str | None) -> LookedUp:
        """Cut a text and look its segments up.

        Args:
            text: Any text.
            salt: Only equal salts share segments.
        """
        segments = [text] if self._segmenter is None else self._segmenter.split(text)
        keys: list[SegmentKey] = [(salt, segment) for segment in segments]
        found = self._cache.get_all(keys)
        missing = sum(len(key[1]) for key, ids in zip(keys, found, strict=True) if ids is None)
        return LookedUp(keys, found, missing)

    def join(self, text: LookedUp) -> tuple[TokenIds, int]:
        """Return the ids of the text, and how many characters the tokenizer ran over.

        Raises:
            UntokenizableError: See `encode_all`.
        """
        missing = dict.fromkeys(
            key for key, ids in zip(text.keys, text.found, strict=True) if ids is None
        )
        # While this prompt waited for a thread, another one may have done its work.
        new = self._cache.peek_all(missing)
        rest = [key for key in missing if key not in new]
        if rest:
            texts = [segment for _, segment in rest]
            encoded = encode_all(self._backend, texts, add_special_tokens=False)
            for key, ids in zip(rest, encoded, strict=True):
                self._cache.put(key, ids)
                new[key] = ids
        joined = array("I")
        for key, known in zip(text.keys, text.found, strict=True):
            joined.extend(new[key] if known is None else known)
        return joined, sum(len(segment) for _, segment in rest)

    def encode_whole(self, text: str) -> TokenIds:
        """Return the ids of a text and of the special tokens that the library puts around it.

        Raises:
            UntokenizableError: See `encode_all`.
        """
        return encode_all(self._backend, [text], add_special_tokens=True)[0]

    def statistics(self) -> SegmentCacheStatistics:
        """Return a snapshot of the cache's counts."""
        return self._cache.statistics()
