"""What is estimated of a cache without events, against caches that evict what was used longest
ago."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router._core import EstimatedVisit
from router.index.base import SourceId
from router.index.index import PrefixIndex
from router.index.mirror import Mirror
from router.index.mirror_types import STEP
from tests.support.index import AskedCaches, EstimatedCache, ended

R0, R1 = SourceId("r0"), SourceId("r1")
ALWAYS = float("-inf")
LEAST_KEYS = 16
"""No cache is taken to be smaller."""
FIRST_TRUST = 0.8
"""Before any report."""


class Fleet:
    """Caches without events; time and losses are set by hand."""

    def __init__(
        self,
        cache_keys: int = 100,
        after_s: float = 10.0,
        mirror: Mirror | None = None,
        max_keys: int = 1_000_000,
    ) -> None:
        self.now = 0.0
        self.lost: dict[SourceId, float | None] = {R0: ALWAYS, R1: ALWAYS}
        self.caches = AskedCaches(
            self.lost.__getitem__,
            mirror or Mirror(),
            after_s,
            cache_tokens=cache_keys * STEP,
            max_keys=max_keys,
            clock=lambda: self.now,
        )

    def cache(self, source: SourceId = R0, tokens: int | None = None) -> EstimatedCache | None:
        return self.caches.stand_in(source, tokens, self.now)

    def hit(self, keys: Sequence[int], source: SourceId = R0) -> int:
        """In keys."""
        cache = self.cache(source)
        assert cache is not None
        return cache.hit([keys], len(keys) * STEP).tokens // STEP

    def send(self, keys: Sequence[int], source: SourceId = R0) -> EstimatedVisit:
        visit = self.caches.visit(source, [keys], self.hit(keys, source) * STEP)
        assert visit is not None
        return visit

    def run(self, keys: Sequence[int], actual: int | None = None, source: SourceId = R0) -> int:
        """A whole request; the engine reports *actual* keys as cached. Return those predicted."""
        self.now += 1
        predicted, visit = self.hit(keys, source), self.send(keys, source)
        visit.first_token()
        visit.ended(None if actual is None else actual * STEP)
        return predicted


class LruCache:
    """A real one: blocks by prefix, the least recently used goes first, of one request its end."""

    def __init__(self, keys: int) -> None:
        self._most = keys
        self._used: dict[int, tuple[int, int]] = {}
        self._moment = 0

    def run(self, keys: Sequence[int]) -> int:
        """Return how many leading keys were cached."""
        self._moment += 1
        hit = next((n for n, key in enumerate(keys) if key not in self._used), len(keys))
        self._used |= {key: (self._moment, -place) for place, key in enumerate(keys)}
        while len(self._used) > self._most:
            del self._used[min(self._used, key=lambda key: self._used[key])]
        return hit


def prompt(number: int, length: int = 4) -> list[int]:
    """A key stands for the whole prefix up to it."""
    return [number * 1000 + place for place in range(length)]


def test_what_was_sent_counts_from_its_first_token_on() -> None:
    """Before that it is in prefill, which is another prediction."""
    fleet = Fleet()
    visit = fleet.send(prompt(1))
    assert fleet.hit(prompt(1)) == 0
    visit.first_token()
    assert fleet.hit(prompt(1)) == 4
    assert fleet.hit(prompt(1)[:2]) == 2
    assert fleet.hit([*prompt(1)[:3], 9]) == 3
    assert fleet.hit(prompt(1), R1) == 0
    visit.ended()
    visit.ended()
    assert fleet.hit(prompt(1)) == 4


def test_a_request_that_never_began_leaves_nothing() -> None:
    """It failed, and another replica may have served it."""
    fleet = Fleet()
    fleet.send(prompt(1)).ended()
    assert fleet.hit(prompt(1)) == 0


def test_the_last_token_of_a_prompt_is_never_a_hit() -> None:
    """Every engine computes it."""
    fleet = Fleet()
    fleet.run(prompt(1))
    cache = fleet.cache()
    assert cache is not None
    assert cache.hit([prompt(1)], 4 * STEP - 1).tokens == 4 * STEP - 1
    assert cache.hit([prompt(1)], -1).tokens == 0


PATHS = [prompt(1), prompt(1, 6), [*prompt(1, 3), 7, 8], prompt(2, 9), prompt(3, 2), prompt(4, 12)]


@given(st.lists(st.sampled_from(PATHS), max_size=40), st.integers(16, 24))
def test_alone_at_a_cache_of_known_size_the_estimate_is_the_cache(
    requests: list[list[int]], size: int
) -> None:
    """Least recently used first, the end of a prompt before its beginning."""
    fleet, real = Fleet(cache_keys=size), LruCache(size)
    for keys in requests:
        actual = real.run(keys)
        assert fleet.run(keys, actual) == actual


@given(
    st.lists(st.tuples(st.sampled_from(PATHS), st.integers(0, 12), st.booleans()), max_size=60),
    st.integers(16, 40),
)
def test_whatever_is_reported_the_bounds_hold(
    requests: list[tuple[list[int], int, bool]], size: int
) -> None:
    """Reports come from outside: they may be nonsense, and requests overlap."""
    fleet = Fleet(cache_keys=size)
    running: list[EstimatedVisit] = []
    for keys, actual, ends in requests:
        fleet.now += 1
        visit = fleet.send(keys)
        visit.first_token()
        running.append(visit)
        if ends:
            for each in running:
                each.ended(actual * STEP)
            running.clear()
            (found,) = fleet.caches.statistics().values()
            assert found.tokens <= found.capacity_tokens <= size * STEP
            assert found.capacity_tokens >= LEAST_KEYS * STEP
            assert 0 <= found.trust <= 1


def test_a_cache_smaller_than_it_says_is_found_out() -> None:
    """Others use it as well, or its blocks hold less than it seems: what lasts decides."""
    random, real = Random(3), LruCache(100)
    fleet, credulous = Fleet(cache_keys=400), Fleet(cache_keys=400)
    wrong, misled = [], []
    for _ in range(2000):
        keys = prompt(min(int(random.expovariate(1 / 25)), 99), 8)
        actual = real.run(keys)
        wrong.append(fleet.run(keys, actual) > actual)
        misled.append(credulous.run(keys) > actual)
    assert 5 * sum(wrong[200:]) < sum(misled[200:])
    assert sum(wrong[200:]) < 0.05 * len(wrong)
    (found,) = fleet.caches.statistics().values()
    assert 70 * STEP <= found.capacity_tokens <= 130 * STEP


def test_a_capacity_that_was_underrated_grows_again() -> None:
    """One bad hour, for example of another router's traffic, does not last for ever."""
    fleet = Fleet(cache_keys=100)
    for _ in range(30):
        for number in range(6):
            fleet.run(prompt(number), 0)
    (low,) = fleet.caches.statistics().values()
    assert low.capacity_tokens < 50 * STEP
    real = LruCache(100)
    for _ in range(100):
        for number in range(20):
            keys = prompt(number)
            fleet.run(keys, real.run(keys))
    (found,) = fleet.caches.statistics().values()
    assert found.capacity_tokens > 1.5 * low.capacity_tokens
    assert found.trust > 0.9 > low.trust


