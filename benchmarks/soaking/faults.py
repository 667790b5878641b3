"""The faults that are done to the fleet, and the failures that they excuse.

Every fault has a beginning and an end, and puts right what it did.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from benchmarks.soaking.clients import Fate, Sent
from benchmarks.soaking.fleet import Fleet, Replica
from benchmarks.soaking.links import Line
from tests.support.waiting import eventually

_WITHDRAWN_S = 1.0
"""The time that a balancer takes to notice: a `preStop` hook sleeps for so long."""
_AFTERWARDS_S = 3.0
"""A fault may still end a stream for so long after its end: a check that began before, fails."""


@dataclass
class Fault:
    """One thing that went wrong."""

    kind: str
    target: str
    began_at: float
    ended_at: float = float("inf")
    dying: tuple[float, float] | None = None
    """The time from when to when a router's process ended that could not finish what it had."""


class Faults:
    """Does one of *kinds* at a time, to a target chosen at random.

    The first router is never killed, so that it is seen how a process does in the long run.

    Args:
        fleet: What is tortured.
        random: Chooses.
        hold_s: How long something is away, at least and at most.
    """

    def __init__(
        self, fleet: Fleet, random: Random, hold_s: tuple[float, float] = (1.5, 6.0)
    ) -> None:
        self.done: list[Fault] = []
        self._fleet = fleet
        self._random = random
        self._hold_s = hold_s

    async def do(self, kind: str) -> None:
        """Make this happen, and put it right."""
        await KINDS[kind](self)

    def _fault(self, kind: str, target: str) -> Fault:
        fault = Fault(kind, target, time.monotonic())
        self.done.append(fault)
        return fault

    async def _hold(self) -> None:
        await asyncio.sleep(self._random.uniform(*self._hold_s))

    async def _freeze(self, kind: str, target: str, send: Callable[[int], object]) -> None:
        fault = self._fault(kind, target)
        send(signal.SIGSTOP)
        try:
            await self._hold()
        finally:
            send(signal.SIGCONT)
        fault.ended_at = time.monotonic()

    def _replica(self, linked: bool = False) -> Replica:
        return self._random.choice(
            [replica for replica in self._fleet.replicas if replica.links or not linked]
        )

    # --- engines ----------------------------------------------------------------------------------

    async def engine_killed(self) -> None:
        replica = self._replica()
        fault = self._fault("engine_killed", replica.name)
        replica.engine.kill()
        await self._hold()
        await asyncio.to_thread(replica.engine.start)
        fault.ended_at = time.monotonic()

    async def engine_frozen(self) -> None:
        replica = self._replica()
        await self._freeze("engine_frozen", replica.name, replica.engine.process.send_signal)

    async def events_lost(self) -> None:
        """The engine numbers batches and does not send them."""
        replica = self._replica()
        fault = self._fault("events_lost", replica.name)
        await replica.engine.post("/faults", {"kind": "drop_events", "batches": 5})
        await self._hold()
        fault.ended_at = time.monotonic()

    async def line_cut(self) -> None:
        await self._line("line_cut", Line.CUT)

    async def line_silent(self) -> None:
        await self._line("line_silent", Line.SILENT)

    async def _line(self, kind: str, line: Line) -> None:
        replica = self._replica(linked=True)
        fault = self._fault(kind, replica.name)
        for link in replica.links:
            link.set(line)
        await self._hold()
        for link in replica.links:
            link.set(Line.OPEN)
        fault.ended_at = time.monotonic()

    # --- routers ----------------------------------------------------------------------------------

    async def router_killed(self) -> None:
        router = self._fleet.routers[1]
        fault, pid = self._fault("router_killed", router.name), router.pid
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: not _runs(pid), "it ends", 60)
        fault.dying = fault.began_at, time.monotonic()
        await self._hold()
        await router.restart()
        fault.ended_at = time.monotonic()

    async def router_stopped(self) -> None:
        """Stop a router as an update does it: it gets nothing new, is told to stop, and finishes
        what it has."""
        router = self._fleet.routers[1]
        fault = self._fault("router_stopped", router.name)
        self._fleet.balancer.withdraw(router.name)
        await asyncio.sleep(_WITHDRAWN_S)
        await router.end()
        await router.restart()
        self._fleet.balancer.withdraw(router.name, is_withdrawn=False)
        fault.ended_at = time.monotonic()

    # --- the board --------------------------------------------------------------------------------

    async def board_killed(self) -> None:
        fault = self._fault("board_killed", "board")
        self._fleet.board.kill()
        await self._hold()
        self._fleet.board.start()
        fault.ended_at = time.monotonic()

    async def board_frozen(self) -> None:
        await self._freeze("board_frozen", "board", self._fleet.board.send_signal)

    # --- excuses ----------------------------------------------------------------------------------

    def excuse(self, sent: Sent) -> str | None:
        """Return the fault that took this request with it; None: it should have been served."""
        for fault in self.done:
            if _took(fault, sent):
                return fault.kind
        return None


def _took(fault: Fault, sent: Sent) -> bool:
    if fault.target == sent.router and fault.dying is not None:
        began_at, ended_at = fault.dying
        overlaps = sent.began_at <= ended_at and sent.ended_at >= began_at
        return overlaps and sent.fate is Fate.CUT
    if fault.kind in _TAKE_STREAMS and fault.target == sent.replica:
        overlaps = sent.began_at <= fault.ended_at + _AFTERWARDS_S and (
            sent.ended_at >= fault.began_at
        )
        # Nothing of a response may have been sent, or else there was another replica to send it to.
        begun = sent.fate is Fate.BROKEN or (sent.fate is Fate.CUT and sent.status == 200)
        return overlaps and begun
    return False


_TAKE_STREAMS = ("engine_killed", "engine_frozen", "line_cut", "line_silent")


def _runs(pid: int) -> bool:
    """Return whether any thread of a process is left: until the last has ended, its sockets are
    open."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the whole process is gone
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if (thread / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                    return True
    return False


KINDS: dict[str, Callable[[Faults], Awaitable[None]]] = {
    "engine_killed": Faults.engine_killed,
    "engine_frozen": Faults.engine_frozen,
    "events_lost": Faults.events_lost,
    "line_cut": Faults.line_cut,
    "line_silent": Faults.line_silent,
    "router_killed": Faults.router_killed,
    "router_stopped": Faults.router_stopped,
    "board_killed": Faults.board_killed,
    "board_frozen": Faults.board_frozen,
}
