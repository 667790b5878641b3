"""A subscriber under test, and a consumer that records everything."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from kvevents.delivery import Effect
from kvevents.errors import KVEventsError, MalformedBatch
from kvevents.messages import Batch
from kvevents.replay import ReplayLimits
from kvevents.sockets import SocketLimits
from kvevents.stream_state import SourceState
from kvevents.subscriber import Subscriber, SubscriberOptions
from tests.support.waiting import DEADLINE_S, eventually

QUICK = SubscriberOptions(
    patience_s=0.5,
    first_probe_s=0.1,
    max_probe_s=0.4,
    first_retry_s=0.01,
    max_retry_s=0.1,
    socket=SocketLimits(connect_timeout_s=2.0),
    replay=ReplayLimits(silence_s=1.0),
)
"""Short delays; nothing else differs from the defaults."""


class Notebook:
    """A consumer that records what it gets.

    Payloads that begin with `bad` are malformed; those that begin with `clear` make all known.
    """

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.reasons: list[str] = []
        self.states: list[SourceState] = []
        self.problems: deque[str] = deque(maxlen=100)

    @property
    def seqs(self) -> list[int]:
        """Numbers since the last clear."""
        return [batch.seq for batch in self.batches]

    def apply(self, batch: Batch) -> Effect:
        if batch.payload.startswith(b"bad"):
            raise MalformedBatch("payload: it begins with bad")
        self.batches.append(batch)
        return Effect.KNOWN_AGAIN if batch.payload.startswith(b"clear") else Effect.KEPT

    def clear(self, reason: str) -> None:
        self.reasons.append(reason)
        self.batches.clear()

    def change(self, state: SourceState) -> None:
        self.states.append(state)

    def report(self, problem: KVEventsError) -> None:
        self.problems.append(str(problem))


@asynccontextmanager
async def following(subscriber: Subscriber) -> AsyncIterator[Subscriber]:
    """Run *subscriber*; its task must end by being cancelled and in no other way."""
    task = asyncio.get_running_loop().create_task(subscriber.run())
    try:
        yield subscriber
    finally:
        if not task.done():
            task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def until_live(
    subscriber: Subscriber, last_seq: int | None, timeout_s: float = DEADLINE_S
) -> None:
    """Wait until everything up to *last_seq* was handed on and nothing is missing.

    Args:
        subscriber: Whom to watch.
        last_seq: The number applied last; None: no batch yet.
        timeout_s: Fail after this time.
    """
    await until_state(subscriber, SourceState.LIVE, last_seq, timeout_s)


async def until_state(
    subscriber: Subscriber, state: SourceState, last_seq: int | None, timeout_s: float = DEADLINE_S
) -> None:
    """Wait until the consumer knows of *state*, with *last_seq* applied last.

    Args:
        subscriber: Whom to watch.
        state: The state shown.
        last_seq: The number applied last; None: no batch yet.
        timeout_s: Fail after this time.
    """

    def is_there() -> bool:
        statistics = subscriber.statistics()
        return statistics.state is state and statistics.last_seq == last_seq

    await eventually(is_there, f"{state} at {last_seq}", timeout_s, subscriber.statistics)
