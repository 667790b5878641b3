"""The bytes between a publisher and a subscriber: read in any pieces, bounded, not believed."""

from __future__ import annotations

import random
import struct
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents.errors import HandshakeFailed, MalformedBatch
from kvevents.messages import MAX_SEQ, Batch
from kvevents.zmtp import SubscriberEnd

_MORE, _LONG, _COMMAND = 1, 2, 4


def greeting(mechanism: bytes = b"NULL", version: int = 3) -> bytes:
    return b"\xff" + bytes(8) + bytes((0x7F, version, 1)) + mechanism.ljust(20, b"\0") + bytes(32)


def frame(body: bytes, flags: int = 0, is_long: bool = False) -> bytes:
    if is_long or len(body) > 255:
        return bytes((flags | _LONG,)) + struct.pack(">Q", len(body)) + body
    return bytes((flags, len(body))) + body


def ready(kind: bytes = b"PUB") -> bytes:
    name = b"\x08Identity\x00\x00\x00\x00\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
    return frame(b"\x05READY" + name, _COMMAND)


def message(*frames: bytes, is_long: bool = False) -> bytes:
    heads = [frame(each, _MORE, is_long) for each in frames[:-1]]
    return b"".join(heads) + frame(frames[-1], 0, is_long)


def batch(seq: int, payload: bytes, topic: bytes = b"", is_long: bool = False) -> bytes:
    return message(topic, seq.to_bytes(8, "big"), payload, is_long=is_long)


def connected(prefix: bytes = b"", frame_bytes: int = 2**20) -> SubscriberEnd:
    """One that has shaken hands."""
    end = SubscriberEnd(prefix, frame_bytes)
    end.give(greeting() + ready())
    assert end.is_ready
    return end


def taken(end: SubscriberEnd, topic: bytes | None = None) -> list[Batch]:
    found = []
    while (each := end.next_batch(topic)) is not None:
        found.append(each)
    return found


@given(
    st.lists(st.tuples(st.binary(max_size=600), st.booleans(), st.sampled_from([b"", b"kv"]))),
    st.randoms(use_true_random=False),
)
def test_batches_are_read_in_whatever_pieces_they_come(
    sent: list[tuple[bytes, bool, bytes]], rng: random.Random
) -> None:
    """A network cuts anywhere, and a busy loop gets many at a time."""
    data = greeting() + ready()
    data += b"".join(batch(at, body, topic, flag) for at, (body, flag, topic) in enumerate(sent))
    end, found = SubscriberEnd(b"", 2**20), []
    while data:
        size = rng.choice((1, 2, 7, 63, 500, len(data)))
        end.give(data[:size])
        data = data[size:]
        if end.is_ready and rng.random() < 0.7:
            # All that is here, or as many as a turn has time for.
            most = rng.choice((1, 2, sys.maxsize))
            while len(found) < len(sent) and most and (each := end.next_batch(None)):
                found.append(each)
                most -= 1
    found += taken(end)
    assert found == [Batch(at, body) for at, (body, _, _) in enumerate(sent)]
    assert end.waiting_bytes == 0


def test_what_comes_behind_something_that_waits_is_not_read_before_it() -> None:
    """The reader had stopped just where its first piece ends."""
    end = connected()
    first, second, third = (batch(seq, b"x") for seq in range(3))
    end.give(first)
    end.give(second)
    assert end.next_batch(None) == Batch(0, b"x")
    end.give(third)
    assert [found.seq for found in taken(end)] == [1, 2]


def test_a_message_without_end_ends_the_connection() -> None:
    """Frames without a byte take time and no memory, which nothing else would bound."""
    end = connected()
    end.give(frame(b"", _MORE) * 5000)
    with pytest.raises(HandshakeFailed, match="more than 1000 frames"):
        end.next_batch(None)


@pytest.mark.parametrize("at_once", [False, True])
def test_what_was_read_to_its_end_is_not_kept(at_once: bool) -> None:
    """Of a thousand streams that are quiet now it would be 64 MB."""
    end, data = connected(), batch(1, bytes(50_000))
    end.give(batch(0, b""))
    taken(end)
    end.give(data)
    kept = sys.getrefcount(data)
    if at_once:
        end.skip_to(len(data))
    else:
        taken(end)
    assert sys.getrefcount(data) == kept - 1
    assert (end.waiting_bytes, end.run()) == (0, None)


def test_what_came_behind_a_run_is_in_the_next_one() -> None:
    """What is received while a run waits is not joined to it."""
    end, data = connected(), batch(1, b"one")
    end.give(batch(0, b"zero"))
    taken(end)
    end.give(data)
    end.give(batch(2, b"two"))
    run = end.run()
    assert run is not None
    assert run.data[run.at :] == data
    end.skip_to(len(data))
    run = end.run()
    assert run is not None
    assert run.data[run.at :] == batch(2, b"two")
    assert taken(end) == [Batch(2, b"two")]


