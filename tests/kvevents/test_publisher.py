"""The publisher over real sockets: live batches, replies, drops, and shutdown."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import zmq

from kvevents.cache_source import CacheSource, EngineStep
from kvevents.codec import decode
from kvevents.errors import EndpointError, PublisherClosed
from kvevents.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheLayout,
    Event,
    EventBatch,
)
from kvevents.hashing import HashChain
from kvevents.layout import GroupKind, KVCacheGroup, KVCacheLayout
from kvevents.messages import Batch
from kvevents.publisher import (
    EventPublisher,
    NullEventPublisher,
    PublisherStatistics,
    ZmqEventPublisher,
    create_publisher,
    register_publisher,
)
from kvevents.publisher_config import PublisherConfig, ReplyLimits
from kvevents.stream import OfferResult, Stream
from router.index.base import SourceId
from tests.oracle.index.index import ReferenceIndex
from tests.support.blocks import Prefix, copies_held, tokens
from tests.support.publishing import SNAPSHOT, Client, Peer, new_client, until
from tests.support.recorded_publisher import RecordedStreamPublisher
from tests.support.vllm_publisher import free_port
from tests.support.waiting import DEADLINE_S

FULL = KVCacheGroup(GroupKind.FULL, 16)
LAYOUT = KVCacheLayout.build([FULL])
CHAIN = HashChain.from_seed("sha256_cbor")
QUIET = PublisherConfig(
    "tcp://127.0.0.1:0", "tcp://127.0.0.1:0", topic="kv-events", heartbeat_s=3600.0
)
PROMPT = Prefix(tokens(160))


@pytest.fixture
def client() -> Iterator[Client]:
    with new_client() as client:
        yield client


@pytest.fixture
def publisher() -> Iterator[ZmqEventPublisher]:
    with ZmqEventPublisher(QUIET, LAYOUT, CHAIN, data_parallel_rank=0) as publisher:
        yield publisher


def stored(number: int, padding: int = 0) -> list[Event]:
    """One block named *number*, in a batch as large as wanted."""
    return [BlockStored([number], None, tokens(16 + 16 * padding), "GPU", 0)]


def numbers(batches: Sequence[Batch]) -> list[int]:
    return [batch.seq for batch in batches]


def events_of(batches: Sequence[Batch]) -> list[Event]:
    return [event for batch in batches for event in decode(batch.payload).events]


def follow(client: Client, publisher: ZmqEventPublisher, hwm: int = 0) -> Peer:
    """A subscriber that gets everything published from now on."""
    peer = client.subscribe(publisher.endpoint, hwm=hwm)
    greeting, last = (
        BlockRemoved([b"greeting"], "GPU", 0),
        BlockRemoved([b"last greeting"], "GPU", 0),
    )
    while not peer.socket.poll(20):
        publisher.publish([greeting])
    publisher.publish([last])
    while list(peer.decoded()[1].events) != [last]:
        pass
    return peer


def publish_much(publisher: ZmqEventPublisher) -> None:
    """A hundred batches, more bytes than the kernel buffers for a client that does not read."""
    for number in range(100):
        publisher.publish(stored(number, padding=2000))
    settle(publisher, 100)


def settle(publisher: ZmqEventPublisher | RecordedStreamPublisher, last_seq: int) -> None:
    until(lambda: publisher.statistics().stream.last_seq >= last_seq, f"batch {last_seq} is sent")


# --- what goes out --------------------------------------------------------------------------------


def test_the_first_batch_is_the_layout(client: Client, publisher: ZmqEventPublisher) -> None:
    """A consumer learns groups, hash function and identity before any block."""
    first = client.dealer(publisher.replay_endpoint).answer(0)[0]
    (layout,) = decode(first.payload).events
    assert isinstance(layout, CacheLayout)
    assert first.seq == 0
    assert layout.publisher_id == publisher.publisher_id
    assert (layout.hash_algorithm, layout.none_hash) == (CHAIN.algorithm, CHAIN.none_hash)
    assert KVCacheLayout.from_event(layout) == LAYOUT


def test_the_layout_says_which_hints_the_engine_takes(client: Client) -> None:
    """A router sends hints about what to keep only to engines that say they read them."""
    with ZmqEventPublisher(replace(QUIET, retention_hints=1), LAYOUT) as publisher:
        (layout,) = decode(client.dealer(publisher.replay_endpoint).answer(0)[0].payload).events
    assert isinstance(layout, CacheLayout)
    assert layout.retention_hints == 1


def test_every_publisher_has_an_identity_of_its_own(publisher: ZmqEventPublisher) -> None:
    """A restarted engine must not be mistaken for the one before."""
    with ZmqEventPublisher(QUIET, LAYOUT) as other:
        assert other.publisher_id != publisher.publisher_id


def test_batches_arrive_in_order_under_topic_and_number(client: Client) -> None:
    """The three frames every consumer expects, vLLM's included."""
    with ZmqEventPublisher(QUIET, LAYOUT, data_parallel_rank=3) as publisher:
        peer = follow(client, publisher)
        begin, before = publisher.statistics().stream.last_seq + 1, time.time()
        for number in range(50):
            assert publisher.publish(stored(number))
        for number in range(50):
            topic, seq, payload = peer.message()
            batch = decode(payload)
            assert (topic, seq) == (b"kv-events", (begin + number).to_bytes(8, "big"))
            assert (batch.events, batch.data_parallel_rank) == (stored(number), 3)
            assert before <= batch.ts <= time.time()


