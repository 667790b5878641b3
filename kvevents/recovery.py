"""Completes a consumer's picture with the batches that the publisher still has.

`Recovery` carries out the table of `kvevents.stream_repair`; `Questions` are those of its actions
that take an answer from the replay endpoint. Each comes down to an `Input`.

A replay is asked from the batch applied *last*, one more than is missing. If the ring returns it
unchanged, the same process is still there and what follows closes the gap:

    applied      ... 6 7                 (7: the fingerprint is known)
    missing            8 9
    waiting                10            (the live batch that showed the gap)
    asked from       7
    the ring sends   7 8 9 10            7 is the same: NEWS, then REPLAY_END; 10 is dropped
    or               7 8 9               the same, and then STRANGERS: 10 is another engine's
    or               7'                  7 differs: FOREIGN
    or                   9 10            MOVED_ON: 8 is gone for good
    or               -                   FOREIGN if the ring ever showed a batch, else VACANT

It begins earlier where batches before the last one are unproven (`kvevents.sequence`); if one of
them differs, the answer is MIXED.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from time import monotonic
from typing import NamedTuple

from kvevents.delivery import (
    ENOUGH_UNANSWERED,
    Delivery,
    last_in_snapshot,
    publisher_of,
)
from kvevents.endpoints import Context
from kvevents.errors import KVEventsError, MalformedBatch, MalformedReply, NoAnswer, NoConnection
from kvevents.live import LiveStream
from kvevents.messages import NOTHING_PUBLISHED, Batch, SnapshotHead
from kvevents.pacing import Backoff, Pacer, SilenceTimer
from kvevents.replay import AskedEndpoints, EndpointClient, ReplayClient, SnapshotClient
from kvevents.sequence import fingerprint
from kvevents.stream_repair import StreamRepair
from kvevents.stream_state import CLEAR_REASONS, ON_A_BATCH, RESULTS, Action, Input, State

MAX_ROUNDS = 16
"""Replays that may break off, although each brings a little, before there is a pause."""
MUCH = 64
"""New batches that a replay must bring to be followed by the next without a pause: a ROUTER drops
what a slow reader does not take, vLLM's when 1,000 wait."""
MAX_UNPROVEN = 512
"""Batches before the last one that a replay may begin with, to prove them: what vLLM sends at once
without dropping any is twice as much."""
STUCK_ROUNDS = 2
"""Replays in a row that may break off at the same place. Then the next batch cannot get through,
such as one above the limit."""


_STOPS = frozenset({Input.GAP, Input.MALFORMED, Input.IDENTITY_CHANGED})


class Result(NamedTuple):
    """The result of a question, or the fate of a batch on the way to it."""

    given: Input
    batch: Batch | None = None


