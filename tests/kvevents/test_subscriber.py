"""One subscriber, one publisher, real sockets on loopback: what is handed on, and what the state
says about it."""

from __future__ import annotations

import asyncio
import gc
import random
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import uvloop
import zmq
from async_timeout import timeout

from kvevents.codec import encode
from kvevents.delivery import Effect
from kvevents.errors import EndpointError
from kvevents.events import AllBlocksCleared, BlockStored, CacheLayout, EventBatch, GroupSpec
from kvevents.layout import GroupKind, KVCacheGroup, KVCacheLayout
from kvevents.live import BacklogLimits
from kvevents.messages import SNAPSHOT_START, Batch
from kvevents.pacing import Backoff, Pacer
from kvevents.publisher import PublisherConfig, ZmqEventPublisher
from kvevents.replay import ReplayLimits
from kvevents.sockets import SocketLimits
from kvevents.stream_state import SourceState
from kvevents.subscriber import Subscriber, SubscriberOptions
from tests.support.following import QUICK, Notebook, following, until_live, until_state
from tests.support.vllm_publisher import END, Reply, VllmPublisher, free_port, seq_frame
from tests.support.waiting import DEADLINE_S, eventually

LIVE, SUSPECT, RECOVERING, CONNECTING = (
    SourceState.LIVE,
    SourceState.SUSPECT,
    SourceState.RECOVERING,
    SourceState.CONNECTING,
)


@pytest.fixture
def publisher() -> Iterator[VllmPublisher]:
    with VllmPublisher() as made:
        yield made


@pytest.fixture
def notebook() -> Notebook:
    return Notebook()


def subscriber_to(
    publisher: VllmPublisher, notebook: Notebook, options: SubscriberOptions = QUICK
) -> Subscriber:
    return Subscriber(
        publisher.endpoint,
        notebook,
        replay_endpoint=publisher.replay_endpoint,
        topic=publisher.topic.decode(),
        options=options,
    )


def without_replay(publisher: VllmPublisher, notebook: Notebook) -> Subscriber:
    return Subscriber(publisher.endpoint, notebook, topic=publisher.topic.decode(), options=QUICK)


@asynccontextmanager
async def live(
    publisher: VllmPublisher, notebook: Notebook, options: SubscriberOptions = QUICK
) -> AsyncIterator[Subscriber]:
    """Run a subscriber of a publisher that has published nothing yet; it is subscribed before the
    first batch."""
    async with following(subscriber_to(publisher, notebook, options)) as subscriber:
        await until_live(subscriber, None)
        await eventually(lambda: publisher.subscribers > 0, "the subscription")
        yield subscriber


def publish(publisher: VllmPublisher, count: int, name: str = "a", **loss: bool) -> int:
    """Publish *count* batches; returns the last number."""
    last = [
        publisher.publish(f"{name} {publisher.last_seq + 1}".encode(), **loss) for _ in range(count)
    ][-1]
    publisher.flush()
    return last


def restarted(publisher: VllmPublisher, **settings: Any) -> VllmPublisher:
    """Another process at the same addresses."""
    publisher.close()
    return VllmPublisher(port=publisher.port, replay_port=publisher.replay_port, **settings)


# --- the ordinary course --------------------------------------------------------------------------


async def test_batches_are_handed_on_in_order_and_once(
    publisher: VllmPublisher, notebook: Notebook
) -> None:
    """The promise of the whole package."""
    async with live(publisher, notebook) as subscriber:
        last = publish(publisher, 500)
        await until_live(subscriber, last)
        assert [batch.payload for batch in notebook.batches] == [
            f"a {seq}".encode() for seq in range(500)
        ]
        assert subscriber.statistics().gaps == 0


@pytest.mark.parametrize("with_topic", [True, False])
async def test_a_late_subscriber_replays_from_zero(with_topic: bool, notebook: Notebook) -> None:
    """A router restarts more often than an engine; replies come with and without a topic, by
    version."""
    with VllmPublisher(with_topic=with_topic) as publisher:
        last = publish(publisher, 100)
        async with following(subscriber_to(publisher, notebook)) as subscriber:
            await until_live(subscriber, last)
            assert notebook.seqs == list(range(100))
            last = publish(publisher, 10)
            await until_live(subscriber, last)
    assert notebook.seqs == list(range(110))


async def test_a_subscriber_that_is_too_late_is_suspect(notebook: Notebook) -> None:
    """What the ring has forgotten cannot be known; what it has is better than nothing."""
    with VllmPublisher(ring=10) as publisher:
        last = publish(publisher, 100)
        async with following(subscriber_to(publisher, notebook)) as subscriber:
            await until_state(subscriber, SUSPECT, last)
            assert notebook.seqs == list(range(90, 100))
            last = publish(publisher, 5)
            await until_state(subscriber, SUSPECT, last)


async def test_a_suspect_source_is_known_again_when_its_cache_was_cleared(
    notebook: Notebook,
) -> None:
    """`AllBlocksCleared` makes up for everything that was missed before."""
    with VllmPublisher(ring=10) as publisher:
        publish(publisher, 100)
        async with following(subscriber_to(publisher, notebook)) as subscriber:
            await until_state(subscriber, SUSPECT, 99)
            await until_live(subscriber, publisher.publish(b"clear"))
            await until_live(subscriber, publish(publisher, 5))


async def test_a_consumer_that_finds_its_picture_wrong_gets_everything_anew(
    publisher: VllmPublisher, notebook: Notebook
) -> None:
    """Whatever spoiled it, a rebuild repairs it, and what comes meanwhile is not lost."""
    async with live(publisher, notebook) as subscriber:
        last = publish(publisher, 20)
        await until_live(subscriber, last)
        notebook.batches[3:] = []
        subscriber.rebuild()
        await eventually(lambda: notebook.reasons == ["rebuild"], "the rebuild")
        last = publish(publisher, 5)
        await until_live(subscriber, last)
        assert notebook.seqs == list(range(25))
        assert subscriber.statistics().restarts == 0
        await until_live(subscriber, last)
        assert notebook.reasons == ["rebuild"], "once"


async def test_what_the_ring_no_longer_has_is_kept_although_it_is_doubted(
    notebook: Notebook,
) -> None:
    """A picture that is wrong in places is better than the last ten batches."""
    with VllmPublisher(ring=10) as publisher:
        async with live(publisher, notebook) as subscriber:
            last = publish(publisher, 5)
            await until_live(subscriber, last)
            last = publish(publisher, 40)
            await until_live(subscriber, last)
            questions = subscriber.statistics().questions
            subscriber.rebuild()
            await eventually(
                lambda: subscriber.statistics().questions >= questions + 2, "the questions"
            )
            last = publish(publisher, 5)
            await until_live(subscriber, last)
            assert (notebook.seqs, notebook.reasons) == (list(range(50)), [])


async def test_a_snapshot_rebuilds_a_picture_that_is_doubted(notebook: Notebook) -> None:
    """Where the publisher makes snapshots, the ring may be as short as it likes."""
    config = PublisherConfig(
        "tcp://127.0.0.1:0", "tcp://127.0.0.1:0", heartbeat_s=1000.0, buffer_steps=2
    )
    full = KVCacheLayout.build([KVCacheGroup(GroupKind.FULL, 16)])
    with ZmqEventPublisher(config, full) as publisher:
        for _ in range(5):
            publisher.publish([AllBlocksCleared()])
        await eventually(lambda: publisher.statistics().stream.last_seq == 5, "the batches")
        subscriber = Subscriber(
            publisher.endpoint, notebook, replay_endpoint=publisher.replay_endpoint, options=QUICK
        )
        async with following(subscriber):
            await until_live(subscriber, 5)
            subscriber.rebuild()
            await eventually(lambda: subscriber.statistics().snapshots == 2, "the second snapshot")
            await until_live(subscriber, 5)
            assert notebook.reasons == ["snapshot"], "nothing was held before the first one"