def test_silence_is_broken_by_an_empty_batch_in_sequence(client: Client) -> None:
    """Otherwise a loss at the tail stays unseen until the next request."""
    with ZmqEventPublisher(replace(QUIET, heartbeat_s=0.02), LAYOUT) as publisher:
        peer = client.subscribe(publisher.endpoint)
        first, second = peer.decoded(), peer.decoded()
        assert (first[1].events, second[1].events) == ([], [])
        assert second[0] == first[0] + 1
        assert numbers(client.dealer(publisher.replay_endpoint).answer(first[0]))[:2] == [
            first[0],
            second[0],
        ]


def test_a_step_without_events_costs_no_number(publisher: ZmqEventPublisher) -> None:
    """An engine that decodes stores nothing most of the time."""
    assert publisher.publish([])
    assert publisher.publish(stored(1))
    settle(publisher, 1)
    assert publisher.statistics().stream.last_seq == 1


def test_an_item_and_the_end_wake_a_thread_that_has_nothing_to_do(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle engine's publisher looks seldom; its next event goes at once nevertheless."""
    monkeypatch.setattr("kvevents.stream._DOZE_S", 600.0)
    monkeypatch.setattr("kvevents.stream._AWAKE_S", 0.0)
    with ZmqEventPublisher(QUIET, LAYOUT) as publisher:
        peer, stream = follow(client, publisher), publisher._stream
        for number in range(20):
            until(lambda: stream._is_dozing, "it dozes")
            publisher.publish(stored(number))
            assert list(peer.decoded()[1].events) == stored(number)
        until(lambda: stream._is_dozing, "it dozes")
    assert not stream._thread.is_alive()


def test_an_event_that_cannot_be_encoded_is_left_out_of_its_batch(
    client: Client, publisher: ZmqEventPublisher
) -> None:
    """One bad value must cost neither the other events nor the thread."""
    bad = BlockStored([2**64], None, tokens(16), "GPU", 0)
    strange = BlockStored([7], None, tokens(16), "GPU", 0, extra_keys=[object()])
    publisher.publish([*stored(1), bad, strange, *stored(2)])
    settle(publisher, 1)
    assert publisher.statistics().rejected_events == 2
    replies = client.dealer(publisher.replay_endpoint).answer(1)
    assert events_of(replies) == [*stored(1), *stored(2)]
    assert len(client.dealer(publisher.replay_endpoint).answer(SNAPSHOT)) == 2


def test_an_event_with_a_wrong_type_stops_snapshots_not_the_stream(
    client: Client, publisher: ZmqEventPublisher
) -> None:
    """The kept state may have applied half of it, and is marked incomplete; the thread goes on."""
    publisher.publish([BlockStored([[1]], None, tokens(16), "GPU", 0)])  # type: ignore[list-item]
    publisher.publish(stored(2))
    settle(publisher, 2)
    assert publisher.statistics().rejected_events == 1
    assert not publisher.statistics().state_is_complete
    assert client.dealer(publisher.replay_endpoint).answer(SNAPSHOT) == []
    assert events_of(client.dealer(publisher.replay_endpoint).answer(2)) == stored(2)


# --- replay ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "expected"), [(0, range(11)), (4, range(4, 11)), (10, [10]), (11, []), (2**63, [])]
)
def test_a_replay_has_everything_from_its_start_on(
    client: Client, start: int, expected: Sequence[int]
) -> None:
    """And ends with the marker, even if it is empty."""
    with ZmqEventPublisher(QUIET, LAYOUT) as publisher:
        for number in range(10):
            publisher.publish(stored(number))
        settle(publisher, 10)
        assert numbers(client.dealer(publisher.replay_endpoint).answer(start)) == list(expected)
        until(
            lambda: publisher.statistics().stream.replies.replays_served == 1,
            "the replay is counted",
        )


def test_replies_carry_the_topic(client: Client, publisher: ZmqEventPublisher) -> None:
    """The form of vLLM from 0.26 on."""
    peer = client.dealer(publisher.replay_endpoint)
    peer.ask(0)
    assert peer.message()[:3] == [b"", b"kv-events", bytes(8)]


def test_a_start_that_the_ring_has_lost_begins_with_its_oldest(client: Client) -> None:
    """The gap shows in the numbers, and the other batches are still of use."""
    with ZmqEventPublisher(replace(QUIET, buffer_steps=5), LAYOUT) as publisher:
        for number in range(20):
            publisher.publish(stored(number))
        settle(publisher, 20)
        assert numbers(client.dealer(publisher.replay_endpoint).answer(3)) == [16, 17, 18, 19, 20]
        assert publisher.statistics().stream.ring_batches == 5


def test_a_replay_from_0_begins_with_the_layout_although_the_ring_has_lost_it(
    client: Client,
) -> None:
    """Under the number before the oldest batch, so that the consumer counts one gap and not two."""
    with ZmqEventPublisher(replace(QUIET, buffer_steps=5), LAYOUT) as publisher:
        for number in range(20):
            publisher.publish(stored(number))
        settle(publisher, 20)
        replies = client.dealer(publisher.replay_endpoint).answer(0)
        assert numbers(replies) == [15, 16, 17, 18, 19, 20]
        (layout,) = decode(replies[0].payload).events
        assert isinstance(layout, CacheLayout)
        assert layout.publisher_id == publisher.publisher_id


