"""Polls events over HTTP: TensorRT-LLM's.

A `Poller` polls one server, and gives each rank's events to the connection of its subscriber. Each
event is returned once, so no one else may poll. Events of a lost response show as a missing number.
Memory is bounded: the server is polled again once every rank has taken its part of the last
response.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Annotated

from kvevents.errors import EndpointError, KVEventsError, MalformedBatch, NoConnection
from kvevents.field_docs import counter
from kvevents.messages import Batch
from kvevents.pacing import Backoff
from kvevents.sockets import WakeUp
from kvevents.trtllm import MAX_RESPONSE_BYTES, PolledEvent, TrtllmTranslator, read_response
from router.config.origin import Allows, Header, Origin, Timeouts
from router.fleet.client import UpstreamClient
from router.fleet.client_errors import UpstreamError

_TIMES = Timeouts(connect_s=5.0, first_byte_s=15.0, idle_s=15.0)
"""An older server holds a request for 2 s where it has no event."""
_PAUSE_S = 0.02, 0.2
"""The pause between two requests: after events, and the longest without any."""
_RETRY_S = 0.1, 10.0
_GONE_AFTER_S = 60.0
"""Without a response for so long, the connection counts as lost."""
_METHODS = (b"POST", b"GET")
"""trtllm-serve has had the first one only; the other is asked where that is not allowed."""
_MAX_STRANGERS = 64


class PollFailed(KVEventsError):
    """A server that does not list its events."""


@dataclass(frozen=True, slots=True)
class PollerStatistics:
    """The counts of one polled server."""

    endpoint: str
    polls: Annotated[dict[str, int], counter("kvroute_event_polls", "outcome")]
    """Requests for the events of polled servers, by outcome: `events`, `empty`, `malformed` or
    `failed`."""


@dataclass(eq=False, repr=False)
class Poller:
    """Polls one server while its events are wanted. Belongs to one event loop."""

    client: UpstreamClient
    endpoint: str
    """The URL, with its path."""
    headers: Callable[[], Sequence[Header]]
    """Returns what is sent along; called for each request, as a key may be renewed."""
    allows: Allows | None
    max_bytes: int

    def __post_init__(self) -> None:
        origin = Origin.parse(self.endpoint, "endpoint")
        self._origin = replace(origin, base_path="", allows=self.allows)
        self._target = origin.base_path.encode("ascii")
        self._method = _METHODS[0]
        self._ranks: dict[int, TrtllmTranslator] = {}
        self._connections: dict[int, PolledConnection] = {}
        """Open connections, by rank."""
        self._task: asyncio.Task[None] | None = None
        self._polls: Counter[str] = Counter()
        self._strangers: set[int] = set()
        self._taken = WakeUp()
        self._failing_since = math.inf
        self._is_reported = False
        """True if the last response had a problem, which was reported."""
        self.on_problem: Callable[[KVEventsError], object] = lambda _: None
        """Called with the first problem after a response without, and with what belongs to no
        source."""

    @property
    def is_wanted(self) -> bool:
        return bool(self._ranks)

    def register(self, rank: int) -> Callable[[], PolledConnection]:
        """Follow a rank; return the function that makes a connection to it.

        Raises:
            EndpointError: It is followed already, and each event is returned once.
        """
        if rank in self._ranks:
            raise EndpointError(f"{self.endpoint}: its rank {rank} is asked for already")
        translator = self._ranks[rank] = TrtllmTranslator()
        return lambda: PolledConnection(self, rank, translator)

    def unregister(self, rank: int) -> None:
        """Follow a rank no more; one that is not followed is ignored."""
        self._ranks.pop(rank, None)

    def statistics(self) -> PollerStatistics:
        return PollerStatistics(self.endpoint, dict(self._polls))

    # --- for its connections ----------------------------------------------------------------------

    def join(self, rank: int, connection: PolledConnection) -> None:
        """Poll for a rank from now on."""
        self._connections[rank] = connection
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._ask_on(), name=self.endpoint)
            self._task.add_done_callback(self._on_end)

    def leave(self, rank: int, connection: PolledConnection) -> None:
        """Stop polling for a rank, and altogether with the last one."""
        if self._connections.get(rank) is connection:
            del self._connections[rank]
            self._taken.set()
        if not self._connections and self._task is not None:
            self._task.cancel()
            self._task = None

    def note_taken(self) -> None:
        """Note that a connection has nothing left."""
        self._taken.set()

    # --- inside -----------------------------------------------------------------------------------

    async def _ask_on(self) -> None:
        pause, retry = Backoff(*_PAUSE_S), Backoff(*_RETRY_S)
        # Python 3.10 may lose a cancellation that meets the end of a timeout.
        while self._task is asyncio.current_task():
            try:
                has_events = self._take(await self._ask())
            except KVEventsError as problem:
                self._note_failure(problem)
                await asyncio.sleep(retry.next_delay())
                continue
            self._failing_since = math.inf
            retry.reset()
            if has_events:
                pause.reset()
                await self._all_taken()
            await asyncio.sleep(pause.next_delay())

    def _on_end(self, task: asyncio.Task[None]) -> None:
        """It ends only when nothing is polled any more; anything else is our bug, and is logged."""
        if task.cancelled() or task is not self._task:
            return
        self._task = None
        self.on_problem(PollFailed(f"{self.endpoint}: {type(task.exception()).__name__}"))
        for connection in tuple(self._connections.values()):
            connection.end()

    async def _ask(self) -> bytes:
        """The body of the next response.

        Raises:
            PollFailed: No response, or one without events.
        """
        what = f"{self._method.decode()} {self.endpoint}"
        try:
            status, body = await self.client.fetch(
                self._origin,
                self._target,
                _TIMES,
                self.max_bytes,
                self.headers(),
                self._method,
            )
        except UpstreamError as error:
            raise PollFailed(f"{what}: {error}") from None
        if status == 405:
            self._method = _METHODS[self._method == _METHODS[0]]
        if status != 200:
            raise PollFailed(f"{what} returned {status}")
        return body

    def _take(self, body: bytes) -> bool:
        """Give events to their ranks; return whether there were any.

        Raises:
            MalformedBatch: The response holds no events.
        """
        found = read_response(body)
        if found.unreadable:
            rule = f"{found.unreadable} events name no event_id"
            self._note_problem(MalformedBatch(f"{self.endpoint}: {rule}"))
        else:
            self._polls["events" if found.events else "empty"] += 1
            self._is_reported = False
        for event in found.events:
            connection = self._connections.get(event.rank)
            if connection is not None:
                connection.waiting.append(event)
            else:
                self._note_stranger(event.rank)
        for connection in tuple(self._connections.values()):
            connection.note_response()
        return bool(found.events)

    async def _all_taken(self) -> None:
        while any(each.waiting for each in self._connections.values()):
            await self._taken.wait(_GONE_AFTER_S)

    def _note_stranger(self, rank: int) -> None:
        if rank in self._ranks or rank in self._strangers:
            return  # it is between two connections; what it misses shows in its numbers
        if len(self._strangers) < _MAX_STRANGERS:
            self._strangers.add(rank)
            rule = f"its rank {rank} has events, and no entry of kv_events"
            self.on_problem(PollFailed(f"{self.endpoint}: {rule}"))

    def _note_problem(self, problem: KVEventsError) -> None:
        self._polls["malformed" if isinstance(problem, MalformedBatch) else "failed"] += 1
        if not self._is_reported:
            self._is_reported = True
            self.on_problem(problem)

    def _note_failure(self, problem: KVEventsError) -> None:
        self._note_problem(problem)
        now = monotonic()
        self._failing_since = min(self._failing_since, now)
        if now - self._failing_since > _GONE_AFTER_S:
            for connection in tuple(self._connections.values()):
                connection.end()


@dataclass(eq=False, repr=False)
class PolledConnection:
    """The connection of one rank, for a subscriber (see `kvevents.live.Connection`).

    It outlasts requests that fail: events wait in the engine meanwhile.
    """

    _poller: Poller
    _rank: int
    _translator: TrtllmTranslator

    def __post_init__(self) -> None:
        self.is_down = False
        """True once the server has not answered for long."""
        self._is_answered = False
        self.wake_up = WakeUp()
        self.waiting: deque[PolledEvent] = deque()
        self.on_readable: Callable[[], None] | None = None

    async def open(self) -> None:
        """Wait for the first response, however long.

        Raises:
            NoConnection: No response for too long.
        """
        self._poller.join(self._rank, self)
        while not self._is_answered:
            if self.is_down:
                raise NoConnection(f"{self._poller.endpoint}: no response")
            await self.wake_up.wait(_GONE_AFTER_S)

    def close(self) -> None:
        self.is_down = True
        self.waiting.clear()
        self._poller.leave(self._rank, self)

    def next_batch(self) -> Batch | None:
        """The next event as a batch; one that cannot be read is missing from now on."""
        if not self.waiting:
            return None
        event = self.waiting.popleft()
        if not self.waiting:
            self._poller.note_taken()
        return self._translator.translate(event)

    def has_more(self) -> bool:
        return bool(self.waiting)

    def note_response(self) -> None:
        """Note that the server has answered; its events wait already."""
        if not self._is_answered:
            self._is_answered = True
            self.wake_up.set()
        elif self.waiting:
            if self.on_readable is not None:
                self.on_readable()
            else:
                self.wake_up.set()

    def end(self) -> None:
        """Nothing more comes."""
        self.is_down = True
        self.wake_up.set()


class Pollers:
    """All polled servers.

    Args:
        client: Sends the requests; None: nothing can be polled.
        max_bytes: Bound of a response, where it is below `MAX_RESPONSE_BYTES`.
    """

    def __init__(self, client: UpstreamClient | None, max_bytes: int) -> None:
        self._client = client
        self._max_bytes = min(max_bytes, MAX_RESPONSE_BYTES)
        self._pollers: dict[str, Poller] = {}

    def register(
        self,
        endpoint: str,
        rank: int,
        headers: Callable[[], Sequence[Header]],
        allows: Allows | None,
    ) -> tuple[Poller, Callable[[], PolledConnection]]:
        """Follow a rank of a server; return its poller, and the function that makes a connection.

        Args:
            headers: Returns what is sent along; that of the first rank that registers is asked.

        Raises:
            EndpointError: Nothing can be polled, or the rank is followed already.
        """
        if self._client is None:
            raise EndpointError(f"{endpoint}: events are not polled here")
        poller = self._pollers.get(endpoint)
        if poller is None:
            poller = Poller(self._client, endpoint, headers, allows, self._max_bytes)
        connect = poller.register(rank)
        self._pollers[endpoint] = poller
        return poller, connect

    def unregister(self, endpoint: str, rank: int) -> None:
        """Follow a rank no more; one that is not followed is ignored."""
        with contextlib.suppress(KeyError):
            poller = self._pollers[endpoint]
            poller.unregister(rank)
            if not poller.is_wanted:
                del self._pollers[endpoint]

    def statistics(self) -> list[PollerStatistics]:
        return [poller.statistics() for poller in self._pollers.values()]
