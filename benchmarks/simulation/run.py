"""One simulation: a workload, a router, replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.simulation.layouts import ReplicaConfig
from benchmarks.simulation.outcome import Outcome, RequestRecord
from benchmarks.simulation.replica import SimulatedReplica
from benchmarks.simulation.routing import SimulatedRouter
from benchmarks.simulation.timeline import Timeline
from benchmarks.simulation.workload import Arrival, Workload
from offload.engine.core.requests import EngineRequest, SamplingParams, StepOutput
from router.replicas.load import InFlight
from router.scoring import Weights


@dataclass(frozen=True, slots=True)
class Setting:
    """What is simulated, besides the workload."""

    policy: str
    replicas: int
    replica: ReplicaConfig
    event_delay_s: float = 0.001
    scrape_interval_s: float = 2.0
    """How often the engines' gauges are scraped; the router's default."""
    weights: Weights | None = None
    seed: int = 0


@dataclass(slots=True)
class _Served:
    arrival: Arrival
    record: RequestRecord
    account: InFlight


class Simulation:
    """All parts of a simulation; `run` may be called once."""

    def __init__(self, setting: Setting, workload: Workload) -> None:
        self.timeline = Timeline()
        self._workload = workload
        self._scrape_interval_s = setting.scrape_interval_s
        names = [f"replica-{index:03}" for index in range(setting.replicas)]
        self.router = SimulatedRouter(
            setting.policy, names, self.timeline.now, setting.weights, setting.seed
        )
        self.replicas = {name: self._replica(name, setting) for name in names}
        self._open: dict[str, _Served] = {}
        self._records: list[RequestRecord] = []
        self._to_come = 0

    def run(self) -> Outcome:
        """Serve all requests."""
        arrivals = self._workload.arrivals()
        for arrival in arrivals:
            self._expect(arrival)
        self.timeline.at(0.0, self._scrape)
        self.timeline.run()
        return Outcome(
            records=self._records,
            busy_s={name: replica.busy_s for name, replica in self.replicas.items()},
            preemptions=sum(
                replica.engine.scheduler.statistics().preemptions
                for replica in self.replicas.values()
            ),
            arrivals_end_s=max(arrival.at_s for arrival in arrivals),
        )

    def _replica(self, name: str, setting: Setting) -> SimulatedReplica:
        take_batch = self.router.take_batch
        return SimulatedReplica(
            name,
            setting.replica,
            self.timeline,
            setting.event_delay_s,
            take_batch,
            self._take_outputs,
        )

    def _expect(self, arrival: Arrival) -> None:
        self._to_come += 1
        self.timeline.at(arrival.at_s, lambda: self._arrive(arrival))

    def _arrive(self, arrival: Arrival) -> None:
        tokens = self._workload.prompt(arrival)
        chosen, predicted, account = self.router.route(arrival.session, tokens)
        record = RequestRecord(
            arrival.request_id, chosen, self.timeline.now_s, len(tokens), predicted
        )
        self._records.append(record)
        self._open[arrival.request_id] = _Served(arrival, record, account)
        sampling = SamplingParams(max_tokens=arrival.answer_tokens, ignore_eos=True)
        self.replicas[chosen].add(EngineRequest(arrival.request_id, tokens, sampling))

    def _take_outputs(self, outputs: Sequence[StepOutput]) -> None:
        for output in outputs:
            self._take_output(self._open[output.request_id], output)

    def _take_output(self, served: _Served, output: StepOutput) -> None:
        now_s, record = self.timeline.now_s, served.record
        if record.answer:
            record.gaps_s.append(now_s - record.last_s)
            served.account.generated(len(output.new_token_ids))
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
        self._to_come -= 1
        following = self._workload.answered(
            served.arrival, served.record.answer, self.timeline.now_s
        )
        if following is not None:
            self._expect(following)

    def _scrape(self) -> None:
        for name, replica in self.replicas.items():
            scheduler = replica.engine.scheduler.statistics()
            self.router.take_engine_load(name, scheduler.num_running, scheduler.num_waiting)
        if self._to_come:
            self.timeline.at(self.timeline.now_s + self._scrape_interval_s, self._scrape)