def test_the_ring_is_bounded_in_bytes(client: Client) -> None:
    """Batches of a long prefill are large: a bound of ten thousand of them is not enough."""
    with ZmqEventPublisher(replace(QUIET, buffer_bytes=10_000), LAYOUT) as publisher:
        for number in range(100):
            publisher.publish(stored(number, padding=20))
        settle(publisher, 100)
        statistics = publisher.statistics()
        assert 0 < statistics.stream.ring_bytes <= 10_000
        assert numbers(client.dealer(publisher.replay_endpoint).answer(50))[-1] == 100


def test_a_batch_larger_than_the_ring_leaves_it_empty(client: Client) -> None:
    """Then a replay from 0 still says who publishes."""
    with ZmqEventPublisher(replace(QUIET, buffer_bytes=1000), LAYOUT) as publisher:
        publisher.publish(stored(1, padding=200))
        settle(publisher, 1)
        (reply,) = client.dealer(publisher.replay_endpoint).answer(0)
        assert reply.seq == 1
        assert isinstance(decode(reply.payload).events[0], CacheLayout)


def test_a_replay_ends_where_the_stream_was_when_it_was_asked_for(client: Client) -> None:
    """Later batches are sent live; otherwise the replay of a busy engine would never end."""
    with ZmqEventPublisher(
        replace(QUIET, reply_limits=ReplyLimits(queued_messages=4)), LAYOUT
    ) as publisher:
        publish_much(publisher)
        peer = client.dealer(publisher.replay_endpoint, hwm=1)
        peer.ask(0)
        assert peer.socket.poll(int(DEADLINE_S * 1000))
        publisher.publish(stored(1))
        settle(publisher, 101)
        assert numbers(peer.reply()) == list(range(101))


def test_a_replay_longer_than_its_queue_is_complete(client: Client) -> None:
    """The publisher waits for a slower client as long as it reads at all."""
    limits = ReplyLimits(queued_messages=4)
    with ZmqEventPublisher(replace(QUIET, reply_limits=limits), LAYOUT) as publisher:
        for number in range(600):
            publisher.publish(stored(number, padding=30))
        settle(publisher, 600)
        assert numbers(client.dealer(publisher.replay_endpoint, hwm=1).answer(0)) == list(
            range(601)
        )


# --- snapshots ------------------------------------------------------------------------------------


def index_of(batches: Sequence[Batch]) -> dict[tuple[int, str], dict[Any, int]]:
    index, source = ReferenceIndex(), SourceId("late")
    for batch in batches:
        index.apply(source, batch.payload)
    return copies_held(index, source)


def test_a_snapshot_and_what_follows_it_equal_the_whole_stream(
    client: Client, publisher: ZmqEventPublisher
) -> None:
    """It contains everything up to the number it carries, and nothing after it."""
    for step in range(40):
        publisher.publish([PROMPT.stored(0, FULL, 0, 16 + step % 9 * 16)])
        publisher.publish(
            [PROMPT.removed(0, [16 + step % 5 * 16]), PROMPT.offloaded(0, [16 * (1 + step % 10)])]
        )
    peer = client.dealer(publisher.replay_endpoint)
    peer.ask(SNAPSHOT)
    for step in range(40):
        publisher.publish([PROMPT.removed(0, [16 + step % 3 * 16]), PROMPT.stored(0, FULL, 32, 64)])
    snapshot = peer.reply()
    settle(publisher, 120)
    assert len(set(numbers(snapshot))) == 1
    following = peer.answer(snapshot[0].seq + 1)
    assert index_of([*snapshot, *following]) == index_of(peer.answer(0))
    until(
        lambda: publisher.statistics().stream.replies.snapshots_served == 1,
        "the snapshot is counted",
    )


def test_a_snapshot_begins_with_the_layout(client: Client, publisher: ZmqEventPublisher) -> None:
    """A client that joins late knows neither groups nor identity."""
    publisher.publish(stored(1))
    settle(publisher, 1)
    layout, block = events_of(client.dealer(publisher.replay_endpoint).answer(SNAPSHOT))
    assert isinstance(layout, CacheLayout)
    assert block == stored(1)[0]


def test_a_snapshot_of_an_empty_cache_is_its_layout(
    client: Client, publisher: ZmqEventPublisher
) -> None:
    """Empty and refused are different replies."""
    (layout,) = client.dealer(publisher.replay_endpoint).answer(SNAPSHOT)
    assert isinstance(decode(layout.payload).events[0], CacheLayout)
    assert layout.seq == 0


def test_every_client_that_asks_gets_a_snapshot(
    client: Client, publisher: ZmqEventPublisher
) -> None:
    """All routers start at once after an upgrade."""
    for number in range(2000):
        publisher.publish(stored(number))
    settle(publisher, 2000)
    peers = [client.dealer(publisher.replay_endpoint) for _ in range(12)]
    for peer in peers:
        peer.ask(SNAPSHOT)
    for peer in peers:
        assert sum(len(hashes) for hashes in index_of(peer.reply()).values()) == 2000


