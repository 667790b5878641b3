"""What is learned of requests, against plain arithmetic."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.routing.fading import FadingRatio
from tests.oracle.mirror.ownership import Ownership
from tests.oracle.mirror.traffic import (
    BINS,
    EDGES,
    FadingRate,
    ModelTraffic,
    ReuseIntervals,
    bin_of,
)


def test_a_steady_stream_has_its_rate_from_the_start() -> None:
    """A router that has just started must not take a busy system for an idle one."""
    rate = FadingRate(60.0, 0.0)
    for second in range(1, 301):
        rate.add(5.0, float(second))
        if second > 3:
            assert rate.per_s(float(second)) == pytest.approx(5.0, rel=0.2)


def test_a_stream_that_ends_is_forgotten() -> None:
    """Yesterday's load is no reason to avoid a replica."""
    rate = FadingRate(60.0, 0.0)
    rate.add(1000.0, 1.0)
    assert rate.per_s(601.0) == pytest.approx(1000 / 60 * math.exp(-10), rel=0.01)


def test_a_ratio_weighs_long_samples_more_and_old_ones_less() -> None:
    """The speed of a machine: tokens over seconds, not the mean of rates."""
    ratio = FadingRatio(1.0, 1e-9, 1000)
    ratio.add(8000, 1.0)
    ratio.add(8000, 3.0)
    assert ratio.value == pytest.approx(4000, rel=0.01)
    for _ in range(10_000):
        ratio.add(100, 1.0)
    assert ratio.value == pytest.approx(100, rel=0.01)


def test_a_sample_fades_to_an_e_th_after_as_many_others() -> None:
    """What came before the first one counts as one more."""
    ratio = FadingRatio(1.0, 1.0, 10)
    for _ in range(10):
        ratio.add(0.0, 1.0)
    fresh = sum(math.exp(-age / 10) for age in range(10))
    assert ratio.value == pytest.approx(math.exp(-1) / (math.exp(-1) + fresh))


def test_bins_cover_all_intervals() -> None:
    """An interval falls into the bin that begins at or before it."""
    assert [bin_of(edge) for edge in EDGES] == list(range(BINS))
    assert bin_of(0.005) == 0
    assert bin_of(1e9) == BINS - 1


def _survival(reused: list[float], still: list[float], given_up: list[float]) -> list[float]:
    """Kaplan-Meier as in a textbook, over the bins."""
    survival = []
    for start in range(BINS):
        value = 1.0
        for index in range(start, BINS):
            at_risk = sum(bin_of(each) >= index for each in (*reused, *given_up))
            at_risk += sum(each >= EDGES[index] for each in still)
            events = sum(bin_of(each) == index for each in reused)
            value *= 1 - events / at_risk if at_risk else 1.0
        survival.append(value)
    return survival


ages = st.lists(st.integers(0, 100_000_000).map(lambda number: number / 1024), max_size=12)


@given(reused=ages, still=ages, given_up=ages)
def test_the_estimate_is_that_of_kaplan_and_meier(
    reused: list[float], still: list[float], given_up: list[float]
) -> None:
    """What has not been used again yet counts for as long as it was watched."""
    intervals, idle, now = ReuseIntervals(), Ownership(), 100_000.0
    for each in reused:
        intervals.reused(each, 1)
    for each in given_up:
        intervals.given_up(each, 1)
    for key, each in enumerate(sorted(still, reverse=True)):
        use, _ = idle.begin((key,))
        idle.end(use, now - each)
    open_spells = list(idle.ended())
    intervals.estimate(open_spells, now)
    still = [now - (use.ended_at or 0) for use in open_spells]
    horizon = max(still, default=0.0)
    for index, never in enumerate(_survival(reused, still, given_up)):
        edge = EDGES[index]
        tail = ReuseIntervals.TAIL / (1 + horizon / (4 * edge)) if edge else 0.0
        assert intervals.probability(edge) == pytest.approx(1 - never * (1 - tail), abs=1e-6)


def test_reuse_that_takes_ten_seconds_is_expected_before_and_not_after() -> None:
    """Eighty of a hundred things come back after ten seconds: what has been idle for a second is
    worth keeping, what has been idle for a minute is not."""
    traffic, random, now = ModelTraffic(1_000_000), Random(1), 0.0
    for number in range(2000):
        now = float(number)
        use = traffic.began(range(number * 8, number * 8 + 8), now)
        traffic.ended(use, now)
        if random.random() < 0.8:
            again = traffic.began(range(number * 8, number * 8 + 8), now + 10)
            traffic.ended(again, now + 10)
            now += 10
    assert traffic.reuse_probability(1.0) == pytest.approx(0.5, abs=0.2)
    assert traffic.reuse_probability(60.0) < 0.1


