"""Looks up the addresses of replicas' hosts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from kvevents.lookups import addresses, is_numeric

logger = logging.getLogger(__name__)

_LOOKED_UP_S = 5.0
"""How long the addresses of a name are kept."""


class Addresses:
    """Looks up the addresses of replicas' hosts when they are needed, and again after some
    seconds."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, list[str]]] = {}
        self._looking_up: dict[str, asyncio.Task[None]] = {}

    def known(self, host: str) -> list[str] | None:
        """Return the addresses of *host*; None if it has to be looked up."""
        found = self._known.get(host)
        if found is None or found[0] < asyncio.get_running_loop().time():
            return None
        return found[1]

    def latest(self, host: str) -> Sequence[str]:
        """Return the addresses of *host*, old ones too; empty during its first look-up."""
        if is_numeric(host):
            return (host,)
        if self.known(host) is None and host not in self._looking_up:
            task = asyncio.get_running_loop().create_task(self._look_up_for_later(host))
            self._looking_up[host] = task
        found = self._known.get(host)
        return () if found is None else found[1]

    async def _look_up_for_later(self, host: str) -> None:
        try:
            await self.look_up(host)
        except Exception:
            logger.debug("%s: it could not be looked up", host, exc_info=True)
            self.forget(host)
        finally:
            del self._looking_up[host]

    async def look_up(self, host: str) -> list[str]:
        """Look *host* up.

        Raises:
            OSError: It has no address.
        """
        found = await addresses(host)
        until = asyncio.get_running_loop().time() + _LOOKED_UP_S
        self._known[host] = until, found
        return found

    def forget(self, host: str) -> None:
        self._known.pop(host, None)
