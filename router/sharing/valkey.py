"""The board of routers on several machines: Valkey or Redis.

Each process has a key of its own, which expires, and publishes every change on one channel: a
subscriber receives it at once, and a process that starts later finds the keys. Both take one round
trip, in a task of their own, with at most one under way. While the server is away, what the others
published expires here as it does there, and each process goes on with what it knows itself.

What comes from the server is sealed with the secret that all share: without it no one who reaches
the server can make up load or read whose keys are whose. Nor can recorded messages be repeated.
Sealed with them are a name that each process draws at its start, a number that grows with every
message, and the time:

    seal 16 | name 16 | number 8 | time 8 | slot

A message of a known name must have a higher number than the last one. Any message must be recent: a
process that has just started knows no names yet. A name is known for longer than its messages are
recent, so a recorded message counts only at a process that did not receive it, and there for a few
seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import hmac
import logging
import math
import secrets
import struct
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, NamedTuple

import redis.asyncio as redis
from redis.exceptions import RedisError
from typing_extensions import override

from kvevents.pacing import Backoff
from router.config.sharing import BoardConfig
from router.sharing.board import Board, BoardStatistics
from router.sharing.slots import MAX_BYTES

logger = logging.getLogger(__name__)

SPACING_S = 0.02
"""The least time between two messages."""
BEAT_S = 0.4
EXPIRY_S = 2.0
MAX_WRITERS = 1024
MOST_OFF_S = 5.0
"""A message is recent up to this age by the clock here, and as far ahead of it: the clocks of
routers may differ by as much, with the two seconds for which a message holds. NTP keeps them within
a hundredth of that."""
KNOWN_S = 3 * MOST_OFF_S
"""How long a name is known after its last message, which can be repeated for `2 * MOST_OFF_S`."""
WARNED_S = 60.0
"""The least time between two warnings of a clock."""
FIRST_DELAY_S, MAX_DELAY_S = 0.1, 5.0
"""Delays before the next try, while the server is away."""
TIMEOUT_S = 2.0
"""The longest round trip."""
_SEAL_BYTES = 16
_NAME_BYTES = 16
_STAMP = struct.Struct(">Qd")
_HEAD_BYTES = _NAME_BYTES + _STAMP.size
_AWAY = (
    *(RedisError, OSError, asyncio.TimeoutError),
    *(RuntimeError, ValueError, TypeError, LookupError, AttributeError),
)
"""The errors of the client. uvloop raises RuntimeError where something is written to a transport
that has just been closed; the rest is what Python says of an answer that is not of a server of this
kind. Only the client's calls stand where they are caught."""
_MAX_REASON_CHARS = 200
_UNSENT, _UNHEARD = "nothing is published", "nothing arrives from others"


def connect(config: BoardConfig, secret: bytes) -> ValkeyBoard:
    """A board on a server, which is connected to when it runs."""
    url, password = config.url or "", config.password
    tls: dict[str, Any] = {
        "ssl_ca_certs": config.ca,
        "ssl_certfile": config.certificate,
        "ssl_keyfile": config.key,
    }
    server = redis.Redis.from_url(
        "redis" + url.removeprefix("redis").removeprefix("valkey"),
        username=config.username,
        password=None if password is None else password.get_secret_value(),
        socket_timeout=TIMEOUT_S,
        socket_connect_timeout=TIMEOUT_S,
        **(tls if url.startswith(("rediss:", "valkeys:")) else {}),
    )
    return ValkeyBoard(server, config.prefix, secret)


class _Message(NamedTuple):
    """The last message under a name."""

    number: int
    at: float
    slot: bytes


