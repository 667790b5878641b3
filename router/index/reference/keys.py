"""The router's own names for prefixes: 64-bit keys that do not depend on any engine's hash function
or block size.

A prefix is read as one long number, 32 bits a token, and its key is that number modulo a secret
64-bit prime (a Rabin fingerprint: Karp & Rabin, 1987). So a key can be extended by any number of
tokens, engines with different block sizes share one key space, and nobody outside can craft two
prompts with one key. What else decides the content of a block - LoRA adapter, salt, multimodal
items - is folded in as a *mark* at the token where it starts.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

_TOKEN_BITS = 32
_TOKEN_BYTES = 4
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
"""Enough to decide primality below 3.3e24 (Sorenson & Webster, 2015)."""


class Mark(NamedTuple):
    """Something besides tokens that a block's content depends on, from *position* of a token run
    on."""

    position: int
    digest: int


def digest(value: Any) -> int:
    """64 bits that stand for a plain value (str, bytes, int, lists of them)."""
    return int.from_bytes(
        hashlib.blake2b(msgspec.msgpack.encode(value), digest_size=8).digest(), "big"
    )


class KeySpace:
    """Maps prefixes to keys. Keys of two spaces with different moduli have nothing to do with each
    other."""

    def __init__(self, modulus: int | None = None) -> None:
        self.modulus = modulus or _random_prime()

    def root(self, lora_name: str | None) -> int:
        """The key of the empty prefix, for a LoRA adapter or none."""
        return self._fold(1, digest(lora_name or ""))

    def chain(
        self, key: int, packed: bytes, ends: Iterable[int], marks: Sequence[Mark] = ()
    ) -> Iterator[int]:
        """Keys after each of *ends* tokens of a run that follows *key*.

        Args:
            key: Key of everything before the run.
            packed: The run, from `kvevents.events.pack_tokens`.
            ends: Ascending token counts within the run.
            marks: Ascending by position.
        """
        if marks:
            yield from self._marked_chain(key, packed, ends, marks)
            return
        modulus, start = self.modulus, 0
        for end in ends:
            run = packed[start * _TOKEN_BYTES : end * _TOKEN_BYTES]
            key = (key << (end - start) * _TOKEN_BITS | int.from_bytes(run, "big")) % modulus
            start = end
            yield key

    def _marked_chain(
        self, key: int, packed: bytes, ends: Iterable[int], marks: Sequence[Mark]
    ) -> Iterator[int]:
        start = next_mark = 0
        for end in ends:
            while next_mark < len(marks) and marks[next_mark].position < end:
                mark = marks[next_mark]
                key = self._fold(self._extend(key, packed, start, mark.position), mark.digest)
                start, next_mark = mark.position, next_mark + 1
            key = self._extend(key, packed, start, end)
            start = end
            yield key

    def _extend(self, key: int, packed: bytes, start: int, end: int) -> int:
        run = packed[start * _TOKEN_BYTES : end * _TOKEN_BYTES]
        return (key << (end - start) * _TOKEN_BITS | int.from_bytes(run, "big")) % self.modulus

    def _fold(self, key: int, value: int) -> int:
        # One bit longer than two tokens, so that no tokens do to a key what a mark does.
        return (key << 65 | 1 << 64 | value) % self.modulus


# --- what besides tokens decides a block ----------------------------------------------------------


def marks_of(
    extra_keys: Sequence[Any] | None,
    block_size: int,
    lora_name: str | None = None,
    cache_salt: str | None = None,
    lookahead: int = 0,
) -> list[Mark]:
    """The marks of a token run whose blocks carry *extra_keys*, one entry a block, in the event's
    untagged form.

    The LoRA name, first in every entry, is left out, since it is in the root. A multimodal item
    counts where it starts: the blocks it runs on into repeat it with a negative offset, and how
    often depends on the block size.
    """
    marks = {Mark(0, digest(cache_salt))} if cache_salt else set()
    for index, entry in enumerate(extra_keys or ()):
        for item in besides_lora(entry, lora_name):
            offset = _offset(item)
            if 0 <= offset < block_size + lookahead:
                marks.add(Mark(index * block_size + offset, digest(_identity(item))))
    return sorted(marks)


def besides_lora(entry: Any, lora_name: str | None) -> Sequence[Any]:
    """A block's extra keys without the adapter's name, which comes first."""
    items = entry if isinstance(entry, (list, tuple)) else ()
    return items[1:] if items and lora_name is not None and items[0] == lora_name else items


def tagged(item: Any) -> tuple[Any, ...]:
    """One extra key as vLLM >= 0.31 hashes it: named by its source."""
    if isinstance(item, (list, tuple)):
        return ("mm", *item)
    return ("prompt_embeds" if isinstance(item, bytes) else "cache_salt", item)


def plain(value: Any) -> Any:
    """Lists to tuples, all the way down: the form in which extra keys go into an engine's hash."""
    return tuple(map(plain, value)) if isinstance(value, (list, tuple)) else value


def _offset(item: Any) -> int:
    if isinstance(item, (list, tuple)) and len(item) == 2 and isinstance(item[1], int):
        return item[1]
    return 0


def _identity(item: Any) -> Any:
    return item[0] if isinstance(item, (list, tuple)) and item else item


# --- the modulus ----------------------------------------------------------------------------------


def _random_prime() -> int:
    """A secret prime in `[2**63, 2**64)`."""
    while True:
        candidate = secrets.randbits(64) | 1 << 63 | 1
        if all(candidate % small for small in _WITNESSES) and _is_prime(candidate):
            return candidate


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
