"""Traces of a real router, received by a collector that decodes what was sent."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.support.engine_stub import engines, hang_up, prompt_ids, streaming, unique
from tests.support.hybrid_stub import HybridStub
from tests.support.otlp_collector import OtlpCollector, ReceivedSpan, otlp_collector
from tests.support.router_process import QUICK_HEALTH, RouterProcess, router_process

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SERVER, CLIENT, INTERNAL = 2, 3, 1
SOON = {"OTEL_BSP_SCHEDULE_DELAY": "50"}
TRACED = {"health": QUICK_HEALTH, "observability": {"tracing": {"enabled": True}}}


@pytest.fixture(scope="module")
def collector() -> Iterator[OtlpCollector]:
    with otlp_collector() as found:
        yield found


@pytest.fixture(scope="module")
def router(collector: OtlpCollector) -> Iterator[RouterProcess]:
    environ = {
        **SOON,
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        "OTEL_EXPORTER_OTLP_HEADERS": "api-key=of-the-collector",
        "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test",
    }
    with router_process(TRACED, environ) as process:
        yield process


def parent_of(trace: str) -> str:
    return f"00-{trace}-{SPAN}-01"


def by_name(spans: list[ReceivedSpan]) -> dict[str, ReceivedSpan]:
    assert len({span.name for span in spans}) == len(spans), [span.name for span in spans]
    return {span.name: span for span in spans}


async def received(collector: OtlpCollector, trace: str) -> list[ReceivedSpan]:
    return await asyncio.to_thread(collector.trace, trace)


async def test_a_request_has_a_span_with_a_child_for_each_part(
    router: RouterProcess, collector: OtlpCollector
) -> None:
    """It joins the client's trace, and the engine joins the span of its attempt."""
    async with HybridStub(unique("model")) as stub, router.serving(stub):
        ids = prompt_ids(80, 71)
        stub.store(ids)
        await router.until_applied(stub)
        headers = {"traceparent": parent_of(TRACE), "tracestate": "a=1", "x-request-id": "mine"}
        body = {"model": stub.model, "prompt": ids}
        assert (await router.post("/v1/completions", body, headers)).status == 200
        spans = by_name(await received(collector, TRACE))
        sent = stub.requests[-1].headers
        assert stub.requests[-1].names.count("traceparent") == 1
    names = "tokenise", "route", f"attempt {stub.name}", "first byte", "response"
    assert spans.keys() == {"POST /v1/completions", *names}
    root, attempt = spans["POST /v1/completions"], spans[f"attempt {stub.name}"]
    assert (root.kind, root.parent_id, root.is_error) == (SERVER, SPAN, False)
    assert (attempt.kind, attempt.parent_id) == (CLIENT, root.span_id)
    assert {spans[name].parent_id for name in ("tokenise", "route")} == {root.span_id}
    assert {spans[name].parent_id for name in ("first byte", "response")} == {attempt.span_id}
    assert sent["traceparent"] == f"00-{TRACE}-{attempt.span_id}-01"
    assert sent["tracestate"] == "a=1"
    in_order = ["tokenise", "route", f"attempt {stub.name}", "first byte", "response"]
    began = [spans[name].began for name in in_order]
    assert began == sorted(began)
    assert all(root.began <= span.began <= span.ended <= root.ended for span in spans.values())
    assert spans["first byte"].ended == spans["response"].began


async def test_spans_speak_the_conventions_and_no_prompt(
    router: RouterProcess, collector: OtlpCollector
) -> None:
    """Whoever has a dashboard for language models sees this router on it."""
    trace = "1" * 32
    async with HybridStub(unique("model")) as stub, router.serving(stub):
        ids = prompt_ids(80, 4711)
        stub.store(ids)
        await router.until_applied(stub)
        body = {"model": stub.model, "prompt": ids, "user": "prompt-sentinel"}
        await router.post("/v1/completions", body, {"traceparent": parent_of(trace)})
        spans = by_name(await received(collector, trace))
    said = spans["POST /v1/completions"].attributes
    assert said["gen_ai.operation.name"] == "text_completion"
    assert said["gen_ai.request.model"] == stub.model
    assert said["gen_ai.request.stream"] is False
    assert said["gen_ai.usage.input_tokens"] == said["kvroute.prompt_tokens"] == 80
    assert said["gen_ai.usage.cache_read.input_tokens"] == said["kvroute.predicted_tokens"] > 0
    assert said["http.response.status_code"] == 200
    assert said["kvroute.replica"] == stub.name
    attempt = spans[f"attempt {stub.name}"].attributes
    assert (attempt["server.address"], attempt["server.port"]) == ("127.0.0.1", stub.port)
    assert attempt["kvroute.predicted_tokens"] == said["kvroute.predicted_tokens"]
    assert collector.resources[-1]["service.name"] == "kvroute"
    assert collector.resources[-1]["deployment.environment.name"] == "test"
    assert collector.headers[-1]["api-key"] == "of-the-collector"
    everything = b"".join(collector.raw)
    assert b"prompt-sentinel" not in everything
    assert b"4711" not in everything


