"""Every metric of the router, on a registry passed in. All names begin with `kvroute_`.

Counters and histograms are written as things happen. Everything else is collected at a scrape from
the statistics of the parts (`collector`): the event loop takes a snapshot of plain numbers, and a
thread turns it into text, so that no stream waits for a scrape. Label values are models and
replicas of the configuration or the registry, and words of this package; nothing a client sends
becomes a label.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import Metric

MAX_TIER_LABELS = 64
"""Names of tiers are the engines' own; the router must not keep every one that they make up."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_REQUEST_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1, 2.5, 5, 10, 30, 60, 120, 300, 600),
)
_ROUTING_SECONDS = (
    *(0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01),
    *(0.025, 0.05, 0.1, 0.25, 1),
)
_TOKENS = (0, 16, 64, 256, 1024, 4096, 16_384, 65_536)


class _Spec(NamedTuple):
    """A metric that is written as things happen."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: Sequence[float] = ()


# By the attributes of `RouterMetrics`.
_COUNTERS = {
    "requests": _Spec(
        "kvroute_requests",
        "Requests by the replica whose response was passed on (none: no replica responded) and "
        "the status sent.",
        ("model", "replica", "policy", "status"),
    ),
    "ends": _Spec("kvroute_request_ends", "Requests by the way they ended.", ("end",)),
    "retries": _Spec(
        "kvroute_retries",
        "Attempts that failed before a first byte, after which another one may follow.",
        ("replica", "reason"),
    ),
    "unretried": _Spec(
        "kvroute_unretried_requests",
        "Requests that failed and were not tried again, though there was a candidate: limit, "
        "budget or closed_replicas.",
        ("reason",),
    ),
    "predicted": _Spec(
        "kvroute_predicted_cached_tokens",
        "Prompt tokens predicted to be cached, over requests whose response reported the truth.",
        ("model", "replica"),
    ),
    "lower_tiers": _Spec(
        "kvroute_predicted_lower_tier_tokens",
        "Part of the predicted tokens that a lower tier or shared store has, over the same "
        "requests.",
        ("model", "tier"),
    ),
    "actual": _Spec(
        "kvroute_actual_cached_tokens",
        "Prompt tokens the engine reported as cached, over the same requests.",
        ("model", "replica"),
    ),
    "predictions": _Spec(
        "kvroute_predictions",
        "Predictions by outcome: exact, over (promised too much) or under.",
        ("model", "replica", "outcome"),
    ),
    "bad_requests": _Spec(
        "kvroute_rejected_requests",
        "Requests the router itself refused, by error code.",
        ("code",),
    ),
    "wrong_keys": _Spec(
        "kvroute_wrong_keys",
        "Requests with a key that is not the right one, by endpoint.",
        ("endpoint",),
    ),
    "report_modes": _Spec(
        "kvroute_stripped_report_modes",
        "Requests whose kv_cache_report_mode was taken out: it would spoil the engine's event "
        "counts.",
    ),
}
_HISTOGRAMS = {
    "first_byte": _Spec(
        "kvroute_time_to_first_byte_seconds",
        "From the request's arrival to the first byte of its response.",
        ("model", "replica"),
        _REQUEST_SECONDS,
    ),
    "total": _Spec(
        "kvroute_request_seconds",
        "From the request's arrival to its end.",
        ("model",),
        _REQUEST_SECONDS,
    ),
    "routing": _Spec(
        "kvroute_routing_seconds",
        "Time to decide: hashing, matching, ranking.",
        ("model",),
        _ROUTING_SECONDS,
    ),
    "tokenization": _Spec(
        "kvroute_tokenization_seconds",
        "Time from a parsed request to its token ids.",
        ("model",),
        _ROUTING_SECONDS,
    ),
    "prediction_error": _Spec(
        "kvroute_prediction_error_tokens",
        "Absolute difference of predicted and actual cached tokens.",
        ("model",),
        _TOKENS,
    ),
}


@dataclass(slots=True, eq=False)
class _Collected:
    """The metrics collected for the scrape in progress; a Prometheus collector."""

    metrics: Iterable[Metric] = ()

    def collect(self) -> Iterable[Metric]:
        return self.metrics


class RouterMetrics:
    """The metrics that are written as things happen, and the way to read all of them."""

    requests: Counter
    ends: Counter
    retries: Counter
    unretried: Counter
    predicted: Counter
    lower_tiers: Counter
    actual: Counter
    predictions: Counter
    bad_requests: Counter
    wrong_keys: Counter
    report_modes: Counter
    first_byte: Histogram
    total: Histogram
    routing: Histogram
    tokenization: Histogram
    prediction_error: Histogram

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._collected = _Collected()
        self._tiers: set[str] = set()
        registry.register(self._collected)
        for attribute, spec in _COUNTERS.items():
            counter = Counter(spec.name, spec.help, spec.labels, registry=registry)
            setattr(self, attribute, counter)
        for attribute, spec in _HISTOGRAMS.items():
            histogram = Histogram(
                spec.name, spec.help, spec.labels, buckets=spec.buckets, registry=registry
            )
            setattr(self, attribute, histogram)

    def decided(self, model: str, tokenization_s: float | None, routing_s: float) -> None:
        """Time a decision.

        Args:
            model: The model's name.
            tokenization_s: Until the token ids were known; None without a prompt.
            routing_s: From there to the ranking.
        """
        if tokenization_s is not None:
            self.tokenization.labels(model).observe(tokenization_s)
        self.routing.labels(model).observe(routing_s)

    def compare(
        self,
        model: str,
        replica: str,
        predicted: int,
        actual: int,
        by_tier: Iterable[tuple[str, int]] = (),
    ) -> None:
        """Compare a prediction with what the engine reported.

        Args:
            model: The model's name.
            replica: The replica that responded.
            predicted: Prompt tokens the router predicted to be cached there.
            actual: Prompt tokens the engine reported as cached.
            by_tier: Of those predicted, what each lower tier or shared store has.
        """
        for tier, tokens in by_tier:
            self.lower_tiers.labels(model, self._tier_label(tier)).inc(tokens)
        self.predicted.labels(model, replica).inc(predicted)
        self.actual.labels(model, replica).inc(actual)
        outcome = "exact" if predicted == actual else "over" if predicted > actual else "under"
        self.predictions.labels(model, replica, outcome).inc()
        self.prediction_error.labels(model).observe(abs(predicted - actual))

    def _tier_label(self, tier: str) -> str:
        """The tier's name, which an engine has chosen; one word for all that are too many."""
        if tier in self._tiers or len(self._tiers) < MAX_TIER_LABELS:
            self._tiers.add(tier)
            return tier
        return "other"

    def forget(self, label: str, value: str) -> None:
        """Drop every series of a replica or a model that is gone for good.

        Args:
            label: `replica` or `model`.
            value: The replica's id or the model's name.
        """
        for attribute, spec in (_COUNTERS | _HISTOGRAMS).items():
            if label in spec.labels:
                getattr(self, attribute).remove_by_labels({label: value})

    async def render(self, collected: Iterable[Metric]) -> bytes:
        """Render the whole registry and *collected* as text, iterating over both in a thread."""
        return await asyncio.to_thread(self._render, collected)

    def _render(self, collected: Iterable[Metric]) -> bytes:
        self._collected.metrics = tuple(collected)
        return generate_latest(self._registry)
