"""Random requests with shared prefixes, driven by a seed, through a `CacheDriver`."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tests.support.cache_driver import CacheDriver, Job

BUDGETS = (4, 8, 12, 16, 32)
LONGEST = 100


class CacheWorkload:
    """Keeps a driver under pressure: queues, preemptions, evictions, resets."""

    def __init__(self, driver: CacheDriver, seed: int | str) -> None:
        self.driver = driver
        self.rng = random.Random(seed)
        self.waiting: list[Job] = []
        self.known: list[list[int]] = []
        """Prompts and whole conversations with which later prompts begin."""

    def prompt(self) -> list[int]:
        """A new prompt, or the beginning of a known one with a new end; often with whole blocks."""
        rng = self.rng
        start = list(rng.choice(self.known)) if self.known and rng.random() < 0.8 else []
        start = start[: rng.choice([rng.randrange(LONGEST), 16 * rng.randrange(6)])]
        fresh = [rng.randrange(50) for _ in range(rng.choice([0, 1, 4, rng.randrange(40)]))]
        return (start + fresh or [1])[:LONGEST]

    def step(self) -> None:
        """Run one engine step. Finished requests end, running ones advance, waiting ones are
        admitted, and something may go wrong.
        """
        driver, rng = self.driver, self.rng
        if rng.random() < 0.5:
            prompt = self.prompt()
            self.known.append(prompt)
            self.waiting.append(
                driver.new(prompt, rng.randrange(1, 20), rng.choice([None, None, "sql"]))
            )
        for job in list(driver.running.values()):
            if job.is_done:
                self.known.append(list(job.request.token_ids))
                driver.finish(job)
            elif not driver.advance(job, rng.choice(BUDGETS), rng.choice([0, 0, 2])):
                self.waiting.append(job)
        if self.waiting and driver.admit(self.waiting[0], rng.choice(BUDGETS), rng.random() < 0.5):
            self.waiting.pop(0)
        self._disturb()
        driver.end_step()

    def _disturb(self) -> None:
        driver, rng = self.driver, self.rng
        if driver.running and rng.random() < 0.03:
            job = rng.choice(list(driver.running.values()))
            driver.preempt(job)
            self.waiting.append(job)
        if rng.random() < 0.03:
            driver.cache.evict_blocks(rng.sample(range(1, driver.config.num_blocks), 5))
        if rng.random() < 0.02:
            driver.cache.reset()

    def probes(self, count: int) -> Sequence[Job]:
        """Prompts to look up that never run."""
        return [
            self.driver.new(self.prompt(), 1, self.rng.choice([None, "sql"])) for _ in range(count)
        ]
