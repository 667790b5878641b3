"""The board of routers on several machines: Valkey or Redis.

Each process has a key of its own, which expires, and says every change on one channel: whoever
listens hears it at once, and whoever comes later finds the keys. Both take one round trip, in a
task of their own, with at most one under way. While the server is away, what the others said
expires here as it does there, and each process goes on with what it knows itself.

What comes from the server is sealed with the secret that all share: without it nobody who reaches
the server can make up load or read whose keys are whose.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import redis.asyncio as redis
from redis.exceptions import RedisError
from typing_extensions import override

from kvevents.pacing import Backoff
from router.board.base import Board, BoardStatistics
from router.board.slots import MAX_BYTES

logger = logging.getLogger(__name__)

SPACING_S = 0.02
"""Between two things said."""
BEAT_S = 0.4
EXPIRY_S = 2.0
MAX_WRITERS = 1024
FIRST_DELAY_S, MAX_DELAY_S = 0.1, 5.0
"""Before the next try, while the server is away."""
TIMEOUT_S = 2.0
"""Of one round trip."""
_SEAL_BYTES = 16
_NAME_BYTES = 16
_AWAY = (RedisError, OSError, asyncio.TimeoutError)


class Credentials(NamedTuple):
    """Who the router is to the server. Paths are those of PEM files."""

    username: str | None
    password: str | None
    ca: str | None = None
    certificate: str | None = None
    key: str | None = None


def connect(
    url: str, credentials: Credentials, prefix: str, secret: bytes, group: bytes
) -> ValkeyBoard:
    """A board on a server, which is connected to when it runs.

    Args:
        url: Of the server.
        credentials: Who the router is to it.
        prefix: As for `ValkeyBoard`, as the others.
        secret: That all share.
        group: Of the processes that hear each other elsewhere.
    """
    tls: dict[str, Any] = {
        "ssl_ca_certs": credentials.ca,
        "ssl_certfile": credentials.certificate,
        "ssl_keyfile": credentials.key,
    }
    server = redis.Redis.from_url(
        "redis" + url.removeprefix("redis").removeprefix("valkey"),
        username=credentials.username,
        password=credentials.password,
        socket_timeout=TIMEOUT_S,
        socket_connect_timeout=TIMEOUT_S,
        **(tls if url.startswith(("rediss:", "valkeys:")) else {}),
    )
    return ValkeyBoard(server, prefix, secret, group)


class ValkeyBoard(Board):
    """One process's end of it.

    Args:
        server: Has no connection yet; closed at the end of `run`.
        prefix: Of the key and the channel: boards of other prefixes are others.
        secret: That all share.
        group: Of the processes that hear each other elsewhere: they are left out.
        clock: A monotonic clock, in seconds.
    """

    kind = "valkey"

    def __init__(
        self,
        server: redis.Redis,
        prefix: str,
        secret: bytes,
        group: bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server = server
        self._channel = f"{prefix}:board"
        self._prefix = f"{prefix}:slot:"
        self._secret = hashlib.blake2b(secret, digest_size=32, person=b"board seal").digest()
        self._group = hashlib.blake2b(group, digest_size=_NAME_BYTES // 2).digest()
        self._name = self._group + secrets.token_bytes(_NAME_BYTES // 2)
        self._clock = clock
        self._said = b""
        self._is_new = asyncio.Event()
        self._heard: dict[bytes, tuple[float, bytes]] = {}
        """By name: when it was heard last, and the slot."""
        self._is_heard = self._is_hearing = False
        self._published = self._failures = 0

    # --- what the exchange calls ------------------------------------------------------------------

    @override
    def publish(self, slot: bytes) -> None:
        self._said = slot
        self._is_new.set()

    @override
    def refresh(self) -> None:
        """The task does, by itself."""

    @override
    def read(self) -> Mapping[str, bytes]:
        oldest = self._clock() - EXPIRY_S
        self._heard = {name: told for name, told in self._heard.items() if told[0] >= oldest}
        return {name.hex(): slot for name, (_, slot) in self._heard.items()}

    @override
    def note_broken(self) -> None:
        self._failures += 1

    @override
    def statistics(self) -> BoardStatistics:
        now = self._clock()
        oldest_s = max((now - at for at, _ in self._heard.values()), default=0.0)
        is_up = self._is_heard and self._is_hearing
        return BoardStatistics(is_up, len(self._heard), oldest_s, self._published, self._failures)

    @override
    async def run(self, on_news: Callable[[], None]) -> None:
        tasks = [asyncio.create_task(self._speak()), asyncio.create_task(self._hear(on_news))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._server.aclose()

    # --- speaking ---------------------------------------------------------------------------------

    async def _speak(self) -> None:
        retry = Backoff(FIRST_DELAY_S, MAX_DELAY_S)
        while True:
            self._is_new.clear()
            try:
                await self._say()
            except _AWAY as error:
                self._note_away(self._is_heard, error)
                self._is_heard = False
                await asyncio.sleep(retry.next_delay())
                continue
            self._is_heard = True
            retry.reset()
            await asyncio.sleep(SPACING_S)
            beat = asyncio.get_running_loop().call_later(BEAT_S, self._is_new.set)
            await self._is_new.wait()
            beat.cancel()

    async def _say(self) -> None:
        message = self._sealed(self._said)
        key = self._prefix + self._name.hex()
        async with self._server.pipeline(transaction=False) as pipeline:
            pipeline.set(key, message, px=int(EXPIRY_S * 1000))
            pipeline.publish(self._channel, message)
            await pipeline.execute()
        self._published += 1

    def _sealed(self, slot: bytes) -> bytes:
        return self._seal(self._name + slot) + self._name + slot

    def _seal(self, content: bytes) -> bytes:
        return hashlib.blake2b(content, digest_size=_SEAL_BYTES, key=self._secret).digest()

    # --- hearing ----------------------------------------------------------------------------------

    async def _hear(self, on_news: Callable[[], None]) -> None:
        retry = Backoff(FIRST_DELAY_S, MAX_DELAY_S)
        while True:
            try:
                async with self._server.pubsub(ignore_subscribe_messages=True) as channel:
                    await channel.subscribe(self._channel)
                    await self._find_those_before()
                    self._is_hearing = True
                    retry.reset()
                    logger.info("board: connected")
                    await self._listen(channel, on_news)
            except _AWAY as error:
                self._note_away(self._is_hearing, error)
                self._is_hearing = False
            await asyncio.sleep(retry.next_delay())

    async def _find_those_before(self) -> None:
        keys = [key async for key in self._server.scan_iter(match=self._prefix + "*", count=1000)]
        for message in await self._server.mget(keys[:MAX_WRITERS]) if keys else ():
            self._take(message)

    async def _listen(self, channel: Any, on_news: Callable[[], None]) -> None:
        quiet_since = self._clock()
        while True:
            message = await channel.get_message(timeout=1.0)
            if message is not None:
                self._take(message["data"])
                on_news()
                quiet_since = self._clock()
            elif self._clock() - quiet_since > EXPIRY_S:
                await channel.ping()  # our own words come back, too: so it is cut, or overloaded
                quiet_since = self._clock()

    def _take(self, message: object) -> None:
        """Keep what was said, if it is whole and of one who has the secret."""
        if not isinstance(message, bytes) or len(message) > MAX_BYTES + 64:
            return
        seal, content = message[:_SEAL_BYTES], message[_SEAL_BYTES:]
        if not hmac.compare_digest(seal, self._seal(content)):
            self._failures += 1
            return
        name, slot = content[:_NAME_BYTES], content[_NAME_BYTES:]
        if name[: len(self._group)] == self._group:
            return
        known = self._heard.get(name)
        if known is None and len(self._heard) >= MAX_WRITERS:
            return
        # The same object while it is the same, so that nobody decodes it again.
        kept = known[1] if known is not None and known[1] == slot else slot
        self._heard[name] = self._clock(), kept

    def _note_away(self, was_up: bool, error: BaseException) -> None:
        self._failures += 1
        if was_up:
            logger.warning("board: the server is away, others are not heard: %s", error)
