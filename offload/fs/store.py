"""A directory of block files, named by what they hold. A file is there as a whole or not at all.

Files are written beside their place and renamed. What is read is verified; a file that does not
verify is deleted, never served. Bytes are those of the files: what a file system rounds up or keeps
for directories comes on top.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from offload.base import OffloadKey, unpack_offload_key
from offload.errors import BlockFileError, CacheConfigError, TransferError
from offload.fs.block_file import (
    MAX_KEY_BYTES,
    MIN_KEY_BYTES,
    SUFFIX,
    check_block,
    encode_header,
    header_bytes,
    key_of,
    relative_path,
)
from offload.fs.manifest import MANIFEST, Manifest, read_manifest, write_manifest

_LOCK = "lock"
_TEMPORARY = ".tmp"
_OURS = {MANIFEST, f"{MANIFEST}{_TEMPORARY}", _LOCK}


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file that a scan found."""

    key: OffloadKey
    file_bytes: int
    used_ns: int
    """When it was written or last read, as the file system's clock says."""


def file_bytes(key: OffloadKey, payload_bytes: Sequence[int]) -> int:
    """How long a block's file is, where a block of group *i* has *payload_bytes[i]*; raises
    `TransferError` for no such key."""
    if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
        raise TransferError(
            f"disk tier: a key of {len(key)} bytes must have {MIN_KEY_BYTES} to {MAX_KEY_BYTES}"
        )
    _, group = unpack_offload_key(key)
    if group >= len(payload_bytes):
        raise TransferError(
            f"disk tier: a key of group {group} must be of one of {len(payload_bytes)} groups"
        )
    return header_bytes(key) + payload_bytes[group]


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """What a store did so far."""

    written_blocks: int
    written_bytes: int
    read_blocks: int
    read_bytes: int
    rejected_blocks: int
    """Files that could not be read or did not verify."""


class BlockFiles(Protocol):
    """What a disk tier's manager needs of its files; see `BlockStore`."""

    @property
    def payload_bytes(self) -> Sequence[int]:
        """Per group, the bytes of an offloaded block."""
        ...

    def file_bytes(self, key: OffloadKey) -> int: ...

    def scan(self) -> list[StoredFile]: ...

    def remove(self, key: OffloadKey) -> None: ...

    def close(self) -> None: ...