class ClockDoubt:
    """Separates a clock that is off from a pause of this process. Old messages come after either;
    only with a wrong clock do they come for seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = self._last = self._warned = -math.inf
        self._off_s = 0.0

    @property
    def off_s(self) -> float:
        """How far the clock here is ahead of another's; 0 without doubt."""
        is_present = self._clock() - self._last <= EXPIRY_S <= self._last - self._since
        return self._off_s if is_present else 0.0

    def note(self, off_s: float) -> None:
        """A message of another time has come.

        Args:
            off_s: Its age by the clock here.
        """
        now = self._clock()
        if now - self._last > EXPIRY_S:
            self._since = now
        self._last, self._off_s = now, off_s
        if self.off_s and now - self._warned >= WARNED_S:
            self._warned = now
            side = "ahead of" if off_s > 0 else "behind"
            logger.warning(
                "board: the clock here is %.1f s %s another router's, whose messages are not "
                "believed: they must agree within %g s (NTP); or old messages are repeated",
                abs(off_s),
                side,
                MOST_OFF_S,
            )


class ValkeyBoard(Board):
    """One process's end of the board.

    Args:
        server: Has no connection yet; closed at the end of `run`.
        prefix: Of the key and the channel; it separates boards.
        wall_clock: The time of day, in seconds; within `MOST_OFF_S` that of the others.
    """

    kind = "valkey"

    def __init__(
        self,
        server: redis.Redis,
        prefix: str,
        secret: bytes,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._server = server
        self._channel = f"{prefix}:board"
        self._prefix = f"{prefix}:slot:"
        self._secret = hashlib.blake2b(secret, digest_size=32, person=b"board words").digest()
        self._name = secrets.token_bytes(_NAME_BYTES)
        self._clock = clock
        self._wall_clock = wall_clock
        self._number = 0
        self._slot = b""
        self._is_new = asyncio.Event()
        self._received: dict[bytes, _Message] = {}
        """The last messages, by name."""
        self._doubt = ClockDoubt(clock)
        self._is_publishing = self._is_subscribed = False
        self._reasons: dict[str, str] = {}
        """Why it is away, by what that means, as it was logged."""
        # The client may swallow a cancellation that meets the end of a call.
        self._is_over = False
        self._published = self._failures = 0

    # --- what the exchange calls ------------------------------------------------------------------

    @override
    def publish(self, slot: bytes) -> None:
        self._slot = slot
        self._is_new.set()

    @override
    def read(self) -> Mapping[str, bytes]:
        oldest = self._clock() - KNOWN_S
        self._received = {
            name: message for name, message in self._received.items() if message.at >= oldest
        }
        return {name.hex(): message.slot for name, message in self._fresh()}

    @override
    def note_broken(self) -> None:
        self._failures += 1

    @override
    def statistics(self) -> BoardStatistics:
        now = self._clock()
        ages = [now - message.at for _, message in self._fresh()]
        return BoardStatistics(
            self._is_publishing and self._is_subscribed,
            len(ages),
            max(ages, default=0.0),
            self._published,
            self._failures,
            self._doubt.off_s,
        )

    def _fresh(self) -> list[tuple[bytes, _Message]]:
        oldest = self._clock() - EXPIRY_S
        return [(name, message) for name, message in self._received.items() if message.at >= oldest]

    @override
    async def run(self, on_news: Callable[[], None]) -> None:
        tasks = [
            asyncio.create_task(self._publish_changes()),
            asyncio.create_task(self._subscribe(on_news)),
        ]
        try:
            # Not `gather`, which waits for tasks that it cancelled: the client may swallow that,
            # and they would not know yet that it is over.
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            self._is_over = True
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._server.aclose()

    # --- publishing -------------------------------------------------------------------------------

    async def _publish_changes(self) -> None:
        retry = Backoff(FIRST_DELAY_S, MAX_DELAY_S)
        while not self._is_over:
            self._is_new.clear()
            message = self._sealed(self._slot)
            try:
                await self._publish(message)
            except _AWAY as error:
                self._is_publishing = False
                self._note_away(_UNSENT, error)
                await asyncio.sleep(retry.next_delay())
                continue
            self._is_publishing = True
            self._reasons.pop(_UNSENT, None)
            retry.reset()
            await asyncio.sleep(SPACING_S)
            beat = asyncio.get_running_loop().call_later(BEAT_S, self._is_new.set)
            await self._is_new.wait()
            beat.cancel()

    async def _publish(self, message: bytes) -> None:
        key = self._prefix + self._name.hex()
        async with self._server.pipeline(transaction=False) as pipeline:
            pipeline.set(key, message, px=int(EXPIRY_S * 1000))
            pipeline.publish(self._channel, message)
            await pipeline.execute()
        self._published += 1

    def _sealed(self, slot: bytes) -> bytes:
        self._number += 1
        content = self._name + _STAMP.pack(self._number, self._wall_clock()) + slot
        return self._seal(content) + content

    def _seal(self, content: bytes) -> bytes:
        return hashlib.blake2b(content, digest_size=_SEAL_BYTES, key=self._secret).digest()

    # --- receiving --------------------------------------------------------------------------------

    async def _subscribe(self, on_news: Callable[[], None]) -> None:
        async with contextlib.aclosing(self._messages()) as messages:
            async for message in messages:
                self._take(message)
                on_news()

    async def _messages(self) -> AsyncGenerator[object, None]:
        """Yield what the others publish, as long as the board runs."""
        retry = Backoff(FIRST_DELAY_S, MAX_DELAY_S)
        while not self._is_over:
            try:
                async with self._server.pubsub() as channel:
                    await channel.subscribe(self._channel)
                    if await channel.get_message(timeout=TIMEOUT_S) is None:  # else it is refused
                        raise asyncio.TimeoutError("no answer to a subscription")
                    for message in await self._existing():
                        yield message
                    self._is_subscribed = True
                    self._reasons.pop(_UNHEARD, None)
                    retry.reset()
                    logger.info("board: connected")
                    while not self._is_over:
                        yield await self._next(channel)
            except _AWAY as error:
                self._is_subscribed = False
                self._note_away(_UNHEARD, error)
            await asyncio.sleep(retry.next_delay())

    async def _existing(self) -> list[object]:
        keys = [key async for key in self._server.scan_iter(match=self._prefix + "*", count=1000)]
        return list(await self._server.mget(keys[:MAX_WRITERS])) if keys else []

    async def _next(self, channel: Any) -> object:
        """Wait for the next message. Our own come back as well: without any, the connection is cut,
        or overloaded."""
        quiet_since = self._clock()
        next_message = functools.partial(channel.get_message, ignore_subscribe_messages=True)
        while (message := await next_message(timeout=1.0)) is None and not self._is_over:
            if self._clock() - quiet_since > EXPIRY_S:
                await channel.ping()
                quiet_since = self._clock()
        return None if message is None else message["data"]

    def _take(self, message: object) -> None:
        """Keep a message that is whole, new, and from a router with the secret."""
        if not isinstance(message, bytes) or len(message) > MAX_BYTES + 64:
            return
        seal, content = message[:_SEAL_BYTES], message[_SEAL_BYTES:]
        is_sealed = hmac.compare_digest(seal, self._seal(content))
        if not is_sealed or len(content) < _HEAD_BYTES:
            self._failures += 1
            return
        name, slot = content[:_NAME_BYTES], content[_HEAD_BYTES:]
        if name == self._name:
            return
        number, sent_at = _STAMP.unpack(content[_NAME_BYTES:_HEAD_BYTES])
        known = self._received.get(name)
        if known is None and len(self._received) >= MAX_WRITERS:
            return
        if known is not None and number <= known.number:
            # The last one comes twice, from the channel and from its key, where both are read.
            self._failures += number < known.number
            return
        age_s = self._wall_clock() - sent_at
        if not abs(age_s) <= MOST_OFF_S:
            self._failures += 1
            self._doubt.note(age_s)
            return
        # The same object while it is the same, so that it is not decoded again.
        kept = known.slot if known is not None and known.slot == slot else slot
        self._received[name] = _Message(number, self._clock(), kept)

    def _note_away(self, consequence: str, error: BaseException) -> None:
        """Count a failure, and log its reason where that is another than before."""
        self._failures += 1
        why = str(error)[:_MAX_REASON_CHARS]
        if self._reasons.get(consequence) != why:
            self._reasons[consequence] = why
            logger.warning("board: the server is away, %s: %s", consequence, why)
