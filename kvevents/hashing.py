"""Block hashes as vLLM computes them: token ids to a chain of digests.

A block's hash is `H((parent digest, tuple of token ids, extra keys or None))`, chained every
`hash_block_size` tokens from a root, the none hash. `H` serialises with pickle protocol 5 or
canonical CBOR (RFC 8949, section 4.2) and digests with SHA-256 or XXH3-128
(`vllm/utils/hashing.py`, `vllm/v1/core/kv_cache_utils.py`, 0.9 to 0.33). The root is `H(seed)`:
since 0.29 the seed is `vllm-none-hash` for the SHA-256 family; otherwise it is `PYTHONHASHSEED`, or
random and unknown to anyone else.
"""

from __future__ import annotations

import hashlib
import pickle
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from kvevents.errors import HashAlgorithmError

try:
    import xxhash
except ImportError:  # needed for one family of algorithms
    xxhash = None  # type: ignore[assignment, unused-ignore]

DEFAULT_SEED = "vllm-none-hash"

ExtraKeys: TypeAlias = tuple[Any, ...] | None

_UINT64 = 2**64 - 1


def _sha256_pickle(value: Any) -> bytes:
    return hashlib.sha256(pickle.dumps(value, protocol=5)).digest()


def _sha256_cbor(value: Any) -> bytes:
    return hashlib.sha256(encode_cbor(value)).digest()


def _xxh3_pickle(value: Any) -> bytes:
    return bytes(xxhash.xxh3_128_digest(pickle.dumps(value, protocol=5)))


def _xxh3_cbor(value: Any) -> bytes:
    return bytes(xxhash.xxh3_128_digest(encode_cbor(value)))


_ALGORITHMS: dict[str, Callable[[Any], bytes]] = {
    "sha256": _sha256_pickle,
    "sha256_cbor": _sha256_cbor,
}
if xxhash is not None:
    _ALGORITHMS |= {"xxhash": _xxh3_pickle, "xxhash_cbor": _xxh3_cbor}


def hash_algorithms() -> tuple[str, ...]:
    """Names of the algorithms available here; the xxhash family needs the package `xxhash`."""
    return tuple(_ALGORITHMS)


@dataclass(frozen=True, slots=True)
class HashChain:
    """An engine's hash function and the root of its chain."""

    algorithm: str
    none_hash: bytes
    key_id: str | None = None
    """The id of the key under which the hashes are announced; see `kvevents.sealing`."""

    @classmethod
    def from_seed(cls, algorithm: str = "sha256", seed: str = DEFAULT_SEED) -> HashChain:
        """The chain of an engine, by its seed.

        Args:
            algorithm: One of `hash_algorithms()`.
            seed: The engine's `PYTHONHASHSEED`, or the default of vLLM >= 0.29.

        Raises:
            HashAlgorithmError: The algorithm is unknown, or its library is not installed.
        """
        return cls(algorithm, _hash_function(algorithm)(seed))

    def block_hash(
        self, parent: bytes | None, token_ids: Sequence[int], extra_keys: ExtraKeys = None
    ) -> bytes:
        """The digest of one block.

        Args:
            parent: Digest of the block before; None for the first block.
            extra_keys: Other hashed values: LoRA name, multimodal items, salt.

        Raises:
            HashAlgorithmError: The algorithm is unknown, or its library is not installed.
        """
        return _hash_function(self.algorithm)(
            (parent or self.none_hash, tuple(token_ids), extra_keys)
        )

    def block_hashes(
        self,
        token_ids: Sequence[int],
        hash_block_size: int,
        extra_keys: Sequence[ExtraKeys] = (),
        lookahead: int = 0,
    ) -> Iterator[bytes]:
        """Digests of all full blocks of a prompt, computed one by one.

        Args:
            hash_block_size: Tokens between two hashes of the chain.
            extra_keys: Other values that are hashed, by block; missing entries are None.
            lookahead: Tokens after each block that its hash also covers (vLLM >= 0.33 with
                speculative decoding).
        """
        hash_function = _hash_function(self.algorithm)
        digest = self.none_hash
        last_start = len(token_ids) - lookahead - hash_block_size
        for index, start in enumerate(range(0, last_start + 1, hash_block_size)):
            end = start + hash_block_size
            extra: ExtraKeys = extra_keys[index] if index < len(extra_keys) else None
            if lookahead:
                extra = (extra, *token_ids[end : end + lookahead])
            digest = hash_function((digest, tuple(token_ids[start:end]), extra))
            yield digest


def _hash_function(algorithm: str) -> Callable[[Any], bytes]:
    try:
        return _ALGORITHMS[algorithm]
    except KeyError:
        raise HashAlgorithmError(
            f"hash algorithm {algorithm[:40]!r} must be one of {', '.join(_ALGORITHMS)}"
            + ("" if xxhash is not None else "; for the xxhash family install the package xxhash")
        ) from None


def to_wire_int(digest: bytes) -> int:
    """The 64-bit form of a digest that vLLM publishes by default: its low 64 bits, big endian."""
    return int.from_bytes(digest[-8:], "big")


# --- canonical CBOR, of the types in a block hash -------------------------------------------------


def encode_cbor(value: Any) -> bytes:
    """Canonical CBOR of None, bool, 64-bit int, str, bytes, and lists or tuples of them."""
    out = bytearray()
    _append_cbor(out, value)
    return bytes(out)


def _append_cbor(out: bytearray, value: Any) -> None:
    if value is None or isinstance(value, bool):
        out.append({None: 0xF6, False: 0xF4, True: 0xF5}[value])
    elif isinstance(value, int):
        _append_head(out, 0x00 if value >= 0 else 0x20, value if value >= 0 else -1 - value)
    elif isinstance(value, (list, tuple)):
        _append_head(out, 0x80, len(value))
        for item in value:
            _append_cbor(out, item)
    elif isinstance(value, (str, bytes)):
        raw = value.encode() if isinstance(value, str) else value
        _append_head(out, 0x60 if isinstance(value, str) else 0x40, len(raw))
        out += raw
    else:
        raise TypeError(f"a block hash cannot cover {type(value).__name__}")


def _append_head(out: bytearray, major: int, argument: int) -> None:
    if argument < 24:
        out.append(major | argument)
    elif argument < 2**8:
        out += struct.pack(">BB", major | 24, argument)
    elif argument < 2**16:
        out += struct.pack(">BH", major | 25, argument)
    elif argument < 2**32:
        out += struct.pack(">BI", major | 26, argument)
    elif argument <= _UINT64:
        out += struct.pack(">BQ", major | 27, argument)
    else:
        raise OverflowError("a block hash cannot cover an integer of more than 64 bits")
