"""What OpenTelemetry's variables configure, and what happens when more is traced than sent."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping

import pytest
from prometheus_client import CollectorRegistry

from router.config.schema import RouterConfig
from router.config.server import TracingConfig
from router.errors import ConfigError
from router.serve.service import RouterService
from router.telemetry.metrics import RouterMetrics
from router.telemetry.otel import OtelTracing, make_tracing
from router.telemetry.spans import RequestTrace
from tests.support.otlp_collector import OtlpCollector, otlp_collector

ON = TracingConfig(enabled=True)


@pytest.fixture
def collector() -> Iterator[OtlpCollector]:
    with otlp_collector() as found:
        yield found


@pytest.fixture
def metrics() -> RouterMetrics:
    return RouterMetrics(CollectorRegistry())


def made(
    metrics: RouterMetrics, config: TracingConfig, environ: Mapping[str, str] | None = None
) -> OtelTracing:
    tracing = make_tracing(config, environ or {}, metrics.traces)
    assert tracing is not None
    return tracing


def ended(tracing: OtelTracing, count: int) -> list[RequestTrace]:
    traces = [tracing.tracer.begin(None, "POST", "/v1/completions", None) for _ in range(count)]
    for trace in traces:
        trace.end(200)
    return traces


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "'grpc'; the router sends http/protobuf only"),
        ({"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json"}, "'http/json'; the router sends"),
        ({"OTEL_BSP_MAX_QUEUE_SIZE": "many"}, "OTEL_BSP_MAX_QUEUE_SIZE: 'many'; must be a whole"),
        ({"OTEL_BSP_SCHEDULE_DELAY": "-1"}, "OTEL_BSP_SCHEDULE_DELAY: '-1'; must be a whole"),
    ],
)
def test_a_variable_that_cannot_be_followed_is_refused(
    metrics: RouterMetrics, environ: dict[str, str], said: str
) -> None:
    """At the start, where it is seen, rather than by spans that never arrive."""
    with pytest.raises(ConfigError, match=said):
        make_tracing(ON, environ, metrics.traces)


@pytest.mark.parametrize(
    "environ", [{"OTEL_SDK_DISABLED": "true"}, {"OTEL_TRACES_EXPORTER": "none"}]
)
def test_the_standard_switch_turns_it_off(metrics: RouterMetrics, environ: dict[str, str]) -> None:
    """For one process among many of one configuration."""
    assert make_tracing(ON, environ, metrics.traces) is None


def test_without_the_extra_the_router_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not start without traces that were asked for."""
    monkeypatch.setitem(sys.modules, "router.telemetry.otel", None)
    config = RouterConfig.from_yaml("observability: {tracing: {enabled: true}}", {})
    with pytest.raises(ConfigError, match=r"needs the extra otel: pip install '\.\[otel\]'"):
        RouterService(config)


def test_what_waits_for_the_collector_is_bounded_and_the_rest_counted(
    metrics: RouterMetrics, collector: OtlpCollector
) -> None:
    """A collector that is away must not fill the router's memory. What waits at its end is sent."""
    config = TracingConfig(enabled=True, endpoint=collector.url)
    tracing = made(metrics, config, {"OTEL_BSP_MAX_QUEUE_SIZE": "3"})
    traces = ended(tracing, 5)
    tracing.start()
    tracing.stop()
    assert {span.trace_id for span in collector.spans} == {each.trace_id for each in traces[:3]}
    assert metrics.traces.labels("dropped").value == 2
    assert metrics.traces.labels("exported").value == 3


def test_a_request_that_cannot_be_told_of_costs_no_other_its_trace(
    metrics: RouterMetrics, collector: OtlpCollector
) -> None:
    """It is counted, and the thread that sends goes on."""
    tracing = made(metrics, TracingConfig(enabled=True, endpoint=collector.url))
    traces = ended(tracing, 3)
    traces[1].trace_id = "no number"
    tracing.start()
    tracing.stop()
    assert {span.trace_id for span in collector.spans} == {traces[0].trace_id, traces[2].trace_id}
    assert metrics.traces.labels("failed").value == 1
    assert metrics.traces.labels("exported").value == 2


def test_a_share_of_new_traces_is_recorded(metrics: RouterMetrics) -> None:
    """None and all are exact; the rest is the SDK's."""
    for share in (0.0, 1.0):
        tracing = made(metrics, TracingConfig(enabled=True, sampled_share=share))
        trace = tracing.tracer.begin(None, "POST", "/v1/completions", None)
        assert trace.is_sampled is bool(share)
        assert trace.headers()[0][1].endswith(b"-01" if share else b"-00")


def test_the_environment_may_name_the_service(
    metrics: RouterMetrics, collector: OtlpCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two routers of one collector are told apart."""
    monkeypatch.setenv("OTEL_SERVICE_NAME", "router-of-team-a")
    tracing = made(metrics, TracingConfig(enabled=True, endpoint=collector.url + "/"))
    ended(tracing, 1)
    tracing.start()
    tracing.stop()
    assert collector.resources[0]["service.name"] == "router-of-team-a"
    assert collector.resources[0]["service.instance.id"]
