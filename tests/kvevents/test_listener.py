"""Publishers that connect to us, over real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from kvevents.endpoints import ZmqEndpoint
from kvevents.errors import EndpointError
from kvevents.listener import Channel, ChannelConnection, Listener, ListenLimits, named_pod
from kvevents.sockets import SocketLimits
from kvevents.stream_state import SourceState
from kvevents.subscriber import Subscriber
from tests.support.connecting_publisher import Pod
from tests.support.following import QUICK, Notebook, following
from tests.support.vllm_publisher import seq_frame
from tests.support.waiting import eventually

LOCAL = ZmqEndpoint.parse("listen", "tcp://127.0.0.1:*")


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    made: zmq.Context[Any] = zmq.Context()
    yield made
    made.destroy(linger=0)


@asynccontextmanager
async def listening(
    context: zmq.Context[Any],
    socket: SocketLimits | None = None,
    limits: ListenLimits | None = None,
) -> AsyncIterator[Listener]:
    made = Listener(context, LOCAL, socket or SocketLimits(), limits or ListenLimits())
    made.open()
    try:
        yield made
    finally:
        made.close()


@contextmanager
def pod_of(context: zmq.Context[Any], listener: Listener, topic: str) -> Iterator[Pod]:
    made = Pod(context, listener.endpoint, topic)
    try:
        yield made
    finally:
        made.socket.close()


def follower(listener: Listener, channel: Channel, notebook: Notebook) -> Subscriber:
    return Subscriber(
        listener.endpoint,
        notebook,
        topic=None,
        options=QUICK,
        connect=lambda: ChannelConnection(channel),
    )


async def until_seqs(notebook: Notebook, seqs: list[int]) -> None:
    await eventually(lambda: notebook.seqs == seqs, f"batches {seqs}, not {notebook.seqs}")


async def until_state(subscriber: Subscriber, state: SourceState) -> None:
    await eventually(lambda: subscriber.statistics().state is state, f"the state {state}")


def count_of(listener: Listener, outcome: str) -> int:
    return listener.statistics().messages.get(outcome, 0)


async def until_unknown(listener: Listener, reason: str) -> None:
    await eventually(
        lambda: any(reason in each.reason for each in listener.statistics().unknown), reason
    )


async def test_topics_tell_pods_apart(context: zmq.Context[Any]) -> None:
    """Two engines at one address, each with numbers of its own."""
    async with listening(context) as listener:
        books = Notebook(), Notebook()
        channels = listener.register(["10.0.0.1"], None), listener.register(["pod-b"], None)
        followed = [follower(listener, *each) for each in zip(channels, books, strict=True)]
        async with following(followed[0]), following(followed[1]):
            with (
                pod_of(context, listener, "kv@10.0.0.1@gemma") as one,
                pod_of(context, listener, "kv@pod-b@org/model@rev") as other,
            ):
                for pod in (one, other):
                    await pod.subscribed()
                for _ in range(3):
                    one.publish()
                other.publish()
                await until_seqs(books[0], [0, 1, 2])
                await until_seqs(books[1], [0])
                # From the beginning on, and nothing is missing: that proves it whole.
                for each in followed:
                    await until_state(each, SourceState.LIVE)
        assert listener.statistics().messages == {"taken": 4}
        assert listener.statistics().topics == 2


async def test_without_its_beginning_a_stream_is_suspect(context: zmq.Context[Any]) -> None:
    """There is nobody to ask for what came before the first message."""
    async with listening(context) as listener:
        book = Notebook()
        async with following(follower(listener, listener.register(["a"], None), book)) as followed:
            with pod_of(context, listener, "kv@a@m") as pod:
                await pod.subscribed()
                pod.publish(skip=7)
                await until_seqs(book, [7])
                await until_state(followed, SourceState.SUSPECT)
                pod.publish(b"clear")
                await until_state(followed, SourceState.LIVE)
                pod.publish(skip=1)
                await until_state(followed, SourceState.SUSPECT)


async def test_a_publisher_that_leaves_is_missed_and_the_next_is_another(
    context: zmq.Context[Any],
) -> None:
    """Its connection ends; what comes over the next one is of another process, although its numbers
    may go on from there."""
    async with listening(context) as listener:
        book = Notebook()
        async with following(follower(listener, listener.register(["a"], None), book)) as followed:
            with pod_of(context, listener, "kv@a@m") as pod:
                await pod.subscribed()
                pod.publish()
                await until_state(followed, SourceState.LIVE)
            await until_state(followed, SourceState.CONNECTING)
            with pod_of(context, listener, "kv@a@m") as pod:
                await pod.subscribed()
                pod.publish(skip=1)
                await until_state(followed, SourceState.SUSPECT)
            with pod_of(context, listener, "kv@a@m") as pod:
                await pod.subscribed()
                pod.publish()
                await until_state(followed, SourceState.LIVE)
                await until_seqs(book, [0])


async def test_a_replica_that_comes_or_goes_changes_nothing_for_others(
    context: zmq.Context[Any],
) -> None:
    """A topic stays known while its publisher goes on, and one that is nobody's is told of once."""
    async with listening(context) as listener:
        told: list[str] = []
        listener.on_unknown = lambda unknown: told.append(unknown.topic)
        book = Notebook()
        async with following(follower(listener, listener.register(["a"], None), book)):
            with (
                pod_of(context, listener, "kv@a@m") as pod,
                pod_of(context, listener, "kv@nobody@m") as nobody,
            ):
                for each in (pod, nobody):
                    await each.subscribed()
                for number in range(3):
                    pod.publish()
                    nobody.publish()
                    await until_seqs(book, list(range(number + 1)))
                    await eventually(
                        lambda number=number: count_of(listener, "unknown") == number + 1, "counted"
                    )
                    assert listener.statistics().topics == 1
                    other = listener.register([f"other-{number}"], None)
                    if number == 1:
                        listener.unregister(other)
        assert told == ["kv@nobody@m"]


