"""The engine: a scheduler, a model or the time it would take, tiers, and a publisher, put together
in steps."""

from __future__ import annotations

from collections.abc import Sequence

from kvevents.publisher import EventPublisher
from offload.base import OffloadingWorker
from offload.cache_manager import CacheManager
from offload.connector import OffloadingConnector
from offload.engine.core.batch import ModelRunner
from offload.engine.core.model_config import TransformerConfig
from offload.engine.core.requests import (
    EngineRequest,
    EngineStatistics,
    GroupStatistics,
    StepOutput,
)
from offload.engine.core.scheduler import Scheduler
from offload.engine.core.time_model import Clock, RealClock
from offload.fs.store import BlockFiles

_IDLE_S = 0.001
"""How long a step waits that has nothing to compute and copies on their way."""


class Engine:
    """Serves requests a step at a time. Not thread-safe: one thread calls it."""

    def __init__(
        self,
        model: TransformerConfig,
        cache: CacheManager,
        scheduler: Scheduler,
        runner: ModelRunner,
        publisher: EventPublisher,
        connector: OffloadingConnector | None = None,
        workers: Sequence[OffloadingWorker] = (),
        clock: Clock | None = None,
        stores: Sequence[BlockFiles] = (),
    ) -> None:
        """Put together by `offload.engine.core.build`; *workers* are the connector's tiers', in their
        order, *stores* the disk's."""
        self.model = model
        self.cache = cache
        self.scheduler = scheduler
        self.runner = runner
        self.publisher = publisher
        self.connector = connector
        self._workers = workers
        self._stores = stores
        self._clock = clock or RealClock()
        self._steps = 0
        self._publish()  # what an earlier process left in a tier

    @property
    def has_work(self) -> bool:
        """Is there something to compute, or a copy on its way?"""
        return bool(
            self.scheduler.num_running
            or self.scheduler.num_waiting
            or (self.connector and not self.connector.is_idle)
        )

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request; raises `EngineRequestError` if it can never be served."""
        self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """Drop a request; no error if it is unknown."""
        self.scheduler.abort(request_id)

    def step(self) -> list[StepOutput]:
        """Compute one batch and publish what it did to the cache."""
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
        """Forget every cached block, in all tiers; False, and nothing changed, while requests or
        copies hold some."""
        if self.connector and not self.connector.is_idle:
            return False
        is_reset = self.cache.reset()
        if is_reset and self.connector:
            self.connector.reset()
        self._publish()
        return is_reset

    def statistics(self) -> EngineStatistics:
        """The engine now, and counts since its start."""
        counts = self.cache.statistics().counts
        return EngineStatistics(
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            kv_cache_usage=self.cache.usage,
            prefix_cache_queries=counts.queried_tokens,
            prefix_cache_hits=counts.hit_tokens,
            external_prefix_cache_hits=counts.external_tokens,
            preemptions=self.scheduler.preemptions,
            prompt_tokens=self.scheduler.prompt_tokens,
            generation_tokens=self.scheduler.generation_tokens,
            steps=self._steps,
            copies_in_flight=self.connector.statistics().jobs_in_flight if self.connector else 0,
            groups=self._group_statistics(),
        )

    def _group_statistics(self) -> tuple[GroupStatistics, ...]:
        kinds = [group.kind.value for group in self.cache.config.layout.groups]
        found = zip(
            kinds, self.cache.pool.statistics().groups, self.scheduler.group_hit_tokens, strict=True
        )
        return tuple(
            GroupStatistics(
                kind,
                group.cached,
                group.evicted_after_sliding,
                group.evicted - group.evicted_after_sliding,
                hits,
            )
            for kind, group, hits in found
        )

    def close(self) -> None:
        """Finish copies and stop publishing."""
        for worker in self._workers:
            worker.shutdown()
        for store in self._stores:
            store.close()
        self.publisher.shutdown()

    def _take_finished_copies(self) -> None:
        if self.connector:
            for worker in self._workers:
                ended = self.connector.complete(worker.get_finished())
                self.scheduler.loads_ended(ended.loaded, ended.failed)

    def _start_copies(self) -> None:
        if self.connector:
            for worker, jobs in zip(self._workers, self.connector.take_jobs(), strict=True):
                for job in jobs:
                    worker.submit(job)

    def _publish(self) -> None:
        events = self.cache.take_events()
        if self.connector:
            events += self.connector.take_events()
        if events:
            self.publisher.publish(events)
