"""Who is next: classes, tenants in proportion to their weights, the short before the long, and
bounds that hold. Times are made up."""

from __future__ import annotations

import gc
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.fleet.line import (
    LONGEST_TOKENS,
    Line,
    LineLimits,
    Waiter,
)


def waiter(tenant: str = "a", tokens: int = 100, **given: Any) -> Waiter:
    return Waiter(tenant=tenant, tokens=tokens, **given)


def take_all(line: Line, now: float = 0.0) -> list[Waiter]:
    return list(iter(lambda: line.take(now), None))


def line_of(*waiters: Waiter, now: float = 0.0, **limits: Any) -> Line:
    line = Line(LineLimits(**limits))
    for each in waiters:
        assert line.put(each, now) == []
    return line


# --- order ----------------------------------------------------------------------------------------


def test_the_shortest_request_is_next() -> None:
    """Short ones wait least, and hold up the long ones least."""
    long, short, middle = waiter(tokens=900), waiter(tokens=10), waiter(tokens=90)
    assert take_all(line_of(long, short, middle)) == [short, middle, long]


@given(
    st.lists(st.tuples(st.integers(1, 9000), st.floats(0, 10)), min_size=2, max_size=40),
    st.sampled_from([100.0, 1000.0]),
)
def test_a_request_is_overtaken_only_by_what_comes_while_its_tokens_age(
    arrivals: Sequence[tuple[int, float]], rate: float
) -> None:
    """Ageing is the promise that a long request gets its turn, whatever comes later."""
    line = Line(LineLimits(ageing_tokens_per_s=rate))
    now = 0.0
    for tokens, pause in arrivals:
        now += pause
        line.put(waiter(tokens=tokens), now)
    order = take_all(line)
    for first, second in itertools.combinations(order, 2):
        # `first` overtook `second` only if it came before the tokens of `second` were aged.
        aged_s = min(second.tokens, LONGEST_TOKENS) / rate
        assert first.arrived <= second.arrived + aged_s + 1e-6


def test_what_a_request_costs_includes_the_usual_response() -> None:
    """Its order and the estimated wait of others go by the whole of it."""
    first = waiter(tokens=100)
    line = line_of(first, response_tokens=40.0)
    assert (first.tokens, first.response_tokens, line.tokens) == (140, 40, 140)
    later = waiter(tokens=100)
    line.pass_by(later, 1.0)
    assert (later.tokens, later.response_tokens) == (140, 40)


def test_requests_that_left_are_not_kept_behind_one_that_stays() -> None:
    """Clients that give up by the thousand, while a long request of theirs waits, would fill the
    memory."""
    line = line_of(stays := waiter(tokens=10))
    for _ in range(1000):
        line.put(gone := waiter(tokens=100), 0.0)
        line.leave(gone)
    held = [each for each in gc.get_objects() if type(each) is Waiter and each is not gone]
    assert stays in held
    assert len(held) <= 1 + 2 * 17, "no more than a few, and as many again of those that wait"


def test_a_higher_class_goes_first_whatever_its_length() -> None:
    """That is what a priority is."""
    low, high = waiter(tokens=1, priority=1), waiter(tokens=99_999)
    assert take_all(line_of(low, high, classes=2)) == [high, low]


@given(
    st.lists(st.integers(1, 4000), min_size=30, max_size=60),
    st.lists(st.integers(1, 4000), min_size=30, max_size=60),
    st.sampled_from([0.5, 1.0, 3.0]),
)
def test_tenants_with_work_get_tokens_in_proportion_to_their_weights(
    first: Sequence[int], second: Sequence[int], weight: float
) -> None:
    """The bound of deficit round robin: while both have requests waiting, neither is further ahead
    than a quantum and a request, whatever the lengths are."""
    quantum = 512.0
    line = line_of(
        *(waiter("a", tokens, weight=weight) for tokens in first),
        *(waiter("b", tokens) for tokens in second),
        quantum_tokens=quantum,
    )
    left, served = {"a": len(first), "b": len(second)}, {"a": 0.0, "b": 0.0}
    most = max(*first, *second)
    while min(left.values()):
        taken = line.take(0.0)
        assert taken is not None
        left[taken.tenant] -= 1
        served[taken.tenant] += taken.tokens / taken.weight
        assert abs(served["a"] - served["b"]) <= 2 * quantum + 2 * most / min(weight, 1.0)


