"""Metrics that are written as things happen: all there, and gone with what they are about."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily

from router.observability.metrics import RouterMetrics


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> RouterMetrics:
    return RouterMetrics(registry)


def test_every_declared_metric_exists_under_the_routers_prefix(metrics: RouterMetrics) -> None:
    """Attributes are declared for the type checker, and made from tables."""
    for attribute in RouterMetrics.__annotations__:
        (described,) = getattr(metrics, attribute).describe()
        assert described.name.startswith("kvroute_"), attribute


@pytest.mark.parametrize(("label", "value"), [("replica", "gone"), ("model", "retired")])
def test_what_is_gone_for_good_takes_its_series_with_it(
    metrics: RouterMetrics, registry: CollectorRegistry, label: str, value: str
) -> None:
    """A fleet that renames its pods with every update would grow the registry without bound."""
    for model in ("kept", "retired"):
        for replica in ("kept", "gone"):
            metrics.compare(model, replica, 64, 48)
            metrics.requests.labels(model, replica, "prefix", "200").inc()
            metrics.retries.labels(replica, "closed").inc()
            metrics.total.labels(model).observe(1.0)
    metrics.forget(label, value)
    found = [sample.labels for metric in registry.collect() for sample in metric.samples]
    assert value not in {labels.get(label) for labels in found}
    assert "kept" in {labels.get(label) for labels in found}


async def test_what_is_collected_is_rendered_with_what_was_written(metrics: RouterMetrics) -> None:
    """One scrape shows both."""
    metrics.ends.labels("completed").inc()
    text = await metrics.render([GaugeMetricFamily("kvroute_of_this_scrape", "Help.", value=7)])
    assert b'kvroute_request_ends_total{end="completed"} 1.0' in text
    assert b"kvroute_of_this_scrape 7.0" in text
    assert b"kvroute_of_this_scrape" not in await metrics.render([])
