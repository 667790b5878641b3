"""Answers gateways: decides where a request should go, waits for room there, books it."""

from __future__ import annotations

import asyncio
import functools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from router.doors.asks import Key, Question, new_id
from router.doors.reservations import Claim, Outcome, Reservation, Reservations
from router.doors.terms_reader import TermsReader
from router.errors import BadRequest, NoReplica, UnknownReservation
from router.fleet.entrance import EngineOrder, Entrance
from router.plane.attempts import Attempt, Failure
from router.routing.admission import Admission
from router.routing.deciding import Deciding
from router.routing.decision import Decision
from router.routing.terms import Terms
from router.telemetry.request_observer import RequestObserver, RequestObservers

KEEP_SELECTION_S = 120.0
MAX_SELECTIONS = 4096
MAX_SELECTION_BYTES = 64 * 1024 * 1024
"""The bound on all that are kept, with their prompts."""
_TOKEN_BYTES = 8


@dataclass(slots=True, eq=False, repr=False)
class DecidedReservation(Reservation):
    """A reservation that was decided in Python."""

    observer: RequestObserver

    @property
    def decision(self) -> Decision:
        """Where it may be sent, and why."""
        return self.observer.decision

    @property
    def expected_tokens(self) -> int | None:
        """Prompt tokens that will be cached when the engine admits it, as it was booked; None where
        that is not followed."""
        return self.observer.request.expected_tokens

    def served_by(self, attempt: Attempt) -> None:
        """Note that the gateway has sent it to another replica of the decision, as after a
        retry."""
        if not self.is_over and attempt.replica_id != self.attempt.replica_id:
            self.observer.on_failure(self.attempt, Failure.CONNECT)
            self.attempt = attempt
            self.observer.on_attempt(attempt)