async def test_of_the_topics_of_a_pod_the_last_one_is_known(context: zmq.Context[Any]) -> None:
    """A pod that comes again and again under other names of models costs nothing."""
    async with listening(context) as listener:
        book = Notebook()
        async with following(follower(listener, listener.register(["a"], None), book)) as followed:
            for number in range(4):
                with pod_of(context, listener, f"kv@a@m{number}") as pod:
                    await pod.subscribed()
                    pod.publish()
                    await until_state(followed, SourceState.LIVE)
                await until_state(followed, SourceState.CONNECTING)
        assert listener.statistics().topics == 1


async def test_what_is_nobodys_is_counted_and_shown(context: zmq.Context[Any]) -> None:
    """An operator sees which topics come, and why they lead nowhere; a replica that is added later
    gets what comes then."""
    limits = ListenLimits(unknown_topics=3)
    async with listening(context, limits=limits) as listener:
        for _ in range(2):
            listener.register(["twice"], None)
        listener.register(["own-topic"], "another")
        topics = ["kv@nobody@m", "kv@twice@m", "nonsense\n", "kv@own-topic@m", "kv@more@m"]
        for topic in topics:
            with pod_of(context, listener, topic) as pod:
                await pod.subscribed()
                before = count_of(listener, "unknown")
                pod.publish()
                await eventually(
                    lambda before=before: count_of(listener, "unknown") > before,
                    topic,
                )
        shown = {each.topic: each.reason for each in listener.statistics().unknown}
        assert shown == {
            "kv@nobody@m": "no replica of this name listens for it",
            "kv@twice@m": "2 replicas have this name",
            "nonsense\\x0a": "not kv@pod@model, and no replica has this topic",
        }
        assert listener.statistics().messages == {"unknown": 5}
        book = Notebook()
        async with following(follower(listener, listener.register(["more"], None), book)):
            with pod_of(context, listener, "kv@more@m") as pod:
                await pod.subscribed()
                pod.publish()
                await until_seqs(book, [0])


async def test_nobody_takes_the_place_of_a_publisher_that_is_there(
    context: zmq.Context[Any],
) -> None:
    """Neither under its topic nor under another one of its pod."""
    async with listening(context) as listener:
        book = Notebook()
        async with following(follower(listener, listener.register(["a"], None), book)):
            with (
                pod_of(context, listener, "kv@a@m") as pod,
                pod_of(context, listener, "kv@a@m") as same,
                pod_of(context, listener, "kv@a@other") as other,
            ):
                for each in (pod, same, other):
                    await each.subscribed()
                pod.publish()
                await until_seqs(book, [0])
                for foreign in (same, other):
                    foreign.publish()
                    topic = foreign.topic.decode()
                    await eventually(
                        lambda topic=topic: any(
                            each.topic == topic for each in listener.statistics().unknown
                        ),
                        "the refusal",
                    )
                await until_unknown(listener, "another publisher has its replica's place")
                pod.publish()
                await until_seqs(book, [0, 1])