def test_no_tenant_starves_beside_one_that_floods_the_line() -> None:
    """One client's thousand requests must not push out another client's one."""
    line = line_of(*(waiter("loud", 10) for _ in range(500)), waiter("quiet", 3000))
    order = [taken.tenant for taken in take_all(line)]
    ahead = order.index("quiet") * 10
    assert ahead <= 3000 + 2 * 1024, "no more than the other's own share of the same time"


def test_what_a_request_did_cost_in_the_end_is_paid_by_its_tenant() -> None:
    """Lengths of responses are not known before: who asks for long ones pays for them later."""
    line = line_of(*(waiter(tenant, 1000) for tenant in "ab" * 30), quantum_tokens=1000.0)
    served: Counter[str] = Counter()
    for _ in range(30):
        taken = line.take(0.0)
        assert taken is not None
        response = 2000 if taken.tenant == "a" else 0
        served[taken.tenant] += 1000 + response
        line.ended(taken, response)
    assert served["a"] == pytest.approx(served["b"], abs=6000)


def test_who_cannot_start_stops_nobody_else() -> None:
    """Adapters are served by some of the replicas only."""
    stuck = waiter(tokens=1, lane="adapter", can_start=lambda: False)
    free = [waiter(tokens=5), waiter("b", tokens=5)]
    line = line_of(stuck, *free)
    assert take_all(line) == free
    assert line.waiting == 1


def test_whether_there_is_room_is_asked_once_for_all_of_a_lane() -> None:
    """With a thousand waiting, the end of one request must not look at the replicas a thousand
    times."""
    asked: list[int] = []

    def can_start() -> bool:
        asked.append(1)
        return False

    line = line_of(*(waiter(str(n), can_start=can_start) for n in range(100)))
    assert line.take(0.0) is None
    assert len(asked) == 1


# --- bounds ---------------------------------------------------------------------------------------


def test_a_tenant_that_floods_the_line_displaces_its_own_requests() -> None:
    """Otherwise the fair order would order who is let in by who asks most."""
    line = Line(LineLimits(waiting=10))
    displaced = [gone for _ in range(30) for gone in line.put(waiter("loud"), 0.0)]
    quiet = waiter("quiet")
    displaced += line.put(quiet, 0.0)
    assert {gone.tenant for gone in displaced} == {"loud"}
    assert (len(displaced), line.waiting, quiet.is_waiting) == (21, 10, True)


def test_the_lowest_class_has_to_go_first() -> None:
    """A high priority finds a place in a full line."""
    line = line_of(*(waiter("a", 10, priority=1) for _ in range(4)), waiting=4, classes=2)
    (gone,) = line.put(waiter("b", 5000), 0.0)
    assert gone.priority == 1
    (itself,) = line.put(low := waiter("c", 5000, priority=1), 0.0)
    assert itself is low, "it has most waiting in the lowest class"


def test_one_request_over_the_bound_on_tokens_may_wait_alone() -> None:
    """Else it could never be served while replicas are full."""
    line = Line(LineLimits(tokens=1000))
    assert line.put(large := waiter(tokens=5000), 0.0) == []
    assert line.put(waiter("b", tokens=10), 0.0) == [large]


def test_deadlines_that_pass_take_requests_out() -> None:
    """Nobody waits for their response any more."""
    late, early = waiter(deadline=5.0), waiter(deadline=2.0)
    line = line_of(late, early, waiter())
    assert line.expired(1.9) == []
    assert line.expired(2.0) == [early]
    assert (line.waiting, early.is_waiting) == (2, False)