@dataclass(eq=False, repr=False)
class Questions:
    """The questions of one recovery.

    Each connection to the replay endpoint serves one answer, or a snapshot and the batches since.
    """

    delivery: Delivery
    live: LiveStream
    """The live batches, which wait meanwhile."""
    asked: AskedEndpoints
    context: Context
    pacer: Pacer

    def __post_init__(self) -> None:
        self._tracker, self._counters = self.delivery.tracker, self.delivery.counters
        self._client: EndpointClient | None = None
        self._next: Batch | None = None
        """The first batch of the answer under way that was not handed on; None at its end."""
        self._snapshot = SnapshotHead(NOTHING_PUBLISHED, None)
        """The head of the snapshot under way."""
        self._is_refused = False
        """True if no snapshot can be had for now, nor anything else be asked."""
        self._asked_from: int | None = None
        self._rounds = self._stuck_rounds = 0
        self._furthest = -1
        """The last number that any of the answers brought."""
        self._turn_ends_at = 0.0

    def close(self) -> None:
        """End the connection, if one is open."""
        if self._client is not None:
            self._client.close()
            self._client = None

    async def ask(self, question: Action) -> AsyncIterator[Result]:
        """Carry out *question*: the fates of batches that need a decision, then the result."""
        if question is Action.TAKE_SNAPSHOT:
            async for result in self._take_snapshot():
                yield result
        elif question in (Action.FOLLOW, Action.FOLLOW_PAST_HOLES):
            async for result in self._follow(past_holes=question is Action.FOLLOW_PAST_HOLES):
                yield result
        else:
            yield Result(await self._first_of_answer(question))

    # --- the beginning of an answer ---------------------------------------------------------------

    async def _first_of_answer(self, question: Action) -> Input:
        try:
            if question is Action.ASK_FROM_LAST:
                return await self._ask_from_last()
            if question is Action.ASK_SNAPSHOT:
                return await self._ask_snapshot()
            return await self._ask_from_0()
        except (NoAnswer, NoConnection, MalformedReply) as problem:
            self._complain(problem)
            return Input.NO_ANSWER

    async def _ask_from_last(self) -> Input:
        last = self._asked_from = self._tracker.last
        if last is None:
            return Input.NOTHING_HELD
        if self.asked.replay is None:
            return Input.VACANT if self._is_refused else Input.UNPROVABLE
        start = self._tracker.unproven_since(MAX_UNPROVEN)
        is_same = True
        first = self._next = await self._put(start)
        while self._next is not None and self._next.seq < last:
            is_same &= self._tracker.recall(self._next.seq) == fingerprint(self._next.payload)
            self._next = await self._reply()
        if first is not None and first.seq < last and (not self._next or self._next.seq > last):
            # It may have been dropped on the way: the first of an answer never is.
            self._next = await self._put(last)
        doubt = self._compare(last, self._next)
        if doubt is not None:
            return doubt
        if not is_same:
            return Input.MIXED
        self._tracker.prove()
        try:
            self._next = await self._reply()
        except (NoAnswer, MalformedReply) as problem:
            self._complain(problem)
            return self._cut_short()
        return Input.NEWS if self._next is not None else self._end()

    def _compare(self, last: int, first: Batch | None) -> Input | None:
        """Compare *first*, which the ring begins with, with the batch applied *last*; None if
        equal."""
        known = self._tracker.recall(last)
        if known is None and not self._is_by_name(last, first):
            return Input.UNPROVABLE
        if first is None:
            return Input.FOREIGN if self._tracker.ring_answers else Input.VACANT
        if first.seq > last:
            return Input.MOVED_ON
        if known is None:
            self._tracker.learn(fingerprint(first.payload))
            return None
        return None if fingerprint(first.payload) == known else Input.FOREIGN

    def _is_by_name(self, last: int, first: Batch | None) -> bool:
        """Return whether *first* is the batch applied *last* by the sender that it names."""
        if first is None or first.seq != last:
            return False
        name = publisher_of(first.payload)
        return name is not None and name == self._tracker.publisher_id

    async def _ask_from_0(self) -> Input:
        self._asked_from = None
        if self.asked.replay is None:
            return Input.VACANT
        self._next = await self._put(0)
        if self._next is None:
            return Input.VACANT if self.live.waiting_at_question else Input.RING_EMPTY
        return Input.RING_FROM_0 if self._next.seq == 0 else Input.RING_LATER

    async def _ask_snapshot(self) -> Input:
        if self.asked.snapshots is not None:
            given = await self._ask_snapshot_endpoint(self.asked.snapshots)
            if given is Input.SNAPSHOT_BEGINS or self.asked.replay is None:
                return given
        self._next = await self._put(None)
        last = None if self._next is None else last_in_snapshot(self._next)
        if last is None:
            return Input.NO_SNAPSHOT
        self._snapshot = SnapshotHead(last, None)
        return Input.SNAPSHOT_BEGINS

    async def _ask_snapshot_endpoint(self, endpoint: str) -> Input:
        if not self.asked.may_make_snapshot:
            self._is_refused = self.asked.replay is None
            return Input.NO_SNAPSHOT
        self.close()
        self.live.forget_answers()
        self._counters.questions += 1
        try:
            self._client = client = SnapshotClient(self.context, endpoint, self.asked)
            await client.open()
            head = await client.ask()
            if head is None:
                self._is_refused = self.asked.replay is None
                return Input.NO_SNAPSHOT
            self.asked.note_snapshot()
            # The first part comes with the head: a fault in it costs nothing that is held.
            self._next = await client.reply()
        except (NoAnswer, NoConnection, MalformedReply) as problem:
            self.close()
            if self.asked.replay is None:
                raise
            self._complain(problem)
            return Input.NO_SNAPSHOT
        self._snapshot = head
        return Input.SNAPSHOT_BEGINS

    async def _put(self, start: int | None) -> Batch | None:
        """Ask on a new connection; return the first batch of the answer."""
        assert self.asked.replay is not None
        self.close()
        self._client = ReplayClient(self.context, self.asked.replay, self.asked)
        await self._client.open()
        return await self._put_again(start)

    async def _put_again(self, start: int | None) -> Batch | None:
        assert isinstance(self._client, ReplayClient)
        self.live.note_question()
        self._counters.questions += 1
        self._client.ask(start)
        first = await self._client.reply()
        self._counters.unanswered_in_a_row = 0
        self._tracker.ring_answers += start is not None and first is not None
        return first

    # --- the rest of it ---------------------------------------------------------------------------

    async def _reply(self) -> Batch | None:
        assert self._client is not None
        return await self._client.reply()

    def _end(self) -> Input:
        """Return the result of an answer that was read to its end."""
        last = self._tracker.last
        if not self.live.waits_beyond(last):
            self.live.note_answer()
            return Input.REPLAY_END
        if last != self._asked_from:
            return self._cut_short()  # a ROUTER may have dropped the tail of the answer
        self.live.note_answer()
        return Input.STRANGERS

    async def _follow(self, past_holes: bool) -> AsyncIterator[Result]:
        """Hand on the answer under way."""
        try:
            await self._learn_last()
            self._counters.replays += self._next is not None
            while self._next is not None:
                await self._keep_to_turns()
                fate = self.delivery.take(self._next)
                if fate in _STOPS and not (past_holes and self._may_pass(fate)):
                    yield Result(self._stopped(fate))
                    return
                if fate is not Input.NEXT:
                    yield Result(fate, self._next)
                self._tracker.prove()
                self._next = await self._reply()
        except (NoAnswer, MalformedReply) as problem:
            self._complain(problem)
            yield Result(self._cut_short())
            return
        yield Result(self._end())

    async def _keep_to_turns(self) -> None:
        """Let other subscribers work once the turn is over."""
        if monotonic() >= self._turn_ends_at:
            self._turn_ends_at = await self.pacer.turn()

    async def _learn_last(self) -> None:
        """An answer that begins with the batch a snapshot stood for shows what that batch was."""
        if self._next is not None and self._next.seq == self._tracker.last:
            self._tracker.learn(fingerprint(self._next.payload))
            self._next = await self._reply()

    def _may_pass(self, fate: Input) -> bool:
        """Return whether asking again would bring no more. A hole at the beginning of an answer is
        one of the ring; a later one may be lost on the way."""
        return fate is not Input.GAP or self._tracker.last == self._asked_from

    def _stopped(self, fate: Input) -> Input:
        """Return the result of an answer that cannot be followed."""
        if fate is Input.IDENTITY_CHANGED:
            return Input.FOREIGN
        # A ROUTER at its high-water mark drops from the middle of an answer: ask again from there.
        return Input.LOST if self._tracker.last == self._asked_from else self._cut_short()

    def _cut_short(self) -> Input:
        """Return the result of an answer that broke off."""
        last, asked_from = self._tracker.last, self._asked_from
        self._stuck_rounds = self._stuck_rounds + 1 if last == asked_from else 0
        furthest = -1 if last is None else last
        self._rounds += furthest < self._furthest + MUCH
        self._furthest = max(furthest, self._furthest)
        if self._stuck_rounds < STUCK_ROUNDS and self._rounds < MAX_ROUNDS:
            return Input.CUT_SHORT
        if self._stuck_rounds == STUCK_ROUNDS:
            self._stuck_rounds = 0
            return Input.LOST
        self._rounds = 0
        return Input.NO_ANSWER

    async def _take_snapshot(self) -> AsyncIterator[Result]:
        last, named = self._snapshot
        if named is not None:
            self._tracker.publisher_id = named
        try:
            while self._next is not None:
                await self._keep_to_turns()
                fate = self.delivery.take_snapshot(self._next)
                if fate is Input.PARTLY_KEPT and last < 0:
                    raise MalformedBatch("snapshot: it does not fit, and stands for no batch")
                if fate is not Input.NEXT:
                    yield Result(fate)
                self._next = await self._reply()
        except (NoAnswer, MalformedReply, MalformedBatch) as problem:
            self._complain(problem)
            yield Result(Input.SNAPSHOT_BROKEN)
            return
        self._counters.snapshots += 1
        if last >= 0:
            self._tracker.jump(last)
        # Where batches are named, live ones go on from here: included ones are recognised.
        if named is None:
            self.live.note_answer()
            if last >= 0:
                async for result in self._take_since(last):
                    yield result
        yield Result(Input.SNAPSHOT_END)

    async def _take_since(self, seq: int) -> AsyncIterator[Result]:
        """Hand on the batches since a snapshot, as far as available.

        On the same connection, so the ring's answer about batch *seq* proves its identity.
        """
        self._asked_from = seq
        try:
            self._next = await self._put_again(seq)
        except (NoAnswer, NoConnection, MalformedReply) as problem:
            self._complain(problem)
            return
        async for result in self._follow(past_holes=False):
            if result.batch is not None:
                yield result

    def _complain(self, problem: KVEventsError) -> None:
        self._counters.unanswered += 1
        self._counters.unanswered_in_a_row += 1
        if self._counters.unanswered_in_a_row == ENOUGH_UNANSWERED:
            self.delivery.report_silence(NoAnswer(f"{self.asked.no_answer} ({problem})"))
        if not isinstance(problem, (NoAnswer, NoConnection)):
            self.delivery.report(problem)


