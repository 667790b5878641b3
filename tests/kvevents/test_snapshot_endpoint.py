"""An endpoint for snapshots alone, as proposed for vLLM: a name for the process in every batch, a
heartbeat every second, and the whole state as one message. Real sockets on loopback."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvevents.codec import encode
from kvevents.delivery import publisher_of
from kvevents.events import BlockStored, CacheLayout, EventBatch
from kvevents.replay import ReplayLimits
from kvevents.stream_state import SourceState
from kvevents.subscriber import Subscriber, SubscriberOptions
from tests.support.following import QUICK, Notebook, following, until_live, until_state
from tests.support.vllm_publisher import Reply, SnapshotAnswer, VllmPublisher, seq_frame
from tests.support.waiting import eventually

LIVE, SUSPECT = SourceState.LIVE, SourceState.SUSPECT
NAME, OTHER = bytes(range(16)), bytes(range(16, 32))


def named(what: str, name: bytes = NAME) -> bytes:
    """A batch that says who sent it."""
    return msgspec.msgpack.encode([0.0, [what], 0, name])


def part(what: str) -> bytes:
    """A part of a snapshot: the name comes with the reply."""
    return msgspec.msgpack.encode([0.0, [what], 0])


def snapshot(last: int, *parts: bytes, name: bytes = NAME) -> Reply:
    return [b"", last.to_bytes(8, "big", signed=True), name, *parts]


def now(*parts: bytes, name: bytes = NAME) -> SnapshotAnswer:
    """A snapshot of what has been published when it is asked for."""
    return lambda publisher: snapshot(publisher.last_seq, *parts, name=name)


@contextmanager
def publishing(count: int = 0, **settings: Any) -> Iterator[VllmPublisher]:
    """A publisher that nobody listened to while it published that many batches."""
    with VllmPublisher(**settings) as publisher:
        publish(publisher, count)
        yield publisher


def publish(publisher: VllmPublisher, count: int, name: bytes = NAME, **loss: bool) -> int:
    for _ in range(count):
        publisher.publish(named(f"batch {publisher.last_seq + 1}", name), **loss)
    publisher.flush()
    return publisher.last_seq


@asynccontextmanager
async def follow(
    publisher: VllmPublisher,
    notebook: Notebook,
    with_replay: bool = False,
    options: SubscriberOptions = QUICK,
) -> AsyncIterator[Subscriber]:
    subscriber = Subscriber(
        publisher.endpoint,
        notebook,
        replay_endpoint=publisher.replay_endpoint if with_replay else None,
        snapshot_endpoint=publisher.snapshot_endpoint,
        topic=publisher.topic.decode(),
        options=options,
    )
    async with following(subscriber):
        yield subscriber


def whats(notebook: Notebook) -> list[str]:
    return [msgspec.msgpack.decode(batch.payload)[1][0] for batch in notebook.batches]


@pytest.fixture
def notebook() -> Notebook:
    return Notebook()


# --- the ordinary course --------------------------------------------------------------------------


@pytest.mark.parametrize("with_replay", [True, False])
async def test_a_late_subscriber_takes_the_snapshot_and_follows(
    with_replay: bool, notebook: Notebook
) -> None:
    """Whatever the ring has forgotten; the state is whole, and what it stands for is known."""
    with publishing(100, ring=5, snapshots=now(part("x"), part("y"))) as publisher:
        async with follow(publisher, notebook, with_replay) as subscriber:
            await until_live(subscriber, 99)
            await eventually(lambda: publisher.subscribers > 0, "the subscription")
            last = publish(publisher, 3)
            await until_live(subscriber, last)
            assert whats(notebook) == ["x", "y", "batch 100", "batch 101", "batch 102"]
            statistics = subscriber.statistics()
            assert (statistics.snapshots, statistics.publisher_id) == (1, NAME.hex())
            assert list(notebook.problems) == []


async def test_an_empty_cache_is_a_snapshot_without_parts(notebook: Notebook) -> None:
    """All of it was cleared."""
    with publishing(10, snapshots=now()) as publisher:
        async with follow(publisher, notebook) as subscriber:
            await until_live(subscriber, 9)
            assert notebook.batches == []


async def test_before_the_first_batch_a_snapshot_stands_for_none(notebook: Notebook) -> None:
    """The next one is batch 0."""
    with publishing(snapshots=now(name=NAME)) as publisher:
        async with follow(publisher, notebook) as subscriber:
            await until_live(subscriber, None)
            await eventually(lambda: publisher.subscribers > 0, "the subscription")
            publisher.snapshots = now(part("x"))
            publish(publisher, 1)
            await until_live(subscriber, 0)


async def test_live_batches_that_a_snapshot_includes_are_dropped_whenever_they_come(
    notebook: Notebook,
) -> None:
    """The reply may overtake them. Their name says that no other process sent them."""
    with publishing(10, snapshots=now(part("x"))) as publisher:
        async with follow(publisher, notebook) as subscriber:
            await until_live(subscriber, 9)
            await eventually(lambda: publisher.subscribers > 0, "the subscription")
            for seq in (7, 9):
                publisher.send_raw([publisher.topic, seq_frame(seq), named(f"batch {seq}")])
            last = publish(publisher, 1)
            await until_live(subscriber, last)
            assert whats(notebook) == ["x", "batch 10"]
            assert subscriber.statistics().duplicates == 2
            assert publisher.snapshots_asked == 1


async def test_a_heartbeat_shows_a_loss_at_the_tail(notebook: Notebook) -> None:
    """The publisher sends an empty batch every second; a snapshot brings what was lost."""
    with publishing(10, snapshots=now(part("x"))) as publisher:
        async with follow(publisher, notebook) as subscriber:
            await until_live(subscriber, 9)
            await eventually(lambda: publisher.subscribers > 0, "the subscription")
            publisher.snapshots = now(part("x"), part("z"))
            publish(publisher, 1, on_wire=False)
            beat = msgspec.msgpack.encode([0.0, [], 0, NAME])
            publisher.publish(beat)
            await until_live(subscriber, 11)
            assert whats(notebook) == ["x", "z"]
            assert notebook.reasons == ["snapshot"]


async def test_a_gap_behind_a_snapshot_is_filled_from_the_ring(notebook: Notebook) -> None:
    """Nobody has seen the batch that the snapshot stood for; its name proves whose it is, so the
    engine need not make another one."""
    with publishing(10, snapshots=now(part("x"))) as publisher:
        async with follow(publisher, notebook, with_replay=True) as subscriber:
            await until_live(subscriber, 9)
            await eventually(lambda: publisher.subscribers > 0, "the subscription")
            publish(publisher, 1, on_wire=False)
            publish(publisher, 1)
            await until_live(subscriber, 11)
            assert whats(notebook) == ["x", "batch 10", "batch 11"]
            assert publisher.snapshots_asked == 1


@pytest.mark.parametrize("with_replay", [True, False])
async def test_another_name_is_another_process_wherever_its_numbers_stand(
    with_replay: bool, notebook: Notebook
) -> None:
    """Also where it sends just the number that is expected."""
    with publishing(10, snapshots=now(part("x"))) as publisher:
        async with follow(publisher, notebook, with_replay) as subscriber:
            await until_live(subscriber, 9)
            await eventually(lambda: publisher.subscribers > 0, "the subscription")
            publisher.ring.clear()
            publisher.snapshots = now(part("new"), name=OTHER)
            last = publish(publisher, 1, name=OTHER)
            await until_live(subscriber, last)
            assert whats(notebook) == ["new"]
            assert subscriber.statistics().publisher_id == OTHER.hex()


# --- no snapshot ----------------------------------------------------------------------------------


def unavailable(publisher: VllmPublisher) -> Reply:
    return snapshot(-2)


async def test_without_a_snapshot_for_now_the_ring_is_replayed(notebook: Notebook) -> None:
    """The recorder has run out of memory; the stream goes on."""
    with publishing(10, snapshots=unavailable) as publisher:
        async with follow(publisher, notebook, with_replay=True) as subscriber:
            await until_live(subscriber, 9)
            assert notebook.seqs == list(range(10))
            assert list(notebook.problems) == []


async def test_a_snapshot_that_comes_later_makes_a_suspect_source_whole(notebook: Notebook) -> None:
    """Until then what is there is known to be incomplete, and live batches are taken."""
    with publishing(10, snapshots=unavailable) as publisher:
        async with follow(publisher, notebook) as subscriber:
            await until_state(subscriber, SUSPECT, None)
            await eventually(lambda: publisher.subscribers > 0, "the subscription")
            last = publish(publisher, 1)
            await until_state(subscriber, SUSPECT, last)
            publisher.snapshots = now(part("x"))
            await until_live(subscriber, last)
            assert whats(notebook) == ["x"]


async def test_a_gap_while_there_is_no_snapshot_is_passed(notebook: Notebook) -> None:
    """Waiting for what cannot be had would stop the stream."""
    with publishing(10, snapshots=now(part("x"))) as publisher:
        async with follow(publisher, notebook) as subscriber:
            await until_live(subscriber, 9)
            await eventually(lambda: publisher.subscribers > 0, "the subscription")
            publisher.snapshots = unavailable
            publish(publisher, 1, on_wire=False)
            last = publish(publisher, 2)
            await until_state(subscriber, SUSPECT, last)
            assert whats(notebook) == ["x", "batch 11", "batch 12"]


UNKNOWN: dict[str, Reply] = {
    "no frames but one": [b""],
    "no delimiter": [seq_frame(9), NAME, part("x")],
    "a number of 7 bytes": [b"", b"1234567", NAME],
    "a name of 15 bytes": [b"", seq_frame(9), NAME[:15], part("x")],
    "a number that no batch has": snapshot(-3),
    "parts of nothing": snapshot(-1, part("x")),
    "parts of no snapshot": snapshot(-2, part("x")),
    "a reply of the replay endpoint": [b"", b"kv-events", seq_frame(9), part("x")],
    "JSON": [b"", json.dumps({"epoch": "1", "barrier_seq": 9, "resume_seq": 10}).encode()],
}


@pytest.mark.parametrize("what", UNKNOWN)
async def test_a_reply_of_an_unknown_form_is_refused_and_the_ring_replayed(
    what: str, notebook: Notebook
) -> None:
    """Other projects have endpoints of this name. Nothing of such a reply is taken, and what is
    held stays."""
    with publishing(10, snapshots=lambda _: UNKNOWN[what]) as publisher:
        async with follow(publisher, notebook, with_replay=True) as subscriber:
            await until_live(subscriber, 9)
            assert notebook.seqs == list(range(10))
            assert notebook.reasons == []
            assert notebook.problems[0].startswith("snapshot reply")


async def test_a_reply_of_an_unknown_form_leaves_a_source_without_a_ring_suspect(
    notebook: Notebook,
) -> None:
    """It is followed as one that has nothing to ask, and it is not asked without pause."""
    with publishing(10, snapshots=lambda _: UNKNOWN["JSON"]) as publisher:
        async with follow(publisher, notebook) as subscriber:
            await until_state(subscriber, SUSPECT, None)
            await eventually(lambda: publisher.subscribers > 0, "the subscription")
            last = publish(publisher, 3)
            await until_state(subscriber, SUSPECT, last)
            assert notebook.seqs == [10, 11, 12]


async def test_an_endpoint_that_is_silent_delays_the_ring_for_a_bounded_time(
    notebook: Notebook,
) -> None:
    """A snapshot takes a while to make, and not for ever."""
    options = replace(QUICK, replay=ReplayLimits(silence_s=1.0, snapshot_s=0.2))
    with publishing(10) as publisher:
        async with follow(publisher, notebook, with_replay=True, options=options) as subscriber:
            await until_live(subscriber, 9)
            assert notebook.seqs == list(range(10))
            assert publisher.snapshots_asked > 0


@pytest.mark.parametrize(
    ("parts", "limits"),
    [
        ([part("x")] * 9, ReplayLimits(silence_s=1.0, batches=8)),
        ([part("x" * 1000)] * 2, ReplayLimits(silence_s=1.0, payload_bytes=1500)),
        ([part("x"), b"bad part"], ReplayLimits(silence_s=1.0)),
    ],
    ids=["too many parts", "too many bytes", "a malformed part"],
)
async def test_a_snapshot_that_cannot_be_taken_whole_is_thrown_away(
    parts: Sequence[bytes], limits: ReplayLimits, notebook: Notebook
) -> None:
    """Part of a state is worse than none: the ring has it all."""
    with publishing(5, snapshots=now(*parts)) as publisher:
        options = replace(QUICK, replay=limits)
        async with follow(publisher, notebook, with_replay=True, options=options) as subscriber:
            await until_live(subscriber, 4)
            assert notebook.seqs == list(range(5))
            assert notebook.reasons == ["broken snapshot"]


async def test_an_endpoint_of_another_process_is_not_asked_again_and_again(
    notebook: Notebook,
) -> None:
    """A wrong address in a configuration: each snapshot stops that engine for a while, and none
    fits the stream."""
    with publishing(10, snapshots=now(part("x"), name=OTHER)) as publisher:
        async with follow(publisher, notebook) as subscriber:
            await eventually(lambda: publisher.subscribers > 0, "the subscription")
            for _ in range(200):
                last = publish(publisher, 1)
            await until_state(subscriber, SUSPECT, last)
            assert publisher.snapshots_asked <= 3


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "name"),
    [
        (named("x"), NAME.hex()),
        (part("x"), None),
        (msgspec.msgpack.encode([0.0, ["x"], NAME]), None),
        (msgspec.msgpack.encode([0.0, ["x"], 0, NAME, 1]), None),
        (msgspec.msgpack.encode([0.0, ["x"], 0, b"long" + b"\xc4\x10" + NAME]), None),
        (msgspec.msgpack.encode([0.0, ["x"], 0, NAME[:15]]), None),
        (b"\x94\xc4\x10" + NAME, None),
    ],
    ids=["named", "not named", "no rank", "five elements", "longer", "shorter", "cut off"],
)
def test_a_batch_is_named_by_a_fourth_element_of_16_bytes(payload: bytes, name: str | None) -> None:
    """What only ends like a name is none: a change of name is a restart."""
    assert publisher_of(payload) == name


def test_a_large_batch_is_named_by_the_layout_that_it_begins_with() -> None:
    """A snapshot's first batch is large too; further in, a layout is an event like others."""
    layout = CacheLayout("engine-1", [], 16, 16)
    many = [BlockStored([number], None, [number] * 16, "GPU") for number in range(1000)]
    assert publisher_of(encode(EventBatch(0.0, [layout, *many]))) == "engine-1"
    assert publisher_of(encode(EventBatch(0.0, [*many, layout]))) is None


async def test_a_snapshot_of_nothing_names_nobody(notebook: Notebook) -> None:
    """Its endpoint is another, idle process's, or its process has ended before its first batch: the
    stream was doubted where it had just begun, and its follower ended in an impossible state."""
    with publishing(0, snapshots=lambda _publisher: snapshot(-1, name=OTHER)) as publisher:
        async with follow(publisher, notebook, with_replay=True) as subscriber:
            await eventually(lambda: publisher.subscribers > 0, "the subscription")
            await eventually(lambda: subscriber.statistics().snapshots > 0, "the snapshot")
            last = publish(publisher, 3)
            await until_live(subscriber, last)
            assert whats(notebook) == ["batch 0", "batch 1", "batch 2"]
            assert subscriber.statistics().publisher_id == NAME.hex()
