"""Making a consumer's picture whole again with what the publisher still has.

The replay is asked from the batch applied *last*, one more than is missing: if the ring returns it
unchanged, the same process is still there and what follows closes the gap. If it comes back
different, or the ring has not come that far, the process is another one and everything starts from
nothing. What the ring no longer has comes from a snapshot; where the publisher makes none (vLLM),
the picture stays incomplete and goes on behind the hole.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import Enum

from kvevents.delivery import Counters, Delivery, Taken, publisher_of
from kvevents.errors import KVEventsError, MalformedBatch, MalformedReply, NoAnswer, NoConnection
from kvevents.messages import Batch
from kvevents.replay import ReplayClient
from kvevents.sequence import fingerprint

MAX_ROUNDS = 16
"""Replays in a row that may break off, as long as each brings something. A ROUTER drops what a slow
reader does not take."""


class Outcome(Enum):
    """What asking came to. Whether anything is still missing, `Delivery.is_complete` says."""

    SETTLED = "settled"
    """The consumer has everything that the publisher has."""
    UNANSWERED = "unanswered"
    """Worth another try."""
    USELESS = "useless"
    """The answers do not help: go on with what comes."""
    OVERTAKEN = "overtaken"
    """The ring no longer has the batch applied last. As long as nothing is known to be missing,
    that means nothing."""


class _Step(Enum):
    DONE = "done"
    FOREIGN = "foreign"
    """Another process answers."""
    LOST = "lost"
    """The ring lacks what comes next."""
    OVERTAKEN = "overtaken"
    """The ring begins behind the batch applied last."""
    BROKEN_OFF = "broken off"
    VACANT = "vacant"
    """The ring has nothing, and never had for us: perhaps it keeps nothing at all."""


class Recovery:
    """The questions of one subscriber.

    Args:
        delivery: Where the answers go.
        counters: What to count in.
        connect: Makes a client for the replay endpoint.
        breathe: Awaited before each batch.
        waiting: How many live batches have come and wait.
    """

    def __init__(
        self,
        delivery: Delivery,
        counters: Counters,
        connect: Callable[[], ReplayClient],
        breathe: Callable[[], Awaitable[None]],
        waiting: Callable[[], int],
        on_loss: Callable[[], None],
    ) -> None:
        self.covered = 0
        """Of the batches that wait, the first so many came before a question that was answered to
        its end.

        The answer covers them: each is in it, or was never sent by the publisher that answered.
        """
        self._delivery = delivery
        self._tracker = delivery.tracker
        self._counters = counters
        self._connect = connect
        self._breathe = breathe
        self._waiting = waiting
        self._waiting_at_ask = 0
        self._on_loss = on_loss
        self._keeps_batches = False
        """True once the ring has shown a batch."""
        self._ring_is_whole = True
        """False once asking this process from 0 has proved useless."""
        self._snapshots_help = True
        """False once a snapshot was more than the consumer could take."""

    async def run(self, is_missing: bool = True) -> Outcome:
        """Do what can be done with one round of questions; never raises but `CancelledError`.

        Args:
            is_missing: False if nothing is known to be missing, and live batches will tell if
                something is.
        """
        self.covered = 0
        try:
            return await self._repair(is_missing)
        except (NoAnswer, NoConnection):
            self._counters.unanswered += 1
            return Outcome.UNANSWERED
        except MalformedReply as problem:
            self._counters.unanswered += 1
            self._delivery.report(problem)
            return Outcome.UNANSWERED

    # --- which questions --------------------------------------------------------------------------

    async def _repair(self, is_missing: bool) -> Outcome:
        if self._tracker.last is None:
            return await self._rebuild()
        step = await self._catch_up()
        if step is _Step.FOREIGN:
            self._counters.restarts += 1
            self._start_over("restart")
            return await self._rebuild()
        if step is _Step.OVERTAKEN and not is_missing:
            return Outcome.OVERTAKEN
        if step in (_Step.LOST, _Step.OVERTAKEN):
            return await self._make_up()
        if step is _Step.DONE:
            return Outcome.SETTLED if self._delivery.is_complete else await self._renew()
        return Outcome.USELESS if step is _Step.VACANT else Outcome.UNANSWERED

    async def _rebuild(self) -> Outcome:
        """From nothing: a snapshot, else everything the ring has."""
        if await self._snapshot():
            return Outcome.SETTLED
        return await self._from_zero()

    async def _from_zero(self) -> Outcome:
        async with self._connect() as client:
            first = await self._ask(client, 0)
            if first is not None:
                return await self._take_ring(client, first)
        if self._waiting_at_ask:
            return Outcome.USELESS
        # Nothing was published, or at least nothing is known of it.
        self._delivery.is_complete = True
        return Outcome.SETTLED

    async def _make_up(self) -> Outcome:
        """For what the ring lacks: a snapshot, else go on behind the hole."""
        if await self._snapshot():
            return Outcome.SETTLED
        self._delivery.is_complete = False
        if self._tracker.last is None:
            return await self._from_zero()
        self._ring_is_whole = False
        step = await self._catch_up(tolerant=True)
        return Outcome.SETTLED if step is _Step.DONE else Outcome.USELESS

    async def _renew(self) -> Outcome:
        """Something is missing from earlier: a snapshot, else all of the ring if it still begins at
        0."""
        if self._snapshots_help and await self._snapshot():
            return Outcome.SETTLED
        if self._tracker.last is None:
            return await self._from_zero()
        if self._ring_is_whole:
            async with self._connect() as client:
                first = await self._ask(client, 0)
                if first is not None and first.seq == 0:
                    self._start_over("rebuild")
                    return await self._take_ring(client, first)
        self._ring_is_whole = False
        return Outcome.SETTLED

    async def _take_ring(self, client: ReplayClient, first: Batch) -> Outcome:
        await self._follow(client, first, tolerant=True)
        self._ring_is_whole = self._delivery.is_complete
        return Outcome.SETTLED

    def _start_over(self, reason: str) -> None:
        self._on_loss()
        self._ring_is_whole = self._snapshots_help = True
        self._delivery.clear(reason)

    # --- one question -----------------------------------------------------------------------------

    async def _ask(self, client: ReplayClient, start: int) -> Batch | None:
        """The first batch of a replay."""
        self._put(client, start)
        first = await client.reply()
        self._keeps_batches |= first is not None
        return first

    def _put(self, client: ReplayClient, start: int | None) -> None:
        self._waiting_at_ask = self._waiting()
        self._counters.questions += 1
        client.ask(start)

    def _end(self) -> _Step:
        """The answer was read to its end."""
        self.covered = self._waiting_at_ask
        return _Step.DONE

    async def _catch_up(self, tolerant: bool = False) -> _Step:
        """Replay from the last batch on, again while it breaks off and yet brings something."""
        stuck = 0
        for _ in range(MAX_ROUNDS):
            last = self._tracker.last
            step = await self._replay(tolerant)
            if step is not _Step.BROKEN_OFF:
                return step
            stuck = stuck + 1 if self._tracker.last == last else 0
            if stuck == 2:
                # Twice at the same place: what comes next does not pass, a batch above the limit
                # for one.
                return _Step.LOST if not tolerant else _Step.BROKEN_OFF
        return _Step.BROKEN_OFF

    async def _replay(self, tolerant: bool) -> _Step:
        """Replay from the last batch on, once. Raises before the proof of identity, breaks off
        behind it."""
        assert self._tracker.last is not None
        async with self._connect() as client:
            first = await self._ask(client, self._tracker.last)
            step = self._compare(first, tolerant)
            if step is not None:
                return step
            if first is not None and first.seq > self._tracker.last:
                return await self._follow(client, first, tolerant)
            return await self._follow_on(client, tolerant)

    def _compare(self, first: Batch | None, tolerant: bool) -> _Step | None:
        """Is the first batch of a replay the one we had last? None: it is, or that is all the same
        now."""
        last = self._tracker.last
        known = None if last is None else self._tracker.recall(last)
        if first is not None and first.seq == last:
            return self._compare_marks(known, fingerprint(first.payload), tolerant)
        if first is None and known is not None:
            return _Step.FOREIGN if self._keeps_batches else _Step.VACANT
        if first is None and tolerant:
            return self._end()
        if tolerant:
            return None
        return _Step.LOST if known is None else _Step.OVERTAKEN

    def _compare_marks(self, known: bytes | None, seen: bytes, tolerant: bool) -> _Step | None:
        if known is None:
            # We hold a snapshot, and never saw the batch it stands for.
            self._tracker.learn(seen)
            return None if tolerant else _Step.LOST
        return None if known == seen else _Step.FOREIGN

    async def _follow_on(self, client: ReplayClient, tolerant: bool) -> _Step:
        try:
            following = await client.reply()
            return (
                self._end()
                if following is None
                else await self._follow(client, following, tolerant)
            )
        except NoAnswer:
            return _Step.BROKEN_OFF
        except MalformedReply as problem:
            self._delivery.report(problem)
            return _Step.BROKEN_OFF

    async def _follow(self, client: ReplayClient, first: Batch, tolerant: bool) -> _Step:
        """Hand on an answer to its end, or where not *tolerant* to the first hole."""
        self._on_loss()
        self._counters.replays += 1
        last = self._tracker.last
        batch: Batch | None = first
        while batch is not None:
            await self._breathe()
            taken = self._delivery.take(batch)
            if taken is not Taken.APPLIED:
                if not tolerant:
                    return self._stopped(taken, last)
                self._delivery.go_on(batch, taken)
            batch = await client.reply()
        return self._end()

    def _stopped(self, taken: Taken, last: int | None) -> _Step:
        """What a replay that cannot be followed means; *last* is where it began."""
        if taken is Taken.RESTART:
            return _Step.FOREIGN
        return _Step.LOST if self._tracker.last == last else _Step.BROKEN_OFF

    # --- a snapshot -------------------------------------------------------------------------------

    async def _snapshot(self) -> bool:
        """Take the whole state; False if the publisher makes no snapshots, or none that can be read
        to its end."""
        async with self._connect() as client:
            self._put(client, None)
            first = await client.reply()
            if first is None or publisher_of(first.payload) is None:
                return False
            self._on_loss()
            try:
                await self._take_snapshot(client, first)
            except (NoAnswer, MalformedReply, MalformedBatch) as problem:
                self._give_up_snapshot(problem)
                return False
            await self._follow_snapshot(client, first.seq)
        return True

    async def _take_snapshot(self, client: ReplayClient, first: Batch) -> None:
        self._delivery.begin_snapshot()
        batch: Batch | None = first
        while batch is not None:
            await self._breathe()
            self._delivery.take_snapshot(batch)
            batch = await client.reply()
        self._delivery.end_snapshot(first.seq)
        self._end()
        self._counters.snapshots += 1
        self._ring_is_whole = self._snapshots_help = self._delivery.is_complete

    def _give_up_snapshot(self, problem: KVEventsError) -> None:
        self._counters.unanswered += 1
        if not isinstance(problem, NoAnswer):
            self._delivery.report(problem)
        self._delivery.clear("broken snapshot")

    async def _follow_snapshot(self, client: ReplayClient, seq: int) -> None:
        """What came since. On the same connection, so what it says of batch *seq* is proof enough
        of who it is."""
        first = await self._ask(client, seq)
        if first is not None and first.seq == seq:
            self._tracker.learn(fingerprint(first.payload))
            first = await client.reply()
        if first is not None:
            await self._follow(client, first, tolerant=False)