async def test_a_gap_is_filled_from_the_ring(publisher: VllmPublisher, notebook: Notebook) -> None:
    """PUB drops at its high-water mark, so a gap is normal."""
    async with live(publisher, notebook) as subscriber:
        publish(publisher, 10)
        await until_live(subscriber, 9)
        publish(publisher, 5, on_wire=False)
        last = publish(publisher, 5)
        await until_live(subscriber, last)
        statistics = subscriber.statistics()
    assert notebook.seqs == list(range(20))
    assert statistics.gaps >= 1
    assert (statistics.restarts, notebook.reasons) == (0, [])


async def test_a_loss_at_the_tail_shows_in_the_silence_after_it(
    publisher: VllmPublisher, notebook: Notebook
) -> None:
    """vLLM sends no heartbeats, and the last batch of a burst may stay the last for an hour."""
    async with live(publisher, notebook) as subscriber:
        publish(publisher, 10)
        await until_live(subscriber, 9)
        last = publish(publisher, 3, on_wire=False)
        await until_live(subscriber, last)
    assert notebook.seqs == list(range(13))


async def test_a_replay_that_a_router_dropped_parts_of_is_asked_for_until_it_is_whole(
    notebook: Notebook,
) -> None:
    """vLLM's ROUTER drops silently what is not taken as fast as it is sent, though its ring has
    every batch: late routers stayed suspect for good."""
    slow = replace(QUICK, patience_s=DEADLINE_S, socket=replace(QUICK.socket, queue_messages=50))
    with VllmPublisher(replay_hwm=100) as publisher:
        for seq in range(4000):
            publisher.publish(b"%d " % seq + bytes(16_000), on_wire=False)
        async with following(subscriber_to(publisher, notebook, slow)) as subscriber:
            await until_live(subscriber, 3999)
            assert subscriber.statistics().replays > 1, "the first one had every batch"
            await until_live(subscriber, publish(publisher, 5))
    assert notebook.seqs == list(range(4005))
    assert (SUSPECT in notebook.states, notebook.reasons) == (False, [])


async def test_a_quiet_stream_stays_live_while_its_tail_is_looked_at(
    publisher: VllmPublisher, notebook: Notebook
) -> None:
    """On a machine short of processor time heartbeats come late; a stream that was called
    recovering at each look had its hits discounted for nothing."""
    async with live(publisher, notebook) as subscriber:
        publish(publisher, 10)
        await until_live(subscriber, 9)
        states, questions = len(notebook.states), subscriber.statistics().questions
        await eventually(
            lambda: subscriber.statistics().questions >= questions + 5, "five looks at the tail"
        )
        assert notebook.states[states:] == []
        assert subscriber.statistics().state is LIVE


async def test_duplicates_and_stragglers_change_nothing(
    publisher: VllmPublisher, notebook: Notebook
) -> None:
    """Relays repeat messages and deliver some late."""
    async with live(publisher, notebook) as subscriber:
        publish(publisher, 10)
        await until_live(subscriber, 9)
        for seq in (9, 3, 3, 0):
            publisher.send_raw([publisher.topic, seq_frame(seq), f"a {seq}".encode()])
        await until_live(subscriber, publish(publisher, 1))
        statistics = subscriber.statistics()
    assert notebook.seqs == list(range(11))
    assert statistics.duplicates >= 4
    assert (statistics.restarts, notebook.reasons) == (0, [])


async def test_another_topic_with_the_same_prefix_is_refused(
    publisher: VllmPublisher, notebook: Notebook
) -> None:
    """ZMQ subscribes to prefixes; a second engine behind a collector has its own numbers."""
    async with live(publisher, notebook) as subscriber:
        publish(publisher, 3)
        await until_live(subscriber, 2)
        publisher.send_raw([publisher.topic + b"-2", seq_frame(3), b"of another engine"])
        await until_live(subscriber, publish(publisher, 1))
        statistics = subscriber.statistics()
    assert (statistics.malformed, statistics.restarts) == (1, 0)
    assert b"of another engine" not in [batch.payload for batch in notebook.batches]


@pytest.mark.parametrize(
    "odd",
    [
        [b"kv-events"],
        [b"kv-events", seq_frame(3)],
        [b"kv-events", b"", b""],
        [b"kv-events", seq_frame(3), b"", b""],
        [b"kv-events"] * 5000,
    ],
    ids=["one frame", "two frames", "empty frames", "four frames", "5,000 frames"],
)
async def test_messages_of_any_other_form_cost_the_next_batch_at_most(
    odd: list[bytes], publisher: VllmPublisher, notebook: Notebook
) -> None:
    """The frames of a message are counted behind its third one; a short one takes the next along,
    which the ring then brings."""
    async with live(publisher, notebook) as subscriber:
        publish(publisher, 3)
        await until_live(subscriber, 2)
        for _ in range(3):
            publisher.send_raw(odd)
            await until_live(subscriber, publish(publisher, 1))
        assert 1 <= subscriber.statistics().malformed <= 3
        # By now every frame is asked about.
        before = subscriber.statistics()
        publisher.send_raw(odd)
        await until_live(subscriber, publish(publisher, 5))
        after = subscriber.statistics()
    assert notebook.seqs == list(range(11))
    assert (after.gaps, after.malformed) == (before.gaps, before.malformed + 1)


async def test_a_batch_reaches_the_consumer_without_a_task(publisher: VllmPublisher) -> None:
    """A task's switch costs as much as a small batch does, and a pass of the loop."""

    class Witness(Notebook):
        def __init__(self) -> None:
            super().__init__()
            self.tasks: list[asyncio.Task[Any] | None] = []

        def apply(self, batch: Batch) -> Effect:
            self.tasks.append(asyncio.current_task())
            return super().apply(batch)

    witness = Witness()
    async with live(publisher, witness) as subscriber:
        await until_live(subscriber, publish(publisher, 1))

        def came_without_a_task() -> bool:
            # Now and then the task is awake, to look at the tail.
            publish(publisher, 1)
            return None in witness.tasks

        await eventually(
            came_without_a_task, "a batch outside a task", show=lambda: witness.tasks[-9:]
        )


def test_it_works_on_uvloop(publisher: VllmPublisher, notebook: Notebook) -> None:
    """The router runs on it, and it handles file descriptors differently from asyncio."""

    async def check() -> None:
        async with live(publisher, notebook) as subscriber:
            publish(publisher, 200)
            await until_live(subscriber, 199)
            publish(publisher, 5, on_wire=False)
            await until_live(subscriber, publish(publisher, 5))

    _run_on(uvloop.new_event_loop(), check())
    assert notebook.seqs == list(range(210))


def _run_on(loop: asyncio.AbstractEventLoop, work: Coroutine[object, object, None]) -> None:
    try:
        loop.run_until_complete(work)
    finally:
        loop.close()


async def test_one_process_can_hold_both_ends(notebook: Notebook) -> None:
    """`inproc` has no handshake to wait for."""
    with (
        zmq.Context() as context,
        context.socket(zmq.PUB) as pub,
        context.socket(zmq.ROUTER) as router,
    ):
        pub.bind("inproc://events")
        router.bind("inproc://replay")
        subscriber = Subscriber(
            "inproc://events",
            notebook,
            replay_endpoint="inproc://replay",
            topic="t",
            options=QUICK,
            context=context,
        )
        async with following(subscriber):
            await eventually(lambda: bool(router.poll(0)), "the first question")
            client, _, start = router.recv_multipart()
            assert start == b"snapshot"
            router.send_multipart([client, b"", b"", END, b""])
            await eventually(lambda: bool(router.poll(0)), "the second question")
            client, _, start = router.recv_multipart()
            assert start == seq_frame(0)
            router.send_multipart([client, b"", b"", END, b""])
            await until_live(subscriber, None)
            pub.send_multipart([b"t", seq_frame(0), b"a 0"])
            await eventually(lambda: notebook.seqs == [0], "the batch")


