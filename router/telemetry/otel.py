"""Spans of finished requests, made with OpenTelemetry's SDK and sent over OTLP/HTTP.

Everything here runs in one thread of its own, fed by a queue that is bounded: a collector that is
slow or away costs spans, which are counted, and no request.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any
from uuid import uuid4

from opentelemetry.attributes import BoundedAttributes
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import (
    OTEL_BSP_MAX_EXPORT_BATCH_SIZE,
    OTEL_BSP_MAX_QUEUE_SIZE,
    OTEL_BSP_SCHEDULE_DELAY,
    OTEL_EXPORTER_OTLP_PROTOCOL,
    OTEL_EXPORTER_OTLP_TRACES_PROTOCOL,
    OTEL_SDK_DISABLED,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.sampling import (
    Decision,
    ParentBased,
    Sampler,
    TraceIdRatioBased,
)
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)
from opentelemetry.util.types import AttributeValue

from router.config.server import TracingConfig
from router.errors import ConfigError, ConfigProblem
from router.plane.usage import ReportedUsage
from router.prompt.endpoints import FORMS, PROMPT_ENDPOINTS
from router.telemetry.metrics import WrittenCounter
from router.telemetry.spans import RequestTrace, TracedAttempt, Tracer, random_id
from router.telemetry.trace_context import TraceContext

logger = logging.getLogger(__name__)

_TRACES_EXPORTER = "OTEL_TRACES_EXPORTER"
_TRACES_PATH = "/v1/traces"
_STOP_S = 3.0
"""How long the last spans may take when the router stops."""
_MAX_REASON_CHARS = 300
_UNNAMED = "unknown_service"
_OPERATIONS = {endpoint.value: FORMS[endpoint].operation for endpoint in PROMPT_ENDPOINTS}


class OtelTracing:
    """Makes and sends the spans.

    `kvroute_traces_total` counts their outcomes: `exported`, `failed`, `dropped`.
    """

    def __init__(
        self, config: TracingConfig, environ: Mapping[str, str], counter: WrittenCounter
    ) -> None:
        """Read what is configured; nothing runs before `start`.

        Args:
            environ: As `os.environ`, which OpenTelemetry's SDK itself reads as well.
        Raises:
            ConfigError: A variable has a value that is not supported.
        """
        _check_protocol(environ)
        self._batch = _number(environ, OTEL_BSP_MAX_EXPORT_BATCH_SIZE, 512)
        self._bound = _number(environ, OTEL_BSP_MAX_QUEUE_SIZE, 2048)
        self._delay_s = _number(environ, OTEL_BSP_SCHEDULE_DELAY, 5000) / 1000
        self._exported = counter.labels("exported")
        self._failed = counter.labels("failed")
        self._dropped = counter.labels("dropped")
        endpoint = config.endpoint and config.endpoint.rstrip("/") + _TRACES_PATH
        self._exporter = OTLPSpanExporter(endpoint)  # None: as the environment has it
        self._maker = SpanMaker(_resource())
        self._sampler = _sampler(config)
        self._waiting: deque[RequestTrace] = deque()
        self._wake = threading.Event()
        self._complaint = _Complaint()
        self._is_stopping = False
        self._is_failing = False
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self.tracer = Tracer(self._is_sampled, self._take)
        """The tracer of requests."""

    def start(self) -> None:
        self._complaint.listen()
        self._thread.start()

    def stop(self) -> None:
        """Send the remaining spans, for a moment; blocks until then."""
        self._is_stopping = True
        self._wake.set()
        self._thread.join(_STOP_S)
        self._exporter.shutdown()  # type: ignore[no-untyped-call]
        self._thread.join(_STOP_S)
        self._complaint.close()

    # --- on the event loop ------------------------------------------------------------------------

    def _is_sampled(self, trace_id: str, context: TraceContext | None) -> bool:
        parent = None
        if context is not None:
            parent = set_span_in_context(NonRecordingSpan(_remote(context)))
        found = self._sampler.should_sample(parent, int(trace_id, 16), "").decision
        return found is Decision.RECORD_AND_SAMPLE

    def _take(self, trace: RequestTrace) -> None:
        if len(self._waiting) >= self._bound:
            self._dropped.inc()
            return
        self._waiting.append(trace)
        if len(self._waiting) >= self._batch:
            self._wake.set()

    # --- in the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_stopping:
            self._wake.wait(self._delay_s)
            self._wake.clear()
            self._send_waiting()
        self._send_waiting()

    def _send_waiting(self) -> None:
        while self._waiting:
            spans: list[ReadableSpan] = []
            requests = 0
            while self._waiting and len(spans) < self._batch:
                if made := self._made(self._waiting.popleft()):
                    spans += made
                    requests += 1
            if spans:
                self._send(spans, requests)

    def _made(self, trace: RequestTrace) -> list[ReadableSpan]:
        """The spans of a request; none if they cannot be made."""
        try:
            return self._maker.spans(trace)
        except Exception:
            logger.exception("a request could not be traced")
            self._failed.inc()
            return []

    def _send(self, spans: Sequence[ReadableSpan], requests: int) -> None:
        try:
            is_sent = self._exporter.export(spans) is SpanExportResult.SUCCESS
        except Exception:
            logger.exception("traces could not be exported")
            is_sent = False
        (self._exported if is_sent else self._failed).inc(requests)
        if is_sent and self._is_failing:
            logger.info("traces: the collector takes them again")
        elif not is_sent and not self._is_failing:
            logger.warning("traces cannot be delivered: %s", self._complaint.last)
        self._is_failing = not is_sent


class SpanMaker:
    """Makes the spans of requests, within the standard's limits on their attributes."""

    def __init__(self, resource: Resource) -> None:
        self._resource = resource
        self._scope = InstrumentationScope("kvroute", version("kvroute"))
        self._limits = SpanLimits()

    def spans(self, trace: RequestTrace) -> list[ReadableSpan]:
        parent = None if trace.context is None else _remote(trace.context)
        own = _context(trace, trace.span_id)
        parts = [self._part(trace, step.name, own, step.began, step.ended) for step in trace.steps]
        for made in trace.attempts_made:
            parts += self._attempt(trace, made, own)
        name = trace.method if trace.route is None else f"{trace.method} {trace.route}"
        error = _error(trace) if _is_servers(trace) else None
        facts = self._facts(SpanKind.SERVER, _request_attributes(trace), error)
        return [*parts, self._span(trace, name, own, parent, trace.began, trace.ended, **facts)]

    def _attempt(
        self, trace: RequestTrace, made: TracedAttempt, parent: SpanContext
    ) -> Iterator[ReadableSpan]:
        own, ended = _context(trace, made.span_id), made.ended or trace.ended
        first_byte = made.first_byte or ended
        yield self._part(trace, "first byte", own, made.began, first_byte)
        if made.first_byte is not None:
            yield self._part(trace, "response", own, first_byte, ended)
        name = f"attempt {made.attempt.replica_id}"
        facts = self._facts(SpanKind.CLIENT, _attempt_attributes(trace, made), made.failure)
        yield self._span(trace, name, own, parent, made.began, ended, **facts)

    def _part(
        self, trace: RequestTrace, name: str, parent: SpanContext, began: int, ended: int
    ) -> ReadableSpan:
        return self._span(trace, name, _context(trace, random_id(16)), parent, began, ended)

    def _span(
        self,
        trace: RequestTrace,
        name: str,
        own: SpanContext,
        parent: SpanContext | None,
        began: int,
        ended: int,
        **facts: Any,
    ) -> ReadableSpan:
        facts |= {"start_time": _unix(trace, began), "end_time": _unix(trace, ended)}
        scope = self._scope
        return ReadableSpan(name, own, parent, self._resource, instrumentation_scope=scope, **facts)

    def _facts(
        self, kind: SpanKind, attributes: Iterator[tuple[str, AttributeValue]], error: str | None
    ) -> dict[str, Any]:
        most, most_chars = self._limits.max_span_attributes, self._limits.max_span_attribute_length
        return {
            "kind": kind,
            "attributes": BoundedAttributes(most, dict(attributes), max_value_len=most_chars),
            "status": Status() if error is None else Status(StatusCode.ERROR, error),
        }


