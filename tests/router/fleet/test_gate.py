"""When a replica is given nothing: full, told off, failing, or just there. The clock is moved by
hand."""

from __future__ import annotations

from typing import Any

import pytest

from router.fleet.gate import (
    AT_LIMIT,
    AT_TOKEN_LIMIT,
    BACKING_OFF,
    BEING_PROBED,
    BREAKER_OPEN,
    MAX_TENANTS_BACKING_OFF,
    TENANT_BACKING_OFF,
    Breaker,
    GateOptions,
    ReplicaGate,
)


class Gate(ReplicaGate):
    """With its clock."""

    def __init__(self, **options: Any) -> None:
        self.now = 100.0
        super().__init__(GateOptions(**options), lambda: self.now)


def failing(gate: Gate, times: int = 3) -> Gate:
    for _ in range(times):
        gate.failed()
    return gate


def test_a_gate_without_options_never_says_no() -> None:
    """What is not configured changes nothing."""
    gate = failing(Gate(), 100)
    gate.busy(100)
    gate.start_slowly()
    assert (gate.shut(), gate.full(10**6, 10**9), gate.speed) == (None, None, 1.0)
    assert not gate.is_watching


def test_limits_count_requests_and_prompt_tokens() -> None:
    """A prompt of any length is let in where nothing else is computed."""
    gate = Gate(in_flight=2, prefill_tokens=1000)
    assert gate.full(1, 999) is None
    assert gate.full(2, 0) == AT_LIMIT
    assert gate.full(1, 1000) == AT_TOKEN_LIMIT


def test_half_of_the_last_requests_failing_open_the_breaker() -> None:
    """Also where no two of them fail in a row."""
    gate = Gate(breaker_failures=3)
    for _ in range(2):
        gate.failed()
        gate.answered()
    assert gate.breaker is Breaker.CLOSED
    gate.failed()
    assert (gate.breaker, gate.shut(), gate.opened) == (Breaker.OPEN, BREAKER_OPEN, 1)


def test_few_failures_among_many_requests_do_not_open_it() -> None:
    """One in ten may be a client's."""
    gate = Gate(breaker_failures=3)
    for number in range(200):
        (gate.failed if number % 10 == 0 else gate.answered)()
    assert gate.breaker is Breaker.CLOSED


def test_when_its_time_is_over_one_request_tries_and_closes_it() -> None:
    """Not the whole queue at once: if it still fails, only one request has to move."""
    gate = failing(Gate(breaker_failures=3, breaker_open_s=5))
    gate.now += 4.9
    assert gate.shut() == BREAKER_OPEN
    assert gate.opens_in_s() == pytest.approx(0.1)
    gate.now += 0.1
    assert (gate.breaker, gate.shut()) == (Breaker.HALF_OPEN, None)
    gate.sent()
    assert gate.shut() == BEING_PROBED
    gate.answered()
    assert (gate.breaker, gate.shut()) == (Breaker.CLOSED, None)
    failing(gate, 2)
    assert gate.breaker is Breaker.CLOSED, "what was before is forgotten"


def test_a_probe_that_fails_opens_it_for_twice_as_long_up_to_a_bound() -> None:
    """A replica that stays broken costs fewer and fewer requests."""
    gate = failing(Gate(breaker_failures=3, breaker_open_s=5, breaker_max_open_s=15))
    waits = []
    for _ in range(3):
        waits.append(gate.opens_in_s())
        gate.now += waits[-1]
        gate.sent()
        gate.failed()
    assert waits == [5, 10, 15]
    gate.now += gate.opens_in_s()
    gate.sent()
    gate.answered()
    assert failing(gate).opens_in_s() == 5, "it begins anew after it was well"


def test_a_probe_without_an_end_does_not_keep_it_shut_for_good() -> None:
    """Its client may have left before there was an answer."""
    gate = failing(Gate(breaker_failures=3, breaker_open_s=5))
    gate.now += 5
    gate.sent()
    gate.now += 5
    assert gate.shut() is None


def test_failures_of_requests_from_before_it_opened_do_not_prolong_it() -> None:
    """Whatever was under way there fails as well."""
    gate = failing(Gate(breaker_failures=3, breaker_open_s=5), 20)
    assert (gate.opens_in_s(), gate.opened) == (5, 1)


def test_a_replica_is_left_alone_for_as_long_as_it_says_within_a_bound() -> None:
    """It knows best; but a mistaken hour must not last one."""
    gate = Gate(max_back_off_s=10)
    gate.busy(3)
    gate.busy(1)
    assert (gate.shut(), gate.opens_in_s(), gate.times_busy) == (BACKING_OFF, 3, 2)
    gate.now += 3
    assert gate.shut() is None
    gate.busy(3600)
    assert gate.backs_off_s() == 10


def test_a_tenant_that_is_refused_alone_backs_off_alone() -> None:
    """One tenant's rate limit at a replica is no word about the others."""
    gate = Gate(max_back_off_s=10)
    gate.busy(3, "noisy")
    assert (gate.shut("noisy"), gate.opens_in_s("noisy")) == (TENANT_BACKING_OFF, 3)
    assert (gate.shut("quiet"), gate.shut(), gate.opens_in_s("quiet")) == (None, None, 0)
    assert (gate.backs_off_s(), gate.times_busy, gate.is_watching) == (0, 1, True)
    gate.busy(5)
    assert gate.shut("noisy") == gate.shut("quiet") == BACKING_OFF
    gate.now += 5
    assert (gate.shut("noisy"), gate.is_watching) == (None, False)


def test_so_many_tenants_are_remembered_and_no_more() -> None:
    """A gateway's header may name any number of them."""
    gate = Gate(max_back_off_s=10)
    gate.busy(1)
    for number in range(MAX_TENANTS_BACKING_OFF):
        gate.busy(2, f"tenant-{number}")
    assert not gate.backs_off_s(), "it was the first to end"
    assert gate.shut("tenant-0") == TENANT_BACKING_OFF
    gate.busy(3, "last")
    assert gate.shut("tenant-0") is None
    assert gate.shut("tenant-1") == gate.shut("last") == TENANT_BACKING_OFF


def test_a_replica_that_just_joined_gets_more_step_by_step() -> None:
    """All that waits would else go to its cold cache at once."""
    gate = Gate(in_flight=20, slow_start_s=30)
    assert gate.speed == 1.0
    gate.start_slowly()
    assert (gate.speed, gate.full(1, 0), gate.full(2, 0)) == (0.1, None, AT_LIMIT)
    gate.now += 15
    assert (gate.speed, gate.full(9, 0), gate.full(10, 0)) == (0.5, None, AT_LIMIT)
    gate.now += 15
    assert (gate.speed, gate.full(19, 0)) == (1.0, None)