def test_the_wait_is_what_starts_before_at_the_rate_of_the_last_seconds() -> None:
    """Clients come back when they are told to."""
    line = line_of(*(waiter("a", 100) for _ in range(200)), *(waiter("b", 100) for _ in range(10)))
    assert line.wait_s(waiter("c"), 0.0) == 0.0, "no rate is known yet"
    for second in range(1, 11):
        line.take(float(second))
    rate = 100.0
    # 200 of `a`, of which some are gone; `b` and `c` get their third of the time.
    assert line.wait_s(waiter("c"), 10.0) < 1.0
    assert line.wait_s(waiter("a"), 10.0, behind_all=True) == pytest.approx(
        line.tokens / rate, rel=0.4
    )
    assert line.wait_s(waiter("b", 10**9), 10.0) < line.wait_s(waiter("a", 10**9), 10.0)


class LineMachine(RuleBasedStateMachine):
    """Whatever happens, everyone who waits is taken, refused, left or expired exactly once, and
    nothing else is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.line = Line(LineLimits(waiting=8, tokens=5000, classes=3))
        self.now = 0.0
        self.waiting: list[Waiter] = []
        self.running: list[Waiter] = []
        self.blocked: set[str] = set()
        self.random = Random(1)

    @rule(
        tenant=st.sampled_from("abc"),
        tokens=st.integers(1, 2000),
        priority=st.integers(0, 2),
        lane=st.sampled_from(["", "x"]),
        patience=st.sampled_from([1.0, 5.0, math.inf]),
        weight=st.sampled_from([0.5, 1.0, 2.0]),
    )
    def put(
        self, tenant: str, tokens: int, priority: int, lane: str, patience: float, weight: float
    ) -> None:
        new = Waiter(
            tenant=tenant,
            tokens=tokens,
            priority=priority,
            lane=lane,
            weight=weight,
            deadline=self.now + patience,
            can_start=lambda: lane not in self.blocked,
        )
        gone = self.line.put(new, self.now)
        self.waiting.append(new)
        for each in gone:
            assert not each.is_waiting
            self.waiting.remove(each)

    @rule()
    def take(self) -> None:
        taken = self.line.take(self.now)
        able = [each for each in self.waiting if each.lane not in self.blocked]
        assert (taken is None) == (not able), "there is progress whenever someone can start"
        if taken is not None:
            assert taken.priority == min(each.priority for each in able)
            self.waiting.remove(taken)
            self.running.append(taken)

    @precondition(lambda self: self.running)
    @rule(tokens=st.one_of(st.none(), st.integers(0, 5000)))
    def end(self, tokens: int | None) -> None:
        self.line.ended(self.running.pop(self.random.randrange(len(self.running))), tokens)

    @precondition(lambda self: self.waiting)
    @rule()
    def leave(self) -> None:
        self.line.leave(self.waiting.pop(self.random.randrange(len(self.waiting))))

    @rule(seconds=st.floats(0, 3))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for each in self.line.expired(self.now):
            assert each.deadline <= self.now
            self.waiting.remove(each)
        assert all(each.deadline > self.now for each in self.waiting)

    @rule(lane=st.sampled_from(["", "x"]))
    def block(self, lane: str) -> None:
        self.blocked ^= {lane}

    @invariant()
    def nothing_else_is_kept(self) -> None:
        assert self.line.waiting == len(self.waiting) <= 8
        assert self.line.tokens == sum(each.tokens for each in self.waiting)
        assert self.line.tokens <= 5000 or self.line.waiting == 1
        assert set(self.line.all_waiting()) == set(self.waiting)
        remembered = sum(len(each.tenants) for each in self.line._classes)
        assert remembered == len(
            {(each.priority, each.tenant) for each in [*self.waiting, *self.running]}
        )


TestLine = LineMachine.TestCase
