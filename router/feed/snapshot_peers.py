"""A snapshot on its way from one router to another, over HTTP: bounded, and sealed with the secret
that both share, so that only our own processes' bytes are decoded."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from async_timeout import timeout

from kvevents.lookups import addresses
from kvevents.pacing import Backoff
from kvevents.stream_state import SourceState
from router.config.origin import Origin, Timeouts
from router.errors import NoSnapshot, Overloaded, RouterError
from router.feed.feed import Feed
from router.feed.snapshot_records import IndexSnapshot, SnapshotError, pieces_of, read
from router.fleet.client import UpstreamClient
from router.fleet.client_errors import ResponseTooLarge, UpstreamError

logger = logging.getLogger(__name__)

PATH = "/snapshot"
MAX_ADDRESSES = 256
MAX_AT_ONCE = 4
"""Snapshots that one process sends at a time."""
_PIECE_BYTES = 256 * 1024
_SEAL_BYTES = 32
_CONNECT_S, _SILENCE_S = 2.0, 3.0
_FIRST_DELAY_S, _MAX_DELAY_S = 0.1, 1.0
"""Delays before those that were busy are asked again."""


def peer_key(secret: bytes) -> str:
    """Return the key that routers with one secret show each other."""
    return hashlib.blake2b(secret, digest_size=32, person=b"snapshot peer").hexdigest()


class PeerLimits(NamedTuple):
    """Bounds on snapshots of others."""

    within_s: float
    """The time for all peers together."""
    max_bytes: int
    max_age_s: float


@dataclass(eq=False, repr=False)
class Peers:
    """The other routers."""

    urls: Iterable[str]
    """Each address behind a name is one of them."""
    secret: bytes
    limits: PeerLimits
    trusted: Callable[[], ssl.SSLContext | None]
    """Returns the context for https; None: the system's authorities are trusted."""

    def __post_init__(self) -> None:
        self._origins = [Origin.parse(url) for url in self.urls]
        self.taken = self.refused = 0
        """Counts of snapshots, and of answers of no use."""

    async def fetch(self) -> IndexSnapshot | None:
        """Return the snapshot of the first that has one; None, with the reasons in the log, where
        none has one in time."""
        client = UpstreamClient(self.trusted)
        try:
            async with timeout(self.limits.within_s):
                return await self._first_of(client)
        except asyncio.TimeoutError:
            logger.warning("no peer sent its index within %g s", self.limits.within_s)
            return None
        finally:
            await client.close()

    async def _first_of(self, client: UpstreamClient) -> IndexSnapshot | None:
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + self.limits.within_s
        retry = Backoff(_FIRST_DELAY_S, _MAX_DELAY_S)
        waiting = [each for origin in self._origins for each in await _addresses(origin)]
        random.shuffle(waiting)
        while waiting:
            busy = []
            for address, origin in waiting:
                try:
                    # Half of what is left: one that sends for ever must not take all of it.
                    async with timeout((ends_at - loop.time()) / 2):
                        data = await self._ask(client, origin)
                    if data is None:
                        busy.append((address, origin))
                        continue
                    found = await asyncio.to_thread(
                        read_sealed, data, self.secret, self.limits.max_age_s
                    )
                except (UpstreamError, RouterError, asyncio.TimeoutError) as error:
                    self.refused += 1
                    why = str(error) or "too slow"
                    logger.info("no snapshot of the index from %s at %s: %s", origin, address, why)
                    continue
                self.taken += 1
                count = sum(map(len, found.sources.values()))
                logger.info("index: %d sources, from %s at %s", count, origin, address)
                return found
            waiting = busy
            if waiting:
                await asyncio.sleep(retry.next_delay())
        return None

    async def _ask(self, client: UpstreamClient, origin: Origin) -> bytearray | None:
        """Return all bytes of a peer's snapshot; None if it is busy."""
        headers = [(b"authorization", b"Bearer " + peer_key(self.secret).encode())]
        times = Timeouts(_CONNECT_S, _SILENCE_S, _SILENCE_S)
        response = await client.send(origin, b"GET", PATH.encode(), headers, b"", times)
        try:
            if response.status == 503:
                return None
            if response.status != 200:
                raise SnapshotError(f"status {response.status}")
            data = bytearray()
            while (chunk := await response.read_chunk()) is not None:
                data += chunk
                if len(data) > self.limits.max_bytes:
                    bound = f"state.peer_max_bytes {self.limits.max_bytes}"
                    raise ResponseTooLarge(f"longer than {bound}")
            return data
        finally:
            response.abort()


async def _addresses(origin: Origin) -> list[tuple[str, Origin]]:
    """Every address behind a name, with the URL that leads there alone."""
    try:
        found = await addresses(origin.host)
    except OSError as error:
        logger.info("no snapshot of the index from %s: %s", origin, error.strerror or error)
        return []
    return [(each, replace(origin, allows=each.__eq__)) for each in found[:MAX_ADDRESSES]]


# --- sent to others -------------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class Sender:
    """Sends snapshots to others. Belongs to one event loop."""

    feed: Feed
    secret: bytes
    max_bytes: int
    """Bound on a snapshot: a larger one ends without its seal."""
    within_s: float
    """The time for one, after which it is given up."""
    clock: Callable[[], float] = time.monotonic
    """A monotonic clock, in seconds."""

    def __post_init__(self) -> None:
        self._under_way = 0
        self.sent = 0
        """Snapshots sent whole."""

    def open(self) -> AsyncIterator[bytes]:
        """Make a snapshot, to be sent piece by piece, and its seal.

        Raises:
            NoSnapshot: Nothing here is of use to others.
            Overloaded: The most that may be sent at a time are under way.
        """
        sources = self.feed.sources()
        if not any(self.feed.state(source) is SourceState.LIVE for source in sources):
            raise NoSnapshot("this router knows no cache yet")
        if self._under_way >= MAX_AT_ONCE:
            raise Overloaded(f"sends {MAX_AT_ONCE} snapshots already")
        return self._sealed_pieces()

    async def _sealed_pieces(self) -> AsyncIterator[bytes]:
        ends_at, left = self.clock() + self.within_s, self.max_bytes
        seal = _seal(self.secret)
        self._under_way += 1
        try:
            async for piece in pieces_of(self.feed.sources(), self.feed.save):
                left -= len(piece)
                if left < 0:
                    return
                seal.update(piece)
                for start in range(0, len(piece), _PIECE_BYTES):
                    if self.clock() > ends_at:
                        return
                    yield piece[start : start + _PIECE_BYTES]
            yield seal.digest()
            self.sent += 1
        finally:
            self._under_way -= 1


def read_sealed(data: bytes | bytearray, secret: bytes, max_age_s: float) -> IndexSnapshot:
    """Read a snapshot that another process sent. May take a while.

    Args:
        max_age_s: See `read`; also how far its clock may be ahead.
    Raises:
        SnapshotError: It is not whole, sealed with another secret, or too old.
        DumpError: See `read`.
    """
    view = memoryview(data)
    content, found = view[:-_SEAL_BYTES], bytes(view[-_SEAL_BYTES:])
    seal = _seal(secret)
    seal.update(content)
    if seal.digest() != found:
        raise SnapshotError(f"{len(data)} bytes: cut off, or sealed with another secret")
    return read(content, max_age_s, time.time(), ahead_s=max_age_s)


def _seal(secret: bytes) -> hashlib.blake2b:
    key = hashlib.blake2b(secret, digest_size=_SEAL_BYTES, person=b"snapshot seal").digest()
    return hashlib.blake2b(digest_size=_SEAL_BYTES, key=key)
