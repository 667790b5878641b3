"""One block as a file: its name, its header, its checksum. Values in, values out.

    magic  version  key length  payload length  checksum  key  payload
      8       2         2             8            16     ...   ...        big endian

The checksum is XXH3-128 over key and payload. It detects damage by disks, crashes and truncation,
not forgery by someone who can write to the directory.
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
    """The length of a block's header."""
    return _FIXED.size + len(key)


def encode_header(key: OffloadKey, payload: memoryview) -> bytes:
    """The header that precedes the payload.

    Args:
        key: The block.
        payload: Its bytes.
    """
    return _FIXED.pack(MAGIC, VERSION, len(key), len(payload), _checksum(key, payload)) + key


def check_block(header: bytes, key: OffloadKey, payload: memoryview) -> None:
    """Verify what was read from a block's file.

    Args:
        header: The file's first `header_bytes(key)` bytes.
        key: The block that the file is named after.
        payload: The bytes behind the header.

    Raises:
        BlockFileError: Header and payload differ from those written for this key.
    """
    if header != encode_header(key, payload):
        raise BlockFileError(
            "block file: header or payload are not those that were written; the file is damaged"
        )


def relative_path(key: OffloadKey) -> str:
    """The path of a block's file under the root, in one of 16 times 16 directories.

    With 4,096 directories ext4 took at least twice as long for a new file; thousands of files in
    each are no problem for it.
    """
    name = key.hex()
    return f"{name[0]}/{name[1]}/{name}{SUFFIX}"


def key_of(path: str) -> OffloadKey | None:
    """The key of a file under the root; None if no key's file has that path."""
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
