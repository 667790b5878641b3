"""One connection to a publisher, over real sockets of libzmq at the other end."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq

from kvevents.errors import EndpointError, NoConnection
from kvevents.messages import Batch
from kvevents.sockets import SocketLimits
from kvevents.subscriber import Subscription
from tests.support.waiting import eventually

LIMITS = SocketLimits(connect_timeout_s=5.0)


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def publisher(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    made = context.socket(zmq.XPUB)
    made.setsockopt(zmq.LINGER, 0)
    made.setsockopt(zmq.SNDHWM, 0)
    return made


@asynccontextmanager
async def subscribed(
    publisher: zmq.Socket[bytes], endpoint: str, topic: bytes = b"", limits: SocketLimits = LIMITS
) -> AsyncIterator[Subscription]:
    """Connected, and known to the publisher."""
    made = Subscription(zmq.Context.instance(), endpoint, topic, limits)
    try:
        await made.open()
        await eventually(lambda: bool(publisher.poll(0)), "the subscription")
        assert publisher.recv() == b"\x01" + topic
        yield made
    finally:
        made.close()


async def take(subscription: Subscription, count: int) -> list[Batch]:
    found: list[Batch] = []
    while len(found) < count:
        batch = subscription.next_batch()
        if batch is not None:
            found.append(batch)
        elif subscription.is_down:
            break
        else:
            await subscription.wake_up.wait(20.0)
    return found


def send(publisher: zmq.Socket[bytes], seq: int, payload: bytes, topic: bytes = b"") -> None:
    publisher.send_multipart([topic, seq.to_bytes(8, "big"), payload])


@pytest.mark.parametrize("kind", ["tcp", "tcp6", "ipc", "abstract", "inproc"])
async def test_batches_come_over_every_kind_of_address(
    publisher: zmq.Socket[bytes], tmp_path: Path, kind: str
) -> None:
    """All that an operator may configure."""
    if kind == "tcp6":
        publisher.setsockopt(zmq.IPV6, 1)
    address = {
        "tcp": "tcp://127.0.0.1:*",
        "tcp6": "tcp://[::1]:*",
        "ipc": f"ipc://{tmp_path}/s",
        "abstract": "ipc://@kvevents-test-subscription",
        "inproc": "inproc://s",
    }[kind]
    try:
        publisher.bind(address)
    except zmq.ZMQError as error:
        if kind == "tcp6":
            pytest.skip(f"no IPv6: {error}")
        raise
    endpoint = publisher.getsockopt_string(zmq.LAST_ENDPOINT)
    made = Subscription(publisher.context, endpoint, b"kv", LIMITS)
    try:
        await made.open()
        assert publisher.recv() == b"\x01kv"
        for seq in range(3):
            send(publisher, seq, b"x" * 10**seq, b"kv")
        assert await take(made, 3) == [Batch(seq, b"x" * 10**seq) for seq in range(3)]
    finally:
        made.close()


async def test_a_frame_that_is_too_long_ends_the_connection(
    publisher: zmq.Socket[bytes],
) -> None:
    """It is not held, however long it is."""
    publisher.bind("tcp://127.0.0.1:*")
    limits = SocketLimits(connect_timeout_s=5.0, message_bytes=1000)
    endpoint = publisher.getsockopt_string(zmq.LAST_ENDPOINT)
    async with subscribed(publisher, endpoint, limits=limits) as made:
        send(publisher, 0, bytes(2000))
        assert await take(made, 1) == []
        assert made.is_down


async def test_what_was_sent_before_the_publisher_left_is_still_taken(
    publisher: zmq.Socket[bytes],
) -> None:
    """The last batches of an engine that is stopped."""
    publisher.setsockopt(zmq.LINGER, 5000)
    publisher.bind("tcp://127.0.0.1:*")
    endpoint = publisher.getsockopt_string(zmq.LAST_ENDPOINT)
    async with subscribed(publisher, endpoint) as made:
        for seq in range(100):
            send(publisher, seq, bytes(1000))
        publisher.close()
        assert len(await take(made, 101)) == 100
        assert made.is_down


async def test_a_publisher_that_wants_keys_is_refused_with_the_reason(
    publisher: zmq.Socket[bytes],
) -> None:
    """Otherwise an operator would look for a network that is broken."""
    public, secret = zmq.curve_keypair()
    publisher.setsockopt(zmq.CURVE_PUBLICKEY, public)
    publisher.setsockopt(zmq.CURVE_SECRETKEY, secret)
    publisher.setsockopt(zmq.CURVE_SERVER, 1)
    publisher.bind("tcp://127.0.0.1:*")
    endpoint = publisher.getsockopt_string(zmq.LAST_ENDPOINT)
    made = Subscription(publisher.context, endpoint, b"", LIMITS)
    try:
        with pytest.raises(NoConnection, match="wants CURVE keys"):
            await made.open()
    finally:
        made.close()


async def test_without_a_publisher_it_says_so_and_leaves_no_socket(tmp_path: Path) -> None:
    """Nobody listens; or somebody does, and says nothing, or something else."""
    context = zmq.Context.instance()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        limits = SocketLimits(connect_timeout_s=0.2)
        made = Subscription(context, f"tcp://127.0.0.1:{port}", b"", limits)
        with pytest.raises(NoConnection, match=r"within 0\.2 s"):
            await made.open()
        assert made._socket is None
    for endpoint in (f"tcp://127.0.0.1:{port}", f"ipc://{tmp_path}/nobody"):
        made = Subscription(context, endpoint, b"", LIMITS)
        with pytest.raises(NoConnection, match="no ZMQ peer answered"):
            await made.open()
        assert made._socket is None
    made = Subscription(context, "ipc:///" + "x" * 200, b"", LIMITS)
    with pytest.raises(EndpointError, match="too long"):
        await made.open()
    made.close()
