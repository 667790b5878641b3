"""Watches one replica: a task that checks its health, and another that asks what it serves and how
loaded it is.

Two tasks, so that a slow answer to the second kind delays no check; one of each per replica, so
that none waits for another replica and no check overlaps with the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, Protocol

from router.config import HealthConfig
from router.errors import ReplicaAnswerInvalid
from router.replicas.discovery import (
    MAX_ANSWER_BYTES,
    MODELS_PATH,
    SOURCES_PATH,
    parse_models,
    parse_sources,
)
from router.replicas.engine_load import parse_engine_load
from router.replicas.replica import Replica
from router.replicas.types import EventSource, Fetch, ServedModels
from router.upstream import UpstreamError

UNREACHABLE = (UpstreamError, OSError, asyncio.TimeoutError)
MAX_HEALTH_BYTES = 64 * 1024
MAX_METRICS_BYTES = 8 * 1024 * 1024
# Early checks, which failed requests ask for, come no closer to the last one than this share of the
# interval.
EARLIEST = 0.1
# Waits are shortened at random by up to this share, so that many replicas are not asked at the same
# moment. Never prolonged: a replica that returns is to be back within one interval.
JITTER = 0.2


class Owner(Protocol):
    """What a watcher tells its registry."""

    def on_check(self, replica: Replica, error: str | None) -> None:
        """A check passed, or failed for this reason."""

    def on_discovered(
        self,
        replica: Replica,
        served: ServedModels | None,
        sources: tuple[EventSource, ...] | None,
        notes: tuple[str, ...],
    ) -> None:
        """What the replica says of itself; None for what it could not say now."""

    def own_requests(self, replica: Replica) -> int:
        """How many requests of this router are there."""


class _Refused(ReplicaAnswerInvalid):
    """An answer with another status than 200."""

    def __init__(self, path: str, status: int) -> None:
        super().__init__(f"GET {path}", f"answered {status}")
        self.status = status


class Watcher:
    """The two tasks of one replica. Make it inside a running event loop."""

    def __init__(
        self,
        replica: Replica,
        owner: Owner,
        fetch: Fetch,
        config: HealthConfig,
        random: Random,
        clock: Callable[[], float],
    ) -> None:
        self._replica = replica
        self._owner = owner
        self._fetch = fetch
        self._config = config
        self._random = random
        self._clock = clock
        self._closing = False
        self._check_now = asyncio.Event()
        self._healthy = asyncio.Event()
        self._discovery_due = 0.0
        self._look_now = asyncio.Event()
        self.tasks = (
            self._start(self._watch_health(), "health"),
            self._start(self._watch_details(), "details"),
        )

    def check_soon(self) -> None:
        """A request failed there: do not wait for the next check's time."""
        self._check_now.set()

    def became_healthy(self) -> None:
        """It is there, perhaps again and perhaps another one: ask it about itself now."""
        self._discovery_due = self._clock()
        self._healthy.set()
        self._look_now.set()

    def became_unhealthy(self) -> None:
        """Ask it nothing but its health."""
        self._healthy.clear()

    def cancel(self) -> None:
        """End both tasks; await `tasks` for their end."""
        self._closing = True
        for task in self.tasks:
            task.cancel()

    def _start(self, work: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(
            work, name=f"replica {self._replica.id}: {what}"
        )

    # --- health -----------------------------------------------------------------------------------

    async def _watch_health(self) -> None:
        while not self._closing:
            began = self._clock()
            self._check_now.clear()
            error = await self._check()
            self._replica.checked_at = self._clock()
            self._owner.on_check(self._replica, error)
            await self._pause(self._check_now, began, self._config.interval_s)

    async def _check(self) -> str | None:
        """Why the replica is not well; None if it is."""
        try:
            status, _ = await self._get(self._config.path, MAX_HEALTH_BYTES)
        except UNREACHABLE as error:
            return (
                str(error) or f"GET {self._config.path}: no answer in {self._config.timeout_s:g} s"
            )
        return None if 200 <= status < 300 else f"GET {self._config.path} answered {status}"

    # --- models, event sources, load --------------------------------------------------------------

    async def _watch_details(self) -> None:
        while not self._closing:
            await self._healthy.wait()
            began = self._clock()
            self._look_now.clear()
            if began >= self._discovery_due:
                await self._discover()
            if self._config.scrape_metrics:
                await self._scrape()
            await self._pause(self._look_now, began, self._details_interval_s())

    def _details_interval_s(self) -> float:
        until_discovery_s = max(self._discovery_due - self._clock(), self._config.interval_s)
        return self._config.interval_s if self._config.scrape_metrics else until_discovery_s

    async def _discover(self) -> None:
        due = self._discovery_due
        notes: list[str] = []
        served = await self._models(notes)
        sources = await self._sources(notes)
        complete = served is not None and sources is not None
        wait_s = self._config.discovery_interval_s if complete else self._config.interval_s
        # Unless it went and came back in the meantime: then what was just heard may be of its
        # former life.
        if self._discovery_due == due:
            self._discovery_due = self._clock() + wait_s
        self._replica.discoveries += 1
        self._replica.failed_discoveries += not complete
        self._owner.on_discovered(self._replica, served, sources, tuple(notes))

    async def _models(self, notes: list[str]) -> ServedModels | None:
        configured = self._replica.config.models
        try:
            served = parse_models(await self._answer(MODELS_PATH, MAX_ANSWER_BYTES))
        except (*UNREACHABLE, ReplicaAnswerInvalid) as error:
            notes.append(_note(MODELS_PATH, error))
            return None
        if configured is None:
            return served
        adapters = tuple(
            (adapter, model) for adapter, model in served.adapters if model in configured
        )
        return ServedModels(configured, adapters)

    async def _sources(self, notes: list[str]) -> tuple[EventSource, ...] | None:
        if self._replica.configured_sources is not None:
            return self._replica.configured_sources
        try:
            body = await self._answer(SOURCES_PATH, MAX_ANSWER_BYTES)
            return parse_sources(body, self._replica.origin.host)
        except _Refused as refused:
            notes.append(
                f"GET {SOURCES_PATH} answered {refused.status}: configure kv_events, or its cache stays unknown"
            )
            # An older engine does not know the question, and will not next time.
            return () if refused.status in (404, 405) else None
        except (*UNREACHABLE, ReplicaAnswerInvalid) as error:
            notes.append(_note(SOURCES_PATH, error))
            return None

    async def _answer(self, path: str, max_bytes: int) -> bytes:
        """The body of a good answer; raises `_Refused` for any other, and what `Fetch` raises."""
        status, body = await self._get(path, max_bytes)
        if status != 200:
            raise _Refused(path, status)
        return body

    async def _scrape(self) -> None:
        own_before = self._owner.own_requests(self._replica)
        try:
            load = parse_engine_load(
                await self._answer(self._config.metrics_path, MAX_METRICS_BYTES)
            )
        except (*UNREACHABLE, _Refused):
            load = None
        if load is None:
            self._replica.failed_scrapes += 1
            return
        # Requests came and went while the engine was asked; the larger number blames less on
        # others.
        own = max(own_before, self._owner.own_requests(self._replica))
        self._replica.take_engine_load(load, own, self._clock())

    # --- both -------------------------------------------------------------------------------------

    async def _get(self, path: str, max_bytes: int) -> tuple[int, bytes]:
        try:
            return await self._fetch(
                self._replica.origin, path, self._replica.headers, self._config.timeout_s, max_bytes
            )
        finally:
            if self._closing:
                # A fetch may swallow a cancellation that meets its end: on Python 3.10 one that
                # meets the time limit.
                raise asyncio.CancelledError

    async def _pause(self, early: asyncio.Event, began: float, interval_s: float) -> None:
        """Wait until one interval after *began*, or until *early* is set, but not less than a tenth
        of it."""
        shortened_s = interval_s * (1 - JITTER * self._random.random())
        await asyncio.sleep(max(0.0, began + interval_s * EARLIEST - self._clock()))
        timer = asyncio.get_running_loop().call_later(
            max(0.0, began + shortened_s - self._clock()), early.set
        )
        try:
            await early.wait()
        finally:
            timer.cancel()


def _note(path: str, error: BaseException) -> str:
    return (str(error) or f"GET {path}: no answer in time")[:300]
