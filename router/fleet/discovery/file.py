"""Replicas from a file that is watched."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from router.config.discovery import FileDiscovery
from router.config.document import Stamp, stamp_of
from router.config.replica import read_replicas
from router.errors import ConfigError
from router.fleet.discovery.provider import ProviderListener


class FileProvider:
    """Reads a list of replicas again whenever its file changes. A file that breaks a rule is
    refused as a whole."""

    def __init__(self, config: FileDiscovery, environ: Mapping[str, str]) -> None:
        """Read nothing yet.

        Args:
            config: Which file; see `router.config.replica.read_replicas` for what it holds.
        """
        self.name = config.title
        self._path = Path(config.path)
        self._environ = environ
        self._interval_s = config.interval_s

    async def follow(self, listener: ProviderListener) -> None:
        seen: Stamp | None = (0, 0, 0)
        while True:
            stamp = await asyncio.to_thread(stamp_of, self._path)
            if stamp != seen:
                seen = stamp if await self._read(listener) else None
            await asyncio.sleep(self._interval_s)

    async def _read(self, listener: ProviderListener) -> bool:
        """Report what the file holds; return False if the system did not let it be read."""
        try:
            replicas = await asyncio.to_thread(read_replicas, self._path, self._environ)
        except ConfigError as error:
            listener.on_failure(str(error))
            return not isinstance(error.__cause__, OSError)
        listener.on_replicas(replicas)
        return True
