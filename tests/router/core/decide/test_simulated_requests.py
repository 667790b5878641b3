"""Some hundred requests to simulated engines, with both mirrors in lockstep: what they say is
compared at every request, at each question that a decision has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from benchmarks.simulation import routing
from benchmarks.simulation.layouts import replica_config, with_memory_tier
from benchmarks.simulation.plans import Chats, Pause
from benchmarks.simulation.run import Setting, Simulation
from benchmarks.simulation.sessions import Sessions
from router.index.base import SourceId
from tests.router.core.decide.both import BothMirrors, BothVisits

CHATS = partial(
    Chats,
    Pause(2.0),
    systems=2,
    documents=3,
    system_tokens=(300, 600),
    document_tokens=(800, 2500),
    turns=(1, 4),
    message_tokens=(20, 200),
    answer_tokens=(2, 90),
)
CACHE = 8000
"""In tokens: a few chats; it evicts all the time."""


class AskedMirrors(BothMirrors):
    """They are asked before each request what a decision asks: the core does so by itself."""

    def __init__(self, clock: Callable[[], float], capacity_blocks: int) -> None:
        super().__init__(clock=clock)
        self._clock, self._capacity_blocks = clock, capacity_blocks
        self._sources: list[SourceId] = []

    def begin(self, *sent: Any, **options: Any) -> BothVisits:
        model, _, source, prompts, prompt_tokens, *_ = sent
        for prompt in prompts:
            self.in_prefill(prompt, prompt_tokens)
        self.prefill_tokens_per_s(model)
        self.outlooks(model, self._sources, lambda _: self._capacity_blocks, self._clock())
        for each in self._sources:
            self.load_prices(each)
        if source not in self._sources:
            self._sources.append(source)
        return super().begin(*sent, **options)


@pytest.mark.parametrize(
    ("policy", "layout", "sparse", "memory"),
    [
        ("least_delay", "full", False, 0.0),
        ("least_delay", "full", False, 4.0),
        ("least_delay", "gptoss", False, 0.0),
        ("least_delay, learned", "gptoss", True, 0.0),
        ("least_delay, learned", "gemma", True, 2.0),
        ("least_delay, told", "mamba-hybrid", True, 0.0),
    ],
)
def test_both_say_the_same_of_engines_that_serve(
    policy: str, layout: str, sparse: bool, memory: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real caches evict, keep windows and load in ways that no list of steps thinks of."""
    made: list[AskedMirrors] = []

    def make(clock: Callable[[], float]) -> AskedMirrors:
        made.append(AskedMirrors(clock, config.num_blocks))
        return made[-1]

    monkeypatch.setattr(routing, "Mirror", make)
    config = replica_config(layout, CACHE)
    if memory:
        config = with_memory_tier(config, memory)
    if sparse:
        config = replace(config, retention_interval=0)
    workload = Sessions(CHATS(), 20.0, 12.0, 1.0, 0)
    outcome = Simulation(Setting(policy, 3, config), workload).run()
    assert len(outcome.records) > 200
    (mirrors,) = made
    assert mirrors.statistics().requests > 5
    for name in outcome.busy_s:
        mirrors.ended(SourceId(name))
        mirrors.load_prices(SourceId(name))
