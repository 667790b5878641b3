"""Every metric of the router, on a registry passed in. All names begin with `kvroute_`.

Counters and histograms are written as things happen. Everything else is collected at a scrape from
the statistics of the parts (`collector`): the event loop takes a snapshot of plain numbers, and a
thread turns it into text, so that no stream waits for a scrape. Label values are models and
replicas of the configuration or the registry, and words of this package; nothing a client sends
becomes a label.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, Generic, TypeVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics_text
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

from kvevents.field_docs import Exported, MetricKind, counter, histogram, metrics_of
from router.telemetry.request_log import outcome
from router.telemetry.settled import Comparisons, Distribution, RequestSum

REMOVED = "removed"
"""In place of a replica or a model that is gone by the end of a request."""
MAX_TIER_LABELS = 64
"""The most tier names: engines choose them, and the router must not keep every one."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_NAME = "application/openmetrics-text"
OPENMETRICS_TYPE = f"{OPENMETRICS_NAME}; version=1.0.0; charset=utf-8"

_REQUEST_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1, 2.5, 5, 10, 30, 60, 120, 300, 600),
)
_ROUTING_SECONDS = (
    *(0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01),
    *(0.025, 0.05, 0.1, 0.25, 1),
)
_TOKENS = (0, 16, 64, 256, 1024, 4096, 16_384, 65_536)


@dataclass(slots=True, eq=False)
class CounterSeries:
    """One counter."""

    value: int = 0

    def inc(self, amount: int = 1) -> None:
        self.value += amount


@dataclass(slots=True, eq=False)
class HistogramSeries:
    """One histogram."""

    _bounds: Sequence[float]
    total: float = 0.0
    exemplars: dict[int, Exemplar] = field(default_factory=dict)
    """The last value with a recorded trace, by bucket."""
    counts: list[int] = field(init=False)
    """Counts by bucket, each without those below it; the last one is above all bounds."""

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self._bounds) + 1)

    def observe(self, value: float, trace_id: str | None = None) -> None:
        """Count *value* into its bucket.

        Args:
            trace_id: The recorded trace that shows why; None without one.
        """
        bucket = bisect_left(self._bounds, value)
        self.counts[bucket] += 1
        self.total += value
        if trace_id is not None:
            self.exemplars[bucket] = Exemplar({"trace_id": trace_id}, value, time.time())

    def add(self, values: Distribution) -> None:
        for bucket, count in enumerate(values.counts):
            self.counts[bucket] += count
        self.total += values.total


_Series = TypeVar("_Series", CounterSeries, HistogramSeries)


class _Written(Generic[_Series]):
    """A metric that is written as things happen: its series by the values of its labels.

    prometheus_client's own take a lock and check their labels each time, which was 16 µs a request.
    Here only the event loop writes; a scrape's thread reads whole numbers.
    """

    def __init__(self, spec: Exported) -> None:
        self._spec = spec
        self._by_labels: dict[tuple[str, ...], _Series] = {}
        if not spec.labels:
            self.labels()

    def labels(self, *values: str) -> _Series:
        """The series of these labels, in the order in which they are declared."""
        found = self._by_labels.get(values)
        if found is None:
            assert len(values) == len(self._spec.labels)
            found = self._by_labels[values] = self._series()
        return found

    def series(self) -> Iterable[tuple[tuple[str, ...], _Series]]:
        """Every series, by the values of its labels; to be read at once and not kept."""
        return self._by_labels.items()

    @property
    def buckets(self) -> Sequence[float]:
        """Upper bounds of a histogram's buckets, all but the last."""
        return self._spec.buckets

    def forget(self, label: str, value: str) -> None:
        """Drop every series with this value of a label."""
        if label in self._spec.labels:
            place = self._spec.labels.index(label)
            for values in [values for values in self._by_labels if values[place] == value]:
                del self._by_labels[values]

    def describe(self) -> Iterator[Metric]:
        """The metric without its series, as the registry asks for it."""
        yield self._family()

    def _series(self) -> _Series:
        raise NotImplementedError

    def _family(self) -> Metric:
        raise NotImplementedError


