"""The metrics of several workers as one text."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from router.workers.exposition import joined


def counted(requests: int, trace: str) -> CollectorRegistry:
    registry = CollectorRegistry()
    Counter("requests", "Of one worker.", ["model"], registry=registry).labels("m").inc(requests)
    seconds = Histogram("seconds", "Of requests.", buckets=[1.0], registry=registry)
    seconds.observe(0.5, {"trace_id": trace})
    return registry


def test_every_series_is_there_once_for_each_worker() -> None:
    """Summed up, a restart of one would look like a reset of all."""
    texts = {number: generate_latest(counted(number + 1, "t")) for number in range(2)}
    samples = {
        (sample.name, sample.labels["worker"]): sample.value
        for family in text_string_to_metric_families(joined(texts).decode())
        for sample in family.samples
    }
    assert (samples["requests_total", "0"], samples["requests_total", "1"]) == (1, 2)
    assert samples["seconds_count", "1"] == 1


def test_exemplars_of_all_workers_are_kept() -> None:
    """And the text ends once, as OpenMetrics wants it."""
    texts = {number: generate_openmetrics(counted(1, f"trace-{number}")) for number in range(2)}
    text = joined(texts).decode()
    traces = {
        sample.labels["worker"]: sample.exemplar.labels["trace_id"]
        for family in read_openmetrics(text)
        for sample in family.samples
        if sample.exemplar is not None
    }
    assert traces == {"0": "trace-0", "1": "trace-1"}
    assert text.count("# EOF") == 1
