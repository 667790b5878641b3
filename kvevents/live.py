"""The live side of one connection: batches in the order they came, also those that came during a
recovery."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvevents.delivery import Counters
from kvevents.errors import KVEventsError, MalformedBatch
from kvevents.messages import Batch, read_live
from kvevents.sockets import Connection

_READ_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class BacklogLimits:
    """How much may come in during a recovery; what is over is dropped, and the recovery goes on to
    fetch it."""

    batches: int = 10_000
    payload_bytes: int = 64 * 2**20


class LiveStream:
    """Batches of one SUB connection.

    Outside a recovery they stay in the socket until they are taken: a queue that libzmq bounds.
    During one they are read all the time, since nobody knows how long it takes and the publisher
    should not have to hold them.
    """

    def __init__(
        self,
        connection: Connection,
        topic: bytes | None,
        limits: BacklogLimits,
        counters: Counters,
        report: Callable[[KVEventsError], None],
    ) -> None:
        self._connection = connection
        self._topic = topic
        self._limits = limits
        self._counters = counters
        self._report = report
        self._backlog: deque[Batch] = deque()
        self._backlog_bytes = 0
        self._is_collecting = False
        self._will_collect = False

    @property
    def is_down(self) -> bool:
        """True once the publisher is gone; what it sent before can still be taken."""
        return self._connection.is_down

    @property
    def waiting(self) -> int:
        """Batches read during a recovery and not taken yet."""
        return len(self._backlog)

    async def open(self) -> None:
        """Connect; raises `NoConnection` or `EndpointError`."""
        await self._connection.open()

    def close(self) -> None:
        self._is_collecting = False
        self._connection.close()

    async def wait(self, timeout_s: float) -> None:
        """Until something may have come; only after `next` returned None."""
        await self._connection.wait(timeout_s)

    def next(self) -> Batch | None:
        """The next batch, None if there is none; raises `MalformedBatch` for a message that is no
        batch."""
        if self._backlog:
            return self._pop()
        frames = self._connection.receive()
        return None if frames is None else read_live(frames, self._topic)

    def put_back(self, batch: Batch) -> None:
        """Let *batch* come next, again."""
        self._backlog.appendleft(batch)
        self._backlog_bytes += len(batch.payload)

    # --- during a recovery ------------------------------------------------------------------------

    def start_collecting(self) -> None:
        """Read everything that comes, until `stop_collecting`."""
        self._is_collecting = True
        self._connection.on_readable = self._collect
        self._collect()

    def stop_collecting(self) -> None:
        self._is_collecting = False
        self._connection.on_readable = None

    def drop(self, count: int, last: int) -> None:
        """Drop the first *count* batches that wait: what of them the publisher ever sent has been
        handed on, up to *last*."""
        for _ in range(count):
            if self._pop().seq <= last:
                self._counters.duplicates += 1
            else:
                self._counters.discarded += 1

    def drop_stale(self, last: int) -> None:
        """Drop what waits of numbers up to *last*: all that is handed on already, or was never
        meant to be."""
        fresh = [batch for batch in self._backlog if batch.seq > last]
        self._counters.duplicates += len(self._backlog) - len(fresh)
        self._backlog = deque(fresh)
        self._backlog_bytes = sum(len(batch.payload) for batch in fresh)

    def _collect(self) -> None:
        if self._will_collect or not self._is_collecting:
            return
        for _ in range(_READ_AT_ONCE):
            frames = self._connection.receive()
            if frames is None:
                return
            self._keep(frames)
        self._will_collect = True
        asyncio.get_running_loop().call_soon(self._collect_on)

    def _collect_on(self) -> None:
        self._will_collect = False
        self._collect()

    def _keep(self, frames: list[bytes]) -> None:
        try:
            batch = read_live(frames, self._topic)
        except MalformedBatch as problem:
            self._report(problem)
            return
        size = self._backlog_bytes + len(batch.payload)
        if len(self._backlog) >= self._limits.batches or size > self._limits.payload_bytes:
            self._counters.overflow += 1
            return
        self._backlog.append(batch)
        self._backlog_bytes = size

    def _pop(self) -> Batch:
        batch = self._backlog.popleft()
        self._backlog_bytes -= len(batch.payload)
        return batch
