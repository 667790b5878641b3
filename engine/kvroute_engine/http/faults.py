"""Faults on demand, so that a router can be tested with an engine that hangs, crawls or dies."""

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
    """The faults in effect."""

    hang_left_s: float
    """Seconds until steps begin again; 0 if the engine does not hang."""
    slow_factor: float
    """Factor on the duration of steps; 1 if the engine is not slowed down."""


class Faults:
    """Holds up an engine's thread. `hang`, `slow` and `release` may be called from any thread."""

    def __init__(self) -> None:
        self._released = threading.Event()
        self._hangs_until = 0.0
        self._slow_factor = 1.0

    def hang(self, seconds: float) -> None:
        """Begin no step for *seconds*."""
        self._hangs_until = time.monotonic() + seconds

    def slow(self, factor: float) -> None:
        """Make each step take *factor* times as long; 1 ends it."""
        self._slow_factor = factor

    def release(self) -> None:
        """Let the thread go for good, since the engine is to end."""
        self._released.set()

    def statistics(self) -> FaultStatistics:
        """Return the faults in effect."""
        return FaultStatistics(max(0.0, self._hangs_until - time.monotonic()), self._slow_factor)

    # --- the engine's thread ----------------------------------------------------------------------

    def before_step(self) -> None:
        """Wait while the engine hangs."""
        while (left := self._hangs_until - time.monotonic()) > 0 and not self._released.wait(left):
            pass

    def after_step(self, step_s: float) -> None:
        """Wait as long as a step of *step_s* seconds is to be slowed down."""
        if self._slow_factor > 1.0:
            self._released.wait((self._slow_factor - 1.0) * step_s)


def crash(exit_process: Callable[[int], NoReturn] = os._exit) -> NoReturn:
    """End the process at once and without any clean-up, as a fault in native code does."""
    exit_process(1)


def restart(port: int, execute: Callable[[str, list[str]], NoReturn] = os.execv) -> NoReturn:
    """Replace the process with the same command, as after a crash under a supervisor.

    Args:
        port: The port to listen on again, since the command may have left it to the system.
        execute: Replaces the process; its sockets close with the exec.
    """
    execute(sys.executable, [sys.executable, *sys.orig_argv[1:], "--port", str(port)])
