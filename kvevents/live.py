"""The live side of one connection: batches in the order they came, also those that came during a
recovery."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from kvevents.delivery import Delivery
from kvevents.errors import MalformedBatch
from kvevents.messages import Batch
from kvevents.sockets import WakeUp

_READ_AT_ONCE = 64


class Connection(Protocol):
    """A connection to a publisher; `Subscription` is one."""

    on_readable: Callable[[], None] | None
    """Called, instead of ending a wait, when there may be something to take."""
    wake_up: WakeUp
    """Set when there may be something to take, and when the publisher is gone."""

    @property
    def is_down(self) -> bool:
        """Return True once the publisher is gone; its earlier batches can still be taken."""

    async def open(self) -> None:
        """Begin.

        Raises:
            NoConnection: No publisher, for now.
            EndpointError: The endpoint cannot be connected to.
        """

    def close(self) -> None:
        """End at once; safe to call again."""

    def next_batch(self) -> Batch | None:
        """Return the next batch, None if none has come; raises `MalformedBatch`."""

    def has_more(self) -> bool:
        """Return whether there is another message."""


@dataclass(frozen=True, slots=True)
class BacklogLimits:
    """Bounds on batches during a recovery, which fetches those dropped beyond them."""

    batches: int = 10_000
    payload_bytes: int = 64 * 2**20


@dataclass(eq=False, repr=False)
class LiveStream:
    """Batches of one subscription.

    Outside a recovery they stay in the socket until they are taken: a queue that is bounded. During
    one they are read all the time into a backlog: it may take long, and the publisher should not
    have to hold them.
    """

    connection: Connection
    limits: BacklogLimits
    """Bounds of the backlog."""
    delivery: Delivery
    """Counts what is left out, and reports messages that are not batches."""

    def __post_init__(self) -> None:
        self._backlog: deque[Batch] = deque()
        self._backlog_bytes = 0
        self._next_pass: asyncio.Handle | None = None
        self.waiting_at_question = 0
        """Batches that waited when the last question was asked."""
        self._covered = 0

    def close(self) -> None:
        """End the connection, and keep nothing of what waited."""
        self._stop_collecting()
        self._backlog.clear()
        self._backlog_bytes = 0
        self.connection.close()

    async def wait(self, timeout_s: float, take: Callable[[], None]) -> None:
        """Wait until the publisher is gone, the connection is woken, or *timeout_s* is over; only
        after `next` returned None.

        Args:
            take: Called on the event loop whenever a batch may have come. It takes batches until
                `next` returns None, or schedules itself for the rest.
        """
        self.connection.on_readable = take
        try:
            await self.connection.wake_up.wait(timeout_s)
        finally:
            self.connection.on_readable = None

    def next(self) -> Batch | None:
        """Return the next batch, None if none has come.

        Raises:
            MalformedBatch: A message that is not a batch.
        """
        if self._backlog:
            return self._pop()
        return self.connection.next_batch()

    def has_more(self) -> bool:
        """Return whether there is another message; cheaper than `next` if none has come."""
        return bool(self._backlog) or self.connection.has_more()

    def put_back(self, batch: Batch) -> None:
        """Let *batch* come next, again."""
        self._backlog.appendleft(batch)
        self._backlog_bytes += len(batch.payload)

    # --- during a recovery ------------------------------------------------------------------------

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Read all batches while the context is open."""
        self.connection.on_readable = self._collect
        self._collect()
        try:
            yield
        finally:
            self._stop_collecting()

    def note_question(self) -> None:
        """Note that a question is asked now."""
        self.waiting_at_question = len(self._backlog)

    def note_answer(self) -> None:
        """Note that the answer to the last question was read to its end.

        It covers the batches that waited when it was asked: each was in it, or was never sent by
        the publisher that answered.

            backlog at the question   [7 8 9]
            backlog at the answer     [7 8 9 10 11]     7, 8 and 9 are covered
        """
        self._covered = self.waiting_at_question

    def waits_beyond(self, last: int | None) -> bool:
        """Return whether a batch with a number above *last* waited when the last question was
        asked."""
        asked = islice(self._backlog, self.waiting_at_question)
        return any(last is None or batch.seq > last for batch in asked)

    def forget_answers(self) -> None:
        """Forget the answers so far."""
        self._covered = 0

    def drop_covered(self, last: int | None) -> None:
        """Drop the batches that an answer covers; *last* is the number handed on last."""
        for _ in range(self._covered):
            seq = self._pop().seq
            if last is not None and seq <= last:
                self.delivery.counters.duplicates += 1
            else:
                self.delivery.counters.discarded += 1
        self._covered = 0

    def drop_old(self, last: int | None) -> None:
        """Drop the batches with numbers up to *last*, the one handed on last."""
        if last is None:
            return
        fresh = [batch for batch in self._backlog if batch.seq > last]
        self.delivery.counters.duplicates += len(self._backlog) - len(fresh)
        self._backlog = deque(fresh)
        self._backlog_bytes = sum(len(batch.payload) for batch in fresh)

    def _stop_collecting(self) -> None:
        self.connection.on_readable = None
        if self._next_pass is not None:
            self._next_pass.cancel()
            self._next_pass = None

    def _collect(self) -> None:
        if self._next_pass is not None:
            return
        for _ in range(_READ_AT_ONCE):
            try:
                batch = self.connection.next_batch()
            except MalformedBatch as problem:
                self.delivery.report(problem)
                continue
            if batch is None:
                return
            self._keep(batch)
        self._next_pass = asyncio.get_running_loop().call_soon(self._collect_on)

    def _collect_on(self) -> None:
        self._next_pass = None
        self._collect()

    def _keep(self, batch: Batch) -> None:
        size = self._backlog_bytes + len(batch.payload)
        if len(self._backlog) >= self.limits.batches or size > self.limits.payload_bytes:
            self.delivery.counters.overflow += 1
            return
        self._backlog.append(batch)
        self._backlog_bytes = size

    def _pop(self) -> Batch:
        batch = self._backlog.popleft()
        self._backlog_bytes -= len(batch.payload)
        return batch
