"""An index as bytes and back: to keep one over a restart, to look at one offline, to compare two.

What the records say is the implementation's own; here they are framed, so that a file that was cut
off, damaged or written by another version is refused as a whole:

    magic, version    18 + 2 bytes
    a frame each      length: 8 bytes; CRC-32 of all records so far: 4 bytes; the record
    the end           a frame of length 0
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

from router.index.base import DumpError, PrefixIndex

VERSION = 6

_MAGIC = b"kvroute index dump"
_HEAD = struct.Struct(f">{len(_MAGIC)}sH")
_FRAME = struct.Struct(">QI")


def dump(index: PrefixIndex) -> Iterator[bytes]:
    """The state of an index, in pieces to be written one after the other.

    It holds block hashes, keys, and the tokens of runs that wait for their parents: treat it like a
    prompt log. Each source is as it is when its piece is made.
    """
    yield _HEAD.pack(_MAGIC, VERSION)
    checksum = 0
    for record in index.export():
        checksum = zlib.crc32(record, checksum)
        yield _FRAME.pack(len(record), checksum)
        yield record
    yield _FRAME.pack(0, checksum)


def load(data: bytes, index: PrefixIndex) -> None:
    """Restore an index from the pieces of `dump`.

    Args:
        data: All pieces, joined.
        index: Of the implementation that wrote them; what it holds is forgotten.
    Raises:
        DumpError: The bytes are not a whole, undamaged dump of this version and implementation.
            The index is as before.
    """
    index.restore(_records(memoryview(data)))


def _records(data: memoryview) -> Iterator[memoryview]:
    if len(data) < _HEAD.size or bytes(data[: len(_MAGIC)]) != _MAGIC:
        raise DumpError(f"index dump of {len(data)} bytes: it must start with {_MAGIC.decode()!r}")
    _, version = _HEAD.unpack_from(data)
    if version != VERSION:
        raise DumpError(f"index dump: version {version} must be {VERSION}")
    position, checksum, length = _HEAD.size, 0, -1
    while length:
        length, expected, position = _frame(data, position)
        record = data[position : position + length]
        checksum = zlib.crc32(record, checksum)
        if checksum != expected:
            raise DumpError(f"index dump: damaged before byte {position + length}")
        position += length
        if record:
            yield record
    if position != len(data):
        raise DumpError(f"index dump: {len(data) - position} bytes follow its end")


def _frame(data: memoryview, position: int) -> tuple[int, int, int]:
    """Of the frame at *position*: the record's length, the checksum, the record's start."""
    start = position + _FRAME.size
    if start > len(data):
        raise DumpError(f"index dump: cut off at byte {len(data)}, inside a frame")
    length, checksum = _FRAME.unpack_from(data, position)
    if start + length > len(data):
        raise DumpError(
            f"index dump: cut off at byte {len(data)}; the record at byte {start} has {length}"
        )
    return length, checksum, start
