"""Every metric of the router, on a registry passed in. All names begin with `kvroute_`.

Counters and histograms are written as things happen. Gauges are read at a scrape, from the
statistics of the parts: the event loop takes a snapshot of plain numbers, and a thread turns it
into text, so that no stream waits for a scrape. Labels are models and replicas of the configuration
or the registry, and words of this file; nothing a client sends becomes a label.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

_Key = TypeVar("_Key", bound=tuple[str, ...])

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
    60,
    120,
    300,
    600,
)
_ROUTING_SECONDS = (
    0.00005,
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    1,
)
_TOKENS = (0, 16, 64, 256, 1024, 4096, 16_384, 65_536)


class Sample(NamedTuple):
    """One value of a gauge, or of a counter that another part keeps."""

    labels: tuple[str, ...]
    value: float


@dataclass(frozen=True, slots=True)
class Family:
    """A metric that is read at a scrape."""

    name: str
    help: str
    labels: tuple[str, ...]
    samples: Sequence[Sample]
    is_counter: bool = False


@dataclass(slots=True, eq=False)
class _Snapshot:
    """What the last scrape found; the collector reads it in a thread while the loop goes on."""

    families: Sequence[Family] = field(default_factory=tuple)

    def collect(self) -> Iterator[Metric]:
        for family in self.families:
            kind = CounterMetricFamily if family.is_counter else GaugeMetricFamily
            metric = kind(family.name, family.help, labels=family.labels)
            for labels, value in family.samples:
                metric.add_metric(labels, value)
            yield metric


class RouterMetrics:
    """The metrics that are written as things happen, and the way to read all of them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._snapshot = _Snapshot()
        registry.register(self._snapshot)
        self.requests = Counter(
            "kvroute_requests",
            "Requests by the replica whose answer was passed on (none: no replica answered) and the status sent.",
            ("model", "replica", "policy", "status"),
            registry=registry,
        )
        self.ends = Counter(
            "kvroute_request_ends", "Requests by the way they ended.", ("end",), registry=registry
        )
        self.first_byte = Histogram(
            "kvroute_time_to_first_byte_seconds",
            "From the request's arrival to the first byte of its answer.",
            ("model", "replica"),
            buckets=_SECONDS,
            registry=registry,
        )
        self.total = Histogram(
            "kvroute_request_seconds",
            "From the request's arrival to its end.",
            ("model",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.routing = Histogram(
            "kvroute_routing_seconds",
            "Time to decide: hashing, matching, ranking.",
            ("model",),
            buckets=_ROUTING_SECONDS,
            registry=registry,
        )
        self.tokenization = Histogram(
            "kvroute_tokenization_seconds",
            "Time from a parsed request to its token ids.",
            ("model",),
            buckets=_ROUTING_SECONDS,
            registry=registry,
        )
        self.retries = Counter(
            "kvroute_retries",
            "Attempts that failed and went to the next replica.",
            ("replica", "reason"),
            registry=registry,
        )
        self.predicted = Counter(
            "kvroute_predicted_cached_tokens",
            "Prompt tokens predicted to be cached, over requests whose answer told the truth.",
            ("model", "replica"),
            registry=registry,
        )
        self.actual = Counter(
            "kvroute_actual_cached_tokens",
            "Prompt tokens the engine reported as cached, over the same requests.",
            ("model", "replica"),
            registry=registry,
        )
        self.predictions = Counter(
            "kvroute_predictions",
            "Predictions by outcome: exact, over (promised too much) or under.",
            ("model", "replica", "outcome"),
            registry=registry,
        )
        self.prediction_error = Histogram(
            "kvroute_prediction_error_tokens",
            "Absolute difference of predicted and actual cached tokens.",
            ("model",),
            buckets=_TOKENS,
            registry=registry,
        )
        self.bad_requests = Counter(
            "kvroute_rejected_requests",
            "Requests the router itself refused, by error code.",
            ("code",),
            registry=registry,
        )
        self.report_modes = Counter(
            "kvroute_stripped_report_modes",
            "Requests whose kv_cache_report_mode was taken out, which would spoil the engine's event counts.",
            registry=registry,
        )

    def compare(self, model: str, replica: str, predicted: int, actual: int) -> None:
        """Hold a prediction against what the engine reported, in tokens."""
        self.predicted.labels(model, replica).inc(predicted)
        self.actual.labels(model, replica).inc(actual)
        outcome = "exact" if predicted == actual else "over" if predicted > actual else "under"
        self.predictions.labels(model, replica, outcome).inc()
        self.prediction_error.labels(model).observe(abs(predicted - actual))

    def forget(self, label: str, value: str) -> None:
        """Drop every series with this label: of a replica, or a model, that is gone for good."""
        for metric in (
            metric for metric in vars(self).values() if isinstance(metric, (Counter, Histogram))
        ):
            if label not in metric._labelnames:
                continue
            place = metric._labelnames.index(label)
            for labels in [labels for labels in metric._metrics if labels[place] == value]:
                metric.remove(*labels)

    async def render(self, families: Iterable[Family]) -> bytes:
        """The whole registry as text, with *families*, which a thread goes through."""
        return await asyncio.to_thread(self._render, families)

    def _render(self, families: Iterable[Family]) -> bytes:
        self._snapshot.families = tuple(families)
        return generate_latest(self._registry)


def gauge(
    name: str, help_text: str, labels: tuple[str, ...], values: Mapping[_Key, float]
) -> Family:
    """A gauge from values by label."""
    return Family(name, help_text, labels, [Sample(key, value) for key, value in values.items()])


def counter(
    name: str, help_text: str, labels: tuple[str, ...], values: Mapping[_Key, float]
) -> Family:
    """A counter that another part keeps, from values by label."""
    return Family(
        name,
        help_text,
        labels,
        [Sample(key, value) for key, value in values.items()],
        is_counter=True,
    )