def test_a_snapshot_in_progress_is_not_what_the_next_client_gets(client: Client) -> None:
    """Readers share one state only as long as nothing changes."""
    with ZmqEventPublisher(
        replace(QUIET, reply_limits=ReplyLimits(queued_messages=4)), LAYOUT
    ) as publisher:
        publish_much(publisher)
        slow, quick = (
            client.dealer(publisher.replay_endpoint, hwm=1),
            client.dealer(publisher.replay_endpoint),
        )
        slow.ask(SNAPSHOT)
        assert slow.socket.poll(int(DEADLINE_S * 1000))
        publisher.publish([AllBlocksCleared()])
        settle(publisher, 101)
        assert numbers(quick.answer(SNAPSHOT)) == [101]
        snapshot = slow.reply()
        assert snapshot[0].seq == 100
        assert index_of(snapshot) == {(0, "GPU"): dict.fromkeys(range(100), 1)}


# --- a full queue ---------------------------------------------------------------------------------


class GatedSource:
    """A source that blocks the stream's thread until the gate is opened."""

    def __init__(self) -> None:
        self.entered, self.gate = threading.Event(), threading.Event()
        self.noted: list[int] = []
        self.losses = 0

    def opening(self) -> bytes | None:
        return None

    def payload(self, item: int) -> bytes:
        self.entered.set()
        assert self.gate.wait(DEADLINE_S)
        return str(item).encode()

    def note(self, item: int) -> None:
        self.noted.append(item)

    def note_loss(self) -> None:
        self.losses += 1

    def heartbeat(self) -> bytes | None:
        return None

    def snapshot(self, seq: int) -> Iterator[bytes] | None:
        return None


def test_offering_never_waits_for_a_thread_that_is_blocked(client: Client) -> None:
    """The engine's step must not depend on the network; drops show in the numbers."""
    source = GatedSource()
    stream: Stream[int] = Stream(replace(QUIET, max_queue_size=3), source, 0)
    assert stream.offer(0) is OfferResult.SENT
    assert source.entered.wait(DEADLINE_S)
    results = [stream.offer(item) for item in range(1, 10)]
    assert results == [OfferResult.SENT] * 3 + [OfferResult.UNSENT] * 3 + [OfferResult.LOST] * 3
    source.gate.set()
    until(lambda: stream.statistics().last_seq == 9, "all numbers are used up")
    assert stream.offer(10) is OfferResult.SENT
    until(lambda: stream.statistics().last_seq == 10, "the stream goes on")
    sent = client.dealer(stream.replay_endpoint).answer(0)
    stream.close(5.0)
    assert [int(batch.payload) for batch in sent] == [0, 1, 2, 3, 10]
    # The three lost ones are left out as soon as the loss is known, before the queued items.
    assert numbers(sent) == [0, 4, 5, 6, 10]
    assert (source.noted, source.losses) == ([4, 5, 6], 1)
    assert (stream.statistics().dropped, stream.statistics().lost) == (6, 3)


def overload(
    publisher: ZmqEventPublisher, burst: int, wanted: int
) -> tuple[list[Event], list[bool]]:
    """Publish faster than the thread can send until *wanted* batches are dropped.

    Returns all events, also dropped ones, and for each batch whether it was sent.
    """
    events: list[Event] = []
    taken: list[bool] = []
    while publisher.statistics().stream.dropped < wanted:
        until(lambda: publisher.statistics().stream.queue_depth == 0, "the queue is empty")
        for _ in range(burst):
            batch = (
                stored(len(taken))
                if len(taken) % 3
                else [BlockRemoved([len(taken) - 1], "GPU", 0), *stored(len(taken))]
            )
            taken.append(publisher.publish(batch))
            events += batch
    until(lambda: publisher.statistics().stream.queue_depth == 0, "the queue is empty")
    settle(publisher, len(taken))
    return events, taken


def test_a_dropped_batch_leaves_a_gap_and_is_in_the_next_snapshot(client: Client) -> None:
    """The gap makes consumers ask, and the snapshot must be right although the ring lacks it."""
    with ZmqEventPublisher(replace(QUIET, max_queue_size=40), LAYOUT) as publisher:
        events, taken = overload(publisher, burst=80, wanted=30)
        peer = client.dealer(publisher.replay_endpoint)
        replayed, snapshot = peer.answer(0), peer.answer(SNAPSHOT)
        statistics = publisher.statistics()
    assert statistics.stream.last_seq == len(taken)
    assert statistics.stream.dropped == taken.count(False)
    assert numbers(replayed) == [0] + [
        number for number, is_taken in enumerate(taken, start=1) if is_taken
    ]
    index, source = ReferenceIndex(), SourceId("all")
    index.apply(source, EventBatch(0.0, events))
    assert index_of(snapshot) == copies_held(index, source)
    assert snapshot[0].seq == len(taken)


def test_a_gap_at_the_tail_shows_with_the_next_heartbeat(client: Client) -> None:
    """The last batches before an engine falls idle may be the dropped ones."""
    with ZmqEventPublisher(replace(QUIET, max_queue_size=1, heartbeat_s=0.05), LAYOUT) as publisher:
        peer = client.subscribe(publisher.endpoint)
        peer.batch()
        while publisher.publish(stored(1)):
            pass
        last = publisher.statistics().stream.last_seq
        until(lambda: publisher.statistics().stream.queue_depth == 0, "the queue is empty")
        while (heartbeat := peer.decoded())[1].events or heartbeat[0] <= last:
            pass
        replayed = numbers(client.dealer(publisher.replay_endpoint).answer(0))
        assert set(range(heartbeat[0])) - set(replayed)


