"""Keeps the lines of all models and the turns of their requests: which may start, and when one is
refused for want of room."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from random import Random
from typing import Annotated, NamedTuple

from kvevents.field_docs import gauge
from router.errors import NoReplica, QueueFull, QueueTimeout, RequestError
from router.fleet.line import Line, LineLimits, Waiter

LOOK_S = 0.05
"""How often to check deadlines, and whether a replica has room for another reason than the end of a
request."""
MAX_RETRY_AFTER_S = 600
_SPREAD = 0.25
"""Clients that were refused together come back spread over this much more of their time."""


class NoTurn:
    """Reasons why a request did not get its turn: the values of a label."""

    FULL = "full"
    """It came, or was displaced, while the line was full."""
    LATE = "late"
    """Its deadline would have passed before its turn, by the estimate at its arrival."""
    TIMEOUT = "timeout"
    """Its deadline has passed."""
    CLIENT_LEFT = "client_left"
    """Its client closed the connection."""
    GONE = "gone"
    """No replica serves its model any more."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Holds the counts of one model and class."""

    requests: Annotated[int, gauge("kvroute_queue_requests")]
    """Requests that wait for room at a replica."""
    tokens: Annotated[int, gauge("kvroute_queue_tokens")]
    """Cost of the requests that wait for room: prompt tokens to compute, and the usual length of a
    response."""


class RoomListener(NamedTuple):
    """Receives the outcomes of requests, by model and class number."""

    started: Callable[[str, int, float], object] = lambda _model, _priority, _waited_s: None
    refused: Callable[[str, int, str], object] = lambda _model, _priority, _why: None


