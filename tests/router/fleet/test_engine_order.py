"""The numbers by which engines order what waits there: our own queue's order, for any engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config.routing import OverloadConfig
from router.errors import BadRequest
from router.fleet.entrance import EngineOrder
from router.fleet.line import LONGEST_TOKENS, Line, LineLimits
from tests.router.fleet.test_line import take_all, waiter

NOW = 1_800_000_000.0


@given(
    st.lists(
        st.tuples(st.integers(1, 100_000), st.integers(0, 60), st.sampled_from(["high", "low"])),
        min_size=2,
        max_size=30,
    )
)
def test_an_engine_serves_in_the_order_of_our_own_queue(
    arrivals: Sequence[tuple[int, int, str]],
) -> None:
    """A request that waits there is not worse off, nor better, than one that waits here."""
    config = OverloadConfig(priority_header="x-class")
    order, line = EngineOrder(config, lambda: NOW), Line(LineLimits(classes=3))
    numbers = {}
    for tokens, seconds, name in sorted(arrivals, key=lambda each: each[1]):
        one = waiter(tokens=tokens, priority=config.priorities.index(name))
        number_of = order.numbers({b"x-class": name.encode()}, None, 60 - seconds)
        numbers[id(one)] = number_of(tokens)
        line.put(one, float(seconds))
    taken = [numbers[id(one)] for one in take_all(line)]
    assert all(before <= after for before, after in pairwise(taken))


TOKENS = st.integers(0, 200_000)
RATES = st.sampled_from([100.0, 1000.0, 50_000.0])


@given(TOKENS, TOKENS, RATES)
def test_of_two_that_arrive_together_none_goes_before_one_with_less_to_compute(
    tokens: int, more: int, rate: float
) -> None:
    """A request must not gain by a longer prompt, nor lose by a longer hit."""
    number_of = order_at(NOW, rate)
    assert number_of(tokens) <= number_of(tokens + more)


@given(TOKENS, TOKENS, st.floats(0, 120), RATES)
def test_a_request_is_passed_only_by_what_arrives_while_its_tokens_age(
    tokens: int, others: int, later_s: float, rate: float
) -> None:
    """However much comes: after that time it stands before all that comes, whatever its length."""
    passed = order_at(NOW + later_s, rate)(others) < order_at(NOW, rate)(tokens)
    in_time = later_s * rate <= min(tokens, LONGEST_TOKENS) + 1  # numbers are whole
    assert in_time or not passed


def order_at(now: float, ageing_tokens_per_s: float) -> Callable[[int], int]:
    config = OverloadConfig(ageing_tokens_per_s=ageing_tokens_per_s)
    return EngineOrder(config, lambda: now).numbers({}, None, 0)


def test_a_class_goes_before_the_next_one_whatever_they_cost() -> None:
    """Also after years, and where requests age as fast as can be configured: 64 bits are enough."""
    for ageing in (0, 1000, 1_000_000_000):
        order = EngineOrder(OverloadConfig(ageing_tokens_per_s=ageing), lambda: 10 * NOW)
        slowest = order.numbers({}, "high", 0)(10**9)
        assert 0 <= slowest < order.numbers({}, "normal", 1e9)(0)
    classes = OverloadConfig(priorities=[f"p{n}" for n in range(16)], default_priority="p15")
    assert EngineOrder(classes).numbers({}, None, 0)(10**12) < 2**63


def test_a_key_s_class_is_the_highest_that_its_header_may_name() -> None:
    """As in our own queue."""
    order = EngineOrder(OverloadConfig(priority_header="x-class"), lambda: NOW)
    normal = order.numbers({}, None, 0)(5)
    assert order.numbers({b"x-class": b"high"}, "normal", 0)(5) == normal
    assert order.numbers({b"x-class": b"high"}, None, 0)(5) < normal
    assert order.numbers({b"x-class": b"low"}, "normal", 0)(5) > normal
    with pytest.raises(BadRequest, match="expected one of high, normal, low"):
        order.numbers({b"x-class": b"first"}, None, 0)
