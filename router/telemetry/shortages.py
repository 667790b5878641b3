"""Counts and logs the resources that the system refuses this process: file descriptors, ports,
buffers, memory.

Such a failure is the router's own, not a replica's. It is counted, logged once a minute, and shown
as a problem of the router.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

logger = logging.getLogger(__name__)

SHOWN_S = 60.0
"""How long a shortage counts as present, and is not logged again."""

_SENTENCES = {
    "open_files": "out of file descriptors (limit {limit}): raise it (ulimit -n, LimitNOFILE=)",
    "ports": "out of local ports: widen net.ipv4.ip_local_port_range",
    "buffers": "out of socket buffers: raise net.ipv4.tcp_mem",
    "memory": "out of memory: raise its limit, or lower server.max_buffered_bytes",
}
RESOURCES = tuple(_SENTENCES)


class Shortages:
    """Counts shortages. Belongs to one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts = Counter(dict.fromkeys(RESOURCES, 0))
        self._last: dict[str, float] = {}
        self._logged: dict[str, float] = {}

    def note(self, what: str) -> None:
        now = self._last[what] = self._clock()
        self._counts[what] += 1
        if now - self._logged.get(what, -SHOWN_S) >= SHOWN_S:
            self._logged[what] = now
            logger.error("%s; more of this is only counted for a minute", _sentence(what))

    def note_failure_of_loop(
        self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]
    ) -> None:
        """Handle what an event loop has no caller to raise to: memory that it did not get for
        itself, such as for what it reads from a socket, is a shortage like any other."""
        if isinstance(context.get("exception"), MemoryError):
            self.note("memory")
        else:
            loop.default_exception_handler(context)

    @property
    def counts(self) -> Mapping[str, int]:
        return MappingProxyType(self._counts)

    def present(self) -> list[str]:
        """Return the present shortages, in sentences for people."""
        now = self._clock()
        return [_sentence(what) for what, last in self._last.items() if now - last < SHOWN_S]


def _sentence(what: str) -> str:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return "the router is " + _SENTENCES[what].format(limit=limit)