def _request_attributes(trace: RequestTrace) -> Iterator[tuple[str, AttributeValue]]:
    """Yield the attributes of the request's span. Nothing of a prompt but its length."""
    yield "http.request.method", trace.method
    yield "url.path", trace.path
    if trace.route is not None:
        yield "http.route", trace.route
    if trace.status is not None:
        yield "http.response.status_code", trace.status
    if (error := _error(trace)) is not None:
        yield "error.type", error
    request = trace.request
    if request is None:
        return
    yield from _model_attributes(trace)
    usage = ReportedUsage() if trace.usage is None else trace.usage.usage()
    for name, value in (
        ("gen_ai.request.stream", request.stream),
        ("gen_ai.usage.input_tokens", usage.prompt_tokens),
        ("gen_ai.usage.output_tokens", usage.completion_tokens),
        ("gen_ai.usage.cache_read.input_tokens", request.actual_tokens),
        ("gen_ai.response.time_to_first_chunk", request.first_byte_s),
        ("kvroute.request_id", request.request_id),
        ("kvroute.policy", request.policy),
        ("kvroute.replica", request.replica),
        ("kvroute.attempts", request.attempts),
        ("kvroute.prompt_tokens", request.prompt_tokens),
        ("kvroute.predicted_tokens", request.cached_tokens),
        ("kvroute.expected_tokens", request.expected_tokens),
        ("kvroute.end", request.end),
    ):
        if value is not None:
            yield name, value


