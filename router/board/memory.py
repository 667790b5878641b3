"""The board of the workers of one router: memory that they share, without a name in any file
system, and gone with the last of them.

Each worker has a slot of its own, which nobody else writes:

    sequence        8 bytes; odd while the slot is being written
    beat            8 bytes: when its writer was last there, on the monotonic clock of the machine
    length, CRC-32  4 bytes each
    the slot

A reader takes the bytes only if the sequence was even and has not changed meanwhile, and if their
checksum is right: that also holds where a processor reorders what it writes. A writer that died is
silent, and its slot expires.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import struct
import time
import zlib
from collections.abc import Callable, Mapping

from typing_extensions import override

from router.board.base import Board, BoardStatistics
from router.board.slots import MAX_BYTES

BEAT_S = 0.25
EXPIRY_S = 2.0
"""After its writer's last beat a slot no longer counts. A worker that stops for so long serves
nobody anyhow."""

_SEQUENCE = struct.Struct("<Q")
_BEAT = struct.Struct("<d")
_BODY = struct.Struct("<II")
_BEAT_AT = 8
_BODY_AT = 16
_HEAD_BYTES = 24
SLOT_BYTES = -(-(_HEAD_BYTES + MAX_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
_TRIES = 3


def create_memory(slots: int) -> int:
    """A file descriptor of memory for so many slots, all empty; pages that nobody writes take no
    room."""
    descriptor = os.memfd_create("kvroute board")
    os.ftruncate(descriptor, slots * SLOT_BYTES)
    return descriptor


class SharedMemoryBoard(Board):
    """One worker's end of it.

    Args:
        descriptor: From `create_memory`; may be closed afterwards.
        own: Number of the slot that this process writes.
        slots: How many there are.
        clock: The machine's monotonic clock, in seconds.
    """

    kind = "memory"

    def __init__(
        self, descriptor: int, own: int, slots: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._memory = mmap.mmap(descriptor, slots * SLOT_BYTES)
        self._own = own
        self._slots = slots
        self._clock = clock
        self._published = self._failures = 0
        self._beat_at = 0.0
        self._known: dict[str, bytes] = {}
        self._sequences = [0] * slots
        self._ages: dict[str, float] = {}

    @override
    def publish(self, slot: bytes) -> None:
        at = self._own * SLOT_BYTES
        checksum = zlib.crc32(slot)
        # A predecessor that was killed while it wrote has left an odd number.
        sequence = (_SEQUENCE.unpack_from(self._memory, at)[0] | 1) + 2
        _SEQUENCE.pack_into(self._memory, at, sequence)
        _BODY.pack_into(self._memory, at + _BODY_AT, len(slot), checksum)
        start = at + _HEAD_BYTES
        self._memory[start : start + len(slot)] = slot
        _SEQUENCE.pack_into(self._memory, at, sequence + 1)
        self._published += 1
        self._beat_at = 0.0
        self.refresh()

    @override
    def refresh(self) -> None:
        now = self._clock()
        if now - self._beat_at >= BEAT_S:
            self._beat_at = now
            _BEAT.pack_into(self._memory, self._own * SLOT_BYTES + _BEAT_AT, now)

    @override
    def read(self) -> Mapping[str, bytes]:
        now = self._clock()
        self._ages = {}
        for number in range(self._slots):
            if number != self._own:
                self._look_at(number, now)
        return self._known

    def _look_at(self, number: int, now: float) -> None:
        at, name = number * SLOT_BYTES, str(number)
        (sequence,) = _SEQUENCE.unpack_from(self._memory, at)
        age_s = now - _BEAT.unpack_from(self._memory, at + _BEAT_AT)[0]
        if not sequence or age_s > EXPIRY_S:
            self._known.pop(name, None)
            self._sequences[number] = 0
            return
        self._ages[name] = age_s
        if sequence == self._sequences[number] or sequence % 2:
            return
        found = self._taken(at)
        if found is not None:
            self._sequences[number], self._known[name] = found

    def _taken(self, at: int) -> tuple[int, bytes] | None:
        """The slot there; None while it is being written. What comes next will be read then."""
        for _ in range(_TRIES):
            (before,) = _SEQUENCE.unpack_from(self._memory, at)
            length, checksum = _BODY.unpack_from(self._memory, at + _BODY_AT)
            start = at + _HEAD_BYTES
            data = bytes(self._memory[start : start + min(length, MAX_BYTES)])
            (after,) = _SEQUENCE.unpack_from(self._memory, at)
            if before == after and not before % 2 and zlib.crc32(data) == checksum:
                return before, data
        return None

    @override
    def note_broken(self) -> None:
        self._failures += 1

    @override
    def statistics(self) -> BoardStatistics:
        oldest_s = max(self._ages.values(), default=0.0)
        return BoardStatistics(True, len(self._known), oldest_s, self._published, self._failures)

    @override
    async def run(self, on_news: Callable[[], None]) -> None:
        await asyncio.Event().wait()