async def test_one_that_fell_silent_gives_way(context: zmq.Context[Any]) -> None:
    """A machine that is cut off does not end its connections."""
    limits = ListenLimits(taken_over_after_s=0.001)
    async with listening(context, limits=limits) as listener:
        book = Notebook()
        async with following(follower(listener, listener.register(["a"], None), book)):
            with pod_of(context, listener, "kv@a@m") as pod:
                await pod.subscribed()
                pod.publish()
                await until_seqs(book, [0])
                with pod_of(context, listener, "kv@a@m2") as other:
                    await other.subscribed()
                    other.publish()
                    other.publish()
                    await until_seqs(book, [0, 1])
                    assert listener.statistics().topics == 1


async def test_what_waits_is_bounded(context: zmq.Context[Any]) -> None:
    """Nobody takes what comes: most of it is dropped, and counted."""
    socket, limits = SocketLimits(queue_messages=5), ListenLimits(channel_bytes=100)
    async with listening(context, socket, limits) as listener:
        for name in ("many", "large"):
            listener.register([name], None)
        with (
            pod_of(context, listener, "kv@many@m") as many,
            pod_of(context, listener, "kv@large@m") as large,
        ):
            for pod in (many, large):
                await pod.subscribed()
            for _ in range(9):
                many.publish(b"")
                await eventually(
                    lambda: sum(listener.statistics().messages.values()) == many.seq + 1, "one more"
                )
            for _ in range(3):
                large.publish(b"x" * 60)
            await eventually(
                lambda: listener.statistics().messages == {"taken": 6, "overflow": 6}, "the bounds"
            )


async def test_an_address_that_is_taken_is_named(context: zmq.Context[Any]) -> None:
    """The process does not start without it."""
    async with listening(context) as listener:
        taken = ZmqEndpoint.parse("listen", listener.endpoint)
        with pytest.raises(EndpointError, match=r"events\.listen: cannot bind"):
            Listener(context, taken).open()


async def test_hostile_messages_leave_the_others_alone(context: zmq.Context[Any]) -> None:
    """Frames of any number and length, to a pod's own topic and to none."""
    frames = [
        [b""],
        [b"kv@a@m"],
        [b"kv@a@m", b"x"],
        [b"kv@a@m", b"1", b"2"],
        [b"k" * 2000, b"", b""],
    ]
    frames += [[b"kv@a@m"] + [b"x"] * 50, [b"\xff\xfe", seq_frame(0), b""], [b"kv@@m", b"", b""]]
    frames += [[b"kv@a@m", b"\xff" * 8, b"payload"]]
    async with listening(context) as listener:
        books = Notebook(), Notebook()
        channels = listener.register(["a"], None), listener.register(["b"], None)
        followed = [follower(listener, *each) for each in zip(channels, books, strict=True)]
        async with following(followed[0]), following(followed[1]):
            with (
                pod_of(context, listener, "kv@a@m") as hostile,
                pod_of(context, listener, "kv@b@m") as pod,
            ):
                for each in (hostile, pod):
                    await each.subscribed()
                for index, message in enumerate(frames):
                    hostile.socket.send_multipart(message)
                    pod.publish()
                    await until_seqs(books[1], list(range(index + 1)))
                await eventually(
                    lambda: sum(listener.statistics().messages.values()) == 2 * len(frames), "all"
                )
                assert listener.statistics().messages == {
                    "taken": len(frames),
                    "malformed": 6,
                    "unknown": 3,
                }
                assert books[0].batches == []
                await eventually(lambda: len(books[0].problems) == 5, "their problems")


@given(st.binary(max_size=60) | st.text().map(lambda text: b"kv@" + text.encode()))
def test_any_topic_is_read_or_refused(topic: bytes) -> None:
    """It comes from whoever reaches the address."""
    pod = named_pod(topic)
    if pod is not None:
        assert topic.startswith(f"kv@{pod}@".encode())
        assert "@" not in pod
