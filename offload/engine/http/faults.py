"""Faults on demand, so that what stands before an engine can be tested against one that hangs,
crawls or dies."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

MAX_SECONDS = 3600.0
MAX_FACTOR = 1000.0


@dataclass(frozen=True, slots=True)
class FaultStatistics:
    """What is wrong now."""

    hang_left_s: float
    slow_factor: float


class Faults:
    """Keeps an engine's thread from its work. `hang`, `slow` and `release` may be called from any
    thread."""

    def __init__(self) -> None:
        self._released = threading.Event()
        self._hangs_until = 0.0
        self._slow_factor = 1.0

    def hang(self, seconds: float) -> None:
        """No step begins for so long."""
        self._hangs_until = time.monotonic() + seconds

    def slow(self, factor: float) -> None:
        """Each step takes *factor* times as long, from 1 on."""
        self._slow_factor = factor

    def release(self) -> None:
        """Let the thread go, for good: the engine is to end."""
        self._released.set()

    def statistics(self) -> FaultStatistics:
        return FaultStatistics(max(0.0, self._hangs_until - time.monotonic()), self._slow_factor)

    # --- the engine's thread ----------------------------------------------------------------------

    def before_step(self) -> None:
        """Stay here while the engine hangs."""
        while (left := self._hangs_until - time.monotonic()) > 0 and not self._released.wait(left):
            pass

    def after_step(self, step_s: float) -> None:
        """Make a step that took *step_s* last longer."""
        if self._slow_factor > 1.0:
            self._released.wait((self._slow_factor - 1.0) * step_s)


def crash(exit_process: Callable[[int], NoReturn] = os._exit) -> NoReturn:
    """End the process as a fault in native code does: at once, without a word to anybody."""
    exit_process(1)


def restart(port: int, execute: Callable[[str, list[str]], NoReturn] = os.execv) -> NoReturn:
    """`crash`, and the same command again at once, on the same *port*: what a supervisor does.
    Sockets close with the exec."""
    execute(sys.executable, [sys.executable, *sys.orig_argv[1:], "--port", str(port)])
