"""The tokenizers library behind a cache: the token ids of a text's segments are kept for the next
turn of the conversation; roughly the least recently used goes first.

For the tokenizers that `native.py` does not take. There a whole conversation takes less time than
looking up its segments would.
"""

from __future__ import annotations

import mmap
import sys
import threading
from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

from tokenizers import Tokenizer

from kvevents.field_docs import counter
from router.prompt.local.backend import encode_all
from router.prompt.local.segmenter import Segmenter
from router.prompt.token_ids import TokenIds

# Salt and text. The salt separates tenants: the time of a response must not reveal to one of them
# what another sent.
SegmentKey = tuple[str | None, str]

# The shares of the dictionary, the key, the place and the list of keys, on 64-bit CPython.
_ENTRY_OVERHEAD_BYTES = 320
_SLABS = 16


@dataclass(frozen=True)
class SegmentCacheStatistics:
    """Counts since the start, and sizes now."""

    entries: int
    held_bytes: int
    max_bytes: int
    hits: Annotated[int, counter("kvroute_token_cache_hits")]
    """Pieces of text whose token ids were cached; only where `tokenizers` tokenises."""
    misses: Annotated[int, counter("kvroute_token_cache_misses")]
    """Pieces of text that were tokenised; only where `tokenizers` tokenises."""
    evictions: int


class _Slab:
    """A piece of memory for the ids of many segments."""

    __slots__ = ("data", "keys", "number", "room", "used")

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.data = mmap.mmap(-1, size)  # takes memory as it is written
        self.room = size
        """The cost that its segments may still add, their texts included."""
        self.used = 0
        self.keys: list[SegmentKey] = []


_Place: TypeAlias = tuple[int, int, int, SegmentKey]
"""The slab's number, where the ids begin and where they end, and the key as it is kept: each
request brings a text of its own, and one of them is enough. The collector skips such tuples."""


class SegmentCache:
    """A bounded map from segments to ids, safe to use from several threads.

    The ids lie in slabs, not in arrays of their own. Among all that the tokenizers library
    allocates and frees, those made malloc search ever longer: with 50,000 of them the same text
    took twice the CPU time. Slabs are dropped as a whole, the oldest first; what is used again by
    then has been copied to a newer one.
    """

    def __init__(self, max_bytes: int) -> None:
        """Make an empty cache; 0 keeps nothing."""
        self._max_bytes = max_bytes
        self._slab_bytes = max_bytes // _SLABS
        self._places: dict[SegmentKey, _Place] = {}
        self._slabs: deque[_Slab] = deque()
        self._held_bytes = 0
        self._hits = 0
        self._misses = 0
        self._evictions = 0
        self._lock = threading.Lock()

    def get_all(self, keys: list[SegmentKey]) -> list[TokenIds | None]:
        """Look up keys; a miss gives None. The arrays are the caller's own."""
        with self._lock:
            found = [self._get(key) for key in keys]
            misses = found.count(None)
            self._misses += misses
            self._hits += len(keys) - misses
        return found

    def peek_all(self, keys: Iterable[SegmentKey]) -> dict[SegmentKey, TokenIds]:
        """Return the cached ones of *keys*, without counting or renewing them."""
        with self._lock:
            return {key: self._ids_at(self._places[key]) for key in keys if key in self._places}

    def put(self, key: SegmentKey, ids: TokenIds) -> None:
        """Keep a copy of ids, unless they would evict half of everything else by themselves."""
        data = ids.tobytes()
        if _text_bytes(key) + len(data) > self._max_bytes // 2:
            return
        with self._lock:
            if key not in self._places:
                self._held_bytes += _text_bytes(key)
                self._write(key, data)

    def statistics(self) -> SegmentCacheStatistics:
        with self._lock:
            return SegmentCacheStatistics(
                entries=len(self._places),
                held_bytes=self._held_bytes,
                max_bytes=self._max_bytes,
                hits=self._hits,
                misses=self._misses,
                evictions=self._evictions,
            )

    def _get(self, key: SegmentKey) -> TokenIds | None:
        place = self._places.get(key)
        if place is None:
            return None
        ids = self._ids_at(place)
        if place[0] < self._slabs[len(self._slabs) // 2].number:
            self._write(place[3], ids.tobytes())
        return ids

    def _ids_at(self, place: _Place) -> TokenIds:
        number, start, end, _ = place
        return array("I", self._slabs[number - self._slabs[0].number].data[start:end])

    def _write(self, key: SegmentKey, data: bytes) -> None:
        cost = _text_bytes(key) + len(data)
        slab = self._slabs[-1] if self._slabs else None
        if slab is None or cost > slab.room:
            number = 0 if slab is None else slab.number + 1
            slab = _Slab(number, max(self._slab_bytes, cost))
            self._slabs.append(slab)
        start, end = slab.used, slab.used + len(data)
        slab.data[start:end] = data
        slab.used = end
        slab.room -= cost
        slab.keys.append(key)
        self._places[key] = slab.number, start, end, key
        self._held_bytes += len(data)
        while self._held_bytes > self._max_bytes:
            self._drop(self._slabs.popleft())

    def _drop(self, slab: _Slab) -> None:
        self._held_bytes -= slab.used
        for key in slab.keys:
            place = self._places.get(key)
            if place is not None and place[0] == slab.number:
                del self._places[key]
                self._held_bytes -= _text_bytes(key)
                self._evictions += 1


def _text_bytes(key: SegmentKey) -> int:
    return sys.getsizeof(key[1]) + _ENTRY_OVERHEAD_BYTES


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
        segmenter: Cuts the texts; None leaves them whole.
    """

    def __init__(self, backend: Tokenizer, segmenter: Segmenter | None, max_bytes: int) -> None:
        self._backend = backend
        self._segmenter = segmenter
        self._cache = SegmentCache(max_bytes)

    def look_up(self, text: str, salt: str | None) -> LookedUp:
        segments = [text] if self._segmenter is None else self._segmenter.split(text)
        keys: list[SegmentKey] = [(salt, segment) for segment in segments]
        found = self._cache.get_all(keys)
        missing = sum(len(key[1]) for key, ids in zip(keys, found, strict=True) if ids is None)
        return LookedUp(keys, found, missing)

    def join(self, text: LookedUp) -> TokenIds:
        """Return the ids of the text.

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
        return joined

    def encode_whole(self, text: str) -> TokenIds:
        """Return the ids of a text and of the special tokens that the library puts around it.

        Raises:
            UntokenizableError: See `encode_all`.
        """
        return encode_all(self._backend, [text], add_special_tokens=True)[0]

    def statistics(self) -> SegmentCacheStatistics:
        return self._cache.statistics()