def test_what_is_promised_in_vain_is_believed_less() -> None:
    """An engine without prefix caching reports nothing as cached; then only load should count."""
    fleet = Fleet()
    cache = fleet.cache()
    assert cache is not None
    assert cache.hit([prompt(1)], 9999).trust == FIRST_TRUST
    for _ in range(100):
        fleet.run(prompt(1), 0)
    assert cache.hit([prompt(1)], 9999).trust < 0.2


def test_an_engine_that_reports_its_size_is_believed() -> None:
    """It bounds the estimate; the configured size is for those that do not say."""
    fleet = Fleet(cache_keys=10_000)
    for number in range(100):
        fleet.cache(tokens=50 * STEP)
        cache = fleet.cache(tokens=50 * STEP)
        assert cache is not None
        visit = fleet.caches.visit(R0, [prompt(number)], 0)
        assert visit is not None
        visit.first_token()
        visit.ended()
    (found,) = fleet.caches.statistics().values()
    assert (found.tokens, found.capacity_tokens) == (50 * STEP, 50 * STEP)


def test_memory_is_shared_among_caches() -> None:
    """Whatever the engines say of their sizes."""
    fleet = Fleet(cache_keys=10_000, max_keys=200)
    for number in range(100):
        fleet.run(prompt(number), source=R0)
        fleet.run(prompt(number), source=R1)
    assert [found.tokens for found in fleet.caches.statistics().values()] == [100 * STEP] * 2


