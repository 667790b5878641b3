"""The compiled estimates of caches without events beside those in Python, which define what they
say."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from random import Random
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.index.base import SourceId
from router.index.index import PrefixIndex
from router.index.mirror_types import STEP
from tests.oracle.mirror.approximate import ReferenceEstimates
from tests.router.core.decide.both import BothMirrors, same
from tests.support.index import AskedCaches

SOURCES = SourceId("r0"), SourceId("r0", 1), SourceId("r1")
ALWAYS = float("-inf")
PATHS = [
    [root * 1000 + place for place in range(shared)]
    + [root * 1000 + end * 100 + place for place in range(shared, shared + own)]
    for root in (1, 2)
    for end, (shared, own) in enumerate([(4, 0), (4, 9), (7, 3), (12, 0), (12, 6), (0, 0)], 1)
]
"""A key stands for the whole prefix up to it."""

sources = st.sampled_from(SOURCES)
paths = st.sampled_from(PATHS)


class EstimatesSideBySide(RuleBasedStateMachine):
    """Three caches of two replicas, whose streams are lost and found."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.lost: dict[SourceId, float | None] = dict.fromkeys(SOURCES, ALWAYS)
        self.mirrors = BothMirrors(clock=lambda: self.now)
        self.index = PrefixIndex()
        lost_since, sizes = self.lost.__getitem__, (10.0, 20 * STEP, 60, lambda: self.now)
        self.both: list[Any] = [
            ReferenceEstimates(lost_since, self.mirrors.python, *sizes),
            AskedCaches(lost_since, self.mirrors.native, *sizes),
        ]
        self.running: list[list[Any]] = []

    @rule(source=sources, ids=st.integers(0, 5), length=st.sampled_from((64, 200, 700)))
    def send_before_a_loss(self, source: SourceId, ids: int, length: int) -> None:
        """An estimate begins with what the mirror knows."""
        tokens = array("I", range(ids * 100, ids * 100 + length))
        prompt = self.index.prepare(tokens, extra_steps=(STEP,))
        self.now += 0.5
        self.mirrors.begin("m", self.index, source, [prompt], length, length).ended()

    @rule(source=sources, is_lost=st.booleans())
    def lose(self, source: SourceId, is_lost: bool) -> None:
        self.lost[source] = self.now if is_lost else None

    @rule(seconds=st.sampled_from((0.5, 5.0, 20.0)))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(replica=st.sampled_from(("r0", "r1")))
    def forget(self, replica: str) -> None:
        for each in self.both:
            each.forget(replica)

    @rule(
        source=sources,
        prompts=st.lists(paths, min_size=1, max_size=2),
        tokens=st.sampled_from((None, 0, 30 * STEP)),
    )
    def send(self, source: SourceId, prompts: list[Sequence[int]], tokens: int | None) -> None:
        hit = self.hit(source, prompts, tokens)
        visits = [each.visit(source, prompts, hit) for each in self.both]
        assert (visits[0] is None) == (visits[1] is None)
        if visits[0] is not None:
            self.running.append([visit for visit in visits if visit is not None])

    def hit(self, source: SourceId, prompts: list[Sequence[int]], tokens: int | None = None) -> int:
        caches = [each.stand_in(source, tokens, self.now) for each in self.both]
        assert (caches[0] is None) == (caches[1] is None)
        if caches[0] is None or caches[1] is None:
            return 0
        most = STEP * sum(map(len, prompts)) - len(prompts)
        same(*(cache.eviction_age_s(self.now) for cache in caches if cache is not None))
        found = same(*(cache.hit(prompts, most) for cache in caches if cache is not None))
        return int(found.tokens)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), actual=st.none() | st.integers(0, 20), begins=st.booleans())
    def end(self, data: st.DataObject, actual: int | None, begins: bool) -> None:
        number = data.draw(st.integers(0, len(self.running) - 1))
        for visit in self.running.pop(number):
            if begins:
                visit.first_token()
            visit.ended(None if actual is None else actual * STEP)

    @invariant()
    def agree(self) -> None:
        same(*(each.statistics() for each in self.both))
        for path in PATHS[::3]:
            self.hit(SOURCES[0], [path])


EstimatesSideBySide.TestCase.settings = settings(max_examples=50, stateful_step_count=60)


class TestEstimatesSideBySide(EstimatesSideBySide.TestCase):  # type: ignore[misc]
    """A router decides by them where it hears nothing."""


def test_full_caches_are_estimated_alike() -> None:
    """What makes room is remembered in its order, and a report on it says that more fits."""
    machine, random = EstimatesSideBySide(), Random(3)
    for _ in range(1000):
        machine.now += 1.0
        path = PATHS[min(int(random.expovariate(0.5)), len(PATHS) - 1)]
        hit = machine.hit(SOURCES[0], [path])
        actual = random.choice((hit, hit, hit, hit + 2 * STEP, hit // 2))
        for estimates in machine.both:
            visit = estimates.visit(SOURCES[0], [path], hit)
            assert visit is not None
            visit.first_token()
            visit.ended(actual)
        machine.agree()
