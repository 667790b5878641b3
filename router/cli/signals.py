"""Commands that clean up after themselves however they are told to end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class ToldToEnd(Exception):
    """By a signal."""

    def __init__(self, told: signal.Signals) -> None:
        super().__init__(told.name)
        self.exit_code = 128 + told


def run_until_told(work: Coroutine[Any, Any, Result]) -> Result:
    """Like `asyncio.run`; SIGINT, SIGTERM and SIGHUP cancel *work*. What is ignored stays so, as
    SIGHUP under `nohup`.

    Raises:
        ToldToEnd: *work* has cleaned up.
    """
    told: list[signal.Signals] = []

    async def until_told() -> Result:
        working = asyncio.ensure_future(work)

        def end(number: signal.Signals) -> None:
            told.append(number)
            working.cancel()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(number, end, number)
        return await working

    try:
        return asyncio.run(until_told())
    except asyncio.CancelledError:
        if not told:
            raise
        raise ToldToEnd(told[0]) from None
