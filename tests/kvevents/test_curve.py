"""Encrypted streams, over real sockets: who has the keys follows them, everybody else gets nothing
and learns why."""

from __future__ import annotations

import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq

from kvevents import CurveClient, CurveKeys, CurveServer
from kvevents.curve import make_keys, parse_public_key, read_clients, read_keys
from kvevents.errors import CurveError, NoConnection
from kvevents.layout import KVCacheLayout
from kvevents.publisher import ZmqEventPublisher
from kvevents.publisher_config import PublisherConfig
from kvevents.sockets import SocketConnection, SocketLimits
from tests.support.blocks import FULL


def keys(directory: Path, name: str) -> CurveKeys:
    _, secret = make_keys(directory, name)
    return read_keys(secret)


@pytest.fixture
def engine(tmp_path: Path) -> CurveKeys:
    return keys(tmp_path, "engine")


@pytest.fixture
def router(tmp_path: Path) -> CurveKeys:
    return keys(tmp_path, "router")


@asynccontextmanager
async def publishing(curve: CurveServer | None) -> AsyncIterator[ZmqEventPublisher]:
    config = PublisherConfig(
        endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0", curve=curve
    )
    publisher = ZmqEventPublisher(config, KVCacheLayout.build([FULL]))
    try:
        yield publisher
    finally:
        publisher.shutdown()


async def connect(address: str, kind: int, curve: CurveClient | None) -> None:
    """Come up, or raise `NoConnection`."""
    with zmq.Context() as context:
        limits = SocketLimits(connect_timeout_s=2.0, curve=curve)
        connection = SocketConnection(context, kind, address, limits)
        try:
            await connection.open()
        finally:
            connection.close()


async def addresses_of(publisher: ZmqEventPublisher) -> list[tuple[str, int]]:
    assert publisher.replay_endpoint is not None
    return [(publisher.endpoint, zmq.SUB), (publisher.replay_endpoint, zmq.DEALER)]


async def test_a_subscriber_with_the_keys_comes_in_at_both_addresses(
    engine: CurveKeys, router: CurveKeys
) -> None:
    """Live events, and replays."""
    async with publishing(CurveServer(engine, frozenset({router.public}))) as publisher:
        for address, kind in await addresses_of(publisher):
            await connect(address, kind, CurveClient(router, engine.public))


async def test_without_a_list_everybody_who_knows_the_publisher_comes_in(
    engine: CurveKeys, router: CurveKeys
) -> None:
    """Its public key is then the secret."""
    async with publishing(CurveServer(engine)) as publisher:
        await connect(publisher.endpoint, zmq.SUB, CurveClient(router, engine.public))


async def test_a_plaintext_peer_is_refused_at_both_addresses(
    engine: CurveKeys, router: CurveKeys
) -> None:
    """And the reason is clear."""
    async with publishing(CurveServer(engine, frozenset({router.public}))) as publisher:
        for address, kind in await addresses_of(publisher):
            with pytest.raises(NoConnection, match="the peer wants CURVE keys"):
                await connect(address, kind, None)


async def test_a_key_that_is_not_listed_is_refused(
    engine: CurveKeys, router: CurveKeys, tmp_path: Path
) -> None:
    """Though it knows the publisher's."""
    stranger = keys(tmp_path, "stranger")
    async with publishing(CurveServer(engine, frozenset({router.public}))) as publisher:
        for address, kind in await addresses_of(publisher):
            with pytest.raises(NoConnection, match="does not know our public key"):
                await connect(address, kind, CurveClient(stranger, engine.public))


async def test_another_publisher_s_key_is_not_talked_to(
    engine: CurveKeys, router: CurveKeys, tmp_path: Path
) -> None:
    """Somebody who poses as the publisher learns nothing and is not believed."""
    posing = keys(tmp_path, "posing")
    async with publishing(CurveServer(posing)) as publisher:
        with pytest.raises(NoConnection, match="has another key"):
            await connect(publisher.endpoint, zmq.SUB, CurveClient(router, engine.public))


async def test_a_plaintext_publisher_is_not_followed_with_keys(
    engine: CurveKeys, router: CurveKeys
) -> None:
    """Encryption must not be lost by a mistake at the other end."""
    async with publishing(None) as publisher:
        with pytest.raises(NoConnection, match="has another key, or none"):
            await connect(publisher.endpoint, zmq.SUB, CurveClient(router, engine.public))


def test_only_the_owner_reads_the_secret_key(tmp_path: Path) -> None:
    """Whatever the umask, and neither shows in a repr."""
    public, secret = make_keys(tmp_path, "engine")
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert stat.S_IMODE(public.stat().st_mode) == 0o644
    pair = read_keys(secret)
    assert pair.secret.decode() not in repr(CurveServer(pair))
    with pytest.raises(CurveError, match="exists already"):
        make_keys(tmp_path, "engine")


def test_files_that_are_no_keys_are_refused_with_their_place(tmp_path: Path) -> None:
    """The public file where the secret one is meant, another file, none at all."""
    public, _ = make_keys(tmp_path, "engine")
    with pytest.raises(CurveError, match="holds no secret key"):
        read_keys(public)
    other = tmp_path / "other.key"
    other.write_text("metadata\ncurve\n    public-key = 'short'\n")
    with pytest.raises(CurveError, match="not 40 characters of Z85"):
        read_clients(tmp_path)
    other.write_text("hello")
    with pytest.raises(CurveError, match="holds no public key"):
        read_clients(tmp_path)
    with pytest.raises(CurveError, match="cannot be read"):
        read_keys(tmp_path / "absent.key_secret")
    with pytest.raises(CurveError, match="holds 0 public keys"):
        read_clients(tmp_path / "absent")
    with pytest.raises(CurveError, match="40 characters"):
        parse_public_key("short")
