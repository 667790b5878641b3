"""Signals for processes that a test starts."""

from __future__ import annotations

import signal


def heed_signals() -> None:
    """To run in the new process: what its parent ignores, as under nohup or in the background of a
    script, it hears again."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