async def test_after_a_snapshot_a_look_at_the_tail_asks_for_no_other(notebook: Notebook) -> None:
    """A snapshot stands for a batch we never saw; without its fingerprint every look would end in a
    new snapshot."""
    config = PublisherConfig(
        "tcp://127.0.0.1:0", "tcp://127.0.0.1:0", heartbeat_s=1000.0, buffer_steps=2
    )
    full = KVCacheLayout.build([KVCacheGroup(GroupKind.FULL, 16)])
    with ZmqEventPublisher(config, full) as publisher:
        for _ in range(5):
            publisher.publish([AllBlocksCleared()])
        await eventually(lambda: publisher.statistics().stream.last_seq == 5, "the batches")
        subscriber = Subscriber(
            publisher.endpoint, notebook, replay_endpoint=publisher.replay_endpoint, options=QUICK
        )
        async with following(subscriber):
            await until_live(subscriber, 5)
            questions = subscriber.statistics().questions
            await eventually(
                lambda: subscriber.statistics().questions > questions + 2,
                "three looks at the tail",
            )
            assert subscriber.statistics().snapshots == 1
            assert subscriber.statistics().publisher_id == publisher.publisher_id


# --- restarts -------------------------------------------------------------------------------------


async def test_a_restart_is_seen_before_the_new_process_publishes_anything(
    publisher: VllmPublisher, notebook: Notebook
) -> None:
    """An idle engine after a restart holds nothing, and must not keep the reputation of the old
    one."""
    publish(publisher, 10)
    async with following(subscriber_to(publisher, notebook)) as subscriber:
        await until_live(subscriber, 9)
        with restarted(publisher):
            await until_live(subscriber, None)
            statistics = subscriber.statistics()
    assert (notebook.batches, notebook.reasons, statistics.restarts) == ([], ["restart"], 1)


async def test_a_restart_is_seen_at_once_on_a_stream_that_never_fell_silent(
    publisher: VllmPublisher, notebook: Notebook
) -> None:
    """A busy engine gives no reason to look at its ring, and yet an empty ring after the restart
    must be recognised as another process's."""
    never = replace(QUICK, first_probe_s=100.0, max_probe_s=100.0)
    async with live(publisher, notebook, never) as subscriber:
        publish(publisher, 10)
        await until_live(subscriber, 9)
        with restarted(publisher):
            await until_live(subscriber, None)
    assert (notebook.batches, notebook.reasons) == ([], ["restart"])


@pytest.mark.parametrize(
    "new", [3, 10, 11, 50], ids=["before", "just before", "exactly at", "far behind"]
)
async def test_a_restart_is_seen_wherever_the_new_number_stands(
    new: int, publisher: VllmPublisher, notebook: Notebook
) -> None:
    """Before, at and behind the old number: only the last batch, asked for again, tells the
    processes apart."""
    publish(publisher, 10)
    async with following(subscriber_to(publisher, notebook)) as subscriber:
        await until_live(subscriber, 9)
        with restarted(publisher) as again:
            publish(again, new, "b")
            await until_live(subscriber, new - 1)
            publish(again, 5, "b")
            await until_live(subscriber, new + 4)
    assert [batch.payload for batch in notebook.batches] == [
        f"b {seq}".encode() for seq in range(new + 5)
    ]
    assert notebook.reasons == ["restart"]


async def test_a_restart_that_no_connection_shows_is_seen_by_its_number(
    publisher: VllmPublisher, notebook: Notebook
) -> None:
    """Behind a relay the connection stays, whatever happens to the engine."""
    publish(publisher, 10)
    async with following(subscriber_to(publisher, notebook)) as subscriber:
        await until_live(subscriber, 9)
        _become_another_process(publisher, 4)
        publisher.send_raw([publisher.topic, seq_frame(3), b"b 3"])
        await until_live(subscriber, 3)
    assert [batch.payload for batch in notebook.batches] == [b"b 0", b"b 1", b"b 2", b"b 3"]


async def test_a_restart_that_no_connection_shows_is_seen_behind_a_gap(
    publisher: VllmPublisher, notebook: Notebook
) -> None:
    """The new process has passed the old number: it looks like a gap, and the ring would even fill
    it."""
    publish(publisher, 10)
    async with following(subscriber_to(publisher, notebook)) as subscriber:
        await until_live(subscriber, 9)
        _become_another_process(publisher, 20)
        publisher.send_raw([publisher.topic, seq_frame(19), b"b 19"])
        await until_live(subscriber, 19)
    assert [batch.payload for batch in notebook.batches] == [
        f"b {seq}".encode() for seq in range(20)
    ]


def _become_another_process(publisher: VllmPublisher, count: int) -> None:
    with publisher.lock:
        publisher.ring.clear()
        publisher.ring.extend((seq, f"b {seq}".encode()) for seq in range(count))


async def test_a_publisher_that_changes_its_name_is_another_process(
    publisher: VllmPublisher, notebook: Notebook
) -> None:
    """The identity in a layout decides, even where the numbers fit."""
    async with live(publisher, notebook) as subscriber:
        publisher.publish(layout("first"))
        publish(publisher, 3)
        await until_live(subscriber, 3)
        assert subscriber.statistics().publisher_id == "first"
        publisher.publish(layout("second"))
        await eventually(lambda: subscriber.statistics().restarts > 0, "the restart")
        await eventually(lambda: subscriber.statistics().publisher_id == "second", "the new name")
    assert notebook.reasons[0] == "restart"


def layout(publisher_id: str) -> bytes:
    group = GroupSpec("full_attention", 16)
    event = CacheLayout(publisher_id, [group], hash_block_size=16, scheduler_block_size=16)
    return encode(EventBatch(1.0, [event]))


async def test_without_a_replay_endpoint_a_restart_shows_by_its_number(
    publisher: VllmPublisher, notebook: Notebook
) -> None:
    """Batch 0 of a new process is a known beginning, even where nothing can be asked."""
    async with following(without_replay(publisher, notebook)) as subscriber:
        await until_state(subscriber, SUSPECT, None)
        await eventually(lambda: publisher.subscribers > 0, "the subscription")
        publish(publisher, 5)
        await until_live(subscriber, 4)
        with restarted(publisher) as again:
            await eventually(lambda: again.subscribers > 0, "the second connection")
            await until_state(subscriber, SUSPECT, 4)
            publish(again, 2, "b")
            await until_live(subscriber, 1)
    assert [batch.payload for batch in notebook.batches] == [b"b 0", b"b 1"]


async def test_without_a_replay_endpoint_a_gap_leaves_the_source_suspect(
    publisher: VllmPublisher, notebook: Notebook
) -> None:
    """Nothing can be asked, so what is lost stays lost, and the state shows it."""
    async with following(without_replay(publisher, notebook)) as subscriber:
        await until_state(subscriber, SUSPECT, None)
        await eventually(lambda: publisher.subscribers > 0, "the subscription")
        publish(publisher, 5)
        await until_live(subscriber, 4)
        publish(publisher, 1, on_wire=False)
        await until_state(subscriber, SUSPECT, publish(publisher, 2))
        await until_live(subscriber, publisher.publish(b"clear"))
    assert notebook.seqs == [0, 1, 2, 3, 4, 6, 7, 8]


async def test_without_a_replay_endpoint_a_reconnect_leaves_the_source_suspect(
    publisher: VllmPublisher, notebook: Notebook
) -> None:
    """The next number may be the expected one by chance; what was missed cannot be known."""
    async with following(without_replay(publisher, notebook)) as subscriber:
        await until_state(subscriber, SUSPECT, None)
        await eventually(lambda: publisher.subscribers > 0, "the subscription")
        publish(publisher, 5)
        await until_live(subscriber, 4)
        with restarted(publisher, first_seq=5) as again:
            await eventually(lambda: again.subscribers > 0, "the second connection")
            publish(again, 1, "b")
            await until_state(subscriber, SUSPECT, 5)