async def test_a_failed_attempt_and_the_one_after_it_are_two_spans(
    router: RouterProcess, collector: OtlpCollector
) -> None:
    """Each engine knows its own; the first has the reason."""
    trace = "2" * 32
    async with engines(2) as (first, second), router.serving(first, second):
        first.behaviour = second.behaviour = hang_up
        body = {"model": first.model, "prompt": [1, 2, 3]}
        refused = await router.post("/v1/completions", body, {"traceparent": parent_of(trace)})
        spans = await received(collector, trace)
        told = {stub.requests[-1].headers["traceparent"].split("-")[2] for stub in (first, second)}
    attempts = [span for span in spans if span.kind == CLIENT]
    assert {span.span_id for span in attempts} == told
    assert {span.attributes["error.type"] for span in attempts} <= {"closed", "kept_closed"}
    assert all(span.is_error for span in attempts)
    (root,) = [span for span in spans if span.kind == SERVER]
    assert refused.status == root.attributes["http.response.status_code"] == 502
    assert (root.is_error, root.attributes["error.type"]) == (True, "no_replica")
    assert "response" not in {span.name for span in spans}


async def test_a_request_without_a_trace_gets_one_that_its_log_line_names(
    router: RouterProcess, collector: OtlpCollector
) -> None:
    """From a slow request in the log to its spans. Its own refusals are traced as well."""
    async with engines(1) as (stub,), router.serving(stub):
        stub.behaviour = streaming(3)
        body = {"model": stub.model, "prompt": [5, 6], "stream": True}
        await router.post("/v1/completions", body, {"x-request-id": "traced"})
        (logged,) = [
            each
            for each in (await router.get("/requests")).json["requests"]
            if each["request_id"] == "traced"
        ]
        spans = by_name(await received(collector, logged["trace_id"]))
        assert spans["POST /v1/completions"].parent_id == ""
        trace = "3" * 32
        await router.post(
            "/v1/completions", {"model": "?", "prompt": [1]}, {"traceparent": parent_of(trace)}
        )
        (refused,) = await received(collector, trace)
    assert refused.attributes["http.response.status_code"] == 404
    assert refused.attributes["error.type"] == "model_not_found"
    assert not refused.is_error, "it is the client's"


async def test_what_the_client_does_not_record_is_not_recorded_here(
    router: RouterProcess, collector: OtlpCollector
) -> None:
    """A sender that samples decides for everyone behind it; the engine hears of it."""
    trace, later = "4" * 32, "5" * 32
    async with engines(1) as (stub,), router.serving(stub):
        body = {"model": stub.model, "prompt": [1]}
        for each, flags in ((trace, "00"), (later, "01")):
            parent = f"00-{each}-{SPAN}-{flags}"
            await router.post("/v1/completions", body, {"traceparent": parent})
        await received(collector, later)
        told = stub.requests[0].headers["traceparent"]
    assert not [span for span in collector.spans if span.trace_id == trace]
    assert told.startswith(f"00-{trace}-")
    assert told.endswith("-00")


async def test_a_slow_bucket_names_a_trace_that_was_in_it(router: RouterProcess) -> None:
    """From a dashboard's heat map to the spans of one of its requests; only recorded ones are
    there. Whoever does not ask for OpenMetrics gets the text as before."""
    async with engines(1) as (stub,), router.serving(stub):
        for trace, flags in (("6" * 32, "01"), ("7" * 32, "00")):
            parent = f"00-{trace}-{SPAN}-{flags}"
            body = {"model": stub.model, "prompt": [1]}
            await router.post("/v1/completions", body, {"traceparent": parent})
        found = await router.get("/metrics", {"accept": "application/openmetrics-text"})
        plain_text = await router.get("/metrics")
    assert found.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    told = {
        (sample.name, sample.exemplar.labels["trace_id"])
        for family in text_string_to_metric_families(found.body.decode())
        for sample in family.samples
        if sample.exemplar is not None
        if sample.labels["model"] == stub.model
    }
    names = "kvroute_time_to_first_byte_seconds_bucket", "kvroute_request_seconds_bucket"
    assert told == {(name, "6" * 32) for name in names}
    assert plain_text.headers["content-type"].startswith("text/plain")
    assert b"trace_id" not in plain_text.body


async def test_a_collector_that_takes_nothing_costs_spans_and_no_request() -> None:
    """It is counted, and said once."""
    with otlp_collector() as collector:
        collector.status = 400
        config = {
            **TRACED,
            "observability": {"tracing": {"enabled": True, "endpoint": collector.url}},
        }
        with router_process(config, SOON) as router:
            async with engines(1) as (stub,), router.serving(stub):
                body = {"model": stub.model, "prompt": [1]}
                for batch in (1, 2):
                    assert (await router.post("/v1/completions", body)).status == 200
                    await asyncio.to_thread(collector.until, batch)
                await router.until(
                    lambda now: now.sum("kvroute_traces_total", result="failed") == 2,
                    "both counted",
                )
            assert router.log().count("traces cannot be delivered") == 1
        assert not collector.spans