def test_what_was_used_once_is_forgotten_before_memory_runs_out() -> None:
    """The bound holds, whatever is asked."""
    traffic = ModelTraffic(100)
    for number in range(1000):
        traffic.ended(traffic.began(range(number * 8, number * 8 + 8), number), number)
    assert len(traffic._uses) <= 100
    traffic = ModelTraffic(1000)
    for number in range(1000):
        keys = [*range(1000), *range((number + 1000) * 8, (number + 1000) * 8 + 8)]
        traffic.ended(traffic.began(keys, number), number)
    assert 10 < traffic._uses.requests < 30, "each keeps all the keys that it shares"


def test_what_memory_has_no_room_for_counts_for_as_long_as_it_was_watched() -> None:
    """Left out, what never comes back would seem to come back always: all that is counted then is
    what did."""
    roomy, tight = ModelTraffic(1_000_000), ModelTraffic(300)
    for traffic in (roomy, tight):
        for number in range(3000):
            keys, now = range(number * 8, number * 8 + 8), number * 10.0
            traffic.ended(traffic.began(keys, now), now)
            if number % 4 == 0:
                traffic.ended(traffic.began(keys, now + 5.0), now + 5.0)
    assert roomy.reuse_probability(1.0) == pytest.approx(0.25, abs=0.05)
    assert tight.reuse_probability(1.0) == pytest.approx(0.25, abs=0.05)


@pytest.mark.parametrize("shared", [0, 160])
def test_memory_is_used_up_to_its_bound_and_never_beyond(shared: int) -> None:
    """A key of a prompt counts as an eighth of one that is owned."""
    traffic, most = ModelTraffic(200), 0.0
    for number in range(400):
        keys = [*range(shared), *range((number + 1000) * 8, (number + 1000) * 8 + 8)]
        traffic.ended(traffic.began(keys, number), number)
        used = len(traffic._uses) + traffic._uses.size // 8
        assert used <= 200
        most = max(most, used)
    assert most > 180


def test_only_long_prefills_tell_the_speed() -> None:
    """A step costs some milliseconds however few its tokens."""
    traffic = ModelTraffic(100)
    for _ in range(300):
        traffic.prefilled(4000, 0.5, is_timed=True)
        traffic.prefilled(40, 0.02, is_timed=True)
    assert traffic.prefill_tokens_per_s == pytest.approx(8000, rel=0.01)


def test_whole_responses_tell_the_speed_until_a_first_token_is_seen() -> None:
    """They take the time of all their tokens."""
    traffic = ModelTraffic(100)
    for _ in range(300):
        traffic.prefilled(4000, 5.0, is_timed=False)
    assert traffic.prefill_tokens_per_s == pytest.approx(800, rel=0.01)
    for _ in range(300):
        traffic.prefilled(4000, 0.5, is_timed=True)
        traffic.prefilled(4000, 5.0, is_timed=False)
    assert traffic.prefill_tokens_per_s == pytest.approx(8000, rel=0.01)


def test_a_prompt_that_comes_back_soon_is_expected_back_for_as_long() -> None:
    """The time runs from the end of the last use, and is that until the next one."""
    traffic = ModelTraffic(1_000_000)
    for number in range(200):
        keys, now = range(number * 8, number * 8 + 8), number * 1000.0
        traffic.ended(traffic.began(keys, now), now + 100.0)
        traffic.ended(traffic.began(keys, now + 110.0), now + 120.0)
    assert traffic.reuse_probability(1.0) > 0.4
    assert traffic.reuse_probability(90.0) < 0.1


def test_the_first_estimate_waits_for_a_few_requests() -> None:
    """Of one or two nothing follows; of seventeen something does."""
    traffic = ModelTraffic(1_000_000)
    before = traffic.reuse_probability(1.0)
    for number in range(17):
        assert traffic.reuse_probability(1.0) == before, number
        traffic.ended(traffic.began(range(number * 8, number * 8 + 8), number * 100.0), number)
    assert traffic.reuse_probability(1.0) != before


def test_old_observations_count_half_after_a_while() -> None:
    """What users do changes: half of the weight is that of the last requests."""
    intervals, idle = ReuseIntervals(), Ownership()
    intervals.reused(10.0, 8)
    intervals.halve()
    intervals.given_up(10.0, 4)
    intervals.estimate(list(idle.ended()), 0.0)
    assert 1 - intervals.probability(EDGES[bin_of(10.0)]) == pytest.approx(0.5 * 0.7, abs=0.01)
