"""The turns of those who wait, over all models, and what they are told who get none. The clock is
moved by hand."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import weakref
from collections.abc import AsyncIterator, Callable
from random import Random
from typing import Any

import pytest

from router.config.routing import OverloadConfig
from router.errors import (
    BadRequest,
    NoReplica,
    QueueFull,
    QueueTimeout,
    RequestError,
)
from router.fleet.entrance import Entrance, headers_read
from router.fleet.line import LineLimits, Waiter
from router.fleet.room import NoTurn, RoomListener, WaitingRoom
from tests.support.waiting import eventually


class Place:
    """A room, and replicas with so much room for each model."""

    def __init__(self, **limits: Any) -> None:
        self.now = 100.0
        self.room_for = {"m": 0, "n": 0}
        self.started: list[Waiter] = []
        self.refused: list[tuple[Waiter, RequestError]] = []
        self.why: list[str] = []
        listener = RoomListener(refused=lambda _model, _number, why: self.why.append(why))
        limits = {"classes": 3, **limits}
        self.room = WaitingRoom(LineLimits(**limits), listener, lambda: self.now, Random(1))

    def waiter(self, model: str = "m", tokens: int = 10, **given: Any) -> Waiter:
        new = Waiter(model=model, tokens=tokens, **{"tenant": "t", **given})
        new.can_start = lambda: self.room_for[model] > 0
        new.start = lambda: self._start(new)
        new.refuse = lambda error: self.refused.append((new, error))
        return new

    def enter(self, model: str = "m", **given: Any) -> Waiter:
        new = self.waiter(model, **given)
        if self.room.enter(new, is_room=self.room_for[model] > 0):
            self._start(new)
        return new

    def end(self, waiter: Waiter) -> None:
        self.room_for[waiter.model] += 1
        self.room.over(waiter, 5)

    def _start(self, waiter: Waiter) -> None:
        self.room_for[waiter.model] -= 1
        self.started.append(waiter)


MakePlace = Callable[..., Place]


@pytest.fixture
async def place() -> AsyncIterator[MakePlace]:
    """Its timers need a loop."""
    made: list[Place] = []

    def make(**limits: Any) -> Place:
        made.append(Place(**limits))
        return made[-1]

    yield make
    for each in made:
        for model in each.room_for:
            each.room.forget(model)


async def test_who_ends_lets_the_next_one_in(place: MakePlace) -> None:
    """At once, and one for one."""
    here = place()
    here.room_for["m"] = 1
    first, second, third = here.enter(), here.enter(), here.enter()
    assert here.started == [first]
    here.end(first)
    here.end(second)
    assert here.started == [first, second, third]
    assert here.room.statistics()["m"][0].requests == 0


async def test_models_take_turns(place: MakePlace) -> None:
    """Two models on the same replicas: neither waits for the whole line of the other."""
    here, slots, order = place(), [0], []

    def start(waiter: Waiter) -> None:
        slots[0] -= 1
        order.append(waiter.model)

    for waiter in [here.enter(model) for model in "mmmnnn"]:
        waiter.can_start = lambda: slots[0] > 0
        waiter.start = functools.partial(start, waiter)
    for _ in range(6):
        slots[0] = 1
        here.room.look()
    assert order == list("mnmnmn")


async def test_an_error_in_one_refusal_is_not_the_end_of_all_later_ones(place: MakePlace) -> None:
    """Deadlines are only checked by a timer: without it, requests wait for ever."""
    here = place()
    broken, other = here.enter(deadline=101.0), here.enter(deadline=102.0)
    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, what: told.append(what))

    def fail(_error: RequestError) -> None:
        raise RuntimeError

    broken.refuse = fail
    here.now = 101.5
    await eventually(lambda: bool(told), "the timer has met the error")
    here.now = 102.5
    await eventually(lambda: bool(here.refused), "the next one is refused")
    assert [waiter for waiter, _ in here.refused] == [other]


@pytest.mark.parametrize(
    "refuse_all", [WaitingRoom.look, lambda room: room.forget("m")], ids=["late", "gone"]
)
async def test_an_error_in_one_refusal_leaves_no_other_unanswered(
    place: MakePlace, refuse_all: Callable[[WaitingRoom], None]
) -> None:
    """They are out of the line already: nothing would ever answer them."""
    here = place()
    broken, *others = (here.enter(deadline=110.0) for _ in range(3))

    def fails(_error: RequestError) -> None:
        raise RuntimeError

    broken.refuse = fails
    here.now = 111.0
    with pytest.raises(RuntimeError):
        refuse_all(here.room)
    assert [waiter for waiter, _ in here.refused] == others


async def test_one_that_ends_as_it_starts_does_not_stop_the_others(place: MakePlace) -> None:
    """Its replica refused the connection, for example."""
    here = place()
    waiting = [here.enter() for _ in range(100)]
    for waiter in waiting:
        waiter.start = lambda waiter=waiter: here.room.over(waiter)
    here.room_for["m"] = 1
    here.room.look()
    assert here.room.statistics()["m"][0].requests == 0


async def test_a_deadline_that_passes_is_told_with_the_time_to_come_back(place: MakePlace) -> None:
    """503, and not a second before."""
    here = place()
    late = here.enter(deadline=105.0)
    here.now = 104.9
    here.room.look()
    assert here.refused == []
    here.now = 105.0
    here.room.look()
    ((waiter, error),) = here.refused
    assert waiter is late
    assert isinstance(error, QueueTimeout)
    assert (error.retry_after_s or 0) >= 1
    assert here.why == [NoTurn.TIMEOUT]


async def test_who_would_wait_too_long_is_told_at_once(place: MakePlace) -> None:
    """A client that waits for nothing cannot ask elsewhere."""
    here = place()
    for _ in range(20):
        here.room_for["m"] = 1
        here.enter(tokens=100)
        here.now += 1
    for _ in range(50):
        here.enter(tokens=100)
    with pytest.raises(QueueTimeout) as refused:
        here.enter(tokens=100, deadline=here.now + 5)
    assert 30 <= (refused.value.retry_after_s or 0) <= 90, "50 before it, one a second"
    assert here.why == [NoTurn.LATE]


async def test_the_displaced_are_told_and_the_newest_by_an_error(place: MakePlace) -> None:
    """Every refusal is one response, whoever's it is."""
    here = place(waiting=2)
    first, second = here.enter(tokens=10), here.enter(tokens=500)
    here.enter(tokens=20)
    assert [waiter for waiter, _ in here.refused] == [second]
    assert isinstance(here.refused[0][1], QueueFull)
    with pytest.raises(QueueFull):
        here.enter(tokens=900)
    assert first.is_waiting
    assert here.why == [NoTurn.FULL, NoTurn.FULL]