class BlockStore:
    """Reads, writes and removes block files. Every method but `scan` may be called from any thread.

    The scheduler's process and the model's may each open the same directory; only one process may
    `scan` it.
    """

    def __init__(
        self,
        root: Path,
        payload_bytes: Sequence[int],
        identity: str = "",
        durable: bool = False,
        replace_other_layout: bool = False,
    ) -> None:
        """Open a directory, or create it.

        Args:
            root: The directory; one for each worker of a model.
            payload_bytes: Per group, the bytes of an offloaded block.
            identity: What else makes equal keys mean equal bytes, see `Manifest`.
            durable: Wait for the disk at every write. Without it a power failure may cost blocks,
                but never serves bad ones.
            replace_other_layout: Delete the blocks of a directory that was made for another layout
                or identity.

        Raises:
            CacheConfigError: The directory was made for another layout or identity, or for
                something else entirely.
        """
        self.root = root
        self._payload_bytes = tuple(payload_bytes)
        self._durable = durable
        self._temporary_numbers = itertools.count()
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(
            ("written", "written_bytes", "read", "read_bytes", "rejected"), 0
        )
        self._claim: int | None = None
        self._open(Manifest(self._payload_bytes, identity), replace_other_layout)

    @property
    def payload_bytes(self) -> Sequence[int]:
        """Per group, the bytes of an offloaded block."""
        return self._payload_bytes

    # --- blocks

    def file_bytes(self, key: OffloadKey) -> int:
        """How long a block's file is.

        Raises:
            TransferError: No block of this directory has such a key.
        """
        return file_bytes(key, self._payload_bytes)

    def write(self, key: OffloadKey, payload: memoryview) -> None:
        """Write a block's file, in the place of an older one.

        Raises:
            TransferError: The payload's length is not the group's.
            OSError: It could not be written; nothing was changed.
        """
        if self.file_bytes(key) != header_bytes(key) + len(payload):
            raise TransferError(
                f"disk tier: a payload of {len(payload)} bytes must be {self.file_bytes(key) - header_bytes(key)}"
            )
        path = self.root / relative_path(key)
        temporary = self._new_temporary(path)
        try:
            self._write_file(temporary, encode_header(key, payload), payload)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        if self._durable:
            _sync_directory(path.parent)
        self._count(written=1, written_bytes=len(payload))

    def read(self, key: OffloadKey, payload: memoryview) -> None:
        """Read a block into *payload*, verify it, and mark it used. On an error *payload* holds
        anything.

        Raises:
            BlockFileError: The file is missing, unreadable or damaged. It is gone now.
        """
        try:
            self._read_file(self.root / relative_path(key), key, payload)
        except (OSError, BlockFileError) as error:
            self._count(rejected=1)
            with suppress(OSError):  # the read has failed in any case
                self.remove(key)
            if isinstance(error, BlockFileError):
                raise
            raise BlockFileError(f"block file: cannot be read: {error.strerror}") from None
        self._count(read=1, read_bytes=len(payload))

    def remove(self, key: OffloadKey) -> None:
        """Delete a block's file, if it is there.

        Raises:
            OSError: It is there and cannot be deleted.
        """
        (self.root / relative_path(key)).unlink(missing_ok=True)

    # --- the directory

    def scan(self) -> list[StoredFile]:
        """What the directory holds, the longest unused first. Deletes what writes left behind that
        were cut off.

        To be called before any write. Lengths are compared, contents are verified when they are
        read.

        Raises:
            CacheConfigError: Another process, or another store of this one, has scanned the
                directory and not closed it.
        """
        self._claim_directory()
        found = [file for path in self._our_files() if (file := self._survivor(path)) is not None]
        return sorted(found, key=lambda file: (file.used_ns, file.key))

    def close(self) -> None:
        """Let another store scan the directory. A second call does nothing."""
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None

    def statistics(self) -> StoreStatistics:
        """Blocks and bytes so far."""
        with self._lock:
            counts = dict(self._counts)
        return StoreStatistics(
            written_blocks=counts["written"],
            written_bytes=counts["written_bytes"],
            read_blocks=counts["read"],
            read_bytes=counts["read_bytes"],
            rejected_blocks=counts["rejected"],
        )

    # --- how

    def _open(self, manifest: Manifest, replace_other_layout: bool) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        found = read_manifest(self.root)
        if found == manifest.encode():
            return
        if found is None:
            self._refuse_foreign_files()
        elif replace_other_layout:
            self._empty()
        else:
            raise CacheConfigError(
                f"disk tier {self.root}: {MANIFEST} must be that of this layout and identity; "
                "use another directory, or have its blocks deleted with replace_other_layout"
            )
        write_manifest(self.root, manifest)

    def _refuse_foreign_files(self) -> None:
        foreign = sorted({entry.name for entry in self.root.iterdir()} - _OURS)
        if foreign:
            raise CacheConfigError(
                f"disk tier {self.root}: holds {foreign[0]!r} and no {MANIFEST}; it must be empty at first"
            )

    def _empty(self) -> None:
        self._claim_directory()
        try:
            for path in self._our_files():
                path.unlink(missing_ok=True)
        finally:
            self.close()

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
        """A file as a scan reports it; None for what was no whole block of ours, which is gone
        then."""
        key = key_of(path.relative_to(self.root).as_posix())
        status = path.stat()
        if key is None or not self._is_whole(key, status.st_size):
            path.unlink(missing_ok=True)
            return None
        return StoredFile(key, status.st_size, status.st_mtime_ns)

    def _is_whole(self, key: OffloadKey, size: int) -> bool:
        _, group = unpack_offload_key(key)
        return group < len(self.payload_bytes) and size == self.file_bytes(key)

    def _new_temporary(self, path: Path) -> Path:
        """A name that no other thread or process writes to."""
        return path.with_name(
            f"{os.getpid()}-{threading.get_native_id()}-{next(self._temporary_numbers)}{_TEMPORARY}"
        )

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
            if os.fstat(file.fileno()).st_size != header_bytes(key) + len(payload):
                raise BlockFileError(
                    "block file: its length is not the block's; the file is damaged"
                )
            header = file.read(header_bytes(key))
            if file.readinto(payload) != len(payload):
                raise BlockFileError("block file: ended while it was read")
            check_block(header, key, payload)
            os.utime(file.fileno())

    def _count(self, **amounts: int) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