def test_it_greets_says_ready_and_subscribes_once_the_publisher_has() -> None:
    """A subscription that comes before the handshake would break the protocol."""
    end = SubscriberEnd(b"kv@", 2**20)
    first = bytes(end.outgoing)
    assert first[:12] == b"\xff" + bytes(8) + b"\x7f\x03\x00"
    assert first[64:].endswith(b"\x00\x00\x00\x03SUB")
    end.give(greeting() + ready(b"XPUB"))
    assert bytes(end.outgoing)[len(first) :] == b"\x00\x04\x01kv@"


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (greeting(b"CURVE"), "CURVE keys"),
        (greeting(version=2), "before 2013"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "no ZMQ"),
        (greeting() + ready(b"PULL"), "no PUB socket"),
        (greeting() + frame(b"\x05READY", _COMMAND), "no PUB socket"),
        (greeting() + frame(b"\x05READY\xffSocket-Type", _COMMAND), "no PUB socket"),
        (greeting() + frame(b"\x05ERROR\x03400", _COMMAND), "refuses us"),
        (greeting() + frame(b"early"), "too long"),
        (greeting() + frame(b""), "refuses us"),
        (greeting() + frame(bytes(5000), _COMMAND), "too long"),
        (greeting() + b"\xf0\x00", "not those of ZMTP"),
    ],
)
def test_whoever_is_no_plain_publisher_is_refused_with_a_reason(sent: bytes, why: str) -> None:
    """An operator who forgot the keys must read so."""
    with pytest.raises(HandshakeFailed, match=why):
        SubscriberEnd(b"", 2**20).give(sent)


def test_a_heartbeat_is_answered_with_its_context_and_a_flood_is_not() -> None:
    """A publisher that asks and hears nothing hangs up; answers nobody reads must not pile up."""
    end = connected()
    end.outgoing.clear()
    end.give(frame(b"\x04PING\x00\x0acontext", _COMMAND) + batch(7, b"x"))
    assert taken(end) == [Batch(7, b"x")]
    assert bytes(end.outgoing) == frame(b"\x04PONGcontext", _COMMAND)
    end.give(frame(b"\x04PING\x00\x0a" + b"c" * 99, _COMMAND) * 10_000)
    assert taken(end) == []
    assert len(end.outgoing) < 5000


def test_a_frame_above_the_limit_is_refused_before_it_is_here() -> None:
    """Its size is all that is believed of it."""
    end = connected(frame_bytes=1000)
    end.give(batch(0, bytes(1000)) + b"\x01\x00\x01\x08" + bytes(8) + b"\x02" + b"\xff" * 8)
    assert end.next_batch(None) == Batch(0, bytes(1000))
    with pytest.raises(HandshakeFailed, match="too long"):
        end.next_batch(None)
    end = connected(frame_bytes=1000)
    end.give(batch(0, b"") + batch(1, bytes(1001)))
    assert end.next_batch(None) == Batch(0, b"")
    with pytest.raises(HandshakeFailed, match="1001 bytes"):
        end.next_batch(None)


@pytest.mark.parametrize(
    "sent",
    [
        message(b"", bytes(8)),
        message(b"", bytes(7), b"x"),
        message(b"", (MAX_SEQ + 1).to_bytes(8, "big"), b"x"),
        message(b"", bytes(8), b"x", b"y", b"z", *[b"more"] * 500),
        message(b"other", bytes(8), b"x"),
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_message_that_is_no_batch_is_refused_and_the_next_is_read(
    sent: bytes, is_first: bool
) -> None:
    """Also behind a usual one, where a shorter way is taken."""
    end = connected()
    end.give((b"" if is_first else batch(0, b"first")) + sent + batch(1, b"next"))
    assert is_first or end.next_batch(b"") == Batch(0, b"first")
    with pytest.raises(MalformedBatch):
        end.next_batch(b"")
    assert taken(end, b"") == [Batch(1, b"next")]


def test_topics_that_were_not_subscribed_to_are_left_out() -> None:
    """As by libzmq: a publisher may send before it knows what we want."""
    end = connected(prefix=b"kv")
    end.give(batch(0, b"a", b"other") + batch(1, b"b", b"kv") + batch(2, b"c", b"ot"))
    assert taken(end, b"kv") == [Batch(1, b"b")]


def test_missing_bytes_are_those_that_end_the_frame_under_way() -> None:
    """Reading no more than these spares a copy of all that comes behind."""
    end = connected()
    whole = batch(0, bytes(5000))
    end.give(whole[:2000])
    assert end.next_batch(None) is None
    assert end.missing_bytes == len(whole) - 2000
    end.give(whole[2000:])
    assert end.missing_bytes == 0
    assert end.next_batch(None) == Batch(0, bytes(5000))


@given(st.binary(max_size=400), st.booleans())
def test_nothing_that_comes_raises_anything_else(data: bytes, is_ready: bool) -> None:
    """Whatever a process at a publisher's address sends."""
    end = connected(frame_bytes=1000) if is_ready else SubscriberEnd(b"", 1000)
    try:
        end.give(data)
        for _ in range(400):
            try:
                if not end.is_ready or end.next_batch(None) is None:
                    break
            except MalformedBatch:
                continue
    except HandshakeFailed:
        pass
    assert end.waiting_bytes <= len(data)