class WrittenCounter(_Written[CounterSeries]):
    """A counter by labels; a Prometheus collector."""

    def collect(self) -> Iterator[Metric]:
        family = self._family()
        for values, series in list(self._by_labels.items()):
            family.add_metric(values, series.value)
        yield family

    def _series(self) -> CounterSeries:
        return CounterSeries()

    def _family(self) -> CounterMetricFamily:
        return CounterMetricFamily(self._spec.name, self._spec.help, labels=self._spec.labels)


class WrittenHistogram(_Written[HistogramSeries]):
    """A histogram by labels; a Prometheus collector."""

    def collect(self) -> Iterator[Metric]:
        family = self._family()
        bounds = [*map(floatToGoString, self._spec.buckets), "+Inf"]
        for values, series in list(self._by_labels.items()):
            counts = enumerate(accumulate(list(series.counts)))
            shown: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
            for bound, (bucket, count) in zip(bounds, counts, strict=True):
                exemplar = series.exemplars.get(bucket)
                shown.append((bound, count) if exemplar is None else (bound, count, exemplar))
            family.add_metric(values, shown, series.total)
        yield family

    def _series(self) -> HistogramSeries:
        return HistogramSeries(self._spec.buckets)

    def _family(self) -> HistogramMetricFamily:
        return HistogramMetricFamily(self._spec.name, self._spec.help, labels=self._spec.labels)


@dataclass(slots=True, eq=False)
class _Collected:
    """The metrics collected for the scrape in progress; a Prometheus collector."""

    metrics: Iterable[Metric] = ()

    def collect(self) -> Iterable[Metric]:
        return self.metrics


