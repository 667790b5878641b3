"""The engine: scheduler, model runner, lower tiers and publisher, put together in steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvevents.publisher import EventPublisher
from kvroute_engine.core.batch import ModelRunner
from kvroute_engine.core.model_config import TransformerConfig
from kvroute_engine.core.requests import EngineRequest, StepOutput
from kvroute_engine.core.scheduler import Scheduler, SchedulerStatistics
from kvroute_engine.core.time_model import Clock, RealClock
from offload.cache_manager import CacheManager, CacheStatistics
from offload.connector.connector import OffloadingConnector
from offload.peer.wire import MOST_ASKED
from offload.request import PeerSource
from offload.tiers import MadeTier, PeerTierSpec

_IDLE_S = 0.001
"""The time that an idle step waits while copies are in flight."""


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """An engine now, and counts since its start."""

    steps: int
    scheduler: SchedulerStatistics
    cache: CacheStatistics
    kv_cache_usage: float
    """Share of the blocks that requests hold, from 0 to 1."""
    copies_in_flight: int = 0
    """Jobs between the GPU and lower tiers."""


class Engine:
    """Serves requests a step at a time; not thread-safe."""

    def __init__(
        self,
        model: TransformerConfig,
        cache: CacheManager,
        scheduler: Scheduler,
        runner: ModelRunner,
        publisher: EventPublisher,
        connector: OffloadingConnector | None = None,
        tiers: Sequence[MadeTier] = (),
        clock: Clock | None = None,
    ) -> None:
        """Take the parts that `kvroute_engine.core.build` made.

        Args:
            scheduler: Shares *cache* and *connector*.
            publisher: Gets the events of every step.
            connector: To lower tiers, if there are any.
            tiers: Those of *connector*, in its order; closed with the engine.
            clock: An idle step sleeps on it; the machine's own if left out.
        """
        self.model = model
        self.cache = cache
        self.scheduler = scheduler
        self.runner = runner
        self.publisher = publisher
        self.connector = connector
        self.tiers = tiers
        self.peers = next(
            (made.spec.peers for made in tiers if isinstance(made.spec, PeerTierSpec)), None
        )
        """Other engines from which it can pull; None without a tier for them."""
        self._clock = clock or RealClock()
        self._steps = 0
        self._publish()  # blocks that an earlier process left in a tier

    @property
    def has_work(self) -> bool:
        """Return whether it has tokens to compute, or a copy in flight."""
        return not self.scheduler.is_idle or bool(self.connector and not self.connector.is_idle)

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises:
            EngineRequestError: It can never be served, or its id is in use.
        """
        self.scheduler.add(request)

    def ask_peer(self, request: EngineRequest) -> EngineRequest:
        """Return the request with the blocks that its peer holds. Waits for the peer's answer; may
        be called from any thread.

        Raises:
            EngineRequestError: `remote_kv_source` is of another form.
        """
        source = None if self.peers is None else PeerSource.of(request.kv_transfer_params)
        if self.peers is None or source is None:
            return request
        keys = self.scheduler.block_keys(request, MOST_ASKED)
        return replace(request, at_peer=self.peers.find(source, keys))

    def abort(self, request_id: str) -> None:
        """Drop a request; no error if it is unknown."""
        self.scheduler.abort(request_id)

    def step(self) -> list[StepOutput]:
        """Compute one batch and publish the changes of the cache."""
        self._steps += 1
        self._take_finished_copies()
        chunks = self.scheduler.schedule()
        if not chunks and self.connector and not self.connector.is_idle:
            self._clock.sleep(_IDLE_S)
        outputs = self.scheduler.update(chunks, self.runner.run(chunks)) if chunks else []
        self._start_copies()
        self._publish()
        return outputs

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block, in all tiers.

        Returns:
            False if requests or copies hold blocks; then nothing changed.
        """
        if self.connector and not self.connector.is_idle:
            return False
        is_reset = self.cache.reset()
        if is_reset and self.connector:
            self.connector.reset()
        self._publish()
        return is_reset

    def statistics(self) -> EngineStatistics:
        """Return the engine now, and counts since its start."""
        return EngineStatistics(
            steps=self._steps,
            scheduler=self.scheduler.statistics(),
            cache=self.cache.statistics(),
            kv_cache_usage=self.cache.usage,
            copies_in_flight=self.connector.statistics().jobs_in_flight if self.connector else 0,
        )

    def close(self) -> None:
        """Finish copies and stop publishing."""
        for made in self.tiers:
            made.close()
        self.publisher.shutdown()

    def _take_finished_copies(self) -> None:
        if self.connector:
            for made in self.tiers:
                ended = self.connector.complete(made.worker.get_finished())
                self.scheduler.loads_ended(ended.loaded, ended.failed)

    def _start_copies(self) -> None:
        if self.connector:
            for made, jobs in zip(self.tiers, self.connector.take_jobs(), strict=True):
                for job in jobs:
                    made.worker.submit(job)

    def _publish(self) -> None:
        events = self.cache.take_events()
        if self.connector:
            events += self.connector.take_events()
        if events:
            self.publisher.publish(events)
