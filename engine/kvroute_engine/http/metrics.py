"""The engine's metrics under vLLM's names, for dashboards and routers made for vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvroute_engine.core.engine import EngineStatistics
from kvroute_engine.core.requests import FinishReason
from kvroute_engine.http.responses import ServedModel
from offload.cache_manager import CacheCounts

LABELS = ("model_name", "engine")

_FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_NEXT_TOKEN_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_BUCKETS = (
    *(0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class RequestMetrics:
    """Latencies of requests; a `LatencyObserver`."""

    def __init__(self, registry: CollectorRegistry, model_name: str, engine: str) -> None:
        """Register the metrics.

        Args:
            model_name: Value of the label of that name.
            engine: The data-parallel rank, value of the label of that name.
        """
        self._labels = (model_name, engine)
        first = Histogram(
            "vllm:time_to_first_token_seconds",
            "From arrival to the first token.",
            LABELS,
            registry=registry,
            buckets=_FIRST_TOKEN_BUCKETS,
        )
        following = Histogram(
            "vllm:inter_token_latency_seconds",
            "Between two tokens of a request.",
            LABELS,
            registry=registry,
            buckets=_NEXT_TOKEN_BUCKETS,
        )
        whole = Histogram(
            "vllm:e2e_request_latency_seconds",
            "From arrival to the end.",
            LABELS,
            registry=registry,
            buckets=_REQUEST_BUCKETS,
        )
        self._ended = Counter(
            "vllm:request_success",
            "Requests that ended, by reason.",
            (*LABELS, "finished_reason"),
            registry=registry,
        )
        self._first, self._following, self._whole = (
            metric.labels(*self._labels) for metric in (first, following, whole)
        )
        for reason in FinishReason:
            self._ended.labels(*self._labels, reason.value)

    def on_first_token(self, since_arrival_s: float) -> None:
        """See `LatencyObserver.on_first_token`."""
        self._first.observe(since_arrival_s)

    def on_next_tokens(self, gap_s: float, count: int) -> None:
        """Observe tokens that came together; each gets an equal share of the gap.

        Args:
            gap_s: Seconds since the request's tokens before these.
        """
        for _ in range(count):
            self._following.observe(gap_s / count)

    def on_end(self, since_arrival_s: float, reason: FinishReason) -> None:
        """Observe the end of a request."""
        self._whole.observe(since_arrival_s)
        self._ended.labels(*self._labels, reason.value).inc()


class EngineCollector(Collector):
    """The engine's own counts, read at each scrape."""

    def __init__(
        self, model: ServedModel, engine: str, read: Callable[[], EngineStatistics]
    ) -> None:
        """
        Args:
            engine: The data-parallel rank, for the label.
            read: Returns the counts; called on the thread that scrapes.
        """
        self._model = model
        self._labels = (model.name, engine)
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, as `prometheus_client` asks for them."""
        now = self._read()
        requests = now.scheduler
        yield self._gauge(
            "num_requests_running", "Requests that are being computed.", requests.num_running
        )
        yield self._gauge(
            "num_requests_waiting",
            "Requests that wait for blocks or for a load.",
            requests.num_waiting,
        )
        yield self._gauge(
            "kv_cache_usage_perc",
            "Share of the blocks that requests hold, 1 is all.",
            now.kv_cache_usage,
        )
        yield from self._cache_counters(now.cache.counts)
        yield self._counter(
            "num_preemptions",
            "Requests that lost their blocks and were computed again.",
            requests.preemptions,
        )
        yield self._counter(
            "prompt_tokens",
            "Prompt tokens of requests, cached ones included.",
            requests.prompt_tokens,
        )
        yield self._counter("generation_tokens", "Tokens generated.", requests.generation_tokens)
        yield self._cache_config()
        yield from self._groups(now)

    def _groups(self, now: EngineStatistics) -> Iterator[Metric]:
        """Yield metrics that vLLM lacks: the cache by KV cache group, and the reasons of
        evictions."""
        labels = (*LABELS, "group", "kind")
        cached = GaugeMetricFamily(
            "kvroute_engine_cached_blocks", "Blocks that can be found, on the GPU.", labels=labels
        )
        evicted = CounterMetricFamily(
            "kvroute_engine_evicted_blocks",
            "Blocks that cannot be found any more, by cause.",
            labels=(*labels, "cause"),
        )
        hits = CounterMetricFamily(
            "kvroute_engine_group_hit_tokens",
            "Prompt tokens that the group alone could have served.",
            labels=labels,
        )
        rows = zip(
            self._model.group_kinds,
            now.cache.pool.groups,
            now.scheduler.group_hit_tokens,
            strict=True,
        )
        for index, (kind, blocks, hit_tokens) in enumerate(rows):
            values = (*self._labels, str(index), kind)
            slid = blocks.evicted_after_sliding
            cached.add_metric(values, blocks.cached)
            evicted.add_metric((*values, "window"), slid)
            evicted.add_metric((*values, "pressure"), blocks.evicted - slid)
            hits.add_metric(values, hit_tokens)
        copies = GaugeMetricFamily(
            "kvroute_engine_copies_in_flight", "Jobs between GPU and lower tiers.", labels=LABELS
        )
        copies.add_metric(self._labels, now.copies_in_flight)
        yield from (cached, evicted, hits, copies)

    def _cache_counters(self, counts: CacheCounts) -> Iterator[Metric]:
        queries, hits = counts.queried_tokens, counts.hit_tokens
        yield self._counter(
            "prefix_cache_queries", "Prompt tokens looked up in the cache.", queries
        )
        yield self._counter("prefix_cache_hits", "Of these, tokens found.", hits)
        # Lower tiers are asked for tokens that were not found.
        yield self._counter(
            "external_prefix_cache_queries",
            "Prompt tokens looked up in lower tiers.",
            queries - hits,
        )
        yield self._counter(
            "external_prefix_cache_hits", "Of these, tokens found.", counts.external_tokens
        )

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        metric = GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS)
        metric.add_metric(self._labels, value)
        return metric

    def _counter(self, name: str, text: str, value: float) -> Metric:
        metric = CounterMetricFamily(f"vllm:{name}", text, labels=LABELS)
        metric.add_metric(self._labels, value)
        return metric

    def _cache_config(self) -> Metric:
        settings = {
            "block_size": str(self._model.block_size),
            "num_gpu_blocks": str(self._model.num_blocks),
            "enable_prefix_caching": str(self._model.enable_prefix_caching),
        }
        metric = GaugeMetricFamily(
            "vllm:cache_config_info", "The cache's configuration.", labels=(*LABELS, *settings)
        )
        metric.add_metric((*self._labels, *settings.values()), 1)
        return metric
