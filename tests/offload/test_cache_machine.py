"""Model-based tests of the whole cache manager: every page that is read holds the right prefix."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from offload.config import CacheConfig
from tests.support.cache_driver import CacheDriver, Job
from tests.support.cache_layouts import (
    GROUPS,
    config_of,
    eagle_groups,
    is_sparse,
    variants,
    with_blocks,
)
from tests.support.cache_workload import CacheWorkload

BUDGET = st.sampled_from([1, 3, 4, 8, 16, 32])
INTERVAL = st.sampled_from([None, 0, 32])


class CacheMachine(RuleBasedStateMachine):
    """Any order of a scheduler's operations.

    The driver checks content, counts, hits and events after every step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.driver = CacheDriver(config_of(GROUPS["full"]))
        self.waiting: list[Job] = []
        self.known: list[list[int]] = [[]]

    @initialize(
        name=st.sampled_from(sorted(GROUPS)),
        blocks=st.integers(6, 50),
        drafter=st.sampled_from(["none", "all", "first", "last"]),
        interval=INTERVAL,
        caching=st.integers(0, 9),
    )
    def build(
        self, name: str, blocks: int, drafter: str, interval: int | None, caching: int
    ) -> None:
        groups = GROUPS[name]
        eagle = {"none": [], "all": eagle_groups(groups)}.get(drafter, eagle_groups(groups))
        eagle = {"first": eagle[:1], "last": eagle[-1:]}.get(drafter, eagle)
        self.driver = CacheDriver(
            config_of(
                groups,
                num_blocks=blocks * len(groups),
                eagle=eagle,
                retention_interval=interval if is_sparse(groups) else None,
                max_in_flight_tokens=32,
                enable_caching=caching > 0,
            )
        )

    @rule(
        data=st.data(),
        fresh=st.integers(0, 24),
        outputs=st.integers(1, 12),
        lora=st.sampled_from([None, None, "sql"]),
    )
    def arrive(self, data: st.DataObject, fresh: int, outputs: int, lora: str | None) -> None:
        """A prompt that begins like a known one."""
        start = data.draw(st.sampled_from(self.known))
        kept = data.draw(st.integers(0, len(start)))
        prompt = [*start[:kept], *range(kept, kept + fresh)] or [1]
        self.known.append(prompt[:100])
        self.waiting.append(self.driver.new(prompt[:100], outputs, lora))

    @precondition(lambda self: self.waiting)
    @rule(budget=BUDGET, must_fit=st.booleans())
    def admit(self, budget: int, must_fit: bool) -> None:
        if self.driver.admit(self.waiting[0], budget, must_fit):
            self.waiting.pop(0)

    @precondition(lambda self: self.driver.running)
    @rule(data=st.data(), budget=BUDGET, lookahead=st.sampled_from([0, 0, 3]))
    def advance(self, data: st.DataObject, budget: int, lookahead: int) -> None:
        job = self._any_running(data)
        if job.is_done:
            self.known.append(list(job.request.token_ids)[:100])
            self.driver.finish(job)
        elif not self.driver.advance(job, budget, lookahead):
            self.waiting.append(job)

    @precondition(lambda self: self.driver.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        job = self._any_running(data)
        self.driver.preempt(job)
        self.waiting.append(job)

    @precondition(lambda self: self.driver.running)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.driver.finish(self._any_running(data))

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        self.driver.cache.evict_blocks(
            data.draw(st.lists(st.integers(1, self.driver.config.num_blocks - 1), max_size=4))
        )

    @rule()
    def reset(self) -> None:
        was_held = bool(self.driver.running)
        assert self.driver.cache.reset() is not was_held

    @rule()
    def end_step(self) -> None:
        self.driver.end_step()

    def teardown(self) -> None:
        for job in list(self.driver.running.values()):
            self.driver.finish(job)
        self.driver.end_step()
        assert self.driver.cache.pool.num_free_blocks == self.driver.config.num_blocks - 1

    def _any_running(self, data: st.DataObject) -> Job:
        return self.driver.running[data.draw(st.sampled_from(sorted(self.driver.running)))]


CacheMachine.TestCase.settings = settings(
    max_examples=2000,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
test_any_order_of_operations_leaves_the_cache_right = CacheMachine.TestCase


@pytest.mark.parametrize(("label", "config"), variants(), ids=[label for label, _ in variants()])
def test_a_long_run_under_pressure_reads_only_what_is_right(
    label: str, config: CacheConfig
) -> None:
    """Every layout sees evictions, preemptions and resets, and prefixes that are found again."""
    counts: Counter[str] = Counter()
    for share in (4, 2, 1):
        driver = CacheDriver(with_blocks(config, config.num_blocks // share))
        workload = CacheWorkload(driver, f"{label} {share}")
        for _ in range(100):
            workload.step()
        counts += driver.counts
    assert counts["admitted"] > 50
    assert counts["refused"] > 0 or "states" in label
    assert counts["hits"] > 0 or not config.enable_caching