async def test_who_is_refused_at_the_door_is_not_kept(place: MakePlace) -> None:
    """An error that its own frames refer to lives until the garbage collector comes, and with it
    the request and its body: megabytes a minute under overload."""
    here = place(waiting=1)
    here.enter(tokens=10)
    refused = Waiter(model="m", tenant="t", tokens=500, can_start=lambda: False)
    request = weakref.ref(refused.can_start)
    gc.disable()
    try:
        with contextlib.suppress(QueueFull):
            here.room.enter(refused, is_room=False)
        here.room.over(refused)
        del refused
        assert request() is None
    finally:
        gc.enable()


async def test_who_waits_for_a_model_that_is_gone_is_told_so(place: MakePlace) -> None:
    """Nobody will ever serve it; the line is not kept either."""
    here = place()
    here.enter()
    here.room.forget("m")
    assert isinstance(here.refused[0][1], NoReplica)
    assert here.room.statistics() == {}


async def test_a_request_may_outlive_its_line(place: MakePlace) -> None:
    """Its replica was replaced while it ran: it is settled where it entered, not where others of
    its model wait now."""
    here = place()
    first = here.enter()
    here.room_for["m"] = 1
    here.room.look()
    assert here.started == [first]
    here.room.forget("m")
    second = here.enter(tenant="another")
    here.end(first)
    assert here.started == [first, second]
    here.end(second)
    here.end(here.enter())


# --- who comes in ---------------------------------------------------------------------------------


def entrance(**given: Any) -> Entrance:
    return Entrance(OverloadConfig(**given), Place().room)


