"""What the frames of a ZMQ message mean, live and in a replay; no sockets.

Live: `[topic, seq, payload]`. A reply of the replay endpoint: `["", topic, seq, payload]`, of vLLM
before 0.26 without the topic; after the last one comes the end marker, the number -1 with an empty
payload. Numbers are 8 bytes, big-endian.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvevents.errors import KVEventsError, MalformedBatch, MalformedReply

END_MARKER = b"\xff" * 8
SNAPSHOT_START = b"snapshot"
"""Asks for the present state instead of batches. As a number it is so large that vLLM answers the
end marker alone."""
MAX_SEQ = 2**63 - 1
MAX_FRAMES = 4


class Batch(NamedTuple):
    """One published batch, not decoded."""

    seq: int
    payload: bytes


def read_live(frames: Sequence[bytes], topic: bytes | None) -> Batch:
    """A message of the PUB socket; *topic* None takes any.

    Raises:
        MalformedBatch: Not three frames, another topic, or no 8-byte number.
    """
    if len(frames) != 3:
        raise MalformedBatch(f"message of {len(frames)} frames: it must be [topic, seq, payload]")
    if topic is not None and frames[0] != topic:
        # A subscription is a prefix, so other topics do arrive. Theirs are not our numbers.
        raise MalformedBatch(
            f"topic of {len(frames[0])} bytes: it is not the subscribed one, {topic!r}"
        )
    return Batch(_read_seq(frames[1], MalformedBatch), frames[2])


def read_reply(frames: Sequence[bytes], topic: bytes | None) -> Batch | None:
    """A reply of the ROUTER socket; None for the end marker.

    Raises:
        MalformedReply: Frames of neither form, another topic, no 8-byte number, or an end marker
            with a payload.
    """
    if len(frames) not in (3, 4) or frames[0]:
        raise MalformedReply(
            f'reply of {len(frames)} frames: it must be ["", topic, seq, payload] or ["", seq, payload]'
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


def encode_start(start: int | None) -> bytes:
    """The last frame of a request: a number to replay from, or None for a snapshot."""
    return SNAPSHOT_START if start is None else start.to_bytes(8, "big")


def _read_seq(frame: bytes, error: type[KVEventsError]) -> int:
    if len(frame) != 8:
        raise error(f"seq frame of {len(frame)} bytes: it must be 8")
    seq = int.from_bytes(frame, "big")
    if seq > MAX_SEQ:
        raise error(f"seq {seq}: it must be below 2**63")
    return seq
