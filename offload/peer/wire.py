"""Encodes the messages of one engine to another's memory, over ZMQ: a request in one frame, and its
reply.

    [ask: identity, keys]      ->  [a bit for each key: is it held?]
    [fetch: identity, keys]    ->  [block] for each key, empty where it is gone

The identity stands for weights and sizes of pages: engines of different identities share nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from kvevents.errors import UNREADABLE
from offload.errors import TransferError

MOST_ASKED = 1 << 16
"""The most keys in one question."""
MOST_FETCHED = 256
"""The most blocks in one fetch."""
MAX_REQUEST_BYTES = 8 << 20


class PeerQuestion(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """A question which of these blocks can be loaded."""

    identity: bytes
    keys: list[bytes]


class PeerFetch(msgspec.Struct, frozen=True, array_like=True, tag="fetch"):
    """A request for the bytes of these blocks."""

    identity: bytes
    keys: list[bytes]


Request: TypeAlias = PeerQuestion | PeerFetch
_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
encode = msgspec.msgpack.Encoder().encode


def decode(payload: bytes) -> Request:
    """Read a request.

    Raises:
        TransferError: It is not a request, or asks for too much.
    """
    try:
        request = _decoder.decode(payload)
    except UNREADABLE as error:
        raise TransferError(f"peer tier: a request that cannot be read: {error}") from None
    most = MOST_ASKED if isinstance(request, PeerQuestion) else MOST_FETCHED
    if len(request.keys) > most:
        raise TransferError(f"peer tier: {len(request.keys)} keys in a request of at most {most}")
    return request


def pack_bits(bits: Sequence[bool]) -> bytes:
    """Pack eight to a byte, the first in the lowest bit."""
    packed = bytearray(-(-len(bits) // 8))
    for index, bit in enumerate(bits):
        packed[index // 8] |= bit << index % 8
    return bytes(packed)


def unpack_bits(packed: bytes, count: int) -> list[bool]:
    """Return the first *count* of packed bits; missing ones are not set.

    Args:
        packed: From `pack_bits`, of any length.
    """
    whole = packed.ljust(-(-count // 8), b"\0")
    return [bool(whole[index // 8] >> index % 8 & 1) for index in range(count)]
