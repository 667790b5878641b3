"""The frames of a message: live, both forms of a reply, and invalid ones."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvevents.errors import MalformedBatch, MalformedReply
from kvevents.messages import END_MARKER, SNAPSHOT_START, Batch, encode_start, read_live, read_reply

SEQ = (7).to_bytes(8, "big")


@pytest.mark.parametrize("topic", [b"t", None])
def test_a_live_message_is_topic_number_and_payload(topic: bytes | None) -> None:
    """The one form all versions share."""
    assert read_live([b"t", SEQ, b"payload"], topic) == Batch(7, b"payload")


@pytest.mark.parametrize(
    "frames", [[b"", b"t", SEQ, b"payload"], [b"", SEQ, b"payload"]], ids=["0.26", "before"]
)
def test_a_reply_comes_with_and_without_a_topic(frames: list[bytes]) -> None:
    """vLLM added the topic in 0.26."""
    assert read_reply(frames, b"t") == Batch(7, b"payload")


@pytest.mark.parametrize(
    "frames", [[b"", b"", END_MARKER, b""], [b"", END_MARKER, b""], [b"", b"t", END_MARKER, b""]]
)
def test_the_number_minus_one_ends_a_reply(frames: list[bytes]) -> None:
    """Its topic is empty even where the others carry one."""
    assert read_reply(frames, b"t") is None


def test_a_start_is_a_number_or_the_word_snapshot() -> None:
    """Both are eight bytes, so that vLLM reads the word as a number."""
    assert encode_start(7) == SEQ
    assert encode_start(None) == SNAPSHOT_START
    assert len(SNAPSHOT_START) == 8


def test_frames_of_any_other_form_are_refused() -> None:
    """Either a batch with the frames' values or our own error, without contents; never another
    exception."""
    rng = random.Random(3)
    refused = 0
    for _ in range(50_000):
        frames = [
            rng.choice((b"", b"t", SEQ, END_MARKER, rng.randbytes(rng.randrange(10))))
            for _ in range(rng.randrange(7))
        ]
        refused += is_refused(lambda frames: read_live(frames, b"t"), frames)
        refused += is_refused(lambda frames: read_reply(frames, b"t"), frames)
    assert 50_000 < refused < 100_000


def is_refused(read: Callable[[list[bytes]], Batch | None], frames: list[bytes]) -> bool:
    try:
        batch = read(frames)
    except (MalformedBatch, MalformedReply):
        return True
    assert batch is None or (batch.seq.to_bytes(8, "big") in frames and batch.payload == frames[-1])
    return False