async def test_the_expected_number_proves_nothing_after_a_reconnect(
    publisher: VllmPublisher, notebook: Notebook
) -> None:
    """While the replay endpoint is silent nothing shows that it is the same process, however well
    the number fits."""
    quick = replace(QUICK, patience_s=0.05, replay=ReplayLimits(silence_s=0.05))
    async with live(publisher, notebook, quick) as subscriber:
        publish(publisher, 5)
        await until_live(subscriber, 4)
        with restarted(publisher, first_seq=5, answer=lambda _publisher, _first: []) as again:
            await until_state(subscriber, SUSPECT, 4)
            await eventually(lambda: again.subscribers > 0, "the subscription")
            publish(again, 3, "b")
            await until_state(subscriber, SUSPECT, 7)


async def test_a_straggler_makes_nothing_suspect_where_the_ring_has_moved_on(
    notebook: Notebook,
) -> None:
    """The ring is too short to prove anything by the time we ask; but nothing is missing, and live
    batches go on."""

    def moving_on(self: VllmPublisher, first: int) -> list[Reply]:
        if first <= 4 and self.last_seq == 4:
            for _ in range(3):
                self.send_now(self.publish(b"a new one", on_wire=False))
        return self.replies(first)

    with VllmPublisher(ring=3) as publisher:
        async with live(
            publisher, notebook, replace(QUICK, first_probe_s=100.0, max_probe_s=100.0)
        ) as subscriber:
            publish(publisher, 5)
            await until_live(subscriber, 4)
            publisher.answer = moving_on
            publisher.send_raw([publisher.topic, seq_frame(1), b"made up"])
            await until_live(subscriber, 7)
    assert SUSPECT not in notebook.states
    assert notebook.seqs == list(range(8))


# --- what cannot be had ---------------------------------------------------------------------------


async def test_a_loss_the_ring_has_forgotten_leaves_the_source_suspect(notebook: Notebook) -> None:
    """vLLM makes no snapshots: what is known is kept, but not trusted."""
    with VllmPublisher(ring=10) as publisher:
        async with live(publisher, notebook) as subscriber:
            publish(publisher, 5)
            await until_live(subscriber, 4)
            publish(publisher, 50, on_wire=False)
            last = publish(publisher, 1)
            await until_state(subscriber, SUSPECT, last)
            assert notebook.seqs == [0, 1, 2, 3, 4, *range(46, 56)]
            assert notebook.reasons == []
            await until_live(subscriber, publisher.publish(b"clear"))


async def test_a_batch_that_was_never_sent_leaves_a_hole_that_is_passed(
    publisher: VllmPublisher, notebook: Notebook
) -> None:
    """A batch that vLLM fails to encode uses up its number; nothing will ever fill the gap."""
    async with live(publisher, notebook) as subscriber:
        publish(publisher, 5)
        await until_live(subscriber, 4)
        publish(publisher, 1, on_wire=False, in_ring=False)
        last = publish(publisher, 3)
        await until_state(subscriber, SUSPECT, last)
        await until_state(subscriber, SUSPECT, publish(publisher, 3))
    assert notebook.seqs == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]


async def test_a_batch_spoiled_on_the_way_is_fetched_again(
    publisher: VllmPublisher, notebook: Notebook
) -> None:
    """A malformed batch is a gap, and the ring may have it whole."""
    async with live(publisher, notebook) as subscriber:
        publish(publisher, 5)
        await until_live(subscriber, 4)
        publish(publisher, 1, on_wire=False)
        publisher.send_raw([publisher.topic, seq_frame(5), b"bad"])
        await until_live(subscriber, publish(publisher, 1))
        assert subscriber.statistics().malformed == 1
    assert notebook.seqs == list(range(7))


async def test_a_batch_that_is_malformed_in_the_ring_too_is_passed(
    publisher: VllmPublisher, notebook: Notebook
) -> None:
    """Asking again does not improve it: go on, and show that something is missing."""
    async with live(publisher, notebook) as subscriber:
        publish(publisher, 5)
        await until_live(subscriber, 4)
        publisher.publish(b"bad for good")
        last = publish(publisher, 3)
        await until_state(subscriber, SUSPECT, last)
        questions = subscriber.statistics().questions
        await until_state(subscriber, SUSPECT, publish(publisher, 20))
        assert subscriber.statistics().questions - questions < 20
    assert notebook.seqs == [0, 1, 2, 3, 4, *range(6, 29)]


async def test_a_ring_that_cannot_help_is_not_read_again_and_again(
    publisher: VllmPublisher, notebook: Notebook
) -> None:
    """Starting over from a ring with a broken batch ends where it began, and costs the engine ten
    thousand replies."""
    publish(publisher, 5)
    publisher.publish(b"bad for good")
    last = publish(publisher, 5)
    async with following(subscriber_to(publisher, notebook)) as subscriber:
        await until_state(subscriber, SUSPECT, last)
        asked = publisher.requests.count(seq_frame(0))
        await eventually(lambda: len(publisher.requests) > 10, "further looks at the tail")
        assert publisher.requests.count(seq_frame(0)) == asked
    assert (notebook.seqs, notebook.reasons) == ([0, 1, 2, 3, 4, 6, 7, 8, 9, 10], [])


async def test_what_comes_between_two_questions_is_not_thrown_away(notebook: Notebook) -> None:
    """Only an answer that was read to its end covers the batches before it; the answer that there
    are no snapshots covers none."""

    def with_news(self: VllmPublisher, first: int) -> list[Reply]:
        replies = self.replies(first)
        if 0 < first < 10**6:
            self.send_now(self.publish(b"news", on_wire=False))
        return replies

    with VllmPublisher(ring=10) as publisher:
        publish(publisher, 100)
        async with following(subscriber_to(publisher, notebook)) as subscriber:
            await until_state(subscriber, SUSPECT, 99)
            publisher.answer = with_news
            await eventually(
                lambda: len(notebook.batches) > 15, "some news", show=subscriber.statistics
            )
            assert subscriber.statistics().discarded == 0


async def test_a_batch_above_the_limit_is_refused_and_the_rest_goes_on(notebook: Notebook) -> None:
    """100 MB in one frame end the connection; the same frame waits in the ring, and must not stop
    the stream for good."""
    with VllmPublisher() as publisher:
        async with live(publisher, notebook) as subscriber:
            publish(publisher, 5)
            await until_live(subscriber, 4)
            publisher.publish(bytes(100_000_000))
            publish(publisher, 3)
            await eventually(lambda: subscriber.statistics().connections >= 2, "a new connection")

            def goes_on() -> bool:
                # What is sent before the publisher knows of the new subscription is lost.
                publish(publisher, 1)
                return len(notebook.batches) > 5

            await eventually(goes_on, "batches behind the large one")
            await until_state(subscriber, SUSPECT, publisher.last_seq)
            assert max(len(batch.payload) for batch in notebook.batches) < 100
            assert notebook.seqs[:5] == [0, 1, 2, 3, 4]


# --- a replay endpoint that does not behave -------------------------------------------------------


async def test_behind_a_black_hole_a_source_becomes_suspect_and_recovers_by_itself(
    publisher: VllmPublisher, notebook: Notebook
) -> None:
    """A firewall that drops, a dead NAT entry and a hung publisher all look alike: connected, and
    nothing comes. It was called live for as long as it lasted."""
    is_open = True
    publisher.answer = lambda self, first: self.replies(first) if is_open else []
    async with live(publisher, notebook, replace(QUICK, replay=ReplayLimits(silence_s=0.1))) as (
        subscriber
    ):
        await until_live(subscriber, publish(publisher, 5))
        is_open = False
        last = publish(publisher, 3, on_wire=False)
        await until_state(subscriber, SUSPECT, 4)
        assert subscriber.statistics().unanswered_in_a_row == 2
        is_open = True
        await until_live(subscriber, last)
        assert subscriber.statistics().unanswered_in_a_row == 0
    assert (notebook.seqs, notebook.reasons) == (list(range(8)), [])


