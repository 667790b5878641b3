"""One simulated engine on the common timeline: its steps take time, and its events arrive a little
later."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks.simulation.decoding import make_quiet, quiet_steps, take_quiet_steps
from benchmarks.simulation.layouts import ReplicaConfig
from benchmarks.simulation.time_model import AcceleratorTime
from benchmarks.simulation.timeline import Timeline
from kvevents.events import Event, EventBatch
from kvevents.hashing import HashChain
from kvevents.publisher import EventPublisher, PublisherStatistics, announce
from kvevents.stream import StreamStatistics
from kvroute_engine.core.build import build_engine
from kvroute_engine.core.requests import EngineRequest, StepOutput
from kvroute_engine.core.time_model import VirtualClock
from offload.base import LookupResult, OffloadKey, RequestContext
from offload.request import PeerBlocks, PeerSource

MOST_IDLE_STEPS = 100
"""Steps in a row that take no time: more than a few mean that nothing will ever fit."""

MOST_KEYS = 1 << 16
"""A peer is asked for so many at once."""

TakeBatch = Callable[[str, EventBatch], None]
TakeOutputs = Callable[[Sequence[StepOutput], float], None]
"""Gets tokens, and the seconds between two tokens of a request where it got several."""


class StuckReplica(RuntimeError):
    """An engine has requests but makes no progress."""


class DelayedPublisher(EventPublisher):
    """Passes batches on some time after the end of their step."""

    def __init__(
        self,
        timeline: Timeline,
        clock: VirtualClock,
        delay_s: float,
        take: Callable[[EventBatch], None],
    ) -> None:
        self._timeline = timeline
        self._clock = clock
        self._delay_s = delay_s
        self._take = take
        self._published = 0

    def publish(self, events: Sequence[Event]) -> bool:
        """See `EventPublisher`."""
        batch = EventBatch(self._clock.now_s(), tuple(events))
        self._timeline.at(self._clock.now_s() + self._delay_s, lambda: self._take(batch))
        self._published += 1
        return True

    def shutdown(self, timeout_s: float = 5.0) -> None:
        """Do nothing: there is nothing to stop."""

    def statistics(self) -> PublisherStatistics:
        """See `EventPublisher`."""
        return PublisherStatistics(StreamStatistics(sent=self._published))


@dataclass(slots=True)
class _Stroke:
    """Quiet steps under way; see `decoding`."""

    start_s: float
    step_s: float
    steps: int


class SimulatedReplica:
    """An engine that steps while it has work."""

    def __init__(
        self,
        replica_id: str,
        config: ReplicaConfig,
        timeline: Timeline,
        event_delay_s: float,
        take_batch: TakeBatch,
        take_outputs: TakeOutputs,
        single_steps: bool = False,
    ) -> None:
        """
        Args:
            replica_id: Its name.
            config: Its engine.
            timeline: The time of all replicas.
            event_delay_s: From the end of a step to its events' arrival.
            take_batch: Gets the events.
            take_outputs: Gets the tokens, with the time between two of a request.
            single_steps: Take every step of its own, even if nothing happens in it but decoding.
        """
        self.replica_id = replica_id
        self.busy_s = 0.0
        self._timeline = timeline
        self._take_outputs = take_outputs
        self._clock = VirtualClock()
        publisher = DelayedPublisher(
            timeline, self._clock, event_delay_s, lambda batch: take_batch(replica_id, batch)
        )
        self.engine = build_engine(config, self._clock, publisher)
        publisher.publish([announce(self.engine.cache.config.layout, HashChain.from_seed())])
        assert isinstance(config.time_model, AcceleratorTime)
        self._time_model = config.time_model
        self._single_steps = single_steps or self.engine.connector is not None
        if not self._single_steps:
            make_quiet(self.engine)
        self._is_stepping = False
        self._idle_steps = 0
        self._stroke: _Stroke | None = None

    def add(self, request: EngineRequest, peer: SimulatedReplica | None = None) -> None:
        """Queue a request now; a step under way ends first.

        Args:
            request: The request.
            peer: From whose memory it may pull.
        """
        if peer is not None:
            keys = self.engine.scheduler.block_keys(request, MOST_KEYS)
            request = replace(request, at_peer=peer.held(keys))
        self.engine.add_request(request)
        if self._stroke is not None:
            self._cut(self._stroke)
        elif not self._is_stepping:
            self._is_stepping = True
            self._step()

    def held(self, keys: Sequence[OffloadKey]) -> PeerBlocks:
        """Return the blocks that its memory holds now."""
        memory, asking = self.engine.tiers[0].tier.manager, RequestContext("")
        found = {key for key in keys if memory.lookup(key, asking) is LookupResult.HIT}
        return PeerBlocks(PeerSource(self.replica_id, 1), frozenset(found))

    def _step(self) -> None:
        steps = 0 if self._single_steps else quiet_steps(self.engine)
        if steps > 1:
            step_s = self._time_model.decode_step_s(self.engine.scheduler.statistics().num_running)
            self._begin(_Stroke(self._timeline.now_s, step_s, steps))
            return
        # The engine does a whole step at once; its events are delivered when the step's time has
        # passed.
        start_s = self._timeline.now_s
        self._clock.sleep(max(0.0, start_s - self._clock.now_s()))
        outputs = self.engine.step()
        end_s = max(start_s, self._clock.now_s())
        self.busy_s += end_s - start_s
        self._check_progress(end_s > start_s)
        self._timeline.at(end_s, lambda: self._end_step(outputs, end_s - start_s))

    def _end_step(self, outputs: Sequence[StepOutput], step_s: float) -> None:
        self._is_stepping = self.engine.has_work
        self._take_outputs(outputs, step_s)
        if self._is_stepping:
            self._step()

    def _begin(self, stroke: _Stroke) -> None:
        self._stroke = stroke
        end_s = stroke.start_s + stroke.steps * stroke.step_s
        self._timeline.at(end_s, lambda: self._end_stroke(stroke))

    def _cut(self, stroke: _Stroke) -> None:
        """End with the step that is under way."""
        done = (self._timeline.now_s - stroke.start_s) / stroke.step_s
        steps = max(1, math.ceil(done))
        if steps < stroke.steps:
            self._begin(_Stroke(stroke.start_s, stroke.step_s, steps))

    def _end_stroke(self, stroke: _Stroke) -> None:
        if stroke is not self._stroke:
            return  # it was cut
        self._stroke = None
        self.busy_s += stroke.steps * stroke.step_s
        self._clock.sleep(max(0.0, self._timeline.now_s - self._clock.now_s()))
        self._idle_steps = 0
        self._end_step(take_quiet_steps(self.engine, stroke.steps), stroke.step_s)

    def _check_progress(self, took_time: bool) -> None:
        self._idle_steps = 0 if took_time else self._idle_steps + 1
        if self._idle_steps > MOST_IDLE_STEPS:
            raise StuckReplica(
                f"{self.replica_id}: {MOST_IDLE_STEPS} idle steps: {self.engine.statistics()}"
            )
