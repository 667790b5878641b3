"""An index as bytes and back: to keep one over a restart, to look at one offline, to compare two.

The content of the records is the implementation's own; here they are framed, so that a file that
was cut off, damaged or written by another version is refused as a whole:

    magic, version    18 + 2 bytes
    a frame each      length: 8 bytes; CRC-32 of all records so far: 4 bytes; the record
    the end           a frame of length 0
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

from router.index.index import PrefixIndex
from router.index.sources import DumpError

VERSION = 9

_MAGIC = b"kvroute index dump"
_VERSION = struct.Struct(">H")
_FRAME = struct.Struct(">QI")


def dump(index: PrefixIndex) -> Iterator[bytes]:
    """The state of an index, in pieces to be written one after the other.

    It holds block hashes, keys, and the tokens of runs that wait for their parents: treat it like a
    prompt log. Each source is as it is when its piece is made.
    """
    writer = FrameWriter(_MAGIC, VERSION)
    yield writer.head
    for record in index.export():
        yield writer.framed(record)
        yield record
    yield writer.framed(b"")


def load(data: bytes, index: PrefixIndex) -> None:
    """Restore an index from the pieces of `dump`.

    Args:
        index: Of the implementation that wrote them; its content is replaced.
    Raises:
        DumpError: The bytes are not a whole, undamaged dump of this version and implementation.
            The index is as before.
    """
    index.restore(read_frames(memoryview(data), _MAGIC, VERSION))


class FrameWriter:
    """Frames records, one after the other."""

    def __init__(self, magic: bytes, version: int) -> None:
        self.head = magic + _VERSION.pack(version)
        self._checksum = 0

    def framed(self, record: bytes) -> bytes:
        """Return the frame in front of a record; an empty record is the end."""
        self._checksum = zlib.crc32(record, self._checksum)
        return _FRAME.pack(len(record), self._checksum)


def read_frames(data: memoryview, magic: bytes, version: int) -> Iterator[memoryview]:
    """Read the records that a `FrameWriter` framed.

    Raises:
        DumpError: It is incomplete, damaged, or of another version.
    """
    if bytes(data[: len(magic)]) != magic or len(data) < len(magic) + _VERSION.size:
        raise DumpError(f"index dump of {len(data)} bytes: it must start with {magic.decode()!r}")
    (found,) = _VERSION.unpack_from(data, len(magic))
    if found != version:
        raise DumpError(f"index dump: version {found} must be {version}")
    position, checksum, length = len(magic) + _VERSION.size, 0, -1
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
    """Read the frame at *position*: the record's length, the checksum, the record's start."""
    start = position + _FRAME.size
    if start > len(data):
        raise DumpError(f"index dump: cut off at byte {len(data)}, inside a frame")
    length, checksum = _FRAME.unpack_from(data, position)
    if start + length > len(data):
        raise DumpError(
            f"index dump: cut off at byte {len(data)}; the record at byte {start} has {length}"
        )
    return length, checksum, start