class RouterMetrics:
    """The metrics that are written as things happen, and the way to read all of them."""

    requests: Annotated[
        WrittenCounter, counter("kvroute_requests", "model", "replica", "policy", "status")
    ]
    """Proxied requests that ended, by the replica whose response was passed on (`none`: no
    replica's; `removed`: a replica removed meanwhile, as a model that none serves any more) and the
    status sent."""
    ends: Annotated[WrittenCounter, counter("kvroute_request_ends", "end")]
    """Proxied requests by how they ended: `completed`, `client_left`, `client_stalled`,
    `replica_died`, `no_replica`, `overloaded`, `abandoned`."""
    retries: Annotated[WrittenCounter, counter("kvroute_retries", "replica", "reason")]
    """Attempts that failed at this replica before a first byte; the next replica is tried, if there
    is one and `server.retries` allows it. `kept_closed`: a kept connection was closed, the same
    replica is tried again; `unhealthy`: its checks failed while the request waited; `late`: a
    second replica was faster."""
    unretried: Annotated[WrittenCounter, counter("kvroute_unretried_requests", "reason")]
    """Requests that failed and were not tried again, though there was a candidate: `limit`,
    `budget`, `closed_replicas`."""
    second_attempts: Annotated[WrittenCounter, counter("kvroute_second_attempts", "outcome")]
    """Streams whose first byte was late, and that were sent to a second replica as well (`begun`):
    it was the first to respond (`won`), or could not serve (`failed`). `not_allowed`: the share was
    used up, or first bytes were late there too."""
    prefills: Annotated[
        WrittenCounter, counter("kvroute_requests_prefilled_elsewhere", "model", "replica")
    ]
    """Requests whose prompt another replica than theirs is asked to compute, by that one."""
    predicted: Annotated[
        WrittenCounter, counter("kvroute_predicted_cached_tokens", "model", "replica")
    ]
    """Prompt tokens predicted to be cached, over responses that reported `cached_tokens`."""
    lower_tiers: Annotated[
        WrittenCounter, counter("kvroute_predicted_lower_tier_tokens", "model", "tier")
    ]
    """Part of the predicted tokens that a lower tier or shared store has; `other` from the 65th
    name on."""
    compared: Annotated[
        WrittenCounter, counter("kvroute_compared_prompt_tokens", "model", "replica")
    ]
    """Prompt tokens of the requests whose responses reported `cached_tokens`: what they reused is
    `kvroute_actual_cached_tokens_total` of it."""
    actual: Annotated[WrittenCounter, counter("kvroute_actual_cached_tokens", "model", "replica")]
    """Prompt tokens that the engine reported as cached."""
    predictions: Annotated[
        WrittenCounter, counter("kvroute_predictions", "model", "replica", "outcome")
    ]
    """Predictions of cached tokens by outcome: `exact`, `over` (predicted too much), `under`; of
    responses that reported `cached_tokens`."""
    expected: Annotated[
        WrittenCounter, counter("kvroute_expected_cached_tokens", "model", "replica")
    ]
    """Prompt tokens predicted to be cached when the engine admits the request, over responses that
    reported `cached_tokens`."""
    expectations: Annotated[
        WrittenCounter, counter("kvroute_admission_predictions", "model", "replica", "outcome")
    ]
    """Predictions by outcome, of what is cached when the engine admits the request: those ahead of
    it store their prompts and evict others."""
    approximate: Annotated[
        WrittenCounter, counter("kvroute_approximate_predictions", "model", "replica", "outcome")
    ]
    """Estimates for caches without events by outcome: `near` (within 64 tokens), `over`, `under`.
    They are in none of the other counts."""
    approximate_predicted: Annotated[
        WrittenCounter, counter("kvroute_approximate_predicted_cached_tokens", "model", "replica")
    ]
    """Prompt tokens estimated to be cached, over responses that reported `cached_tokens`, at caches
    without events."""
    approximate_actual: Annotated[
        WrittenCounter, counter("kvroute_approximate_actual_cached_tokens", "model", "replica")
    ]
    """Prompt tokens that the engine reported as cached, at caches without events."""
    versions: Annotated[WrittenCounter, counter("kvroute_versioned_requests", "requested", "model")]
    """Requests for a name that stands for several models (`versioned_models`), by that name and the
    model that was chosen."""
    bad_requests: Annotated[WrittenCounter, counter("kvroute_rejected_requests", "code")]
    """Requests that the router itself refused, by the error's code; broken connections are
    `malformed_http`, `headers_too_large`, `bad_host`, `unknown_transfer_coding`,
    `too_many_pipelined`, `slow_request`, `response_not_read`, `client_gone`, `not_tls`,
    `tls_handshake_failed`."""
    wrong_keys: Annotated[WrittenCounter, counter("kvroute_wrong_keys", "endpoint")]
    """Requests with a key that is not the right one, by endpoint; those without a key do not
    count."""
    reloads: Annotated[WrittenCounter, counter("kvroute_config_reloads", "result")]
    """Times the configuration was read again: `taken`, `refused`."""
    queue_refusals: Annotated[
        WrittenCounter, counter("kvroute_queue_refusals", "model", "priority", "reason")
    ]
    """Requests that got no turn at a replica: `full`, `late` (refused at once: by the estimate they
    would wait too long), `timeout` (they did), `client_left`, `gone` (no replica serves the model
    any more)."""
    traces: Annotated[WrittenCounter, counter("kvroute_traces", "result")]
    """Traced requests, by what became of their spans: `exported`, `failed` (the collector did not
    take them), `dropped` (too many waited: `OTEL_BSP_MAX_QUEUE_SIZE`)."""
    report_modes: Annotated[WrittenCounter, counter("kvroute_stripped_report_modes")]
    """Requests whose `kv_cache_report_mode` was removed: it would spoil the engine's event
    counts."""
    first_byte: Annotated[
        WrittenHistogram,
        histogram(
            "kvroute_time_to_first_byte_seconds", "model", "replica", buckets=_REQUEST_SECONDS
        ),
    ]
    """From the request's arrival to the first byte of its response."""
    total: Annotated[
        WrittenHistogram, histogram("kvroute_request_seconds", "model", buckets=_REQUEST_SECONDS)
    ]
    """From the request's arrival to its end."""
    routing: Annotated[
        WrittenHistogram, histogram("kvroute_routing_seconds", "model", buckets=_ROUTING_SECONDS)
    ]
    """Time to decide: hashing, matching, ranking."""
    tokenization: Annotated[
        WrittenHistogram,
        histogram("kvroute_tokenization_seconds", "model", buckets=_ROUTING_SECONDS),
    ]
    """From a parsed request to its token ids."""
    queue_wait: Annotated[
        WrittenHistogram,
        histogram("kvroute_queue_wait_seconds", "model", "priority", buckets=_REQUEST_SECONDS),
    ]
    """How long requests waited for room at a replica before they were sent; 0 for those that did
    not."""
    prediction_error: Annotated[
        WrittenHistogram, histogram("kvroute_prediction_error_tokens", "model", buckets=_TOKENS)
    ]
    """Absolute difference of predicted and reported cached tokens."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._collected = _Collected()
        self._tiers: set[str] = set()
        self._served: dict[tuple[str, str], ServedMetrics] = {}
        self.knows_model: Callable[[str], bool] = lambda _: True
        """Returns whether a model is still served, or configured: requests may outlive theirs, and
        its series must not come back."""
        registry.register(self._collected)
        for field_name, spec in metrics_of(RouterMetrics).items():
            is_histogram = spec.kind is MetricKind.HISTOGRAM
            written = WrittenHistogram(spec) if is_histogram else WrittenCounter(spec)
            setattr(self, field_name, written)
            registry.register(written)

    def decided(self, model: str, tokenization_s: float | None, routing_s: float) -> None:
        """Time a decision.

        Args:
            tokenization_s: Until the token ids were known; None without a prompt.
        """
        model = self.label_of(model)
        if tokenization_s is not None:
            self.tokenization.labels(model).observe(tokenization_s)
        self.routing.labels(model).observe(routing_s)

    def served(self, model: str, replica: str) -> ServedMetrics:
        """Return the counters of a replica's requests; call it each time, do not keep it.

        Args:
            replica: The replica that responded, or a word for none.
        """
        model = self.label_of(model)
        found = self._served.get((model, replica))
        if found is None:
            found = self._served[model, replica] = ServedMetrics(self, model, replica)
        return found

    def label_of(self, model: str) -> str:
        """Return the model's name; a word for one that is gone."""
        return model if self.knows_model(model) else REMOVED

    def tier_label(self, tier: str) -> str:
        """Return the tier's name, which an engine has chosen; one name for all beyond the limit."""
        if tier in self._tiers or len(self._tiers) < MAX_TIER_LABELS:
            self._tiers.add(tier)
            return tier
        return "other"

    def forget(self, label: str, value: str) -> None:
        """Drop every series of a replica or a model that is gone for good.

        Args:
            label: `replica` or `model`.
        """
        self._served.clear()
        for name in metrics_of(RouterMetrics):
            getattr(self, name).forget(label, value)

    def families(self) -> Iterable[Metric]:
        """Every metric as it was rendered last: its name, help, labels and series."""
        return self._registry.collect()

    async def render(self, collected: Iterable[Metric], has_exemplars: bool = False) -> bytes:
        """Render the whole registry and *collected*, iterating over both in a thread.

        Args:
            has_exemplars: True for OpenMetrics, which has room for them; else Prometheus' text.
        """
        return await asyncio.to_thread(self._render, collected, has_exemplars)

    def _render(self, collected: Iterable[Metric], has_exemplars: bool) -> bytes:
        self._collected.metrics = tuple(collected)
        return (openmetrics_text if has_exemplars else generate_latest)(self._registry)