# --- when it stands in ----------------------------------------------------------------------------


def test_a_loss_is_replaced_by_an_estimate_once_it_has_lasted() -> None:
    """A short one is discounted, as ever; a whole stream needs none."""
    fleet = Fleet(after_s=10)
    fleet.lost[R0] = None
    assert fleet.cache() is None
    fleet.lost[R0], fleet.now = 100.0, 109.9
    assert fleet.cache() is None
    fleet.now = 110.0
    assert fleet.cache() is not None
    fleet.lost[R0] = None
    assert fleet.cache() is None
    assert fleet.caches.statistics() == {}


def test_an_estimate_begins_with_what_was_sent_before_the_loss() -> None:
    """In its order, so that the oldest goes first."""
    mirror, index = Mirror(clock=lambda: 1.0), PrefixIndex()
    for number in range(3):
        ids = [number * 1000 + place for place in range(4 * STEP)]
        hashed = index.prepare(ids, extra_steps=(STEP,))
        visit = mirror.begin("m", index, R0, [hashed], len(ids), len(ids))
        visit.first_token()
        visit.ended()
    known = [keys for keys, _ in ended(mirror, R0)]
    fleet = Fleet(cache_keys=16, mirror=mirror)
    assert [fleet.hit(keys) for keys in known] == [4, 4, 4]
    fleet.run(prompt(1, 8))
    assert [fleet.hit(keys) for keys in known] == [0, 4, 4]
    assert ended(mirror, R1) == []


def test_what_was_estimated_in_one_loss_is_forgotten_in_the_next() -> None:
    """Between the two there were events, and the cache has changed."""
    fleet = Fleet(after_s=10)
    fleet.lost[R0], fleet.now = 0.0, 50.0
    fleet.run(prompt(1))
    assert fleet.hit(prompt(1)) == 4
    fleet.lost[R0], fleet.now = 60.0, 80.0
    assert fleet.hit(prompt(1)) == 0


def test_a_replica_that_failed_begins_with_nothing() -> None:
    """It may be another process; one that is asked meanwhile ends in peace."""
    fleet = Fleet()
    fleet.run(prompt(1))
    fleet.run(prompt(1), source=R1)
    visit = fleet.send(prompt(2))
    visit.first_token()
    fleet.caches.forget("r0")
    visit.ended(0)
    assert (fleet.hit(prompt(1)), fleet.hit(prompt(1), R1)) == (0, 4)
    assert fleet.hit(prompt(2)) == 0


def test_a_full_cache_says_what_it_evicts_next() -> None:
    """A policy weighs what is lost by that."""
    fleet = Fleet(cache_keys=16)
    cache = fleet.cache()
    assert cache is not None
    for number in range(4):
        assert cache.eviction_age_s(fleet.now) is None
        fleet.run(prompt(number))
    assert cache.eviction_age_s(fleet.now) == 3.0


def test_a_prediction_is_wrong_from_one_step_on() -> None:
    """An engine's own blocks may end anywhere within a step: less than one says nothing."""
    for missing, shrinks in ((STEP - 1, False), (STEP, True)):
        fleet = Fleet(cache_keys=100)
        fleet.run(prompt(1, 8))
        fleet.now += 1
        visit = fleet.send(prompt(1, 8))
        visit.first_token()
        visit.ended(8 * STEP - missing)
        (found,) = fleet.caches.statistics().values()
        assert (found.capacity_tokens < 100 * STEP) is shrinks


def test_trust_is_the_share_of_predicted_tokens_that_were_there() -> None:
    """More than was predicted makes no prediction better than right."""
    for actual, trust in ((0, 0.0), (4, 0.5), (8, 1.0), (16, 1.0)):
        fleet = Fleet(cache_keys=1000)
        for _ in range(300):
            fleet.run(prompt(1, 8), None)
            fleet.run(prompt(1, 8), actual)
        (found,) = fleet.caches.statistics().values()
        assert found.trust == pytest.approx(trust, abs=0.1)