async def test_a_batch_ends_the_doubt_that_a_silent_replay_endpoint_left(
    publisher: VllmPublisher, notebook: Notebook
) -> None:
    """Where events flow without a gap nothing is missing, whether or not the endpoint answers."""
    publisher.answer = lambda self, first: self.replies(first) if first > 2**60 else []
    quick = replace(QUICK, patience_s=0.1, replay=ReplayLimits(silence_s=0.05))
    async with following(subscriber_to(publisher, notebook, quick)) as subscriber:
        await eventually(lambda: publisher.subscribers > 0, "the subscription")
        await until_state(subscriber, SUSPECT, None)
        for last in range(3):
            publish(publisher, 1)
            await eventually(lambda: LIVE in notebook.states, "live", show=subscriber.statistics)
            await until_state(subscriber, SUSPECT, last)
            notebook.states.clear()
    assert notebook.seqs == [0, 1, 2]


async def test_a_quiet_source_without_a_replay_endpoint_stays_live(
    publisher: VllmPublisher, notebook: Notebook
) -> None:
    """Nobody is asked there, so silence is no evidence of anything."""
    async with following(without_replay(publisher, notebook)) as subscriber:
        await eventually(lambda: publisher.subscribers > 0, "the subscription")
        await until_live(subscriber, publish(publisher, 3))
        states = len(notebook.states)
        asyncio.get_running_loop().call_later(3 * QUICK.max_probe_s, publish, publisher, 1)
        await until_live(subscriber, 3)
        assert notebook.states[states:] == []


