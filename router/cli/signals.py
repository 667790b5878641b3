"""Run a command until it is done or a signal ends it; either way it cleans up after itself."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class EndedBySignal(Exception):
    """A signal ended the command, which has cleaned up."""

    def __init__(self, received: signal.Signals) -> None:
        super().__init__(received.name)
        self.exit_code = 128 + received
        """The shell's code for a process killed by the signal."""


def run_until_signal(work: Coroutine[Any, Any, Result]) -> Result:
    """Like `asyncio.run`, but SIGINT, SIGTERM and SIGHUP cancel *work*. A signal that is ignored,
    as SIGHUP under `nohup`, stays ignored.

    Raises:
        EndedBySignal: *work* was cancelled and has cleaned up.
    """
    received: list[signal.Signals] = []

    async def until_signal() -> Result:
        working = asyncio.ensure_future(work)

        def end(number: signal.Signals) -> None:
            received.append(number)
            working.cancel()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(number, end, number)
        return await working

    try:
        return asyncio.run(until_signal())
    except asyncio.CancelledError:
        if not received:
            raise
        raise EndedBySignal(received[0]) from None
