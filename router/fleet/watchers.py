"""Watches all replicas, at one pace: a task of each checks its health, another asks for its models
and its load.

Two tasks, so that a slow response to the second kind delays no check; one of each per replica, so
that none waits for another replica and no check overlaps with the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

import zmq

from kvevents.tasks import begin_lasting
from router.config.origin import Header, Origin
from router.config.watch import HealthConfig
from router.errors import InvalidReplicaResponse
from router.fleet.client_errors import OutOfResources, UpstreamError
from router.fleet.engine_load import EngineLoad, parse_engine_load
from router.fleet.load import LoadTracker
from router.fleet.load_topic import LoadFollower
from router.fleet.pace import Pace
from router.fleet.replica import Replica
from router.fleet.self_description import (
    MAX_RESPONSE_BYTES,
    MODELS_PATH,
    SERVER_INFO_PATH,
    SOURCES_PATH,
    ServerInfo,
    parse_model_entries,
    parse_models,
    parse_server_info,
    parse_sources,
)
from router.fleet.types import EventSource, ServedModels

UNREACHABLE = (UpstreamError, OSError, asyncio.TimeoutError)
MAX_HEALTH_BYTES = 64 * 1024
MAX_METRICS_BYTES = 8 * 1024 * 1024
EARLIEST = 0.1
"""Share of the interval that passes at least between two checks, if a failed request asks for an
early one."""
JITTER = 0.2
"""Waits are shortened at random by up to this share, so that many replicas are not asked at the
same moment. Never prolonged: a replica that returns is back within one interval."""


class Fetch(Protocol):
    """One small GET."""

    async def __call__(
        self, origin: Origin, path: str, headers: Sequence[Header], timeout_s: float, max_bytes: int
    ) -> tuple[int, bytes]:
        """Return status and body of the response to `GET <origin><path>`.

        Args:
            path: After the origin's base path.
            headers: Added to those of every request.
        Raises:
            UpstreamError: No response, or its body is longer than *max_bytes*.
            OSError: No connection.
            asyncio.TimeoutError: It took longer than *timeout_s*.
        """


class WatchListener(Protocol):
    """Receives a watcher's reports; implemented by the registry."""

    def on_check(self, replica: Replica, error: str | None) -> None:
        """A check is over.

        Args:
            error: Why the check failed; None if it passed.
        """

    def on_discovered(
        self,
        replica: Replica,
        served: ServedModels | None,
        sources: tuple[EventSource, ...] | None,
        notes: tuple[str, ...],
    ) -> None:
        """The replica has been asked about itself.

        Args:
            served: Its models; None if unknown this time.
            sources: Its event sources; None if unknown this time.
            notes: Errors and assumptions.
        """


class _Refused(InvalidReplicaResponse):
    """A response with another status than 200."""

    def __init__(self, path: str, status: int) -> None:
        super().__init__(f"GET {path}", f"returned {status}")
        self.status = status


@dataclass(eq=False, repr=False)
class Watchers:
    """A watcher for each replica: the registry's `Watching`. Belongs to one event loop."""

    fetch: Fetch
    config: HealthConfig
    load: LoadTracker
    """Separates this router's requests from others' in the engines' load."""
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.random = Random()
        self.context: zmq.Context[Any] = zmq.Context()
        """Has the sockets at which engines publish their load."""
        self.decisions: Callable[[], int] = lambda: 0
        """Decisions made, including those whose requests were sent elsewhere."""
        self.pace = Pace(self.config, self.clock)
        """How often healthy replicas are asked about themselves."""
        self._watchers: dict[str, Watcher] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._pacing: asyncio.Task[None] | None = None

    def watch(self, replica: Replica, listener: WatchListener) -> None:
        self._watchers[replica.id] = Watcher(replica, listener, self)
        if self._pacing is None:
            consequence = "healthy replicas are asked less often from now on"
            self._pacing = begin_lasting(self._keep_pace(), "replicas: pace", consequence)

    def leave(self, replica_id: str) -> None:
        self._await_end(self._watchers.pop(replica_id).cancel())
        if not self._watchers:
            self._end_pacing()

    def check_soon(self, replica_id: str) -> None:
        self._watchers[replica_id].check_soon()

    def became_healthy(self, replica_id: str) -> None:
        self._watchers[replica_id].became_healthy()

    def became_unhealthy(self, replica_id: str) -> None:
        self._watchers[replica_id].became_unhealthy()

    async def close(self) -> None:
        """Stop watching, and return when every task has ended."""
        self._end_pacing()
        for watcher in self._watchers.values():
            self._await_end(watcher.cancel())
        while self._ending:
            await asyncio.wait(self._ending)
        self.context.destroy(linger=0)

    async def _keep_pace(self) -> None:
        while True:
            await asyncio.sleep(self.config.interval_s)
            in_flight, started, _ = self.load.books.counts()
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