async def test_a_replay_endpoint_without_a_server_delays_the_stream_for_a_bounded_time(
    publisher: VllmPublisher, notebook: Notebook
) -> None:
    """A wrong port in the configuration must show as suspect, not as a replica without events."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        silent = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        subscriber = Subscriber(
            publisher.endpoint, notebook, replay_endpoint=silent, topic="kv-events", options=QUICK
        )
        async with following(subscriber):
            await until_state(subscriber, SUSPECT, None)
            await eventually(lambda: publisher.subscribers > 0, "the subscription")
            publish(publisher, 5)
            await until_live(subscriber, 4)  # It began with 0, so nothing is missing.
            publish(publisher, 1, on_wire=False)
            await until_state(subscriber, SUSPECT, publish(publisher, 2))
    assert notebook.seqs == [0, 1, 2, 3, 4, 6, 7]


async def test_what_was_missed_while_the_endpoint_was_down_is_made_up_for_later(
    publisher: VllmPublisher, notebook: Notebook
) -> None:
    """A replay endpoint that was down for a while costs time, not exactness."""
    down = True
    publisher.answer = lambda self, first: [] if down else self.replies(first)
    quick = replace(QUICK, patience_s=0.1, replay=ReplayLimits(silence_s=0.05))
    publish(publisher, 5)
    async with following(subscriber_to(publisher, notebook, quick)) as subscriber:
        await until_state(subscriber, SUSPECT, None)
        await eventually(lambda: publisher.subscribers > 0, "the subscription")
        publish(publisher, 5)
        await until_state(subscriber, SUSPECT, 9)
        assert notebook.seqs == [5, 6, 7, 8, 9]
        down = False
        await until_live(subscriber, 9)
        await until_live(subscriber, publish(publisher, 5))
    assert notebook.seqs == list(range(15))
    assert notebook.reasons == ["rebuild"]


async def test_a_ring_that_keeps_nothing_is_not_taken_for_a_restart(notebook: Notebook) -> None:
    """With `buffer_steps: 0` every answer is the end marker; that must not clear an index at every
    look."""
    with VllmPublisher(ring=0) as publisher:
        async with live(publisher, notebook) as subscriber:
            publish(publisher, 5)
            await until_live(subscriber, 4)
            questions = subscriber.statistics().questions
            await eventually(
                lambda: subscriber.statistics().questions > questions + 1,
                "two looks at a silent tail",
            )
            publish(publisher, 1, on_wire=False)
            await until_state(subscriber, SUSPECT, publish(publisher, 1))
    assert notebook.reasons == []
    assert notebook.seqs == [0, 1, 2, 3, 4, 6]


async def test_a_ring_that_keeps_nothing_leaves_a_late_subscriber_suspect(
    notebook: Notebook,
) -> None:
    """An empty answer means that nothing was published; a batch with a high number contradicts it,
    and must not be lost."""
    with VllmPublisher(ring=0, first_seq=57) as publisher:
        async with live(publisher, notebook) as subscriber:
            await until_state(subscriber, SUSPECT, publish(publisher, 3))
    assert notebook.seqs == [57, 58, 59]


def endless(publisher: VllmPublisher, first: int) -> list[Reply]:
    return [publisher.reply(seq, b"made up") for seq in range(first, first + 20_000)]


def backwards(publisher: VllmPublisher, first: int) -> list[Reply]:
    return [publisher.reply(seq, b"made up") for seq in (first + 3, first + 1, first + 2)]


def before_the_start(publisher: VllmPublisher, first: int) -> list[Reply]:
    return [publisher.reply(max(0, first - 1), b"made up"), publisher.end()]


def of_another_topic(publisher: VllmPublisher, first: int) -> list[Reply]:
    return [[b"", b"another", seq_frame(first), b"made up"], publisher.end()]


def huge(publisher: VllmPublisher, first: int) -> list[Reply]:
    return [publisher.reply(first, bytes(5_000_000)), publisher.end()]


def garbage(publisher: VllmPublisher, first: int) -> list[Reply]:
    rng = random.Random(first)
    return [
        [rng.randbytes(rng.randrange(12)) for _ in range(rng.randrange(1, 9))] for _ in range(50)
    ]


def with_a_loaded_end(publisher: VllmPublisher, first: int) -> list[Reply]:
    return [[b"", b"", END, b"more"]]


def with_a_short_number(publisher: VllmPublisher, first: int) -> list[Reply]:
    return [[b"", publisher.topic, b"\0\0\0\1", b"made up"], publisher.end()]


def far_ahead(publisher: VllmPublisher, first: int) -> list[Reply]:
    return [publisher.reply(2**63 + 5, b"made up"), publisher.end()]


@pytest.mark.parametrize(
    "answer",
    [
        endless,
        backwards,
        before_the_start,
        of_another_topic,
        huge,
        garbage,
        with_a_loaded_end,
        with_a_short_number,
        far_ahead,
    ],
)
async def test_an_answer_against_the_rules_is_cut_and_survived(
    answer: object, publisher: VllmPublisher, notebook: Notebook
) -> None:
    """Whatever the replay endpoint sends: no crash, no hang, and everything is repaired once it
    behaves."""
    limits = ReplayLimits(silence_s=0.2, total_s=2.0, batches=5000, payload_bytes=2_000_000)
    options = replace(
        QUICK, replay=limits, socket=SocketLimits(message_bytes=3_000_000, connect_timeout_s=2.0)
    )
    publish(publisher, 5)
    async with following(subscriber_to(publisher, notebook, options)) as subscriber:
        await until_live(subscriber, 4)
        publisher.answer = answer  # type: ignore[assignment]
        publish(publisher, 1, on_wire=False)
        publish(publisher, 1)
        await eventually(lambda: len(publisher.requests) > 3, "questions")
        await eventually(
            lambda: _is_hurt(subscriber),
            "a sign that the answer was refused",
            show=subscriber.statistics,
        )
        publisher.answer = None
        await until_live(subscriber, publish(publisher, 1))
        assert [batch.payload for batch in notebook.batches] == [
            f"a {seq}".encode() for seq in range(8)
        ]


def _is_hurt(subscriber: Subscriber) -> bool:
    statistics = subscriber.statistics()
    return statistics.unanswered + statistics.malformed + statistics.restarts > 0


CLEARED, STORED = (
    encode(EventBatch(0.0, [event]))
    for event in (AllBlocksCleared(), BlockStored([1], None, [1] * 16, "GPU", 0))
)


@pytest.mark.parametrize("count", [1, 5])
async def test_a_snapshot_that_names_the_next_batch_is_followed_by_that_batch(
    count: int, publisher: VllmPublisher, notebook: Notebook
) -> None:
    """The form proposed for vLLM: it begins with a clear and carries the number to go on with.
    Taken for the number it stands for, as in ours, one live batch would pass for known."""
    first = publish(publisher, 8 - count, in_ring=False) + 1

    def answer(self: VllmPublisher, start: int) -> list[Reply]:
        if start != int.from_bytes(SNAPSHOT_START, "big"):
            return self.replies(start)
        return [self.reply(first, CLEARED), self.reply(first, STORED), self.end()]

    publisher.answer = answer
    publish(publisher, count)
    async with following(subscriber_to(publisher, notebook)) as subscriber:
        await until_live(subscriber, 7)
        assert subscriber.statistics().snapshots == 1
        assert [batch.payload for batch in notebook.batches] == [
            CLEARED,
            STORED,
            *(f"a {seq}".encode() for seq in range(first, 8)),
        ]
        publish(publisher, 1)
        await until_live(subscriber, 8)
        assert subscriber.statistics().snapshots == 1


async def test_a_snapshot_before_the_first_batch_is_followed_by_batch_0(
    publisher: VllmPublisher, notebook: Notebook
) -> None:
    """An engine that has just started: the next batch is its first."""

    def answer(self: VllmPublisher, start: int) -> list[Reply]:
        is_snapshot = start == int.from_bytes(SNAPSHOT_START, "big")
        return [self.reply(0, CLEARED), self.end()] if is_snapshot else self.replies(start)

    publisher.answer = answer
    async with following(subscriber_to(publisher, notebook)) as subscriber:
        await until_live(subscriber, None)
        publish(publisher, 2)
        await until_live(subscriber, 1)
        assert [batch.payload for batch in notebook.batches] == [CLEARED, b"a 0", b"a 1"]


async def test_a_snapshot_before_the_first_batch_that_does_not_fit_is_thrown_away(
    publisher: VllmPublisher,
) -> None:
    """Who has published nothing has nothing to tell; the next look would have nothing to ask
    from, and the stream would die of it."""

    class Overfull(Notebook):
        def apply(self, batch: Batch) -> Effect:
            super().apply(batch)
            return Effect.INCOMPLETE if batch.payload == STORED else Effect.KEPT

    def answer(self: VllmPublisher, start: int) -> list[Reply]:
        is_snapshot = start == int.from_bytes(SNAPSHOT_START, "big")
        snapshot = [self.reply(0, CLEARED), self.reply(0, STORED), self.end()]
        return snapshot if is_snapshot else self.replies(start)

    publisher.answer, notebook = answer, Overfull()
    async with following(subscriber_to(publisher, notebook)) as subscriber:
        await eventually(lambda: len(publisher.requests) > 3, "looks after it")
        await until_live(subscriber, publish(publisher, 2))
        assert [batch.payload for batch in notebook.batches] == [b"a 0", b"a 1"]
        assert set(notebook.reasons) == {"broken snapshot"}


async def test_an_answer_that_begins_with_neither_layout_nor_clear_is_no_snapshot(
    publisher: VllmPublisher, notebook: Notebook
) -> None:
    """An endpoint that does not know the request may send what it has."""

    def answer(self: VllmPublisher, start: int) -> list[Reply]:
        is_snapshot = start == int.from_bytes(SNAPSHOT_START, "big")
        return [self.reply(5, STORED), self.end()] if is_snapshot else self.replies(start)

    publisher.answer = answer
    last = publish(publisher, 3)
    async with following(subscriber_to(publisher, notebook)) as subscriber:
        await until_live(subscriber, last)
        assert subscriber.statistics().snapshots == 0
        assert notebook.seqs == [0, 1, 2]


@pytest.mark.parametrize(
    "rest",
    [
        lambda publisher: [publisher.reply(3, b"made up"), publisher.end()],
        lambda publisher: [publisher.reply(4, b"bad"), publisher.end()],
        lambda publisher: [publisher.reply(4, b"made up")],
    ],
    ids=["of two states", "malformed", "without an end"],
)
async def test_a_snapshot_against_the_rules_is_thrown_away(
    rest: Callable[[VllmPublisher], list[Reply]], publisher: VllmPublisher, notebook: Notebook
) -> None:
    """Half a state is worse than none: nothing of it stays, and the ring is read instead."""

    def answer(self: VllmPublisher, first: int) -> list[Reply]:
        is_snapshot = first == int.from_bytes(SNAPSHOT_START, "big")
        return (
            [self.reply(4, layout("a name")), *rest(self)] if is_snapshot else self.replies(first)
        )

    publisher.answer = answer
    last = publish(publisher, 5)
    async with following(
        subscriber_to(publisher, notebook, replace(QUICK, replay=ReplayLimits(silence_s=0.2)))
    ) as subscriber:
        await until_live(subscriber, last)
        assert subscriber.statistics().snapshots == 0
    assert [batch.payload for batch in notebook.batches] == [
        f"a {seq}".encode() for seq in range(5)
    ]
    assert notebook.reasons == ["broken snapshot"]


async def test_an_answer_without_an_end_is_cut_by_its_length(
    publisher: VllmPublisher, notebook: Notebook
) -> None:
    """Thousands of replies a second, all in order and none of them the last, would otherwise be one
    endless answer."""
    publisher.answer = lambda self, first: endless(self, first)[:400]
    options = replace(QUICK, replay=ReplayLimits(silence_s=0.2, batches=50))
    async with following(subscriber_to(publisher, notebook, options)) as subscriber:
        await eventually(lambda: len(notebook.batches) > 500, "hundreds of batches")
        statistics = subscriber.statistics()
        assert statistics.batches / statistics.replays <= 50
        assert statistics.state is not LIVE


async def test_an_endpoint_that_is_another_process_every_time_does_not_stop_the_stream(
    publisher: VllmPublisher, notebook: Notebook
) -> None:
    """Restart upon restart, each answer without an end: live batches go on after a while."""
    publisher.answer = lambda self, first: [self.reply(first, random.randbytes(8))]
    options = replace(QUICK, patience_s=0.2, replay=ReplayLimits(silence_s=0.05))
    async with following(subscriber_to(publisher, notebook, options)) as subscriber:
        await until_state(subscriber, SUSPECT, 0)
        publish(publisher, 5)
        await eventually(lambda: len(notebook.batches) >= 4, "live batches")


async def test_an_answer_that_is_cut_short_is_continued_where_it_ended(
    publisher: VllmPublisher, notebook: Notebook
) -> None:
    """A ROUTER drops what a slow reader does not take, the end marker too: what came is kept, the
    rest asked for again."""
    publisher.answer = lambda self, first: self.replies(first)[:20]
    publish(publisher, 100)
    quick = replace(QUICK, replay=ReplayLimits(silence_s=0.05))
    async with following(subscriber_to(publisher, notebook, quick)) as subscriber:
        await until_live(subscriber, 99)
    assert notebook.seqs == list(range(100))


async def test_holes_in_an_answer_are_asked_for_again(
    publisher: VllmPublisher, notebook: Notebook
) -> None:
    """A ROUTER at its high-water mark drops from the middle, while the ring has everything."""

    def with_holes(self: VllmPublisher, first: int) -> list[Reply]:
        return [
            reply
            for place, reply in enumerate(self.replies(first))
            if place % 7 != 6 or reply == self.end()
        ]

    publish(publisher, 3)
    async with following(subscriber_to(publisher, notebook)) as subscriber:
        await until_live(subscriber, 2)
        publisher.answer = with_holes
        publish(publisher, 40, on_wire=False)
        await until_live(subscriber, 42)
        assert notebook.seqs == list(range(43))
        assert notebook.reasons == []


# --- hostile batches ------------------------------------------------------------------------------


async def test_ten_thousand_mutated_messages_change_nothing(notebook: Notebook) -> None:
    """Any process that reaches a collector can send anything: every message is refused and counted,
    none is believed."""
    rng = random.Random(7)
    with VllmPublisher() as publisher:
        publish(publisher, 50)
        async with following(subscriber_to(publisher, notebook)) as subscriber:
            await until_live(subscriber, 49)
            sent = 0
            grown = []
            for _ in range(20):
                for _ in range(500):
                    publisher.send_raw(_mutated(rng, publisher.topic))
                sent += 500
                await until_live(subscriber, publish(publisher, 1))
                await eventually(
                    lambda: _refused(subscriber) >= sent,  # noqa: B023
                    "all of them counted",
                    show=subscriber.statistics,
                )
                gc.collect()
                grown.append(sys.getallocatedblocks())
            statistics = subscriber.statistics()
    assert notebook.seqs == list(range(70))
    # The seventy true ones may come twice, since a replay overtakes them.
    assert sent <= _refused(subscriber) <= sent + 70
    assert notebook.reasons == []
    assert statistics.malformed > 1000
    assert statistics.discarded > 500
    assert grown[-1] - grown[4] < 5000


def _refused(subscriber: Subscriber) -> int:
    statistics = subscriber.statistics()
    return statistics.malformed + statistics.duplicates + statistics.discarded + statistics.overflow


def _mutated(rng: random.Random, topic: bytes) -> list[bytes]:
    """A message with our topic's beginning, so that it passes the subscription, and something wrong
    with it."""
    kind = rng.randrange(6)
    seq, payload = seq_frame(rng.randrange(1000)), rng.randbytes(rng.randrange(100))
    if kind == 0:
        return [
            topic,
            *[rng.randbytes(rng.randrange(10)) for _ in range(rng.choice((0, 1, 3, 4, 30)))],
        ]
    if kind == 1:
        return [topic, rng.randbytes(rng.choice((0, 1, 7, 9, 100))), payload]
    if kind == 2:
        return [topic + rng.randbytes(3), seq, payload]
    if kind == 3:
        return [topic, rng.choice((END, seq_frame(2**63), seq_frame(2**64 - 2))), payload]
    if kind == 4:
        return [topic, seq_frame(rng.choice((10**6, 2**40, 2**63 - 1))), payload]
    return [topic, seq_frame(rng.randrange(50)), b"made up " + payload]


async def test_a_flood_during_a_recovery_is_bounded_and_fetched_afterwards(
    publisher: VllmPublisher, notebook: Notebook
) -> None:
    """Live batches wait while the ring is asked, up to a bound; what is dropped is counted and
    fetched later."""
    asked = False

    def slowly(self: VllmPublisher, first: int) -> list[Reply]:
        nonlocal asked
        asked = True
        return self.replies(first) if len(self.ring) > 500 else []

    options = replace(
        QUICK,
        patience_s=10.0,
        backlog=BacklogLimits(batches=50),
        replay=ReplayLimits(silence_s=0.2),
    )
    async with live(publisher, notebook, options) as subscriber:
        publish(publisher, 5)
        await until_live(subscriber, 4)
        publisher.answer = slowly
        publish(publisher, 1, on_wire=False)
        publish(publisher, 1)
        await eventually(lambda: asked, "a question")
        publish(publisher, 400)
        await eventually(
            lambda: subscriber.statistics().overflow >= 300,
            "an overflow",
            show=subscriber.statistics,
        )
        last = publish(publisher, 200)
        await until_live(subscriber, last)
    assert notebook.seqs == list(range(last + 1))


async def test_nonsense_does_not_keep_us_asking(
    publisher: VllmPublisher, notebook: Notebook
) -> None:
    """Every made-up number looks like a gap; a flood of them must not become a flood of
    questions."""
    async with live(publisher, notebook) as subscriber:
        publish(publisher, 5)
        await until_live(subscriber, 4)
        before, started = subscriber.statistics().questions, time.monotonic()
        for seq in range(1000, 1300):
            publisher.send_raw([publisher.topic, seq_frame(seq), b"made up"])
            await asyncio.sleep(0.001)
        await eventually(
            lambda: subscriber.statistics().discarded == 300,
            "all of them refused",
            show=subscriber.statistics,
        )
        most = (time.monotonic() - started) / QUICK.spacing_s + 2
        assert 2 <= subscriber.statistics().questions - before <= most
    assert notebook.seqs == [0, 1, 2, 3, 4]


async def test_bytes_that_wait_are_bounded_too(
    publisher: VllmPublisher, notebook: Notebook
) -> None:
    """Fifty batches can be as large as fifty times the largest."""
    publisher.answer = lambda self, first: self.replies(first) if len(self.ring) > 100 else []
    options = replace(
        QUICK,
        patience_s=10.0,
        backlog=BacklogLimits(payload_bytes=100_000),
        replay=ReplayLimits(silence_s=0.2),
    )
    async with following(subscriber_to(publisher, notebook, options)) as subscriber:
        await eventually(lambda: bool(publisher.requests), "a question")
        for _ in range(20):
            publisher.publish(bytes(20_000))
        await eventually(
            lambda: subscriber.statistics().overflow >= 15,
            "an overflow",
            show=subscriber.statistics,
        )
        await until_live(subscriber, publish(publisher, 100))
    assert notebook.seqs == list(range(120))


async def test_what_waited_is_not_kept_while_the_publisher_is_away(
    publisher: VllmPublisher, notebook: Notebook
) -> None:
    """It may never come back, and 64 MiB may have waited; the next connection asks again."""
    publisher.answer = lambda _publisher, _first: []
    options = replace(QUICK, patience_s=60.0, replay=ReplayLimits(silence_s=0.2))
    async with following(subscriber_to(publisher, notebook, options)) as subscriber:
        await eventually(lambda: bool(publisher.requests), "a question")
        publish(publisher, 20, "waits")
        await eventually(lambda: len(_waiting_batches()) == 20, "a backlog")
        publisher.close()
        await eventually(
            lambda: subscriber.statistics().state is CONNECTING, "the loss of the connection"
        )
        await eventually(lambda: not _waiting_batches(), "no backlog")


def _waiting_batches() -> list[Batch]:
    batches = [each for each in gc.get_objects() if type(each) is Batch]
    return [each for each in batches if each.payload.startswith(b"waits")]


# --- coming and going -----------------------------------------------------------------------------


async def test_it_waits_for_a_publisher_that_comes_later(notebook: Notebook) -> None:
    """Engines take minutes to load their weights; the router is there first."""
    port = free_port()
    subscriber = Subscriber(f"tcp://127.0.0.1:{port}", notebook, topic="kv-events", options=QUICK)
    async with following(subscriber):
        assert subscriber.statistics().state is CONNECTING
        with VllmPublisher(port=port) as publisher:
            await until_state(subscriber, SUSPECT, None)
            await eventually(lambda: publisher.subscribers > 0, "the subscription")
            await until_live(subscriber, publish(publisher, 1))
        await eventually(
            lambda: subscriber.statistics().state is CONNECTING, "the loss of the connection"
        )


async def test_what_a_publisher_sent_before_it_left_is_still_taken(notebook: Notebook) -> None:
    """An engine flushes when it shuts down; by default libzmq throws away what was not read yet."""
    with zmq.Context() as context, context.socket(zmq.XPUB) as pub:
        pub.sndhwm = 0
        pub.bind("tcp://127.0.0.1:0")
        options = replace(QUICK, socket=SocketLimits(queue_messages=100_000))
        async with following(
            Subscriber(pub.last_endpoint.decode(), notebook, options=options)
        ) as subscriber:
            await until_state(subscriber, SUSPECT, None)
            await eventually(lambda: bool(pub.poll(0)), "the subscription")
            for seq in range(3000):
                pub.send_multipart([b"", seq_frame(seq), b"a"])
            pub.close(linger=5000)
            # Returns when everything has left; nothing has been read on our side yet.
            context.term()
            await eventually(
                lambda: subscriber.statistics().state is CONNECTING, "the end of the connection"
            )
    assert notebook.seqs == list(range(3000))


async def test_a_host_name_is_resolved(publisher: VllmPublisher, notebook: Notebook) -> None:
    """Kubernetes gives names; the look-up must not stop the loop or libzmq's only thread."""
    named = publisher.endpoint.replace("127.0.0.1", "localhost")
    async with following(
        Subscriber(named, notebook, topic="kv-events", options=QUICK)
    ) as subscriber:
        await until_state(subscriber, SUSPECT, None)
        await eventually(lambda: publisher.subscribers > 0, "the subscription")
        await until_live(subscriber, publish(publisher, 1))


