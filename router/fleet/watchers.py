"""Watches all replicas, at one pace."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

import zmq

from kvevents.tasks import begin_lasting
from router.config.watch import HealthConfig
from router.fleet.load import LoadTracker
from router.fleet.pace import Pace
from router.fleet.replica import Replica
from router.fleet.watcher import Fetch, Watcher, WatchListener


class Watchers:
    """A watcher for each replica: the registry's `Watching`. Belongs to one event loop.

    Args:
        load: Separates this router's requests from others' in the engines' load.
    """

    def __init__(
        self,
        fetch: Fetch,
        config: HealthConfig,
        load: LoadTracker,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fetch = fetch
        self._config = config
        self._load = load
        self._random = Random()
        self._clock = clock
        self._watchers: dict[str, Watcher] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._context: zmq.Context[Any] = zmq.Context()
        self.decisions: Callable[[], int] = lambda: 0
        """Decisions made, including those whose requests were sent elsewhere."""
        self.pace = Pace(config, clock)
        """How often healthy replicas are asked about themselves."""
        self._pacing: asyncio.Task[None] | None = None

    def watch(self, replica: Replica, listener: WatchListener) -> None:
        """Begin to watch a replica."""
        self._watchers[replica.id] = Watcher(
            *(replica, listener, self._fetch, self._load),
            *(self._config, self._random, self._clock),
            *(self._context, self.pace),
        )
        if self._pacing is None:
            consequence = "healthy replicas are asked less often from now on"
            self._pacing = begin_lasting(self._keep_pace(), "replicas: pace", consequence)

    def leave(self, replica_id: str) -> None:
        """Watch it no longer."""
        self._await_end(self._watchers.pop(replica_id).cancel())
        if not self._watchers:
            self._end_pacing()

    def check_soon(self, replica_id: str) -> None:
        """A request failed there: check it before the next check is due."""
        self._watchers[replica_id].check_soon()

    def became_healthy(self, replica_id: str) -> None:
        """Ask it about itself now: it is new, or may be another process than before."""
        self._watchers[replica_id].became_healthy()

    def became_unhealthy(self, replica_id: str) -> None:
        """Ask it nothing but its health."""
        self._watchers[replica_id].became_unhealthy()

    def others_reported(self, replica_ids: Iterable[str], within_s: float) -> None:
        """Separate the load that other routers have published from what engines report.

        Args:
            replica_ids: Unknown ones are left out.
            within_s: The delay of their reports.
        """
        for replica_id in replica_ids:
            watcher = self._watchers.get(replica_id)
            if watcher is not None:
                watcher.others_reported(within_s)

    async def close(self) -> None:
        """Stop watching, and return when every task has ended."""
        self._end_pacing()
        for watcher in self._watchers.values():
            self._await_end(watcher.cancel())
        while self._ending:
            await asyncio.wait(self._ending)
        self._context.destroy(linger=0)

    async def _keep_pace(self) -> None:
        while True:
            await asyncio.sleep(self._config.interval_s)
            in_flight, started, _ = self._load.books.counts()
            if self.pace.look(started + self.decisions(), in_flight):
                for watcher in self._watchers.values():
                    watcher.look_soon()

    def _end_pacing(self) -> None:
        if self._pacing is not None:
            self._pacing.cancel()
            self._await_end((self._pacing,))
            self._pacing = None

    def _await_end(self, tasks: Iterable[asyncio.Task[None]]) -> None:
        for task in tasks:
            if not task.done():
                self._ending.add(task)
                task.add_done_callback(self._ending.discard)
