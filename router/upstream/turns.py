"""Turns of the event loop that do not get too long.

libuv takes up to 1,024 ready sockets at a time. Where it finds as many it asks for more, up to 48
times, before it runs a timer, a task or a callback. With a thousand streams whose tokens wait, that
is several seconds in which no connection is made or accepted and no time limit is looked at, while
the streams themselves flow.

So a connection that has just given something while a turn is overdue is not read until it has come,
and of many requests that come together no more are begun in one turn than it has time for.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

MAX_TURN_S = 0.02
"""After so long a turn is overdue, and has done enough of what can wait for the next."""


class HeldConnection(Protocol):
    """One that is not read until the next turn."""

    def release(self) -> None:
        """The turn has come."""


class LoopTurns:
    """Notices turns of the event loop that are overdue. Belongs to one event loop.

    Args:
        loop: By default the one that runs at the first call.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop
        self._asked_at: float | None = None
        self._held: list[HeldConnection] = []

    def is_overdue(self) -> bool:
        """Whether the turn that was asked for has not come for a while; asks for one if none is."""
        loop = self._loop = self._loop or asyncio.get_running_loop()
        if self._asked_at is not None:
            return loop.time() - self._asked_at > MAX_TURN_S
        self._asked_at = loop.time()
        loop.call_soon(self._come)
        return False

    def hold(self, connection: HeldConnection) -> None:
        """Release *connection* at the next turn, which was asked for."""
        self._held.append(connection)

    def _come(self) -> None:
        self._asked_at = None
        held, self._held = self._held, []
        for connection in held:
            connection.release()


class PacedJobs:
    """Spreads much work over turns of the event loop. Belongs to one event loop.

    What is written is sent at the end of a turn, and no stream goes on before it. So if a thousand
    requests that come together were all decided at once, the replica of the first would not hear of
    it until the last was decided, and every stream would stop for as long.

    Args:
        loop: By default the one that runs at the first call.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop
        self._until: float | None = None
        """When this turn has done enough; None: it has done nothing yet."""
        self._waiting: deque[Callable[[], object]] = deque()

    def run(self, job: Callable[[], object]) -> None:
        """Call *job*: at once if this turn has time for it and none waits, else in one of the next
        turns, in order. It must not raise."""
        loop = self._loop = self._loop or asyncio.get_running_loop()
        if self._until is None:
            self._until = loop.time() + MAX_TURN_S
            loop.call_soon(self._come)
        elif self._waiting or loop.time() >= self._until:
            self._waiting.append(job)
            return
        job()

    def _come(self) -> None:
        waiting, loop = self._waiting, self._loop
        assert loop is not None
        if not waiting:
            self._until = None
            return
        self._until = until = loop.time() + MAX_TURN_S
        loop.call_soon(self._come)
        while waiting and loop.time() < until:
            waiting.popleft()()
