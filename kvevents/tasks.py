"""Tasks that run for as long as what began them: their end does not go unnoticed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

logger = logging.getLogger(__name__)


def begin_lasting(
    work: Coroutine[Any, Any, None], name: str, consequence: str
) -> asyncio.Task[None]:
    """Begin a task that ends only by cancellation; anything else is a bug, and is logged.

    Args:
        consequence: What is so from its end on, for the log.
    """

    def report(task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.critical("%s ended, and %s", name, consequence, exc_info=error)

    task = asyncio.get_running_loop().create_task(work, name=name)
    task.add_done_callback(report)
    return task
