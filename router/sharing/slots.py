"""Encodes what one process publishes to the others. The bytes come from other processes and
machines, so every one of them is bounded and checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from router.errors import RouterError
from router.fleet.types import KeyCounts, SharedCount

VERSION = 2
MAX_BYTES = 1_000_000
"""The bound on one slot."""
MAX_PREFIX_BYTES = 96 * 1024
"""The bound on all prefixes in a slot together."""
MAX_KEYS = 512
"""The keys of one prefix: the first 32,768 tokens."""

_Id = Annotated[str, msgspec.Meta(max_length=256)]
_Rank = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
_KEY_BYTES = 8


class SlotError(RouterError):
    """Bytes that are not a slot of this version."""


class SharedLoad(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The load of a process at one replica, or one rank of it."""

    replica: _Id
    dp_rank: _Rank | None
    """None stands for the whole replica."""
    prefilling_requests: SharedCount
    prefill_tokens: SharedCount
    decoding_requests: SharedCount
    context_tokens: SharedCount


class SharedPrefix(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A prompt that is being computed at a cache, or has just been."""

    number: SharedCount
    """Its number among the writer's prompts; the same prompt keeps it."""
    model: _Id
    key_space: Annotated[bytes, msgspec.Meta(max_length=16)]
    """How the keys were made: readers of another key space cannot use them."""
    replica: _Id
    dp_rank: _Rank
    tokens: SharedCount
    """The length of the whole prompt."""
    queued_tokens: SharedCount
    """The last of these, which have still to be computed there. They are in its load too."""
    keys: Annotated[bytes, msgspec.Meta(max_length=_KEY_BYTES * MAX_KEYS)]
    """From `pack_keys`."""


class Slot(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """All that a process publishes at one moment."""

    loads: Annotated[tuple[SharedLoad, ...], msgspec.Meta(max_length=65_536)] = ()
    prefixes: Annotated[tuple[SharedPrefix, ...], msgspec.Meta(max_length=8192)] = ()
    unhealthy: Annotated[tuple[_Id, ...], msgspec.Meta(max_length=8192)] = ()
    """Replicas that it found unhealthy."""
    begun: Annotated[dict[_Id, SharedCount], msgspec.Meta(max_length=8192)] = {}
    """Requests that it has sent to each replica since its start."""
    keys: Annotated[dict[_Id, KeyCounts], msgspec.Meta(max_length=8192)] = {}
    """The keys of clients that have limits."""
    version: Annotated[int, msgspec.Meta(ge=VERSION, le=VERSION)] = VERSION


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Slot)


def encode_slot(slot: Slot) -> bytes:
    """The bytes of a slot; of one that would be too large, without ranks."""
    data = _encoder.encode(slot)
    if len(data) > MAX_BYTES:
        whole = tuple(load for load in slot.loads if load.dp_rank is None)
        data = _encoder.encode(msgspec.structs.replace(slot, loads=whole, prefixes=(), begun={}))
    return data


def decode_slot(data: bytes) -> Slot:
    """Read a slot.

    Raises:
        SlotError: It is not one of this version; the message quotes nothing of it.
    """
    if len(data) > MAX_BYTES:
        raise SlotError(f"a slot of {len(data)} bytes: it must have at most {MAX_BYTES}")
    try:
        slot = _decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise SlotError(f"a slot of {len(data)} bytes is not one of version {VERSION}") from error
    if any(len(prefix.keys) % _KEY_BYTES for prefix in slot.prefixes):
        raise SlotError("a slot with a part of a key")
    return slot


def fitting(prefixes: Sequence[SharedPrefix]) -> tuple[SharedPrefix, ...]:
    """Return the latest of *prefixes* that fit into a slot."""
    kept, room = 0, MAX_PREFIX_BYTES
    for prefix in reversed(prefixes):
        room -= len(prefix.keys)
        if room < 0:
            break
        kept += 1
    return tuple(prefixes[len(prefixes) - kept :])
