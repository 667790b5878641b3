"""Takes over a changed configuration while the router runs: on SIGHUP, or when its file changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from router.config.document import Stamp, stamp_of
from router.config.schema import RouterConfig
from router.errors import ConfigError
from router.telemetry.metrics import RouterMetrics

logger = logging.getLogger(__name__)

TAKEN = "taken"
REFUSED = "refused"


@dataclass(eq=False, repr=False)
class Reloader:
    """Reads the configuration again when asked, one time after another. One that breaks a rule is
    refused as a whole, and the old one stays."""

    read: Callable[[], RouterConfig]
    """Reads the whole configuration; runs in a thread."""
    take: Callable[[RouterConfig], list[str]]
    """Takes it over, and returns the options that need a restart."""
    metrics: RouterMetrics
    _asked: asyncio.Event = field(default_factory=asyncio.Event)
    """Set as well by who asks before it is made."""

    def ask(self) -> None:
        """Read the configuration again soon."""
        self._asked.set()

    async def run(self) -> None:
        """Reload when asked, until cancelled."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            try:
                await self._reload()
            except Exception as error:
                self.metrics.reloads.labels(REFUSED).inc()
                logger.critical("a changed configuration was not taken over whole", exc_info=error)

    async def watch(self, path: Path, seen: Stamp | None, interval_s: float = 1.0) -> None:
        """Ask whenever a file changes, until cancelled.

        Args:
            seen: Its stamp before it was read for the start, which may have taken a while.
        """
        while True:
            stamp = await asyncio.to_thread(stamp_of, path)
            if stamp != seen and stamp is not None:
                self.ask()
            seen = stamp or seen
            await asyncio.sleep(interval_s)

    async def _reload(self) -> None:
        try:
            config = await asyncio.to_thread(self.read)
        except ConfigError as error:
            self.metrics.reloads.labels(REFUSED).inc()
            logger.error("the changed configuration is refused, the old one stays: %s", error)
            return
        need_restart = self.take(config)
        self.metrics.reloads.labels(TAKEN).inc()
        logger.info("configuration read again: %d replicas named", len(config.replicas))
        if need_restart:
            logger.warning("changed, but only a restart takes it over: %s", ", ".join(need_restart))
