"""Reads the captured messages of `tests/wire_samples`: every frame exactly as an engine of that
version sent it.

A file is a sequence of messages, gzipped: u64 nanoseconds, u32 frame count, then per frame u32
length and the bytes, all big endian. A live message is `[topic, seq, payload]`; a replayed one
`["", seq, payload]`, or from vLLM 0.26 on `["", topic, seq, payload]`.

vLLM's are of running engines. SGLang's were made by the event classes and the publisher of its
packages, from a made-up history: requests of three tenants and one adapter, evictions, a clear. So
was TokenSpeed's, from a history without tenants, with the hashes that its scheduler computes.
"""

from __future__ import annotations

import gzip
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent.parent / "wire_samples"
END_OF_REPLAY = b"\xff" * 8
_HEAD = struct.Struct(">QI")
_LENGTH = struct.Struct(">I")


class Sequenced(NamedTuple):
    """One message of a stream, without its transport."""

    seq: int
    payload: bytes


def versions(engine: str = "vllm") -> list[str]:
    """The versions of *engine* that have samples, oldest first."""
    names = {
        path.name.removeprefix(f"{engine}-").removesuffix(".raw.gz").removesuffix(".replay")
        for path in FOLDER.glob(f"{engine}-*.gz")
    }
    return sorted(names, key=number)


def number(version: str) -> tuple[int, ...]:
    """A version in a form that compares: 0.9.2 comes before 0.12.0."""
    return tuple(map(int, version.split(".")))


def messages(path: Path) -> Iterator[list[bytes]]:
    """The frames of every message of one file."""
    raw, offset = gzip.decompress(path.read_bytes()), 0
    while offset < len(raw):
        _, count = _HEAD.unpack_from(raw, offset)
        offset += _HEAD.size
        frames = []
        for _ in range(count):
            (length,) = _LENGTH.unpack_from(raw, offset)
            offset += _LENGTH.size
            frames.append(raw[offset : offset + length])
            offset += length
        yield frames


def packed(messages_of_all: Iterable[Sequence[bytes]]) -> bytes:
    """The content of a file with these messages, one nanosecond apart.

    Args:
        messages_of_all: The frames of each, as a socket received them.
    """
    raw = bytearray()
    for at_ns, frames in enumerate(messages_of_all):
        raw += _HEAD.pack(at_ns, len(frames))
        for frame in frames:
            raw += _LENGTH.pack(len(frame)) + frame
    return gzip.compress(bytes(raw), mtime=0)


def live(version: str, engine: str = "vllm") -> list[Sequenced]:
    """What a subscriber received.

    Args:
        version: Of the engine.
        engine: `vllm`, `sglang` or `tokenspeed`.
    """
    return [_sequenced(frames) for frames in messages(FOLDER / f"{engine}-{version}.raw.gz")]


def replay_frames(version: str, engine: str = "vllm") -> list[list[bytes]]:
    """The replies of the replay socket to a request from 0, the end marker included.

    Args:
        version: Of the engine.
        engine: `vllm`, `sglang` or `tokenspeed`.
    """
    return list(messages(FOLDER / f"{engine}-{version}.replay.raw.gz"))


def replayed(version: str, engine: str = "vllm") -> list[Sequenced]:
    """The batches of a replay, without the end marker.

    Args:
        version: Of the engine.
        engine: `vllm`, `sglang` or `tokenspeed`.
    """
    frames_of_all = replay_frames(version, engine)
    return [_sequenced(frames) for frames in frames_of_all if frames[-2] != END_OF_REPLAY]


def _sequenced(frames: list[bytes]) -> Sequenced:
    return Sequenced(int.from_bytes(frames[-2], "big"), frames[-1])