@dataclass(eq=False, repr=False)
class Desk:
    """Answers gateways' questions. Belongs to one event loop."""

    dispatcher: Deciding
    observers: RequestObservers
    admission: Admission
    entrance: Entrance | None
    """The queue for room; None: requests do not wait."""
    engine_order: EngineOrder
    reservations: Reservations
    terms: TermsReader

    def __post_init__(self) -> None:
        self._selections = _Selections()

    async def look_up(self, ask: Question) -> Decision:
        """Decide without booking; the ranking may be empty.

        Raises:
            RequestError: It is refused.
        """
        with Claim(ask, self.admission, self.entrance) as claim, self.admission:
            decision = await self._decide(ask)
            claim.give_back()
            return decision

    async def select(self, ask: Question, selection_id: str | None = None) -> Decision:
        """Decide, and book nothing.

        Args:
            selection_id: The decision is kept under this id for a while, to be booked as it is.
        Raises:
            RequestError: It is refused.
        """
        decision = await self.look_up(ask)
        metrics = self.observers.metrics
        metrics.decided(decision.model_name, decision.tokenization_s, decision.routing_s)
        decision.require_replica()
        if selection_id is not None:
            self._selections.keep(selection_id, _Selected(ask, decision, self.reservations.clock()))
        return decision

    async def reserve(self, ask: Question, reservation_id: str | None = None) -> DecidedReservation:
        """Decide, wait for room where all replicas are full, and book.

        Args:
            reservation_id: Its id; None: a new one.
        Raises:
            RequestError: It is refused; nothing is booked.
        """
        reservation_id = reservation_id or new_id()
        self.reservations.check_room(reservation_id)
        with Claim(ask, self.admission, self.entrance) as claim, self.admission:
            decision = await self._decide(ask)
            if ask.caller.usage is not None:
                ask.caller.usage.spend(decision.tokens)
            book = functools.partial(self._book, ask, reservation_id, claim)
            return await self._in_turn(ask, decision, claim, book)

    def reserve_selected(self, selection_id: str, caller: Key) -> DecidedReservation:
        """Book what `select` has decided under that id, once.

        Raises:
            UnknownReservation: The id is unknown, or *caller* did not ask for it.
            RequestError: It is refused; nothing is booked.
        """
        kept = self._selections.take(selection_id, caller.name, self.reservations.clock())
        ask, decision = kept.ask, kept.decision
        replica = decision.replicas[decision.ranking[0].candidate.replica_id]
        obstacle = decision.obstacle_of(replica, decision.tenant)
        if obstacle is not None:
            raise NoReplica(decision.model_name, f"the selected one: {obstacle}")
        self.reservations.check_room(selection_id)
        with Claim(ask, self.admission, self.entrance) as claim:
            if caller.usage is not None:
                caller.usage.spend(decision.tokens)
            return self._book(ask, selection_id, claim, decision)

    # --- steps ------------------------------------------------------------------------------------

    async def _decide(self, ask: Question) -> Decision:
        terms = self._terms(ask)
        if ask.endpoint is None:
            return await self._decide_by_load(ask, terms)
        return await self.dispatcher.dispatch(ask.endpoint, ask.body, terms)

    async def _decide_by_load(self, ask: Question, terms: Terms) -> Decision:
        dispatcher, usage = self.dispatcher, ask.caller.usage
        if ask.response_id:
            return await dispatcher.dispatch_to_holder(ask.response_id, ask.body, terms)
        is_object = ask.body[:64].lstrip()[:1] == b"{"
        if not is_object and not (usage is None or usage.is_for_all_models):
            rule = "with this key, it must be a JSON object that names the model"
            raise BadRequest("$", f"{len(ask.body)} bytes", rule)
        if not is_object:
            terms = Terms(tenant=terms.tenant, is_eligible=terms.is_eligible)
            return dispatcher.dispatch_by_load(None, ask.body, terms, needs_model=False)
        return await dispatcher.dispatch(None, ask.body, terms, needs_model=False)

    def _terms(self, ask: Question) -> Terms:
        caller = ask.caller
        path = ask.path if ask.endpoint is None else ask.endpoint.value
        return replace(
            self.terms.read(caller, ask.headers, path),
            dp_rank=ask.dp_rank,
            is_eligible=ask.is_eligible,
        )

    async def _in_turn(
        self,
        ask: Question,
        decision: Decision,
        claim: Claim,
        book: Callable[[Decision], DecidedReservation],
    ) -> DecidedReservation:
        """Book when a replica has room."""
        entrance, dispatcher = self.entrance, self.dispatcher
        if entrance is None or not (decision.ranking or decision.may_wait):
            return book(decision)
        waiter = entrance.waiter(decision.model_name, ask.headers, *ask.caller.in_line)
        waiter.lane, waiter.tokens = decision.lane, decision.uncached_tokens
        waiter.can_start = functools.partial(dispatcher.have_room, decision)
        turn: asyncio.Future[DecidedReservation] = asyncio.get_running_loop().create_future()
        # It is booked at once, so that the next decision counts it.
        waiter.start = lambda: _settle(turn, lambda: book(dispatcher.redecide(decision)))
        waiter.refuse = lambda error: None if turn.done() else turn.set_exception(error)
        claim.waiter = waiter
        if entrance.room.enter(waiter, is_room=bool(decision.ranking)):
            return book(decision)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                turn.result().end(Outcome.CLIENT_LEFT)
            raise

    def _book(
        self, ask: Question, reservation_id: str, claim: Claim, decision: Decision
    ) -> DecidedReservation:
        observers, waiter = self.observers, claim.waiter
        claim.place = self.reservations.take_place(reservation_id)
        waited_s = 0.0 if waiter is None else observers.clock() - waiter.arrived
        # What may refuse it comes before it is logged.
        number_of = self.engine_order.numbers(ask.headers, ask.caller.priority, waited_s)
        observer = observers.observe(decision, ask.path, ask.request_id, ask.trace_id)
        observer.waited_s = waited_s
        attempt = next(decision.attempts(number_of=number_of))
        clock = self.reservations.clock
        reservation = DecidedReservation(reservation_id, claim, attempt, observer, clock, clock())
        observer.on_attempt(attempt)
        self.reservations.add(reservation)
        return reservation


def _settle(
    turn: asyncio.Future[DecidedReservation], book: Callable[[], DecidedReservation]
) -> None:
    if turn.done():
        return
    try:
        turn.set_result(book())
    except Exception as error:  # noqa: BLE001 - the waiting request gets it, not the one that let it start
        turn.set_exception(error)


class _Selected(NamedTuple):
    ask: Question
    decision: Decision
    at: float

    @property
    def bytes(self) -> int:
        return len(self.ask.body) + _TOKEN_BYTES * self.decision.prompt_tokens


class _Selections:
    """Decisions that may be booked later, bounded in number, size and age; the oldest go first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, _Selected] = OrderedDict()
        self._bytes = 0

    def keep(self, selection_id: str, kept: _Selected) -> None:
        self._remove(selection_id)
        self._kept[selection_id] = kept
        self._bytes += kept.bytes
        while len(self._kept) > MAX_SELECTIONS or self._bytes > MAX_SELECTION_BYTES:
            self._remove(next(iter(self._kept)))

    def take(self, selection_id: str, holder: str, now: float) -> _Selected:
        self._forget_old(now)
        kept = self._kept.get(selection_id)
        if kept is None or kept.ask.caller.name != holder:
            raise UnknownReservation("selection_id")
        self._remove(selection_id)
        return kept

    def _forget_old(self, now: float) -> None:
        while self._kept:
            oldest = next(iter(self._kept))
            if self._kept[oldest].at > now - KEEP_SELECTION_S:
                return
            self._remove(oldest)

    def _remove(self, selection_id: str) -> None:
        kept = self._kept.pop(selection_id, None)
        if kept is not None:
            self._bytes -= kept.bytes
