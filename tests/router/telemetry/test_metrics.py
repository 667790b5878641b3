"""Metrics that are written as things happen: all there, and gone with what they are about."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily

from router.telemetry.metrics import MAX_TIER_LABELS, RouterMetrics


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
            served = metrics.served(model, replica)
            served.compare(64, 48)
            served.began(0.5)
            served.ended("prefix", 200, 1.0)
            metrics.retries.labels(replica, "closed").inc()
    metrics.forget(label, value)
    found = [sample.labels for metric in registry.collect() for sample in metric.samples]
    assert value not in {labels.get(label) for labels in found}
    assert "kept" in {labels.get(label) for labels in found}


def test_what_is_counted_after_a_replica_was_forgotten_is_seen(
    metrics: RouterMetrics, registry: CollectorRegistry
) -> None:
    """Series are looked up once for many requests: those of a replica that comes back under its
    name must not be the ones that went with it, and those of the others go on."""
    for replica in ("kept", "back"):
        metrics.served("m", replica).ended("prefix", 200, 1.0)
    metrics.forget("replica", "back")
    for replica, status in (("kept", 200), ("back", None)):
        metrics.served("m", replica).ended("prefix", status, 1.0)
    found = {
        (sample.labels["replica"], sample.labels["status"]): sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == "kvroute_requests_total"
    }
    assert found == {("kept", "200"): 2, ("back", "none"): 1}


def test_names_of_tiers_are_bounded(metrics: RouterMetrics, registry: CollectorRegistry) -> None:
    """An engine may call its tiers whatever it likes, and otherwise by a new name every time."""
    metrics.served("m", "r").compare(64, 48, [("CPU", 32), ("STORAGE", 16)])
    for number in range(100):
        metrics.served("m", "r").compare(64, 48, [(f"TIER {number}", 1), ("CPU", 1)])
    found = {
        sample.labels["tier"]: sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == "kvroute_predicted_lower_tier_tokens_total"
    }
    assert len(found) == MAX_TIER_LABELS + 1
    assert (found["CPU"], found["STORAGE"], found["other"]) == (132, 16, 102 - MAX_TIER_LABELS)


async def test_what_is_collected_is_rendered_with_what_was_written(metrics: RouterMetrics) -> None:
    """One scrape shows both."""
    metrics.ends.labels("completed").inc()
    text = await metrics.render([GaugeMetricFamily("kvroute_of_this_scrape", "Help.", value=7)])
    assert b'kvroute_request_ends_total{end="completed"} 1.0' in text
    assert b"kvroute_of_this_scrape 7.0" in text
    assert b"kvroute_of_this_scrape" not in await metrics.render([])
