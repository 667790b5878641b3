"""A directory of block files named after their keys; each file exists whole or not at all.

Files are written under a temporary name and renamed. Reads are verified; a file that does not
verify is deleted, never served. Sizes are those of the files: file systems need more, for rounding
and for directories.

A manifest records which layout and model the blocks belong to, which their names do not show. A
directory of another layout or model is refused, and so is one that holds foreign files.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from typing_extensions import override

from offload.base import OffloadKey, unpack_offload_key
from offload.errors import BlockFileError, CacheConfigError, TransferError
from offload.fs.block_file import (
    MAX_KEY_BYTES,
    MIN_KEY_BYTES,
    SUFFIX,
    check_block,
    encode_header,
    hashes_of,
    header_bytes,
    key_of,
    relative_path,
)

_MANIFEST = "manifest.json"
_MANIFEST_FORMAT = 1
_LOCK = "lock"
_OPENING = "opening"
"""Locked while a new directory gets its manifest."""
_TEMPORARY = ".tmp"
_OURS = {_MANIFEST, f"{_MANIFEST}{_TEMPORARY}", _LOCK, _OPENING}


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file that a scan found."""

    key: OffloadKey
    file_bytes: int
    used_ns: int
    """When it was written or last read, by the file system's clock."""
    block_hashes: Sequence[bytes] = ()
    """The hashes of the GPU blocks it covers, its own last; empty for a single one."""


@dataclass(slots=True)
class StoreStatistics:
    """Counts of a store since it was opened."""

    written_blocks: int = 0
    written_bytes: int = 0
    read_blocks: int = 0
    read_bytes: int = 0
    rejected_blocks: int = 0
    """Files that could not be read or did not verify."""


class BlockFiles(ABC):
    """The files of a disk tier, as its manager uses them."""

    def __init__(
        self, payload_bytes: Sequence[int], gpu_blocks: Sequence[int] | None = None
    ) -> None:
        """
        Args:
            payload_bytes: Per group, the bytes of an offloaded block.
            gpu_blocks: Per group, how many GPU blocks it covers; None: one each.
        """
        self.payload_bytes = tuple(payload_bytes)
        self.gpu_blocks = tuple(gpu_blocks or (1,) * len(self.payload_bytes))

    def file_bytes(self, key: OffloadKey) -> int:
        """The length of a block's file.

        Raises:
            TransferError: The key's length or group is out of range.
        """
        if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
            raise TransferError(
                f"disk tier: a key of {len(key)} bytes must have {MIN_KEY_BYTES} to {MAX_KEY_BYTES}"
            )
        _, group = unpack_offload_key(key)
        if group >= len(self.payload_bytes):
            raise TransferError(
                f"disk tier: a key of group {group} must belong to one of "
                f"{len(self.payload_bytes)} groups"
            )
        return header_bytes(key, self.gpu_blocks[group]) + self.payload_bytes[group]

    @abstractmethod
    def scan(self) -> list[StoredFile]:
        """The block files in the directory, the longest unused first.

        Deletes the remains of interrupted writes, so it must precede any write. Lengths are checked
        here, contents when they are read.

        Raises:
            CacheConfigError: Another process, or another store of this one, has scanned the
                directory and not closed it.
        """

    @abstractmethod
    def remove(self, key: OffloadKey) -> None:
        """Delete a block's file if it exists.

        Raises:
            OSError: It exists and cannot be deleted.
        """

    @abstractmethod
    def close(self) -> None:
        """Let another store scan the directory; a second call has no effect."""


