"""A snapshot from another router: whatever a peer does, the start goes on, and nothing is believed
but what one with the same secret has sent."""

from __future__ import annotations

import asyncio
import itertools
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeAlias

import pytest
import trustme

from kvevents.codec import encode
from kvevents.events import EventBatch
from router.errors import NoSnapshot, Overloaded
from router.feed.feed import Feed
from router.feed.snapshot_file import SnapshotRestorer
from router.feed.snapshot_peers import MAX_AT_ONCE, PeerLimits, Peers, Sender, peer_key
from router.fleet.types import EventSource
from router.index.base import Hit, SourceId
from router.index.index import PrefixIndex
from tests.support.blocks import FULL, Prefix
from tests.support.following import QUICK
from tests.support.vllm_publisher import VllmPublisher
from tests.support.waiting import eventually

SECRET = b"shared"
NAME = "127.0.0.1"
A = SourceId("replica-a")
PROMPT = list(range(1, 130))
LIMITS = PeerLimits(within_s=5.0, max_bytes=1_000_000, max_age_s=900.0)

Peer: TypeAlias = Callable[[asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class Knowing:
    """As much of a router as knows one cache."""

    def __init__(self, secret: bytes = SECRET) -> None:
        self.index = PrefixIndex(secret=secret)
        self.feed = Feed(lambda model: self.index, QUICK)

    def follow(self, publisher: VllmPublisher) -> None:
        self.feed.add(
            A.replica,
            EventSource(A.dp_rank, publisher.endpoint, publisher.replay_endpoint, "kv-events"),
            "m",
        )

    async def until_live(self) -> None:
        def is_live() -> bool:
            return self.feed.statistics()[A].state.value == "live"

        await eventually(is_live, "it is live", show=lambda: self.feed.statistics()[A])

    def sender(self, secret: bytes = SECRET, max_bytes: int = 1_000_000) -> Sender:
        return Sender(self.feed, secret, max_bytes, within_s=5.0)

    async def sent(self, secret: bytes = SECRET, max_bytes: int = 1_000_000) -> bytes:
        return b"".join([piece async for piece in self.sender(secret, max_bytes).open()])


@asynccontextmanager
async def knowing(publisher: VllmPublisher, secret: bytes = SECRET) -> AsyncIterator[Knowing]:
    made = Knowing(secret)
    try:
        made.follow(publisher)
        publisher.publish(
            encode(EventBatch(1.0, [Prefix(PROMPT).stored(0, FULL, 0, 64)], 0)),
        )
        await made.until_live()
        yield made
    finally:
        await made.feed.close()


@asynccontextmanager
async def listening(peer: Peer, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """A peer that reads a request and does something; its URL."""
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        try:
            await peer(writer)
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, NAME, 0, ssl=tls)
    try:
        scheme = "http" if tls is None else "https"
        yield f"{scheme}://{NAME}:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await server.wait_closed()
    assert all(peer_key(SECRET).encode() in request for request in asked)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def sending(data: bytes) -> Peer:
    async def send(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk(data) + chunk(b""))
        await writer.drain()

    return send


def refusing(status: bytes) -> Peer:
    async def refuse(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()

    return refuse


def peers(*urls: str, limits: PeerLimits = LIMITS, trusted: ssl.SSLContext | None = None) -> Peers:
    return Peers(urls, SECRET, limits, lambda: trusted)


async def test_what_a_peer_knows_is_known_before_a_word_from_the_engine() -> None:
    """And its stream is gone on with, if its engine proves to be the same."""
    with VllmPublisher() as publisher:
        async with knowing(publisher) as one, listening(sending(await one.sent())) as url:
            other = Knowing()
            try:
                beginning = SnapshotRestorer([peers(url).fetch], other.feed, needs_own_keys=True)
                await beginning.find()
                await beginning.fill("m", other.index)
                assert other.index.match(PROMPT)[A] == Hit(64, 64)
                other.follow(publisher)
                assert other.feed.resumed == 1
                await other.until_live()
                assert other.index.match(PROMPT)[A] == Hit(64, 64)
                assert other.feed.statistics()[A].cleared == 0
            finally:
                await other.feed.close()


async def test_a_model_of_which_nothing_is_known_begins_from_nothing() -> None:
    """Neither from another model's blocks, nor with an error that would keep it from serving."""
    with VllmPublisher() as publisher:
        async with knowing(publisher) as one, listening(sending(await one.sent())) as url:
            other = Knowing()
            for places in ([], [peers(url).fetch]):
                beginning = SnapshotRestorer(places, other.feed, needs_own_keys=True)
                await beginning.find()
                await beginning.fill("another", other.index)
                assert not other.index.holds(A)
            await other.feed.close()


async def test_what_nobody_asked_for_after_the_start_is_dropped() -> None:
    """A replica that comes hours later must not go on from what was known then."""
    with VllmPublisher() as publisher:
        async with knowing(publisher) as one, listening(sending(await one.sent())) as url:
            other = Knowing()
            try:
                beginning = SnapshotRestorer([peers(url).fetch], other.feed, needs_own_keys=True)
                await beginning.find()
                await beginning.fill("m", other.index)
                beginning.forget()
                assert not other.index.holds(A)
                await beginning.fill("m", other.index)
                assert not other.index.holds(A)
                other.follow(publisher)
                assert other.feed.resumed == 0
            finally:
                await other.feed.close()


async def test_an_index_keeps_its_own_keys_where_others_share_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Words of others on the board would be of no use otherwise."""
    with VllmPublisher() as publisher:
        async with knowing(publisher, b"another") as one:
            data = await one.sent()
            index = PrefixIndex(secret=SECRET)
            own = index.key_space
            async with listening(sending(data)) as url:
                beginning = SnapshotRestorer([peers(url).fetch], one.feed, needs_own_keys=True)
                await beginning.find()
            await beginning.fill("m", index)
            assert (index.key_space, index.holds(A)) == (own, False)
            assert "made with another secret" in caplog.text


def _cut(data: bytes) -> Peer:
    async def send(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk(data[: len(data) // 2]))
        await writer.drain()

    return send


def _slow(data: bytes) -> Peer:
    async def send(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        for byte in itertools.cycle(data):
            writer.write(chunk(bytes([byte])))
            await writer.drain()
            await asyncio.sleep(0.05)

    return send


def _flipped(data: bytes) -> Peer:
    middle = len(data) // 2
    return sending(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])


FAULTS: dict[str, Callable[[bytes], Peer]] = {
    "it dies in the middle": _cut,
    "it ends too early": lambda data: sending(data[:-40]),
    "it sends without end": lambda data: sending(bytes(3_000_000)),
    "it sends a byte at a time": _slow,
    "a bit is wrong": _flipped,
    "it sends nothing": lambda data: sending(b""),
    "it knows nothing": lambda data: refusing(b"409 Conflict"),
    "it has another secret": lambda data: refusing(b"401 Unauthorized"),
    "it speaks another protocol": lambda data: sending(b"<html>" * 20),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_after_a_peer_that_fails_the_next_one_is_asked(fault: str) -> None:
    """And where there is none, the start goes on without."""
    limits = LIMITS._replace(within_s=1.0)
    with VllmPublisher() as publisher:
        async with knowing(publisher) as one:
            data = await one.sent()
            async with listening(FAULTS[fault](data)) as bad, listening(sending(data)) as good:
                found = await peers(bad, good).fetch()
                assert found is not None
                assert list(found.sources) == ["m"]
                alone = peers(bad, limits=limits)
                assert await alone.fetch() is None
                assert alone.refused == 1


async def test_a_peer_that_has_no_time_is_asked_again() -> None:
    """All routers of a cluster may start at once, and one knows."""
    with VllmPublisher() as publisher:
        async with knowing(publisher) as one:
            answers = [refusing(b"503 Service Unavailable")] * 2 + [sending(await one.sent())]

            async def behave(writer: asyncio.StreamWriter) -> None:
                await answers.pop(0)(writer)

            async with listening(behave) as url:
                assert await peers(url).fetch() is not None
                assert not answers


async def test_a_peer_that_has_no_time_is_left_alone_for_a_while() -> None:
    """It is starting as well: questions without a pause would keep both from it."""
    asked = 0

    async def busy(writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        await refusing(b"503 Service Unavailable")(writer)

    async with listening(busy) as url:
        assert await peers(url, limits=LIMITS._replace(within_s=1.0)).fetch() is None
    assert 1 <= asked <= 10


async def test_a_snapshot_that_is_too_old_or_of_another_secret_is_refused() -> None:
    """Its engines have gone on; and nothing is decoded that a stranger made."""
    with VllmPublisher() as publisher:
        async with knowing(publisher) as one:
            async with listening(sending(await one.sent())) as url:
                assert await peers(url, limits=LIMITS._replace(max_age_s=0.0)).fetch() is None
            async with listening(sending(await one.sent(secret=b"another"))) as url:
                assert await peers(url).fetch() is None


async def test_a_peer_is_verified_over_tls(tmp_path: Path) -> None:
    """What it sends is believed, and what it is shown opens every other router."""
    ca = trustme.CA()
    shown, trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    ca.issue_cert(NAME).configure_cert(shown)
    with VllmPublisher() as publisher:
        async with knowing(publisher) as one:
            data = await one.sent()
    async with listening(sending(data), shown) as url:
        assert await peers(url, trusted=trusting).fetch() is None
        ca.configure_trust(trusting)
        assert await peers(url, trusted=trusting).fetch() is not None


async def test_what_is_sent_is_bounded() -> None:
    """In size, in number at a time; and there must be something to send."""
    with VllmPublisher() as publisher:
        async with knowing(publisher) as one:
            whole = await one.sent()
            assert len(await one.sent(max_bytes=100)) < len(whole)
            sender = one.sender()
            under_way = [sender.open() for _ in range(MAX_AT_ONCE)]
            for each in under_way:
                await anext(each)
            with pytest.raises(Overloaded):
                sender.open()
            rest = b"".join([piece async for piece in under_way[0]])
            assert rest
            assert (sender.sent, sender.open() is not None) == (1, True)
            for each in under_way:
                await each.aclose()
    nobody = Knowing()
    try:
        with pytest.raises(NoSnapshot):
            nobody.sender().open()
    finally:
        await nobody.feed.close()