@dataclass(slots=True, eq=False)
class ServedMetrics:
    """Counts the requests that one replica served for one model. Each series is looked up once,
    when it is first needed: before that it would stand in `/metrics` as a zero."""

    _metrics: RouterMetrics
    _model: str
    _replica: str
    _first_byte: HistogramSeries | None = None
    _total: HistogramSeries | None = None
    _requests: dict[tuple[str, int | None], CounterSeries] = field(default_factory=dict)
    _compared: tuple[CounterSeries, CounterSeries, CounterSeries, HistogramSeries] | None = None

    def began(self, seconds: float, trace_id: str | None = None) -> None:
        """A response has begun.

        Args:
            seconds: After its request arrived.
        """
        if self._first_byte is None:
            self._first_byte = self._metrics.first_byte.labels(self._model, self._replica)
        self._first_byte.observe(seconds, trace_id)

    def ended(
        self, policy: str, status: int | None, seconds: float, trace_id: str | None = None
    ) -> None:
        """A request has ended.

        Args:
            status: Sent to the client; None if it left before there was one.
            seconds: Since it arrived.
        """
        series = self._requests.get((policy, status))
        if series is None:
            labels = self._model, self._replica, policy, str(status or "none")
            series = self._requests[policy, status] = self._metrics.requests.labels(*labels)
        series.inc()
        if self._total is None:
            self._total = self._metrics.total.labels(self._model)
        self._total.observe(seconds, trace_id)

    def compare(
        self,
        predicted: int,
        actual: int,
        by_tier: Iterable[tuple[str, int]] = (),
        prompt_tokens: int = 0,
    ) -> None:
        """Compare a prediction with the engine's report.

        Args:
            predicted: Prompt tokens the router predicted to be cached there.
            actual: Prompt tokens the engine reported as cached.
            by_tier: The part of the prediction in each lower tier or shared store.
        """
        metrics, model, replica = self._metrics, self._model, self._replica
        for tier, tokens in by_tier:
            metrics.lower_tiers.labels(model, metrics.tier_label(tier)).inc(tokens)
        if self._compared is None:
            self._compared = (
                metrics.predicted.labels(model, replica),
                metrics.actual.labels(model, replica),
                metrics.compared.labels(model, replica),
                metrics.prediction_error.labels(model),
            )
        predicted_tokens, actual_tokens, prompts, errors = self._compared
        prompts.inc(prompt_tokens)
        predicted_tokens.inc(predicted)
        actual_tokens.inc(actual)
        errors.observe(abs(predicted - actual))
        metrics.predictions.labels(model, replica, outcome(predicted, actual)).inc()

    def compare_expected(self, expected: int, actual: int) -> None:
        """Compare a prediction for the moment of admission with the engine's report.

        Args:
            expected: Prompt tokens that were to be cached there by then.
        """
        metrics, model, replica = self._metrics, self._model, self._replica
        metrics.expected.labels(model, replica).inc(expected)
        metrics.expectations.labels(model, replica, outcome(expected, actual)).inc()

    def add(self, summed: RequestSum, policy: str) -> None:
        """Count requests that were served whole.

        Args:
            summed: Of this model and, unless the replica was removed, of this replica.
        """
        metrics, model, replica = self._metrics, self._model, self._replica
        metrics.routing.labels(model).add(summed.routing_s)
        metrics.total.labels(model).add(summed.seconds)
        metrics.requests.labels(model, replica, policy, "200").inc(summed.requests)

    def add_compared(self, found: Comparisons) -> None:
        metrics, model, replica = self._metrics, self._model, self._replica
        metrics.compared.labels(model, replica).inc(found.prompt_tokens)
        metrics.actual.labels(model, replica).inc(found.actual_tokens)
        metrics.predicted.labels(model, replica).inc(found.at_decision.predicted_tokens)
        metrics.expected.labels(model, replica).inc(found.at_admission.predicted_tokens)
        metrics.prediction_error.labels(model).add(found.error_tokens)
        for series, verdicts in (
            (metrics.predictions, found.at_decision),
            (metrics.expectations, found.at_admission),
        ):
            for name, count in zip(("exact", "over", "under"), verdicts[1:], strict=True):
                if count:
                    series.labels(model, replica, name).inc(count)

    def compare_approximate(self, estimated: int, actual: int) -> None:
        """Compare an estimate with the engine's report.

        Args:
            estimated: Prompt tokens that may have been cached there.
        """
        metrics, model, replica = self._metrics, self._model, self._replica
        metrics.approximate_predicted.labels(model, replica).inc(estimated)
        metrics.approximate_actual.labels(model, replica).inc(actual)
        metrics.approximate.labels(model, replica, outcome(estimated, actual, True)).inc()