class BlockStore(BlockFiles):
    """Reads, writes and removes block files; any thread may call any method but `scan`.

    The scheduler's process and the model's may each open the same directory; only one process may
    `scan` it.
    """

    def __init__(
        self,
        root: Path,
        payload_bytes: Sequence[int],
        identity: str = "",
        durable: bool = False,
        blocks_per_offloaded_block: Sequence[int] | None = None,
    ) -> None:
        """Open a directory, or create it.

        Args:
            root: The directory; each worker of a model has its own.
            payload_bytes: Per group, the bytes of an offloaded block.
            identity: All else that makes equal keys mean equal bytes: model and revision, cache
                dtype, hash seed, rank. Compared verbatim.
            durable: Wait for the disk at every write. Without it a power failure may lose blocks,
                but damaged ones are never served.
            blocks_per_offloaded_block: Per group, how many GPU blocks a block covers. Files then
                keep these blocks' hashes, so that the next process finds each of them.

        Raises:
            CacheConfigError: The directory was made for another layout or identity, or holds
                foreign files.
        """
        super().__init__(payload_bytes, blocks_per_offloaded_block)
        if not self.payload_bytes or min(self.payload_bytes) < 1:
            raise CacheConfigError(
                f"disk tier: payload_bytes {list(self.payload_bytes)} must be one positive number "
                "for each group"
            )
        self.root = root
        self._durable = durable
        self._temporary_numbers = itertools.count()
        self._lock = threading.Lock()
        self._counts = StoreStatistics()
        self._claim: int | None = None
        self._open(self._manifest(identity))

    # --- blocks -----------------------------------------------------------------------------------

    def _header_bytes(self, key: OffloadKey) -> int:
        _, group = unpack_offload_key(key)
        return header_bytes(key, self.gpu_blocks[group])

    def write(
        self, key: OffloadKey, payload: memoryview, block_hashes: Sequence[bytes] = ()
    ) -> None:
        """Write a block's file, replacing an older one.

        Args:
            block_hashes: The hashes of the GPU blocks it covers, its own last, where the store
                keeps them.

        Raises:
            TransferError: The payload's length, or the number of hashes, is not the group's.
            OSError: It could not be written; nothing was changed.
        """
        expected = self.file_bytes(key) - self._header_bytes(key)
        if len(payload) != expected:
            raise TransferError(f"disk tier: a payload of {len(payload)} bytes must be {expected}")
        header = encode_header(key, payload, self.kept_hashes(key, block_hashes))
        path = self.root / relative_path(key)
        temporary = self._new_temporary(path)
        try:
            self._write_file(temporary, header, payload)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        if self._durable:
            _sync_directory(path.parent)
        with self._lock:
            self._counts.written_blocks += 1
            self._counts.written_bytes += len(payload)

    def kept_hashes(self, key: OffloadKey, block_hashes: Sequence[bytes]) -> Sequence[bytes]:
        """The hashes that a block's file keeps; empty where the store keeps none.

        Args:
            block_hashes: The hashes of the GPU blocks it covers, its own last.

        Raises:
            TransferError: Their number or lengths are not those of the key's group.
        """
        own, group = unpack_offload_key(key)
        if self.gpu_blocks[group] == 1:
            return ()
        lengths = {len(block_hash) for block_hash in block_hashes}
        if len(block_hashes) != self.gpu_blocks[group] or lengths != {len(own)}:
            raise TransferError(
                f"disk tier: {len(block_hashes)} block hashes of a block of group {group} must be "
                f"{self.gpu_blocks[group]} of {len(own)} bytes"
            )
        return block_hashes

    def read(self, key: OffloadKey, payload: memoryview) -> None:
        """Read a block, verify it, and mark it as used.

        Args:
            payload: Filled with its bytes; its content is undefined after an error.

        Raises:
            BlockFileError: The file was missing, unreadable or damaged, and has been deleted.
        """
        try:
            self._read_file(self.root / relative_path(key), key, payload)
        except (OSError, BlockFileError) as error:
            with self._lock:
                self._counts.rejected_blocks += 1
            with suppress(OSError):  # the read has failed in any case
                self.remove(key)
            if isinstance(error, BlockFileError):
                raise
            raise BlockFileError(f"block file: cannot be read: {error.strerror}") from None
        with self._lock:
            self._counts.read_blocks += 1
            self._counts.read_bytes += len(payload)

    @override
    def remove(self, key: OffloadKey) -> None:
        (self.root / relative_path(key)).unlink(missing_ok=True)

    # --- the directory ----------------------------------------------------------------------------

    @override
    def scan(self) -> list[StoredFile]:
        self._claim_directory()
        found = [file for path in self._our_files() if (file := self._survivor(path)) is not None]
        return sorted(found, key=lambda file: (file.used_ns, file.key))

    @override
    def close(self) -> None:
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None

    def statistics(self) -> StoreStatistics:
        """Return the counts since it was opened."""
        with self._lock:
            return replace(self._counts)

    # --- opening and scanning ---------------------------------------------------------------------

    def _manifest(self, identity: str) -> bytes:
        """The properties that all blocks of the directory share."""
        document: dict[str, object] = {
            "format": _MANIFEST_FORMAT,
            "identity": identity,
            "payload_bytes": list(self.payload_bytes),
        }
        if max(self.gpu_blocks) > 1:
            document["gpu_blocks"] = list(self.gpu_blocks)
        return json.dumps(document, indent=2, sort_keys=True).encode() + b"\n"

    def _open(self, manifest: bytes) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        found = self._found_manifest()
        if found is None:
            found = self._begin(manifest)
        if found != manifest:
            raise CacheConfigError(
                f"disk tier {self.root}: {_MANIFEST} must be that of this layout and identity; "
                "use another directory, or delete what is in this one"
            )

    def _found_manifest(self) -> bytes | None:
        try:
            return (self.root / _MANIFEST).read_bytes()
        except FileNotFoundError:
            return None

    def _begin(self, manifest: bytes) -> bytes:
        """Return the manifest of a new directory: this one, unless another process was first."""
        self._refuse_foreign_files()
        opening = os.open(self.root / _OPENING, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(opening, fcntl.LOCK_EX)
            found = self._found_manifest()
            if found is not None:
                return found
            self._write_manifest(manifest)
            return manifest
        finally:
            os.close(opening)

    def _write_manifest(self, manifest: bytes) -> None:
        temporary = self.root / f"{_MANIFEST}{_TEMPORARY}"
        with temporary.open("wb") as file:
            file.write(manifest)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.root / _MANIFEST)

    def _refuse_foreign_files(self) -> None:
        foreign = sorted({entry.name for entry in self.root.iterdir()} - _OURS)
        # Another process may have begun meanwhile: then there is a manifest.
        if foreign and self._found_manifest() is None:
            raise CacheConfigError(
                f"disk tier {self.root}: holds {foreign[0]!r} and no {_MANIFEST}; "
                "a new directory must be empty"
            )

    def _claim_directory(self) -> None:
        if self._claim is not None:
            return
        claim = os.open(self.root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(claim)
            raise CacheConfigError(
                f"disk tier {self.root}: is in use by another manager; use another directory"
            ) from None
        self._claim = claim

    def _our_files(self) -> Iterator[Path]:
        for directory in filter(Path.is_dir, self.root.glob("[0-9a-f]/[0-9a-f]")):
            with os.scandir(directory) as entries:
                for entry in entries:
                    if entry.name.endswith((SUFFIX, _TEMPORARY)) and entry.is_file(
                        follow_symlinks=False
                    ):
                        yield directory / entry.name

    def _survivor(self, path: Path) -> StoredFile | None:
        """Return a file as a scan reports it; delete it and return None if it is not a whole
        block."""
        key = key_of(path.relative_to(self.root).as_posix())
        status = path.stat()
        if key is None or not self._is_whole(key, status.st_size):
            path.unlink(missing_ok=True)
            return None
        return StoredFile(key, status.st_size, status.st_mtime_ns, self._read_hashes(path, key))

    def _read_hashes(self, path: Path, key: OffloadKey) -> Sequence[bytes]:
        if self.gpu_blocks[unpack_offload_key(key)[1]] == 1:
            return ()
        with path.open("rb") as file:
            return hashes_of(file.read(self._header_bytes(key)), key)

    def _is_whole(self, key: OffloadKey, size: int) -> bool:
        _, group = unpack_offload_key(key)
        return group < len(self.payload_bytes) and size == self.file_bytes(key)

    # --- reading and writing ----------------------------------------------------------------------

    def _new_temporary(self, path: Path) -> Path:
        """Return a name beside *path* that no other thread or process writes to."""
        number = next(self._temporary_numbers)
        return path.with_name(f"{os.getpid()}-{threading.get_native_id()}-{number}{_TEMPORARY}")

    def _write_file(self, path: Path, header: bytes, payload: memoryview) -> None:
        try:
            file = path.open("xb")
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("xb")
        with file:
            file.write(header)
            file.write(payload)
            file.flush()
            if self._durable:
                os.fsync(file.fileno())

    def _read_file(self, path: Path, key: OffloadKey, payload: memoryview) -> None:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != self._header_bytes(key) + len(payload):
                raise BlockFileError("block file: its length is not the block's; it is damaged")
            header = file.read(self._header_bytes(key))
            if file.readinto(payload) != len(payload):
                raise BlockFileError("block file: ended while it was read")
            check_block(header, key, payload)
            os.utime(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
