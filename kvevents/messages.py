"""The frames of a ZMQ message, live and in a replay; no sockets.

Live: `[topic, seq, payload]`. A reply of the replay endpoint: `["", topic, seq, payload]`, without
the topic from vLLM before 0.26. The last one is followed by the end marker, the number -1 with an
empty payload. Numbers are 8 bytes, big-endian.

A publisher may have an endpoint for snapshots alone, as proposed for vLLM. Its reply is one message
of any length, `["", last, publisher, payload, payload, ...]`: the number of the last batch that it
includes, signed, and the 16 bytes that name the process, which then also end every live batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvevents.errors import KVEventsError, MalformedBatch, MalformedReply

END_MARKER = b"\xff" * 8
SNAPSHOT_START = b"snapshot"
"""Requests the present state instead of batches. vLLM reads it as a huge number and replies with
only the end marker. It may come to reply with a snapshot of its own form (see
`kvevents.delivery.last_in_snapshot`). An endpoint for snapshots takes it, too."""
PUBLISHER_BYTES = 16
"""The length of a process's name in a batch, or in a snapshot of an endpoint of its own."""
NOTHING_PUBLISHED = -1
_UNAVAILABLE = -2
MAX_SEQ = 2**63 - 1
MAX_FRAMES = 4


class Batch(NamedTuple):
    """One published batch, not decoded."""

    seq: int
    payload: bytes


class SnapshotHead(NamedTuple):
    """The beginning of a snapshot endpoint's reply."""

    last: int
    """The last batch it includes; `NOTHING_PUBLISHED` before the first."""
    publisher_id: str | None
    """None: its parts name the process."""


def read_live(frames: Sequence[bytes], topic: bytes | None) -> Batch:
    """Read a message of the PUB socket.

    Args:
        topic: The subscribed topic; None accepts any.

    Raises:
        MalformedBatch: Not three frames, another topic, or a number that is not 8 bytes.
    """
    if len(frames) != 3:
        raise MalformedBatch(f"message of {len(frames)} frames: it must be [topic, seq, payload]")
    name, number, payload = frames
    if name != topic and topic is not None:
        # A subscription is a prefix, so other topics do arrive. They have numbers of their own.
        raise MalformedBatch(f"topic of {len(name)} bytes: it is not the subscribed one, {topic!r}")
    return Batch(_read_seq(number, MalformedBatch), payload)


def read_reply(frames: Sequence[bytes], topic: bytes | None) -> Batch | None:
    """Read a reply of the ROUTER socket; None for the end marker.

    Raises:
        MalformedReply: Frames of neither form, another topic, a number that is not 8 bytes, or an
            end marker with a payload.
    """
    if len(frames) not in (3, 4) or frames[0]:
        raise MalformedReply(
            f"reply of {len(frames)} frames: "
            'it must be ["", topic, seq, payload] or ["", seq, payload]'
        )
    seq, payload = frames[-2:]
    if seq == END_MARKER:
        if payload:
            raise MalformedReply(
                f"end marker with a payload of {len(payload)} bytes: it must be empty"
            )
        return None
    if len(frames) == 4 and topic is not None and frames[1] != topic:
        raise MalformedReply(
            f"reply with a topic of {len(frames[1])} bytes: it is not the subscribed one, {topic!r}"
        )
    return Batch(_read_seq(seq, MalformedReply), payload)


def read_snapshot_head(frames: Sequence[bytes], has_more: bool) -> SnapshotHead | None:
    """Read the beginning of a snapshot endpoint's reply; None where it has none for now.

    Args:
        frames: The first three of the message, or all that it has.

    Raises:
        MalformedReply: Another form, a number that is not a batch's, or payloads where there can be
            none.
    """
    if len(frames) != 3 or frames[0]:
        raise MalformedReply(
            f"snapshot reply that begins with {len(frames)} frames: "
            'it must be ["", last, publisher, ...]'
        )
    _, number, name = frames
    if len(number) != 8 or len(name) != PUBLISHER_BYTES:
        raise MalformedReply(
            f"snapshot reply with frames of {len(number)} and {len(name)} bytes: "
            f"last must have 8, publisher {PUBLISHER_BYTES}"
        )
    last = int.from_bytes(number, "big", signed=True)
    if last < _UNAVAILABLE:
        raise MalformedReply(f"snapshot reply up to batch {last}: it must be at least -2")
    if last < 0 and has_more:
        raise MalformedReply(f"snapshot reply up to batch {last}, with payloads: it must have none")
    return None if last == _UNAVAILABLE else SnapshotHead(last, name.hex())


def encode_start(start: int | None) -> bytes:
    """The last frame of a request: *start* is the number to replay from, or None for a snapshot."""
    return SNAPSHOT_START if start is None else start.to_bytes(8, "big")


def _read_seq(frame: bytes, error: type[KVEventsError]) -> int:
    if len(frame) != 8:
        raise error(f"seq frame of {len(frame)} bytes: it must be 8")
    seq = int.from_bytes(frame, "big")
    if seq > MAX_SEQ:
        raise error(f"seq {seq}: it must be below 2**63")
    return seq
