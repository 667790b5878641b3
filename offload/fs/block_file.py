"""One block as a file: its name, its header, its checksum. Values in, values out.

    magic  version  key length  payload length  checksum  key  payload
      8       2         2             8            16     ...   ...        big endian

The checksum is XXH3-128 over key and payload. It finds what disks, crashes and truncation do to a
file; it is no defence against somebody who may write to the directory.
"""

from __future__ import annotations

import struct

import xxhash

from offload.base import OffloadKey
from offload.errors import BlockFileError

MAGIC = b"KVRBLOCK"
VERSION = 1
SUFFIX = ".block"
MIN_KEY_BYTES = 5
MAX_KEY_BYTES = 120
"""A file's name is its key in hex, and file systems end names at 255 bytes."""

_FIXED = struct.Struct(">8sHHQ16s")


def header_bytes(key: OffloadKey) -> int:
    """How long a block's header is."""
    return _FIXED.size + len(key)


def encode_header(key: OffloadKey, payload: memoryview) -> bytes:
    """What stands before the payload."""
    return _FIXED.pack(MAGIC, VERSION, len(key), len(payload), _checksum(key, payload)) + key


def check_block(header: bytes, key: OffloadKey, payload: memoryview) -> None:
    """
    Raises:
        BlockFileError: Header and payload are not what `encode_header` wrote for this key.
    """
    if header != encode_header(key, payload):
        raise BlockFileError(
            "block file: header or payload are not those that were written; the file is damaged"
        )


def relative_path(key: OffloadKey) -> str:
    """Where a block's file lies under the root: in one of 16 times 16 directories.

    ext4 took twice as long or more for a new file with 4,096 of them, and does well with thousands
    of files in each.
    """
    name = key.hex()
    return f"{name[0]}/{name[1]}/{name}{SUFFIX}"


def key_of(path: str) -> OffloadKey | None:
    """The key of a file under the root, None if no key has such a file."""
    stem = path.rpartition("/")[2].removesuffix(SUFFIX)
    try:
        key = OffloadKey(bytes.fromhex(stem))
    except ValueError:
        return None
    return (
        key if MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES and relative_path(key) == path else None
    )


def _checksum(key: OffloadKey, payload: memoryview) -> bytes:
    checksum = xxhash.xxh3_128(key)
    checksum.update(payload)
    digest: bytes = checksum.digest()
    return digest