def _attempt_attributes(
    trace: RequestTrace, made: TracedAttempt
) -> Iterator[tuple[str, AttributeValue]]:
    yield from _model_attributes(trace)
    origin = made.attempt.origin
    yield "server.address", origin.host
    yield "server.port", origin.port
    yield "kvroute.replica", made.attempt.replica_id
    yield "kvroute.predicted_tokens", made.predicted_tokens
    if made.resent:
        yield "http.request.resend_count", made.resent
    if made.failure is not None:
        yield "error.type", made.failure


def _model_attributes(trace: RequestTrace) -> Iterator[tuple[str, AttributeValue]]:
    operation = _OPERATIONS.get(trace.route or "")
    if operation is not None and trace.request is not None:
        yield "gen_ai.operation.name", operation
        yield "gen_ai.provider.name", "kvroute"
        yield "gen_ai.request.model", trace.request.model


def _error(trace: RequestTrace) -> str | None:
    """Return one word for the error."""
    end = None if trace.request is None else trace.request.end
    if trace.error is not None:
        return trace.error
    if end is not None and end != "completed":
        return end
    return str(trace.status) if (trace.status or 0) >= 400 else None


def _is_servers(trace: RequestTrace) -> bool:
    """Return whether the server is at fault; a 4xx is the client's (semantic conventions for
    HTTP)."""
    has_failed = trace.request is not None and trace.request.has_failed
    return has_failed or (trace.status or 0) >= 500


class _Complaint(logging.Handler):
    """Keeps the exporter's last complaint: one for each batch would fill the log while a collector
    is away."""

    def __init__(self) -> None:
        super().__init__()
        self.last = "no reason given"
        self._logger = logging.getLogger(OTLPSpanExporter.__module__)

    def listen(self) -> None:
        """Take its complaints out of the log."""
        self._logger.addHandler(self)
        self._logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        self.last = record.getMessage()[:_MAX_REASON_CHARS]

    def close(self) -> None:
        self._logger.removeHandler(self)
        self._logger.propagate = True
        super().close()


def _context(trace: RequestTrace, span_id: str) -> SpanContext:
    sampled = TraceFlags(TraceFlags.SAMPLED)
    return SpanContext(int(trace.trace_id, 16), int(span_id, 16), False, sampled)


def _remote(context: TraceContext) -> SpanContext:
    flags = TraceFlags(TraceFlags.SAMPLED if context.is_sampled else TraceFlags.DEFAULT)
    return SpanContext(int(context.trace_id, 16), int(context.parent_id, 16), True, flags)


def _unix(trace: RequestTrace, moment: int) -> int:
    """A moment of the monotonic clock as Unix time."""
    return trace.started_at + moment - trace.began


def _resource() -> Resource:
    """The router's resource. The environment's attributes come first."""
    attributes = Resource.create().attributes
    is_named = not str(attributes.get("service.name", _UNNAMED)).startswith(_UNNAMED)
    own = {"service.version": version("kvroute"), "service.instance.id": str(uuid4())}
    own = {name: value for name, value in own.items() if name not in attributes}
    return Resource.create(own if is_named else {**own, "service.name": "kvroute"})


def _sampler(config: TracingConfig) -> Sampler:
    if config.sampled_share is not None:
        return ParentBased(TraceIdRatioBased(config.sampled_share))
    return TracerProvider(shutdown_on_exit=False).sampler


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    given = environ.get(name, "").strip()
    if not given:
        return default
    if not (given.isascii() and given.isdigit() and len(given) < 10 and int(given) > 0):
        rule = "must be a whole number above 0"
        raise ConfigError([ConfigProblem(name, f"{given[:40]!r}; {rule}")])
    return int(given)


def _check_protocol(environ: Mapping[str, str]) -> None:
    for name in (OTEL_EXPORTER_OTLP_TRACES_PROTOCOL, OTEL_EXPORTER_OTLP_PROTOCOL):
        given = environ.get(name)
        if given:
            if given != "http/protobuf":
                rule = "the router sends http/protobuf only"
                raise ConfigError([ConfigProblem(name, f"{given[:40]!r}; {rule}")])
            return


def make_tracing(
    config: TracingConfig, environ: Mapping[str, str], counter: WrittenCounter
) -> OtelTracing | None:
    """Make the tracing; None where the standard's variables turn it off.

    Raises:
        ConfigError: A variable has a value that is not supported.
    """
    is_off = environ.get(OTEL_SDK_DISABLED, "").strip().lower() == "true"
    if is_off or environ.get(_TRACES_EXPORTER, "").strip() == "none":
        logger.info("traces: turned off by the environment")
        return None
    return OtelTracing(config, environ, counter)
