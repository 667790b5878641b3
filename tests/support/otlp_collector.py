"""A collector of traces: an HTTP server that takes OTLP as protobuf, and decodes it."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from tests.support.waiting import DEADLINE_S


@dataclass(frozen=True)
class ReceivedSpan:
    """One span, with the names of the wire."""

    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    began: int
    ended: int
    is_error: bool
    attributes: dict[str, Any]


@dataclass
class OtlpCollector:
    """What has been received. `status` is what is answered."""

    port: int
    status: int = 200
    spans: list[ReceivedSpan] = field(default_factory=list)
    resources: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def take(self, headers: dict[str, str], body: bytes) -> int:
        if headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        request = ExportTraceServiceRequest.FromString(body)
        with self._changed:
            self.headers.append(headers)
            self.raw.append(body)
            if self.status == 200:
                self._keep(request)
            self._changed.notify_all()
        return self.status

    def _keep(self, request: ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            self.resources.append(plain(resource.resource.attributes))
            for scope in resource.scope_spans:
                self.spans += [
                    ReceivedSpan(
                        span.name,
                        span.kind,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        span.start_time_unix_nano,
                        span.end_time_unix_nano,
                        span.status.code == 2,
                        plain(span.attributes),
                    )
                    for span in scope.spans
                ]

    def trace(self, trace_id: str) -> list[ReceivedSpan]:
        """The spans of one trace, once its first has come: those of one request come together."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._of(trace_id), DEADLINE_S):
                raise AssertionError(f"no span of {trace_id}: {[each.name for each in self.spans]}")
            return self._of(trace_id)

    def until(self, requests: int) -> None:
        """Wait for so many requests, however they were answered."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.raw) >= requests, DEADLINE_S)

    def _of(self, trace_id: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.trace_id == trace_id]


def plain(attributes: Any) -> dict[str, Any]:
    return {each.key: value_of(each) for each in attributes}


def value_of(pair: KeyValue) -> Any:
    value: AnyValue = pair.value
    return getattr(value, str(value.WhichOneof("value")))


@contextmanager
def otlp_collector() -> Iterator[OtlpCollector]:
    """One that runs."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["content-length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            self.send_response(collector.take(headers, body))
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: the test says what it misses."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collector = OtlpCollector(server.server_port)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
