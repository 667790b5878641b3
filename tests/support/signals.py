"""Signals for processes that a test starts."""

from __future__ import annotations

import signal


def reset_signal_handlers() -> None:
    """Run in the new process: it handles signals again that its parent ignores, as under nohup or
    in the background of a script."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
