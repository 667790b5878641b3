"""Shares the event loop among subscribers, and times their retries and their looks at the tail."""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable
from time import monotonic


class Pacer:
    """Gives all subscribers together one slice of time in each pass of the event loop, in turns.

    A flood from one publisher then delays the others by their turns, and everything else on the
    loop by one slice.

    Args:
        slice_s: Seconds of work in one pass.
    """

    def __init__(self, slice_s: float = 0.002) -> None:
        self._slice_s = self._left_s = slice_s
        self._waiting: deque[Callable[[float], bool]] = deque()
        self._is_closing = False

    def begin(self, now: float) -> float:
        """Return until when there is time to work at once; 0 if there is no time: ask
        `call_in_turn`. Call `end` when the work is done.

        Args:
            now: On the monotonic clock, like all times here.
        """
        return now + self._left_s if self._left_s > 0 and not self._waiting else 0.0

    def end(self, worked_s: float) -> None:
        """Count *worked_s* seconds of work.

        The slice is renewed in the pass after the one in which it is used up: short work needs no
        call in every pass.
        """
        self._left_s -= worked_s
        if self._left_s <= 0:
            self._close_soon()

    def call_in_turn(self, work: Callable[[float], bool]) -> None:
        """Call *work* once there is time, with its end; it returns False if it has nothing to do
        any more, and the turn goes to the next."""
        self._waiting.append(work)
        self._close_soon()

    async def turn(self) -> float:
        """Wait for the rest of a slice; return its end."""
        ends_at = self.begin(monotonic())
        if ends_at:
            self.end(self._left_s)
            return ends_at
        waiter: asyncio.Future[float] = asyncio.get_running_loop().create_future()

        def begin(ends_at: float) -> bool:
            if waiter.done():
                return False
            self.end(self._left_s)
            waiter.set_result(ends_at)
            return True

        self.call_in_turn(begin)
        return await waiter

    def _close_soon(self) -> None:
        # In the next pass of the loop, after everything that is ready by then had its chance.
        if not self._is_closing:
            self._is_closing = True
            asyncio.get_running_loop().call_soon(self._close_pass)

    def _close_pass(self) -> None:
        self._is_closing = False
        self._left_s = self._slice_s
        while self._waiting:
            work = self._waiting.popleft()
            if work(monotonic() + self._left_s):
                break
        if self._waiting:
            self._close_soon()


class Backoff:
    """Delays that double up to a cap, spread by up to a half so that clients that fail together do
    not return together."""

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


_MAX_GRACES = 3


class SilenceTimer:
    """Times the looks for a loss at the tail: ever later, until a batch comes.

    A look that is due waits for a moment more. A process that got no processor for a while has
    batches to read first: a look would find them at the publisher and take them for lost.

    Args:
        first_s: Seconds of silence before the first look.
        cap_s: The most between two looks.
    """

    def __init__(self, first_s: float, cap_s: float) -> None:
        self._backoff = Backoff(first_s, cap_s)
        self._since = math.inf
        self._delay_s = 0.0
        self._is_first = False
        self._grace_s = first_s / 8
        self._graces = 0

    @property
    def left_s(self) -> float:
        """Seconds until the next look; 0 or less if it is due, infinite before the first call."""
        return self._since + self._delay_s - monotonic()

    def is_over(self) -> bool:
        """Return whether to look now."""
        left_s = self.left_s
        if left_s > 0:
            return False
        # Nothing could be read in a moment that took much longer.
        if not self._graces or (left_s < -self._grace_s and self._graces < _MAX_GRACES):
            self._since, self._delay_s = monotonic(), self._grace_s
            self._graces += 1
            return False
        return True

    def looked(self) -> None:
        """Wait longer for the next look."""
        self._since = monotonic()
        self._delay_s = self._backoff.next_delay()
        self._is_first = False
        self._graces = 0

    def received(self) -> None:
        """Begin with the first silence again."""
        if self._is_first and not self._graces:
            self._since = monotonic()
            return
        self._backoff.reset()
        self.looked()
        self._is_first = True
