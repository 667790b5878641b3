"""The log of routed requests, and the last minute in numbers."""

from __future__ import annotations

import functools
import weakref

import pytest

from router.errors import NoReplica
from router.policies.types import Candidate
from router.telemetry.request_log import (
    MAX_REASON_CHARS,
    SECONDS,
    RequestLog,
    RollingTotals,
    RoutedRequest,
)


class Clock:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def cached(tokens: int) -> Candidate:
    """One where so much of the prompt was predicted to be cached."""
    return Candidate(replica_id="a", cached_tokens=tokens)


def request(**fields: object) -> RoutedRequest:
    known = {
        "request_id": "id",
        "path": "/v1/completions",
        "model": "m",
        "policy": "prefix",
        "stream": False,
    }
    return RoutedRequest(**{**known, "prompt_tokens": 100, "unknown": None, **fields})  # type: ignore[arg-type]


def settled(log: RequestLog, **fields: object) -> RoutedRequest:
    """One that came and ended, with *fields* known of it at the end."""
    routed = request()
    log.add(routed)
    for name, value in {"status": 200, "end": "completed", **fields}.items():
        setattr(routed, name, value)
    log.finish(routed)
    return routed


def numbers(found: list[RoutedRequest]) -> list[int]:
    return [routed.number for routed in found]


def test_a_refused_request_leaves_the_share_from_the_cache_as_it_is() -> None:
    """One batch of 2,048 long prompts, refused with 400, moved it to 0 % for a minute."""
    log = RequestLog()
    settled(log, candidate=cached(80))
    for status in (400, 404, 413, 429, 499):
        settled(log, prompt_tokens=6_000_000, candidate=cached(16), status=status)
    total = log.totals.total()
    assert (total.requests, total.routed_tokens, total.promised_tokens) == (6, 100, 80)


# --- what is held ---------------------------------------------------------------------------------


def test_the_latest_change_comes_first_and_only_what_is_new_is_returned() -> None:
    """A page asks once a second and must not get everything each time."""
    log = RequestLog()
    first, second = request(), request()
    log.add(first)
    log.add(second)
    seen = log.last_change
    assert numbers(log.since(0)) == [2, 1]
    assert log.since(seen) == []
    log.update(first)
    assert numbers(log.since(seen)) == [1]
    assert numbers(log.since(0)) == [1, 2]


def test_the_log_is_bounded_and_forgets_what_changed_longest_ago() -> None:
    """Memory must not grow with traffic; a long request that has just changed is not the
    oldest."""
    log = RequestLog(max_requests=3)
    long = request()
    log.add(long)
    for _ in range(2):
        settled(log)
    log.update(long)
    settled(log)
    assert numbers(log.since(0)) == [4, 1, 3]


def test_a_request_that_was_forgotten_while_it_ran_is_back_when_it_ends() -> None:
    """The slowest requests are those that one looks for."""
    log = RequestLog(max_requests=2)
    slow = request()
    log.add(slow)
    for _ in range(5):
        settled(log)
    assert 1 not in numbers(log.since(0))
    log.finish(slow)
    assert numbers(log.since(0)) == [1, 6]


def test_what_is_held_stays_within_twice_what_is_shown() -> None:
    """Requests that are over are let go of many at a time."""
    log = RequestLog(max_requests=4)
    kept = []
    for number in range(100):
        reason = functools.partial(str, number)
        kept.append(weakref.ref(reason))
        settled(log, why=reason)
    del reason
    assert numbers(log.since(0)) == [100, 99, 98, 97]
    assert sum(each() is not None for each in kept) <= 8


def test_what_is_returned_is_bounded() -> None:
    """And what is left out is what changed longest ago."""
    log = RequestLog()
    for _ in range(10):
        settled(log)
    assert numbers(log.since(0, limit=3)) == [10, 9, 8]
    assert log.since(0, limit=0) == []


def test_a_reason_is_made_when_it_is_read_and_is_bounded() -> None:
    """Nobody reads most of them, and a plug-in may write a novel."""
    made = []

    def written_out() -> str:
        made.append(1)
        return "x" * 10_000

    lazy = request(why=written_out)
    RequestLog().add(lazy)
    assert not made
    assert lazy.reason == "x" * MAX_REASON_CHARS


@pytest.mark.parametrize(
    ("predicted", "actual", "verdict"),
    [(64, 64, "exact"), (64, 32, "over"), (32, 64, "under"), (64, None, None)],
)
def test_a_prediction_is_compared_with_what_the_engine_reports(
    predicted: int, actual: int | None, verdict: str | None
) -> None:
    """`over` is the one that costs: a hit was promised that was not there."""
    assert request(candidate=cached(predicted), actual_tokens=actual).verdict == verdict


@pytest.mark.parametrize(
    ("status", "end", "has_failed"),
    [
        (200, "completed", False),
        (429, "completed", False),
        (500, "completed", True),
        (200, "replica_died", True),
        (None, "client_left", False),
        (200, "client_stalled", False),
        (None, None, False),
    ],
)
def test_what_a_client_did_is_no_failure(
    status: int | None, end: str | None, has_failed: bool
) -> None:
    """The figure must not rise because a user closed a window."""
    assert request(status=status, end=end).has_failed is has_failed


# --- the last minute ------------------------------------------------------------------------------


def test_the_minute_sums_what_was_settled() -> None:
    """These are the figures at the top of the page."""
    log = RequestLog(totals=RollingTotals(Clock()))
    settled(log, candidate=cached(64), actual_tokens=64)
    settled(log, candidate=cached(64), actual_tokens=16)
    settled(log, candidate=cached(32))
    settled(log, status=503, end="no_replica")
    total = log.totals.total()
    assert (total.requests, total.failed, total.compared, total.over, total.under) == (
        4,
        1,
        2,
        1,
        0,
    )
    assert (total.compared_tokens, total.predicted_tokens, total.actual_tokens) == (200, 128, 80)
    assert (total.routed_tokens, total.promised_tokens) == (400, 160)


def test_a_request_that_no_replica_could_take_is_in_the_log() -> None:
    """It is what an operator looks for when clients see 503."""
    log = RequestLog()
    log.add_refused(request(), NoReplica("m", "1 draining"))
    (routed,) = log.since(0)
    assert (routed.replica, routed.status, routed.end, routed.has_failed) == (
        None,
        503,
        "no_replica",
        True,
    )


def test_what_is_older_than_a_minute_no_longer_counts() -> None:
    """Second by second, and also after a long silence."""
    clock = Clock()
    totals = RollingTotals(clock)
    for _ in range(90):
        totals.now().requests += 1
        clock.now += 1
    assert totals.total().requests == SECONDS - 1, (
        "the second that has just begun takes the place of the oldest"
    )
    clock.now += 30
    assert totals.total().requests == SECONDS - 31
    clock.now += 10_000
    assert totals.total().requests == 0
    assert len(totals._by_second) == SECONDS


def test_the_rate_of_a_young_router_is_of_the_time_it_has_run() -> None:
    """Ten requests in its first ten seconds are one a second, not a sixth."""
    clock = Clock(1000.5)
    totals = RollingTotals(clock)
    assert totals.seconds == 1.0
    clock.now += 10
    assert totals.seconds == 10.0
    clock.now += 1000
    assert SECONDS - 1 <= totals.seconds <= SECONDS