@dataclass(eq=False, repr=False)
class Recovery:
    """Carries out the table for one stream, connection after connection."""

    stream: StreamRepair
    delivery: Delivery
    asked: AskedEndpoints
    context: Context
    """Has the sockets that ask."""
    pacer: Pacer
    silence: SilenceTimer
    """Times the looks at the tail; every batch and every recovery delays it."""
    retry: Backoff
    """Delays between questions without an answer."""
    patience_s: float
    """How long live batches wait for an endpoint that does not answer."""
    spacing_s: float
    """The least time between two recoveries."""
    live: LiveStream = field(init=False)
    """The live side of the connection, from `connected` on."""

    def __post_init__(self) -> None:
        self._gap_seq: int | None = None
        """The batch that the last gap was counted at; it may come again after the questions."""
        self._gives_up_at = self._ended_at = -math.inf

    async def connected(self, live: LiveStream) -> None:
        """Verify what is held, with the publisher behind *live*."""
        self.live = live
        if self.asked.replay is None and self.asked.snapshots is None:
            await self.react_to(Input.CONNECTED_WITHOUT_REPLAY)
        else:
            self.silence.received()
            await self.react_to(Input.CONNECTED)

    async def react_to(self, given: Input) -> None:
        """Do all that follows from an input that no batch brought."""
        await self.follow_up(self._carry_out(given))

    def take(self, batch: Batch) -> Action | None:
        """Hand *batch* on, or act on its fate; return the question to `follow_up`."""
        fate = self.delivery.take(batch)
        if fate is Input.NEXT and self.stream.stays_on_next:
            return None
        if fate is Input.GAP and batch.seq != self._gap_seq:
            self._gap_seq = batch.seq
            self.delivery.counters.gaps += 1
        question = self._carry_out(fate, batch)
        if question is None:
            self.delivery.show(self.stream.state.shown)
        return question

    def note_batches(self) -> None:
        """Note that live batches came: the tail of a live stream is looked at after a silence."""
        self.delivery.last_message_at = monotonic()
        if self.stream.state is State.LIVE:
            self.silence.received()

    async def follow_up(self, question: Action | None) -> None:
        """Ask *question*, if there is one, and those that follow, until the stream is at rest
        again."""
        if question is not None:
            await self._recover(question)
        self.delivery.show(self.stream.state.shown)

    # --- actions ----------------------------------------------------------------------------------

    def _carry_out(self, given: Input, batch: Batch | None = None) -> Action | None:
        """Carry out immediate actions; return the question to ask then."""
        for action in self.stream.advance(given):
            if action in RESULTS:
                return action
            if batch is not None and action in ON_A_BATCH:
                self._act_on(action, batch)
            else:
                self._act(action, given)
        return None

    def _act_on(self, action: Action, batch: Batch) -> None:
        if action is Action.PUT_BACK:
            self.live.put_back(batch)
        elif action is Action.SKIP:
            self.delivery.skip(batch)
        else:
            assert action is Action.HAND_ON
            fate = self.delivery.hand_on(batch)
            if fate is not Input.NEXT:
                self._carry_out(fate, batch)

    def _act(self, action: Action, given: Input) -> None:
        if action is Action.START_PATIENCE:
            self._gives_up_at = monotonic() + self.patience_s
        elif action is Action.CLEAR:
            self._clear(given)
        elif action is Action.DROP_COVERED:
            self.live.drop_covered(self.delivery.tracker.last)
        else:
            assert action is Action.DROP_OLD
            self.live.drop_old(self.delivery.tracker.last)

    def _clear(self, given: Input) -> None:
        reason = CLEAR_REASONS[given]
        self.delivery.counters.restarts += reason == "restart"
        self.delivery.clear(reason)
        self.live.forget_answers()

    # --- questions --------------------------------------------------------------------------------

    async def _recover(self, question: Action) -> None:
        questions = Questions(self.delivery, self.live, self.asked, self.context, self.pacer)
        self.live.forget_answers()
        self.retry.reset()
        try:
            with self.live.collecting():
                await self._ask(questions, question)
        finally:
            questions.close()
            self._ended_at = monotonic()
            if self.stream.state is State.UNANSWERED:
                self.silence.received()  # the second look comes soon: it decides
            else:
                self.silence.looked()

    async def _ask(self, questions: Questions, first: Action) -> None:
        await asyncio.sleep(max(0.0, self._ended_at + self.spacing_s - monotonic()))
        question: Action | None = first
        while question is not None:
            self.delivery.show(self.stream.state.shown)
            asked = question
            if asked is Action.WAIT:
                question = self._carry_out(await self._wait())
                continue
            async for given, batch in questions.ask(asked):
                assert given in RESULTS[asked], (asked, given)
                question = self._carry_out(given, batch)

    async def _wait(self) -> Input:
        if self.live.connection.is_down:
            # The backlog will be in the replay that the next connection begins with.
            return Input.DISCONNECTED
        if monotonic() >= self._gives_up_at:
            return Input.PATIENCE_OVER
        await asyncio.sleep(self.retry.next_delay())
        return Input.TRY_AGAIN
