"""How subscribers share the event loop, how long they wait before they try again, and when they
look."""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from time import monotonic


class Pacer:
    """Gives all subscribers together one slice of time in each pass of the event loop, in turn.

    A flood from one publisher then delays the others by their turns, and everything else on the
    loop by one slice.

    Args:
        slice_s: Seconds of work in one pass.
    """

    def __init__(self, slice_s: float = 0.002) -> None:
        self._slice_s = slice_s
        self._pass_ends_at = 0.0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_open = False

    async def turn(self) -> float:
        """Wait for time to work; returns until when, on the monotonic clock."""
        if self._waiting or not self._has_time():
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            await waiter
        return self._pass_ends_at

    def _has_time(self) -> bool:
        if not self._is_open:
            self._open_pass()
        return monotonic() < self._pass_ends_at

    def _open_pass(self) -> None:
        self._is_open = True
        self._pass_ends_at = monotonic() + self._slice_s
        # Runs in the next pass of the loop, after everything that is ready by then had its chance.
        asyncio.get_running_loop().call_soon(self._close_pass)

    def _close_pass(self) -> None:
        self._is_open = False
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                self._open_pass()
                waiter.set_result(None)
                return


class WorkSlice:
    """One subscriber's part in the time of a *pacer*."""

    def __init__(self, pacer: Pacer) -> None:
        self._pacer = pacer
        self._ends_at = 0.0

    async def breathe(self) -> None:
        """Let the others work if the slice is used up; call it before each batch."""
        if monotonic() >= self._ends_at:
            self._ends_at = await self._pacer.turn()


class Backoff:
    """Delays that double up to a cap, spread by up to a half so that many who fail together do not
    return together.

    Args:
        first_s: The first delay, in seconds.
        cap_s: The longest.
    """

    def __init__(self, first_s: float, cap_s: float) -> None:
        self._first_s = first_s
        self._cap_s = cap_s
        self._delay_s = first_s

    def next_delay(self) -> float:
        """Seconds to wait now."""
        delay = self._delay_s
        self._delay_s = min(delay * 2, self._cap_s)
        return delay * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Begin with the first delay again."""
        self._delay_s = self._first_s


class SilenceTimer:
    """When to look whether something was lost at the tail: ever later, until a batch comes.

    Args:
        first_s: Seconds of silence before the first look.
        cap_s: The most between two looks.
    """

    def __init__(self, first_s: float, cap_s: float) -> None:
        self._backoff = Backoff(first_s, cap_s)
        self._due_at = math.inf

    @property
    def left_s(self) -> float:
        """Seconds until the next look; 0 or less if it is due, infinite before the first call."""
        return self._due_at - monotonic()

    def looked(self) -> None:
        """Wait longer for the next look."""
        self._due_at = monotonic() + self._backoff.next_delay()

    def heard(self) -> None:
        """Begin with the first silence again."""
        self._backoff.reset()
        self.looked()
