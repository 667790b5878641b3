"""Whether the event loop gets around to what was scheduled.

libuv takes up to 1,024 ready sockets at a time. Where it finds as many it asks for more, up to 48
times, before it runs a timer, a task or a callback. With a thousand streams whose tokens wait, that
is several seconds in which no connection is made or accepted and no time limit is looked at, while
the streams themselves flow.

So a connection that has just given something while a turn is overdue is not read until it has come.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

MAX_TURN_S = 0.02


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
