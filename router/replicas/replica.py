"""One replica: what is configured, what it said, and how it does."""

from __future__ import annotations

from router.config import ReplicaConfig, key_bytes
from router.replicas.discovery import configured_sources
from router.replicas.engine_load import EngineLoad
from router.replicas.health import HealthRecord
from router.replicas.load import ReplicaLoad
from router.replicas.types import EventSource, Health, ReplicaState, ReplicaView, ServedModels
from router.scoring import Candidate
from router.upstream import Header


class Replica:
    """The state of one replica. The registry and its watcher write it; everybody else reads."""

    def __init__(self, config: ReplicaConfig, record: HealthRecord, now: float) -> None:
        self.config = config
        self.id = config.replica_id
        self.origin = config.origin
        self.headers = _authorization(config)
        self.record = record
        self.draining = False
        self.removed = False
        self.served = ServedModels(config.models or ())
        self.configured_sources = _configured_sources(config)
        self.sources: tuple[EventSource, ...] = ()
        """Those that were announced; none before its models are known."""
        self.notes: tuple[str, ...] = ()
        self.engine_load: EngineLoad | None = None
        self.engine_load_at = now
        self.foreign_requests = 0
        """Requests there that were not this router's when its load was scraped."""
        self.health_since = now
        self.checked_at: float | None = None
        self.discoveries = self.failed_discoveries = self.failed_scrapes = 0

    @property
    def state(self) -> ReplicaState:
        """Health and the operator's will in one word."""
        return ReplicaState.DRAINING if self.draining else ReplicaState(self.record.health.value)

    @property
    def is_healthy(self) -> bool:
        return self.record.health is Health.HEALTHY

    def serves(self, model: str) -> bool:
        """Whether it answers requests for this model or adapter."""
        return model in self.served.models or any(
            model == adapter for adapter, _ in self.served.adapters
        )

    def take_engine_load(self, load: EngineLoad, own_requests: int, now: float) -> None:
        """Keep what the engine's metrics report.

        Args:
            load: As scraped.
            own_requests: This router's requests there at that time.
            now: That time, on the registry's clock.
        """
        self.engine_load = load
        self.engine_load_at = now
        self.foreign_requests = max(0, load.running + load.waiting - own_requests)

    def candidate(
        self,
        load: ReplicaLoad,
        now: float,
        engine_load_stale_after_s: float,
        gpu_cached_tokens: int = 0,
        cached_tokens: int = 0,
        recent_tokens: int = 0,
        suspect: bool = False,
        dp_rank: int | None = None,
    ) -> Candidate:
        """This replica as scoring sees it, for one prompt. An old engine load is left out rather than
        believed."""
        fresh = (
            self.engine_load is not None and now - self.engine_load_at <= engine_load_stale_after_s
        )
        limit = self.config.max_concurrent_requests
        return Candidate(
            replica_id=self.id,
            gpu_cached_tokens=gpu_cached_tokens,
            cached_tokens=max(gpu_cached_tokens, cached_tokens),
            recent_tokens=recent_tokens,
            suspect=suspect,
            queued_prefill_tokens=load.prefill_tokens,
            prefilling_requests=load.prefilling_requests,
            decoding_requests=load.decoding_requests,
            decode_context_tokens=load.context_tokens,
            foreign_requests=self.foreign_requests if fresh else 0,
            waiting_requests=self.engine_load.waiting
            if fresh and self.engine_load is not None
            else 0,
            speed=self.config.speed,
            healthy=self.is_healthy,
            draining=self.draining,
            at_capacity=limit is not None and load.requests >= limit,
            dp_rank=dp_rank,
        )

    def view(self, load: ReplicaLoad, now: float) -> ReplicaView:
        """Everything about it, as of *now*."""
        record = self.record
        return ReplicaView(
            id=self.id,
            url=str(self.origin),
            state=self.state.value,
            health=record.health.value,
            draining=self.draining,
            models=self.served.models,
            adapters=dict(self.served.adapters),
            models_configured=self.config.models is not None,
            sources=self.sources,
            sources_configured=self.config.kv_events is not None,
            notes=self.notes,
            speed=self.config.speed,
            max_concurrent_requests=self.config.max_concurrent_requests,
            load=load,
            engine_load=self.engine_load,
            engine_load_age_s=None if self.engine_load is None else now - self.engine_load_at,
            foreign_requests=self.foreign_requests,
            last_error=record.last_error,
            seconds_in_health=now - self.health_since,
            seconds_since_check=None if self.checked_at is None else now - self.checked_at,
            checks=record.checks,
            failed_checks=record.failed_checks,
            failed_requests=record.failed_requests,
            times_unhealthy=record.times_unhealthy,
            discoveries=self.discoveries,
            failed_discoveries=self.failed_discoveries,
            failed_scrapes=self.failed_scrapes,
        )


def _configured_sources(config: ReplicaConfig) -> tuple[EventSource, ...] | None:
    return (
        None
        if config.kv_events is None
        else configured_sources(config.kv_events, config.origin.host)
    )


def _authorization(config: ReplicaConfig) -> tuple[Header, ...]:
    key = key_bytes(config.api_key)
    return () if key is None else ((b"authorization", b"Bearer " + key),)