@dataclass(eq=False, repr=False)
class WaitingRoom:
    """Lets requests start as there is room for them. Belongs to one event loop."""

    limits: LineLimits
    listener: RoomListener = field(default_factory=RoomListener)
    clock: Callable[[], float] = time.monotonic
    random: Random = field(default_factory=Random)
    """Spreads the times at which clients are to come back."""

    def __post_init__(self) -> None:
        self.on_turned: Callable[[], object] = lambda: None
        """Called when a first request waits, and when none waits any more."""
        self._lines: OrderedDict[str, Line] = OrderedDict()
        """Lines by model; the one served last stands last."""
        self._waiting = 0
        self._is_letting_in = False
        self._timer: asyncio.TimerHandle | None = None

    def enter(self, waiter: Waiter, is_room: bool) -> bool:
        """Admit a request, or let it wait.

        Returns:
            True if it may start at once. Else it waits, unless it has been started meanwhile.
        Raises:
            QueueFull: The line is full.
            QueueTimeout: Its deadline would pass before its turn.
        """
        now, model = self.clock(), waiter.model
        line = waiter.line = self._line(model)
        if is_room and not line.waiting:
            line.pass_by(waiter, now)
            self.listener.started(model, waiter.priority, 0.0)
            return True
        if line.wait_s(waiter, now) > waiter.deadline - now:
            self.listener.refused(model, waiter.priority, NoTurn.LATE)
            raise self._timeout(line, waiter, now)
        displaced = line.put(waiter, now)
        self._count()
        self._displace(line, displaced, waiter)
        if waiter in displaced:
            # Made here: an error in a variable would keep its own frames, and the request, alive.
            raise self._full(line, waiter, now)
        self._let_in()
        self._look_later()
        return False

    @property
    def is_empty(self) -> bool:
        return not self._waiting

    def passed(self, waiter: Waiter) -> None:
        """Note a request that has started elsewhere, since none waited and there was room. Call
        `over` at its end."""
        line = waiter.line = self._line(waiter.model)
        line.pass_by(waiter, self.clock())

    def count_passed(self, waiter: Waiter) -> None:
        """Count such a request as one that did not wait, once it is known to stay elsewhere."""
        self.listener.started(waiter.model, waiter.priority, 0.0)

    def over(self, waiter: Waiter, response_tokens: int | None = None) -> None:
        """A request has ended, whether it had its turn or still waited."""
        line = waiter.line
        if line is not None and waiter.is_waiting:
            line.leave(waiter)
            self._count()
            self.listener.refused(waiter.model, waiter.priority, NoTurn.CLIENT_LEFT)
        elif line is not None:
            line.ended(waiter, response_tokens)
        waiter.let_go()
        self.look()

    def look(self) -> None:
        """Start requests that have room now, and refuse those whose deadline has passed."""
        if not self._waiting:
            return
        now = self.clock()
        for line in list(self._lines.values()):
            expired = line.expired(now)
            self._count()
            late = [(waiter, self._timeout(line, waiter, now)) for waiter in expired]
            self._refuse(NoTurn.TIMEOUT, late)
        self._let_in()

    def forget(self, model: str) -> None:
        """Refuse the requests for a model that no replica serves any more."""
        line = self._lines.pop(model, None)
        waiting = [] if line is None else line.all_waiting()
        self._count()
        for waiter in waiting:
            waiter.is_waiting = False
        rule = "no replica serves it any more"
        self._refuse(NoTurn.GONE, [(waiter, NoReplica(model, rule)) for waiter in waiting])

    def statistics(self) -> Mapping[str, Sequence[Waiting]]:
        return {
            model: [Waiting(*counts) for counts in line.by_class()]
            for model, line in self._lines.items()
        }

    # --- steps ------------------------------------------------------------------------------------

    def _line(self, model: str) -> Line:
        line = self._lines.get(model)
        if line is None:
            line = self._lines[model] = Line(self.limits)
        return line

    def _let_in(self) -> None:
        """Start as many as have room; the models take turns."""
        if self._is_letting_in:
            return  # one that has just been started is over already
        self._is_letting_in = True
        try:
            while self._start_one():
                pass
        finally:
            self._is_letting_in = False

    def _start_one(self) -> bool:
        now = self.clock()
        for model, line in self._lines.items():
            waiter = line.take(now) if line.waiting else None
            if waiter is not None:
                self._lines.move_to_end(model)
                self._count()
                self.listener.started(model, waiter.priority, now - waiter.arrived)
                waiter.start()
                return True
        return False

    def _displace(self, line: Line, displaced: Sequence[Waiter], newest: Waiter) -> None:
        now = self.clock()
        if newest in displaced:
            self.listener.refused(newest.model, newest.priority, NoTurn.FULL)
        others = [waiter for waiter in displaced if waiter is not newest]
        full = [(waiter, self._full(line, waiter, now)) for waiter in others]
        self._refuse(NoTurn.FULL, full)

    def _refuse(self, why: str, refused: Sequence[tuple[Waiter, RequestError]]) -> None:
        """An error at one leaves none of the others unanswered."""
        with ExitStack() as refusing:
            for waiter, error in reversed(refused):
                refusing.callback(waiter.refuse, error)
                refusing.callback(self.listener.refused, waiter.model, waiter.priority, why)

    def _full(self, line: Line, waiter: Waiter, now: float) -> QueueFull:
        wait_s = line.wait_s(waiter, now, behind_all=True)
        return QueueFull(waiter.model, line.waiting, self._retry_after_s(wait_s))

    def _timeout(self, line: Line, waiter: Waiter, now: float) -> QueueTimeout:
        wait_s = line.wait_s(waiter, now)
        return QueueTimeout(waiter.model, line.waiting, self._retry_after_s(wait_s))

    def _retry_after_s(self, wait_s: float) -> int:
        spread = 1 + _SPREAD * self.random.random()
        return min(max(math.ceil(wait_s * spread), 1), MAX_RETRY_AFTER_S)

    def _count(self) -> None:
        before, self._waiting = self._waiting, sum(line.waiting for line in self._lines.values())
        if bool(before) is not bool(self._waiting):
            self.on_turned()

    def _look_later(self) -> None:
        if self._timer is None and self._waiting:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._looked)

    def _looked(self) -> None:
        self._timer = None
        try:
            self.look()
        finally:  # an error at one request must not keep the others waiting for ever
            self._look_later()