def test_a_header_can_lower_the_priority_of_a_key_and_not_raise_it() -> None:
    """Else every client would be urgent."""
    here = entrance(priority_header="x-priority")
    asked = {name: {b"x-priority": name.encode()} for name in ("high", "normal", "low")}
    assert here.waiter("m", asked["high"], "a", "normal").priority == 1
    assert here.waiter("m", asked["low"], "a", "normal").priority == 2
    assert here.waiter("m", asked["high"], "a").priority == 0, "the key says nothing"
    assert here.waiter("m", {}, "a", "low").priority == 2
    assert entrance().waiter("m", asked["high"], "a").priority == 1, "the header is not trusted"


def test_a_tenant_is_the_holder_of_a_key_or_whom_a_gateway_names() -> None:
    """A header that is not configured is not believed."""
    headers = {b"x-tenant": b"t" * 1000}
    assert entrance().waiter("m", headers, "holder").tenant == "holder"
    named = entrance(tenant_header="x-tenant")
    assert named.waiter("m", headers, "holder").tenant == "t" * 256
    assert named.waiter("m", {}, "holder").tenant == "holder"


@pytest.mark.parametrize("value", [b"0", b"-1", b"nan", b"inf", b"soon", b"1e999"])
def test_a_time_that_is_none_is_an_error(value: bytes) -> None:
    """A client that meant milliseconds would wait for the wrong time in silence."""
    with pytest.raises(BadRequest):
        entrance().waiter("m", {b"x-request-timeout": value})


def test_a_client_can_only_shorten_its_wait() -> None:
    """The bound on memory is the operator's."""
    here = entrance(max_wait_s=20)
    assert here.waiter("m", {b"x-request-timeout": b"2.5"}).deadline == 102.5
    assert here.waiter("m", {b"x-request-timeout": b"600"}).deadline == 120
    assert here.waiter("m", {}).deadline == 120


def test_what_the_field_calls_a_header_counts_where_that_header_does() -> None:
    """llm-d's names and the older ones, after the one that is configured."""
    named = entrance(tenant_header="x-tenant", priority_header="x-priority")
    for prefix in (b"x-llm-d", b"x-gateway"):
        headers = {
            prefix + b"-inference-fairness-id": b"blue",
            prefix + b"-inference-objective": b"low",
        }
        waiter = named.waiter("m", headers, "holder")
        assert (waiter.tenant, waiter.priority) == ("blue", 2)
        own = {**headers, b"x-tenant": b"red", b"x-priority": b"high"}
        assert (named.waiter("m", own).tenant, named.waiter("m", own).priority) == ("red", 0)
        waiter = entrance().waiter("m", headers, "holder")
        assert (waiter.tenant, waiter.priority) == ("holder", 1), "they are not trusted"
    with pytest.raises(BadRequest, match="x-gateway-inference-objective"):
        named.waiter("m", {b"x-gateway-inference-objective": b"best"})


def test_an_objective_for_the_first_token_is_a_deadline_where_it_is_said_to_be() -> None:
    """The shorter of the two counts; one that is no time is an error."""
    headers = {b"x-llm-d-slo-ttft-ms": b"2500", b"x-slo-ttft-ms": b"1"}
    assert entrance(max_wait_s=20).waiter("m", headers).deadline == 120
    here = entrance(max_wait_s=20, ttft_is_deadline=True)
    assert here.waiter("m", headers).deadline == 102.5
    assert here.waiter("m", {**headers, b"x-request-timeout": b"1"}).deadline == 101
    assert here.waiter("m", {b"x-slo-ttft-ms": b"600000"}).deadline == 120
    for value in (b"0", b"-1", b"soon", b"1e3", b"9" * 10):
        with pytest.raises(BadRequest, match="x-slo-ttft-ms"):
            here.waiter("m", {b"x-slo-ttft-ms": value})


def test_all_headers_that_are_read_are_known() -> None:
    """With these the core leaves a request to Python; with the others it decides."""
    assert headers_read(OverloadConfig()) == frozenset(), "where nothing waits"
    assert headers_read(OverloadConfig(max_in_flight=1)) == {b"x-request-timeout"}
    every = OverloadConfig(
        max_in_flight=1,
        tenant_header="x-t",
        priority_header="x-p",
        timeout_header=None,
        ttft_is_deadline=True,
    )
    assert headers_read(every) == {
        *(b"x-t", b"x-p", b"x-llm-d-slo-ttft-ms", b"x-slo-ttft-ms"),
        *(b"x-llm-d-inference-objective", b"x-gateway-inference-objective"),
        *(b"x-llm-d-inference-fairness-id", b"x-gateway-inference-fairness-id"),
    }
