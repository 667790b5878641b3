"""Configures what the router reports about itself: logs, metrics, traces."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from router.config.section import Section
from router.config.values import PLAIN, Url


class TracingConfig(Section, frozen=True):
    """OpenTelemetry traces, over OTLP/HTTP; the standard's `OTEL_*` variables hold for the rest."""

    enabled: bool = False
    """Needs the extra `otel`.

    Change it when you want traces."""
    endpoint: Url | None = None
    """Base URL of the collector, as `http://collector:4318`; null: from
    `OTEL_EXPORTER_OTLP_ENDPOINT`.

    Change it when `OTEL_EXPORTER_OTLP_ENDPOINT` is not set, and the collector is not at
    `http://localhost:4318`; without `/v1/traces`."""
    sampled_share: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), PLAIN] | None = None
    """The share of the requests without a trace yet.

    Change it when fewer requests should be recorded than all. Requests whose client sent a
    `traceparent` are recorded if the client's was. Null: by `OTEL_TRACES_SAMPLER`, else all."""


class ObservabilityConfig(Section, frozen=True):
    """Configures logs, metrics and traces."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Change it when you want less: `warning` hides changes of state of event streams, which are
    logged as `info`."""
    log_format: Literal["text", "json"] = "text"
    """Change it when a log collector reads it: one JSON object per line; `serve --log-format`,
    `--log-level` override both."""
    access_log: bool = False
    """Change it when you want one line for each request: [operations.md](operations.md) has its
    fields."""
    allow_capture: bool = False
    """Change it when operators may record what a replica caches, with the prompts it is sent as
    token ids: `kvroute capture` with `--url`; on the command line `--allow-capture`."""
    metrics_need_key: bool = False
    """True: /metrics requires the operator's key.

    Change it when only some may scrape: `/metrics` then requires `operator_api_key`, which must be
    set."""
    tracing: TracingConfig = TracingConfig()