@dataclass(eq=False, repr=False)
class Watcher:
    """The two tasks of one replica. Make it inside a running event loop."""

    _replica: Replica
    """Its counts and times are written here."""
    _listener: WatchListener
    _shared: Watchers
    """Has what all watchers share."""

    def __post_init__(self) -> None:
        shared, allows = self._shared, self._replica.origin.allows
        self._config, self._clock = shared.config, shared.clock
        self._published = LoadFollower(shared.context, shared.clock, allows)
        self._closing = False
        self._check_now = asyncio.Event()
        self._healthy = asyncio.Event()
        self._discovery_due = 0.0
        self._has_metrics = True
        self._look_now = asyncio.Event()
        self._soon: asyncio.TimerHandle | None = None
        self.tasks: tuple[asyncio.Task[None], ...] = (
            self._start(self._watch_health(), "health"),
            self._start(self._watch_details(), "details"),
        )

    def check_soon(self) -> None:
        """A request failed there: check it before the next check is due."""
        self._check_now.set()

    def look_soon(self) -> None:
        """Ask it within half an interval, since its last answer is old: not all at one moment."""
        if self._soon is not None:
            self._soon.cancel()
        within_s = self._config.interval_s / 2 * self._shared.random.random()
        self._soon = asyncio.get_running_loop().call_later(within_s, self._look)

    def _look(self) -> None:
        self._soon = None
        self._check_now.set()
        self._look_now.set()

    def became_healthy(self) -> None:
        """Ask it about itself now: it is new, or may be another process than before."""
        self._discovery_due = self._clock()
        self._healthy.set()
        self._look_now.set()

    def became_unhealthy(self) -> None:
        """Ask it nothing but its health."""
        self._healthy.clear()

    def cancel(self) -> tuple[asyncio.Task[None], ...]:
        """Cancel all tasks, and return them: await their end."""
        self._closing = True
        if self._soon is not None:
            self._soon.cancel()
        # What ends a task remembers the frames that it ran through, and with them this watcher.
        tasks, self.tasks = self.tasks, ()
        for task in tasks:
            task.cancel()
        return tasks + self._published.cancel()

    def _start(self, work: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
        name = f"replica {self._replica.id}: {what}"
        return begin_lasting(work, name, "the replica is not watched any more")

    # --- health -----------------------------------------------------------------------------------

    async def _watch_health(self) -> None:
        while not self._closing:
            began = self._clock()
            self._check_now.clear()
            with contextlib.suppress(OutOfResources):
                error = await self._check()
                self._replica.checked_at = self._clock()
                self._listener.on_check(self._replica, error)
            is_well = self._replica.is_healthy and not self._replica.checks_fail_since
            if is_well and self._is_scraped and self._shared.pace.is_quiet:
                self._look_now.set()  # over the connection that was just used
            interval_s = self._shared.pace.interval_s if is_well else self._config.interval_s
            await self._pause(self._check_now, began, interval_s)

    async def _check(self) -> str | None:
        """Return why the check failed; None if it passed. Raises `OutOfResources` where the router
        has no connection for it, which is no fault of the replica."""
        try:
            status, _ = await self._get(self._config.path, MAX_HEALTH_BYTES)
        except OutOfResources:
            raise
        except UNREACHABLE as error:
            return (
                str(error)
                or f"GET {self._config.path}: no response in {self._config.timeout_s:g} s"
            )
        return None if 200 <= status < 300 else f"GET {self._config.path} returned {status}"

    # --- models, event sources, load --------------------------------------------------------------

    async def _watch_details(self) -> None:
        while not self._closing:
            await self._healthy.wait()
            began = self._clock()
            self._look_now.clear()
            if began >= self._discovery_due:
                self._has_metrics = True  # ask once more
                await self._discover()
            if self._is_scraped and not self._published.is_live:
                await self._scrape()
            await self._pause(self._look_now, began, self._details_interval_s())

    def _details_interval_s(self) -> float:
        until_discovery_s = max(self._discovery_due - self._clock(), self._config.interval_s)
        if not self._is_scraped:
            return until_discovery_s
        load = self._replica.engine_load
        if self._replica.foreign_requests or (load is not None and load.waiting):
            return self._config.interval_s  # what counts against it may soon be over
        interval_s = self._shared.pace.interval_s
        if self._shared.pace.is_quiet:  # then it follows the check, which comes before that
            interval_s /= 1 - JITTER
        return min(interval_s, until_discovery_s)

    async def _discover(self) -> None:
        due = self._discovery_due
        notes: list[str] = []
        served = await self._models(notes)
        info = await self._server_info()
        if isinstance(info, ServerInfo):
            self._replica.server_info = info
        elif isinstance(info, _Refused):
            self._replica.server_info = ServerInfo()
        sources = await self._sources(info, notes)
        complete = served is not None and sources is not None
        wait_s = self._config.discovery_interval_s if complete else self._config.interval_s
        # Unless it left and returned in the meantime: then another process may have responded.
        if self._discovery_due == due:
            self._discovery_due = self._clock() + wait_s
        self._replica.discoveries += 1
        self._replica.failed_discoveries += not complete
        self._listener.on_discovered(self._replica, served, sources, tuple(notes))

    async def _models(self, notes: list[str]) -> ServedModels | None:
        configured = self._replica.config.models
        try:
            body = await self._body(MODELS_PATH, MAX_RESPONSE_BYTES)
            served = parse_models(body)
            self._replica.model_entries = parse_model_entries(body)
        except (*UNREACHABLE, InvalidReplicaResponse) as error:
            notes.append(_note(MODELS_PATH, error))
            return None
        if configured is None:
            return served
        adapters = tuple(
            (adapter, model) for adapter, model in served.adapters if model in configured
        )
        return ServedModels(configured, adapters)

    async def _server_info(self) -> ServerInfo | Exception:
        """Return its `GET /server_info`; vLLM answers 404, which is no fault."""
        try:
            body = await self._body(SERVER_INFO_PATH, MAX_RESPONSE_BYTES)
            return parse_server_info(body, self._replica.origin.host)
        except (*UNREACHABLE, InvalidReplicaResponse) as error:
            return error

    async def _sources(
        self, info: ServerInfo | Exception, notes: list[str]
    ) -> tuple[EventSource, ...] | None:
        if self._replica.configured_sources is not None:
            return self._replica.configured_sources
        host = self._replica.origin.host
        try:
            found = parse_sources(await self._body(SOURCES_PATH, MAX_RESPONSE_BYTES), host)
        except _Refused as refused:
            # An engine of another kind, or an older one, does not have this endpoint.
            if refused.status in (404, 405):
                return self._sglang_sources(info, refused.status, notes)
            notes.append(_unknown_cache(SOURCES_PATH, refused.status))
        except (*UNREACHABLE, InvalidReplicaResponse) as error:
            notes.append(_note(SOURCES_PATH, error))
        else:
            self._published.follow(())
            return found
        return None

    def _sglang_sources(
        self, info: ServerInfo | Exception, status: int, notes: list[str]
    ) -> tuple[EventSource, ...] | None:
        """Return the sources that SGLang names, where vLLM's path returned *status*."""
        if isinstance(info, _Refused):
            notes.append(_unknown_cache(SOURCES_PATH, status))
            return () if info.status in (404, 405) else None
        if isinstance(info, Exception):
            notes.append(_note(SERVER_INFO_PATH, info))
            return None
        self._published.follow(info.load_topics, self._take)
        if not info.sources:
            notes.append(
                f"GET {SERVER_INFO_PATH} names no kv_events: start it with --kv-events-config, or"
                " configure kv_events"
            )
        return info.sources

    async def _body(self, path: str, max_bytes: int) -> bytes:
        """The body of a response with status 200; raises `_Refused`, and what `Fetch` raises."""
        status, body = await self._get(path, max_bytes)
        if status != 200:
            raise _Refused(path, status)
        return body

    @property
    def _is_scraped(self) -> bool:
        """Return whether its load is asked for between two discoveries."""
        return self._config.scrape_metrics and self._has_metrics

    async def _scrape(self) -> None:
        own_before = self._own_requests()
        load = None
        try:
            load = parse_engine_load(await self._body(self._config.metrics_path, MAX_METRICS_BYTES))
            self._has_metrics = load is not None
        except _Refused as refused:
            self._has_metrics = refused.status >= 500
        except UNREACHABLE:
            pass
        if load is None:
            self._replica.failed_scrapes += 1
            return
        self._take(load, own_before)

    def _take(self, load: EngineLoad, own_before: int = 0) -> None:
        # Requests began and ended while the engine was asked; the larger number blames less on
        # others.
        own = max(own_before, self._own_requests())
        by_rank = self._shared.load.requests_by_rank(self._replica.id, load.dp_ranks)
        self._replica.take_engine_load(load, own, self._clock(), by_rank)

    def _own_requests(self) -> int:
        return self._shared.load.look_at(self._replica.id).requests

    # --- both -------------------------------------------------------------------------------------

    async def _get(self, path: str, max_bytes: int) -> tuple[int, bytes]:
        try:
            return await self._shared.fetch(
                self._replica.origin,
                path,
                self._replica.headers,
                self._config.timeout_s,
                max_bytes,
            )
        finally:
            if self._closing:
                # A fetch may swallow a cancellation that meets its end: on Python 3.10 one that
                # meets the time limit.
                raise asyncio.CancelledError

    async def _pause(self, early: asyncio.Event, began: float, interval_s: float) -> None:
        """Wait until *interval_s* after *began*, or until *early* is set, but at least a tenth of
        the shortest interval."""
        at = began + interval_s * (1 - JITTER * self._shared.random.random())
        wait_s = self._shared.pace.due(at, interval_s) - self._clock()
        timer = asyncio.get_running_loop().call_later(max(0.0, wait_s), early.set)
        try:
            await early.wait()
        finally:
            timer.cancel()
        await asyncio.sleep(max(0.0, began + self._config.interval_s * EARLIEST - self._clock()))


def _unknown_cache(path: str, status: int) -> str:
    return f"GET {path} returned {status}: configure kv_events, or its cache stays unknown"


def _note(path: str, error: BaseException) -> str:
    return (str(error) or f"GET {path}: no response in time")[:300]