@pytest.mark.parametrize(
    "endpoint",
    ["http://host:1", "tcp://host", "tcp://*:5557", "tcp://host:0", "tcp://host:99999", ""],
)
def test_an_invalid_endpoint_is_an_error(endpoint: str, notebook: Notebook) -> None:
    """Such a publisher would never come."""
    with pytest.raises(EndpointError):
        Subscriber(endpoint, notebook)
    with pytest.raises(EndpointError):
        Subscriber("tcp://host:1", notebook, replay_endpoint=endpoint)


async def test_an_address_that_libzmq_refuses_ends_the_task(notebook: Notebook) -> None:
    """Endless retries would look like a replica that is late."""
    with pytest.raises(EndpointError, match="ipc"):
        await Subscriber("ipc:///" + "long" * 100, notebook).run()
    assert notebook.states == [SourceState.DEAD]


async def test_a_peer_that_speaks_no_zmq_is_left_and_tried_again(notebook: Notebook) -> None:
    """A port that belongs to something else must not keep a connection open."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        options = replace(QUICK, socket=SocketLimits(connect_timeout_s=0.05))
        accepted = 0
        async with following(Subscriber(endpoint, notebook, options=options)):
            while accepted < 3:
                async with timeout(DEADLINE_S):
                    connection, _ = await asyncio.get_running_loop().sock_accept(listener)
                connection.close()
                accepted += 1
    assert notebook.states == [SourceState.DEAD]


async def test_a_cancellation_that_meets_a_found_address_is_not_lost(
    publisher: VllmPublisher,
) -> None:
    """A follower that missed its cancellation would outlive its replica."""
    port = publisher.endpoint.rsplit(":", 1)[1]
    for passes in range(300):
        task = asyncio.create_task(
            Subscriber(f"tcp://localhost:{port}", Notebook(), options=QUICK).run()
        )
        for _ in range(passes % 60):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=DEADLINE_S)
        assert task.cancelled(), f"goes on after {passes % 60} turns of the loop"


async def test_cancelling_leaves_nothing_behind_at_any_moment(
    publisher: VllmPublisher, notebook: Notebook
) -> None:
    """Replicas come and go for months: no socket, no descriptor and no task may stay."""
    publish(publisher, 300)
    before = len(asyncio.all_tasks())
    context = zmq.Context()
    for steps in range(1, 61, 2):
        subscriber = Subscriber(
            publisher.endpoint,
            Notebook(),
            replay_endpoint=publisher.replay_endpoint,
            topic="kv-events",
            options=QUICK,
            context=context,
        )
        task = asyncio.get_running_loop().create_task(subscriber.run())
        for _ in range(steps):
            await asyncio.sleep(0.0005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert subscriber.statistics().state is SourceState.DEAD
    assert len(asyncio.all_tasks()) == before
    context.term()  # Waits for every socket that is still open.


async def test_problems_are_reported_without_their_contents(
    publisher: VllmPublisher, notebook: Notebook
) -> None:
    """Payloads are prompts."""
    async with following(subscriber_to(publisher, notebook)) as subscriber:
        await until_live(subscriber, None)
        publisher.send_raw([publisher.topic, b"secret", b"secret"])
        publisher.send_raw([publisher.topic + b"secret", seq_frame(0), b"secret"])
        publisher.send_raw([publisher.topic, seq_frame(0), b"bad secret"])
        await eventually(lambda: subscriber.statistics().malformed >= 3, "three problems")
    assert not any("secret" in problem for problem in notebook.problems)
    assert len(notebook.problems) == subscriber.statistics().malformed


@pytest.mark.parametrize(
    "name",
    ["patience_s", "first_probe_s", "max_probe_s", "spacing_s", "first_retry_s", "max_retry_s"],
)
def test_delays_must_be_positive(name: str) -> None:
    """A delay of zero is a busy loop."""
    with pytest.raises(ValueError, match=name):
        SubscriberOptions(**{name: 0.0})


# --- sharing the loop -----------------------------------------------------------------------------


async def test_a_flood_from_one_publisher_delays_neither_the_loop_nor_the_others(
    notebook: Notebook,
) -> None:
    """One bad replica never slows the others."""
    other_notebook, pacer = Notebook(), Pacer()
    with VllmPublisher(ring=100_000) as flooding, VllmPublisher() as calm:
        publish(flooding, 30_000)
        flood = Subscriber(
            flooding.endpoint,
            notebook,
            replay_endpoint=flooding.replay_endpoint,
            topic="kv-events",
            options=QUICK,
            pacer=pacer,
        )
        quiet = Subscriber(
            calm.endpoint,
            other_notebook,
            replay_endpoint=calm.replay_endpoint,
            topic="kv-events",
            options=QUICK,
            pacer=pacer,
        )
        async with following(quiet), following(flood):
            await until_live(quiet, None)
            await eventually(lambda: len(notebook.batches) > 100, "the flood")
            pauses = []
            while len(notebook.batches) < 25_000:
                started = time.thread_time()
                await asyncio.sleep(0)
                pauses.append(time.thread_time() - started)
                if len(pauses) == 20:
                    last = publish(calm, 1)
                    await until_live(quiet, last)
                    assert len(notebook.batches) < 30_000, (
                        "the flood was over before the other one had its turn"
                    )
            await until_live(flood, 29_999)
    assert sorted(pauses)[len(pauses) // 2] < 0.02


async def test_turns_go_round() -> None:
    """The one that waits longest works next."""
    pacer = Pacer(slice_s=0.001)
    order: list[int] = []

    async def work(name: int) -> None:
        for _ in range(5):
            end = await pacer.turn()
            order.append(name)
            while time.monotonic() <= end:
                pass

    await asyncio.gather(*(work(name) for name in range(3)))
    assert len(order) == 15
    assert order[1:13] == [0, 1, 2] * 4


async def test_the_turn_of_a_cancelled_task_goes_to_the_next() -> None:
    """A removed replica must not take the turn with it."""
    pacer = Pacer(slice_s=0.001)
    end = await pacer.turn()
    while time.monotonic() <= end:
        pass
    first, second = asyncio.ensure_future(pacer.turn()), asyncio.ensure_future(pacer.turn())
    await asyncio.sleep(0)
    first.cancel()
    async with timeout(DEADLINE_S):
        await second


async def test_small_pieces_of_work_share_a_slice_and_the_loop_renews_it() -> None:
    """A batch now and then needs no call of its own in every pass."""
    pacer = Pacer(slice_s=1.0)
    ends: list[float] = []
    for _ in range(3):
        assert pacer.begin(10.0) == pytest.approx(11.0 - 0.3 * len(ends))
        pacer.end(0.3)
        ends.append(pacer.begin(10.0))
        await asyncio.sleep(0)
    pacer.end(0.3)
    assert pacer.begin(10.0) == 0.0
    turns: list[str] = []

    def work(name: str) -> bool:
        turns.append(name)
        return name != "idle"

    for name in ("idle", "first", "second"):
        pacer.call_in_turn(lambda _, name=name: work(name))
    assert turns == []
    await asyncio.sleep(0)
    assert turns == ["idle", "first"]
    await asyncio.sleep(0)
    assert turns == ["idle", "first", "second"]
    assert pacer.begin(10.0) == pytest.approx(11.0)


def test_delays_double_up_to_their_cap_and_differ() -> None:
    """A thousand routers that lost one engine must not come back in step."""
    backoff = Backoff(1.0, 8.0)
    delays = [backoff.next_delay() for _ in range(6)]
    assert all(
        most / 2 <= delay <= most for delay, most in zip(delays, (1, 2, 4, 8, 8, 8), strict=True)
    )
    backoff.reset()
    assert backoff.next_delay() <= 1.0
    assert len({Backoff(1.0, 8.0).next_delay() for _ in range(20)}) > 1
