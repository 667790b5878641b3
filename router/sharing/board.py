"""The interface of a board, and what synchronises a process with it.

One's own slot is published and the others' are read in the background. No request waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Protocol

from kvevents.field_docs import counter, flag, gauge
from router.sharing.slots import Slot, SlotError, decode_slot, encode_slot

logger = logging.getLogger(__name__)

INTERVAL_S = 0.02
"""The time between two looks for changes."""
SPACING_S = 0.002
"""The least time between two that are asked for."""
MOST_SHARE = 0.05
"""The most of a processor's time that publishing may take, and receiving as well: where much is to
be published, it is published less often."""
MOST_PAUSE_S = 0.25
"""The longest pause that this makes."""
MOST_DELAY_S = 2 * MOST_PAUSE_S
"""The longest time from an event at one router until another knows of it."""


@dataclass(frozen=True, slots=True)
class BoardStatistics:
    """One board in numbers."""

    is_up: Annotated[
        bool,
        flag("kvroute_board_up", "1 while other routers can be reached over this board: `valkey`."),
    ]
    """True if other routers can be reached, and reach this process."""
    writers: Annotated[int, gauge("kvroute_board_writers")]
    """Other routers whose state arrives over this board."""
    oldest_s: Annotated[float, gauge("kvroute_board_oldest_seconds")]
    """Age of the oldest state that arrived over this board; half a second is usual."""
    published: Annotated[int, counter("kvroute_board_published")]
    """Times that new state was published over this board."""
    failures: Annotated[int, counter("kvroute_board_failures")]
    """Times that this board could not be reached, and states that could not be read, were
    sealed with another secret, or were old."""
    clock_off_s: Annotated[float, gauge("kvroute_board_clock_off_seconds")] = 0.0
    """How far the clock here is ahead of another router's (behind: negative), while that is too
    much for its state to be believed; else 0."""


class Board(Protocol):
    """Slots of bytes by writer. Belongs to one event loop; no call waits or does I/O but `run`."""

    kind: str
    """The kind in metrics: `valkey`."""

    def publish(self, slot: bytes) -> None:
        """Publish this from now on, in place of what was published before."""

    def read(self) -> Mapping[str, bytes]:
        """The fresh slots of the others, by writer. One that has not changed is the same object."""

    def note_broken(self) -> None:
        """Count a slot that could not be read."""

    def statistics(self) -> BoardStatistics:
        """Return its state now."""

    async def run(self, on_news: Callable[[], None]) -> None:
        """Exchange with the board's server until cancelled.

        Args:
            on_news: Called when a slot of another has changed, where the board notices it.
        """


@dataclass(eq=False, repr=False)
class BoardExchange:
    """Synchronises one process with its board. Belongs to one event loop."""

    board: Board
    collect: Callable[[], Slot]
    take: Callable[[Mapping[str, Slot]], None]
    """Takes what all others publish, by writer, whenever it has changed."""
    clock: Callable[[], float] = time.monotonic
    """A monotonic clock, in seconds."""
    cpu_clock: Callable[[], float] = time.thread_time
    """The processor time of this thread, in seconds. It stands still while others have the
    processor, however long that is."""

    def __post_init__(self) -> None:
        self._published = b""
        self._received: dict[str, tuple[bytes, Slot | None]] = {}
        self._soon: asyncio.TimerHandle | None = None
        self._publish_after = self._receive_after = 0.0
        """The earliest time to publish again, on the clock."""

    async def run(self) -> None:
        running = asyncio.create_task(self.board.run(self.catch_up))
        try:
            while True:
                if self.clock() >= self._publish_after:
                    self._publish()
                self.catch_up()
                if running.done():
                    running.result()
                busy_until = max(self._publish_after, self._receive_after)
                await asyncio.sleep(max(INTERVAL_S, busy_until - self.clock()))
        finally:
            if self._soon is not None:
                self._soon.cancel()
            running.cancel()
            await asyncio.wait([running])

    def soon(self) -> None:
        if self._soon is None:
            delay_s = max(SPACING_S / 2, self._publish_after - self.clock())
            self._soon = asyncio.get_running_loop().call_later(delay_s, self._publish_now)

    def catch_up(self) -> None:
        """Take what others have published since the last look, unless that was just now."""
        if self.clock() >= self._receive_after:
            self._read()

    def _publish_now(self) -> None:
        self._soon = None
        if self.clock() >= self._publish_after:
            self._publish()
        else:  # it was published meanwhile, but perhaps not all of it
            self.soon()

    def _publish(self) -> None:
        begun_at = self.cpu_clock()
        data = encode_slot(self.collect())
        if data != self._published:
            self.board.publish(data)
        self._published = data
        self._publish_after = self.clock() + self._pause_s(begun_at)

    def _pause_s(self, begun_at: float) -> float:
        """Seconds until the next time, after work that began at *begun_at* of the processor's
        clock."""
        return min((self.cpu_clock() - begun_at) / MOST_SHARE, MOST_PAUSE_S)

    def _read(self) -> None:
        begun_at = self.cpu_clock()
        found: dict[str, tuple[bytes, Slot | None]] = {}
        has_changed = False
        for writer, data in self.board.read().items():
            known = self._received.get(writer)
            if known is None or known[0] is not data:
                known = data, self._decoded(data)
                has_changed = True
            found[writer] = known
        if has_changed or len(found) != len(self._received):
            self._received = found
            self.take({name: slot for name, (_, slot) in found.items() if slot is not None})
        self._receive_after = self.clock() + max(SPACING_S, self._pause_s(begun_at))

    def _decoded(self, data: bytes) -> Slot | None:
        try:
            return decode_slot(data)
        except SlotError as error:
            self.board.note_broken()
            logger.debug("board: %s", error)
            return None
