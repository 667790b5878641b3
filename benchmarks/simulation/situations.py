"""The situations in which policies are compared: a workload, a layout, caches, a rate, and what is
unusual."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.simulation.layouts import (
    ReplicaConfig,
    cold_requests_per_s,
    replica_config,
    with_memory_tier,
)
from benchmarks.simulation.plans import (
    Agents,
    Chats,
    ChatsBesideScans,
    HotPrefixes,
    OneSystemPrompt,
    Pause,
    Questions,
)
from benchmarks.simulation.run import Setting
from benchmarks.simulation.sessions import Plan, Sessions, profile
from benchmarks.simulation.trace import RecordedTrace, TraceOptions, read_trace
from benchmarks.simulation.workload import Workload
from kvroute_engine.core.serving_order import SchedulingPolicy

WARM_UP = 0.25
"""Share of the time whose requests are not counted."""
COUNTED = 2200
"""Requests to count; sessions that end early leave at least 2,000 of them."""
TRACE_STRIDE = 800
"""Requests of the recording between the beginnings of two seeds' parts, which overlap."""
TRACE_PARTS = 10
"""A recording has no more of them: seeds that are as far apart play the same part."""
LONGEST_PROMPT = 32_768

PLANS: dict[str, Callable[[], Plan]] = {
    "chats": partial(Chats, Pause(20.0)),
    "chats, slow": partial(Chats, Pause(60.0, 1.0)),
    "documents": Questions,
    "documents, many": partial(Questions, documents=960),
    "hot prefixes": HotPrefixes,
    "agents": Agents,
    "mixed": partial(ChatsBesideScans, Pause(30.0)),
    "one prompt": OneSystemPrompt,
}
TRACE = "trace"


@dataclass(frozen=True, slots=True)
class Situation:
    """One situation; the defaults are those of most."""

    workload: str
    """One of `PLANS`, or the trace."""
    cache_tokens: int
    """The tokens that a replica's cache holds, with the blocks of every group."""
    rate: float
    """The rate in multiples of what the replicas could serve without any reuse."""
    layout: str = "gptoss"
    retention_interval: int | None = 0
    """The interval at which engines keep windows and states: the default is vLLM's; None: all
    (dense)."""
    scheduling_policy: SchedulingPolicy = SchedulingPolicy.FCFS
    """Whom engines serve first."""
    replicas: int = 8
    variation: float = 2.0
    """The coefficient of variation of the times between the beginnings of sessions."""
    event_delay_s: float = 0.01
    memory_tier: float = 0.0
    """Its size in multiples of the GPU's; 0: none."""
    routers: int = 1
    requests: int = COUNTED
    late: int = 0
    """The number of replicas that join where counting begins, and empty."""

    def replica(self) -> ReplicaConfig:
        """Return the configuration of each of its replicas."""
        config = replace(
            replica_config(self.layout, self.cache_tokens),
            retention_interval=self.retention_interval,
            scheduling_policy=self.scheduling_policy,
        )
        return with_memory_tier(config, self.memory_tier) if self.memory_tier else config

    def make_workload(self, seed: int, trace: Path | None = None) -> Workload:
        """Return its workload.

        Args:
            seed: What is drawn, or which part of the recording is played.
            trace: The recording.
        """
        if self.workload == TRACE:
            if trace is None:
                raise ValueError("situation: the recorded trace needs its path")
            return self._recorded(seed, trace)
        plan = PLANS[self.workload]()
        per_s = self._per_s(profile(plan).size.prompt_tokens)
        ends_s = self.requests / per_s / (1 - WARM_UP)
        return Sessions(plan, per_s, ends_s, self.variation, seed)

    def setting(self, policy: str, seed: int) -> Setting:
        """Return everything else.

        Args:
            policy: Of the routers.
            seed: Of what they draw.
        """
        return Setting(
            policy,
            self.replicas,
            self.replica(),
            event_delay_s=self.event_delay_s,
            seed=seed,
            routers=self.routers,
            late=self.late,
            late_share=WARM_UP,
        )

    def _per_s(self, prompt_tokens: float) -> float:
        return self.rate * cold_requests_per_s(prompt_tokens, self.replicas)

    def _recorded(self, seed: int, trace: Path) -> Workload:
        options = TraceOptions(
            round(self.requests / (1 - WARM_UP)),
            LONGEST_PROMPT,
            skipped=seed % TRACE_PARTS * TRACE_STRIDE,
        )
        rows = read_trace(trace, options)
        mean = sum(row["input_length"] for row in rows) / len(rows)
        return RecordedTrace(rows, options, self._per_s(mean))