def test_events_that_the_kept_state_missed_make_it_refuse_snapshots(client: Client) -> None:
    """No reply is better than a wrong one: the consumer then knows that blocks are missing."""
    with ZmqEventPublisher(replace(QUIET, max_queue_size=1), LAYOUT) as publisher:
        overload(publisher, burst=50, wanted=100)
        statistics = publisher.statistics()
        assert not statistics.state_is_complete
        assert client.dealer(publisher.replay_endpoint).answer(SNAPSHOT) == []
        publisher.publish([AllBlocksCleared()])
        settle(publisher, statistics.stream.last_seq + 1)
        assert client.dealer(publisher.replay_endpoint).answer(SNAPSHOT) == []
        assert publisher.statistics().stream.replies.snapshots_served == 0


def test_an_engine_that_reports_its_state_makes_snapshots_right_again(client: Client) -> None:
    """Asked on its own thread, where the state cannot change meanwhile, and only after a loss."""
    held: list[int] = []
    asked: list[threading.Thread] = []

    def present_state() -> list[Event]:
        asked.append(threading.current_thread())
        return [event for number in held for event in stored(number)]

    def step(publisher: ZmqEventPublisher) -> None:
        held.append(len(held))
        publisher.publish(stored(held[-1]))

    with ZmqEventPublisher(
        replace(QUIET, max_queue_size=1), LAYOUT, present_state=present_state
    ) as publisher:
        while not asked:
            for _ in range(50):
                step(publisher)
            settle(publisher, len(held))
        step(publisher)
        settle(publisher, len(held))
        assert set(asked) == {threading.current_thread()}
        assert publisher.statistics().state_is_complete
        snapshot = client.dealer(publisher.replay_endpoint).answer(SNAPSHOT)
        assert index_of(snapshot) == {(0, "GPU"): dict.fromkeys(held, 1)}
        asked.clear()
        step(publisher)
        settle(publisher, len(held))
        assert asked == []
        assert publisher.statistics().state_blocks == len(held)


