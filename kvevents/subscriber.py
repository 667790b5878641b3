"""Follows one publisher: every batch once and in order, or it is known that something is missing.

A stream is *live* until a number is missing; then the replay endpoint is asked
(`kvevents.recovery`) while live batches wait. It is asked too after every connect, since an engine
may have restarted or a tail may be lost, and after a silence, since a batch lost at the tail leaves
no gap. Each connection is made anew (`kvevents.sockets`), so that all that comes over it comes from
one process.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from time import monotonic
from typing import Any

import zmq

from kvevents.delivery import Consumer, Counters, Delivery, SourceState, Taken
from kvevents.errors import MalformedBatch, NoConnection
from kvevents.live import BacklogLimits, LiveStream
from kvevents.messages import Batch
from kvevents.pacing import Backoff, Pacer
from kvevents.recovery import Outcome, Recovery
from kvevents.replay import ReplayClient, ReplayLimits
from kvevents.sockets import Connection, SocketLimits, check_connectable


@dataclass(frozen=True, slots=True)
class SubscriberOptions:
    """Bounds and delays, in seconds.

    Attributes:
        patience_s: How long live batches wait for a replay endpoint that does not answer, before
            they go on without it.
        first_probe_s: Silence after which the tail is checked; doubles up to *max_probe_s*.
        spacing_s: Between two recoveries, whatever comes: a publisher that sends nonsense does not
            keep us busy asking.
        first_retry_s: Delay before the next connection, or the next question that got no answer;
            doubles up to *max_retry_s*.
    """

    patience_s: float = 10.0
    first_probe_s: float = 2.0
    max_probe_s: float = 60.0
    spacing_s: float = 0.05
    first_retry_s: float = 0.1
    max_retry_s: float = 10.0
    socket: SocketLimits = field(default_factory=SocketLimits)
    backlog: BacklogLimits = field(default_factory=BacklogLimits)
    replay: ReplayLimits = field(default_factory=ReplayLimits)

    def __post_init__(self) -> None:
        for name in (
            "patience_s",
            "first_probe_s",
            "max_probe_s",
            "spacing_s",
            "first_retry_s",
            "max_retry_s",
        ):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(
                    f"{name} is {getattr(self, name)}: it must be a positive number of seconds"
                )


@dataclass(frozen=True, slots=True)
class SubscriberStatistics:
    """One stream in numbers; counts are explained in `kvevents.delivery.Counters`."""

    endpoint: str
    replay_endpoint: str | None
    state: SourceState
    last_seq: int | None
    last_message_at: float | None
    """On the monotonic clock; None before the first batch."""
    publisher_id: str | None
    batches: int
    duplicates: int
    discarded: int
    malformed: int
    gaps: int
    questions: int
    unanswered: int
    replays: int
    snapshots: int
    restarts: int
    overflow: int
    connections: int


class _Occasion(Enum):
    """Why the replay endpoint is asked."""

    CONNECT = "connect"
    GAP = "gap"
    STRAY = "stray"
    """A batch that looks like another process's."""
    SILENCE = "silence"
    """Nothing was seen; something may be lost all the same."""


