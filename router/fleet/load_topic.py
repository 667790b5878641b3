"""Reads the load that an engine publishes: SGLang (0.5.23) with `--load-publish-endpoint`, on a PUB
socket for each data-parallel rank.

Three frames, `[topic, seq: i64 big-endian, msgpack]`; the last one is `["LoadStat", running
requests, waiting requests, KV tokens in use, KV tokens that fit, rank, ...]`. Changes come at once,
and the same again every second. A reading that is lost is replaced by the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import msgspec
import zmq

from kvevents.errors import UNREADABLE, KVEventsError
from kvevents.sockets import SocketConnection, SocketLimits
from kvevents.tasks import begin_lasting
from router.fleet.engine_load import MAX_REQUESTS, EngineLoad, EngineRankLoad

STALE_AFTER_S = 3.0
"""After so long without a message a rank's load is unknown; it publishes every second."""
RETRY_S = 1.0
MAX_MESSAGE_BYTES = 64 * 1024
_QUEUE_MESSAGES = 16
_LONGEST_WAIT_S = 3600.0

_Requests = Annotated[int, msgspec.Meta(ge=0, le=MAX_REQUESTS)]
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class LoadTopic(NamedTuple):
    """The address of one rank's published load."""

    dp_rank: int
    endpoint: str
    topic: str


class LoadStat(msgspec.Struct, array_like=True, tag="LoadStat"):
    """One reading; what newer versions append is ignored."""

    running: _Requests
    waiting: _Requests
    tokens: _Tokens
    max_tokens: _Tokens
    """0 where it is not known."""


_DECODER = msgspec.msgpack.Decoder(LoadStat)


def read_load(frames: Sequence[bytes]) -> LoadStat | None:
    """Read one message; None for anything else. Never raises."""
    if len(frames) != 3:
        return None
    try:
        return _DECODER.decode(frames[2])
    except UNREADABLE:
        return None


def whole_load(stats: Mapping[int, LoadStat]) -> EngineLoad:
    """Sum up the load of a replica.

    Args:
        stats: The latest of each rank.
    """
    sized = [stat for stat in stats.values() if stat.max_tokens]
    ranks = [EngineRankLoad(rank, stats[rank].running, stats[rank].waiting) for rank in stats]
    return EngineLoad(
        sum(stat.running for stat in stats.values()),
        sum(stat.waiting for stat in stats.values()),
        max((min(stat.tokens / stat.max_tokens, 1.0) for stat in sized), default=None),
        tuple(sorted(ranks, key=lambda rank: rank.dp_rank)) if len(ranks) > 1 else (),
        cache_tokens=min((stat.max_tokens for stat in sized), default=None),
    )


@dataclass(eq=False, repr=False)
class LoadFollower:
    """Follows one replica's published load. Belongs to one event loop."""

    _context: zmq.Context[Any]
    _clock: Callable[[], float]
    _allows: Callable[[str], bool] | None

    def __post_init__(self) -> None:
        self._limits = SocketLimits(
            message_bytes=MAX_MESSAGE_BYTES, queue_messages=_QUEUE_MESSAGES, allows=self._allows
        )
        self._followed: tuple[LoadTopic, ...] = ()
        self._tasks: tuple[asyncio.Task[None], ...] = ()
        self._latest: dict[int, tuple[float, LoadStat]] = {}

    @property
    def is_live(self) -> bool:
        """Return whether every rank has published lately."""
        since = self._clock() - STALE_AFTER_S
        recent = [at for at, _ in self._latest.values() if at >= since]
        return bool(self._followed) and len(recent) == len(self._followed)

    def follow(
        self, topics: tuple[LoadTopic, ...], take: Callable[[EngineLoad], None] | None = None
    ) -> None:
        """Follow these from now on, and no others.

        Args:
            take: Called with the load of the whole replica whenever a rank has published, while all
                of them are known. Only the tasks hold it: who is called holds us.
        """
        if topics == self._followed:
            return
        self.cancel()
        self._followed = topics
        self._tasks = tuple(
            begin_lasting(
                self._follow(topic, take),
                f"load at {topic.endpoint}",
                "the load is scraped from now on",
            )
            for topic in topics
        )

    def cancel(self) -> tuple[asyncio.Task[None], ...]:
        """Follow nothing; await the end of the tasks that are returned."""
        tasks, self._tasks = self._tasks, ()
        self._followed = ()
        self._latest.clear()
        for task in tasks:
            task.cancel()
        return tasks

    async def _follow(self, topic: LoadTopic, take: Callable[[EngineLoad], None] | None) -> None:
        while True:
            connection = SocketConnection(
                self._context, zmq.SUB, topic.endpoint, self._limits, topic.topic.encode()
            )
            try:
                await connection.open()
                while not connection.is_down:
                    if self._read(topic.dp_rank, connection) and take is not None:
                        take(whole_load({rank: stat for rank, (_, stat) in self._latest.items()}))
                    await connection.wake_up.wait(_LONGEST_WAIT_S)
            except KVEventsError:
                pass  # it may come later; until then its metrics are asked
            finally:
                connection.close()
            await asyncio.sleep(RETRY_S)

    def _read(self, dp_rank: int, connection: SocketConnection) -> bool:
        """Take the newest message; return whether the load of all ranks is known now."""
        newest = None
        while (frames := connection.receive()) is not None:
            newest = read_load(frames) or newest
        if newest is None:
            return False
        self._latest[dp_rank] = self._clock(), newest
        return self.is_live
