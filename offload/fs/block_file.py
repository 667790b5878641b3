"""One block as a file: its name, its header, its checksum. Values in, values out.

    magic  version  key length  payload length  checksum  key  hashes  payload
      8       2         2             8            16     ...   ...      ...        big endian

A block that covers several GPU blocks has the hashes of all but the last of these, whose hash is in
the key; such a file has version 2. The checksum is XXH3-128 over key, hashes and payload. It
detects damage by disks, crashes and truncation, not forgery by someone who can write to the
directory.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import xxhash

from offload.base import OffloadKey, unpack_offload_key
from offload.errors import BlockFileError

MAGIC = b"KVRBLOCK"
_VERSION, _VERSION_WITH_HASHES = 1, 2
SUFFIX = ".block"
MIN_KEY_BYTES = 5
MAX_KEY_BYTES = 120
"""A file's name is its key in hex, and file systems end names at 255 bytes."""

_FIXED = struct.Struct(">8sHHQ16s")


def header_bytes(key: OffloadKey, gpu_blocks: int = 1) -> int:
    """The length of a block's header.

    Args:
        gpu_blocks: How many GPU blocks it covers.
    """
    return _FIXED.size + len(key) + (gpu_blocks - 1) * _hash_bytes(key)


def encode_header(
    key: OffloadKey, payload: memoryview, block_hashes: Sequence[bytes] = ()
) -> bytes:
    """The header that precedes the payload.

    Args:
        block_hashes: The hashes of the GPU blocks it covers, its own last; empty for a single one.
    """
    return _header(key, payload, b"".join(block_hashes[:-1]))


def _header(key: OffloadKey, payload: memoryview, hashes: bytes) -> bytes:
    version = _VERSION_WITH_HASHES if hashes else _VERSION
    checksum = _checksum(key, hashes, payload)
    return _FIXED.pack(MAGIC, version, len(key), len(payload), checksum) + key + hashes


def hashes_of(header: bytes, key: OffloadKey) -> list[bytes]:
    """The hashes of the GPU blocks that a block covers, its own last.

    They are not verified here: `check_block` is, before the block is served.

    Args:
        header: The file's first `header_bytes(key, gpu_blocks)` bytes.
        key: The block that the file is named after.
    """
    size = _hash_bytes(key)
    starts = range(_FIXED.size + len(key), len(header), size)
    return [*(header[start : start + size] for start in starts), unpack_offload_key(key)[0]]


def _hash_bytes(key: OffloadKey) -> int:
    return len(unpack_offload_key(key)[0])


def check_block(header: bytes, key: OffloadKey, payload: memoryview) -> None:
    """Verify the content of a block's file.

    Raises:
        BlockFileError: Header and payload differ from those written for this key.
    """
    if header != _header(key, payload, header[header_bytes(key) :]):
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


def _checksum(key: OffloadKey, hashes: bytes, payload: memoryview) -> bytes:
    checksum = xxhash.xxh3_128(key + hashes)
    checksum.update(payload)
    digest: bytes = checksum.digest()
    return digest
