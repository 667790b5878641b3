"""One simulation: a workload, routers, replicas."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.simulation.contract import Account, Router
from benchmarks.simulation.floor import OneCacheForAll
from benchmarks.simulation.layouts import STEP_TOKENS, TIME_MODEL, ReplicaConfig
from benchmarks.simulation.opponents import OPPONENTS, make_opponent
from benchmarks.simulation.outcome import Outcome, RequestRecord
from benchmarks.simulation.replica import SimulatedReplica
from benchmarks.simulation.routing import SimulatedRouter
from benchmarks.simulation.seen import SeenPrefixes
from benchmarks.simulation.timeline import Timeline
from benchmarks.simulation.workload import Arrival, Workload
from kvevents.events import EventBatch
from kvroute_engine.core.requests import EngineRequest, SamplingParams, StepOutput
from router.config.routing import OverloadConfig
from router.fleet.line import place_of
from router.policies import Weights

AGEING_TOKENS_PER_S = OverloadConfig().ageing_tokens_per_s
"""A request that comes a second later stands behind by so much, where engines go by priority."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The setting of a simulation, besides the workload."""

    policy: str
    replicas: int
    replica: ReplicaConfig
    event_delay_s: float = 0.001
    scrape_interval_s: float = 2.0
    """The interval between scrapes of the engines' gauges; the router's default."""
    weights: Weights | None = None
    seed: int = 0
    routers: int = 1
    """Each follows all events and scrapes all gauges, but knows only its own requests. They take
    turns."""
    single_steps: bool = False
    """Take every step on its own; see `SimulatedReplica`."""
    late: int = 0
    """The number of replicas that join later, and empty."""
    late_share: float = 0.0
    """The share of the time after which they join."""


@dataclass(slots=True)
class _Served:
    arrival: Arrival
    record: RequestRecord
    account: Account
    tokens: list[int]


class Simulation:
    """All parts of a simulation; `run` may be called once."""

    def __init__(self, setting: Setting, workload: Workload) -> None:
        self.timeline = Timeline()
        self._workload = workload
        self._late_s = setting.late_share * workload.ends_s
        self._scrape_interval_s = setting.scrape_interval_s
        names = [f"replica-{index:03}" for index in range(setting.replicas)]
        self.routers = [self._router(setting, names, index) for index in range(setting.routers)]
        self.replicas = {name: self._replica(name, setting) for name in names}
        self._open: dict[str, _Served] = {}
        self._records: list[RequestRecord] = []
        self._seen = SeenPrefixes()
        self._floor = OneCacheForAll(
            setting.replica.cache_tokens,
            len(setting.replica.model().layer_groups()),
            setting.replicas,
            _alone_s,
        )
        self._to_come = 0

    def run(self) -> Outcome:
        """Serve all requests."""
        for arrival in self._workload.arrivals():
            self._expect(arrival)
        self.timeline.at(0.0, self._scrape)
        with _garbage_kept():
            self.timeline.run()
        return Outcome(
            records=self._records,
            busy_s={name: replica.busy_s for name, replica in self.replicas.items()},
            preemptions=sum(
                replica.engine.scheduler.statistics().preemptions
                for replica in self.replicas.values()
            ),
            arrivals_end_s=self._workload.ends_s,
        )

    def _router(self, setting: Setting, names: Sequence[str], index: int) -> Router:
        seed = setting.seed + 1000 * index
        if setting.policy in OPPONENTS:
            return make_opponent(setting.policy, names, self.timeline.now, setting.replica, seed)
        return SimulatedRouter(
            setting.policy,
            names,
            self.timeline.now,
            setting.weights,
            seed,
            setting.replica.num_blocks,
            dict.fromkeys(names[len(names) - setting.late :], self._late_s),
        )

    def _replica(self, name: str, setting: Setting) -> SimulatedReplica:
        return SimulatedReplica(
            name,
            setting.replica,
            self.timeline,
            setting.event_delay_s,
            self._take_batch,
            self._take_outputs,
            setting.single_steps,
        )

    def _take_batch(self, replica_id: str, batch: EventBatch) -> None:
        for router in self.routers:
            router.take_batch(replica_id, batch)

    def _expect(self, arrival: Arrival) -> None:
        self._to_come += 1
        self.timeline.at(arrival.at_s, lambda: self._arrive(arrival))

    def _arrive(self, arrival: Arrival) -> None:
        tokens = self._workload.prompt(arrival)
        router = self.routers[len(self._records) % len(self.routers)]
        routed = router.route(arrival.session, tokens, self._workload.shared_ends(arrival))
        known = min(self._seen.add(tokens), len(tokens) - 1)
        record = RequestRecord(
            arrival.request_id,
            routed.replica_id,
            self.timeline.now_s,
            len(tokens),
            routed.predicted_tokens,
            routed.expected_tokens,
            arrival.turn,
            _alone_s(known, len(tokens)),
            self._floor.ttft_s(tokens, self.timeline.now_s),
        )
        self._records.append(record)
        self._open[arrival.request_id] = _Served(arrival, record, routed.account, tokens)
        sampling = SamplingParams(max_tokens=arrival.answer_tokens, ignore_eos=True)
        keep, keep_end = routed.hints
        told = {"kvroute": {"keep": list(keep), "keep_end": keep_end}}
        uncached = len(tokens) - routed.expected_tokens
        peer = None if routed.pull_from is None else self.replicas[routed.pull_from]
        self.replicas[routed.replica_id].add(
            EngineRequest(
                arrival.request_id,
                tokens,
                sampling,
                kv_transfer_params=told,
                priority=round(place_of(uncached, self.timeline.now_s, AGEING_TOKENS_PER_S)),
            ),
            peer,
        )

    def _take_outputs(self, outputs: Sequence[StepOutput], step_s: float) -> None:
        for output in outputs:
            self._take_output(self._open[output.request_id], output, step_s)

    def _take_output(self, served: _Served, output: StepOutput, step_s: float) -> None:
        now_s, record, count = self.timeline.now_s, served.record, len(output.new_token_ids)
        if record.answer:
            first_s = now_s - (count - 1) * step_s
            record.gaps_s.append(first_s - record.last_s)
            record.gaps_s += [step_s] * (count - 1)
            served.account.generated(count)
        else:
            record.first_s, record.cached_tokens = now_s, output.num_cached_tokens
            served.account.first_token()
        record.last_s = now_s
        record.answer += output.new_token_ids
        if output.finish_reason:
            self._finish(served)

    def _finish(self, served: _Served) -> None:
        served.account.ended()
        served.record.is_finished = True
        del self._open[served.arrival.request_id]
        self._seen.add(served.tokens + served.record.answer)
        self._floor.answered(served.tokens + served.record.answer)
        self._to_come -= 1
        following = self._workload.answered(
            served.arrival, served.record.answer, self.timeline.now_s
        )
        if following is not None:
            self._expect(following)

    def _scrape(self) -> None:
        for name, replica in self.replicas.items():
            scheduler = replica.engine.scheduler.statistics()
            usage = replica.engine.cache.usage
            for router in self.routers:
                router.take_engine_load(name, scheduler.num_running, scheduler.num_waiting, usage)
        if self._to_come:
            self.timeline.at(self.timeline.now_s + self._scrape_interval_s, self._scrape)


def _alone_s(cached_tokens: int, prompt_tokens: int) -> float:
    return TIME_MODEL.alone_s(cached_tokens, prompt_tokens, STEP_TOKENS)


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """A simulation makes few cycles, and looking for them takes a tenth of its time."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