_CHATS = Situation("chats", 80_000, 1.2, requests=2500)
_SLOW = Situation("chats, slow", 80_000, 0.6, requests=2600)
_DOCUMENTS = Situation("documents", 100_000, 1.0)
_HOT = Situation("hot prefixes", 300_000, 3.0, memory_tier=3.0)
_AGENTS = Situation("agents", 300_000, 2.5, requests=3400)
_MIXED = Situation("mixed", 60_000, 0.8, requests=2900)
_ONE_PROMPT = Situation("one prompt", 40_000, 2.0)
_TRACE = Situation(TRACE, 300_000, 0.6, requests=3000)

SITUATIONS: dict[str, Situation] = {
    "chats": _CHATS,
    "chats, starved": replace(_CHATS, cache_tokens=25_000, rate=0.6),
    "chats, large caches": replace(_CHATS, cache_tokens=300_000, rate=2.5),
    "chats, slow": _SLOW,
    "documents": _DOCUMENTS,
    "documents, busy": replace(_DOCUMENTS, rate=1.8),
    "agents": _AGENTS,
    "agents, small caches": replace(_AGENTS, cache_tokens=160_000, rate=1.5),
    "mixed": _MIXED,
    "one prompt": _ONE_PROMPT,
    "trace": _TRACE,
    "trace, small caches": replace(_TRACE, cache_tokens=60_000),
    "chats, full": replace(_CHATS, layout="full"),
    "chats, gemma": replace(_CHATS, layout="gemma"),
    "chats, llama4": replace(_CHATS, layout="llama4"),
    "chats, mamba-hybrid": replace(_CHATS, layout="mamba-hybrid"),
    **{
        f"{name}, {layout}": replace(situation, layout=layout)
        for layout in ("full", "gemma", "mamba-hybrid")
        for name, situation in (
            ("documents, busy", replace(_DOCUMENTS, rate=1.8)),
            ("agents, small caches", replace(_AGENTS, cache_tokens=160_000, rate=1.5)),
            ("mixed", _MIXED),
            ("one prompt", _ONE_PROMPT),
        )
    },
    **{
        f"{name}, {order}": replace(situation, scheduling_policy=policy)
        for order, policy in (
            ("by priority", SchedulingPolicy.PRIORITY),
            ("shortest first", SchedulingPolicy.SHORTEST),
        )
        for name, situation in (
            ("chats", _CHATS),
            ("documents, busy", replace(_DOCUMENTS, rate=1.8)),
            ("agents, small caches", replace(_AGENTS, cache_tokens=160_000, rate=1.5)),
            ("mixed", _MIXED),
            ("documents, busy, gemma", replace(_DOCUMENTS, rate=1.8, layout="gemma")),
        )
    },
    "chats, dense": replace(_CHATS, retention_interval=None),
    "documents, busy, dense": replace(_DOCUMENTS, rate=1.8, retention_interval=None),
    "chats, Poisson": replace(_CHATS, variation=1.0),
    "chats, bursts": replace(_CHATS, variation=4.0),
    "chats, early events": replace(_CHATS, event_delay_s=0.001),
    "chats, late events": replace(_CHATS, event_delay_s=0.05),
    "chats, 4 replicas": replace(_CHATS, replicas=4),
    "chats, 64 replicas": replace(_CHATS, replicas=64, requests=12_000),
    "documents, 64 replicas": replace(
        _DOCUMENTS, workload="documents, many", replicas=64, requests=12_000
    ),
    "chats, memory tier": replace(_CHATS, memory_tier=3.0),
    "hot prefixes": _HOT,
    "hot prefixes, new replicas": replace(_HOT, late=4),
    "documents, memory tier": replace(_DOCUMENTS, rate=1.8, memory_tier=3.0),
    "chats, two routers": replace(_CHATS, routers=2),
}

TRAFFIC: dict[str, tuple[str, ...]] = {
    "Chats": ("chats", "chats, slow", "chats, starved", "chats, large caches"),
    "Documents": ("documents", "documents, busy"),
    "Agents": ("agents", "agents, small caches"),
    "Mixed": ("mixed",),
    "One prompt": ("one prompt",),
    "Trace": ("trace", "trace, small caches"),
}
"""The main situations by what is asked; the others vary one thing in one of them."""
