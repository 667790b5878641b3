"""Block hashes under a key, for streams that carry no token ids.

A block hash alone reveals nothing new, but anyone who guesses a prompt can compute its hash and see
that it is there. Under a key only its holders can: a block is announced as HMAC-SHA256(key, the
engine's hash), where that is a SHA-256 chain over parent, token ids and extra keys. A consumer with
the key and the engine's hash function computes the same of a prompt.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace

from kvevents.errors import HashKeyError
from kvevents.events import BlockHash, BlockRemoved, BlockStored, Event

KEY_SUFFIX = ".hash_key"
_KEY_BYTES = 32
_TEXT = re.compile(rb"[0-9a-fA-F]{64}\Z")

_EventT = TypeVar("_EventT", BlockStored, BlockRemoved)


class HashKey:
    """A key that publisher and consumers share.

    Args:
        secret: 32 random bytes.
    """

    __slots__ = ("_secret", "key_id")

    def __init__(self, secret: bytes) -> None:
        if len(secret) != _KEY_BYTES:
            raise HashKeyError(f"a hash key of {len(secret)} bytes; it must have {_KEY_BYTES}")
        self._secret = secret
        self.key_id = hmac.digest(secret, b"kvroute hash key id", "sha256")[:8].hex()
        """Distinguishes keys, and reveals nothing about them."""

    def __repr__(self) -> str:
        return f"HashKey({self.key_id})"

    def seal(self, digest: bytes) -> bytes:
        """Return the hash under which the block of a digest is announced."""
        # Longer than the other message, so no digest can ask for the id.
        return hmac.digest(self._secret, b"kvroute block hash\0" + digest, "sha256")


def sealed(event: Event, key: HashKey) -> Event:
    """Return the event without anything of a prompt: no token ids, salts or multimodal keys, and
    hashes under the key.

    Args:
        event: Any; its hashes are digests, at least 16 bytes long.
        key: Its holders can recognise the blocks.
    Raises:
        TypeError: A hash is a number: it has too few bits to stand for a prompt.
    """
    if isinstance(event, BlockRemoved):
        return replace(event, block_hashes=[_sealed(each, key) for each in event.block_hashes])
    if not isinstance(event, BlockStored):
        return event
    parent = event.parent_block_hash
    return replace(
        event,
        block_hashes=[_sealed(each, key) for each in event.block_hashes],
        parent_block_hash=None if parent is None else _sealed(parent, key),
        token_ids=[],
        extra_keys=None,
        lookahead_token_ids=None,
        cache_salt=None,
    )


def _sealed(block_hash: BlockHash, key: HashKey) -> bytes:
    if not isinstance(block_hash, bytes) or len(block_hash) < 16:
        raise TypeError("a block hash must be a digest of at least 16 bytes to be sealed")
    return key.seal(block_hash)


# --- files ----------------------------------------------------------------------------------------


def make_hash_key(directory: Path, name: str) -> Path:
    """Make a key; return its file, which only the owner can read.

    Args:
        name: The file's, before its suffix.
    Raises:
        HashKeyError: It cannot be written, or exists.
    """
    path = directory / f"{name}{KEY_SUFFIX}"
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise HashKeyError(f"{path}: {error.strerror}") from None
    with os.fdopen(handle, "w") as file:
        file.write(f"{secrets.token_hex(_KEY_BYTES)}\n")
    return path


def read_hash_key(path: Path) -> HashKey:
    """Read a key from its file.

    Raises:
        HashKeyError: It cannot be read, or holds no key.
    """
    try:
        with path.open("rb") as file:
            text = file.read(1024).strip()
    except OSError as error:
        raise HashKeyError(f"{path}: {error.strerror}") from None
    if not _TEXT.match(text):
        raise HashKeyError(f"{path}: holds no hash key; expected {2 * _KEY_BYTES} hex digits")
    return HashKey(bytes.fromhex(text.decode()))


# --- the keys of this process ---------------------------------------------------------------------

_held: dict[str, HashKey] = {}
"""Keys by id. Kept apart from all state that is written or shown, which names keys by their ids."""


def hold_key(key: HashKey) -> None:
    """Keep a key, so that this process recognises blocks announced under it."""
    _held[key.key_id] = key


def held_key(key_id: str) -> HashKey | None:
    """Return the key of an id; None if this process does not have it."""
    return _held.get(key_id)
