"""Follows one publisher: every batch once and in order, or a known gap.

A stream is *live* until a number is missing; then the replay endpoint is asked
(`kvevents.recovery`) while live batches wait. It is asked too after every connect, since an engine
may have restarted or a tail may be lost, and after a silence, since a batch lost at the tail leaves
no gap.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from time import monotonic
from typing import Any

import zmq

from kvevents.delivery import ENOUGH_UNANSWERED, Consumer, Delivery, StreamCounters
from kvevents.endpoints import Context
from kvevents.errors import ForeignAddress, HandshakeFailed, MalformedBatch, NoConnection
from kvevents.live import BacklogLimits, Connection, LiveStream
from kvevents.messages import Batch, read_live
from kvevents.pacing import Backoff, Pacer, SilenceTimer
from kvevents.recovery import Recovery
from kvevents.replay import AskedEndpoints, ReplayLimits
from kvevents.sequence import StreamPosition
from kvevents.sockets import SocketConnection, SocketLimits, check_connectable
from kvevents.stream_repair import StreamRepair
from kvevents.stream_state import Action, Input, SourceState, State

_BATCHES_A_TURN = 64


@dataclass(frozen=True, slots=True)
class SubscriberOptions:
    """Bounds and delays.

    Raises:
        ValueError: A delay is not a positive number.
    """

    patience_s: float = 10.0
    """How long live batches wait for a replay endpoint that does not answer, before they go on
    without it."""
    first_probe_s: float = 2.0
    """Silence after which the tail is checked; doubles up to `max_probe_s`."""
    max_probe_s: float = 60.0
    spacing_s: float = 0.05
    """The least time between two recoveries: a publisher that sends nonsense does not keep us busy
    asking."""
    first_retry_s: float = 0.1
    """Delay before the next connection, or the next question that got no answer; doubles up to
    `max_retry_s`."""
    max_retry_s: float = 10.0
    socket: SocketLimits = field(default_factory=SocketLimits)
    backlog: BacklogLimits = field(default_factory=BacklogLimits)
    replay: ReplayLimits = field(default_factory=ReplayLimits)

    def __post_init__(self) -> None:
        for name in (each.name for each in fields(self) if each.name.endswith("_s")):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(
                    f"{name} is {getattr(self, name)}: it must be a positive number of seconds"
                )


@dataclass(slots=True, kw_only=True)
class SubscriberStatistics(StreamCounters):
    """The counters of one stream, and the state now."""

    endpoint: str
    replay_endpoint: str | None
    state: SourceState
    last_seq: int | None
    last_message_at: float | None
    """On the monotonic clock; None before the first batch."""
    publisher_id: str | None
    problem: str | None
    """A problem that an operator can solve, in words that follow the replica's name; None: no
    problem."""


class Subscription(SocketConnection):
    """Batches from one publisher, of one process: it connects once and never again.

    Args:
        only_topic: The only topic that counts; None: every one.
    """

    def __init__(
        self, context: Context, endpoint: str, only_topic: bytes | None, limits: SocketLimits
    ) -> None:
        super().__init__(context, zmq.SUB, endpoint, limits, only_topic or b"")
        self._only_topic = only_topic

    def next_batch(self) -> Batch | None:
        """Return the next batch, None if none has come.

        Raises:
            MalformedBatch: A message that is not a batch.
        """
        frames = self.receive_three()
        return None if frames is None else read_live(frames, self._only_topic)


class Subscriber:
    """Follows one endpoint until its task is cancelled.

    Args:
        replay_endpoint: The publisher's ROUTER socket; None: what is lost stays lost, unless there
            is a snapshot.
        snapshot_endpoint: Its socket for snapshots alone, if it has one.
        topic: Matched exactly; None takes every topic.
        context: The sockets' context; None: a context of its own for each run.
        pacer: Shared by all subscribers of an event loop.
        resume: The position of the consumer's picture. The publisher is asked whether it is still
            the same, and for the batches since.
        connect: Makes connections in place of those to *endpoint*, which is then only shown.
        has_unique_numbers: True if a batch with the next number can only be the same process's.

    Raises:
        EndpointError: A socket cannot connect to one of the addresses.
    """

    def __init__(
        self,
        endpoint: str,
        consumer: Consumer,
        *,
        replay_endpoint: str | None = None,
        snapshot_endpoint: str | None = None,
        topic: str | None = "",
        options: SubscriberOptions | None = None,
        context: zmq.Context[Any] | None = None,
        pacer: Pacer | None = None,
        resume: StreamPosition | None = None,
        connect: Callable[[], Connection] | None = None,
        has_unique_numbers: bool = False,
    ) -> None:
        if connect is None:
            check_connectable("endpoint", endpoint)
        if replay_endpoint is not None:
            check_connectable("replay_endpoint", replay_endpoint)
        if snapshot_endpoint is not None:
            check_connectable("snapshot_endpoint", snapshot_endpoint)
        self._endpoint = endpoint
        self._topic = None if topic is None else topic.encode()
        self._options = options or SubscriberOptions()
        self._asked = AskedEndpoints(
            replay_endpoint,
            snapshot_endpoint,
            self._topic,
            self._options.socket,
            self._options.replay,
        )
        self._context = context
        self._pacer = pacer or Pacer()
        self._connect = connect
        self._has_unique_numbers = has_unique_numbers
        self._delivery = Delivery(consumer)
        if resume is not None:
            self._delivery.resume(resume)
        self._stream = StreamRepair()
        self._silence = SilenceTimer(self._options.first_probe_s, self._options.max_probe_s)
        self._is_distrusted = False
        self._live: LiveStream | None = None

    def statistics(self) -> SubscriberStatistics:
        """Counts since the start, and the state now."""
        return SubscriberStatistics(
            endpoint=self._endpoint,
            replay_endpoint=self._asked.replay,
            state=self._delivery.shown,
            last_seq=self._delivery.tracker.last,
            last_message_at=self._delivery.last_message_at,
            publisher_id=self._delivery.tracker.publisher_id,
            problem=self._problem(),
            **asdict(self._delivery.counters),
        )

    def position(self) -> StreamPosition | None:
        """Return the position of a whole picture; None while it is not live, or nothing proves
        it."""
        is_live = self._delivery.shown is SourceState.LIVE
        return self._delivery.tracker.position() if is_live else None

    def rebuild(self) -> None:
        """Get everything anew from the publisher, for a consumer that found its picture wrong.

        It is asked once, soon, for a snapshot, else for a replay from batch 0. Without either, or
        if the stream is suspect anyhow, nothing changes.
        """
        self._is_distrusted = True
        if self._live is not None:
            self._live.connection.wake_up.set()

    async def run(self) -> None:
        """Follow until cancelled; no socket is left behind. To be called once.

        Raises:
            EndpointError: libzmq refuses an address for good.
        """
        context = self._context or zmq.Context()
        try:
            await self._follow_connections(context)
        finally:
            self._enter(Input.CLOSED)
            if self._context is None:
                context.term()

    def _problem(self) -> str | None:
        if not self._stream.is_connected:
            return None
        if self._stream.state is State.CROSSED:
            return "batches of another engine come over its event stream"
        if self._delivery.counters.unanswered_in_a_row < ENOUGH_UNANSWERED:
            return None
        return self._asked.no_answer

    # --- connections ------------------------------------------------------------------------------

    async def _follow_connections(self, context: zmq.Context[Any]) -> None:
        recovery = self._recovery(context)
        retry = Backoff(self._options.first_retry_s, self._options.max_retry_s)
        while True:
            connected_at = monotonic()
            live = self._live_stream(context)
            try:
                # A failure shows in the state, which stays as it is.
                with suppress(NoConnection):
                    await self._open(live)
                    await self._follow(live, recovery)
            finally:
                self._live = None
                live.close()
            if monotonic() - connected_at > self._options.max_retry_s:
                retry.reset()
            await asyncio.sleep(retry.next_delay())

    async def _open(self, live: LiveStream) -> None:
        try:
            await live.connection.open()
        except (ForeignAddress, HandshakeFailed) as problem:
            self._delivery.report(problem)
            raise

    def _live_stream(self, context: zmq.Context[Any]) -> LiveStream:
        connection: Connection
        if self._connect is not None:
            connection = self._connect()
        else:
            connection = Subscription(context, self._endpoint, self._topic, self._options.socket)
        return LiveStream(connection, self._options.backlog, self._delivery)

    def _recovery(self, context: zmq.Context[Any]) -> Recovery:
        options = self._options
        return Recovery(
            self._stream,
            self._delivery,
            self._asked,
            context,
            self._pacer,
            self._silence,
            Backoff(options.first_retry_s, options.max_retry_s),
            options.patience_s,
            options.spacing_s,
        )

    def _enter(self, given: Input) -> None:
        self._stream.advance(given)
        self._delivery.show(self._stream.state.shown)

    # --- batches ----------------------------------------------------------------------------------

    async def _follow(self, live: LiveStream, recovery: Recovery) -> None:
        """Take batches until the connection is lost."""
        self._delivery.counters.connections += 1
        self._live = live
        await recovery.connected(live)
        intake = _Intake(recovery, self._pacer)
        while self._stream.is_connected:
            has_all = intake.question is None and intake.take(await self._pacer.turn())
            if intake.question is not None:
                await intake.follow_up()
            elif has_all and live.connection.is_down:
                if self._has_unique_numbers and self._delivery.shown is SourceState.LIVE:
                    self._delivery.proves_by_number = True
                self._enter(Input.DISCONNECTED)
            if self._is_distrusted and self._stream.is_connected:
                self._is_distrusted = has_all = False
                await recovery.react_to(Input.DISTRUSTED)
            # A live stream is looked at only after a silence, so not while batches wait.
            if has_all or self._stream.state is not State.LIVE:
                await self._look_or_wait(recovery, intake if has_all else None)

    async def _look_or_wait(self, recovery: Recovery, idle: _Intake | None) -> None:
        if not self._stream.is_connected:
            return
        if self._silence.is_over():
            await recovery.react_to(Input.SILENCE)
        elif idle is not None:
            left_s = max(self._silence.left_s, 0.0)
            await idle.wait(min(left_s, self._options.max_probe_s))


@dataclass(eq=False, repr=False)
class _Intake:
    """Hands on the batches of one connection, a turn at a time.

    While the subscriber's task has nothing else to do, batches go from the socket to the consumer
    without it, in the event loop's own call: a task's switch would cost more than a small batch.
    """

    recovery: Recovery
    """Has the connection, and decides about batches."""
    pacer: Pacer
    question: Action | None = None
    """The question that the last batch raised; nothing is taken until it is followed up."""

    def __post_init__(self) -> None:
        self._live = self.recovery.live
        self._failure: BaseException | None = None
        self._is_waiting = self._is_queued = False

    def take(self, ends_at: float) -> bool:
        """Hand on waiting batches for a turn; return whether that was all.

        Args:
            ends_at: When the turn ends at the latest, on the monotonic clock.
        """
        live, recovery = self._live, self.recovery
        has_any = has_all = False
        for _ in range(_BATCHES_A_TURN):
            try:
                batch = live.next()
            except MalformedBatch as problem:
                recovery.delivery.report(problem)
                continue
            if batch is None:
                has_all = True
                break
            self.question = recovery.take(batch)
            if self.question is not None or monotonic() >= ends_at:
                has_any = True
                break
            if not has_any and not live.has_more():
                has_any = has_all = True
                break
            has_any = True
        if has_any:
            recovery.note_batches()
        return has_all

    async def follow_up(self) -> None:
        """Follow up the last batch's question."""
        question, self.question = self.question, None
        await self.recovery.follow_up(question)

    async def wait(self, timeout_s: float) -> None:
        """Hand on batches, until there is other work or *timeout_s* is over."""
        self._is_waiting = True
        try:
            await self._live.wait(timeout_s, self._on_readable)
        finally:
            self._is_waiting = False
        if self._failure is not None:
            raise self._failure

    def _on_readable(self) -> None:
        # The signal may come again while a turn is waited for, and before the task has woken up.
        if self._is_queued or self.question is not None or self._failure is not None:
            return
        now = monotonic()
        ends_at = self.pacer.begin(now)
        if ends_at:
            self._work(now, ends_at)
        else:
            self._queue()

    def _queue(self) -> None:
        self._is_queued = True
        self.pacer.call_in_turn(self._work_in_turn)

    def _work_in_turn(self, ends_at: float) -> bool:
        self._is_queued = False
        if self._is_waiting:
            self._work(monotonic(), ends_at)
        return self._is_waiting

    def _work(self, now: float, ends_at: float) -> None:
        has_all = False
        try:
            while ends_at and not has_all and self.question is None:
                has_all = self.take(ends_at)
                before, now = now, monotonic()
                self.pacer.end(now - before)
                ends_at = self.pacer.begin(now)
        except BaseException as error:  # noqa: BLE001 - raised again in the task
            self._failure = error
        if self.question is not None or self._failure is not None:
            self._live.connection.wake_up.set()
        elif not has_all:
            self._queue()