class Subscriber:
    """Follows one endpoint until its task is cancelled.

    Args:
        endpoint: The publisher's PUB socket.
        consumer: Takes the batches.
        replay_endpoint: The publisher's ROUTER socket; None: what is lost stays lost.
        topic: What to subscribe to, matched exactly; None takes every topic.
        options: Bounds and delays.
        context: Where the sockets live; None: a context of its own for each run.
        pacer: Shared by all subscribers of an event loop.

    Raises:
        EndpointError: An address is none that a socket can connect to.
    """

    def __init__(
        self,
        endpoint: str,
        consumer: Consumer,
        *,
        replay_endpoint: str | None = None,
        topic: str | None = "",
        options: SubscriberOptions | None = None,
        context: zmq.Context[Any] | None = None,
        pacer: Pacer | None = None,
    ) -> None:
        check_connectable("endpoint", endpoint)
        if replay_endpoint is not None:
            check_connectable("replay_endpoint", replay_endpoint)
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._topic = None if topic is None else topic.encode()
        self._options = options or SubscriberOptions()
        self._context = context
        self._pacer = pacer or Pacer()
        self._consumer = consumer
        self._counters = Counters()
        self._delivery = Delivery(consumer, self._counters)
        self._live: LiveStream | None = None
        self._recovery = Recovery(
            self._delivery,
            self._counters,
            connect=self._replay_client,
            breathe=self._breathe,
            waiting=lambda: self._live.waiting if self._live else 0,
            on_loss=lambda: self._change(SourceState.RECOVERING),
        )
        self._state = SourceState.CONNECTING
        self._is_proven = False
        """False from a connect on until it is proven that the process is the one we followed."""
        self._is_adrift = False
        """True while the replay endpoint is of no help, so that batches go on as they come."""
        self._probe = Backoff(self._options.first_probe_s, self._options.max_probe_s)
        self._probe_at = math.inf
        self._recovered_at = -math.inf
        self._slice_ends_at = 0.0
        self._last_message_at: float | None = None
        self._put_back: Batch | None = None

    def statistics(self) -> SubscriberStatistics:
        counters = {name: getattr(self._counters, name) for name in Counters.__slots__}
        return SubscriberStatistics(
            endpoint=self._endpoint,
            replay_endpoint=self._replay_endpoint,
            state=self._state,
            last_seq=self._delivery.tracker.last,
            last_message_at=self._last_message_at,
            publisher_id=self._delivery.tracker.publisher_id,
            **counters,
        )

    async def run(self) -> None:
        """Follow until cancelled; no socket is left behind.

        Raises:
            EndpointError: libzmq refuses an address for good.
        """
        owned = None if self._context else zmq.Context()
        self._context = self._context or owned
        try:
            await self._follow_connections()
        finally:
            self._change(SourceState.DEAD)
            if owned is not None:
                self._context = None
                owned.term()

    # --- connections ------------------------------------------------------------------------------

    async def _follow_connections(self) -> None:
        retry = Backoff(self._options.first_retry_s, self._options.max_retry_s)
        while True:
            self._change(SourceState.CONNECTING)
            connected_at = monotonic()
            with suppress(NoConnection):  # Told by the state.
                await self._follow_one()
            if monotonic() - connected_at > self._options.max_retry_s:
                retry.reset()
            await asyncio.sleep(retry.next_delay())

    async def _follow_one(self) -> None:
        live = self._live = self._live_stream()
        try:
            await live.open()
            self._counters.connections += 1
            self._change(SourceState.RECOVERING)
            await self._verify(live)
            await self._follow(live)
        finally:
            live.close()

    def _live_stream(self) -> LiveStream:
        connection = self._connection(zmq.SUB, self._endpoint)
        return LiveStream(
            connection, self._topic, self._options.backlog, self._counters, self._delivery.report
        )

    def _replay_client(self) -> ReplayClient:
        assert self._replay_endpoint is not None
        return ReplayClient(
            self._connection(zmq.DEALER, self._replay_endpoint), self._topic, self._options.replay
        )

    def _connection(self, kind: int, endpoint: str) -> Connection:
        assert self._context is not None
        return Connection(self._context, kind, endpoint, self._options.socket, self._topic or b"")

    async def _verify(self, live: LiveStream) -> None:
        """Is it still the process we followed, and did it publish while we were away?"""
        self._probe.reset()
        self._is_proven = self._is_adrift = False
        if self._replay_endpoint is not None:
            await self._recover(live, _Occasion.CONNECT)
        else:
            # Nobody can tell what was missed, so from a second connection on something may be.
            self._is_proven = True
            self._delivery.is_complete &= self._delivery.tracker.last is None
            self._settle()

    # --- batches ----------------------------------------------------------------------------------

    async def _follow(self, live: LiveStream) -> None:
        while True:
            try:
                batch = live.next()
            except MalformedBatch as problem:
                self._delivery.report(problem)
                await self._breathe()
                continue
            if batch is not None:
                await self._take(live, batch)
            elif live.is_down:
                return
            # While all is well only silence is a reason to look; what waits in the socket is none.
            if monotonic() >= self._probe_at and (batch is None or not self._is_well):
                await self._recover(live, _Occasion.SILENCE)
            elif batch is None:
                await live.wait(min(self._probe_at - monotonic(), self._options.max_probe_s))

    @property
    def _is_well(self) -> bool:
        return self._delivery.is_complete and not self._is_adrift

    async def _breathe(self) -> None:
        if monotonic() >= self._slice_ends_at:
            self._slice_ends_at = await self._pacer.turn()

    async def _take(self, live: LiveStream, batch: Batch) -> None:
        await self._breathe()
        self._last_message_at = monotonic()
        if not self._is_proven:
            # Nobody confirmed that this process is the one we followed: its batches may not fit
            # what we hold.
            self._is_proven = True
            self._delivery.is_complete = False
        taken = self._delivery.take(batch)
        if taken not in (Taken.APPLIED, Taken.DUPLICATE):
            await self._miss(live, batch, taken)
        self._settle()
        if self._is_well:
            self._plan_probe(after_batch=True)

    async def _miss(self, live: LiveStream, batch: Batch, taken: Taken) -> None:
        """Something lies between what we hold and *batch*, or *batch* itself cannot be used."""
        self._counters.gaps += taken is Taken.GAP and batch is not self._put_back
        if self._replay_endpoint is None or self._is_adrift:
            self._delivery.go_on(batch, taken)
            return
        self._put_back = batch
        live.put_back(batch)
        await self._recover(live, _Occasion.STRAY if taken is Taken.RESTART else _Occasion.GAP)

    # --- recovery ---------------------------------------------------------------------------------

    async def _recover(self, live: LiveStream, occasion: _Occasion) -> None:
        """Ask the replay endpoint while live batches wait."""
        if occasion is not _Occasion.SILENCE:
            self._change(SourceState.RECOVERING)
        is_missing = occasion in (_Occasion.CONNECT, _Occasion.GAP) or not self._is_well
        live.start_collecting()
        try:
            await asyncio.sleep(
                max(0.0, self._recovered_at + self._options.spacing_s - monotonic())
            )
            outcome = await self._ask_patiently(live, is_missing)
        finally:
            live.stop_collecting()
            self._recovered_at = monotonic()
        self._conclude(live, outcome)
        self._settle()
        self._plan_probe()

    async def _ask_patiently(self, live: LiveStream, is_missing: bool) -> Outcome:
        patience_s = 0.0 if self._is_adrift else self._options.patience_s
        gives_up_at = monotonic() + patience_s
        retry = Backoff(self._options.first_retry_s, self._options.max_retry_s)
        while True:
            outcome = await self._recovery.run(is_missing)
            is_needed = self._state is SourceState.RECOVERING
            if (
                outcome is not Outcome.UNANSWERED
                or not is_needed
                or live.is_down
                or monotonic() >= gives_up_at
            ):
                return outcome
            await asyncio.sleep(retry.next_delay())

    def _conclude(self, live: LiveStream, outcome: Outcome) -> None:
        if outcome is Outcome.UNANSWERED and live.is_down:
            # What waits in the backlog will be in the replay that the next connection begins with.
            raise NoConnection(f"{self._endpoint}: the publisher left during a recovery")
        last = self._delivery.tracker.last
        if outcome is Outcome.SETTLED:
            self._is_adrift = False
            self._is_proven = True
            live.drop(self._recovery.covered, -1 if last is None else last)
        elif outcome is Outcome.OVERTAKEN:
            live.drop_stale(-1 if last is None else last)
        elif self._state is SourceState.RECOVERING:
            self._is_adrift = True
            self._is_proven = False

    def _plan_probe(self, after_batch: bool = False) -> None:
        if self._replay_endpoint is None:
            return
        if after_batch:
            self._probe.reset()
        self._probe_at = monotonic() + self._probe.next_delay()

    def _settle(self) -> None:
        is_whole = self._delivery.is_complete and self._is_proven
        self._change(SourceState.LIVE if is_whole else SourceState.SUSPECT)

    def _change(self, state: SourceState) -> None:
        if state is not self._state:
            self._state = state
            self._consumer.change(state)