def test_a_state_that_waited_while_more_was_lost_does_not_make_snapshots_right(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread hears of a loss before it takes what was queued: the state that was presented then
    may lack what was lost behind it."""
    allowed = threading.Semaphore(0)

    def after_a_permit(name: str) -> None:
        takes = getattr(CacheSource, name)

        def waits(source: CacheSource, item: EngineStep) -> object:
            assert allowed.acquire(timeout=DEADLINE_S)
            return takes(source, item)

        monkeypatch.setattr(CacheSource, name, waits)

    after_a_permit("payload")
    after_a_permit("note")
    held: list[int] = []

    def present_state() -> list[Event]:
        return [event for number in held for event in stored(number)]

    config = replace(QUIET, max_queue_size=2)
    with ZmqEventPublisher(config, LAYOUT, present_state=present_state) as slow:

        def until_waiting(count: int) -> None:
            until(lambda: slow.statistics().stream.queue_depth == count, f"{count} wait")

        def step(*depths: int) -> None:
            """Publish a step for each; then so many wait."""
            for depth in depths:
                held.append(len(held))
                slow.publish(stored(held[-1]))
                until_waiting(depth)

        step(0, 1, 2, 3, 4, 4)  # the first is being written, the last is lost
        for left in (3, 2, 1):
            allowed.release()
            until_waiting(left)
        step(2, 3, 4, 4)  # the first has the state, the last is lost again
        assert slow.statistics().stream.lost == 2
        allowed.release(5)
        settle(slow, len(held))
        assert client.dealer(slow.replay_endpoint).answer(SNAPSHOT) == []
        allowed.release()
        step(0)
        settle(slow, len(held))
        snapshot = client.dealer(slow.replay_endpoint).answer(SNAPSHOT)
        assert index_of(snapshot) == {(0, "GPU"): dict.fromkeys(held, 1)}


# --- hostile and slow clients ---------------------------------------------------------------------

MALFORMED: list[list[bytes]] = [
    [b""],
    [b"", b""],
    [b"", b"1234567"],
    [b"", b"123456789"],
    [b"", b"snapshots"],
    [bytes(8)],
    [b"x", bytes(8)],
    [b"", bytes(8), b""],
    [b"", b"", bytes(8)],
    [b""] * 1000,
    [b"", bytes(1000)],
]


def test_malformed_requests_are_counted_and_get_no_reply(
    client: Client, publisher: ZmqEventPublisher
) -> None:
    """Anyone who reaches the port can send anything."""
    peer = client.dealer(publisher.replay_endpoint)
    for frames in MALFORMED:
        peer.socket.send_multipart(frames)
    until(
        lambda: publisher.statistics().stream.replies.malformed_requests == len(MALFORMED),
        "all are counted",
    )
    assert numbers(peer.answer(0)) == [0]


def test_a_huge_request_ends_the_connection_not_the_publisher(
    client: Client, publisher: ZmqEventPublisher
) -> None:
    """A frame beyond the limit is never held in memory."""
    peer = client.dealer(publisher.replay_endpoint)
    monitor = peer.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    peer.socket.send_multipart([b"", bytes(1_000_000)])
    is_disconnected = monitor.poll(int(DEADLINE_S * 1000))
    peer.socket.disable_monitor()
    monitor.close(linger=0)
    assert is_disconnected
    assert numbers(client.dealer(publisher.replay_endpoint).answer(0)) == [0]
    assert publisher.statistics().stream.replies.malformed_requests == 0


@pytest.mark.parametrize(
    "greeting",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x01\x00", b"\xff" + bytes(7) + b"\x01\x7f\x01\x02"],
)
def test_a_peer_of_another_protocol_is_disconnected(
    client: Client, publisher: ZmqEventPublisher, greeting: bytes
) -> None:
    """libzmq mistakes it for one from before 2012, and its code for those can abort the process
    while a socket closes."""
    for endpoint in (publisher.endpoint, publisher.replay_endpoint):
        host, port = str(endpoint).removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as stranger:
            stranger.sendall(greeting + bytes(64))
            with suppress(ConnectionResetError):
                while stranger.recv(4096):
                    pass
    assert numbers(client.dealer(publisher.replay_endpoint).answer(0)) == [0]


def test_a_flood_of_requests_is_read_at_a_bounded_rate(client: Client) -> None:
    """Further requests wait in the sender's memory, and other clients still get their turn."""
    limits = ReplyLimits(requests_per_s=20)
    with ZmqEventPublisher(replace(QUIET, reply_limits=limits), LAYOUT) as publisher:
        flood = client.dealer(publisher.replay_endpoint)
        began = time.monotonic()
        for _ in range(5000):
            flood.socket.send_multipart([b"", b"?"])
        assert numbers(client.dealer(publisher.replay_endpoint).answer(0)) == [0]
        malformed, seconds = (
            publisher.statistics().stream.replies.malformed_requests,
            time.monotonic() - began,
        )
        assert malformed <= 20 + 20 * seconds + 1


@pytest.fixture
def stalling() -> Iterator[ZmqEventPublisher]:
    """A publisher with much to replay, little patience and one reply at a time."""
    limits = ReplyLimits(concurrent=1, queued_messages=4, stall_s=0.3)
    with ZmqEventPublisher(replace(QUIET, reply_limits=limits), LAYOUT) as publisher:
        publish_much(publisher)
        yield publisher


def test_a_client_that_never_reads_holds_up_neither_the_stream_nor_the_next_client(
    client: Client, stalling: ZmqEventPublisher
) -> None:
    """It loses the rest of its reply, and its slot."""
    live = follow(client, stalling)
    stalled = client.dealer(stalling.replay_endpoint, hwm=1)
    stalled.ask(0)
    assert stalled.socket.poll(int(DEADLINE_S * 1000))
    last = stalling.statistics().stream.last_seq
    stalling.publish(stored(1))
    assert live.batch().seq == last + 1
    assert numbers(client.dealer(stalling.replay_endpoint).answer(90)) == list(range(90, last + 2))
    assert stalling.statistics().stream.replies.replies_aborted == 1


def test_a_client_that_leaves_in_the_middle_frees_its_slot(
    client: Client, stalling: ZmqEventPublisher
) -> None:
    """Routers are restarted while they recover."""
    leaving = client.dealer(stalling.replay_endpoint, hwm=1)
    leaving.ask(0)
    assert leaving.socket.poll(int(DEADLINE_S * 1000))
    client.leave(leaving)
    assert numbers(client.dealer(stalling.replay_endpoint).answer(100)) == [100]
    assert stalling.statistics().stream.replies.replies_aborted == 1


def test_a_client_that_asks_again_gets_the_new_reply(client: Client) -> None:
    """A REQ socket sees only the first reply and asks on; it must not have to wait for the rest of
    the old one."""
    limits = ReplyLimits(queued_messages=4, concurrent=2)
    with ZmqEventPublisher(replace(QUIET, reply_limits=limits), LAYOUT) as publisher:
        publish_much(publisher)
        peer = client.dealer(publisher.replay_endpoint, hwm=1)
        peer.ask(0)
        assert peer.socket.poll(int(DEADLINE_S * 1000))
        peer.ask(99)
        until(
            lambda: publisher.statistics().stream.replies.replies_aborted == 1,
            "the first reply is given up",
        )
        seen = numbers(peer.reply())
        assert seen[-2:] == [99, 100]
        assert 0 < len(seen) < 100


def test_live_batches_go_out_between_the_parts_of_a_long_snapshot(client: Client) -> None:
    """A large cache takes seconds to send; other routers must not miss events meanwhile."""
    limits = ReplyLimits(queued_messages=4)
    with ZmqEventPublisher(replace(QUIET, reply_limits=limits), LAYOUT) as publisher:
        for first in range(0, 180_000, 600):
            publisher.publish(
                [BlockStored(list(range(first, first + 600)), None, tokens(9600), "GPU", 0)]
            )
        live = follow(client, publisher)
        # It is more than the kernel buffers, so that it cannot be over before it is read.
        asking = client.dealer(publisher.replay_endpoint, hwm=1)
        asking.ask(SNAPSHOT)
        asking.message()
        last = publisher.statistics().stream.last_seq
        publisher.publish([AllBlocksCleared()])
        assert live.batch().seq == last + 1
        assert publisher.statistics().stream.replies.snapshots_served == 0
        assert sum(len(hashes) for hashes in index_of(asking.reply()).values()) == 180_000


# --- the end --------------------------------------------------------------------------------------


def test_everything_accepted_is_sent_before_shutdown_returns(client: Client) -> None:
    """An engine's last evictions matter to the router when the engine is back."""
    publisher = ZmqEventPublisher(QUIET, LAYOUT)
    peer = follow(client, publisher)
    begin = publisher.statistics().stream.last_seq + 1
    for number in range(5000):
        assert publisher.publish(stored(number))
    publisher.shutdown()
    assert publisher.statistics().stream.last_seq == begin + 4999
    assert [peer.batch().seq for _ in range(5000)] == list(range(begin, begin + 5000))


def test_shutdown_waits_for_a_subscriber_that_is_still_reading(client: Client) -> None:
    """Batches in the sender's memory are not sent yet."""
    publisher = ZmqEventPublisher(QUIET, LAYOUT)
    peer = follow(client, publisher, hwm=1)
    begin = publisher.statistics().stream.last_seq + 1
    for number in range(100):
        publisher.publish(stored(number, padding=2000))
    shutdown = threading.Thread(target=publisher.shutdown, args=(60.0,))
    shutdown.start()
    until(lambda: publisher.statistics().stream.last_seq == begin + 99, "all is on its way")
    assert [peer.batch().seq for _ in range(100)] == list(range(begin, begin + 100))
    shutdown.join()


def test_shutdown_leaves_no_thread_and_no_address_behind(client: Client) -> None:
    """A restarted engine binds the same ports."""
    before = set(threading.enumerate())
    publisher = ZmqEventPublisher(QUIET, LAYOUT)
    client.dealer(publisher.replay_endpoint).answer(0)
    addresses = replace(
        QUIET, endpoint=publisher.endpoint, replay_endpoint=publisher.replay_endpoint
    )
    publisher.shutdown()
    publisher.shutdown()
    assert set(threading.enumerate()) <= before
    with ZmqEventPublisher(addresses, LAYOUT) as again:
        assert (again.endpoint, again.replay_endpoint) == (
            publisher.endpoint,
            publisher.replay_endpoint,
        )
        assert numbers(client.dealer(again.replay_endpoint).answer(0)) == [0]


def test_a_subscriber_that_never_reads_does_not_hold_up_shutdown(client: Client) -> None:
    """The time to flush is bounded."""
    publisher = ZmqEventPublisher(QUIET, LAYOUT)
    follow(client, publisher, hwm=1)
    for number in range(100):
        publisher.publish(stored(number, padding=2000))
    began = time.monotonic()
    publisher.shutdown(timeout_s=0.2)
    assert time.monotonic() - began < DEADLINE_S


@pytest.mark.parametrize("kind", ["null", "zmq"])
def test_nothing_is_accepted_after_shutdown(kind: str) -> None:
    """A caller that goes on publishing has a bug, and gets an error."""
    publisher = create_publisher(replace(QUIET, kind=kind), LAYOUT)
    assert publisher.publish(stored(1))
    publisher.shutdown()
    publisher.shutdown()
    for events in (stored(1), []):
        with pytest.raises(PublisherClosed, match="shut down"):
            publisher.publish(events)
    assert isinstance(publisher.statistics(), PublisherStatistics)


# --- addresses ------------------------------------------------------------------------------------


def test_a_rank_has_ports_of_its_own(client: Client) -> None:
    """Every data-parallel rank publishes for itself, from one configuration."""
    port, replay_port = free_port(), free_port()
    config = replace(
        QUIET, endpoint=f"tcp://127.0.0.1:{port}", replay_endpoint=f"tcp://127.0.0.1:{replay_port}"
    )
    with ZmqEventPublisher(config, LAYOUT, data_parallel_rank=2) as publisher:
        assert publisher.endpoint == f"tcp://127.0.0.1:{port + 2}"
        assert publisher.replay_endpoint == f"tcp://127.0.0.1:{replay_port + 2}"
        (layout,) = client.dealer(publisher.replay_endpoint).answer(0)
        assert decode(layout.payload).data_parallel_rank == 2


def test_ranks_of_one_process_share_a_context_by_name() -> None:
    """Tests and single-process engines use `inproc`."""
    config = replace(QUIET, endpoint="inproc://live", replay_endpoint="inproc://replay")
    context: zmq.Context[Any] = zmq.Context()
    with (
        ZmqEventPublisher(config, LAYOUT, context=context) as first,
        ZmqEventPublisher(config, LAYOUT, data_parallel_rank=1, context=context) as second,
    ):
        assert (first.endpoint, second.endpoint) == ("inproc://live", "inproc://live_dp1")
        assert second.replay_endpoint == "inproc://replay_dp1"
        client = Client(context)
        (layout,) = client.dealer(second.replay_endpoint).answer(0)
        assert decode(layout.payload).data_parallel_rank == 1
        assert len(client.dealer(second.replay_endpoint).answer(SNAPSHOT)) == 1
        client.close()
    context.term()


def test_inproc_without_a_context_uses_the_common_one() -> None:
    """Both ends must find each other without passing a context around."""
    config = replace(QUIET, endpoint="inproc://common", replay_endpoint="inproc://common-replay")
    with ZmqEventPublisher(config, LAYOUT) as publisher:
        client = Client(zmq.Context.instance())
        assert numbers(client.dealer(publisher.replay_endpoint).answer(0)) == [0]
        client.close()


def test_without_a_replay_endpoint_batches_are_still_sent(client: Client) -> None:
    """As in vLLM's default configuration."""
    with ZmqEventPublisher(replace(QUIET, replay_endpoint=None), LAYOUT) as publisher:
        assert publisher.replay_endpoint is None
        peer = follow(client, publisher)
        publisher.publish(stored(5))
        assert peer.decoded()[1].events == stored(5)
        assert publisher.statistics().stream.replies.replays_served == 0


def test_an_address_in_use_is_refused_and_nothing_stays_open() -> None:
    """To the router, two engines on one port would be one."""
    before = set(threading.enumerate())
    with ZmqEventPublisher(QUIET, LAYOUT) as publisher:
        with pytest.raises(
            EndpointError,
            match=f"^endpoint: cannot bind {publisher.endpoint}: Address already in use",
        ):
            ZmqEventPublisher(replace(QUIET, endpoint=publisher.endpoint), LAYOUT)
        with pytest.raises(EndpointError, match=r"^replay_endpoint: cannot bind"):
            ZmqEventPublisher(replace(QUIET, replay_endpoint=publisher.endpoint), LAYOUT)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("rank", [-1, 65536])
def test_a_rank_out_of_range_is_refused(rank: int) -> None:
    """A wrong rank would publish under another's address."""
    with pytest.raises(ValueError, match="data_parallel_rank"):
        ZmqEventPublisher(QUIET, LAYOUT, data_parallel_rank=rank)


# --- by configuration -----------------------------------------------------------------------------


def test_no_configuration_means_no_events() -> None:
    """An engine makes a publisher in any case."""
    publisher = create_publisher(None, LAYOUT)
    assert isinstance(publisher, NullEventPublisher)
    assert publisher.publish(stored(1))
    assert publisher.statistics() == PublisherStatistics()


def test_the_factory_passes_everything_on(client: Client) -> None:
    """It builds the same as the class itself."""
    with create_publisher(QUIET, LAYOUT, CHAIN, 3) as publisher:
        assert isinstance(publisher, ZmqEventPublisher)
        (first,) = client.dealer(publisher.replay_endpoint).answer(0)
        batch = decode(first.payload)
        assert isinstance(batch.events[0], CacheLayout)
        assert (batch.data_parallel_rank, batch.events[0].hash_algorithm) == (3, CHAIN.algorithm)


def test_further_kinds_can_be_registered_once() -> None:
    """Other transports plug in without a change here."""
    built: list[tuple[PublisherConfig, int]] = []

    def build(
        config: PublisherConfig, layout: KVCacheLayout, chain: HashChain | None, rank: int
    ) -> EventPublisher:
        built.append((config, rank))
        return NullEventPublisher()

    register_publisher("test-kind", build)
    config = replace(QUIET, kind="test-kind")
    assert isinstance(create_publisher(config, LAYOUT, None, 1), NullEventPublisher)
    assert built == [(config, 1)]
    with pytest.raises(ValueError, match="'test-kind' is registered already"):
        register_publisher("test-kind", build)


def test_an_unknown_kind_is_refused_by_name() -> None:
    """The error lists the known kinds."""
    with pytest.raises(ValueError, match=r"kind: 'kafka' is unknown; known: null, zmq"):
        create_publisher(replace(QUIET, kind="kafka"), LAYOUT)


# --- recordings -----------------------------------------------------------------------------------


def test_a_recording_is_played_verbatim_under_new_numbers(client: Client) -> None:
    """A consumer reads exactly what the recorded engine sent."""
    payloads = [b"not even msgpack", b"", b"\x93\xcb" + bytes(8) + b"\x90\xc0"]
    with RecordedStreamPublisher(QUIET) as publisher:
        for payload in payloads:
            assert publisher.publish_raw(payload)
        settle(publisher, 2)
        peer = client.dealer(publisher.replay_endpoint)
        assert peer.answer(0) == [Batch(number, payload) for number, payload in enumerate(payloads)]
        assert peer.answer(1) == [Batch(1, payloads[1]), Batch(2, payloads[2])]


def test_a_recording_is_sent_live(client: Client) -> None:
    """On the same three frames."""
    with RecordedStreamPublisher(QUIET) as publisher:
        peer = client.subscribe(publisher.endpoint)
        while not peer.socket.poll(20):
            publisher.publish_raw(b"greeting")
        assert peer.message()[::2] == [b"kv-events", b"greeting"]


def test_a_recording_has_no_snapshot_like_vllm(client: Client) -> None:
    """Eight bytes that vLLM reads as a huge number; the router has to fall back."""
    with RecordedStreamPublisher(replace(QUIET, heartbeat_s=0.01, buffer_steps=2)) as publisher:
        peer = client.dealer(publisher.replay_endpoint)
        assert peer.answer(SNAPSHOT) == []
        assert peer.answer(0) == []
        for number in range(5):
            publisher.publish_raw(str(number).encode())
        settle(publisher, 4)
        assert peer.answer(SNAPSHOT) == []
        assert numbers(peer.answer(0)) == [3, 4]
        assert publisher.statistics().stream.last_seq == 4
        assert publisher.statistics().stream.replies.snapshots_served == 0


def test_a_recording_flushes_and_closes() -> None:
    """The same end as a real publisher's."""
    publisher = RecordedStreamPublisher(QUIET)
    for _ in range(100):
        publisher.publish_raw(b"x")
    publisher.shutdown()
    assert publisher.statistics().stream.sent == 100
    with pytest.raises(PublisherClosed):
        publisher.publish_raw(b"x")
