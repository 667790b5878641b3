"""The router's own keys for prefixes: 64 bits that depend on no engine's hash function and on no
block size.

A prefix is read as one long number, 32 bits a token, and its key is that number modulo a secret
64-bit prime (a Rabin fingerprint: Karp & Rabin, 1987). So a key can be extended by any number of
tokens, engines with different block sizes share one key space, and an outsider cannot craft two
prompts with one key. What else decides the content of a block - LoRA adapter, salt, multimodal
items - is folded in as a *mark* at the token where it starts.

The length of the prefix stands in the same integer, above the 64 bits: with it, a key costs no more
memory, and says where its block ends (`tokens_of`).
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

_TOKEN_BITS = 32
_TOKEN_BYTES = 4
_KEY_BITS = 64
_KEY_MASK = (1 << _KEY_BITS) - 1
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
"""Enough to decide primality below 3.3e24 (Sorenson & Webster, 2015)."""


class Mark(NamedTuple):
    """Something besides tokens that decides the content of a run's blocks from one token on."""

    position: int
    """Of that token, counted from the start of the run."""
    digest: int


def digest(value: Any) -> int:
    """64 bits that stand for a plain value (str, bytes, int, lists of them)."""
    return int.from_bytes(
        hashlib.blake2b(msgspec.msgpack.encode(value), digest_size=8).digest(), "big"
    )


def tokens_of(key: int) -> int:
    """The length of a key's prefix."""
    return key >> _KEY_BITS


def split(key: int) -> tuple[int, int]:
    """The length of a key's prefix, and the rest."""
    return key >> _KEY_BITS, key & _KEY_MASK


def joined(length: int, residue: int) -> int:
    """The key that `split` took apart.

    Args:
        length: Of the prefix, in tokens.
        residue: The rest.
    """
    return length << _KEY_BITS | residue


class KeySpace:
    """Maps prefixes to keys; the modulus is its secret.

    With 8-bit tokens and the modulus 251, the prefix `[3, 7]` behind the key 1 would be
    `((1 * 256 + 3) * 256 + 7) % 251 = 47`, in one step or in two.
    """

    def __init__(self, modulus: int | None = None) -> None:
        self.modulus = modulus or _random_prime()

    @classmethod
    def from_secret(cls, secret: bytes) -> KeySpace:
        """The key space of everyone who knows this secret."""
        drawn = hashlib.blake2b(secret, digest_size=8, person=b"modulus").digest()
        return cls(_prime_from(int.from_bytes(drawn, "big") | 1 << 63 | 1))

    @property
    def name(self) -> bytes:
        """Stands for it without telling the modulus."""
        told = self.modulus.to_bytes(8, "big")
        return hashlib.blake2b(told, digest_size=8, person=b"key space").digest()

    def root(self, adapter: str | int | None) -> int:
        """The key of the empty prefix, under a LoRA adapter or without one. One that events name by
        a number alone is no prompt's: which name has the number is unknown."""
        return self._fold(1, digest(adapter or ""))

    def chain(
        self, key: int, packed: bytes, ends: Iterable[int], marks: Sequence[Mark] = ()
    ) -> Iterator[int]:
        """The keys of a run's prefixes, one for each of *ends*.

        Args:
            key: Of everything before the run.
            packed: The run, from `kvevents.events.pack_tokens`.
            ends: Where the prefixes end: ascending token counts within the run.
            marks: Ascending by position.
        """
        if marks:
            yield from self._marked_chain(key, packed, ends, marks)
            return
        modulus, start, before = self.modulus, 0, key & ~_KEY_MASK
        key &= _KEY_MASK
        for end in ends:
            run = packed[start * _TOKEN_BYTES : end * _TOKEN_BYTES]
            key = (key << (end - start) * _TOKEN_BITS | int.from_bytes(run, "big")) % modulus
            start = end
            yield before + (end << _KEY_BITS) + key

    def _marked_chain(
        self, key: int, packed: bytes, ends: Iterable[int], marks: Sequence[Mark]
    ) -> Iterator[int]:
        """With ends 16, 32 and a mark at 20: tokens 0-15 -> key; 16-19, the mark, 20-31 -> key."""
        start = next_mark = 0
        before, key = key & ~_KEY_MASK, key & _KEY_MASK
        for end in ends:
            while next_mark < len(marks) and marks[next_mark].position < end:
                mark = marks[next_mark]
                key = self._fold(self._extend(key, packed, start, mark.position), mark.digest)
                start, next_mark = mark.position, next_mark + 1
            key = self._extend(key, packed, start, end)
            start = end
            yield before + (end << _KEY_BITS) + key

    def _extend(self, key: int, packed: bytes, start: int, end: int) -> int:
        run = packed[start * _TOKEN_BYTES : end * _TOKEN_BYTES]
        return (key << (end - start) * _TOKEN_BITS | int.from_bytes(run, "big")) % self.modulus

    def _fold(self, key: int, value: int) -> int:
        # 65 bits, one more than two tokens, so that no token sequence can imitate a mark.
        return (key << 65 | 1 << 64 | value) % self.modulus


# --- the modulus ----------------------------------------------------------------------------------


def _random_prime() -> int:
    """A secret prime in `[2**63, 2**64)`."""
    while True:
        candidate = secrets.randbits(64) | 1 << 63 | 1
        if all(candidate % small for small in _WITNESSES) and _is_prime(candidate):
            return candidate


def _prime_from(number: int) -> int:
    """The first prime of 64 bits from an odd number on."""
    while not (all(number % small for small in _WITNESSES) and _is_prime(number)):
        number += 2
        if number > _KEY_MASK:
            number = 1 << 63 | 1
    return number


def _is_prime(number: int) -> bool:
    """Miller-Rabin, exact for numbers of this size."""
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    return all(_passes(number, witness, odd, twos) for witness in _WITNESSES)


def _passes(number: int, witness: int, odd: int, twos: int) -> bool:
    power = pow(witness, odd, number)
    if power in (1, number - 1):
        return True
    for _ in range(twos - 1):
        power = power * power % number
        if power == number - 1:
            return True
    return False
