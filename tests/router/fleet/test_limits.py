"""What a key may use: counted over any minute, given back when it has passed, and told apart from
what other routers count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config.server import ClientKeyConfig
from router.errors import KeyLimitReached, ModelNotAllowed
from router.fleet.limits import (
    KeyLimits,
    KeyUsage,
    MinuteCount,
)
from router.fleet.types import KeyCounts


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def usage_of(**limits: Any) -> tuple[KeyUsage, Clock]:
    clock = Clock()
    return KeyUsage(ClientKeyConfig(name="a", key="k", **limits), clock), clock


def test_requests_over_the_limit_are_told_when_there_is_room_again() -> None:
    """A client that comes back then is let in."""
    usage, clock = usage_of(requests_per_minute=2)
    usage.enter()
    clock.now += 20
    usage.enter()
    with pytest.raises(KeyLimitReached) as refused:
        usage.enter()
    assert refused.value.status == 429
    assert refused.value.retry_after_s == 41, (
        "the first leaves the window after its own half second"
    )
    clock.now += refused.value.retry_after_s
    usage.enter()
    assert (usage.total_requests, usage.refusals["requests"]) == (3, 1)


def test_requests_at_a_time_are_bounded_and_let_go() -> None:
    """A limit on concurrency is one on what a client can make wait."""
    usage, _ = usage_of(max_in_flight=1)
    usage.enter()
    with pytest.raises(KeyLimitReached):
        usage.enter()
    usage.leave()
    usage.enter()
    assert usage.counts().in_flight == 1


def test_tokens_of_prompts_and_responses_count_together() -> None:
    """What a response did cost is known at its end, and paid by what follows."""
    usage, clock = usage_of(tokens_per_minute=100)
    usage.enter()
    usage.spend(60)
    usage.leave(response_tokens=50)
    usage.enter()
    with pytest.raises(KeyLimitReached) as refused:
        usage.spend(1)
    usage.leave()
    assert dict(usage.headers())[b"x-ratelimit-remaining-tokens"] == b"0"
    clock.now += refused.value.retry_after_s or 0
    usage.spend(1)


def test_a_prompt_longer_than_the_limit_passes_after_an_idle_minute() -> None:
    """Else no time could be told at which it makes sense to come back."""
    usage, clock = usage_of(tokens_per_minute=100)
    usage.spend(1)
    with pytest.raises(KeyLimitReached) as refused:
        usage.spend(500)
    clock.now += refused.value.retry_after_s or 0
    usage.spend(500)


def test_what_other_routers_count_is_added() -> None:
    """A client cannot have its limit once at each router."""
    clock = Clock()
    config = ClientKeyConfig(name="a", key="k", requests_per_minute=10, max_in_flight=5)
    limits = KeyLimits([config, ClientKeyConfig(name="free", key="l")], clock)
    assert set(limits.usages) == {"a"}, "a key without limits is not counted"
    limits.take_elsewhere(
        [{"a": KeyCounts(6, 100, 2)}, {"a": KeyCounts(3, 50, 2), "b": KeyCounts(0, 0, 0)}]
    )
    usage = limits.usages["a"]
    usage.enter()
    assert limits.counts() == {"a": KeyCounts(1, 0, 1)}
    with pytest.raises(KeyLimitReached):
        usage.enter()
    limits.take_elsewhere([{"a": KeyCounts(9, 0, 0)}])
    with pytest.raises(KeyLimitReached) as refused:
        usage.enter()
    assert 1 <= (refused.value.retry_after_s or 0) <= 60
    limits.take_elsewhere([])
    usage.enter()


def test_whether_a_request_may_come_in_can_be_asked_without_counting_it() -> None:
    """Whoever asks first may leave the refusal to others, and each counts once."""
    usage, clock = usage_of(requests_per_minute=2, tokens_per_minute=10, max_in_flight=2)
    for _ in range(2):
        assert usage.may_enter()
        usage.enter()
    assert not usage.may_enter()
    assert usage.may_spend(20), "a prompt over all of the limit passes after an idle minute"
    usage.spend(8)
    assert usage.may_spend(2)
    assert not usage.may_spend(3)
    usage.leave()
    assert not usage.may_enter(), "two in this minute"
    clock.now += 61
    assert usage.may_enter()
    usage.enter()
    assert not usage.may_enter(), "two at a time"
    assert not any(usage.refusals.values())
    assert usage.total_requests == 3


def test_a_key_is_for_the_models_that_it_names() -> None:
    """A pattern stands for adapters that come and go."""
    usage, _ = usage_of(models=["llama", "sql-*"])
    usage.check_model("llama")
    usage.check_model("sql-7")
    for model in ("gemma", "LLAMA", "x-sql-7"):
        with pytest.raises(ModelNotAllowed):
            usage.check_model(model)
    assert usage.refusals["model"] == 3


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, 100)), max_size=60))
def test_the_sum_of_a_minute_is_that_of_its_parts(steps: Sequence[tuple[float, int]]) -> None:
    """To within the half second in which a step leaves together; and never more is kept than
    steps fit into a minute."""
    count, now, added = MinuteCount(), 0.0, []
    for pause, amount in steps:
        now += pause
        count.add(amount, now)
        added.append((now, amount))
        at_least = sum(amount for at, amount in added if at > now - 59.5)
        at_most = sum(amount for at, amount in added if at > now - 60.5)
        assert at_least <= count.at(now) <= at_most
        assert len(count._steps) <= 121
    falls_in_s = count.falls_in_s(count.at(now), now)
    assert count.at(now + falls_in_s) == 0 or falls_in_s == 60
