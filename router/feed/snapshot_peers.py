"""A snapshot from another router, over HTTP."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import ssl
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from async_timeout import timeout

from kvevents.lookups import addresses
from kvevents.pacing import Backoff
from router.config.origin import Origin, Timeouts
from router.errors import RouterError
from router.feed.snapshot_records import IndexSnapshot, SnapshotError
from router.feed.snapshot_transfer import read_sealed
from router.fleet.client import UpstreamClient
from router.fleet.client_errors import ResponseTooLarge, UpstreamError

logger = logging.getLogger(__name__)

PATH = "/snapshot"
MAX_ADDRESSES = 256
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


class Peers:
    """The other routers.

    Args:
        urls: Each address behind a name is one of them.
        trusted: Authorities for https; None: the system's.
    """

    def __init__(
        self, urls: Iterable[str], secret: bytes, limits: PeerLimits, trusted: ssl.SSLContext | None
    ) -> None:
        self._origins = [Origin.parse(url) for url in urls]
        self._secret = secret
        self._limits = limits
        self._trusted = trusted
        self.taken = self.refused = 0
        """Counts of snapshots, and of answers of no use."""

    async def fetch(self) -> IndexSnapshot | None:
        """Return the snapshot of the first that has one; None, with the reasons in the log, where
        none has one in time."""
        client = UpstreamClient(ssl_context=self._trusted)
        try:
            async with timeout(self._limits.within_s):
                return await self._first_of(client)
        except asyncio.TimeoutError:
            logger.warning("no peer sent its index within %g s", self._limits.within_s)
            return None
        finally:
            await client.close()

    async def _first_of(self, client: UpstreamClient) -> IndexSnapshot | None:
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + self._limits.within_s
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
                        read_sealed, data, self._secret, self._limits.max_age_s
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
        headers = [(b"authorization", b"Bearer " + peer_key(self._secret).encode())]
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
                if len(data) > self._limits.max_bytes:
                    bound = f"state.peer_max_bytes {self._limits.max_bytes}"
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
